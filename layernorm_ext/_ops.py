"""Loads the compiled module, which defines ``torch.ops.layernorm``, and registers the operators with DTensor."""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from . import _C

__all__ = ["_C", "register_with_dtensor"]

_DTENSOR, _REGISTRATION = "torch.distributed.tensor", f"{__package__}._dtensor"


class _RegisterAfterImport:
    """An import hook that registers the operators with DTensor as soon as it is imported.

    Importing DTensor here would increase the import time of torch by half. A check for DTensor in every call would slow
    down all users, and an explicit import would be forgotten.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _DTENSOR else None
        if spec and spec.loader:
            vars(spec.loader)["exec_module"] = partial(_execute_and_register, spec.loader)
        return spec


def _execute_and_register(loader: Loader, module: ModuleType) -> None:
    del vars(loader)["exec_module"]  # from now on the loader is as it would be without this package
    loader.exec_module(module)
    import_module(_REGISTRATION)


def register_with_dtensor() -> None:
    """Register now if DTensor is already imported, otherwise when it is imported."""
    # A reload must not add a second hook, and may have defined the class again.
    others = [finder for finder in sys.meta_path if getattr(finder, "__module__", None) != __name__]
    sys.meta_path[:] = [_RegisterAfterImport, *others]
    if sys.modules.get(_DTENSOR):
        import_module(_REGISTRATION)
