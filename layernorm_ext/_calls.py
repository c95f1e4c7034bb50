"""Calls of the public functions that the C++ function ``norm`` leaves to Python, and overrides of these functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from . import tracing
from ._arguments import as_numbers, check_types
from ._nested import norm_nested


def has_nested(*arguments: object) -> bool:
    """Return whether an argument is a nested tensor."""
    with torch._C.DisableTorchFunctionSubclass():  # otherwise is_nested would call the override of a subclass
        return any(isinstance(argument, Tensor) and argument.is_nested for argument in arguments)


def override(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call the overrides (__torch_function__) of a function's arguments and of active modes.

    The options that are False are left out, because an override may know only those of torch's function.
    """
    values = (*arguments, *options.values())
    if has_nested(*values) and not torch._C._is_torch_function_mode_enabled():
        # The override of jagged tensors would call torch's function of the same name instead.
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **options)
    options = {name: value for name, value in options.items() if value is not False}
    return handle_torch_function(function, values, *arguments, **options)


def default_eps(input: Any) -> float:
    """Return the eps of an RMSNorm without one, as in torch: the machine epsilon of the accumulation type."""
    return 2.0**-52 if getattr(input, "dtype", None) == torch.float64 else 2.0**-23


def is_sigmoid(activation: str, input: Tensor) -> bool:
    """Return whether an activation is the sigmoid and not SiLU."""
    if activation not in ("silu", "sigmoid"):
        error = f'Expected activation to be "silu" or "sigmoid", but got activation = "{activation}"'
        raise RuntimeError(f"{error} and input of shape {list(input.shape)}")
    return activation == "sigmoid"


def norm(
    name: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    input_scale: Tensor | None = None,
    inplace: bool = False,
    rms: bool = False,
    zero_centered_weight: bool = False,
    memory_efficient: bool = False,
    images: bool = False,
    num_groups: int = 1,
    sigmoid: bool = False,
    gate_first: bool = False,
) -> Any:
    """Compute the public function called ``name``. The other arguments are the operators', so that a scale is a weight.

    ``normalized_shape`` is empty for images. The public functions call the C++ function of this name and signature
    (csrc/python.cpp), which calls this one for nested tensors and other unusual arguments, and while a tracer records
    operators.
    """
    tensors: dict[str, Any] = {"residual": residual, "weight": weight, "bias": bias, "gate": gate}
    tensors["input_scale"] = input_scale
    flags = {"rms": rms, "zero_centered_weight": zero_centered_weight, "images": images, "sigmoid": sigmoid}
    flags |= {"memory_efficient": memory_efficient, "gate_first": gate_first}
    check_types(name, {"input": input, **tensors}, flags | {"inplace": inplace}, num_groups)
    normalized_shape, eps = as_numbers(name, normalized_shape, eps)
    # A default that a graph passes to the operator would cost time in each call.
    options: dict[str, Any] = {flag: True for flag, value in flags.items() if value}
    if num_groups != 1:
        options["num_groups"] = num_groups

    if input.is_nested and not images:
        return norm_nested(partial(norm, name), input, normalized_shape, eps, tensors, inplace=inplace, **options)
    if images:
        normalized_shape = () if input.is_nested else input.shape[1:2]
    normalized_shape = tracing.constant_sizes(normalized_shape)
    records_aten = tracing.records_aten()
    # check() names a nested argument in its error. In inference mode, an operator would not name a jagged one.
    if records_aten or has_nested(input, *tensors.values()):
        tracing.check(input, normalized_shape, **tensors, **options)
    options["inplace"] = inplace
    function = tracing.norm_by_aten if records_aten else _call_operator
    output, total = function(input, normalized_shape, eps, **tensors, **options)
    return output if residual is None else (output, total)


def _call_operator(
    input: Tensor,
    normalized_shape: Sequence[int],
    eps: float,
    *,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    input_scale: Tensor | None,
    inplace: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the sum with a residual, of the operator that takes the given tensors."""
    arguments = (input, normalized_shape, weight, bias, eps)
    ops = torch.ops.layernorm
    # Each call names its overload, because torch.compile cannot choose one if sizes are symbolic.
    if inplace:
        return ops.forward_.fused(*arguments, residual, input_scale, **options)[0], residual
    if residual is None and gate is None and input_scale is None:
        return ops.forward.default(*arguments, **options)[0], None
    others = (gate,) if input_scale is None else (gate, input_scale)
    output, total, *_ = ops.forward.fused(*arguments, residual, *others, **options)
    return output, total
