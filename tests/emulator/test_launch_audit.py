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
def test_table_lists_launches_with_resident_blocks():
    command = [sys.executable, launch_audit.__file__, "--table"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    launches = list(csv.DictReader(lines))
    assert len(launches) >= 4 * len(launch_audit.TABLE_COLS)
    for launch in launches:
        assert int(launch["blocks per SM"]) > 0 and int(launch["bytes in flight per SM"]) > 0, launch


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
