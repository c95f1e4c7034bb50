"""Compare the speed of two revisions of this package, which run in separate processes.

Three processes are sampled in turn: the base, the base again, and the head. The difference between the two base
processes is noise from the clock, the machine and each process's memory layout, so all processes are restarted several
times. A case is slower or faster if the median ratio base / head exceeds the noise in two measurements.
"""

import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import torch

import layernorm_ext

from .contenders import bind_contenders
from .kernels import make_cases
from .runs import ROOT, output
from .timing import AGAIN, Device, keep_pages, make_sampler, ratios, sample_in_rounds, summarize, verdict

BASE, HEAD = "base", "head"
Cell = tuple[int, int, str, str]  # rows, columns, dtypes, pass


def build(revision: str | None, folder: Path) -> Path:
    """Install a revision, or the working tree (None), into a subfolder, unless the revision is there; return it."""
    if revision is None:
        name = "working-tree"
    else:
        name = output("git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
        if not name:
            raise ValueError(f"Expected a revision of {ROOT}, but git knows no {revision!r}")
        if (folder / name).exists():
            return (folder / name).resolve()
    installed = (folder / name).resolve()
    partial = installed.with_suffix(".partial")  # an interrupted build must not be reused
    with tempfile.TemporaryDirectory() as work:
        source = ROOT
        if revision is not None:
            source, archive = Path(work, "source"), Path(work, "source.tar")
            subprocess.run(["git", "archive", "--output", str(archive), name], cwd=ROOT, check=True)
            shutil.unpack_archive(archive, source, filter="data")
        shutil.rmtree(partial, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial), str(source)]
        subprocess.run(pip, check=True)
    shutil.rmtree(installed, ignore_errors=True)
    partial.rename(installed)
    return installed


class Worker:
    """A process that has one build loaded and takes samples on request."""

    def __init__(self, installed: Path, device: str, threads: int | None):
        self.pool = ProcessPoolExecutor(1, get_context("spawn"), initialize, (device, threads))
        sys.path.insert(0, str(installed))  # the new process copies the path, so it imports the build
        try:
            loaded = Path(self.ask(loaded_package))
        finally:
            sys.path.remove(str(installed))
        if not loaded.is_relative_to(installed):
            self.pool.shutdown()
            raise RuntimeError(f"Expected the package in {installed} to be loaded, but got {loaded}")

    def ask(self, function: Callable, *arguments: object) -> object:
        return self.pool.submit(function, *arguments).result()


# The functions below run in the process of a Worker, which keeps its state here.
state = SimpleNamespace(shape=None)


def initialize(device: str, threads: int | None) -> None:
    keep_pages()
    if threads:
        torch.set_num_threads(threads)
    state.device = Device(device)


def loaded_package() -> str:
    return layernorm_ext.__file__


def prepare(rows: int, cols: int, dtypes: str, pass_name: str, checks: bool) -> str:
    """Set up a cell; return a message if its results are wrong."""
    if state.shape != (rows, cols, dtypes):  # the passes of a case share its tensors
        torch.manual_seed(0)
        state.sets, state.shape = make_cases(state.device, rows, cols, dtypes), (rows, cols, dtypes)
        state.entry = bind_contenders(["ours"], state.sets, checks)[0]
    record = state.entry.record(pass_name, {})
    if record["status"] == "ok":
        functions, mode = state.entry.functions(pass_name), state.device.modes[-1]
        state.sample = make_sampler(state.device, functions, pass_name != "forward", mode)
    return record["message"]


def take_sample() -> float:
    return state.sample()


def sample(
    builds: dict[str, Path], cells: Iterable[Cell], device: str, threads: int | None, starts: int, budget: float
) -> Iterator[tuple[Cell, dict[str, list[float]] | str]]:
    """Yield each cell with its times by process, or with the message of a failed build, once for each start."""
    for start in range(starts):
        with ExitStack() as stack:
            folders = {BASE: builds[BASE], AGAIN: builds[BASE], HEAD: builds[HEAD]}
            workers = {name: Worker(folder, device, threads) for name, folder in folders.items()}
            for worker in workers.values():
                stack.enter_context(worker.pool)
            for cell in cells:
                # The results of a build are checked once, in the first of its processes.
                wrong = {n: worker.ask(prepare, *cell, start == 0 and n != AGAIN) for n, worker in workers.items()}
                if any(wrong.values()):
                    yield cell, "; ".join(f"{name}: {text}" for name, text in wrong.items() if text)
                    continue
                samplers = {name: (lambda worker=worker: worker.ask(take_sample)) for name, worker in workers.items()}
                yield cell, sample_in_rounds(samplers, budget)


def judge(starts: list[dict[str, list[float]]]) -> dict:
    """Return the statistics of one cell; each start maps base, again and head to their samples.

    The noise is the larger of the scatter within processes and the scatter of the processes' medians.
    """
    together = {name: [t for start in starts for t in start[name]] for name in (BASE, AGAIN, HEAD)}
    found = summarize(together, HEAD, (BASE,))
    medians = [statistics.median(ratios(start[AGAIN], start[BASE])) for start in starts]
    found["noise"] = max(found["noise"], *medians, *(1 / median for median in medians))
    found["verdict"] = verdict(found["of_base"], found["noise"])
    return found


def measure(cells: list[Cell], sample: Callable[[list[Cell]], Iterable]) -> Iterator[dict]:
    """Yield a record for each cell; time it again if it seems faster or slower. `sample` takes the cells to time."""

    def collect(cells: list[Cell]) -> tuple[dict[Cell, dict], dict[Cell, str]]:
        times, failed = defaultdict(list), {}
        for cell, result in sample(cells):
            if isinstance(result, str):
                failed[cell] = result
            else:
                times[cell].append(result)
        return {cell: judge(starts) for cell, starts in times.items()}, failed

    found, failed = collect(cells)
    suspects = [cell for cell, judgement in found.items() if judgement["verdict"] != "noise"]
    again = collect(suspects)[0] if suspects else {}
    for cell in cells:
        record = dict(zip(("rows", "cols", "dtypes", "pass"), cell, strict=True)) | {"contender": HEAD}
        judgement = found.get(cell) or summarize({}, HEAD, (BASE,))
        if cell in again and again[cell]["verdict"] != judgement["verdict"]:
            judgement = again[cell] | {"verdict": "noise"}
        record |= {"status": "failed" if cell in failed else "ok", "message": failed.get(cell, "")}
        yield record | judgement


def summary(records: list[dict]) -> tuple[str, bool]:
    """Return one line about all cells, and whether no cell is slower or failed."""
    ratios = [r["of_base"] for r in records if r["of_base"]]
    counts = Counter(r["verdict"] if r["status"] == "ok" else "failed" for r in records)
    mean = statistics.geometric_mean(ratios) if ratios else math.nan
    text = ", ".join(f"{counts[kind]} {kind}" for kind in ("faster", "slower", "noise", "failed"))
    return f"base / head {mean:.3f} (geometric mean); {text}", not (counts["slower"] or counts["failed"])
