"""Loads the compiled module, which registers ``torch.ops.layernorm``, and tells tools of torch of it when they load."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from . import _C

__all__ = ["_C", "register_with_torch"]

# Modules of torch, and the modules of ours that register with them and are imported as soon as they are.
_REGISTRATIONS = {
    "torch.ao.quantization.quantization_mappings": f"{__package__}._quantization",
    "torch.distributed.tensor": f"{__package__}._sharding",
    "torch.nn.utils._expanded_weights": f"{__package__}._per_sample_gradients",
}


class _RegistrationFollowsImport:
    """An import hook: importing one of torch's modules imports the module of ours that registers with it.

    Importing DTensor here would make the import of torch half as long again. Waiting for a call with a DTensor would
    cost every call a check, and users would forget a module that they have to import.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _REGISTRATIONS else None
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                import_module(_REGISTRATIONS[name])

            spec.loader.exec_module = execute_and_register
        return spec


def register_with_torch() -> None:
    """Import the modules that register with those that are loaded already, and the others when theirs are loaded."""
    sys.meta_path.insert(0, _RegistrationFollowsImport)
    for name, registration in _REGISTRATIONS.items():
        if sys.modules.get(name):
            import_module(registration)
