"""Loads the compiled module, which registers ``torch.ops.layernorm``."""

from . import _C

__all__ = ["_C"]
