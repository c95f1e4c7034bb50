"""The CPU kernels for each lesser instruction set of this machine pass the tests of results, and give the same bits.

torch chooses the instruction set when it is loaded, so that each needs a process of its own.

bits.json has a hash of the results of each function. A change that alters results on purpose writes it again:
`for set in default avx2 avx512; do ATEN_CPU_CAPABILITY=$set python tests/kernels/test_instruction_sets.py; done`.
"""

import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.reference import BF16, F16, F32, F64

import layernorm_ext
from layernorm_ext import _C

TESTS = Path(__file__).parent
FILES = [__file__, *(str(TESTS / f"test_{name}.py") for name in ("forward", "backward", "family", "channels_first"))]

# The instruction set changes the width of vectors, and so all tails; conversions; and the order of summation. These
# dtypes cover each conversion. Tests of NaN, of rounding, of promised errors and of writes outside run with all dtypes.
SELECTED = (
    "(fp64 or fp16-fp32 or bf16-fp32 or nan or round or recorded or outside or weights_of_any_size or equal_terms)"
    " and not (numbers_of_rows or large_means or mask)"
)

SETS = ["DEFAULT", "AVX2", "AVX512"]
own = torch.backends.cpu.get_cpu_capability()


def test_best_set_is_used():
    assert _C.cpu_capability() == (own if own in SETS else "DEFAULT")


@pytest.mark.parametrize("capability", SETS[: SETS.index(own)] if own in SETS else [])
def test_lesser_set(capability):
    options = ["-k", SELECTED, "-m", "not large and not integration", "-p", "no:cacheprovider"]
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability.lower()}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-m", "pytest", *options, *FILES]
    done = subprocess.run(command, cwd=TESTS.parents[1], env=environment, capture_output=True, text=True)
    assert f"CPU kernels {capability}," in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100 and " skipped" not in done.stdout


BITS = TESTS / "bits.json"
RECORDED = json.loads(BITS.read_text())
DTYPES = [(F64, F64), (F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32)]
SHAPES = [(1, 1), (3, 7), (64, 33), (2100, 64), (300, 768), (40, 1000), (7, 2500), (2, 70000)]
IMAGES = [(2, 3, 5, 7), (3, 96, 9, 9), (2, 192, 28, 28)]


@functools.cache
def values(shape, dtype, seed):
    """Return numbers in [-2, 2), some of them near 100, which depend on nothing but exact arithmetic."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64) + 7919 * seed
    numbers = (i * 2654435761 % 2**32).double() / 2**30 - 2
    return torch.where(i % 97 == 0, numbers + 100, numbers).to(dtype).view(shape)


def digests():
    """Return a hash of the outputs and gradients of each function."""
    found = {}
    for name in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "layer_norm_2d"):
        norm, adds, images = getattr(layernorm_ext, name), "add" in name, "2d" in name
        digest = hashlib.sha256()
        for shape, (dtype, parameter_dtype) in itertools.product(IMAGES if images else SHAPES, DTYPES):
            for with_weight, zero_centered in ((True, False), (True, True), (False, False))[:: 2 if images else 1]:
                x, r = (values(shape, dtype, seed).clone().requires_grad_() for seed in (1, 2))
                w, b = (values(shape[1:2], parameter_dtype, seed).clone().requires_grad_() for seed in (3, 4))
                inputs = [x, r] if adds else [x]
                parameters = ([w] if "rms" in name else [w, b]) if with_weight else []
                sizes = [] if images else [shape[1:]]
                options = {"zero_centered_weight": True} if zero_centered else {}
                outputs = norm(*inputs, *sizes, *parameters, **options)
                outputs = outputs if adds else (outputs,)
                grad_outputs = [values(y.shape, y.dtype, 5 + i) for i, y in enumerate(outputs)]
                for tensor in (*outputs, *torch.autograd.grad(outputs, [*inputs, *parameters], grad_outputs)):
                    digest.update(tensor.detach().contiguous().view(torch.uint8).numpy())
        found[name] = digest.hexdigest()[:16]
    return found


def test_results_have_the_recorded_bits():
    assert digests() == RECORDED[_C.cpu_capability()]


if __name__ == "__main__":
    BITS.write_text(json.dumps(RECORDED | {_C.cpu_capability(): digests()}, indent=1) + "\n")
