"""The compiled kernels keep values in registers and move 16 bytes at a time."""

import itertools
import re

import cuda_binary
import emulated_build
import pytest
import torch
from support.backends import run, run_pixels
from support.inputs import amid_nans, random_args
from support.reference import RESIDUALS

from layernorm_ext import _build_info

pytestmark = pytest.mark.skipif(not _build_info.with_cuda, reason="built without CUDA; FORCE_CUDA=1 needs no GPU")


ARCHITECTURES = sorted(cuda_binary.kernels()) if _build_info.with_cuda else [0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_local_memory_and_vectors_of_16_bytes(architecture):
    """A thread loads all its vectors of a row, or copies at least two to shared memory. A loop copies images."""
    kernels = cuda_binary.disassembled(architecture)
    assert [k.name for k in kernels if k.local or k.count("LDL") or k.count("STL")] == []
    for kernel in kernels:
        if kernel.function.startswith("channels_first"):
            assert kernel.count("LDGSTS", "128") > 0 and kernel.count("STG", "128") > 0, kernel.name
        elif kernel.function == "forward_registers":
            t, x, vectors = re.search(r"<(\w+), (\w+), (\d), \d>", kernel.name).groups()
            # The output has 16 bits, and so 8 bytes per vector, if only x is float32.
            narrow = kernel.count("STG", "64") if t != x else 0
            assert kernel.count("LDG", "128") >= int(vectors), kernel.name
            assert kernel.count("STG", "128") + narrow >= int(vectors), kernel.name
        elif kernel.function in ("forward_staged", "backward_staged"):
            assert kernel.count("LDGSTS", "128") >= 2, kernel.name  # rows that are not whole vectors too
            if "Vectors" in kernel.name:
                assert kernel.count("STG", "128") >= 2, kernel.name


@pytest.mark.parametrize("has_clusters", sorted({architecture >= 90 for architecture in ARCHITECTURES}))
def test_emulated_calls_reach_every_kernel(has_clusters):
    """The compiled package has only kernels that run in the emulator, and at most 62.

    Rows are whole vectors, or one element shorter. Each shape is also run without parameters, with dy at any address.
    """
    architectures = [a for a in ARCHITECTURES if (a >= 90) == has_clusters]
    library = emulated_build.library(emulated_build.PLAIN)
    library.launched()
    lengths = [(40, 16), (40, 64), (40, 130), (2, 1030), (2, 2570)]
    for dtypes, (rows, vectors), missing in itertools.product(RESIDUALS, lengths, (0, 1)):
        if torch.float64 in dtypes:
            continue  # computed by aten's operations
        x, dy, w, b = random_args(library, dtypes[:2], rows, vectors * 16 // dtypes[2].itemsize - missing)
        with library.schedule(architecture=90 if has_clusters else 80):
            run(library, x, dy, w, b, residual=x.to(dtypes[2]))
            run(library, x, amid_nans(dy), residual=x.to(dtypes[2]))
            if dtypes[0] == dtypes[2]:
                run(library, x, dy, w, b, memory_efficient=True)
                run_pixels(library, x, dy, w, b)
                run_pixels(library, x, amid_nans(dy))
                statistics = library.ops.forward.fused(x, x.shape[1:], w, b, 1e-5, x, None, w)[2:]
                arguments = (dy, x, x.shape[1:], *statistics, w, b, [True] * 6)
                library.ops.backward(*arguments, x, None, w, x)
                library.ops.forward.fused(x, x.shape[1:], w, b, 1e-5, None, dy)
                library.ops.backward(*arguments, None, dy)
    launched = {name for name, _ in library.launched()}
    for architecture in architectures:
        names = {kernel.name for kernel in cuda_binary.kernels()[architecture].values()}
        assert len(names) <= 62
        if not has_clusters:
            # GeneralRows takes the rows of whole vectors that are too long for forward_registers.
            names = {name for name in names if not ("forward_staged" in name and "BlockVectors" in name)}
        assert launched == names, architecture
