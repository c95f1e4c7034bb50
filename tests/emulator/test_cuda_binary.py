"""The compiled kernels keep their values in registers, move 16 bytes at a time, and leave the L1 cache alone."""

import itertools
import re

import cuda_binary
import emulated_build
import emulated_ops
import pytest
from cuda_binary import count
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
    return cuda_binary.disassembled(architecture)


def test_nothing_spills(kernels):
    """Neither to a stack nor, by an index that only the program knows, to local memory."""
    assert [k.name for k in kernels if k.stack or count(k, "LDL") or count(k, "STL")] == []


def has_code(kernel, architecture):
    """Say whether a kernel does anything: those for clusters only trap on GPUs that have none."""
    return architecture >= 90 or "in_cluster" not in kernel.name


def test_rows_are_moved_by_16_bytes(kernels, architecture):
    """Each row kernel fetches and stores a full tile in vectors, of which a thread has up to four."""
    for kernel in kernels:
        match = re.search(r"(forward|backward)_(rows|\w*in_cluster|moments|output|sums)<", kernel.name)
        if not match or not has_code(kernel, architecture):
            continue
        vectors = int(re.search(r"Tile<\d+, (\d+)>|$", kernel.name)[1] or 4)
        in_bulk = count(kernel, "UBLKCP")  # copies of any length, one for a row
        assert in_bulk or count(kernel, "LDGSTS", "128") >= vectors, kernel.name
        if match[2] not in ("moments", "sums"):
            assert count(kernel, "STG", "128") >= vectors, kernel.name


def test_l1_is_invalidated_by_cluster_barriers_alone(kernels):
    """Not by the wait for a copy, after which the weights and the statistics are read again from L1."""
    assert [k.name for k in kernels if count(k, "CCTL", "IVALL") > count(k, "UCGABAR_WAIT")] == []


def test_every_kernel_is_run(kernels, architecture):
    """The kernels in the compiled package are those that run in the emulator."""
    library = emulated_ops.library(emulated_build.PLAIN)
    library.launched()
    with library.schedule(architecture=architecture, one_launch_limit=0):
        for dtypes, limit in itertools.product(DTYPES, [*TILES, 2049, 8193]):
            x, dy, w, b = arguments(1, limit * 16 // dtypes[0].itemsize, dtypes)
            run(library, x, dy, w, b)
            run(library, x, dy, None, None)  # parameters like the input
    for dtypes, path_limit in itertools.product(DTYPES, STAGED):
        x, dy, w, b = arguments(1, 81 * 32 * 16 // dtypes[0].itemsize, dtypes)
        with library.schedule(architecture=architecture, path_limit=path_limit):
            run(library, x, dy, w, b)
            run_images(library, *images((1, 2, 3), dtypes))
    assert library.launched() == {kernel.name for kernel in kernels if has_code(kernel, architecture)}


def test_number_of_kernels(kernels):
    """A limit that this project sets itself: 120 kernels an architecture."""
    assert 100 < len(kernels) <= 120
