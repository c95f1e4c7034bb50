"""The operators with the CUDA kernels on the CPU, for tests."""

import contextlib
import ctypes
import functools

import cuda_binary
import emulated_build
import torch

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
        lines = [line.split(maxsplit=2) for line in self._launched().decode().splitlines()]
        names = cuda_binary.plain_names([name for _, _, name in lines])
        return {(name, int(cluster)): int(count) for name, (count, cluster, _) in zip(names, lines, strict=True)}


@functools.cache
def library(mode):
    """Return this process's library for a mode."""
    return Library(mode)
