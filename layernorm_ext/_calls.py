"""Calls of the public functions that the C++ function ``norm`` leaves to Python, and overrides of these functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral, Real
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function

from . import tracing
from ._nested import norm_nested

ACTIVATIONS = ("silu", "sigmoid")


def has_nested(*arguments: object) -> bool:
    """Return whether an argument is a nested tensor."""
    with torch._C.DisableTorchFunctionSubclass():  # do not call the override for is_nested
        return any(isinstance(argument, Tensor) and argument.is_nested for argument in arguments)


def override(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call the overrides (__torch_function__) of a function's arguments and of active modes.

    The options that are False are left out, because an override may know only those of torch.
    """
    values = (*arguments, *options.values())
    if has_nested(*values) and not torch._C._is_torch_function_mode_enabled():
        with torch._C.DisableTorchFunctionSubclass():  # it would take the function for torch's of the same name
            return function(*arguments, **options)
    options = {name: value for name, value in options.items() if value is not False}
    return handle_torch_function(function, values, *arguments, **options)


def default_eps(input: Any) -> float:
    """Return the eps of RMSNorm if it is absent: the machine epsilon of the accumulation type."""
    return 2.0**-52 if getattr(input, "dtype", None) == torch.float64 else 2.0**-23


def is_sigmoid(activation: str, input: Tensor) -> bool:
    """Return whether an activation is the sigmoid and not SiLU."""
    if activation not in ACTIVATIONS:
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
    inplace: bool | None = None,
    rms: bool = False,
    zero_centered_weight: bool = False,
    memory_efficient: bool = False,
    images: bool = False,
    num_groups: int = 1,
    sigmoid: bool = False,
    gate_first: bool = False,
) -> Any:
    """Compute the public function of this name. The other arguments are the operators'.

    ``normalized_shape`` is empty for images, and ``inplace`` is None for functions without a residual. The public
    functions call the C++ function of this name and signature (csrc/python.cpp), which calls this one for arguments
    that are not the usual ones, and while a tracer records operators.
    """
    tensors = {"input": input, "residual": residual, "weight": weight, "bias": bias, "gate": gate}
    tensors["input_scale"] = input_scale
    options: dict[str, Any] = {"rms": rms, "zero_centered_weight": zero_centered_weight, "images": images}
    options |= {"memory_efficient": memory_efficient, "sigmoid": sigmoid, "gate_first": gate_first}
    normalized_shape, eps = _check_types(name, tensors, normalized_shape, eps, inplace, num_groups, options)
    # Defaults are left out, because they take time in each call of a graph.
    options = {option: True for option, value in options.items() if value}
    options |= {} if num_groups == 1 else {"num_groups": num_groups}
    if input.is_nested and not images:
        component = partial(norm, name, eps=eps, inplace=inplace, **options)
        parameters = {"weight": weight, "bias": bias, "input_scale": input_scale}
        alike = {"residual": residual, "gate": gate}
        nested_options: dict[str, Any] = {"eps": eps, "inplace": inplace, "rms": rms, "num_groups": num_groups}
        nested_options["zero_centered_weight"] = zero_centered_weight
        return norm_nested(component, input, normalized_shape, parameters, alike, **nested_options)
    if images:
        normalized_shape = () if input.is_nested else input.shape[1:2]
    normalized_shape = tracing.constant_sizes(normalized_shape)
    records_aten = tracing.records_aten()
    if records_aten or has_nested(*tensors.values()):  # which the operators would refuse by their own error
        tracing.check(input, normalized_shape, weight, bias, residual, gate, input_scale, **options)
    arguments = (input, normalized_shape, weight, bias, eps)
    if records_aten:
        options.pop("memory_efficient", None)
        output, total = tracing.norm(*arguments, residual, gate, input_scale, inplace=bool(inplace), **options)
        return output if residual is None else (output, total)
    ops = torch.ops.layernorm  # torch.compile cannot choose an overload if sizes are symbolic
    if inplace:
        return ops.forward_.fused(*arguments, residual, input_scale, **options)[0], residual
    if residual is None and gate is None:
        return ops.forward.default(*arguments, **options)[0]
    factors = (gate,) if input_scale is None else (gate, input_scale)
    output, total, *_ = ops.forward.fused(*arguments, residual, *factors, **options)
    return output if residual is None else (output, total)


def is_integer(value: object) -> bool:
    return isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)


def _check_types(
    name: str,
    tensors: dict[str, Any],
    normalized_shape: Any,
    eps: Any,
    inplace: bool | None,
    num_groups: Any,
    options: dict[str, Any],
) -> tuple[Sequence[int], float]:
    """Raise torch's errors for arguments of wrong types; return the numbers that operators take."""
    for argument, tensor in tensors.items():
        is_required = argument == "input" or (argument == "residual" and inplace is not None)
        if not isinstance(tensor, Tensor) and (is_required or tensor is not None):
            raise _type_error(name, argument, "Tensor", tensor)
    for argument, flag in {**options, "inplace": False if inplace is None else inplace}.items():
        if not isinstance(flag, bool):
            raise _type_error(name, argument, "bool", flag)
    if not is_integer(num_groups) and not (isinstance(num_groups, Tensor) and num_groups.dim() == 0):
        raise _type_error(name, "num_groups", "int", num_groups)
    if is_dynamo_compiling():
        if eps is None:
            raise _type_error(name, "eps", "float", eps)
        # Operators take numbers that the tracer knows. This test makes torch.compile break its graph before it calls
        # one with the item of a tensor, as torch's functions do.
        return normalized_shape, 0.0 if eps == 0 else eps
    if not isinstance(normalized_shape, (tuple, list)):
        raise _type_error(name, "normalized_shape", "tuple of ints", normalized_shape)
    if not torch.jit.is_tracing():
        normalized_shape = [_as_integer(name, size, i) for i, size in enumerate(normalized_shape)]
    is_number = isinstance(eps, (Real, torch.SymFloat))
    if not is_number and not (isinstance(eps, Tensor) and eps.dim() == 0 and not eps.requires_grad):
        raise _type_error(name, "eps", "float", eps)
    number: Any = eps if isinstance(eps, torch.SymFloat) else float(eps)
    return normalized_shape, number


def _as_integer(name: str, size: Any, position: int) -> Any:
    try:
        if not isinstance(size, bool):
            return size if isinstance(size, torch.SymInt) else index(size)
    except TypeError:
        pass
    expected = f"tuple of ints, but found element of type {_type_name(size)} at pos {position}"
    raise _type_error(name, "normalized_shape", expected)


def _type_name(value: object) -> str:
    """Return the name of a type as torch's errors spell it."""
    cls = type(value)
    return f"numpy.{cls.__name__}" if cls.__module__ == "numpy" else cls.__name__


def _type_error(name: str, argument: str, expected: str, *value: object) -> TypeError:
    """Return the error of torch's parser, with the argument's name and position in the public function."""
    from . import functional

    position = ""
    if not is_dynamo_compiling():
        parameters = inspect.signature(getattr(functional, name)).parameters
        if argument not in parameters:
            argument = {"weight": "scale", "bias": "shift", "input_scale": "gate"}[argument]
        if parameters[argument].kind is not inspect.Parameter.KEYWORD_ONLY:
            position = f" (position {list(parameters).index(argument) + 1})"
    given = "".join(f", not {_type_name(each)}" for each in value)
    return TypeError(f"{name}(): argument '{argument}'{position} must be {expected}{given}")
