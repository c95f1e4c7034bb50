"""The regression guard: two revisions of this package, built here, timed in turn in processes of their own.

Three processes take samples in turn: the base, the base again, and the head. Where the two processes of the base differ
is noise: of the clock and the machine, and of where a process happens to have its memory; so all are started anew
several times. A case counts as slower or faster if the median of the ratios base / head is beyond that, and if it is so
once more when the case is measured again.
"""

import io
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from .contenders import enter
from .kernels import sets_of
from .runs import ROOT, output
from .timing import AGAIN, Device, Quartiles, figures, in_turn, keep_pages, noise, sampler, verdict

BASE, HEAD = "base", "head"
Cell = tuple[int, int, str, str]  # rows, columns, dtypes, pass


def build(revision: str | None, folder: Path) -> Path:
    """Install a revision, or the working tree (None), into a folder of its own, for the torch that is installed.

    Returns:
        The folder, which is reused if the revision has been built before.
    """
    name = "working-tree"
    if revision is not None:
        name = output("git", "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
        if not name:
            raise ValueError(f"Expected a revision of {ROOT}, but git knows no {revision!r}")
    installed = (folder / name).resolve()
    if revision is not None and installed.exists():
        return installed
    source, target = ROOT, installed.with_suffix(".partial")
    shutil.rmtree(target, ignore_errors=True)
    if revision is not None:
        source = installed.with_suffix(".source")
        archive = subprocess.run(["git", "archive", name], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(source, filter="data")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(source)]
    subprocess.run(pip, check=True)
    shutil.rmtree(installed, ignore_errors=True)
    target.rename(installed)
    if revision is not None:
        shutil.rmtree(source)
    return installed


class Worker:
    """A process that has one build loaded, and takes a sample when asked to."""

    def __init__(self, installed: Path, device: str, threads: int | None):
        # This code serves both builds; of the checkout's own package, which comes last, nothing is imported.
        places = [str(installed), *sys.path[1:], str(ROOT)]
        code = (
            f"import sys; sys.path[:] = {places!r}; from benchmarks import compare; compare.work({device!r}, {threads})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=installed, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        loaded = Path(self.ask("file"))
        if not loaded.is_relative_to(installed):
            raise RuntimeError(f"Expected the package in {installed} to be loaded, but got {loaded}")

    def ask(self, what: str, *arguments: object) -> object:
        self.process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a process ended with status {self.process.wait()} when it was asked for {what}")
        return json.loads(answer)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.stdin.close()
        self.process.wait()


def work(device_name: str, threads: int | None) -> None:
    """Answer what a Worker asks, in its process."""
    import torch

    import layernorm_ext

    keep_pages()
    if threads:
        torch.set_num_threads(threads)
    device = Device(device_name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    sample: Callable[[], float] | None = None
    held: list | None = None
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        if what == "file":
            answer = layernorm_ext.__file__
        elif what == "prepare":
            *shape, which, checks = arguments
            if shape != held:  # the passes of a case follow each other
                torch.manual_seed(0)
                sets, held = sets_of(device, *shape), shape
                entry = enter(["ours"], sets, checks)[0]
            status, answer = entry.status(which, {})
            if status == "ok":
                sample = sampler(device, entry.each(which), which != "forward", device.hows[-1])
        else:
            answer = sample()
        print(json.dumps(answer), file=answers, flush=True)


def sample(
    builds: dict[str, Path], cells: Iterable[Cell], device: str, threads: int | None, starts: int, budget: float
) -> Iterator[tuple[Cell, dict[str, list[float]] | str]]:
    """Yield a cell and its times by process, or what is wrong with a build, once for each cell and start."""
    for start in range(starts):
        with ExitStack() as stack:
            places = {BASE: builds[BASE], AGAIN: builds[BASE], HEAD: builds[HEAD]}
            workers = {n: stack.enter_context(Worker(place, device, threads)) for n, place in places.items()}
            for cell in cells:
                # Results do not change from process to process: each build's are looked at once.
                wrong = {n: worker.ask("prepare", *cell, start == 0 and n != AGAIN) for n, worker in workers.items()}
                if any(wrong.values()):
                    yield cell, "; ".join(f"{name}: {text}" for name, text in wrong.items() if text)
                    continue
                samplers = {name: (lambda worker=worker: worker.ask("sample")) for name, worker in workers.items()}
                yield cell, in_turn(samplers, budget)


def judge(starts: list[dict[str, list[float]]]) -> dict:
    """Return what the samples of one cell say, of one or more starts, each with the keys base, again and head.

    The noise is what pairs of samples of the same build reach, or the medians of whole processes if that is more.
    """
    together = {name: [t for start in starts for t in start[name]] for name in (BASE, AGAIN, HEAD)}
    found = figures(together, HEAD, (BASE,))
    medians = [Quartiles.of_ratios(start[AGAIN], start[BASE]).median for start in starts]
    found["noise"] = max(found["noise"], *(noise(Quartiles(median, median, median)) for median in medians))
    found["verdict"] = verdict(found["of_base"], found["noise"])
    return found


def confirmed(first: dict, second: dict) -> dict:
    """Return the first judgement if the second agrees with it, else the second, which is then taken for noise."""
    return first if first["verdict"] == second["verdict"] else second | {"verdict": "noise"}


def measure(
    builds: dict[str, Path],
    cells: list[Cell],
    device: str,
    threads: int | None,
    starts: int,
    budget: float,
    progress: Callable[[Iterable, int], Iterable] = lambda items, total: items,
) -> Iterator[dict]:
    """Yield a record for each cell."""

    def collect(cells: list[Cell]) -> tuple[dict[Cell, dict], dict[Cell, str]]:
        times: dict[Cell, list] = {}
        failed: dict[Cell, str] = {}
        for cell, result in progress(sample(builds, cells, device, threads, starts, budget), starts * len(cells)):
            if isinstance(result, str):
                failed[cell] = result
            else:
                times.setdefault(cell, []).append(result)
        return {cell: judge(starts) for cell, starts in times.items()}, failed

    found, failed = collect(cells)
    suspects = [cell for cell, judgement in found.items() if judgement["verdict"] != "noise"]
    again = collect(suspects)[0] if suspects else {}
    for cell in cells:
        record = dict(zip(("rows", "cols", "dtypes", "pass"), cell, strict=True)) | {"contender": HEAD}
        judgement = found.get(cell) or figures({}, HEAD, (BASE,))
        if cell in again:
            judgement = confirmed(judgement, again[cell])
        status, message = ("failed", failed[cell]) if cell in failed else ("ok", "")
        yield record | {"status": status, "message": message} | judgement


def summary(records: list[dict]) -> tuple[str, bool]:
    """Return one sentence about all cells, and whether the head may pass."""
    ratios = [r["of_base"] for r in records if r["of_base"]]
    counts = {kind: sum(r["verdict"] == kind for r in records) for kind in ("faster", "slower", "noise")}
    failed = sum(r["status"] == "failed" for r in records)
    mean = statistics.geometric_mean(ratios) if ratios else math.nan
    text = f"base / head {mean:.3f} on average; " + ", ".join(f"{n} {kind}" for kind, n in counts.items())
    return text + f", {failed} failed", not (counts["slower"] or failed)
