"""What the host code of the kernels asks of the CUDA runtime: nothing that a CUDA graph cannot capture."""

import re
import subprocess

import cuda_binary
import pytest

# A launch; and questions about the device, which neither wait for it nor allocate.
CAPTURABLE = {
    "cudaLaunchKernelExC",
    "cudaFuncSetAttribute",
    "cudaFuncGetName",
    "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags",
    "cudaOccupancyMaxActiveClusters",
    "cudaDeviceGetAttribute",
    "cudaGetDevice",
    "cudaGetErrorString",
    "cudaGetLastError",
}


def runtime_calls(source, tmp_path):
    made = tmp_path / "host.o"
    ptx_alone = "-gencode=arch=compute_90,code=compute_90"  # for time: the device code is not looked at
    options = [*cuda_binary.FLAGS, "-Xcicc=-O0", ptx_alone, f"-I{cuda_binary.CSRC}"]
    subprocess.run([cuda_binary.tool("nvcc"), *options, "-c", source, "-o", made], check=True)
    symbols = subprocess.run(["nm", "--undefined-only", made], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r" U (cuda\w+)", symbols))


@pytest.mark.parametrize("source", cuda_binary.SOURCES, ids=lambda path: path.name)
def test_nothing_synchronises_or_allocates(source, tmp_path):
    calls = runtime_calls(source, tmp_path)
    assert "cudaLaunchKernelExC" in calls
    # what nvcc itself puts in, to register the kernels and to launch them by <<<>>>
    own = {"cudaLaunchKernel", "cudaGetSymbolAddress"}
    assert calls - CAPTURABLE - own == set()


def test_what_synchronises_is_seen(tmp_path):
    source = tmp_path / "waits.cu"
    source.write_text('#include "device.h"\nvoid wait() { cudaDeviceSynchronize(); }\n')
    assert "cudaDeviceSynchronize" in runtime_calls(source, tmp_path)
