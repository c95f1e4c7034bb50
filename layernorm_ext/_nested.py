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
    norm: Callable[..., Any],
    input: Any,  # torch's class of jagged tensors is private
    normalized_shape: Sequence[int],
    parameters: dict[str, Tensor | None],
    alike: dict[str, Any],
    *,
    eps: float,
    rms: bool,
    num_groups: int,
    inplace: bool | None,
    zero_centered_weight: bool,
) -> Any:
    """Call ``norm`` for all values of a jagged tensor, or for each component of other nested tensors.

    The tensors in ``alike`` have the components of ``input``. ``norm`` takes them and the parameters by name.
    """
    jagged, dims, residual = input.layout == torch.jagged, len(normalized_shape), alike["residual"]
    public_names = {"input_scale": "input_scale (gate)"}  # in errors, as in those of the operators
    if zero_centered_weight:
        public_names |= {"weight": "weight (scale)", "bias": "bias (shift)"}
    named = {public_names.get(name, name): parameter for name, parameter in parameters.items()}
    for name, parameter in named.items():
        if parameter is not None and parameter.dim() != dims:
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape for a nested input, but got {name} of "
                f"shape {list(parameter.shape)} and normalized_shape = {list(normalized_shape)}"
            )
    if jagged and tuple(normalized_shape) != tuple(input.shape[1:][-dims:]):
        raise RuntimeError(
            f"Given normalized_shape={list(normalized_shape)}, expected a jagged input with shape [B, *, "
            f"{str(list(normalized_shape))[1:-1]}], but got input of size{list(input.shape)}"
        )
    for name, tensor in alike.items():
        if tensor is not None and not (
            tensor.is_nested and tensor.layout == input.layout and _sizes(tensor) == _sizes(input)
        ):
            raise RuntimeError(
                f"Expected {name} to be nested as input is, with components of the same sizes, but got {name} of "
                f"size{_sizes(tensor)} and input of size{_sizes(input)}"
            )
    over_ragged = jagged and input._ragged_idx >= input.dim() - dims
    if over_ragged:
        if num_groups != 1:
            raise RuntimeError(
                "Expected num_groups to be 1 where the ragged dimension is normalized, but got num_groups = "
                f"{num_groups}, normalized_shape = {list(normalized_shape)} and input of shape {list(input.shape)}"
            )
        gate = alike["gate"]
        if gate is not None:
            raise RuntimeError(
                f"Expected gate to be None for normalized_shape = {list(normalized_shape)}, which includes the ragged "
                f"dimension, but got gate of shape {list(gate.shape)}"
            )
        for name, tensor in named.items():
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
        values = input.values()
        others = {name: None if tensor is None else tensor.values() for name, tensor in alike.items()}
        if over_ragged:  # torch.compile does not know the number of components
            offsets, ragged_dim = input.offsets(), input._ragged_idx - 1
            results = _norm_over_ragged(
                values, others["residual"], normalized_shape, eps, offsets, ragged_dim, rms=rms, inplace=inplace
            )
        else:
            results = norm(values, normalized_shape, **parameters, **others)
        if residual is None:
            return join(results)
        return join(results[0]), residual if inplace else join(results[1])

    components = input.unbind()
    lists = {name: [None] * len(components) if tensor is None else tensor.unbind() for name, tensor in alike.items()}
    outputs, sums = [], []
    for i, x in enumerate(components):
        shape = x.shape[-dims:] if jagged else normalized_shape
        results = norm(x, shape, **parameters, **{name: tensors[i] for name, tensors in lists.items()})
        output, total = (results, None) if residual is None else results
        outputs.append(output)
        sums.append(total)

    def gather(parts: list[Any]) -> Any:
        return join(torch.cat(parts, input._ragged_idx - 1)) if jagged else torch.nested.as_nested_tensor(parts)

    if residual is None:
        return gather(outputs)
    return gather(outputs), residual if inplace else gather(sums)


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
) -> Any:
    """Normalize the values of a jagged tensor over dimensions that include the ragged one, with torch's precision."""
    x, total = values.contiguous(), None  # and so are the sum and the output
    if residual is not None:
        x = x + residual
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
    output = tracing.cast(x * torch.rsqrt(mean(x * x) + eps), values.dtype)
    return output if residual is None else (output, total)


def _sizes(tensor: Tensor) -> list[Any]:
    """Return the shape, or the shapes of the components of a strided nested tensor."""
    is_strided = tensor.is_nested and tensor.layout != torch.jagged
    return tensor._nested_tensor_size().tolist() if is_strided else list(tensor.shape)
