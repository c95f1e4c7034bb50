"""The operators with the CUDA kernels on the CPU: torch.ops.layernorm_emulated."""

import contextlib
import ctypes

import build
import torch

ORDERS = ("forward", "reverse", "random")


class Library:
    def __init__(self, mode=build.CHECKED):
        path = build.library(mode=mode)
        torch.ops.load_library(path)
        self.ops = torch.ops.layernorm_emulated
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
