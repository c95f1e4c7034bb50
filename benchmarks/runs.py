"""One benchmark's records, machine and command, stored as JSON and CSV."""

import csv
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

import layernorm_ext
from layernorm_ext._ops import _C

from .contenders import installed
from .timing import Device

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Run:
    """One run of a benchmark. All its records have the same keys."""

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


def output(*command: str) -> str:
    """Return the standard output of a command, or "" if it fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def describe_machine(device: Device) -> dict:
    """Return the hardware, the versions and the commit."""
    with open("/proc/cpuinfo") as file:
        models = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    found = {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "threads": torch.get_num_threads(),
        "instruction_set": _C.cpu_capability(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "layernorm_ext": layernorm_ext.__version__,
        "installed": installed(),
        "checkout": output("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or "unknown",
    }
    if device.is_cuda:
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
        found["cuda"] = torch.version.cuda
    return found
