"""Runs what needs a GPU, and leaves a log and a summary: python tests/gpu.py test, sanitize or quick, --out FOLDER.

    test      the ordinary tests, on the backend cuda
    sanitize  every path of the kernels under compute-sanitizer's four tools, each of which must report nothing
    quick     how long forward and backward take against torch's and a copy

In FOLDER are then NAME.log and NAME.json: commit, GPU, driver, versions, counts. Ends with an error if anything failed.
"""

import argparse
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 480  # for everything that one run does
PATHS = [
    "-k",
    "every_path",
    "tests/test_cuda_on_gpu.py",
]  # for the sanitizer, which makes kernels a hundred times as slow
QUICK = ["--contenders", "ours,torch", "--passes", "forward,backward", "--seconds", "0.15"]
# memcheck can tell one tensor from the next only if each is an allocation of its own. initcheck has to see torch's
# kernels write what ours read; the others look at ours alone.
OURS = ["--kernel-name", "kns=layernorm"]
TOOLS = {"memcheck": OURS, "racecheck": [*OURS, "--racecheck-report", "all"], "initcheck": [], "synccheck": OURS}


class Missing(SystemExit):
    """Ends the run with a sentence about what it needs."""

    def __init__(self, problem: str, remedy: str):
        super().__init__(f"gpu.py: {problem}; {remedy}.")


def check_machine() -> None:
    """Refuse to run where nothing would be tested."""
    import torch

    from layernorm_ext import _build_info

    if not _build_info.with_cuda:
        raise Missing(
            f"layernorm_ext was built without CUDA kernels ({_build_info.cuda_reason})", "run `make cuda-build` first"
        )
    if not torch.cuda.is_available():
        raise Missing(f"torch {torch.__version__} sees no GPU", "run this on a machine with one, and its driver")


def sanitizer() -> str:
    """Return the path of compute-sanitizer."""
    from torch.utils.cpp_extension import CUDA_HOME

    home = Path(os.environ.get("CUDA_HOME") or CUDA_HOME or "/usr/local/cuda")
    places = [os.environ.get("PATH", ""), str(home / "bin"), str(home / "compute-sanitizer")]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if found is None:
        raise Missing(
            f"compute-sanitizer is neither on PATH nor in {home}",
            "it is part of the CUDA toolkit, and the package nvidia-cuda-sanitizer-api",
        )
    return found


def output(*command: str) -> str:
    """Return what a command prints, or "" where it cannot be run."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> dict:
    """Return what a result depends on besides the code."""
    import torch

    import layernorm_ext
    from layernorm_ext import _build_info

    return {
        "commit": output("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or "unknown",
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "layernorm_ext": layernorm_ext.__version__,
        "architectures": _build_info.cuda_architectures,
    }


def run(command: list[str], log: Path, limit: float, environment: dict[str, str] | None = None) -> int:
    """Run a command, show what it prints and add it to the log; return its status, or 124 after `limit` seconds."""
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
        return process.wait()


def counts_of_tests(report: Path) -> dict[str, int]:
    """Return the counts of pytest's XML; no tests at all where there is none, as after a crash."""
    suite = ET.parse(report).getroot().find("testsuite") if report.exists() else {}
    return {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}


def have_passed(counts: dict[str, int]) -> bool:
    """Say whether tests have run, and none has failed."""
    return counts["tests"] > counts["skipped"] and not counts["failures"] and not counts["errors"]


def test(folder: Path, log: Path, arguments: list[str]) -> dict:
    """Run the tests, in several processes where pytest-xdist is installed."""
    report = folder / "test.xml"
    report.unlink(missing_ok=True)
    processes = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    command = ["-m", "pytest", "--backends", "cuda", *processes, f"--junitxml={report}"]
    status = run([sys.executable, *command, *(arguments or ["-k", "cuda"])], log, SECONDS)
    counts = counts_of_tests(report)
    return {"passed": status == 0 and have_passed(counts), "status": status, **counts}


def count_of_reports(printed: str) -> int | None:
    """Return how many errors and hazards compute-sanitizer tells of in its last lines; None if it has none."""
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", printed)
    return sum(map(int, summaries)) if summaries else None


def sanitize(folder: Path, log: Path, arguments: list[str]) -> dict:
    """Run the tests once in each of the tools."""
    program, end, results = sanitizer(), time.monotonic() + SECONDS, {}
    for tool, options in TOOLS.items():
        report, printed = folder / f"{tool}.xml", folder / f"{tool}.log"
        for old in (report, printed):
            old.unlink(missing_ok=True)
        command = [program, "--tool", tool, "--error-exitcode", "3", "--report-api-errors", "no", *options]
        command += [sys.executable, "-m", "pytest", "--backends", "cuda", f"--junitxml={report}"]
        status = run(
            [*command, *(arguments or PATHS)],
            printed,
            max(1, end - time.monotonic()),
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        with open(log, "a") as file:
            file.write(printed.read_text())
        counts, reports = counts_of_tests(report), count_of_reports(printed.read_text())
        passed = status == 0 and reports == 0 and have_passed(counts)
        results[tool] = {"passed": passed, "status": status, "reports": reports, **counts}
    return {"passed": all(result["passed"] for result in results.values()), "tools": results}


def quick(folder: Path, log: Path, arguments: list[str]) -> dict:
    """Run the benchmark of the kernels; FOLDER/quick has its records and plots."""
    results = folder / "quick" / "kernels.json"
    results.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "kernels",
        "--device",
        "cuda",
        *QUICK,
        "--out",
        str(folder / "quick"),
    ]
    status = run([*command, *arguments], log, SECONDS)
    records = json.loads(results.read_text())["records"] if results.exists() else []
    return {"passed": status == 0 and bool(records), "status": status, "records": len(records)}


def main(arguments: list[str] | None = None) -> int:
    """Run one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["test", "sanitize", "quick"])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", metavar="FOLDER")
    parser.epilog = "What follows -- goes to pytest, instead of the choice of tests, or to the benchmark."
    arguments = sys.argv[1:] if arguments is None else arguments
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, passed_on = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    check_machine()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    log, start = folder / f"{options.what}.log", time.monotonic()
    log.unlink(missing_ok=True)
    result = {"test": test, "sanitize": sanitize, "quick": quick}[options.what](folder, log, passed_on)
    seconds = round(time.monotonic() - start)
    summary = {"what": options.what, **machine(), "seconds": seconds, **result}
    (folder / f"{options.what}.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(
        f"{options.what} {'passed' if result['passed'] else 'FAILED'} in {seconds} s; see {folder}/{options.what}.json"
    )
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
