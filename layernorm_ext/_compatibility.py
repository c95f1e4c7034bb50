"""Compares the versions of installed packages with those that this package was built for or needs."""

from importlib import import_module
from types import ModuleType

import torch
from torch.torch_version import TorchVersion

from . import _build_info as built


def check_torch() -> None:
    """Raise an ImportError if the compiled module is for another torch or another CPU, where it could misbehave."""
    minors = [version.split(".")[:2] for version in (built.torch_version, torch.__version__)]
    majors = [version and version.split(".")[0] for version in (built.torch_cuda_version, torch.version.cuda)]
    if minors[0] != minors[1] or (built.with_cuda and majors[0] != majors[1]):
        raise ImportError(
            f"layernorm_ext was compiled for torch {built.torch_version} (CUDA {built.torch_cuda_version}) "
            f"and does not fit the installed torch {torch.__version__} (CUDA {torch.version.cuda}); "
            "run `pip install .` in its checkout again"
        )
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in built.cpu_capabilities and "DEFAULT" not in built.cpu_capabilities:
        raise ImportError(
            f"layernorm_ext was compiled for {built.cpu_capabilities[0]} alone and torch uses {capability} on this "
            "machine; run `pip install .` in its checkout without USE_NATIVE_ARCH=1"
        )


def require(package: str, minimum: str, module: str | None = None) -> ModuleType:
    """Import and return an optional package, or its module of this name.

    Raises:
        ImportError: The package is missing or older than ``minimum``.
    """
    needed = f"layernorm_ext needs {package} {minimum} or newer here"
    try:
        found = import_module(module or package)
    except ModuleNotFoundError as error:
        raise ImportError(f"{needed}, but there is {str(error).lower()}") from error
    installed = found.__version__
    is_checkout = installed.startswith("0.0.0")  # a package that is not installed does not know its version
    if TorchVersion(installed) < minimum and not is_checkout:
        raise ImportError(f"{needed}, but {package} {installed} is installed")
    return found
