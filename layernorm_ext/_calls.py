"""The calls of the operators by the public functions where the compiled functions do not serve: in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import tracing
from ._nested import norm_nested, normalizes_ragged


def modulated_norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    *,
    gate: Tensor | None = None,
    adaptive: bool = False,
    **options: bool,
) -> tracing.Results:
    """Insert the batch dimensions that scale and shift, if ``adaptive``, and the gate of a residual lack."""
    scale, shift = (weight, bias) if adaptive else (None, None)
    if input.is_nested:
        for name, parameter in {"scale": scale, "shift": shift, "gate": gate}.items():
            if parameter is not None and parameter.dim() != len(normalized_shape):
                raise RuntimeError(
                    f"Expected {name} to be of same shape as normalized_shape for a nested input, but got {name} of "
                    f"shape {list(parameter.shape)} and normalized_shape = {list(normalized_shape)}"
                )
    elif adaptive or gate is not None:
        normalized_shape = tracing.constant_sizes(normalized_shape)
        tracing.check("check_modulation", input, normalized_shape, scale, shift, gate)
        scale, shift, gate = (_insert_batch_dims(t, input, len(normalized_shape)) for t in (scale, shift, gate))
    if adaptive:
        weight, bias = scale, shift
        options["zero_centered_weight"] = True
    return norm(input, residual, normalized_shape, weight, bias, eps, gate=gate, **options)


def gated_norm(
    input: Tensor,
    gate: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    *,
    activation: str,
    gate_first: bool,
    num_groups: int,
    **options: Any,
) -> Tensor:
    """Check the options, which a plain norm without a gate ignores."""
    if not is_integer(num_groups):
        name, kind = "gated_rms_norm" if options.get("rms") else "gated_layer_norm", type(num_groups).__name__
        raise TypeError(f"{name}(): argument 'num_groups' must be int, not {kind}")
    if num_groups != 1 and input.is_nested and normalizes_ragged(input, len(normalized_shape)):
        raise RuntimeError(
            f"Expected num_groups to be 1 where the ragged dimension is normalized, but got num_groups = {num_groups}, "
            f"normalized_shape = {list(normalized_shape)} and input of shape {list(input.shape)}"
        )
    error = gate_options_error(activation, num_groups, normalized_shape)
    if error is not None:
        raise RuntimeError(f"{error} and input of shape {list(input.shape)}")
    if gate is not None:
        options |= {"activation": activation, "gate_first": gate_first}
    return norm(input, None, normalized_shape, weight, bias, eps, gate=gate, num_groups=num_groups, **options)[0]


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


def norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    *,
    gate: Tensor | None = None,
    num_groups: int = 1,
    rms: bool = False,
    zero_centered_weight: bool = False,
    memory_efficient: bool = False,
    preserve_layout: bool = False,
    inplace: bool | None = None,
    **gate_options: Any,
) -> tracing.Results:
    """Compute any member of the family by operators that a tracer can record; also of nested tensors.

    ``inplace`` is None for functions without a residual. ``gate_options`` are ``activation`` and ``gate_first`` of a
    gated norm with a gate.
    """
    if eps is None:
        raise TypeError("layer_norm(): argument 'eps' must be float, not NoneType")
    check_residual(input, residual, inplace)
    # Operators take numbers that the tracer knows. This test makes torch.compile break its graph before it calls one
    # with the item of a tensor, as torch's functions do.
    if eps == 0:
        eps = 0.0
    options = {"rms": rms, "zero_centered_weight": zero_centered_weight, **gate_options}
    if input.is_nested:
        options |= {"memory_efficient": memory_efficient, "inplace": inplace, "num_groups": num_groups}
        return norm_nested(norm, input, residual, normalized_shape, weight, bias, eps, gate=gate, **options)
    normalized_shape = tracing.constant_sizes(normalized_shape)
    if num_groups != 1:
        activation = gate_options.get("activation")
        tracing.check("check_forward", input, None, normalized_shape, weight, bias, gate, activation)
        sizes, dims = (num_groups, normalized_shape[0] // num_groups), input.dim()
        weight, bias = _broadcast(weight, bias, tracing.accumulation_dtype(input))
        groups, gate, weight, bias = (_divide(t, sizes, dims) for t in (input, gate, weight, bias))
        output, _ = norm(groups, None, sizes[1:], weight, bias, eps, gate=gate, **options)
        return output.reshape_as(input), None  # the older exporter to ONNX would fix the batch size in flatten()
    if tracing.records_aten():
        return tracing.norm(
            input, residual, normalized_shape, weight, bias, eps, gate=gate, inplace=bool(inplace), **options
        )
    ops = torch.ops.layernorm  # torch.compile cannot choose an overload if sizes are symbolic
    arguments = (normalized_shape, weight, bias, eps)
    options |= {"memory_efficient": memory_efficient, "preserve_layout": preserve_layout}
    options = {name: value for name, value in options.items() if value}  # defaults take time in each call of a graph
    if inplace:
        return ops.forward_.fused(input, *arguments, residual, gate, **options)[0], residual
    if residual is None and gate is None:
        return ops.forward.default(input, *arguments, **options)[0], None
    return ops.forward.fused(input, *arguments, residual, gate, **options)[:2]


def check_residual(input: Tensor, residual: Tensor | None, inplace: bool | None) -> None:
    """Raise the error of eager calls for a missing residual; ``inplace`` is None for functions without one."""
    if residual is None and inplace is not None:
        raise TypeError(f"argument 'residual' must be Tensor, not NoneType, for input of shape {list(input.shape)}")


def _broadcast(weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Give two parameters the batch sizes of each other, in a dtype in which autograd adds the gradients of rows."""
    if weight is None or bias is None or (weight.dim() == bias.dim() and weight.shape == bias.shape):
        return weight, bias
    weight, bias = torch.broadcast_tensors(weight.to(dtype), bias.to(dtype))
    return weight, bias


def _divide(tensor: Any, sizes: tuple[int, int], dims: int) -> Any:
    """Return a view with the last dimension divided and, for a shared parameter, the batch dimensions that it lacks."""
    return None if tensor is None else tensor.unflatten(-1, sizes)[(None,) * (dims - tensor.dim())]


def rms_eps(input: Tensor, eps: float | None) -> float:
    """Return eps, by default torch.finfo(dtype).eps of the accumulation dtype, as in torch."""
    if eps is None:
        return 2.0**-52 if input.dtype == torch.float64 else 2.0**-23
    return eps


def _insert_batch_dims(parameter: Tensor | None, input: Tensor, normalized_dims: int) -> Tensor | None:
    """Insert the batch dimensions that a scale, a shift or the gate of a residual lacks after those that it has."""
    if parameter is None or parameter.dim() == normalized_dims:
        return parameter
    for _ in range(input.dim() - parameter.dim()):
        parameter = parameter.unsqueeze(-1 - normalized_dims)
    return parameter


def is_overridden(input: Tensor, *others: Tensor | None) -> bool:
    if not has_torch_function_variadic(input, *others):
        return False
    with torch._C.DisableTorchFunctionSubclass():  # do not call the override for is_nested
        # torch's override for jagged tensors looks functions up by name, and would mistake this rms_norm for torch's.
        return not any(isinstance(tensor, Tensor) and tensor.is_nested for tensor in (input, *others))


def override(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call the ``__torch_function__`` of an argument instead of a function."""
    return handle_torch_function(function, (*arguments, *keywords.values()), *arguments, **keywords)
