"""The operators with the CUDA kernels on the CPU, for tests.

If the installed package was built with CUDA, each launch is held against the registers that nvcc gave its kernel.
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
    """torch.ops.<namespace>, and the order in which its threads run. One per namespace and process."""

    def __init__(self, mode):
        path = emulated_build.library(mode)
        torch.ops.load_library(path)
        self.ops = getattr(torch.ops, emulated_build.namespace(mode))
        emulator = ctypes.CDLL(str(path))
        self._configure = emulator.emulator_configure
        limits = (ctypes.c_int64, ctypes.c_int64)
        self._configure.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint, ctypes.c_int, *limits)
        self._launched = emulator.emulator_launched
        self._launched.restype = ctypes.c_char_p
        self._set_resources = emulator.emulator_resources
        self._set_resources.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)
        if _build_info.with_cuda:
            for architecture, kernels in cuda_binary.kernels().items():
                for kernel in kernels.values():
                    self.set_resources(architecture, kernel.name, kernel.registers, kernel.static_shared)

    def set_resources(self, architecture, kernel, registers, static_shared):
        """Hold launches of a kernel against the registers of a thread and the static shared memory of a block."""
        self._set_resources(architecture, kernel.encode(), registers, static_shared)

    @contextlib.contextmanager
    def schedule(
        self,
        order="forward",
        seed=0,
        concurrent_blocks=1,
        architecture=90,
        path_limit=UNLIMITED,
        one_launch_limit=UNLIMITED,
    ):
        """Within it, threads run in this order, for kernels of this compute capability.

        Kernels that take rows up to some number of vectors leave those of more than `path_limit` to the next. Backward
        is one launch for what reads up to `one_launch_limit` bytes.
        """
        options = (concurrent_blocks, architecture, path_limit, one_launch_limit)
        self._configure(ORDERS.index(order), seed, *options)
        try:
            yield
        finally:
            self._configure(0, 0, 1, 90, UNLIMITED, UNLIMITED)

    def launched(self):
        """Return the names of the kernels that have been launched since the last call."""
        return set(self._launched().decode().splitlines())


@functools.cache
def library(mode):
    """Return the library of this process, built if need be; of LAYERNORM_EMULATED_MODE, if that is set (by mutants)."""
    return Library(mode=getattr(emulated_build, os.environ.get("LAYERNORM_EMULATED_MODE", ""), mode))
