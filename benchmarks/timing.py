"""How time and memory are taken: samples of all contenders in turn, and what of their ratios is noise."""

import ctypes
import json
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

LEAST_ROUNDS = 9  # for quartiles that mean something, whatever the budget
LEAST_SECONDS = 1e-3  # of a sample on a CPU, so that the clock does not count
LEAST_CALLS = 20  # of a sample on a GPU: one event is half a microsecond off


def keep_pages() -> None:
    """Serve every allocation from the heap, and never give memory back.

    Memory that glibc returns to the system comes back as pages that the kernel clears first, which takes longer than a
    layer norm. No contender shall pay for that.
    """
    m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
    libc = ctypes.CDLL(None)
    if not (libc.mallopt(m_mmap_max, 0) and libc.mallopt(m_trim_threshold, 2**31 - 1)):
        raise RuntimeError("mallopt refused; this needs glibc, or --fresh-pages")


class Device:
    """Measures time and memory, and captures graphs.

    Args:
        name: ``"cpu"`` or ``"cuda"``.
        rotate: Bytes of input that calls go through before they meet the same again. By default four times the L2 cache
            of a GPU, whose kernels find their input in memory, and none on a CPU, whose caches hold what the layer
            before has just written.
    """

    def __init__(self, name: str, rotate: int | None = None):
        self.name = name
        self.is_cuda = name == "cuda"
        if self.is_cuda and not torch.cuda.is_available():
            raise RuntimeError(
                f"torch {torch.__version__} sees no GPU; run this on a machine with one, or --device cpu"
            )
        self.rotate = 4 * torch.cuda.get_device_properties(0).L2_cache_size if self.is_cuda else 0
        if rotate is not None:
            self.rotate = rotate
        if self.is_cuda:
            # Autograd calls a backward on the stream of its forward, and a graph captures one stream: all use this one.
            self.stream = torch.cuda.Stream()
            torch.cuda.set_stream(self.stream)

    @property
    def hows(self) -> tuple[str, ...]:
        """Return how calls are made here: one by one, and on a GPU also as a CUDA graph, without the host."""
        return ("eager", "graph") if self.is_cuda else ("eager",)

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

    def host_seconds(self, run: Callable[[], object]) -> float:
        """Return how long the host takes to issue the calls, while the device may still be at work."""
        self.wait()
        start = time.perf_counter()
        run()
        elapsed = time.perf_counter() - start
        self.wait()
        return elapsed

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        run()  # whatever is compiled or allocated once
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            results = run()

        def replay() -> object:
            graph.replay()
            return results

        return replay

    def memory(self, run: Callable[[], object]) -> tuple[int, int]:
        """Return the bytes allocated at most while `run` is called, and those that its result keeps."""
        run()
        if self.is_cuda:
            self.wait()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            result = run()
            self.wait()
            kept, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
            del result
            return peak, kept
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            result = run()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
        events = [event for event in events if event["name"] == "[memory]"]
        del result
        allocated = peak = 0
        for event in sorted(events, key=lambda event: event["ts"]):
            allocated += event["args"]["Bytes"]
            peak = max(peak, allocated)
        return peak, allocated


def sequence(calls: list[Callable[[], object]], repeats: int, grad: bool, keep: bool = False) -> Callable[[], object]:
    """Return a function of all calls, `repeats` times over.

    As many results are kept as there are calls: else all would be written to the same memory. A single call's result is
    dropped at once, as if the next layer had consumed it, unless it is to be looked at (`keep`).
    """

    def run() -> object:
        kept = deque(maxlen=len(calls) if keep or len(calls) > 1 else 0)
        with torch.set_grad_enabled(grad):
            for _ in range(repeats):
                for call in calls:
                    kept.append(call())
        return kept[-1] if kept else None

    return run


def sampler(device: Device, calls: list[Callable[[], object]], grad: bool, how: str = "eager") -> Callable[[], float]:
    """Return a function that measures the seconds per call, of calls on several sets of tensors in sequence."""
    once = sequence(calls, 1, grad)
    once()
    least = LEAST_CALLS if device.is_cuda else LEAST_SECONDS / device.seconds(once) * len(calls)
    repeats = max(1, round(least / len(calls)))
    if how == "graph":
        run = device.captured(sequence(calls, repeats, grad, keep=True))
        with torch.set_grad_enabled(grad):
            eager = calls[-1]()
        if not all(torch.equal(a, b) for a, b in zip(run(), eager, strict=True)):
            raise RuntimeError("a CUDA graph gives other numbers than an eager call")
    else:
        run = sequence(calls, repeats, grad)
    clock = device.host_seconds if how == "host" else device.seconds
    return lambda: clock(run) / (repeats * len(calls))


def in_turn(samplers: Mapping[str, Callable[[], float]], budget: float) -> dict[str, list[float]]:
    """Take samples of each in rounds, in another order every time, for about `budget` seconds."""
    for sample in samplers.values():
        sample()
    times = {name: [] for name in samplers}
    names, order = list(samplers), random.Random(0)
    end, rounds = time.perf_counter() + budget, 0
    while rounds < LEAST_ROUNDS or time.perf_counter() < end:
        order.shuffle(names)
        for name in names:
            times[name].append(samplers[name]())
        rounds += 1
    return times


@dataclass(frozen=True)
class Quartiles:
    """The middle half of some numbers."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, numbers: list[float]) -> "Quartiles":
        return cls(*statistics.quantiles(numbers, n=4))

    @classmethod
    def of_ratios(cls, theirs: list[float], ours: list[float]) -> "Quartiles":
        """Return those of theirs / ours, sample by sample: both of a pair were taken in the same round."""
        return cls.of([t / o for t, o in zip(theirs, ours, strict=True)])


def noise(again: Quartiles) -> float:
    """Return the factor within which a ratio says nothing: how far the middle half of A/A ratios reaches from 1."""
    return max(again.high, 1 / again.low)


def verdict(ratio: float, noise: float) -> str:
    """Say what a ratio theirs / ours means where two runs of the same reach `noise`: faster, slower, or noise."""
    return "faster" if ratio > noise else "slower" if ratio < 1 / noise else "noise"


AGAIN = "again"  # the first contender once more: two runs of the same, A/A


def first_line(error: BaseException) -> str:
    """Return what an error says, without the stack that may follow."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def contest(
    device: Device, contenders: Mapping[str, list[Callable[[], object]]], grad: bool, how: str, budget: float
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time the calls of all contenders in turn, the first of them twice, as AGAIN.

    Returns:
        Seconds per call of each, and the messages of those that failed.
    """
    samplers, failed = {}, {}
    for name, calls in contenders.items():
        try:
            samplers[name] = sampler(device, calls, grad, how)
            if len(samplers) == 1:
                samplers[AGAIN] = sampler(device, calls, grad, how)
        except Exception as error:  # of any kind: it is others' code
            failed[name] = first_line(error)
    return in_turn(samplers, budget * len(samplers)) if samplers else {}, failed


def figures(times: dict[str, list[float]], name: str, against: tuple[str, ...]) -> dict:
    """Return what was measured of one contender; None where it or what it is compared with did not run.

    `us` is the time of a call in microseconds; `of_X` the time of X divided by it, so that more than 1 is faster than
    X; both with the quartiles. `verdict` is about the first of `against`, within `noise`.
    """
    found = {}

    def add(quantity: str, quartiles: Quartiles | None, unit: float = 1) -> None:
        for part, suffix in (("median", ""), ("low", "_low"), ("high", "_high")):
            found[quantity + suffix] = getattr(quartiles, part) * unit if quartiles else None

    add("us", Quartiles.of(times[name]) if name in times else None, 1e6)
    for other in against:
        known = name in times and other in times
        add(f"of_{other}", Quartiles.of_ratios(times[other], times[name]) if known else None)
    first = next(iter(times), None)
    found["noise"] = noise(Quartiles.of_ratios(times[AGAIN], times[first])) if first else None
    ratio = found[f"of_{against[0]}"]
    found["verdict"] = verdict(ratio, found["noise"]) if ratio and name != against[0] else None
    return found
