"""The layers of converted modules whose output dtypes or names differ from this package's."""

from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..functional import rms_norm, rms_norm_2d
from ..modules import LayerNorm, LayerNorm2d, RMSNorm, RMSNorm2d
from ..modules_fused import GatedLayerNorm, GatedRMSNorm

# The output dtype for the dtypes of input, weight and, in a gated norm, gate, if it is not that of the input.
OutputDtypes = dict[tuple[torch.dtype | None, ...], torch.dtype]


def public_name(layer: Module) -> str:
    """Return the name of the first class that is not of this file: the public class from which a layer's is derived."""
    return next(cls.__name__ for cls in type(layer).__mro__ if cls.__module__ != __name__)


class _KeepsOutputDtypes(Module):
    """A layer that returns the output dtype of the original."""

    _output_dtypes: OutputDtypes = {}
    weight: Any

    def forward(self, input: Tensor) -> Tensor:
        # Without local variables, because take_argument() may give the argument any name.
        return _round(
            super().forward(_widen(input, self._output_dtypes, self.weight)), input, self._output_dtypes, self.weight
        )

    _get_name = public_name


@torch.fx.wrap  # symbolic tracing knows no dtypes
def _widen(input: Tensor, output_dtypes: OutputDtypes, *others: Tensor | None) -> Tensor:
    """Convert the input to the wider of its own dtype and the output's."""
    dtype = output_dtypes.get(_dtypes(input, *others))
    return input if dtype is None else input.to(torch.promote_types(input.dtype, dtype))


@torch.fx.wrap
def _round(output: Tensor, input: Tensor, output_dtypes: OutputDtypes, *others: Tensor | None) -> Tensor:
    dtype = output_dtypes.get(_dtypes(input, *others))
    return output if dtype is None else output.to(dtype)


def _dtypes(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


class _KeepsOutputDtypesWithGate(_KeepsOutputDtypes):
    def forward(self, input: Tensor, gate: Tensor | None = None) -> Tensor:
        return _round(
            super(_KeepsOutputDtypes, self).forward(_widen(input, self._output_dtypes, self.weight, gate), gate),
            input,
            self._output_dtypes,
            self.weight,
            gate,
        )


class _AnyWidth(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], None, self.eps)


class _AnyWidth2d(RMSNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm_2d(x, None, self.eps)


class _Activated(Module):
    """A layer that applies its children to the result of the norm."""

    drop: Any
    act: Any

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))

    _get_name = public_name


def _subclass(name: str, *bases: type, **attributes: Any) -> type:
    """Return a class of this file, which __getattr__ finds by its name."""
    return type(name, bases, {"__module__": __name__, **attributes})


_NORMS: tuple[type, ...] = (LayerNorm, LayerNorm2d, RMSNorm, RMSNorm2d)
_KEEPS_OUTPUT_DTYPES: dict[type, type] = {
    **{cls: _subclass(f"_{cls.__name__}", _KeepsOutputDtypes, cls) for cls in _NORMS},
    **{cls: _subclass(f"_{cls.__name__}", _KeepsOutputDtypesWithGate, cls) for cls in (GatedLayerNorm, GatedRMSNorm)},
}
_ANY_WIDTH: dict[type, type] = {
    RMSNorm: _subclass("_RMSNormAnyWidth", _KeepsOutputDtypes, _AnyWidth),
    RMSNorm2d: _subclass("_RMSNorm2dAnyWidth", _KeepsOutputDtypes, _AnyWidth2d),
}
_ACTIVATED = {cls: _subclass(f"_{cls.__name__}Act", _Activated, _KEEPS_OUTPUT_DTYPES[cls]) for cls in _NORMS}
_DERIVED = (*_KEEPS_OUTPUT_DTYPES.values(), *_ANY_WIDTH.values(), *_ACTIVATED.values())
_CLASSES = {cls.__name__: cls for cls in (*_KEEPS_OUTPUT_DTYPES, *_DERIVED)}


def of_any_width(cls: type, eps: float | None) -> Module:
    """Return an RMSNorm or RMSNorm2d without a weight that takes rows of any width."""
    layer: Any = cls(1, eps, elementwise_affine=False)
    layer.__class__ = _ANY_WIDTH[cls]
    layer.normalized_shape = ()
    return layer


def apply_activation(layer: Module) -> None:
    """Make a layer apply its children ``drop`` and ``act`` to the result of the norm."""
    layer.__class__ = _ACTIVATED[type(layer)]


def rename_parameters(layer: Any, weight: str, bias: str) -> None:
    """Rename the parameters of a layer, which may have other shapes, such as ``[C, 1, 1]``."""
    names = {"weight": weight, "bias": bias}
    layer._parameters = {names[name]: parameter for name, parameter in layer._parameters.items()}
    layer.__class__ = _with_parameters(_KEEPS_OUTPUT_DTYPES.get(type(layer), type(layer)), weight, bias)


@cache
def _with_parameters(cls: type, weight: str, bias: str) -> type:
    """Return a subclass whose parameters have these names, as in ``_LayerNorm_gamma_beta``."""

    def alias(name: str) -> property:
        return property(lambda self: getattr(self, name).reshape(self.normalized_shape))

    names = {"weight": weight, "bias": bias}
    aliases = {name: alias(other) for name, other in names.items() if other != name}
    # LayerNorm would rename them in a state_dict.
    load = Module._load_from_state_dict
    return _subclass(f"{cls.__name__}_{weight}_{bias}", cls, _load_from_state_dict=load, **aliases)


def keep_output_dtypes(layer: Any, dtypes: OutputDtypes) -> None:
    """Make a layer return these dtypes, if its class is this package's."""
    layer.__class__ = _KEEPS_OUTPUT_DTYPES.get(type(layer), type(layer))
    layer._output_dtypes = dtypes


def take_argument(layer: Module, name: str) -> None:
    """Make forward of a layer take the input by this name, if its class is this package's."""
    if type(layer) in _CLASSES.values() or type(layer).__module__ == __name__:
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
    return _subclass(f"{cls.__name__}__{name}", cls, forward=renamed, _get_name=public_name)


def __getattr__(name: str) -> Any:
    """Return the class of this name that a function above has made, for pickle, which finds classes by their names."""
    cls, _, argument = name.partition("__")
    base, *names = [cls] if cls in _CLASSES else cls.rsplit("_", 2)
    if base in _CLASSES:
        found = _with_parameters(_CLASSES[base], *names) if names else _CLASSES[base]
        return _with_argument(found, argument) if argument else found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
