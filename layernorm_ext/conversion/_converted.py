"""The classes of converted layers, whose forward calls a function of this package with the layer's own attributes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..functional import gated_layer_norm, gated_rms_norm, layer_norm, layer_norm_2d, rms_norm, rms_norm_2d
from ..modules import LayerNorm, LayerNorm2d, RMSNorm, RMSNorm2d, _check_channels
from ..modules_fused import GatedLayerNorm, GatedRMSNorm, TakesSeveralInputs
from ..tracing import constant_sizes

FUNCTIONS: dict[type[Module], Callable[..., Tensor]] = {
    LayerNorm: layer_norm,
    LayerNorm2d: layer_norm_2d,
    RMSNorm: rms_norm,
    RMSNorm2d: rms_norm_2d,
    GatedLayerNorm: gated_layer_norm,
    GatedRMSNorm: gated_rms_norm,
}
_IMAGES, _GATED = (LayerNorm2d, RMSNorm2d), (GatedLayerNorm, GatedRMSNorm)

# The output dtype for each combination of dtypes of input, weight and gate with which it is not the input's.
OutputDtypes = dict[tuple[torch.dtype | None, ...], torch.dtype]


@dataclass(frozen=True)
class NormSpec:
    """The norm that a layer of another package computes. Strings are names of its attributes, which each call reads."""

    layer_class: type[Module]  # the layer of this package that computes the same
    weight: str | None
    bias: str | None
    shape: str | None  # if None, normalize over the shape of the weight or, without a weight, the width of the input
    eps: str | None
    default_eps: float | None  # the eps if ``eps`` or the attribute is None
    groups: str | None  # "group_size" has the width of a group; attributes of other names have the number of groups
    children: tuple[str, ...]  # modules that are applied to the result in turn
    options: dict[str, Any] = field(hash=False)  # further arguments of the function in FUNCTIONS
    output_dtypes: OutputDtypes = field(hash=False, default_factory=dict)

    def compute(self, layer: Module, input: Tensor, gate: Tensor | None = None) -> Tensor:
        """Compute the norm for a layer, which may be of its original class or of the converted one."""
        weight, bias = _parameter(layer, self.weight), _parameter(layer, self.bias)
        eps = None if self.eps is None else getattr(layer, self.eps)
        arguments = {"weight": weight, "eps": self.default_eps if eps is None else eps, **self.options}
        if self.bias is not None:
            arguments["bias"] = bias
        shape: Sequence[int]
        if self.shape is not None:
            shape = as_sizes(getattr(layer, self.shape))
        else:
            shape = constant_sizes(input.shape[-1:] if weight is None else weight.shape)
        if self.layer_class not in _IMAGES:
            arguments["normalized_shape"] = shape
        elif self.shape is not None:
            _check_channels(input, shape[0])
        if gate is not None or self.layer_class in _GATED:
            arguments["gate"] = gate
        if self.groups is not None:
            arguments["num_groups"] = num_groups(layer, self.groups, shape[0])
        x = _widen(input, self.output_dtypes, weight, gate) if self.output_dtypes else input
        y = FUNCTIONS[self.layer_class](x, **arguments)
        y = _to_output_dtype(y, input, self.output_dtypes, weight, gate) if self.output_dtypes else y
        for name in self.children:
            y = getattr(layer, name)(y)
        return y


def _parameter(layer: Module, name: str | None) -> Any:
    """Return a parameter of a layer, flattened if its name is not ours: its shape may be [C, 1, 1]."""
    value = None if name is None else getattr(layer, name)
    return value if value is None or name in ("weight", "bias") else value.flatten()


def as_sizes(shape: Any) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def num_groups(layer: Module, name: str, width: int) -> Any:
    """Return the number of groups of a layer from its attribute of this name."""
    return width // getattr(layer, name) if name == "group_size" else getattr(layer, name)


@torch.fx.wrap  # torch.fx records the call, because its proxies have no dtype to look up
def _widen(input: Tensor, output_dtypes: OutputDtypes, *others: Tensor | None) -> Tensor:
    """Convert the input to the wider of its own dtype and the output's."""
    dtype = output_dtypes.get(_dtypes(input, *others))
    return input if dtype is None else input.to(torch.promote_types(input.dtype, dtype))


@torch.fx.wrap
def _to_output_dtype(output: Tensor, input: Tensor, output_dtypes: OutputDtypes, *others: Tensor | None) -> Tensor:
    dtype = output_dtypes.get(_dtypes(input, *others))
    return output if dtype is None else output.to(dtype)


def _dtypes(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


@cache
def converted_class(original: Any, spec: NormSpec) -> type[Module]:
    """Return the subclass of a layer's class whose forward computes a norm of this package."""
    parameters = list(inspect.signature(original.forward).parameters)
    bases = (TakesSeveralInputs, original) if "gate" in parameters else (original,)

    class Converted(*bases):  # type: ignore[misc]
        __doc__, __module__, __qualname__ = original.__doc__, original.__module__, original.__qualname__
        _converted_from = original

        # The tools of torch take the names of the arguments from the wrapped function.
        @wraps(original.forward, updated=())
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            if parameters[1] in kwargs:  # the name of the input in the original class
                kwargs["input"] = kwargs.pop(parameters[1])
            return spec.compute(self, *args, **kwargs)

        def extra_repr(self) -> str:
            return ", ".join(filter(None, [super().extra_repr(), f"converted to {spec.layer_class.__name__}"]))

        def __reduce__(self) -> tuple[Any, ...]:
            return _new, (original, spec), self.__getstate__()

    Converted.__name__ = original.__name__
    return Converted


def _new(original: Any, spec: NormSpec) -> Any:
    """Return a layer without state, for pickle and copy."""
    cls = converted_class(original, spec)
    return cls.__new__(cls)


def is_ours(cls: type) -> bool:
    """Return whether a class is this package's or that of a converted layer."""
    return issubclass(cls, (LayerNorm, RMSNorm)) or hasattr(cls, "_converted_from")
