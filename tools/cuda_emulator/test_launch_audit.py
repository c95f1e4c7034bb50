"""No GPU refuses a launch of the compiled package, and the audit reports planted launches that a GPU refuses."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import launch_audit
import pytest
import torch

from layernorm_ext import _build_info

needs_cuda_build = pytest.mark.skipif(
    not _build_info.with_cuda, reason="the package was built without CUDA; FORCE_CUDA=1 builds it, without a GPU"
)


@needs_cuda_build
def test_no_gpu_refuses_a_launch():
    done = subprocess.run([sys.executable, launch_audit.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(.*): 0 of \d{5,} calls refused$", done.stdout, re.M) == [str(t) for t in launch_audit.TARGETS]


@needs_cuda_build
def test_functions_that_the_audit_lacks_are_named():
    assert "cudaMalloc" in launch_audit.unknown_symbols(Path(torch.__file__).parent / "lib" / "libc10_cuda.so")


# Launches that a GPU refuses or runs incorrectly, beside correct ones

KIB = 1024
SMALL, LARGE, BACKWARD, UNLISTED = 1, 2, 3, 4  # stand for the addresses of kernels
# {name in the binary: (function, registers, static shared memory)}. The second name has the name of another function
# among its template arguments, which must not make it persistent.
KERNELS = {
    "small": ("small", 32, 4 * KIB),
    "large<backward_staged>": ("large", 255, 0),
    "backward_staged<>": ("backward_staged", 64, 0),
}


class Attribute(ctypes.Structure):  # cudaLaunchAttribute
    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint * 16))


class Config(ctypes.Structure):  # cudaLaunchConfig_t
    _fields_ = (
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_size_t)),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint)),
    )


class Host(launch_audit.Runtime):
    """A Runtime with KERNELS, whose functions it calls as host code does."""

    def __init__(self, gpu, code):
        super().__init__(launch_audit.Target(gpu, code), KERNELS)
        for address, name in enumerate(KERNELS, SMALL):
            self.library["__cudaRegisterFunction"](None, address, None, name.encode(), 0, *[None] * 5)
        self.next_device()

    def next_device(self):
        self.library.audit_next_call(False)

    def launch(self, kernel, x=1, y=1, threads=128, shared=0, cluster=1, overlaps=False):
        # cudaLaunchAttributeClusterDimension and ...ProgrammaticStreamSerialization
        attributes = (Attribute * 2)((4, (cluster, 1, 1)), (6, (1,)))
        config = Config((x, y, 1), (threads, 1, 1), shared, None, attributes, 1 + overlaps)
        self.library.cudaLaunchKernelExC(ctypes.byref(config), kernel, None)

    def opt_in(self, kernel, size, attribute=8):  # cudaFuncAttributeMaxDynamicSharedMemorySize
        self.library.cudaFuncSetAttribute(kernel, attribute, size)

    def resident_blocks(self, kernel, threads, shared):
        blocks = ctypes.c_int()
        query = self.library.cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
        query(ctypes.byref(blocks), kernel, threads, ctypes.c_size_t(shared), 0)
        return blocks.value


NOT_ALLOWED = "that cudaFuncSetAttribute has allowed"
# Calls on an H200 with code for 9.0, and a part of the fault that each gives, or None.
ON_H200 = [
    (lambda host: host.launch(SMALL, shared=44 * KIB), None),
    (lambda host: host.launch(SMALL, shared=46 * KIB), "51200 bytes of shared memory, 4096 of them static"),
    (lambda host: (host.opt_in(SMALL, 223 * KIB), host.launch(SMALL, shared=223 * KIB)), None),
    (lambda host: (host.opt_in(SMALL, 100 * KIB), host.launch(SMALL, shared=101 * KIB)), NOT_ALLOWED),
    (lambda h: (h.opt_in(SMALL, 100 * KIB), h.next_device(), h.launch(SMALL, shared=100 * KIB)), NOT_ALLOWED),
    (lambda host: host.opt_in(SMALL, 227 * KIB), "of attribute 8 to 232448, with 4096 bytes of static"),
    (lambda host: host.opt_in(SMALL, 0, attribute=9), "cudaFuncSetAttribute of attribute 9"),
    (lambda host: host.launch(LARGE, threads=256), None),
    (lambda host: host.launch(LARGE, threads=512), "512 threads of 255 registers do not fit"),
    (lambda host: host.launch(SMALL, threads=1056), "invalid block size: 1056 threads"),
    (lambda host: host.launch(SMALL, y=65536), "invalid grid size: 1 x 65536 x 1"),
    (lambda host: host.launch(SMALL, x=16, cluster=8), None),
    (lambda host: host.launch(SMALL, x=16, cluster=16), "invalid cluster size"),
    (lambda host: host.launch(SMALL, x=9, cluster=8), "invalid cluster size"),
    (lambda host: host.launch(SMALL, x=host.resident_blocks(SMALL, 1024, 0) - 2), "invalid grid size: 0 x 1 x 1"),
    (lambda host: host.resident_blocks(SMALL, 128, 50 * KIB), "no resident block of 128 threads with 51200 bytes"),
    (lambda host: host.launch(BACKWARD, y=132, threads=1024), None),
    (lambda host: host.launch(BACKWARD, y=133, threads=1024), "more persistent blocks than are resident: 133 of 132"),
    (lambda host: host.launch(LARGE, y=133), None),  # these blocks are not persistent
    (lambda host: host.launch(UNLISTED), "not among the kernels for this GPU"),
    (lambda host: host.library.cudaDeviceGetAttribute(None, 13, 0), "unknown attribute 13"),
]
ON_OTHERS = [
    ("L4", 80, lambda host: host.launch(SMALL, shared=96 * KIB), "that the GPU has"),
    ("A100", 80, lambda host: host.launch(SMALL, x=16, cluster=8), "clusters need compute capability 9.0"),
    ("H200", 80, lambda host: host.launch(SMALL, x=16, cluster=8), "code for 80 has no instructions for clusters"),
    ("B200", 90, lambda host: host.launch(SMALL, overlaps=True), None),
    ("B200", 80, lambda host: host.launch(SMALL, overlaps=True), "code for 80 does not wait"),
]


@pytest.mark.parametrize("gpu, code, calls, fault", [*(("H200", 90, *case) for case in ON_H200), *ON_OTHERS])
def test_planted_launch_is_judged(gpu, code, calls, fault):
    host = Host(gpu, code)
    calls(host)
    found = "; ".join(host.faults())
    assert (fault in found) if fault else not found
