"""Runs the compiled CUDA host code without a GPU, and lists the launches that each GPU would refuse.

python tools/cuda_emulator/launch_audit.py           every GPU
python tools/cuda_emulator/launch_audit.py H200      one GPU
python tools/cuda_emulator/launch_audit.py H200 --plan "forward bfloat16 4096x1024"    prints the launches of a call

It needs a package that was built with CUDA (FORCE_CUDA=1, no GPU needed), g++, and cuobjdump from the CUDA toolkit or
from the package triton. The operators are called with CPU tensors through the dispatch key CUDA, and the preloaded
audit_runtime.cpp replaces the CUDA runtime. Nothing is computed, so the tensors' memory is never accessed. Therefore no
call has float64 or unaligned rows, which torch computes and copies before a kernel starts.
"""

import argparse
import concurrent.futures
import ctypes
import functools
import gc
import itertools
import multiprocessing
import os
import random
import re
import subprocess
import sys
from typing import NamedTuple

import cuda_binary
import emulated_build
import torch

import layernorm_ext  # noqa: F401  # registers the operators


class Target(NamedTuple):
    """A GPU, and the architecture of the code it runs: its own, or an older one whose PTX the driver compiles."""

    gpu: str
    code: int

    def __str__(self):
        return f"{self.gpu} with code for {self.code / 10}"


# The GPUs with a build for 8.0, 9.0 and 10.0+PTX; then GPUs with a build that only has older code.
TARGETS = [Target("A100", 80), Target("A10", 80), Target("L4", 80), Target("H200", 90), Target("B200", 100)]
TARGETS += [Target("RTX 5090", 100), Target("H200", 80), Target("B200", 90), Target("RTX 5090", 80)]

ROWS = (1, 129, 4096, 1_000_000, 10_000_000)
MAX_COLS = 4 << 20
MAX_BYTES = 4 << 30  # of a tensor, which takes address space and no memory
# Rows at the limits of the kernels, in vectors of 16 bytes: the lanes of a warp, the warps of a block, registers, and
# the blocks of a cluster, for both passes, with 227 and with 99 KiB of shared memory per block.
VECTORS = [1, 2, 4, 8, 16, 32, 64, *range(128, 2049, 128), 2560, *range(3072, 8193, 1024), 9216, 16384, 32768, 262144]

# The dtypes of the input and of the parameters. The dtype of parameters only changes a flag, so float32 suffices.
DTYPES = [(torch.float32, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.float32)]
# Masks of the requested gradients: all of input, weight and bias, or one of them. With each mask, backward reads other
# arrays and stores other sums.
MASKS = [
    [*mask, False, False, False]
    for mask in ([True] * 3, [True, False, False], [False, True, False], [False, False, True])
]


def lengths(itemsize):
    """Return numbers of columns: each limit of the kernels, one element and one vector more, and a random sample."""
    count = 16 // itemsize
    around = {v * count + d for v in VECTORS for d in (0, 1, count)}
    generator = random.Random(0)
    sample = {round(MAX_COLS ** generator.random()) for _ in range(20)}
    return sorted(n for n in around | sample | {MAX_COLS} if 1 <= n <= MAX_COLS)


# ---- the calls -------------------------------------------------------------------------------------------------------


def on_cuda(overload):
    """Return a function that binds arguments to an operator: the result calls it through the dispatch key CUDA."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return functools.partial(functools.partial, overload.redispatch, key)


forward = on_cuda(torch.ops.layernorm.forward.default)
forward_fused = on_cuda(torch.ops.layernorm.forward.fused)
backward = on_cuda(torch.ops.layernorm.backward.default)


def calls_on(x, parameters, masks=MASKS[:1], **layout):
    """Yield (description, function) for calls on a tensor with each of the parameters (name, weight, bias).

    The weight is also the input_scale of an input beside a residual ("scaled input"). With several masks of gradients,
    calls with further options follow: RMSNorm, memory_efficient and residuals, with the last weight and bias.
    """
    dim, dtype = 1 if layout else x.dim() - 1, torch.float32
    n = [x.shape[dim]]
    mean = rstd = torch.empty((*x.shape[:dim], 1, *x.shape[dim + 1 :]), dtype=dtype)
    for name, w, b in parameters:
        yield f"forward{name}", forward(x, n, w, b, **layout)
        for mask in masks:
            yield f"backward{name} {mask}", backward(x, x, n, mean, rstd, w, b, mask, **layout)
        if layout:  # there are no kernels for residuals and gates of images
            continue
        yield f"forward, scaled input{name}", forward_fused(x, n, w, b, 1e-5, x, None, w)
        yield f"backward, scaled input{name}", backward(x, x, n, mean, rstd, w, b, [True] * 6, x, None, w, x)
        if w.dtype == dtype:  # torch would convert other weights, and so access the memory of the tensors
            gated = {"gate_first": True}
            yield f"forward, gated norm{name}", forward_fused(x, n, w, b, 1e-5, None, x, **gated)
            for mask in ([True] * 6, [False] * 3 + [True, False, False])[: len(masks)]:
                call = backward(x, x, n, mean, rstd, w, b, mask, None, x, **gated)
                yield f"backward, gated norm{name} {mask}", call
    if len(masks) == 1:
        return
    yield "forward, RMS, no parameters", forward(x, n, rms=True, **layout)
    for mask in masks[:3]:
        options = {"memory_efficient": True, **layout}
        yield f"backward, memory efficient {mask}", backward(x, x, n, None, rstd, w, None, mask, **options)
    if layout:
        return
    yield "forward, residual", forward_fused(x, n, w, b, 1e-5, x)
    for mask in masks[:3]:
        yield f"backward, residual {mask}", backward(x, x, n, mean, rstd, w, b, mask, grad_sum=x)
    mask = [False] * 4 + [True, False]
    yield "backward, gradient of the scaled input alone", backward(x, x, n, mean, rstd, w, b, mask, x, None, w, x)
    if x.itemsize == 2:
        total = torch.empty_strided(x.shape, x.stride(), dtype=torch.float32)
        yield "forward, float32 residual", forward_fused(x, n, w, b, 1e-5, total)
        yield "forward, scaled input, float32 residual", forward_fused(x, n, w, b, 1e-5, total, None, w)
        options = (mean, rstd, w, b, [True] * 6, total, None, w, x)
        yield "backward, scaled input, float32 residual", backward(x, total, n, *options)
        for mask in masks[:2]:
            call = backward(x, total, n, mean, rstd, w, b, mask, grad_sum=total)
            yield f"backward, float32 residual {mask}", call


def calls_on_rows(dtypes, rows, cols):
    w = torch.empty(cols, dtype=dtypes[1])
    return calls_on(torch.empty(rows, cols, dtype=dtypes[0]), [("", w, w)], MASKS)


def calls_on_samples(dtypes, samples, rows, cols):
    """Yield calls for samples with parameters of their own, and for a slice of a fused projection."""
    x = torch.empty(samples, rows, cols, dtype=dtypes[0])
    own, shared = torch.empty(samples, 1, cols, dtype=dtypes[1]), torch.empty(cols, dtype=dtypes[1])
    yield from calls_on(x, [(", own parameters", own, own), (", own weight", own, shared), (", own bias", shared, own)])
    yield from calls_on(x.new_empty(samples, 3, rows, cols)[:, 1], [(", fused projection", shared, shared)])


def calls_on_images(dtypes, *shape):
    """Yield calls for images [N, C, H, W]."""
    own = torch.empty(shape[:2], dtype=dtypes[1])
    parameters = [("", own[0], own[0]), (", own parameters", own, own)]
    return calls_on(torch.empty(shape, dtype=dtypes[0]), parameters, MASKS, images=True)


def calls_with(dtypes):
    """Yield (description, function) for every call of the audit with these dtypes."""
    dtype_names = "/".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    for cols, rows in itertools.product(lengths(dtypes[0].itemsize), ROWS):
        if rows * cols * dtypes[0].itemsize > MAX_BYTES:
            continue
        shape = f"{rows} x {cols} {dtype_names}"
        for name, call in calls_on_rows(dtypes, rows, cols):
            yield f"{name}: {shape}", call
        if rows in (129, 4096, 1_000_000):
            for rows_of_sample in (1, 4, rows // 4):
                for name, call in calls_on_samples(dtypes, rows // rows_of_sample, rows_of_sample, cols):
                    yield f"{name}, {rows_of_sample} rows of a sample: {shape}", call
    # The most channels for which a tile of 32 pixels fits into 96 or 93 KiB of shared memory. Forward stages one array,
    # and backward two.
    limits = {kib * 1024 // 32 // dtypes[0].itemsize // arrays for kib in (93, 96) for arrays in (1, 2)}
    channels = {1, 3, 16, 64, 100, 192, 384, 768, 1536, 4096, *(c + d for c in limits for d in (-1, 0, 1))}
    for c, (n, side) in itertools.product(sorted(channels), ((1, 2), (1, 7), (4, 14), (3, 56), (4096, 56))):
        if n * c * side * side * dtypes[0].itemsize > MAX_BYTES:
            continue
        for name, call in calls_on_images(dtypes, n, c, side, side):
            yield f"{name}: images {n} x {c} x {side} x {side} {dtype_names}", call


# ---- running them ----------------------------------------------------------------------------------------------------


def build_runtime():
    """Return the path of the compiled audit_runtime.cpp."""
    return emulated_build.shared_library(emulated_build.EMULATOR / "audit_runtime.cpp")


class Runtime:
    """The preloaded CUDA runtime, set up for a target.

    `kernels` are the kernels in the target's code: {mangled name: (function, registers, static shared memory)}.
    """

    def __init__(self, target, kernels):
        self.library = ctypes.CDLL(str(build_runtime()))
        for function in (self.library.audit_faults, self.library.audit_launches):
            function.restype = ctypes.c_char_p
        resources = " ".join(str(word) for name, words in kernels.items() for word in (name, *words))
        self.library.audit_gpu(target.gpu.encode(), target.code, resources.encode())

    def run(self, call):
        """Return the faults of a call. The runtime treats each call as the first one of a process."""
        self.library.audit_next_call(False)
        try:
            call()
        except RuntimeError as error:
            return [*self.faults(), f"raised {str(error).splitlines()[0]}"]
        return self.faults()

    def faults(self):
        return self.library.audit_faults().decode().splitlines()

    def plan(self, text):
        """Return a line for each launch of a call: kernel, grid, block, shared memory, blocks on a multiprocessor.

        The shape is [rows, cols], [samples, rows, cols] or [N, C, H, W]. A repeated call must ask the CUDA runtime for
        nothing but the current device.
        """
        operator, dtype, shape = text.rsplit(maxsplit=2)
        sizes = [*map(int, shape.split("x"))]
        kinds = {2: calls_on_rows, 3: calls_on_samples, 4: calls_on_images}
        calls = dict(kinds[len(sizes)]((getattr(torch, dtype),) * 2, *sizes))
        call = calls.get(operator) or calls[f"{operator} {MASKS[0]}"]
        faults = self.run(call)
        self.library.audit_next_call(True)
        call()
        if (queries := self.library.audit_queries()) != 1:
            faults.append(f"{queries} queries in a repeated call")
        return [f"{text}: {line}" for line in (*faults, *self.library.audit_launches().decode().splitlines())]


def runtime_of(target):
    kernels = cuda_binary.kernels().get(target.code)
    if not kernels:
        raise SystemExit(f"{cuda_binary.library()} has no code for {target.code / 10}; build it with FORCE_CUDA=1")
    return Runtime(target, {name: (k.function, k.registers, k.static_shared) for name, k in kernels.items()})


def audit(target, dtypes):
    """Return the number of calls with these dtypes, how many the target refuses, and lines about the first ones."""
    gc.disable()  # garbage collection takes a tenth of the time
    runtime, total, refused, lines = runtime_of(target), 0, 0, []
    for name, call in calls_with(dtypes):
        total += 1
        if faults := runtime.run(call):
            refused += 1
            if refused <= 20:
                lines += [f"  {name}\n", *(f"    {fault}\n" for fault in faults)]
    return total, refused, "".join(lines)


def unknown_symbols(library):
    """Return the functions of the CUDA runtime that a compiled module calls and audit_runtime.cpp lacks."""
    wanted = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    answered = set(re.findall(r"\b(cuda\w+)\(", (emulated_build.EMULATOR / "audit_runtime.cpp").read_text()))
    # The first only returns a text. Code that nvcc generates for <<<>>> refers to the second, but nothing calls it.
    harmless = {"cudaGetErrorString", "cudaLaunchKernel"}
    return sorted(set(re.findall(r" U (cuda\w+)", wanted.stdout)) - answered - harmless)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gpus", nargs="*", metavar="GPU", help=f"any of {', '.join({t.gpu: 0 for t in TARGETS})}")
    parser.add_argument("--plan", nargs="+", metavar="CALL", help='such as "forward bfloat16 4096x1024"')
    options = parser.parse_args()
    runtime = str(build_runtime())
    if os.environ.get("LD_PRELOAD") != runtime:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": runtime})
    torch.set_num_threads(1)
    targets = [target for target in TARGETS if not options.gpus or target.gpu in options.gpus]
    if options.plan:
        runtime = runtime_of(targets[0])
        print(*(line for call in options.plan for line in runtime.plan(call)), sep="\n")
        return 0
    unknown = unknown_symbols(cuda_binary.library())
    print(*(f"audit_runtime.cpp lacks {symbol}\n" for symbol in unknown), sep="", end="")
    failed = len(unknown)
    fork = multiprocessing.get_context("fork")
    cuda_binary.kernels()  # is cached for the processes below
    for target in targets:
        # New processes, because the host code's caches grow with every call and would double the time.
        with concurrent.futures.ProcessPoolExecutor(len(DTYPES), fork) as pool:
            totals, refused, lines = zip(*pool.map(audit, [target] * len(DTYPES), DTYPES), strict=True)
        print(*lines, f"{target}: {sum(refused)} of {sum(totals)} calls refused", sep="", flush=True)
        failed += sum(refused)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
