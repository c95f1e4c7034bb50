"""The other tests once more, in each lesser instruction set that this machine has besides its own.

torch chooses the set when it is loaded, and can be told to choose a lesser one: hence a process for each.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from layernorm_ext import _C

TESTS = Path(__file__).parent

SETS = ["DEFAULT", "AVX2", "AVX512"]
own = torch.backends.cpu.get_cpu_capability()
lesser = SETS[: SETS.index(own)] if own in SETS else []

# What depends on the instruction set: the width of the packs and so all tails, conversions, orders of summation.
SELECTED = "columns_and_rows or rows_of or constant or subnormal or nan_keeps or masks or huge_numbers or beyond"
SELECTED += " or forward_and_backward or test_residual or from_output or in_place"
SELECTED += " or round_to_even or rounds_as_torch or test_pixels or numbers_of_channels or nan_and_inf"


def test_own_set_is_used():
    assert _C.cpu_capability() == (own if own in SETS else "DEFAULT")


@pytest.mark.parametrize("capability", lesser)
def test_lesser_set(capability, tmp_path):
    report = tmp_path / "report.xml"
    files = [
        str(TESTS / f"test_{name}.py") for name in ("forward", "backward", "invariance", "family", "channels_first")
    ]
    options = ["-k", SELECTED, "-m", "not large", "-p", "no:cacheprovider", f"--junitxml={report}"]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability.lower()}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert f"CPU kernels {capability}," in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    suite = ET.parse(report).getroot().find("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    assert counts["tests"] > 100 and not (counts["failures"] or counts["errors"] or counts["skipped"]), counts
