"""The CPU kernels for each lesser instruction set of this machine pass the tests of results and give the recorded bits.

All other tests run the kernels for the machine's best set, as users do. torch chooses the instruction set when it is
loaded, so that each set needs a process of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from layernorm_ext import _C

TESTS = Path(__file__).parent
FILES = [str(TESTS / f"test_{name}.py") for name in ("bits", "forward", "backward", "family", "invariance")]

# The instruction set changes the width of vectors, and with it the tails of rows, conversions between dtypes, aligned
# stores, and the order of summation. The dtypes in SELECTED cover each conversion, and bfloat16 all stores. Tests
# of NaN, of rounding, of promised errors and of writes outside of results run with all dtypes. The tests that are left
# out concern the host's code, or loops that are the same for each set; test_bits.py runs every member of the family.
SELECTED = (
    "(fp64 or fp16-fp32 or bf16-fp32 or nan or round or recorded or outside or equal_terms or flushing)"
    " and not (numbers_of_rows or large_means or mask or threads or layout or other_dtypes or empty or samples"
    " or variants or residual or weights or from_the_output or million)"
    " and not ((address or large) and (fp64 or fp16))"
)

SETS = ["DEFAULT", "AVX2", "AVX512"]
best = torch.backends.cpu.get_cpu_capability()


def test_best_set_is_used():
    assert _C.cpu_capability() == (best if best in SETS else "DEFAULT")


@pytest.mark.integration
@pytest.mark.parametrize("capability", SETS[: SETS.index(best)] if best in SETS else [])
def test_lesser_set(capability):
    options = ["-k", SELECTED, "-m", "not integration", "-p", "no:cacheprovider"]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability.lower()}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", "pytest", *options, *FILES]
    done = subprocess.run(command, cwd=TESTS.parents[1], env=environment, capture_output=True, text=True)
    assert f"CPU kernels {capability}," in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100 and " skipped" not in done.stdout
