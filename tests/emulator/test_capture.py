"""The host code asks the CUDA runtime for nothing that a CUDA graph cannot capture.

That nothing waits for the value of a tensor, which would go through torch, is in test_family.py.
"""

import re
import subprocess

import cuda_binary
import pytest

from layernorm_ext import _build_info

# Launches, and questions that neither wait for the device nor allocate on it.
CAPTURABLE = {
    "cudaDeviceGetAttribute",
    "cudaFuncGetAttributes",
    "cudaFuncGetName",
    "cudaFuncSetAttribute",
    "cudaGetDevice",
    "cudaGetErrorString",
    "cudaGetLastError",
    "cudaLaunchKernelExC",
    "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags",
    "cudaOccupancyMaxActiveClusters",
}


@pytest.mark.skipif(not _build_info.with_cuda, reason="the package was built without CUDA")
def test_nothing_synchronises_or_allocates():
    command = ["nm", "-D", "--undefined-only", cuda_binary.library()]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r" U (cuda\w+)", symbols)) == CAPTURABLE
