"""The layers of converted modules whose output dtypes or names differ from this package's."""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .channels_first import LayerNorm2d, RMSNorm2d
from .modules import LayerNorm, RMSNorm

# The output dtype for the dtypes of input and weight, if it is not that of the input.
OutputDtypes = dict[tuple[torch.dtype, torch.dtype | None], torch.dtype]


def public_name(layer: Module) -> str:
    """Return the name of the public class from which the class of a layer is derived."""
    return next(cls.__name__ for cls in type(layer).__mro__ if cls.__module__ != __name__)


class _KeepsOutputDtypes(Module):
    """A layer that returns the output dtype of the original."""

    _output_dtypes: OutputDtypes = {}
    weight: Any

    def forward(self, input: Tensor) -> Tensor:
        # Without local variables, because take_argument() may give the argument any name.
        return _round(
            super().forward(_widen(input, self.weight, self._output_dtypes)), input, self.weight, self._output_dtypes
        )

    _get_name = public_name


@torch.fx.wrap  # symbolic tracing knows no dtypes
def _widen(input: Tensor, weight: Tensor | None, output_dtypes: OutputDtypes) -> Tensor:
    """Convert the input to the wider of its own dtype and the output's."""
    dtype = output_dtypes.get((input.dtype, None if weight is None else weight.dtype))
    return input if dtype is None else input.to(torch.promote_types(input.dtype, dtype))


@torch.fx.wrap
def _round(output: Tensor, input: Tensor, weight: Tensor | None, output_dtypes: OutputDtypes) -> Tensor:
    dtype = output_dtypes.get((input.dtype, None if weight is None else weight.dtype))
    return output if dtype is None else output.to(dtype)


class _LayerNorm(_KeepsOutputDtypes, LayerNorm):
    pass


class _LayerNorm2d(_KeepsOutputDtypes, LayerNorm2d):
    pass


class _RMSNorm(_KeepsOutputDtypes, RMSNorm):
    pass


class _RMSNorm2d(_KeepsOutputDtypes, RMSNorm2d):
    pass


class _RMSNormWithGain(_KeepsOutputDtypes, RMSNorm):
    """A layer whose weight is called ``g``."""

    weight = property(lambda self: self.g)


_KEEPS_OUTPUT_DTYPES: dict[type, type] = {
    LayerNorm: _LayerNorm,
    LayerNorm2d: _LayerNorm2d,
    RMSNorm: _RMSNorm,
    RMSNorm2d: _RMSNorm2d,
}
_CLASSES = {cls.__name__: cls for cls in (*_KEEPS_OUTPUT_DTYPES, *_KEEPS_OUTPUT_DTYPES.values(), _RMSNormWithGain)}


def call_weight_g(layer: RMSNorm) -> None:
    """Rename the weight of a layer to ``g``."""
    layer.__class__, layer._parameters = _RMSNormWithGain, {"g": layer._parameters["weight"]}


def keep_output_dtypes(layer: Any, dtypes: OutputDtypes) -> None:
    """Make a layer return these dtypes, if its class is this package's."""
    layer.__class__ = _KEEPS_OUTPUT_DTYPES.get(type(layer), type(layer))
    layer._output_dtypes = dtypes


def take_argument(layer: Module, name: str) -> None:
    """Make forward of a layer take the input by this name, if its class is this package's."""
    if type(layer) in _CLASSES.values():
        layer.__class__ = _with_argument(type(layer), name)  # type: ignore[arg-type]


@cache
def _with_argument(cls: type, name: str) -> type:
    """Return the class, or a subclass whose forward has the same code with another name of the argument.

    Every tool of torch reads the names of the arguments from the code, so that a wrapper would not do.
    """
    forward: Any = cls.forward  # type: ignore[attr-defined]
    _, old, *variables = forward.__code__.co_varnames
    if name == old:
        return cls
    code = forward.__code__.replace(co_varnames=("self", name, *variables))
    renamed = FunctionType(code, forward.__globals__, "forward", forward.__defaults__, forward.__closure__)
    renamed.__annotations__ = {name if key == old else key: value for key, value in forward.__annotations__.items()}
    attributes = {"__module__": __name__, "forward": renamed, "_get_name": public_name}
    return type(f"{cls.__name__}__{name}", (cls,), attributes)


def __getattr__(name: str) -> Any:
    """Return the class that _with_argument() has given this name, for pickle, which finds classes by their names."""
    cls, _, argument = name.partition("__")
    if cls in _CLASSES and argument:
        return _with_argument(_CLASSES[cls], argument)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
