"""The scripts of docs/examples run, and print what they promise."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
# Example -> a pattern of its output: the loss falls, and differences from the original are at most 9e-6.
SMALL = r"(0e\+00|\de-(0[6-9]|1\d))\n"
PROMISES = {
    "gpt_block": r"step 0: loss [2-9]\.\d+\n.*\nstep 100: loss 0\.[01]",
    "convert_transformers": rf"5 replaced, 0 skipped(?s:.*)difference from the original {SMALL}",
    "fsdp2": rf"holds 16 of the 32 weights(?s:.*)difference from one process {SMALL}",
}


def parameter(name):
    return pytest.param(name, marks=[pytest.mark.integration] if "transformers" in name else [])


@pytest.mark.parametrize("name", [parameter(path.stem) for path in sorted(EXAMPLES.glob("*.py"))])
def test_example_keeps_its_promise(name, one_thread, capsys, request):
    if "transformers" in name:
        request.getfixturevalue("torchvision")
        pytest.importorskip("transformers")
    script = EXAMPLES / f"{name}.py"
    if name == "fsdp2":  # its processes import the main module
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        output = subprocess.check_output([sys.executable, "-P", script], text=True, env=environment)
    else:
        runpy.run_path(str(script), run_name="__main__")
        output = capsys.readouterr().out
    assert re.search(PROMISES[name], output), output
