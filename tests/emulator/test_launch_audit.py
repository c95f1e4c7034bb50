"""No GPU refuses a launch of the compiled package, and the audit reports planted launches that a GPU refuses."""

import csv
import re
import subprocess
import sys

import cuda_binary
import emulated_build
import launch_audit
import pytest

from layernorm_ext import _build_info

PLANTED = emulated_build.EMULATOR / "refused_launches.cu"
CASES = re.findall(r'^    \{"(\w+)"', PLANTED.read_text(), re.M)
needs_cuda_build = pytest.mark.skipif(
    not _build_info.with_cuda, reason="the package was built without CUDA; FORCE_CUDA=1 builds it, without a GPU"
)


@needs_cuda_build
def test_no_gpu_refuses_a_launch():
    done = subprocess.run([sys.executable, launch_audit.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(.*): 0 of \d{5} calls refused$", done.stdout, re.M) == [str(t) for t in launch_audit.TARGETS]


@needs_cuda_build
def test_launches_hide_latency():
    """Enough bytes are in flight. For rows of up to 16 Ki elements two blocks are resident, of 16 warps together."""
    command = [sys.executable, launch_audit.__file__, "--table"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    launches = list(csv.DictReader(lines))
    assert len(launches) >= 4 * len(launch_audit.TABLE_COLS)
    for launch in launches:
        assert int(launch["bytes in flight per SM"]) >= 32 * 1024, launch
        if int(launch["cols"]) <= 16384:
            assert int(launch["blocks per SM"]) >= 2 and int(launch["warps per SM"]) >= 16, launch


# A change of the geometry shows here. `queries` are calls of the CUDA runtime in every call but the first, besides the
# launches; `shared` are bytes of dynamic shared memory.
PLANS_ON_H200 = """\
operator                  dtype     shape        kernel                    grid        block  cluster  shared  launches  queries
forward                   bfloat16  4096x64      forward_rows<WarpTile>    64x1x1      128    1        9216    1         1
forward                   bfloat16  4096x1024    forward_rows<WarpTile>    1024x1x1    128    1        8256    1         1
forward                   bfloat16  4096x16384   forward_rows<BlockTile>   4096x1x1    256    1        32800   1         1
forward                   bfloat16  512x65536    forward_rows<BlockTile>   4096x1x1    256    8        16400   1         1
forward                   float32   16x4194304   forward_rows<BlockTile>   16384x1x1   256    1        16400   2         1
backward                  bfloat16  4096x64      backward_rows<WarpTile>   1x32x1      256    1        73728   1         1
backward                  bfloat16  4096x64      add_partials              2x1x2       256    1        0       1         1
backward                  bfloat16  4096x1024    backward_rows<WarpTile>   1x256x1     256    1        66048   1         1
backward                  bfloat16  4096x1024    add_partials              32x1x2      256    1        0       1         1
backward                  bfloat16  4096x16384   backward_rows<BlockTile>  2x128x1     256    2        65600   1         1
backward                  bfloat16  4096x16384   add_partials              512x1x2     256    1        0       1         1
backward                  float32   16x4194304   backward_rows<BlockTile>  1024x1x1    256    1        65600   2         1
backward                  float32   16x4194304   add_partials              131072x1x2  256    1        0       1         1
backward, own parameters  bfloat16  64x256x1152  backward_rows<BlockTile>  1x396x1     160    1        41024   1         1
backward, own parameters  bfloat16  64x256x1152  add_partials              36x64x2     256    1        0       1         1
images forward            bfloat16  32x96x56x56  channels_first_forward    3136x1x1    256    1        6144    1         1
images backward           bfloat16  32x96x56x56  channels_first_backward   392x1x1     256    1        12288   1         1
images backward           bfloat16  32x96x56x56  add_partials              3x1x2       256    1        0       1         1
"""  # noqa: E501


@pytest.fixture(scope="module")
def plans():
    """Return what the audit prints for the calls of PLANS_ON_H200."""
    calls = dict.fromkeys("  ".join(re.split("  +", line)[:3]) for line in PLANS_ON_H200.splitlines()[1:])
    command = [sys.executable, launch_audit.__file__, "H200", "--plan", *calls]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_cuda_build
def test_launch_plans(plans):
    assert plans.splitlines() == PLANS_ON_H200.splitlines()


@needs_cuda_build
def test_later_calls_query_the_runtime_at_most_three_times(plans):
    header, *rows = ([*re.split("  +", line)] for line in plans.splitlines())
    queries = {(row[0], row[2]): int(row[header.index("queries")]) for row in rows}
    assert len(queries) >= 12 and max(queries.values()) <= 3, queries


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """Return {case: (expected fault, reported faults)}."""
    folder = tmp_path_factory.mktemp("audit")
    runtime, program, kernels = launch_audit.build_runtime(), folder / "program", folder / "kernels"
    command = [cuda_binary.tool("nvcc"), "-std=c++17", "-cudart", "shared", "-arch=sm_90", PLANTED, runtime]
    subprocess.run([*command, f"-Xlinker=-rpath,{runtime.parent}", "-o", program], check=True)
    listed = {"small": (32, 4096), "large": (255, 0), "backward_rows": (64, 0)}
    names = {name: f"_Z{len(name)}{name}ILi0EEvv" for name in listed}
    launch_audit.write_resources(kernels, {names[name]: usage for name, usage in listed.items()})
    printed = subprocess.run([program, kernels], capture_output=True, text=True, check=True).stdout
    return {name: found for name, *found in (line.split("\t") for line in printed.splitlines())}


@pytest.mark.parametrize("case", CASES)
def test_planted_launch_is_judged(faults, case):
    expected, found = faults[case]
    assert (expected in found) if expected else not found
