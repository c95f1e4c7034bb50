"""Runs what needs a GPU, in parts, and leaves logs and summaries: python tests/gpu.py PART ... --out FOLDER.

    build     the package with its CUDA kernels, from this checkout, with what is installed: nothing is downloaded
    test      the ordinary tests, on the backend cuda
    sanitize  every path of the kernels under compute-sanitizer's four tools, each of which must report nothing
    graphs    forward, backward and a training step as CUDA graphs: the bits of eager calls
    devices   another GPU than the current one; needs two
    bench-*   forward, backward and both against torch's and a copy, with their errors, for bf16, fp32 and bf16-fp32
    peers-*   the same against all that is installed, torch.compile among it
    profile   a report of Nsight Compute, FOLDER/profile/FAMILY.ncu-rep and .csv, for each family of kernels
    quick     how long forward and backward take against torch's and a copy

    bench, peers, all   these parts in turn, whichever fail; all is everything but quick

A part ends within eight minutes. In FOLDER are then PART.log and PART.json (date, commit, GPU, driver, versions,
counts), and summary.json, of all parts. What has passed for the same commit, without changes, on the same GPU and
driver, by the same torch, is not repeated: what was interrupted goes on. Ends with an error if anything failed.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import workload

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 450  # for what one part runs; the rest of its eight minutes is for starting, and for ending what does not end
ENDED = 124  # the status of what has been ended for time
SAME = ("commit", "gpus", "driver", "python", "torch")  # what results are not repeated for
# What is added up over a part's pieces; what summary.json repeats of PART.json.
COUNTS = ("tests", "failures", "errors", "skipped", "reports", "records")
REPORTED = ("passed", "not_applicable", "missing", "date", "seconds", *COUNTS)
FILES_OF = 500  # tests that one run of pytest is given, or the rest of a file
ON_GPU = "tests/test_cuda_on_gpu.py"
PATHS = ["-k", "every_path", ON_GPU]  # for the sanitizer, which makes kernels a hundred times as slow
GRAPHS = ["-k", "graph", ON_GPU]
DEVICES = ["-k", "another_gpu", ON_GPU]
KERNELS = ["-m", "benchmarks", "kernels", "--device", "cuda"]
QUICK = ["--contenders", "ours,torch", "--passes", "forward,backward", "--seconds", "0.15"]
DTYPES = ["bf16", "fp32", "bf16-fp32"]
# memcheck can tell one tensor from the next only if each is an allocation of its own. initcheck has to see torch's
# kernels write what ours read; the others look at ours alone.
OURS = ["--kernel-name", "kns=layernorm"]
TOOLS = {"memcheck": OURS, "racecheck": [*OURS, "--racecheck-report", "all"], "initcheck": [], "synccheck": OURS}
# The clocks are left alone: the GPU may be others', too.
NCU = ["--set", "full", "--target-processes", "all", "--clock-control", "none", "--launch-count", "1"]
NO_COUNTERS = re.compile(r"ERR_NVGPUCTRPERM.*|Failed to initialize the profiler.*")  # what ncu says without them


class Missing(SystemExit):
    """Ends the run with a sentence about what it needs."""

    def __init__(self, problem: str, remedy: str):
        super().__init__(f"gpu.py: {problem}; {remedy}.")


class NotApplicable(Exception):
    """Says why a part has no meaning on this machine: it has then neither passed nor failed."""


def check_gpu() -> None:
    """Refuse to run where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise Missing(f"torch {torch.__version__} sees no GPU", "run this on a machine with one, and its driver")


def check_package() -> None:
    """Refuse to test a package without CUDA kernels."""
    try:
        from layernorm_ext import _build_info
    except ImportError as error:
        raise Missing(f"layernorm_ext cannot be imported ({error})", "run `make gpu-build` first") from None
    if not _build_info.with_cuda:
        reason = _build_info.cuda_reason
        raise Missing(f"layernorm_ext was built without CUDA kernels ({reason})", "run `make gpu-build` first")


def devices_and_capability() -> tuple[int, tuple[int, int]]:
    """Return how many GPUs there are, and the first one's compute capability."""
    import torch

    return torch.cuda.device_count(), torch.cuda.get_device_capability()


def cuda_home() -> Path:
    """Return where the CUDA toolkit should be."""
    from torch.utils.cpp_extension import CUDA_HOME

    return Path(os.environ.get("CUDA_HOME") or CUDA_HOME or "/usr/local/cuda")


def tool(name: str, *folders: Path) -> str | None:
    """Return the path of a program, which is on PATH, in the toolkit or in other folders."""
    places = [os.environ.get("PATH", ""), str(cuda_home() / "bin"), *map(str, folders)]
    return shutil.which(name, path=os.pathsep.join(places))


def output(*command: str) -> str:
    """Return what a command prints, or "" where it cannot be run."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine(commit: str | None = None) -> dict:
    """Return what a result depends on besides the package; the commit is git's, where there is a repository."""
    import torch

    release = re.search(r"release ([\d.]+)", output(tool("nvcc") or "nvcc", "--version"))
    return {
        "commit": commit or output("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or "unknown",
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "toolkit": release and release[1],
    }


def package() -> dict:
    """Return what a result depends on of the package, if it can be imported."""
    try:
        import layernorm_ext
        from layernorm_ext import _build_info
    except ImportError:
        return {}
    return {"layernorm_ext": layernorm_ext.__version__, "architectures": _build_info.cuda_architectures}


def is_same(before: dict, now: dict) -> bool:
    """Say whether results need not be taken again: not if files have changes that no commit has."""
    known = now["commit"] != "unknown" and not now["commit"].endswith("-dirty")
    return known and all(before.get(name) == now[name] for name in SAME)


def run(command: list[str], log: Path, limit: float, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a command, show what it prints and add it to the log.

    Returns:
        Its status, which is ENDED after `limit` seconds, and what it has printed.
    """
    printed = []
    with open(log, "a") as file:
        file.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            ["timeout", "--kill-after=10", f"{limit:.0f}", *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for line in process.stdout:
            sys.stdout.write(line)
            file.write(line)
            printed.append(line)
        return process.wait(), "".join(printed)


@dataclass
class Task:
    """One run of a part."""

    part: str
    folder: Path
    arguments: list[str]  # for pytest or the benchmark
    before: dict[str, dict] | None  # the pieces of a run that this one goes on with; None: it begins anew
    end: float  # by time.monotonic()

    @property
    def log(self) -> Path:
        return self.folder / f"{self.part}.log"

    def run(self, command: list[str], environment: dict[str, str] | None = None) -> tuple[int, str]:
        """Run a command in what is left of the time."""
        return run(command, self.log, max(1, self.end - time.monotonic()), environment)

    def pytest(self, piece: str, arguments: list[str], under: tuple[str, ...] = (), **environment: str) -> tuple:
        """Run tests, which other programs may be told to do; return status, what was printed, and counts."""
        report = self.folder / f"{self.part}-{piece}.xml"
        report.unlink(missing_ok=True)
        command = [*under, sys.executable, "-m", "pytest", "--backends", "cuda", f"--junitxml={report}", *arguments]
        return *self.run(command, environment), counts_of_tests(report)


Pieces = dict[str, Callable[[], dict]]  # name -> runs it, and returns "passed", "status" and counts


def counts_of_tests(report: Path) -> dict[str, int]:
    """Return the counts of pytest's XML; no tests at all where there is none, as after a crash."""
    suite = ET.parse(report).getroot().find("testsuite") if report.exists() else {}
    return {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}


def have_passed(counts: dict[str, int]) -> bool:
    """Say whether tests have run, and none has failed."""
    return counts["tests"] > counts["skipped"] and not counts["failures"] and not counts["errors"]


def installed_module() -> str:
    """Return a digest of the compiled module that is installed, or "" if none is."""
    digest = "import hashlib; from layernorm_ext import _C; print(hashlib.sha256(open(_C.__file__, 'rb').read())"
    return output(sys.executable, "-c", f"{digest}.hexdigest())")


def build(task: Task) -> Pieces:
    """Install the package, unless what is installed is what an earlier run has built."""

    def pip() -> dict:
        install = ["-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps", "."]
        environment = {"FORCE_CUDA": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        status, _ = task.run([sys.executable, *install], environment)
        if status == 0:
            status, _ = task.run([sys.executable, "-m", "layernorm_ext"])
        importlib.invalidate_caches()
        module = installed_module()
        return {"passed": status == 0 and bool(module), "status": status, "module": module}

    before = (task.before or {}).get("pip", {})
    if before.get("passed") and before["module"] != installed_module():
        task.before = None
    return {"pip": pip}


def groups_of_files() -> list[list[str]]:
    """Return the files with tests of the backend cuda: as many together as make FILES_OF tests."""
    collected = output(sys.executable, "-m", "pytest", "--backends", "cuda", "-k", "cuda", "--collect-only", "-q")
    counts = Counter(line.partition("::")[0] for line in collected.splitlines() if "::" in line)
    groups, size = [], FILES_OF
    for file, count in counts.items():
        if size >= FILES_OF:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += count
    return groups


def test(task: Task) -> Pieces:
    """Run the tests, in several processes where pytest-xdist is installed."""
    processes = ["-n", "8"] if importlib.util.find_spec("xdist") else []

    def chosen(piece: str, *arguments: str) -> dict:
        status, _, counts = task.pytest(piece, [*processes, *arguments])
        return {"passed": status == 0 and have_passed(counts), "status": status, **counts}

    if task.arguments:
        return {"chosen": functools.partial(chosen, "chosen", *task.arguments)}
    pieces = {}
    for files in groups_of_files():
        names = [Path(file).stem.removeprefix("test_") for file in files]
        name = "-to-".join(dict.fromkeys((names[0], names[-1])))
        pieces[name] = functools.partial(chosen, name, "-k", "cuda", *files)
    return pieces or {"all": functools.partial(chosen, "all", "-k", "cuda")}  # which says what is wrong


def count_of_reports(printed: str) -> int | None:
    """Return how many errors and hazards compute-sanitizer tells of in its last lines; None if it has none."""
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", printed)
    return sum(map(int, summaries)) if summaries else None


def sanitize(task: Task) -> Pieces:
    """Run the tests once in each of the tools."""
    program = tool("compute-sanitizer", cuda_home() / "compute-sanitizer")
    if program is None:
        raise Missing(
            f"compute-sanitizer is neither on PATH nor in {cuda_home()}",
            "it is part of the CUDA toolkit, and the package nvidia-cuda-sanitizer-api",
        )

    def checked(name: str, options: list[str]) -> dict:
        under = (program, "--tool", name, "--error-exitcode", "3", "--report-api-errors", "no", *options)
        status, printed, counts = task.pytest(name, task.arguments or PATHS, under, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        reports = count_of_reports(printed)
        passed = status == 0 and reports == 0 and have_passed(counts)
        return {"passed": passed, "status": status, "reports": reports, **counts}

    return {name: functools.partial(checked, name, options) for name, options in TOOLS.items()}


def graphs(task: Task) -> Pieces:
    """Run the tests of CUDA graphs, all of which must run."""
    return {"graphs": functools.partial(tests_on_gpu, task, GRAPHS)}


def devices(task: Task) -> Pieces:
    """Run the tests of two GPUs, all of which must run."""
    count, _ = devices_and_capability()
    if count < 2:
        raise NotApplicable(f"it needs two GPUs, and there is {count}")
    return {"devices": functools.partial(tests_on_gpu, task, DEVICES)}


def tests_on_gpu(task: Task, selection: list[str]) -> dict:
    """Run tests of which none may be skipped."""
    status, _, counts = task.pytest(task.part, task.arguments or selection)
    passed = status == 0 and have_passed(counts) and not counts["skipped"]
    return {"passed": passed, "status": status, **counts}


def benchmark(task: Task, *options: str) -> Pieces:
    """Run the benchmark of the kernels; FOLDER/PART has its records and plots."""

    def kernels() -> dict:
        out = task.folder / task.part
        results = out / "kernels.json"
        if task.before is None:
            results.unlink(missing_ok=True)
        status, _ = task.run([sys.executable, *KERNELS, *options, "--resume", "--out", str(out), *task.arguments])
        records = json.loads(results.read_text())["records"] if results.exists() else []
        return {"passed": status == 0 and bool(records), "status": status, "records": len(records)}

    return {"kernels": kernels}


def profile(task: Task) -> Pieces:
    """Have Nsight Compute look at one launch of each family of kernels."""
    home = cuda_home()
    program = tool("ncu", *home.glob("nsight-compute*"), *sorted(Path("/opt/nvidia/nsight-compute").glob("*")))
    if program is None:
        raise NotApplicable(f"ncu, of Nsight Compute, is neither on PATH nor in {home}")
    _, capability = devices_and_capability()
    reports = task.folder / "profile"
    reports.mkdir(exist_ok=True)

    def report(name: str, family: workload.Family) -> dict:
        if capability < family.capability:
            needed = ".".join(map(str, family.capability))
            return {"passed": None, "not_applicable": f"it needs compute capability {needed}"}
        made = reports / f"{name}.ncu-rep"
        made.unlink(missing_ok=True)
        options = [*NCU, "--kernel-name", f"regex:{family.kernel}", "--export", str(made)]
        status, printed = task.run([program, *options, sys.executable, workload.__file__, name, *task.arguments])
        if found := NO_COUNTERS.search(printed):
            raise NotApplicable(f"ncu cannot read the counters: {found[0]}")
        page = output(program, "--import", str(made), "--page", "details", "--csv") if made.exists() else ""
        made.with_suffix(".csv").write_text(page + "\n")
        return {"passed": status == 0 and family.kernel in page, "status": status}

    return {name: functools.partial(report, name, family) for name, family in workload.FAMILIES.items()}


GROUPS = {
    "bench": [f"bench-{dtypes}" for dtypes in DTYPES],
    "peers": [f"peers-{dtypes}" for dtypes in DTYPES],
}
PARTS: dict[str, Callable[[Task], Pieces]] = {
    "build": build,
    "test": test,
    "sanitize": sanitize,
    "graphs": graphs,
    "devices": devices,
    **{f"bench-{d}": lambda task, d=d: benchmark(task, "--dtypes", d, "--contenders", "ours,torch") for d in DTYPES},
    "profile": profile,
    **{f"peers-{d}": lambda task, d=d: benchmark(task, "--dtypes", d) for d in DTYPES},
}
GROUPS["all"] = list(PARTS)
PARTS["quick"] = lambda task: benchmark(task, *QUICK)


def passed_together(results: list[dict]) -> bool | None:
    """Say whether none has failed; None if none has run, because none has a meaning here."""
    verdicts = {result["passed"] for result in results} - {None}
    return all(verdicts) if verdicts else None


def run_pieces(task: Task, pieces: Pieces, done: dict[str, dict], save: Callable[[], None]) -> None:
    """Run what is not done, as long as there is time; save after each."""
    for name, piece in pieces.items():
        if name in done:
            continue
        if time.monotonic() >= task.end:
            done[name] = {"passed": False, "problem": "no time was left; run again, it goes on here"}
        else:
            done[name] = piece()
            if done[name].get("status") == ENDED:
                done[name]["problem"] = "ended for time; run again, it goes on here"
        save()


def run_part(part: str, folder: Path, arguments: list[str], commit: str | None, again: bool) -> dict:
    """Run a part, or what of it has not passed before; return what is left in PART.json."""
    start, file = time.monotonic(), folder / f"{part}.json"
    summary = {"what": part, "date": datetime.now(UTC).isoformat(timespec="seconds"), **machine(commit)}
    old = json.loads(file.read_text()) if file.exists() else {}
    goes_on = is_same(old, summary) and not again and not arguments
    task = Task(part, folder, arguments, old.get("pieces", {}) if goes_on else None, start + SECONDS)
    done: dict[str, dict] = {}

    def save(**more: str | bool | None) -> None:
        counts = Counter()
        for result in done.values():
            counts.update({name: result[name] for name in COUNTS if result.get(name) is not None})
        summary.update(seconds=round(time.monotonic() - start), **{"passed": False, **more}, **counts, pieces=done)
        new = file.with_suffix(".new")
        new.write_text(json.dumps(summary, indent=1) + "\n")
        new.replace(file)

    try:
        if part != "build":
            check_package()
        pieces = PARTS[part](task)
        done.update({name: result for name, result in (task.before or {}).items() if result["passed"]})
        if old.get("passed") and pieces.keys() <= done.keys():
            print(f"{part} has passed before, {old['date']}; --again repeats it")
            return old
        if task.before is None:
            task.log.unlink(missing_ok=True)
        save()
        run_pieces(task, pieces, done, save)
        summary.update(package())
        save(passed=passed_together(list(done.values())))
    except NotApplicable as reason:
        save(passed=None, not_applicable=str(reason))
    except Missing as missing:
        save(missing=str(missing))
        raise
    return summary


def told(summary: dict, folder: Path) -> str:
    """Return a line about a part."""
    words = {True: "passed", False: "FAILED", None: "not applicable"}[summary["passed"]]
    because = summary.get("not_applicable") or summary.get("missing")
    why = f": {because}" if because else f" in {summary['seconds']} s; see {folder}/{summary['what']}.json"
    return f"{summary['what']} {words}{why}"


def write_summary(folder: Path, now: dict) -> None:
    """Write summary.json: what the parts have come to for the code and the machine that are there."""
    parts = {}
    for part in GROUPS["all"]:
        file = folder / f"{part}.json"
        found = json.loads(file.read_text()) if file.exists() else {}
        own = all(found.get(name) == now[name] for name in SAME)
        parts[part] = {name: found[name] for name in REPORTED if name in found} if own else {"passed": False}
        if not own:
            parts[part]["problem"] = "has not run"
    passed = passed_together(list(parts.values()))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"date": date, **now, **package(), "passed": passed, "parts": parts}
    (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Run parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=[*PARTS, *GROUPS], metavar="PART")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", metavar="FOLDER")
    parser.add_argument("--again", action="store_true", help="repeat what has passed")
    parser.add_argument("--commit", help="what the sources are, where they lie in no git repository")
    parser.epilog = "What follows -- goes to pytest, instead of the choice of tests, or to the benchmark."
    arguments = sys.argv[1:] if arguments is None else arguments
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, passed_on = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    if passed_on and "all" in options.what:
        parser.error("what follows -- cannot be meant for all parts")
    parts = [part for name in options.what for part in GROUPS.get(name, [name])]
    check_gpu()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lines, passed = [], True
    for part in parts:
        try:
            summary = run_part(part, folder, passed_on, options.commit, options.again)
            lines.append(told(summary, folder))
            passed = passed and summary["passed"] is not False
        except Missing as missing:
            if len(parts) == 1:
                raise
            lines.append(f"{part} FAILED: {missing}")
            passed = False
        print(lines[-1], flush=True)
    write_summary(folder, machine(options.commit))
    if len(parts) > 1:
        print(*lines, f"{folder}/summary.json", sep="\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
