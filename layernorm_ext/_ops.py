"""Loads the compiled module, which defines ``torch.ops.layernorm``, and registers the operators with torch's tools."""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from . import _C

__all__ = ["_C", "norm", "register_with_torch"]

norm = _C.norm

# Modules of torch, and the modules of this package that register with them when they are imported.
_REGISTRATIONS = {
    "torch._dynamo": f"{__package__}._dynamo",
    "torch.distributed.tensor": f"{__package__}._dtensor",
}


class _RegisterAfterImport:
    """An import hook (a finder of ``sys.meta_path``) that registers with a module of torch once it is imported.

    Importing DTensor here would increase the import time of torch by half. A check for DTensor in every call would slow
    down all users, and users would forget to import a module that registers.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _REGISTRATIONS else None
        if spec and spec.loader:
            vars(spec.loader)["exec_module"] = partial(_execute_and_register, spec.loader)
        return spec


def _execute_and_register(loader: Loader, module: ModuleType) -> None:
    del vars(loader)["exec_module"]  # a reload of the module uses the loader's own method
    loader.exec_module(module)
    import_module(_REGISTRATIONS[module.__name__])


def register_with_torch() -> None:
    """Register with torch's tools: now if they are already imported, otherwise when they are imported."""
    # A reload of this module has defined the class again, and must not add a second hook.
    others = [finder for finder in sys.meta_path if getattr(finder, "__module__", None) != __name__]
    sys.meta_path[:] = [_RegisterAfterImport, *others]
    for name, registration in _REGISTRATIONS.items():
        if sys.modules.get(name):  # None blocks the import of a module
            import_module(registration)
