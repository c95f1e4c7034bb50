"""The scripts of docs/examples run, and print what they promise."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import import_torchvision

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
NUMBER = r"(\d[\d.e+-]*)"
# Example -> a pattern of its output, and a condition on the numbers in it.
PROMISES = {
    "gpt_block": (rf"step 0: loss {NUMBER}\n.*\nstep 100: loss {NUMBER}", lambda first, last: last < first / 10),
    "convert_transformers": (
        rf"{NUMBER} replaced, {NUMBER} skipped(?s:.*)difference from the original {NUMBER}",
        lambda replaced, skipped, difference: replaced == 5 and skipped == 0 and difference < 1e-5,
    ),
    "fsdp2": (
        rf"holds {NUMBER} of the {NUMBER} weights(?s:.*)difference from one process {NUMBER}",
        lambda held, weights, difference: held == weights / 2 and difference < 1e-5,
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=[pytest.mark.integration] if "transformers" in path.stem else [])
        for path in sorted(EXAMPLES.glob("*.py"))
    ],
)
def test_example_keeps_its_promise(name, one_thread, capsys):
    if "transformers" in name:
        import_torchvision()
        pytest.importorskip("transformers")
    script = EXAMPLES / f"{name}.py"
    if name == "fsdp2":  # its processes import the main module
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        output = subprocess.check_output([sys.executable, "-P", script], text=True, env=environment)
    else:
        runpy.run_path(str(script), run_name="__main__")
        output = capsys.readouterr().out
    pattern, holds = PROMISES[name]
    numbers = re.search(pattern, output)
    assert numbers and holds(*map(float, numbers.groups())), output
