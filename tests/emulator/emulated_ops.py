"""The operators with the CUDA kernels on the CPU, for tests.

If the installed package was built with CUDA, each launch is checked against the registers that nvcc gave its kernel.
"""

import contextlib
import ctypes
import functools
import os

import cuda_binary
import emulated_build
import torch

from layernorm_ext import _build_info

ORDERS = ("forward", "reverse", "random")
UNLIMITED = 2**63 - 1


class Library:
    """The operators (`ops`), and the schedule of their threads. One per namespace and process."""

    def __init__(self, mode):
        path = emulated_build.library(mode)
        torch.ops.load_library(path)
        self.ops = getattr(torch.ops, emulated_build.namespace(mode))
        emulator = ctypes.CDLL(str(path))
        self._configure = emulator.emulator_configure
        self._configure.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint, ctypes.c_int, ctypes.c_int64)
        self._launched = emulator.emulator_launched
        self._launched.restype = ctypes.c_char_p
        self._set_resources = emulator.emulator_resources
        self._set_resources.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)
        if _build_info.with_cuda:
            for architecture, kernels in cuda_binary.kernels().items():
                for kernel in kernels.values():
                    self.set_resources(architecture, kernel.name, kernel.registers, kernel.static_shared)

    def set_resources(self, architecture, kernel, registers, static_shared):
        """Set the registers per thread and the static shared memory per block of a kernel."""
        self._set_resources(architecture, kernel.encode(), registers, static_shared)

    @contextlib.contextmanager
    def schedule(self, order="forward", seed=0, concurrent_blocks=1, architecture=90, path_limit=UNLIMITED):
        """Run threads in this order, on a GPU of this compute capability, within the `with` block.

        `path_limit` lowers the sizes up to which a kernel handles a row (in vectors) or stages pixels (in bytes): see
        launch_limits.h.
        """
        self._configure(ORDERS.index(order), seed, concurrent_blocks, architecture, path_limit)
        try:
            yield
        finally:
            self._configure(0, 0, 1, 90, UNLIMITED)

    def launched(self):
        """Return {(kernel, blocks of a cluster): number of launches} since the last call."""
        lines = (line.split("\t") for line in self._launched().decode().splitlines())
        return {(kernel, int(cluster)): int(count) for kernel, cluster, count in lines}


@functools.cache
def library(mode):
    """Return this process's library for a mode; test_coverage.py overrides the mode by LAYERNORM_EMULATED_MODE."""
    return Library(mode=getattr(emulated_build, os.environ.get("LAYERNORM_EMULATED_MODE", ""), mode))
