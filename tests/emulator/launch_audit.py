"""Runs the compiled CUDA host code without a GPU, and lists the launches that each GPU would refuse.

python tests/emulator/launch_audit.py           every GPU
python tests/emulator/launch_audit.py H200      one GPU
python tests/emulator/launch_audit.py --table   prints the launches on an H200 by the number of columns

It needs a package that was built with CUDA (FORCE_CUDA=1, no GPU needed), g++, and cuobjdump from the CUDA toolkit or
from the package triton. The operators are called with CPU tensors through the dispatch key CUDA, and the preloaded
audit_runtime.cpp replaces the CUDA runtime. Nothing is computed, so the tensors' memory is never accessed.
"""

import argparse
import concurrent.futures
import ctypes
import dataclasses
import itertools
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
        fields = ("kernel", "blocks", "threads", "cluster", "dynamic_shared", "registers", "resident")
        lines = (line.split() for line in self._library.audit_launches().decode().splitlines())
        return [dict(zip(fields, (name, *map(int, numbers)), strict=True)) for name, *numbers in lines]


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


def bytes_in_flight(launch):
    """Return the bytes that the loads of a multiprocessor's blocks have in flight: all of their staged rows."""
    return launch["resident"] * launch["dynamic_shared"]


def table():
    """Print how the kernels are launched on an H200, for 4096 rows or at most a gigabyte of them."""
    import torch

    import layernorm_ext  # noqa: F401  # registers the operators

    runtime, calls = Runtime(Target("H200", 90)), Calls(torch)
    fields = ("blocks", "threads", "cluster", "registers", "dynamic_shared")
    print("pass", "dtype", "cols", "kernel", *fields, "blocks per SM,warps per SM,bytes in flight per SM", sep=",")
    dtypes = (torch.float32, torch.bfloat16)
    for name, dtype, cols in itertools.product(("forward", f"backward {MASKS[0]}"), dtypes, TABLE_COLS):
        rows = min(4096, (1 << 30) // cols // dtype.itemsize)
        if faults := runtime.run(dict(calls.rows(rows, cols, (dtype, dtype), aligned=True))[name]):
            raise SystemExit(f"{name}, {cols} columns: {faults[0]}")
        names = re.compile(r"\d((?:forward|backward|add)_[a-z_]+?)I")
        by_kernel = {names.findall(launch["kernel"])[-1]: launch for launch in reversed(runtime.launches())}
        for kernel, launch in by_kernel.items():
            if kernel == "add_partials":
                continue
            resident = launch["resident"]
            in_flight = bytes_in_flight(launch)
            shape = (name.split()[0], str(dtype).removeprefix("torch."), cols, kernel)
            print(*shape, *map(launch.get, fields), resident, resident * launch["threads"] // 32, in_flight, sep=",")


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
    parser.add_argument("--target", type=int, help=argparse.SUPPRESS)  # index, for a preloaded process
    options = parser.parse_args()
    if "LD_PRELOAD" in os.environ:
        return table() if options.table else audit(TARGETS[options.target])
    chosen = [i for i, target in enumerate(TARGETS) if not options.gpus or target.gpu in options.gpus]
    runs = [["--table"]] if options.table else [["--target", str(i)] for i in chosen]
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
