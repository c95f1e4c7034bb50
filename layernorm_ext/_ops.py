"""Loads the compiled module, which defines ``torch.ops.layernorm``, and registers the operators with torch's tools."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from . import _C

__all__ = ["_C", "register_with_torch"]

# Modules of torch, and this package's modules that register with them.
_REGISTRATIONS = {
    "torch.ao.quantization.quantization_mappings": f"{__package__}._quantization",
    "torch.distributed.tensor": f"{__package__}._sharding",
    "torch.nn.utils._expanded_weights": f"{__package__}._per_sample_gradients",
}


class _RegisterAfterImport:
    """An import hook that registers with a module of torch as soon as it is imported.

    Importing DTensor here would increase the import time of torch by half. A check for DTensor in every call would slow
    down all users, and an explicit import would be forgotten.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _REGISTRATIONS else None
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                import_module(_REGISTRATIONS[name])

            vars(spec.loader)["exec_module"] = execute_and_register
        return spec


def register_with_torch() -> None:
    """Register with torch's tools: now if they are already imported, otherwise when they are imported."""
    sys.meta_path.insert(0, _RegisterAfterImport)
    for name, registration in _REGISTRATIONS.items():
        if sys.modules.get(name):
            import_module(registration)
