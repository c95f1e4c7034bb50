"""What tests/workload.py lets a profiler look at: the shape that stands for a family launches it, and no other.

Which kernels those are does not depend on the number of rows, of which fewer are taken here for time.
"""

import functools
import math
import re

import emulated_build
import emulated_ops
import pytest
from workload import FAMILIES, Family, launch

CUDA = emulated_build.ROOT / "csrc" / "cuda"

# Family -> what is launched, and what the instance of its own kernel has in its name
LAUNCHED = {
    "forward_rows_warp": ({"forward_rows"}, "Tile<8, 4>"),
    "forward_rows_block": ({"forward_rows"}, "Tile<512, 4>"),
    "forward_chunk_in_cluster": ({"forward_chunk_in_cluster"}, ""),
    "forward_in_cluster": ({"forward_in_cluster"}, ""),
    "forward_moments": ({"forward_moments", "forward_output"}, ""),
    "forward_output": ({"forward_moments", "forward_output"}, ""),
    "backward_rows_in_one_launch": ({"backward_rows"}, "WarpTile"),
    "backward_rows_warp": ({"backward_rows", "add_partials"}, "WarpTile"),
    "backward_rows_block": ({"backward_rows", "add_partials"}, "BlockTile"),
    "backward_rows_cluster": ({"backward_rows", "add_partials"}, "BlockTile"),
    "backward_rows_after_sums": ({"backward_sums", "backward_rows", "add_partials"}, "BlockTile"),
    "backward_sums": ({"backward_sums", "backward_rows", "add_partials"}, ""),
    "add_partials": ({"backward_rows", "add_partials"}, ""),
    "channels_first_forward": ({"channels_first_forward"}, "true>"),
    "channels_first_forward_not_staged": ({"channels_first_forward"}, "false>"),
    "channels_first_backward": ({"channels_first_backward", "add_partials"}, "true>"),
    "channels_first_backward_not_staged": ({"channels_first_backward", "add_partials"}, "false>"),
}
LAUNCHED_FUNCTIONS = {name: functions for name, (functions, _) in LAUNCHED.items()}
# What takes the place of a cluster where there is none.
WITHOUT_CLUSTERS = {
    "forward_chunk_in_cluster": {"forward_moments", "forward_output"},
    "forward_in_cluster": {"forward_moments", "forward_output"},
    "backward_rows_cluster": {"backward_sums", "backward_rows", "add_partials"},
}


@functools.cache
def launched_by(shape, backward, architecture):
    """Return the kernels of a pass over few of the rows, by the names of their functions."""
    library = emulated_ops.library(emulated_build.CHECKED)
    family = Family("", shape, backward)
    rows = min(shape[0], max(1, (1 << 17) // math.prod(shape[1:])))
    library.launched()
    with library.schedule("random", 1, 2, architecture=architecture):
        results = launch(family, library.ops, "cpu", rows)
    assert all(result.isfinite().all() for result in results)
    found = {}
    for kernel in library.launched():
        function = kernel.partition("<")[0].rpartition(":")[2]
        assert function not in found, (kernel, found[function])
        found[function] = kernel
    return found


def launched(name, architecture):
    family = FAMILIES[name]
    return launched_by(family.shape, family.backward, architecture)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_launched(name):
    functions, instance = LAUNCHED[name]
    found = launched(name, 90)
    assert found.keys() == functions
    assert instance in found[FAMILIES[name].kernel]


@pytest.mark.parametrize("name", FAMILIES)
def test_clusters_need_a_compute_capability(name):
    """The family's: where there are none, other kernels take their place."""
    needs_clusters = FAMILIES[name].capability > (8, 0)
    assert launched(name, 80).keys() == (WITHOUT_CLUSTERS if needs_clusters else LAUNCHED_FUNCTIONS)[name]


def test_every_kernel_is_of_a_family():
    sources = "".join(path.read_text() for path in CUDA.iterdir())
    kernels = set(re.findall(r"__global__ void\s+__launch_bounds__\([^;{]*?\)\s+(\w+)\(", sources))
    assert {family.kernel for family in FAMILIES.values()} == kernels
