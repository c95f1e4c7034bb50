"""Measure time: interleaved samples of all contenders, and the noise of their ratios."""

import ctypes
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping

import torch

AGAIN = "again"  # the first contender's second entry: an A/A comparison
MIN_ROUNDS = 9  # gives enough samples for quartiles
MIN_SECONDS = 1e-3  # duration of a CPU sample; much longer than the resolution of the clock
MIN_CALLS = 20  # calls in a GPU sample; CUDA events have a resolution of half a microsecond


def keep_pages() -> None:
    """Make glibc keep freed memory.

    By default glibc returns large blocks to the system, which clears the pages before it hands them out again. That
    takes longer than a layer norm and would hide the contenders' times.
    """
    m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
    libc = ctypes.CDLL(None)
    if not (libc.mallopt(m_mmap_max, 0) and libc.mallopt(m_trim_threshold, 2**31 - 1)):
        raise RuntimeError("Expected mallopt of glibc to accept the settings, but it refused")


class Device:
    """Measures time on a device, and captures CUDA graphs.

    `rotate` is the number of bytes of other tensors to use before the same tensors are used again: four times the L2
    cache of a GPU, so that kernels read from memory, and 0 on a CPU.
    """

    def __init__(self, name: str):
        self.name = name
        self.is_cuda = name == "cuda"
        if self.is_cuda and not torch.cuda.is_available():
            raise RuntimeError(
                f"torch {torch.__version__} sees no GPU; run this on a machine with one, or --device cpu"
            )
        # With one thread, times are CPU time, which other programs disturb less.
        self.clock = time.perf_counter if self.is_cuda or torch.get_num_threads() > 1 else time.process_time
        self.modes = ("eager", "graph") if self.is_cuda else ("eager",)
        self.rotate = 0
        if self.is_cuda:
            self.rotate = 4 * torch.cuda.get_device_properties(0).L2_cache_size
            # Autograd runs backward on the stream of forward, and a graph captures one stream: use one for everything.
            self.stream = torch.cuda.Stream()
            torch.cuda.set_stream(self.stream)

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the time that the device takes for `run`."""
        if not self.is_cuda:
            return self.host_seconds(run)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def host_seconds(self, run: Callable[[], object]) -> float:
        """Return the time until `run` returns; a GPU may still be executing its kernels."""
        self.wait()
        start = self.clock()
        run()
        elapsed = self.clock() - start
        self.wait()
        return elapsed

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        """Capture `run` as a CUDA graph; return a function that replays it."""
        run()  # compilation and one-time allocations must precede the capture
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            results = run()

        def replay() -> object:
            graph.replay()
            return results

        return replay


def repeat_calls(
    calls: list[Callable[[], object]], repeats: int, grad: bool, keep: bool = False
) -> Callable[[], object]:
    """Return a function that runs all calls `repeats` times and returns the last result it keeps.

    With several calls, the results of one round stay alive, so that the calls do not reuse the same memory. The result
    of a single call is dropped immediately unless `keep` is set.
    """

    def run() -> object:
        kept = deque(maxlen=len(calls) if keep or len(calls) > 1 else 0)
        with torch.set_grad_enabled(grad):
            for _ in range(repeats):
                for call in calls:
                    kept.append(call())
        return kept[-1] if kept else None

    return run


def make_sampler(
    device: Device, calls: list[Callable[[], object]], grad: bool, mode: str = "eager"
) -> Callable[[], float]:
    """Return a function that measures the seconds per call; `mode` is "eager", "graph" or "host"."""
    once = repeat_calls(calls, 1, grad)
    once()
    min_calls = MIN_CALLS if device.is_cuda else MIN_SECONDS / device.seconds(once) * len(calls)
    repeats = max(1, round(min_calls / len(calls)))
    if mode == "graph":
        run = device.captured(repeat_calls(calls, repeats, grad, keep=True))
        with torch.set_grad_enabled(grad):
            eager = calls[-1]()
        if not all(torch.equal(a, b) for a, b in zip(run(), eager, strict=True)):
            raise RuntimeError("the results of a CUDA graph differ from those of an eager call")
    else:
        run = repeat_calls(calls, repeats, grad)
    clock = device.host_seconds if mode == "host" else device.seconds
    return lambda: clock(run) / (repeats * len(calls))


def sample_in_rounds(samplers: Mapping[str, Callable[[], float]], budget: float) -> dict[str, list[float]]:
    """Sample all contenders in rounds, each in a new random order, for about `budget` seconds."""
    for sample in samplers.values():
        sample()  # the first sample may be slower, and is not used
    times = {name: [] for name in samplers}
    names, order = list(samplers), random.Random(0)
    end, rounds = time.perf_counter() + budget, 0
    while rounds < MIN_ROUNDS or time.perf_counter() < end:
        order.shuffle(names)
        for name in names:
            times[name].append(samplers[name]())
        rounds += 1
    return times


def ratios(theirs: list[float], ours: list[float]) -> list[float]:
    """Return theirs / ours for each pair of samples; both samples of a pair come from the same round."""
    return [t / o for t, o in zip(theirs, ours, strict=True)]


def noise(again: list[float]) -> float:
    """Return the factor that contains the middle half of the A/A ratios."""
    low, _, high = statistics.quantiles(again, n=4)
    return max(high, 1 / low)


def verdict(ratio: float, noise: float) -> str:
    """Return "faster" or "slower" for a ratio theirs / ours beyond the noise, else "noise"."""
    return "faster" if ratio > noise else "slower" if ratio < 1 / noise else "noise"


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def summarize(times: dict[str, list[float]], name: str, against: tuple[str, ...]) -> dict:
    """Return the statistics of one contender; a statistic without samples is None.

    `us` is the median time of a call in microseconds. `of_X`, for X in `against`, is the median of X's time divided by
    the contender's, so more than 1 is faster than X. `verdict` compares the contender with the first of `against`.
    """
    first = next(iter(times), None)
    found = {"us": statistics.median(times[name]) * 1e6 if name in times else None}
    for other in against:
        known = name in times and other in times
        found[f"of_{other}"] = statistics.median(ratios(times[other], times[name])) if known else None
    ratio = found[f"of_{against[0]}"]
    found["noise"] = noise(ratios(times[AGAIN], times[first])) if first else None
    found["verdict"] = verdict(ratio, found["noise"]) if ratio and name not in against else None
    return found
