"""Time the CPU operators against torch's, in one process and in turn.

    python benchmarks/cpu.py                 # the shapes below, float32 and bfloat16
    python benchmarks/cpu.py 4096x768 --dtypes bf16 --threads 1 --output cpu.json

Prints, for each shape and dtype, the time of our operator, the median of the ratios (torch's time / ours, so more
than 1 is faster) of paired runs with its quartiles, and the forward's speed as a fraction of a copy of the same bytes.
Before a pair is timed, its results are compared with float64.

Memory that the allocator returns to the system comes back as pages that the kernel clears first, which takes longer
than a layer norm. By default glibc is told to keep its memory, so that neither contender pays for that; --fresh-pages
leaves it as it is.
"""

import argparse
import ctypes
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
from operators import DTYPES, Operators, ratio
from tqdm import tqdm

import layernorm_ext
from layernorm_ext._ops import _C

SHAPES = ["32x128", "32x768", "512x768", "4096x768", "4097x771", "8192x1024", "1024x4096", "256x16384", "1024x16384"]
SHAPES += ["64x65536", "65536x64", "262144x32"]


def keep_pages() -> None:
    """Serve every allocation from the heap, and never give memory back."""
    m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
    libc = ctypes.CDLL(None)
    if not (libc.mallopt(m_mmap_max, 0) and libc.mallopt(m_trim_threshold, 2**31 - 1)):
        raise SystemExit("cpu.py: mallopt refused; this needs glibc, or --fresh-pages")


def seconds(function: Callable, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def in_turn(functions: list[Callable], budget: float) -> list[list[float]]:
    """Times per call of each function, taken in rounds A B C, A B C, ... for about `budget` seconds."""
    for function in functions * 2:
        function()
    slowest = max(seconds(function, 1) for function in functions)
    calls = max(1, int(1e-3 / slowest))
    rounds = max(9, min(200, int(budget / (calls * slowest * len(functions)))))
    return list(zip(*([seconds(f, calls) for f in functions] for _ in range(rounds)), strict=True))


def measure(rows: int, cols: int, dtype: torch.dtype, budget: float) -> dict:
    operators = Operators(rows, cols, dtype)
    operators.check()
    copy = torch.empty_like(operators.x)
    forward = in_turn(
        [operators.their_forward, operators.our_forward, lambda: copy.copy_(operators.x)],
        budget,
    )
    backward = in_turn([operators.their_backward, operators.our_backward], budget)
    return {
        "forward_us": statistics.median(forward[1]) * 1e6,
        "forward_ratio": ratio(forward[0], forward[1]),
        "forward_of_copy": ratio(forward[2], forward[1]),
        "backward_us": statistics.median(backward[1]) * 1e6,
        "backward_ratio": ratio(backward[0], backward[1]),
    }


def machine() -> dict:
    with open("/proc/cpuinfo") as file:
        models = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "instruction_set": _C.cpu_capability(),
        "torch": str(torch.__version__),
        "layernorm_ext": layernorm_ext.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="ROWSxCOLS")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, help="default: torch's choice")
    parser.add_argument("--seconds", type=float, default=1, help="for each comparison (default: %(default)s)")
    parser.add_argument("--fresh-pages", action="store_true", help="do not keep memory from the system")
    parser.add_argument("--output", help="JSON file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if not options.fresh_pages:
        keep_pages()

    report = {"machine": machine(), "fresh_pages": options.fresh_pages, "cells": {}}
    print(*(f"{name} {value}" for name, value in report["machine"].items()), sep="; ")
    print(f"{'':16} {'forward us':>10} {'torch / ours':>18} {'of copy':>8} {'backward us':>12} {'torch / ours':>18}")
    cells = [(shape, dtype) for shape in options.shapes for dtype in options.dtypes]
    for shape, dtype in tqdm(cells, leave=False, disable=None):
        rows, cols = map(int, shape.split("x"))
        torch.manual_seed(0)
        cell = report["cells"][f"{shape} {dtype}"] = measure(rows, cols, DTYPES[dtype], options.seconds)
        forward, backward = (
            "{median:5.2f} ({low:4.2f}-{high:4.2f})".format(**cell[name])
            for name in ("forward_ratio", "backward_ratio")
        )
        tqdm.write(
            f"{shape:>11} {dtype} {cell['forward_us']:10.1f} {forward:>18} {cell['forward_of_copy']['median']:8.2f} "
            f"{cell['backward_us']:12.1f} {backward:>18}"
        )
    for dtype in options.dtypes:
        for which in ("forward", "backward"):
            medians = [c[f"{which}_ratio"]["median"] for name, c in report["cells"].items() if name.endswith(dtype)]
            mean = statistics.geometric_mean(medians)
            print(f"{which} {dtype}: geometric mean {mean:.2f}, worst {min(medians):.2f}")
    if options.output:
        with open(options.output, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
