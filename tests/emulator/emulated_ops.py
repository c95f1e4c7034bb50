"""The operators with the CUDA kernels on the CPU, for tests."""

import contextlib
import ctypes
import functools
import subprocess

import cuda_binary
import emulated_build
import torch

ORDERS = ("forward", "reverse", "random")
UNLIMITED = 2**63 - 1


class Library:
    """The operators (`ops`), and the schedule of their threads. One per namespace and process."""

    def __init__(self, mode):
        self._path = emulated_build.library(mode)
        torch.ops.load_library(self._path)
        self.ops = getattr(torch.ops, emulated_build.namespace(mode))
        emulator = ctypes.CDLL(str(self._path))
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
        rows = [[*map(int, line.split())] for line in self._launched().decode().splitlines()]
        names = cuda_binary.plain_names([self._symbols[address] for address, *_ in rows])
        return {(name, cluster): count for name, (_, cluster, count) in zip(names, rows, strict=True)}

    @functools.cached_property
    def _symbols(self):
        """The mangled names of the library's functions by address."""
        lines = subprocess.run(["nm", "--defined-only", self._path], capture_output=True, text=True, check=True).stdout
        symbols = [(int(offset, 16), name) for offset, _, name in map(str.split, lines.splitlines())]
        here = next(offset for offset, name in symbols if name == "emulator_launched")
        base = ctypes.cast(self._launched, ctypes.c_void_p).value - here
        return {base + offset: name for offset, name in symbols}


@functools.cache
def library(mode):
    """Return this process's library for a mode."""
    return Library(mode)
