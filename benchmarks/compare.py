"""Compare the speed of a revision of this package, the base, and of the working tree, the head.

Three processes are sampled in turn: the base, the base again, and the head. The difference between the two base
processes is noise from the clock, the machine and each process's memory layout. All processes are started several
times, because the layout changes with each start. A case is slower or faster if the median ratio base / head is further
from 1 than the noise, in two measurements.
"""

import shutil
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import click
import torch

import layernorm_ext

from .contenders import bind_contenders
from .norm import make_cases
from .runs import ROOT, output
from .timing import AGAIN, Device, keep_pages, make_sampler, ratios, sample_in_rounds, summarize, verdict

BASE, HEAD = "base", "head"
STARTS = 3  # number of times to start the processes
ComparedCase = tuple[int, int, str, str]  # rows, columns, dtypes, pass


def build_both(base: str, folder: Path) -> dict[str, Path]:
    """Install the revision `base`, unless an earlier call did, and the working tree; return their folders."""
    name = output("git", "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}")
    if not name:
        raise click.ClickException(f"Expected a revision of {ROOT}, but git knows no {base!r}")
    builds = {BASE: folder.resolve() / name, HEAD: folder.resolve() / "working-tree"}
    if not builds[BASE].exists():
        install(f"git+{ROOT.as_uri()}@{name}", builds[BASE])
    shutil.rmtree(builds[HEAD], ignore_errors=True)
    install(str(ROOT), builds[HEAD])
    return builds


def install(source: str, target: Path) -> None:
    partial = target.with_suffix(".partial")  # an interrupted build must not be reused
    shutil.rmtree(partial, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-deps"]
    subprocess.run([*pip, "--target", str(partial), source], check=True)
    partial.rename(target)


def start(installed: Path, device: str) -> ProcessPoolExecutor:
    """Start a process that has one build loaded."""
    worker = ProcessPoolExecutor(1, get_context("spawn"))
    sys.path.insert(0, str(installed))  # the new process copies the path, so it imports the build
    try:
        worker.submit(initialize, installed, device).result()
    finally:
        sys.path.remove(str(installed))
    return worker


# The functions below run in the process that start() starts, which keeps its state here.
state = SimpleNamespace()


def initialize(installed: Path, device: str) -> None:
    state.loaded = Path(layernorm_ext._C.__file__)
    if not state.loaded.is_relative_to(installed):
        raise RuntimeError(f"Expected the package in {installed} to be loaded, but got {state.loaded}")
    keep_pages()
    state.device = Device(device)


def prepare(rows: int, cols: int, dtypes: str, pass_name: str) -> None:
    """Set up a case; fail if its results are wrong."""
    torch.manual_seed(0)
    (entry,) = bind_contenders(["ours"], make_cases(state.device, rows, cols, dtypes))
    if message := entry.record(pass_name, {})["message"]:
        raise RuntimeError(f"{state.loaded}: {message} for {rows}x{cols} in {dtypes}")
    mode = state.device.modes[-1]
    state.sample = make_sampler(state.device, entry.functions(pass_name), pass_name != "forward", mode)


def take_sample() -> float:
    return state.sample()


def sample(
    builds: dict[str, Path], cases: list[ComparedCase], device: str, budget: float
) -> Iterator[tuple[ComparedCase, dict[str, list[float]]]]:
    """Yield each case with its times by process, once for each start."""
    for _ in range(STARTS):
        with ExitStack() as stack:
            folders = {BASE: builds[BASE], AGAIN: builds[BASE], HEAD: builds[HEAD]}
            workers = {name: stack.enter_context(start(folder, device)) for name, folder in folders.items()}
            samplers = {name: (lambda w=worker: w.submit(take_sample).result()) for name, worker in workers.items()}
            for case in cases:
                for worker in workers.values():
                    worker.submit(prepare, *case).result()
                yield case, sample_in_rounds(samplers, budget)


def judge(starts: list[dict[str, list[float]]]) -> dict:
    """Return the statistics of one case; each start maps BASE, AGAIN and HEAD to their samples.

    The noise is the scatter within processes or, if it is larger, that of the medians of the starts.
    """
    samples_of_all_starts = {name: [t for start in starts for t in start[name]] for name in (BASE, AGAIN, HEAD)}
    found = summarize(samples_of_all_starts, HEAD, (BASE,))
    medians = [statistics.median(ratios(start[AGAIN], start[BASE])) for start in starts]
    found["noise"] = max(found["noise"], *medians, *(1 / median for median in medians))
    found["verdict"] = verdict(found["of_base"], found["noise"])
    return found


def measure(builds: dict[str, Path], cases: list[ComparedCase], device: str, budget: float) -> Iterator[dict]:
    """Yield a record for each case; time it again if it seems faster or slower."""

    def judged(cases: list[ComparedCase]) -> dict[ComparedCase, dict]:
        times = defaultdict(list)
        samples = sample(builds, cases, device, budget) if cases else ()
        with click.progressbar(samples, STARTS * len(cases), "compare", file=sys.stderr) as results:
            for case, result in results:
                times[case].append(result)
        return {case: judge(starts) for case, starts in times.items()}

    first = judged(cases)
    repeated = judged([case for case in cases if first[case]["verdict"] != "noise"])
    for case in cases:
        judgement = first[case]
        if case in repeated and repeated[case]["verdict"] != judgement["verdict"]:
            judgement = repeated[case] | {"verdict": "noise"}
        record = dict(zip(("rows", "cols", "dtypes", "pass"), case, strict=True))
        yield record | {"contender": HEAD, "status": "ok", "message": ""} | judgement


def summary(records: list[dict]) -> tuple[str, bool]:
    """Return one line about all cases, and whether no case is slower."""
    mean = statistics.geometric_mean(r["of_base"] for r in records)
    counts = Counter(r["verdict"] for r in records)
    text = ", ".join(f"{counts[kind]} {kind}" for kind in ("faster", "slower", "noise"))
    return f"base / head {mean:.3f} (geometric mean); {text}", not counts["slower"]
