"""One benchmark's records, machine and command: printed as a table, and stored as JSON and CSV."""

import csv
import json
import os
import platform
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path

import torch

from layernorm_ext._ops import _C

from .contenders import installed
from .timing import Device

ALLOCATOR_VARIABLES = ("GLIBC_TUNABLES", "LD_PRELOAD", "THP_MEM_ALLOC_ENABLE")
ROOT = Path(__file__).resolve().parents[1]
CAPTION = "time · time of torch, or of the base, / this time · copy's time / this time · largest error"


@dataclass
class Run:
    """One run of a benchmark. All its records have the same keys; those before "contender" identify a case."""

    benchmark: str
    machine: dict
    records: list[dict] = field(default_factory=list)
    command: str = field(default_factory=lambda: shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]))
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def save(self, folder: Path) -> None:
        """Write BENCHMARK.json, and the records as BENCHMARK.csv."""
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{self.benchmark}.new"  # an interruption leaves the previous file intact
        new.write_text(json.dumps(asdict(self), indent=1) + "\n")
        new.replace(folder / f"{self.benchmark}.json")
        with open(folder / f"{self.benchmark}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, self.records[0] if self.records else [])
            writer.writeheader()
            writer.writerows(self.records)

    def table(self) -> str:
        """Return a table with a line per case and a column per contender."""
        keys = list(takewhile(lambda key: key != "contender", self.records[0])) if self.records else []
        cases: dict[tuple, dict[str, dict]] = {}
        for r in self.records:
            found = cases.setdefault(tuple(str(r[key]) for key in keys), {})
            # A case of `accuracy` is a whole sweep: the record with the largest error represents it.
            if r["contender"] not in found or (r["error"] or 0) > (found[r["contender"]]["error"] or 0):
                found[r["contender"]] = r
        names = list(dict.fromkeys(r["contender"] for r in self.records))
        lines = [[*keys, "noise", *names]]
        for case, found in cases.items():
            noise = next((f"{r['noise']:.3f}" for r in found.values() if r.get("noise")), "")
            lines.append([*case, noise, *(cell(found[name]) if name in found else "" for name in names)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.ljust, line, widths)) for line in lines) + f"\n({CAPTION})"

    def notes(self) -> list[str]:
        """Return one line for each distinct failure of each contender."""
        found = Counter((r["contender"], r["status"], r["message"]) for r in self.records if r["status"] != "ok")
        return [f"{name} {status} ({count} of its cases): {text}" for (name, status, text), count in found.items()]


def cell(record: dict) -> str:
    """Return a cell's text: the numbers that a record has, in the order of CAPTION, and the status unless it is ok."""
    parts = []
    if record.get("us"):
        parts.append(f"{record['us']:.4g} µs")
    if record.get("verdict"):
        ratio = record["of_base"] if "of_base" in record else record["of_torch"]
        parts.append(f"{ratio:.3g}" + (" noise" if record["verdict"] == "noise" else ""))
    if record.get("of_copy"):
        parts.append(f"{record['of_copy']:.0%}")
    if record.get("error") is not None:
        parts.append(f"{record['error']:.0e}")
    if record["status"] != "ok":
        parts.append(record["status"].upper())
    return " · ".join(parts)


def output(*command: str) -> str:
    """Return the standard output of a command, or "" if it fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def describe_allocator() -> str:
    """Return the CPU allocator's settings: "pages kept" by keep_pages(), which every benchmark calls, and variables."""
    names = [name for name in os.environ if name.startswith("MALLOC_") or name in ALLOCATOR_VARIABLES]
    return " ".join(["pages kept", *(f"{name}={os.environ[name]}" for name in names)])


def describe_machine(device: Device) -> dict:
    """Return the hardware, the versions and the commit."""
    with open("/proc/cpuinfo") as file:
        models = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    found = {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "threads": torch.get_num_threads(),
        "allocator": describe_allocator(),
        "instruction_set": _C.cpu_capability(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "installed": installed(),
        "checkout": output("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or "unknown",
    }
    if device.is_cuda:
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
        found["cuda"] = torch.version.cuda
    return found
