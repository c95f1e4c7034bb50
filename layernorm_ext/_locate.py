"""Sees to it, before the compiled module is loaded, that it is the installed one and that it fits torch."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def use_installed_package(checkout: ModuleSpec) -> None:
    """Put the installed package in the place of one that has no compiled module, as in a fresh checkout.

    Python looks in the current directory before site-packages; without this, `python -m layernorm_ext` and
    `python -m pytest` in the root of a checkout would import the sources there and fail.
    """
    if _is_compiled(checkout):
        return
    found = (finder.find_spec(checkout.name, [entry]) for entry in sys.path for finder in sys.meta_path)
    installed = next((spec for spec in found if spec and _is_compiled(spec)), None)
    if installed is None:
        raise ImportError(
            f"{checkout.name} is not installed in {sys.prefix}, and {Path(checkout.origin).parent} is only "
            "its source; run `pip install .` in the checkout"
        )
    del sys.modules[__name__]  # the installed package brings its own
    package = sys.modules[checkout.name] = importlib.util.module_from_spec(installed)
    installed.loader.exec_module(package)


def _is_compiled(package: ModuleSpec) -> bool:
    return PathFinder.find_spec(f"{package.name}._C", package.submodule_search_locations or []) is not None


def check_torch() -> None:
    """Refuse a torch with another binary interface, in which the compiled module could fail or misbehave."""
    import torch

    from . import _build_info as built

    fits = _minor(built.torch_version) == _minor(torch.__version__) and (
        not built.with_cuda or _major(built.torch_cuda_version) == _major(torch.version.cuda)
    )
    if not fits:
        raise ImportError(
            f"layernorm_ext was compiled for torch {built.torch_version} (CUDA {built.torch_cuda_version}) "
            f"and does not fit torch {torch.__version__} (CUDA {torch.version.cuda}), which is installed; "
            "run `pip install .` in its checkout again"
        )


def _minor(torch_version: str) -> list[str]:
    return torch_version.split(".")[:2]


def _major(cuda_version: str | None) -> str | None:
    return cuda_version and cuda_version.split(".")[0]
