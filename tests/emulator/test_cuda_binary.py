"""The compiled kernels keep values in registers, move 16 bytes at a time, and leave the L1 cache valid."""

import itertools
import re

import cuda_binary
import emulated_build
import emulated_ops
import pytest
from reference import DTYPES
from test_kernels import STAGED, TILES, arguments, images, run, run_images

from layernorm_ext import _build_info

pytestmark = pytest.mark.skipif(
    not _build_info.with_cuda, reason="the package was built without CUDA; FORCE_CUDA=1 builds it, without a GPU"
)


@pytest.fixture(scope="module", params=sorted(cuda_binary.kernels()) if _build_info.with_cuda else [0])
def architecture(request):
    return request.param


@pytest.fixture(scope="module")
def kernels(architecture):
    """Return the kernels that have code: those for clusters only trap on GPUs without clusters."""
    return [k for k in cuda_binary.disassembled(architecture) if architecture >= 90 or "in_cluster" not in k.name]


def test_no_kernel_uses_local_memory(kernels):
    assert [k.name for k in kernels if k.local or k.count("LDL") or k.count("STL")] == []


def test_rows_are_moved_by_16_bytes(kernels):
    """Each row kernel fetches and stores the vectors of a full tile, of which a thread has up to four."""
    row_kernels = [
        k for k in kernels if re.search(r"(forward|backward)_(rows|\w*in_cluster|moments|output|sums)<", k.name)
    ]
    assert row_kernels
    for kernel in row_kernels:
        vectors = int(re.search(r"Tile<\d+, (\d+)>|$", kernel.name)[1] or 4)
        uses_bulk_copies = kernel.count("UBLKCP")  # one instruction copies a row
        assert uses_bulk_copies or kernel.count("LDGSTS", "128") >= vectors, kernel.name
        if not re.search("_(moments|sums)<", kernel.name):
            assert kernel.count("STG", "128") >= vectors, kernel.name


def test_only_cluster_barriers_invalidate_l1(kernels):
    """The wait for a copy must not: weights and statistics are then read from L1 again."""
    assert [k.name for k in kernels if k.count("CCTL", "IVALL") > k.count("UCGABAR_WAIT")] == []


def test_emulated_calls_reach_every_kernel(kernels, architecture):
    """The compiled package has no other kernels than those that run in the emulator, and at most 120."""
    library = emulated_ops.library(emulated_build.PLAIN)
    library.launched()
    with library.schedule(architecture=architecture, one_launch_limit=0):
        for dtypes, limit in itertools.product(DTYPES, [*TILES, 2049, 8193]):
            x, dy, w, b = arguments(1, limit * 16 // dtypes[0].itemsize, dtypes)
            run(library, x, dy, w, b)
            run(library, x, dy, None, None)  # parameters of the input's dtype
    for dtypes, path_limit in itertools.product(DTYPES, STAGED):
        x, dy, w, b = arguments(1, 81 * 32 * 16 // dtypes[0].itemsize, dtypes)
        with library.schedule(architecture=architecture, path_limit=path_limit):
            run(library, x, dy, w, b)
            run_images(library, *images((1, 2, 3), dtypes))
    assert library.launched() == {kernel.name for kernel in kernels}
    assert len(kernels) <= 120
