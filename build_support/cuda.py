"""Decides whether the CUDA kernels are built, by which toolkit, and for which architectures.

Environment variables:
  FORCE_CUDA            1: build the CUDA kernels or fail; 0: do not; unset: build them where that is possible
  CUDA_HOME             the toolkit, instead of PATH's nvcc, /usr/local/cuda*, or NVIDIA's pip packages
  TORCH_CUDA_ARCH_LIST  the architectures, instead of the visible GPUs' or, without a GPU, ARCHITECTURES
"""

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from .errors import BuildError

ARCHITECTURES = ((8, 0), (9, 0), (10, 0))


@dataclasses.dataclass(frozen=True)
class Toolkit:
    """A CUDA installation that has both nvcc and the headers."""

    home: Path
    version: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is built, and why."""

    reason: str
    toolkit: Toolkit | None = None
    architectures: str | None = None  # in the notation of TORCH_CUDA_ARCH_LIST


def plan(has_kernels: bool) -> Plan:
    """Choose between CUDA and the CPU alone, or end the build with a sentence that says what to do."""
    force = os.environ.get("FORCE_CUDA", "")
    if force not in ("", "0", "1"):
        raise BuildError(f"FORCE_CUDA is {force!r}, neither 0 nor 1", "correct or unset it")
    if force == "0":
        return Plan("FORCE_CUDA=0")

    wish = "FORCE_CUDA=1" if force else ""
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} was built without CUDA"
        return _cpu_alone(reason, "install a CUDA build of torch, or unset FORCE_CUDA", wish)
    if not has_kernels:
        return _cpu_alone("this version has no CUDA kernels", "unset FORCE_CUDA", wish)
    toolkit = find_toolkit()
    if toolkit is None:
        if torch.cuda.is_available():
            wish = wish or "a GPU is visible"
        return _cpu_alone("no CUDA toolkit was found", _toolkit_remedy(), wish)
    if not _fits(toolkit):
        raise BuildError(
            f"torch {torch.__version__} uses CUDA {torch.version.cuda}, but the toolkit in {toolkit.home} is "
            f"CUDA {toolkit.version}",
            _toolkit_remedy(),
        )
    return Plan(
        f"torch {torch.__version__} and the CUDA {toolkit.version} toolkit in {toolkit.home}",
        toolkit,
        choose_architectures(toolkit),
    )


def _cpu_alone(reason: str, remedy: str, wish: str) -> Plan:
    """Build for the CPU alone, unless something wishes for CUDA."""
    if wish:
        raise BuildError(f"{wish}, but {reason}", remedy)
    return Plan(reason)


def _major(version: str) -> str:
    return version.split(".")[0]


def _toolkit_remedy() -> str:
    return (
        f"install the CUDA {torch.version.cuda} toolkit and set CUDA_HOME to it, "
        "or set FORCE_CUDA=0 to build for the CPU alone"
    )


def find_toolkit() -> Toolkit | None:
    """Return a toolkit, one that fits torch if possible; None where there is no sign of any."""
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    homes = [Path(given)] if given else list(_likely_homes())
    toolkits = [Toolkit(home, _nvcc_version(home)) for home in homes if not _missing(home)]
    if toolkits:
        fitting = [toolkit for toolkit in toolkits if _fits(toolkit)]
        return (fitting or toolkits)[0]
    incomplete = [home for home in homes if given or "bin/nvcc" not in _missing(home)]
    if incomplete:
        missing = " and ".join(_missing(incomplete[0]))
        raise BuildError(f"{missing} not found in {incomplete[0]}", _toolkit_remedy())
    return None


def _fits(toolkit: Toolkit) -> bool:
    """Compare major versions: CUDA guarantees compatibility within one."""
    return _major(toolkit.version) == _major(torch.version.cuda)


def _likely_homes() -> Iterator[Path]:
    """Yield where a toolkit may be; torch itself would trust the place of PATH's nvcc, even of a wrapper."""
    nvcc = shutil.which("nvcc")
    if nvcc:
        yield Path(nvcc).parent.parent
        yield Path(nvcc).resolve().parent.parent
        commands = _output(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull)
        yield from (Path(top).resolve() for top in re.findall(r"^#\$ TOP=(.+)$", commands, re.M))
    yield Path("/usr/local/cuda")
    yield Path(f"/usr/local/cuda-{torch.version.cuda}")
    yield Path(torch.__file__).parents[1] / "nvidia" / f"cu{_major(torch.version.cuda)}"


def _missing(home: Path) -> list[str]:
    """Name the parts that keep `home` from being a toolkit; conda keeps the headers under targets/."""
    missing = [] if (home / "bin" / "nvcc").is_file() else ["bin/nvcc"]
    headers = [*home.glob("include/cuda_runtime.h"), *home.glob("targets/*/include/cuda_runtime.h")]
    return missing if headers else [*missing, "include/cuda_runtime.h"]


def _nvcc_version(home: Path) -> str:
    return re.search(r"release (\d+\.\d+)", _output(home / "bin" / "nvcc", "--version"))[1]


def _output(*command: str | Path) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def choose_architectures(toolkit: Toolkit) -> str:
    """Return TORCH_CUDA_ARCH_LIST or its default, which ends in PTX so that later GPUs are served too."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if listed:
        return listed
    visible = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
    if visible and visible[0] < ARCHITECTURES[0]:
        raise BuildError(
            f"a visible GPU is {_sm(visible[0])} and the kernels need {_sm(ARCHITECTURES[0])} or newer",
            "hide it with CUDA_VISIBLE_DEVICES, or set FORCE_CUDA=0 to build for the CPU alone",
        )
    known = _output(toolkit.home / "bin" / "nvcc", "--list-gpu-code").split()
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
