"""The two paths of a public function: the compiled function in eager mode, and operators in the graph of a tracer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function

from . import tracing
from ._nested import norm_nested
from ._ops import _C

_AFFINE, _ADAPTIVE, _SHAPE = ("weight", "bias", "eps"), ("scale", "shift", "eps"), "normalized_shape"
# name -> the positional parameters, and what distinguishes the function from layer_norm
_FAMILY: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "layer_norm": (("input", _SHAPE, *_AFFINE), {}),
    "rms_norm": (("input", _SHAPE, "weight", "eps"), {"rms": True}),
    "add_layer_norm": (("input", "residual", _SHAPE, *_AFFINE), {}),
    "add_rms_norm": (("input", "residual", _SHAPE, "weight", "eps"), {"rms": True}),
    "ada_layer_norm": (("input", _SHAPE, *_ADAPTIVE), {"adaptive": True}),
    "ada_rms_norm": (("input", _SHAPE, *_ADAPTIVE), {"adaptive": True, "rms": True}),
    "add_ada_layer_norm": (("input", "residual", _SHAPE, *_ADAPTIVE), {"adaptive": True}),
    "add_ada_rms_norm": (("input", "residual", _SHAPE, *_ADAPTIVE), {"adaptive": True, "rms": True}),
    "gated_layer_norm": (("input", "gate", _SHAPE, *_AFFINE), {}),
    "gated_rms_norm": (("input", "gate", _SHAPE, "weight", "eps"), {"rms": True}),
    "layer_norm_2d": (("input", *_AFFINE), {"images": True}),
    "rms_norm_2d": (("input", "weight", "eps"), {"images": True, "rms": True}),
}


def call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function of the family by its override, by its compiled function, or by operators that a tracer records.

    ``arguments`` are all positional parameters.
    """
    # torch.compile cannot trace the compiled function.
    if not is_dynamo_compiling():
        try:
            results = getattr(_C, function.__name__)(*arguments, **options)
        except TypeError:
            if not _has_override(arguments, options):  # an override may take the place of any argument
                raise
        else:
            if results is not None:
                return results
    names, members = _FAMILY[function.__name__]
    if _has_override(arguments, options):
        first = names.index(_SHAPE) + 1 if _SHAPE in names else 1
        keywords = dict(zip(names[first:], arguments[first:], strict=True)) | options
        return handle_torch_function(function, (*arguments, *options.values()), *arguments[:first], **keywords)
    return norm(function.__name__, **dict(zip(names, arguments, strict=True)), **members, **options)


def _has_override(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether an argument or an active mode overrides functions.

    Nested tensors do not count: they would mistake a function for torch's of the same name.
    """
    if not has_torch_function((*arguments, *options.values())):
        return False
    with torch._C.DisableTorchFunctionSubclass():  # do not call the override for is_nested
        return not any(isinstance(argument, Tensor) and argument.is_nested for argument in arguments)


def norm(
    name: str,
    input: Tensor,
    normalized_shape: Sequence[int] = (),
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    rms: bool = False,
    adaptive: bool = False,
    images: bool = False,
    activation: str | None = None,
    gate_first: bool = False,
    num_groups: int = 1,
    zero_centered_weight: bool = False,
    memory_efficient: bool = False,
    inplace: bool | None = None,
) -> Any:
    """Compute any function of the family by operators that a tracer can record; also of nested tensors.

    ``name`` is that of the function. ``activation`` is None for norms that are not gated, and ``inplace`` for functions
    without a residual.
    """
    if eps is None and rms and not adaptive:
        eps = 2.0**-52 if input.dtype == torch.float64 else 2.0**-23
    if eps is None:
        raise TypeError(f"{name}(): argument 'eps' must be float, not NoneType")
    check_residual(input, residual, inplace)
    # Operators take numbers that the tracer knows. This test makes torch.compile break its graph before it calls one
    # with the item of a tensor, as torch's functions do.
    if eps == 0:
        eps = 0.0
    if activation is not None and not input.is_nested:
        check_gate_options(name, activation, num_groups, normalized_shape, input)
    if images:
        normalized_shape = () if input.is_nested else input.shape[1:2]
    if input.is_nested and not images:
        parameters = {"scale": scale, "shift": shift} if adaptive else {"weight": weight, "bias": bias}
        alike = {"residual": residual}
        (parameters if activation is None else alike)["gate"] = gate
        options: dict[str, Any] = {"eps": eps, "rms": rms, "num_groups": num_groups, "inplace": inplace}
        component = partial(norm, name, adaptive=adaptive, activation=activation, gate_first=gate_first, **options)
        component = partial(component, zero_centered_weight=zero_centered_weight, memory_efficient=memory_efficient)
        return norm_nested(component, input, normalized_shape, parameters, alike, **options)
    if adaptive:
        weight, bias = scale, shift
    input_scale = None
    if activation is None:
        input_scale, gate = gate, None
    elif gate is None:
        activation, gate_first = None, False
    normalized_shape = tracing.constant_sizes(normalized_shape)
    # Defaults are left out, because they take time in each call of a graph.
    flags = {"rms": rms, "zero_centered_weight": zero_centered_weight or adaptive, "images": images}
    options = {name: True for name, value in (flags | {"gate_first": gate_first}).items() if value}
    options |= {} if num_groups == 1 else {"num_groups": num_groups}
    options |= {} if activation is None else {"activation": activation}
    aten = tracing.records_aten()
    # The operators have other names for some arguments, and nested tensors would refuse an operator by their own error.
    tensors = (input, weight, bias, residual, gate, input_scale)
    has_nested = any(isinstance(tensor, Tensor) and tensor.is_nested for tensor in tensors)
    if aten or adaptive or input_scale is not None or has_nested:
        tracing.check(input, normalized_shape, weight, bias, residual, gate, input_scale, adaptive, **options)
    arguments = (input, normalized_shape, weight, bias, eps)
    if aten:
        output, total = tracing.norm(*arguments, residual, gate, input_scale, inplace=bool(inplace), **options)
        return output if residual is None else (output, total)
    options |= {"memory_efficient": True} if memory_efficient else {}
    ops = torch.ops.layernorm  # torch.compile cannot choose an overload if sizes are symbolic
    if inplace:
        return ops.forward_.fused(*arguments, residual, input_scale, **options)[0], residual
    if residual is None and gate is None and num_groups == 1:
        return ops.forward.default(*arguments, **options)[0]
    factors = (gate,) if input_scale is None else (gate, input_scale)
    output, total, *_ = ops.forward.fused(*arguments, residual, *factors, **options)
    return output if residual is None else (output, total)


def check_residual(input: Tensor, residual: Tensor | None, inplace: bool | None) -> None:
    """Raise the error of eager calls for a missing residual; ``inplace`` is None for functions without one."""
    if residual is None and inplace is not None:
        raise TypeError(f"argument 'residual' must be Tensor, not NoneType, for input of shape {list(input.shape)}")


def is_integer(value: object) -> bool:
    return isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)


def gate_options_error(activation: str, num_groups: int, normalized_shape: Sequence[int]) -> str | None:
    """Return the error of an unknown activation, or of groups that do not divide the normalized dimension."""
    if activation not in ("silu", "sigmoid"):
        return f'Expected activation to be "silu" or "sigmoid", but got activation = "{activation}"'
    if num_groups != 1 and (len(normalized_shape) != 1 or num_groups < 1 or normalized_shape[0] % num_groups):
        return (
            f"Expected num_groups to divide the only dimension of normalized_shape, but got num_groups = {num_groups}, "
            f"normalized_shape = {list(normalized_shape)}"
        )
    return None


def check_gate_options(
    name: str, activation: str, num_groups: int, normalized_shape: Sequence[int], input: Tensor
) -> None:
    """Raise the errors of eager calls for options of gated norms, which a plain norm without a gate ignores."""
    if not is_integer(num_groups):
        raise TypeError(f"{name}(): argument 'num_groups' must be int, not {type(num_groups).__name__}")
    error = gate_options_error(activation, num_groups, normalized_shape)
    if error is not None:
        raise RuntimeError(f"{error} and input of shape {list(input.shape)}")
