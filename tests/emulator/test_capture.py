"""The host code calls only functions of the CUDA runtime that a CUDA graph can capture.

test_family.py checks that no call waits for the value of a tensor.
"""

import re
import subprocess

import cuda_binary
import pytest

from layernorm_ext import _build_info

# Launches, and queries that neither synchronize with the device nor allocate memory on it.
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
def test_runtime_calls_neither_synchronize_nor_allocate():
    command = ["nm", "-D", "--undefined-only", cuda_binary.library()]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r" U (cuda\w+)", symbols)) == CAPTURABLE
