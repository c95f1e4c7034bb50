"""Nested tensors, which torch's functions accept, and for which no operator exists here.

Their components are normalized by the functions for other tensors, except over a ragged dimension in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import tracing


def norm_nested(
    norm: Callable[..., tracing.Results],
    input: Any,  # torch's class of jagged tensors is private
    residual: Any,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    gate: Any = None,
    **options: Any,
) -> tracing.Results:
    """Call ``norm`` for all values of a jagged tensor, or for each component of other nested tensors."""
    jagged, dims, inplace = input.layout == torch.jagged, len(normalized_shape), options["inplace"]
    if jagged and tuple(normalized_shape) != tuple(input.shape[1:][-dims:]):
        raise RuntimeError(
            f"Given normalized_shape={list(normalized_shape)}, expected a jagged input with shape [B, *, "
            f"{str(list(normalized_shape))[1:-1]}], but got input of size{list(input.shape)}"
        )
    parameters = {"weight": weight, "bias": bias}
    alike = {"residual": residual}  # tensors with the components of the input
    (alike if "activation" in options else parameters)["gate"] = gate
    for name, tensor in alike.items():
        if tensor is not None and not (
            tensor.is_nested and tensor.layout == input.layout and _sizes(tensor) == _sizes(input)
        ):
            raise RuntimeError(
                f"Expected {name} to be nested as input is, with components of the same sizes, but got {name} of "
                f"size{_sizes(tensor)} and input of size{_sizes(input)}"
            )
    over_ragged = normalizes_ragged(input, dims)
    if over_ragged:
        if "activation" in options:
            raise RuntimeError(
                f"Expected gate to be None for normalized_shape = {list(normalized_shape)}, which includes the ragged "
                f"dimension, but got gate of shape {list(gate.shape)}"
            )
        for name, tensor in parameters.items():
            if tensor is not None:
                raise RuntimeError(
                    f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape "
                    f"{list(tensor.shape)} and normalized_shape = {list(normalized_shape)}, which includes "
                    "the ragged dimension"
                )
        if input.lengths() is not None:
            raise RuntimeError(
                f"Given normalized_shape={list(normalized_shape)} with the ragged dimension, expected a jagged "
                "input without holes, but got one with lengths"
            )

    def join(values: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(values, input.offsets(), input.lengths(), input._ragged_idx)

    if jagged and (not over_ragged or torch.compiler.is_compiling()):
        values, added = input.values(), None if residual is None else residual.values()
        if over_ragged:  # torch.compile does not know the number of components
            offsets, ragged_dim, rms = input.offsets(), input._ragged_idx - 1, options["rms"]
            output, total = _norm_over_ragged(
                values, added, normalized_shape, eps, offsets, ragged_dim, rms=rms, inplace=inplace
            )
        else:
            factor = gate.values() if gate is not None and gate.is_nested else gate
            output, total = norm(values, added, normalized_shape, weight, bias, eps, gate=factor, **options)
        return join(output), residual if inplace or residual is None else join(total)

    components = input.unbind()
    residuals = [None] * len(components) if residual is None else residual.unbind()
    gates = gate.unbind() if gate is not None and gate.is_nested else [gate] * len(components)
    results = []
    for x, added, factor in zip(components, residuals, gates, strict=True):
        shape = x.shape[-dims:] if jagged else normalized_shape
        results.append(norm(x, added, shape, weight, bias, eps, gate=factor, **options))

    def gather(parts: list[Tensor]) -> Tensor:
        return join(torch.cat(parts, input._ragged_idx - 1)) if jagged else torch.nested.as_nested_tensor(parts)

    output = gather([output for output, _ in results])
    return output, residual if inplace or residual is None else gather([total for _, total in results])


def normalizes_ragged(input: Any, normalized_dims: int) -> bool:
    """Return whether the ragged dimension of a nested tensor is one of the last dimensions."""
    return bool(input.layout == torch.jagged and input._ragged_idx >= input.dim() - normalized_dims)


def _norm_over_ragged(
    values: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    offsets: Tensor,
    ragged_dim: int,
    *,
    rms: bool,
    inplace: bool | None,
) -> tracing.Results:
    """Normalize the values of a jagged tensor over dimensions that include the ragged one, with torch's precision."""
    x, total = values, None
    if residual is not None:
        x = values + residual
        total = residual.copy_(x) if inplace else x
    x = tracing.cast(x, tracing.accumulation_dtype(values))
    dims = range(x.dim() - len(normalized_shape), x.dim())
    lengths = offsets.diff()
    components = torch.arange(lengths.size(0), device=values.device)
    component = torch.repeat_interleave(components, lengths, output_size=x.size(ragged_dim))

    def mean(t: Tensor) -> Tensor:
        for dim in dims:
            t = t if dim == ragged_dim else t.mean(dim, keepdim=True)
        sizes = [lengths.size(0) if dim == ragged_dim else size for dim, size in enumerate(t.shape)]
        sums = t.new_zeros(sizes).index_add(ragged_dim, component, t)
        shape = [-1 if dim == ragged_dim else 1 for dim in range(t.dim())]
        return (sums / lengths.view(shape)).index_select(ragged_dim, component)

    if not rms:
        x = x - mean(x)
    return tracing.cast(x * torch.rsqrt(mean(x * x) + eps), values.dtype), total


def _sizes(tensor: Tensor) -> list[Any]:
    """Return the shape, or the shapes of the components of a strided nested tensor."""
    is_strided = tensor.is_nested and tensor.layout != torch.jagged
    return tensor._nested_tensor_size().tolist() if is_strided else list(tensor.shape)
