"""The operators with the CUDA kernels on the CPU, for tests."""

import contextlib
import ctypes

import emulated_build
import torch

ORDERS = ("forward", "reverse", "random")


class Library:
    """torch.ops.<namespace>, and the order in which its threads run. One per namespace and process."""

    def __init__(self, namespace="layernorm_emulated", mode=emulated_build.CHECKED):
        path = emulated_build.library(namespace, mode)
        torch.ops.load_library(path)
        self.ops = getattr(torch.ops, namespace)
        self._configure = ctypes.CDLL(str(path)).emulator_configure
        self._configure.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint, ctypes.c_int)

    @contextlib.contextmanager
    def schedule(self, order="forward", seed=0, concurrent_blocks=1, architecture=90):
        """Within it, threads run in this order, for kernels of this compute capability."""
        self._configure(ORDERS.index(order), seed, concurrent_blocks, architecture)
        try:
            yield
        finally:
            self._configure(0, 0, 1, 90)
