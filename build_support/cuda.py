"""Decides whether to build the CUDA kernels, with which toolkit, and for which architectures.

Environment variables:
  FORCE_CUDA            1: build the CUDA kernels or fail; 0: do not build them; unset: build them if possible
  CUDA_HOME             the toolkit; by default PATH's nvcc, /usr/local/cuda*, or NVIDIA's pip packages
  TORCH_CUDA_ARCH_LIST  the architectures; by default those of the visible GPUs or, without a GPU, ARCHITECTURES
  USE_NATIVE_ARCH       1: without a visible GPU, do not build the CUDA kernels unless FORCE_CUDA is 1
"""

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from . import BuildError

ARCHITECTURES = ((8, 0), (9, 0), (10, 0))  # compute capabilities


@dataclasses.dataclass(frozen=True)
class Toolkit:
    """A CUDA installation with nvcc and headers."""

    home: Path
    version: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """The decision and its reason; without a toolkit, only the CPU kernels are built."""

    reason: str
    toolkit: Toolkit | None = None
    architectures: str | None = None  # in the notation of TORCH_CUDA_ARCH_LIST


def plan() -> Plan:
    """Decide, or raise a BuildError that says what to do."""
    force = os.environ.get("FORCE_CUDA", "")
    if force not in ("", "0", "1"):
        raise BuildError(f"FORCE_CUDA is {force!r}, neither 0 nor 1", "correct or unset it")
    if force == "0":
        return Plan("FORCE_CUDA=0")
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} was built without CUDA"
        if force:
            raise BuildError(f"FORCE_CUDA=1, but {reason}", "install a CUDA build of torch, or unset FORCE_CUDA")
        return Plan(reason)
    if is_native() and not force and not torch.cuda.is_available():
        return Plan("USE_NATIVE_ARCH=1 and no GPU is visible")
    toolkit = find_toolkit()
    if toolkit is None:
        reason = "no CUDA toolkit was found"
        if force or torch.cuda.is_available():
            raise BuildError(f"{'FORCE_CUDA=1' if force else 'a GPU is visible'}, but {reason}", _toolkit_remedy())
        return Plan(reason)
    if not _matches_torch(toolkit):
        raise BuildError(
            f"torch {torch.__version__} uses CUDA {torch.version.cuda}, but the toolkit in {toolkit.home} is "
            f"CUDA {toolkit.version}",
            _toolkit_remedy(),
        )
    reason = f"torch {torch.__version__} and the CUDA {toolkit.version} toolkit in {toolkit.home}"
    return Plan(reason, toolkit, choose_architectures(toolkit))


def is_native() -> bool:
    """Return whether USE_NATIVE_ARCH=1 asks for the kernels of this machine alone."""
    return os.environ.get("USE_NATIVE_ARCH") == "1"


def _toolkit_remedy() -> str:
    return (
        f"install the CUDA {torch.version.cuda} toolkit and set CUDA_HOME to it, "
        "or set FORCE_CUDA=0 to build for the CPU alone"
    )


def find_toolkit() -> Toolkit | None:
    """Return a toolkit, preferably one that matches torch; None if there is no nvcc."""
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    homes = [Path(given)] if given else list(_likely_homes())
    toolkits = [Toolkit(home, _nvcc_version(home)) for home in homes if not _missing(home)]
    if toolkits:
        return next(filter(_matches_torch, toolkits), toolkits[0])
    incomplete = [home for home in homes if given or "bin/nvcc" not in _missing(home)]
    if incomplete:
        missing = " and ".join(_missing(incomplete[0]))
        raise BuildError(f"{missing} not found in {incomplete[0]}", _toolkit_remedy())
    return None


def _matches_torch(toolkit: Toolkit) -> bool:
    """Return whether the major versions of CUDA are the same; within one, CUDA is compatible."""
    return _major(toolkit.version) == _major(torch.version.cuda)


def _major(version: str) -> str:
    return version.split(".")[0]


def _likely_homes() -> Iterator[Path]:
    """Yield folders that may contain a toolkit, including the one whose nvcc a wrapper on PATH calls."""
    nvcc = shutil.which("nvcc")
    if nvcc:
        yield Path(nvcc).parent.parent
        yield Path(nvcc).resolve().parent.parent
        commands = output(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull)
        yield from (Path(top).resolve() for top in re.findall(r"^#\$ TOP=(.+)$", commands, re.M))
    yield Path("/usr/local/cuda")
    yield Path(f"/usr/local/cuda-{torch.version.cuda}")
    yield Path(torch.__file__).parents[1] / "nvidia" / f"cu{_major(torch.version.cuda)}"


def _missing(home: Path) -> list[str]:
    """Return the parts of a toolkit that are not in a folder; conda has the headers in targets/."""
    missing = [] if (home / "bin" / "nvcc").is_file() else ["bin/nvcc"]
    headers = [*home.glob("include/cuda_runtime.h"), *home.glob("targets/*/include/cuda_runtime.h")]
    return missing if headers else [*missing, "include/cuda_runtime.h"]


def _nvcc_version(home: Path) -> str:
    printed = output(home / "bin" / "nvcc", "--version")
    version = re.search(r"release (\d+\.\d+)", printed)
    if not version:
        raise BuildError(f"{home}/bin/nvcc --version prints no release, but {printed.strip()!r}", _toolkit_remedy())
    return version[1]


def output(*command: str | Path) -> str:
    """Return what a command prints to stdout and stderr."""
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def choose_architectures(toolkit: Toolkit) -> str:
    """Return TORCH_CUDA_ARCH_LIST or its default, which ends in PTX for later GPUs."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if listed:
        return listed
    visible = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
    if visible and visible[0] < ARCHITECTURES[0]:
        raise BuildError(
            f"a visible GPU is {_sm(visible[0])} and the kernels need {_sm(ARCHITECTURES[0])} or newer",
            "hide it with CUDA_VISIBLE_DEVICES, or set FORCE_CUDA=0 to build for the CPU alone",
        )
    known = output(toolkit.home / "bin" / "nvcc", "--list-gpu-code").split()
    unknown = [_sm(gpu) for gpu in visible if _sm(gpu) not in known]
    if unknown:
        raise BuildError(
            f"a visible GPU is {unknown[0]}, unknown to the CUDA {toolkit.version} toolkit in {toolkit.home}",
            "set CUDA_HOME to a newer toolkit",
        )
    chosen = visible or [architecture for architecture in ARCHITECTURES if _sm(architecture) in known]
    return ";".join(f"{major}.{minor}" for major, minor in chosen) + "+PTX"


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"
