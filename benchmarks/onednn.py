"""oneDNN's layer normalization on a CPU, through the package onednn from PyPI and the C API of its library.

The library runs on SYCL, whose device for a CPU comes with the package. What is executed is a primitive, on memory of
its own: no tensor is made.

Source of names and numbers: oneDNN's dnnl.h and dnnl_types.h, version 3.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .cases import EPS, Case

DTYPES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}
TAGS = {1: 2, 2: 3}  # by the number of dimensions: dnnl_a, dnnl_ab
CPU, FORWARD_TRAINING, BACKWARD, SCALE_AND_SHIFT, ALLOCATE = 1, 64, 128, 6, ctypes.c_void_p(-1)
SRC, DST, MEAN, VARIANCE, SCALE, SHIFT = 1, 17, 49, 50, 51, 52
DIFF_SRC, DIFF_DST, DIFF_SCALE, DIFF_SHIFT = 129, 145, 255, 256


class Argument(ctypes.Structure):
    """dnnl_exec_arg_t."""

    _fields_ = (("arg", ctypes.c_int), ("memory", ctypes.c_void_p))


class Library:
    """The library, with an engine and a stream; `folder` is where the package's libraries are."""

    def __init__(self, folder: Path):
        os.environ["OCL_ICD_FILENAMES"] = str(folder / "libintelocl.so")
        for name in ("libintlc.so.5", "libimf.so", "libsvml.so", "libtbb.so.12", "libsycl.so.9"):
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(folder / "libdnnl.so.3"))
        self.engine = self.create("engine_create", CPU, ctypes.c_size_t(0))
        self.stream = self.create("stream_create", self.engine, 1)

    def call(self, name: str, *arguments) -> None:
        status = getattr(self.library, f"dnnl_{name}")(*arguments)
        if status:
            raise RuntimeError(f"dnnl_{name} returned {status}; ONEDNN_VERBOSE=all tells why")

    def create(self, name: str, *arguments) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle

    def desc(self, like: Tensor) -> ctypes.c_void_p:
        dims = (ctypes.c_int64 * like.dim())(*like.shape)
        return self.create("memory_desc_create_with_tag", like.dim(), dims, DTYPES[like.dtype], TAGS[like.dim()])

    def memory(self, tensor: Tensor) -> ctypes.c_void_p:
        """Return memory with the numbers of a tensor."""
        memory = self.create("memory_create", self.desc(tensor), self.engine, ALLOCATE)
        self.copy(memory, lambda address: ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes))
        return memory

    def tensor(self, memory: ctypes.c_void_p, like: Tensor) -> Tensor:
        result = torch.empty_like(like)
        self.copy(memory, lambda address: ctypes.memmove(result.data_ptr(), address, result.nbytes))
        return result

    def copy(self, memory: ctypes.c_void_p, how: Callable[[int], object]) -> None:
        address = ctypes.c_void_p()
        self.call("memory_map_data", memory, ctypes.byref(address))
        how(address.value)
        self.call("memory_unmap_data", memory, address)

    def execution(self, desc: ctypes.c_void_p, memories: dict[int, ctypes.c_void_p]) -> Callable[[], tuple]:
        primitive = self.create("primitive_create", desc)
        arguments = (Argument * len(memories))(*(Argument(arg, memory.value) for arg, memory in memories.items()))

        def execute() -> tuple:
            self.call("primitive_execute", primitive, self.stream, len(arguments), arguments)
            self.call("stream_wait", self.stream)
            return ()

        return execute


@cache
def library() -> Library:
    return Library(Path(sys.prefix, "lib"))


class Normalization:
    """Forward and backward of a case, whose parameters are float32: the only ones that oneDNN takes."""

    def __init__(self, case: Case):
        x, weight, bias = (tensor.detach() for tensor in (case.x, case.weight, case.bias))
        if weight.dtype != torch.float32:
            raise TypeError(f"Expected parameters of torch.float32, but got {weight.dtype}")
        one, statistic = library(), torch.empty(case.rows)
        self.y, data, statistics = x, one.desc(x), one.desc(statistic)
        options = (statistics, ctypes.c_float(EPS), SCALE_AND_SHIFT)
        create = "layer_normalization_{}_primitive_desc_create"
        forward = one.create(create.format("forward"), one.engine, FORWARD_TRAINING, data, data, *options, None)
        backward = one.create(
            create.format("backward"), one.engine, BACKWARD, data, data, data, *options, forward, None
        )
        shared = {SRC: one.memory(x), SCALE: one.memory(weight)}
        shared |= {arg: one.memory(statistic) for arg in (MEAN, VARIANCE)}
        self.dst = one.memory(x)
        self.gradients = {DIFF_SRC: one.memory(x), DIFF_SCALE: one.memory(weight), DIFF_SHIFT: one.memory(weight)}
        self.results = {DIFF_SRC: x, DIFF_SCALE: weight, DIFF_SHIFT: bias}
        self.forward = one.execution(forward, shared | {SHIFT: one.memory(bias), DST: self.dst})
        self.backward = one.execution(backward, shared | self.gradients | {DIFF_DST: one.memory(case.dy)})

    def __call__(self) -> tuple[Tensor, ...]:
        """Return output and gradients."""
        self.forward()
        self.backward()
        gradients = (library().tensor(self.gradients[arg], like) for arg, like in self.results.items())
        return library().tensor(self.dst, self.y), *gradients
