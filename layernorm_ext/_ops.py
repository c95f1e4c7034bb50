"""Loads the compiled module, which registers ``torch.ops.layernorm``, and has its sharding rules follow DTensor."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from . import _C

__all__ = ["_C"]

_DTENSOR = "torch.distributed.tensor"
_RULES = f"{__package__}._sharding"


class _RulesFollowDTensor:
    """An import hook: whoever imports DTensor gets the rules of the operators with it.

    To import DTensor ourselves would make the import of torch half as long again; to wait for a call with a DTensor
    would put a question into every call; and a module to import by hand would be forgotten.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _DTENSOR else None
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                import_module(_RULES)

            spec.loader.exec_module = execute_and_register
        return spec


if sys.modules.get(_DTENSOR):
    import_module(_RULES)
else:
    sys.meta_path.insert(0, _RulesFollowDTensor)
