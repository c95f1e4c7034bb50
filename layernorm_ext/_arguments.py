"""Checks the types of arguments with torch's errors, and names the arguments in errors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

# The names of the operators' arguments in the adaptive functions; input_scale is called gate in all functions.
_PUBLIC_NAMES = {"weight": "scale", "bias": "shift", "input_scale": "gate"}


def describe_name(argument: str, zero_centered_weight: bool) -> str:
    """Return the name of an operator's argument, followed by its public name if that may differ; see checks.cpp."""
    may_differ = argument in _PUBLIC_NAMES and (argument == "input_scale" or zero_centered_weight)
    return f"{argument} ({_PUBLIC_NAMES[argument]})" if may_differ else argument


def check_types(name: str, tensors: Mapping[str, Any], flags: Mapping[str, Any], num_groups: Any) -> None:
    """Raise torch's error if an argument of the public function called ``name`` has a wrong type."""
    required = ("input", "residual") if name.startswith("add_") else ("input",)
    for argument, tensor in tensors.items():
        if not isinstance(tensor, Tensor) and (argument in required or tensor is not None):
            raise _type_error(name, argument, "Tensor", tensor)
    for argument, flag in flags.items():
        if not isinstance(flag, bool):
            raise _type_error(name, argument, "bool", flag)
    is_integer = isinstance(num_groups, (Integral, torch.SymInt)) and not isinstance(num_groups, bool)
    if not is_integer and not (isinstance(num_groups, Tensor) and num_groups.dim() == 0):
        raise _type_error(name, "num_groups", "int", num_groups)


def as_numbers(name: str, normalized_shape: Any, eps: Any) -> tuple[Sequence[int], float]:
    """Return normalized_shape and eps as the operators take them, or raise torch's errors for wrong types."""
    if is_dynamo_compiling():
        if eps is None:
            raise _type_error(name, "eps", "float", eps)
        # If eps is the item of a tensor, which operators cannot take in a graph, this comparison makes torch.compile
        # break the graph before the call, as it does for torch's functions.
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
    from . import functional  # which imports this module

    position = ""
    if not is_dynamo_compiling():
        parameters = inspect.signature(getattr(functional, name)).parameters
        argument = argument if argument in parameters else _PUBLIC_NAMES[argument]
        if parameters[argument].kind is not inspect.Parameter.KEYWORD_ONLY:
            position = f" (position {list(parameters).index(argument) + 1})"
    given = "".join(f", not {_type_name(each)}" for each in value)
    return TypeError(f"{name}(): argument '{argument}'{position} must be {expected}{given}")
