"""The CPU kernels for each lesser instruction set of this machine pass the tests of results and bits.

torch chooses the instruction set when it is loaded, so that each needs a process of its own.
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
FILES = [str(TESTS / f"test_{name}.py") for name in ("forward", "backward", "family", "channels_first", "bits")]

# The instruction set changes the width of vectors, and so all tails; conversions; and the order of summation. These
# dtypes cover each conversion. Tests of NaN and of rounding run with all dtypes.
SELECTED = (
    "(fp64 or fp16-fp32 or bf16-fp32 or nan or round or recorded) and not (numbers_of_rows or large_means or mask)"
)

SETS = ["DEFAULT", "AVX2", "AVX512"]
own = torch.backends.cpu.get_cpu_capability()


def test_best_set_is_used():
    assert _C.cpu_capability() == (own if own in SETS else "DEFAULT")


@pytest.mark.parametrize("capability", SETS[: SETS.index(own)] if own in SETS else [])
def test_lesser_set(capability, tmp_path):
    report = tmp_path / "report.xml"
    options = ["-k", SELECTED, "-m", "not large and not integration", "-p", "no:cacheprovider", f"--junitxml={report}"]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability.lower()}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", "pytest", *options, *FILES]
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert f"CPU kernels {capability}," in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    suite = ET.parse(report).getroot().find("testsuite")
    assert int(suite.get("tests")) > 100 and int(suite.get("skipped")) == 0
