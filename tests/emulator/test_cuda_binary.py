"""The compiled kernels keep values in registers and move 16 bytes at a time."""

import itertools
import re

import cuda_binary
import emulated_build
import pytest
from support.backends import run, run_pixels
from support.inputs import amid_nans, random_args
from support.reference import RESIDUALS

from layernorm_ext import _build_info

pytestmark = pytest.mark.skipif(not _build_info.with_cuda, reason="built without CUDA; FORCE_CUDA=1 needs no GPU")


@pytest.fixture(scope="module", params=sorted(cuda_binary.kernels()) if _build_info.with_cuda else [0])
def kernels(request):
    return cuda_binary.disassembled(request.param)


def test_no_kernel_uses_local_memory(kernels):
    assert [k.name for k in kernels if k.local or k.count("LDL") or k.count("STL")] == []


def test_rows_and_pixels_are_moved_by_16_bytes(kernels):
    """The output of forward has 16 bits, and so 8 bytes per vector, if only the input is float32."""
    for kernel in kernels:
        if kernel.function.startswith("channels_first") or kernel.function.endswith("_rows"):
            assert kernel.count("LDGSTS", "128"), kernel.name
            narrow = kernel.count("STG", "64") and re.search(r"Types<(?!(\w+), \1\b)", kernel.name)
            is_forward = kernel.function.endswith("_rows") and kernel.function != "backward_rows"
            is_whole = kernel.function != "backward_rows" or "Vectors" in kernel.name  # rows of whole vectors
            assert kernel.count("STG", "128") or (is_forward and narrow) or not is_whole, kernel.name


def test_emulated_calls_reach_every_kernel(kernels):
    """The compiled package has no other kernels than those that run in the emulator, and at most 70.

    Rows are whole vectors, or one element less; and then without parameters and at any address.
    """
    library = emulated_build.library(emulated_build.PLAIN)
    library.launched()
    for dtypes, vectors, missing in itertools.product(RESIDUALS, (64, 130), (0, 1)):
        x, dy, w, b = random_args(library, dtypes[:2], 40, vectors * 16 // dtypes[2].itemsize - missing)
        with library.schedule(architecture=kernels[0].architecture):
            for run_layout in (run, run_pixels):
                run_layout(library, x, dy, w, b, residual=x.to(dtypes[2]))
                run_layout(library, x, amid_nans(dy), residual=x.to(dtypes[2]))
    assert {name for name, _ in library.launched()} == {kernel.name for kernel in kernels}
    assert len(kernels) <= 70
