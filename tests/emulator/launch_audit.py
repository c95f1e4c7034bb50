"""Runs the compiled CUDA host code without a GPU, and lists the launches that each GPU would refuse.

python tests/emulator/launch_audit.py           every GPU
python tests/emulator/launch_audit.py H200      one GPU
python tests/emulator/launch_audit.py --table   prints the launches on an H200 by the number of columns
python tests/emulator/launch_audit.py H200 --plan "forward bfloat16 4096x1024"    prints the launches of a call

It needs a package that was built with CUDA (FORCE_CUDA=1, no GPU needed), g++, and cuobjdump from the CUDA toolkit or
from the package triton. The operators are called with CPU tensors through the dispatch key CUDA, and the preloaded
audit_runtime.cpp replaces the CUDA runtime. Nothing is computed, so the tensors' memory is never accessed.
"""

import argparse
import concurrent.futures
import ctypes
import dataclasses
import itertools
import math
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import cuda_binary
import emulated_build


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU, and the architecture of the code it runs: its own, or an older one whose PTX the driver compiles."""

    gpu: str
    code: int

    def __str__(self):
        return f"{self.gpu} with code for {self.code / 10}"


# A build for 8.0, 9.0 and 10.0+PTX; then builds that only have code older than the device.
TARGETS = [Target("A100", 80), Target("A10", 80), Target("L4", 80), Target("H200", 90), Target("B200", 100)]
TARGETS += [Target("RTX 5090", 100), Target("H200", 80), Target("B200", 90), Target("RTX 5090", 80)]

ROWS = (1, 129, 4096, 1_000_000, 10_000_000)
MAX_COLS = 4 << 20
MAX_BYTES = 4 << 30  # of a tensor: address space, not memory
# Rows at the limits of the kernels, in vectors of 16 bytes: the lanes of a warp, the warps of a block, and the chunks
# of a block and of a cluster, for both passes, with 227 and with 99 KiB of shared memory per block.
VECTORS = [1, 2, 4, 8, 16, 32, 64, *range(128, 2049, 128), *range(3072, 8193, 1024), 9216, 16384, 40960, 81920, 262144]


def write_resources(path, kernels):
    path.write_text("".join(f"{name} {registers} {static}\n" for name, (registers, static) in kernels.items()))


def lengths(itemsize):
    """Return numbers of columns: as many vectors as each limit of the kernels and one more, and a random sample."""
    count = 16 // itemsize
    around = {v * count + d for v in VECTORS for d in (0, count)}
    generator = random.Random(0)
    sample = {round(MAX_COLS ** generator.random()) for _ in range(20)}
    return sorted(n for n in around | sample | {MAX_COLS} if 1 <= n <= MAX_COLS)


def dtype_pairs(torch):
    same = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    return [*((dtype, dtype) for dtype in same), (torch.float16, torch.float32), (torch.bfloat16, torch.float32)]


# Masks of gradients that differ in the arrays that the kernels read and in the sums that they store.
MASKS = [[True] * 3, [True, False, False], [False, True, False], [False, False, True]]


class Calls:
    """Calls of the operators through the dispatch key CUDA, with CPU tensors."""

    def __init__(self, torch):
        self.torch = torch
        self.ops = torch.ops.layernorm
        self.key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

    def forward(self, *args, **options):
        return self.ops.forward.default.redispatch(self.key, *args, **options)

    def forward_residual(self, *args, **options):
        return self.ops.forward.residual.redispatch(self.key, *args, **options)

    def backward(self, *args, **options):
        return self.ops.backward.default.redispatch(self.key, *args, **options)

    def statistics(self, shape, dtype):
        torch = self.torch
        return torch.empty(shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)

    def rows(self, rows, cols, dtypes, aligned):
        """Yield (description, function) for every kind of call on rows of this shape."""
        empty = self.torch.empty
        stride = cols if aligned else cols + 1
        offset = int(not aligned)
        x = empty(rows * stride + offset, dtype=dtypes[0])[offset:].as_strided((rows, cols), (stride, 1), offset)
        w, b = (empty(cols, dtype=dtypes[1]) for _ in range(2))
        mean, rstd = (self.statistics((rows, 1), dtypes[0]) for _ in range(2))
        n = [cols]

        yield "forward", lambda: self.forward(x, n, w, b, 1e-5)
        yield "forward, residual", lambda: self.forward_residual(x, x, n, w, b, 1e-5)
        yield "forward, RMS, no parameters", lambda: self.forward(x, n, None, None, 1e-5, rms=True)
        for mask in MASKS:
            yield f"backward {mask}", lambda mask=mask: self.backward(x, x, n, mean, rstd, w, b, mask)
        for mask in MASKS[:3]:
            yield (
                f"backward, residual {mask}",
                lambda mask=mask: self.backward(x, x, n, mean, rstd, w, b, mask, grad_sum=x),
            )
            yield (
                f"backward, RMS, memory efficient {mask}",
                lambda mask=mask: self.backward(
                    x, x, n, None, rstd, w, None, mask, grad_sum=x, rms=True, memory_efficient=True
                ),
            )
        if dtypes[0].itemsize == 2:
            yield from self.float32_residuals(x, mean, rstd, w, b)

    def float32_residuals(self, x, mean, rstd, w, b):
        """Yield calls with a float32 residual for the rows of x, which have 16 bits."""
        total, n = self.torch.empty_strided(x.shape, x.stride(), dtype=self.torch.float32), x.shape[1:]
        yield "forward, float32 residual", lambda: self.forward_residual(x, total, n, w, b, 1e-5)
        for mask in ([True] * 3, [True, False, False]):
            yield (
                f"backward, float32 residual {mask}",
                lambda mask=mask: self.backward(x, total, n, mean, rstd, w, b, mask, grad_sum=total),
            )

    def groups(self, groups, rows, cols, dtypes):
        """Yield calls for rows of groups: with parameters of their own, and inside a fused projection."""
        empty, n = self.torch.empty, [cols]
        x = empty(groups, rows, cols, dtype=dtypes[0])
        fused = empty(groups, 3, rows, cols, dtype=dtypes[0])[:, 1]
        own, shared = empty(groups, 1, cols, dtype=dtypes[1]), empty(cols, dtype=dtypes[1])
        mean, rstd = (self.statistics((groups, rows, 1), dtypes[0]) for _ in range(2))
        yield "forward, own parameters", lambda: self.forward(x, n, own, own, 1e-5)
        yield "forward, fused projection", lambda: self.forward(fused, n, shared, None, 1e-5, rms=True)
        for name, w, b in (("own", own, own), ("own weight", own, shared), ("own bias", shared, own)):
            yield (
                f"backward, {name} parameters",
                lambda w=w, b=b: self.backward(x, x, n, mean, rstd, w, b, [True] * 3),
            )
        yield (
            "backward, fused projection",
            lambda: self.backward(fused, fused, n, mean, rstd, shared, shared, [True] * 3),
        )

    def images(self, shape, dtypes):
        """Yield (description, function) for every kind of call on images [N, C, H, W]."""
        empty = self.torch.empty
        x = empty(shape, dtype=dtypes[0])
        w, b = (empty(shape[1], dtype=dtypes[1]) for _ in range(2))
        mean, rstd = (self.statistics((shape[0], *shape[2:], 1), dtypes[0]) for _ in range(2))
        own = empty(shape[0], *(1 for _ in shape[2:]), shape[1], dtype=dtypes[1])
        x, n, options = x.movedim(1, -1), [shape[1]], {"preserve_layout": True}
        yield "images forward", lambda: self.forward(x, n, w, b, 1e-6, **options)
        yield "images forward, residual", lambda: self.forward_residual(x, x, n, w, b, 1e-6, **options)
        for mask in MASKS:
            yield (
                f"images backward {mask}",
                lambda mask=mask: self.backward(x, x, n, mean, rstd, w, b, mask, **options),
            )
        yield (
            "images backward, own parameters, residual",
            lambda: self.backward(x, x, n, mean, rstd, own, own, [True] * 3, grad_sum=x, **options),
        )
        if dtypes[0].itemsize == 2:
            total = self.torch.empty_like(x, dtype=self.torch.float32)
            yield (
                "images forward, float32 residual",
                lambda: self.forward_residual(x, total, n, w, b, 1e-6, **options),
            )
            yield (
                "images backward, float32 residual",
                lambda: self.backward(x, total, n, mean, rstd, w, b, [True] * 3, grad_sum=total, **options),
            )


def all_calls(torch):
    """Yield (description, function) for every call of the audit."""
    calls = Calls(torch)
    for dtypes in dtype_pairs(torch):
        what = "/".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        for cols, rows, aligned in itertools.product(lengths(dtypes[0].itemsize), ROWS, (True, False)):
            if rows * (cols + 1) * dtypes[0].itemsize > MAX_BYTES:
                continue
            shape = f"{rows} x {cols} {what}{'' if aligned else ', unaligned'}"
            for name, call in calls.rows(rows, cols, dtypes, aligned):
                yield f"{name}: {shape}", call
            if aligned and rows in (129, 4096, 1_000_000):
                for rows_of_group in (1, 4, rows // 4):
                    for name, call in calls.groups(rows // rows_of_group, rows_of_group, cols, dtypes):
                        yield f"{name}, groups of {rows_of_group}: {shape}", call
        # The channels of which 96 or 93 KiB of shared memory hold 32 pixels, in forward and in backward.
        limits = {kib * 1024 // 32 // dtypes[0].itemsize // passes for kib in (93, 96) for passes in (1, 2)}
        channels = {1, 3, 16, 64, 100, 192, 384, 768, 1536, 4096, *(c + d for c in limits for d in (-1, 0, 1))}
        for c, (n, side) in itertools.product(sorted(channels), ((1, 2), (1, 7), (4, 14), (3, 56), (4096, 56))):
            if n * c * side * side * dtypes[0].itemsize > MAX_BYTES:
                continue
            for name, call in calls.images((n, c, side, side), dtypes):
                yield f"{name}: {n} x {c} x {side} x {side} {what}", call


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch that the runtime has recorded."""

    mangled: str
    grid: tuple[int, int, int]
    threads: int  # of a block
    cluster: int  # blocks
    dynamic_shared: int  # bytes of a block
    registers: int  # of a thread
    resident: int  # blocks on a multiprocessor

    @property
    def kernel(self):
        return re.findall(r"\d((?:forward|backward|channels|add)_[a-z_]+?)I", self.mangled)[-1]

    @property
    def tile(self):
        """Return what the lanes of a warp or the threads of a block share; empty for other kernels."""
        return "".join(re.findall(r"WarpTile|BlockTile", self.mangled)[:1])

    @property
    def blocks(self):
        return math.prod(self.grid)


class Runtime:
    """The preloaded runtime, for one target."""

    def __init__(self, target):
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        for function in (self._library.audit_faults, self._library.audit_launches):
            function.restype = ctypes.c_char_p
        kernels = cuda_binary.kernels().get(target.code)
        if not kernels:
            raise SystemExit(f"{cuda_binary.library()} has no code for {target.code / 10}; build it with FORCE_CUDA=1")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "kernels")
            write_resources(path, {name: (kernel.registers, kernel.static_shared) for name, kernel in kernels.items()})
            self._library.audit_gpu(target.gpu.encode(), target.code, bytes(path))

    def run(self, call):
        """Return the faults of a call. The runtime treats each call as the first one of a process."""
        self._library.audit_next_call()
        try:
            call()
        except RuntimeError as error:
            return [*self._faults(), f"raised {str(error).splitlines()[0]}"]
        return self._faults()

    def _faults(self):
        return self._library.audit_faults().decode().splitlines()

    def launches(self):
        """Return the launches of the last call."""
        lines = (line.split() for line in self._library.audit_launches().decode().splitlines())
        return [Launch(name, tuple(map(int, numbers[:3])), *map(int, numbers[3:])) for name, *numbers in lines]

    def queries(self, call):
        """Return how many functions of the runtime a second call on the same device calls, besides its launches."""
        self._library.audit_next_call()
        call()
        self._library.audit_queries()
        call()
        return self._library.audit_queries()


def audit(target):
    """Print the calls that the target refuses, and return whether there are any."""
    import torch

    import layernorm_ext  # noqa: F401  # registers the operators

    torch.set_num_threads(1)
    runtime = Runtime(target)
    total = refused = 0
    for name, call in all_calls(torch):
        total += 1
        if faults := runtime.run(call):
            refused += 1
            if refused <= 20:
                print(f"  {name}", *faults, sep="\n    ")
    print(f"{target}: {refused} of {total} calls refused")
    return refused > 0


def unknown_symbols():
    """Return the functions of the CUDA runtime that the compiled module calls and audit_runtime.cpp lacks."""
    wanted = subprocess.run(
        ["nm", "-D", "--undefined-only", cuda_binary.library()], capture_output=True, text=True, check=True
    )
    answered = set(re.findall(r"\b(cuda\w+)\(", (emulated_build.EMULATOR / "audit_runtime.cpp").read_text()))
    # The first is a pure function. Code that nvcc generates for <<<>>> refers to the second, but nothing calls it.
    harmless = {"cudaGetErrorString", "cudaLaunchKernel"}
    return sorted(set(re.findall(r" U (cuda\w+)", wanted.stdout)) - answered - harmless)


TABLE_COLS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384, 32768, 65536, 131072, 262144, 655360)


def table():
    """Print how the kernels are launched on an H200, for 4096 rows or at most a gigabyte of them.

    The bytes in flight are those of the staged rows, all of which a block fetches before it waits.
    """
    import torch

    import layernorm_ext  # noqa: F401  # registers the operators

    runtime, calls = Runtime(Target("H200", 90)), Calls(torch)
    fields = ("kernel", "blocks", "threads", "cluster", "registers", "dynamic_shared")
    print("pass", "dtype", "cols", *fields, "blocks per SM,warps per SM,bytes in flight per SM", sep=",")
    dtypes = (torch.float32, torch.bfloat16)
    for name, dtype, cols in itertools.product(("forward", f"backward {MASKS[0]}"), dtypes, TABLE_COLS):
        rows = min(4096, (1 << 30) // cols // dtype.itemsize)
        if faults := runtime.run(dict(calls.rows(rows, cols, (dtype, dtype), aligned=True))[name]):
            raise SystemExit(f"{name}, {cols} columns: {faults[0]}")
        launch = runtime.launches()[0]
        warps, in_flight = launch.resident * launch.threads // 32, launch.resident * launch.dynamic_shared
        shape = (name.split()[0], str(dtype).removeprefix("torch."), cols)
        print(*shape, *(getattr(launch, field) for field in fields), launch.resident, warps, in_flight, sep=",")


PLAN_FIELDS = ("operator", "dtype", "shape", "kernel", "grid", "block", "cluster", "shared", "launches", "queries")


def launch_plan(runtime, operator, dtype, shape):
    """Return a row of PLAN_FIELDS for each kernel that a call launches, in order.

    The shape is [rows, cols], [groups, rows, cols], or [N, C, H, W] with an operator whose name begins with "images".
    `queries` counts the functions of the CUDA runtime that every call but the first calls, besides its launches.
    """
    import torch

    calls, dtypes = Calls(torch), (getattr(torch, dtype),) * 2
    make = {2: lambda: calls.rows(*shape, dtypes, aligned=True), 3: lambda: calls.groups(*shape, dtypes)}
    named = dict(make.get(len(shape), lambda: calls.images(shape, dtypes))())
    call = named.get(operator) or named[f"{operator} {MASKS[0]}"]
    if faults := runtime.run(call):
        raise SystemExit(f"{operator} {dtype} {shape}: {faults[0]}")
    launches, queries = runtime.launches(), runtime.queries(call)
    rows = []
    for launch, same in itertools.groupby(launches):
        kernel = launch.kernel + (f"<{launch.tile}>" if launch.tile else "")
        sizes = ("x".join(map(str, launch.grid)), launch.threads, launch.cluster, launch.dynamic_shared)
        rows.append((operator, dtype, "x".join(map(str, shape)), kernel, *sizes, len(list(same)), queries))
    return rows


def print_plans(target, calls):
    """Print the launches of calls such as "forward bfloat16 4096x1024"."""
    import layernorm_ext  # noqa: F401  # registers the operators

    runtime = Runtime(target)
    lines = [PLAN_FIELDS]
    for call in calls:
        operator, dtype, shape = call.rsplit(maxsplit=2)
        lines += launch_plan(runtime, operator, dtype, [*map(int, shape.split("x"))])
    widths = [max(len(str(cell)) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def build_runtime():
    """Return the path of the compiled audit_runtime.cpp."""
    return emulated_build.shared_library(emulated_build.EMULATOR / "audit_runtime.cpp")


def preloaded(*arguments):
    """Run this script with the runtime preloaded, and return whether it failed and its output."""
    environment = {**os.environ, "LD_PRELOAD": str(build_runtime())}
    command = [sys.executable, "-W", "ignore", __file__, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode != 0, done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gpus", nargs="*", metavar="GPU", help=f"any of {', '.join({t.gpu: 0 for t in TARGETS})}")
    parser.add_argument("--table", action="store_true", help="print the launches on an H200 by the number of columns")
    parser.add_argument("--plan", nargs="+", metavar="CALL", help='such as "forward bfloat16 4096x1024"')
    parser.add_argument("--target", type=int, default=0, help=argparse.SUPPRESS)  # index, for a preloaded process
    options = parser.parse_args()
    if "LD_PRELOAD" in os.environ:
        target = TARGETS[options.target]
        return table() if options.table else print_plans(target, options.plan) if options.plan else audit(target)
    chosen = [i for i, target in enumerate(TARGETS) if not options.gpus or target.gpu in options.gpus]
    runs = [["--target", str(i)] for i in chosen]
    if options.table:
        runs = [["--table"]]
    elif options.plan:
        runs = [[*runs[0], "--plan", *options.plan]]
    failed = unknown_symbols()
    for symbol in failed:
        print(f"audit_runtime.cpp lacks {symbol}")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for audit_failed, printed in pool.map(lambda arguments: preloaded(*arguments), runs):
            print(printed, end="", flush=True)
            failed = failed or audit_failed
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
