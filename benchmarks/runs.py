"""A run: what was measured, where and how, as JSON and CSV in a folder."""

import csv
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

import layernorm_ext
from layernorm_ext._ops import _C

from .contenders import ALL, Contender
from .timing import Device

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = 1  # of the files; another number means other names


@dataclass
class Run:
    """One benchmark's records, and what they depend on. Every record of a benchmark has the same keys."""

    benchmark: str
    method: dict
    machine: dict
    contenders: list[dict]
    records: list[dict] = field(default_factory=list)
    command: str = field(default_factory=lambda: shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]))
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    schema: int = SCHEMA

    def save(self, folder: Path) -> None:
        """Write BENCHMARK.json, and the records as BENCHMARK.csv."""
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{self.benchmark}.new"  # whoever ends this run in the middle leaves a whole file
        new.write_text(json.dumps(asdict(self), indent=1) + "\n")
        new.replace(folder / f"{self.benchmark}.json")
        with open(folder / f"{self.benchmark}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, self.records[0] if self.records else [])
            writer.writeheader()
            writer.writerows(self.records)

    def go_on(self, folder: Path) -> None:
        """Take over the records that a run of the same kind has left in a folder, if there is one.

        Raises:
            ValueError: if it was made by another command, on another machine or of other sources.
        """
        if not (folder / f"{self.benchmark}.json").exists():
            return
        before = load(folder)[self.benchmark]
        for part in ("machine", "method"):
            own, found = ({**getattr(run, part), "load": None, "matmul_gflops": None} for run in (self, before))
            if own != found:
                raise ValueError(f"Expected the run in {folder} to have the {part} {own}, but got {found}")
        self.records, self.started = before.records, before.started


def load(folder: Path) -> dict[str, Run]:
    """Return the runs in a folder, by benchmark."""
    runs = {}
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        if content.get("schema") != SCHEMA:
            raise ValueError(f"Expected {file} to have schema={SCHEMA}, but got schema={content.get('schema')}")
        runs[file.stem] = Run(**content)
    if not runs:
        raise ValueError(f"Expected results of `python -m benchmarks` in {folder}, but found no .json file")
    return runs


def output(*command: str) -> str:
    """Return what a command prints, or "" where it cannot be run."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine(device: Device) -> dict:
    """Return what results depend on besides the code."""
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
        "checkout": output("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or "unknown",
    }
    if device.is_cuda:
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
        found["cuda"] = torch.version.cuda
    return found


def listed(names: list[str], of: Mapping[str, Contender] = ALL) -> list[dict]:
    """Return name and version of contenders: of all that exist, whether they are installed and take part."""
    return [
        {"name": name, "package": c.package, "version": c.version, "takes_part": name in names}
        for name, c in of.items()
    ]
