"""Time the CUDA operators against torch's, and against a copy or an addition that moves the same bytes.

    python benchmarks/gpu.py                 # the shapes below, float32 and bfloat16; two minutes on an H200-like GPU
    python benchmarks/gpu.py 4096x768 --dtypes bf16 --output gpu.json

"graph": calls on many sets of tensors, more than four times the L2 cache in all, captured into a CUDA graph, so that
neither the cache nor the host counts; "eager": the same calls, one after the other. Ratios are theirs / ours (more than
1 is faster), the median of paired runs. Before a pair is timed, our results are compared with float64, and those of the
graph with the eager ones, bit by bit.
"""

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Callable

import torch
from operators import DTYPES, Operators, ratio

import layernorm_ext

SHAPES = ["32x768", "4096x768", "8192x1024", "16384x4096", "8192x8192", "4096x16384", "2048x65536", "4097x771"]
SHAPES += ["65536x128", "1048576x64"]
CALLS = 20  # in a graph, at least
ROUNDS = 30  # at least


class Device:
    """Measures time and captures graphs; on a CPU it only goes through the motions."""

    def __init__(self, name: str):
        self.name = name
        self.is_cuda = name == "cuda"
        self.cache = torch.cuda.get_device_properties(0).L2_cache_size if self.is_cuda else 1 << 20

    def seconds(self, run: Callable[[], object]) -> float:
        if not self.is_cuda:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        if not self.is_cuda:
            return run
        with torch.cuda.stream(torch.cuda.Stream()):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()

        def replay() -> object:
            graph.replay()
            return results

        return replay


class Traffic:
    """What moves as many bytes as forward or backward must, and does nothing else: a copy; x + y."""

    def __init__(self, operators: Operators):
        x, w = operators.x, operators.w
        statistics_and_parameters = sum(t.nbytes for t in operators.statistics)
        forward = 2 * x.nbytes + statistics_and_parameters + 2 * w.nbytes
        backward = 3 * x.nbytes + statistics_and_parameters + 3 * w.nbytes
        self.source, self.copied = (torch.ones(forward // 8, device=x.device) for _ in range(2))
        self.terms = [torch.ones(backward // 12, device=x.device) for _ in range(3)]

    def copy(self) -> torch.Tensor:
        return self.copied.copy_(self.source)

    def add(self) -> torch.Tensor:
        return torch.add(*self.terms[:2], out=self.terms[2])


def sequence(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """All calls, of whose results as many are kept as there are sets: else all would be written to the same memory."""

    def run() -> object:
        kept = deque(maxlen=len(calls))
        for _ in range(-(-CALLS // len(calls))):
            kept.extend(call() for call in calls)
        return kept[-1]

    return run


def compare(device: Device, contenders: dict[str, list[Callable]], budget: float, graph: bool) -> dict[str, list]:
    """Seconds per call of each contender, taken in turn, for about `budget` seconds."""
    calls = [len(c) * -(-CALLS // len(c)) for c in contenders.values()]
    runs = [sequence(c) for c in contenders.values()]
    if graph:
        runs = [device.captured(run) for run in runs]
        ours, eager = runs[list(contenders).index("ours")](), contenders["ours"][-1]()
        for actual, expected in zip(ours, eager, strict=True):
            if not torch.equal(actual, expected):
                raise SystemExit("gpu.py: a CUDA graph gives other numbers than an eager call")
    once = sum(device.seconds(run) for run in runs * 2) / 2
    rounds = max(ROUNDS, min(200, int(budget / once)))
    times = [[device.seconds(run) / n for run, n in zip(runs, calls, strict=True)] for _ in range(rounds)]
    return dict(zip(contenders, zip(*times, strict=True), strict=True))


def measure(device: Device, rows: int, cols: int, dtype: torch.dtype, budget: float) -> dict:
    first = Operators(rows, cols, dtype, device.name)
    first.check()
    count = max(1, -(-4 * device.cache // (2 * first.x.nbytes)))
    sets = [first, *(Operators(rows, cols, dtype, device.name) for _ in range(count - 1))]
    traffic = [Traffic(operators) for operators in sets]
    contests = {
        "forward": {
            "torch": [s.their_forward for s in sets],
            "ours": [s.our_forward for s in sets],
            "copy": [t.copy for t in traffic],
        },
        "backward": {
            "torch": [s.their_backward for s in sets],
            "ours": [s.our_backward for s in sets],
            "add": [t.add for t in traffic],
        },
    }
    cell = {"sets": count}
    for which, contenders in contests.items():
        for how in ("graph", "eager"):
            times = compare(device, contenders, budget, graph=how == "graph")
            cell[f"{which}_{how}"] = {
                "us": {name: statistics.median(t) * 1e6 for name, t in times.items()},
                **{f"of_{name}": ratio(t, times["ours"]) for name, t in times.items() if name != "ours"},
            }
    return cell


def machine(device: Device) -> dict:
    return {
        "device": torch.cuda.get_device_name() if device.is_cuda else "a CPU: times mean nothing",
        "cache_bytes": device.cache,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "layernorm_ext": layernorm_ext.__version__,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="ROWSxCOLS")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each comparison (default: %(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: only to try this program")
    parser.add_argument("--output", help="JSON file")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"gpu.py: torch {torch.__version__} sees no GPU; run this on a machine with one.")
    device = Device(options.device)

    report = {"machine": machine(device), "cells": {}}
    print(*(f"{name} {value}" for name, value in report["machine"].items()), sep="; ")
    columns = [f"{which} {how}" for which in ("forward", "backward") for how in ("graph", "eager")]
    print(f"{'':17}" + "".join(f"{column:>26}" for column in columns))
    print(f"{'':17}" + f"{'us':>10}{'torch':>8}{'copy':>8}" * 2 + f"{'us':>10}{'torch':>8}{'add':>8}" * 2)
    for shape in options.shapes:
        for dtype in options.dtypes:
            rows, cols = map(int, shape.split("x"))
            torch.manual_seed(0)
            try:
                cell = measure(device, rows, cols, DTYPES[dtype], options.seconds)
            except torch.OutOfMemoryError:
                print(f"{shape:>12} {dtype} does not fit into the memory of this GPU")
                continue
            report["cells"][f"{shape} {dtype}"] = cell
            row = ""
            for column, bound in zip(columns, ("copy", "copy", "add", "add"), strict=True):
                times = cell[column.replace(" ", "_")]
                row += f"{times['us']['ours']:>10.1f}{times['of_torch']['median']:>8.2f}"
                row += f"{times[f'of_{bound}']['median']:>8.2f}"
            print(f"{shape:>12} {dtype}{row}", flush=True)
    if options.output:
        with open(options.output, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
