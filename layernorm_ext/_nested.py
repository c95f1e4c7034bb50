"""The functions for nested tensors, which this package's operators do not take.

The operators get ordinary tensors instead: all values of a jagged tensor in one call, or each component in its own.
In a compiled graph, aten's operators normalize over a ragged dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import tracing
from ._arguments import describe_name


def norm_nested(
    norm: Callable[..., Any],
    input: Any,  # torch's class of jagged tensors is private
    normalized_shape: Sequence[int],
    eps: float,
    tensors: Mapping[str, Any],
    *,
    inplace: bool,
    **options: Any,
) -> Any:
    """Normalize a nested tensor by ``norm``, which takes the same arguments for other tensors.

    Residual and gate have the components of ``input``, and the parameters have ``normalized_shape``.
    """
    jagged = input.layout == torch.jagged
    over_ragged = jagged and input._ragged_idx >= input.dim() - len(normalized_shape)
    nested = {name: tensors[name] for name in ("residual", "gate")}
    parameters = {name: tensor for name, tensor in tensors.items() if name not in nested}
    zero_centered_weight = options.get("zero_centered_weight", False)
    named = {describe_name(name, zero_centered_weight): parameter for name, parameter in parameters.items()}
    _check_shapes(input, normalized_shape, named)
    for name, tensor in nested.items():
        _check_components(name, tensor, input)
    if over_ragged:
        _check_over_ragged(input, normalized_shape, named, nested["gate"], options.get("num_groups", 1))

    residual = nested["residual"]
    if over_ragged and torch.compiler.is_compiling():  # torch.compile does not know the number of components
        # The other options have no effect: they need a weight or a gate, which are refused, or are memory_efficient.
        results = _norm_over_ragged(input, normalized_shape, eps, residual, options.get("rms", False), inplace)
    else:
        norm = partial(norm, eps=eps, inplace=inplace, **parameters, **options)
        norm_all = _norm_values if jagged and not over_ragged else _norm_components
        given = {name: tensor for name, tensor in nested.items() if tensor is not None}
        results = norm_all(norm, input, normalized_shape, given)
    if residual is None:
        return _as_nested(results, input)
    output, total = results
    return _as_nested(output, input), residual if inplace else _as_nested(total, residual)


def _check_shapes(input: Any, normalized_shape: Sequence[int], parameters: Mapping[str, Tensor | None]) -> None:
    """Require that parameters have as many dimensions as are normalized, and a jagged input the normalized sizes."""
    dims = len(normalized_shape)
    for name, parameter in parameters.items():
        if parameter is not None and parameter.dim() != dims:
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape for a nested input, but got {name} of "
                f"shape {list(parameter.shape)} and normalized_shape = {list(normalized_shape)}"
            )
    if input.layout == torch.jagged and tuple(normalized_shape) != tuple(input.shape[1:][-dims:]):
        raise RuntimeError(
            f"Given normalized_shape={list(normalized_shape)}, expected a jagged input with shape [B, *, "
            f"{str(list(normalized_shape))[1:-1]}], but got input of size{list(input.shape)}"
        )


def _check_components(name: str, tensor: Any, input: Any) -> None:
    """Require that the components of a residual or gate, if it is given, have the sizes of the input's components."""
    if tensor is not None and not (
        tensor.is_nested and tensor.layout == input.layout and _sizes(tensor) == _sizes(input)
    ):
        raise RuntimeError(
            f"Expected {name} to be nested as input is, with components of the same sizes, but got {name} of "
            f"size{_sizes(tensor)} and input of size{_sizes(input)}"
        )
    # The shape of a jagged tensor with holes does not show where its components begin, so compare the offsets.
    has_holes = tensor is not None and tensor.layout == torch.jagged and tensor.lengths() is not None
    if has_holes and not torch.equal(tensor.offsets(), input.offsets()):
        raise RuntimeError(
            f"Expected {name} with lengths to have the offsets of input, but got {name} with offsets "
            f"{tensor.offsets().tolist()} and input with offsets {input.offsets().tolist()}"
        )


def _sizes(tensor: Tensor) -> list[Any]:
    """Return the shape, or the shapes of the components of a strided nested tensor."""
    is_strided = tensor.is_nested and tensor.layout != torch.jagged
    return tensor._nested_tensor_size().tolist() if is_strided else list(tensor.shape)


def _check_over_ragged(
    input: Any,
    normalized_shape: Sequence[int],
    parameters: Mapping[str, Tensor | None],
    gate: Any,
    num_groups: int,
) -> None:
    """Refuse what a norm over the ragged dimension does not support: groups, gates, parameters, inputs with holes."""
    if num_groups != 1:
        raise RuntimeError(
            "Expected num_groups to be 1 where the ragged dimension is normalized, but got num_groups = "
            f"{num_groups}, normalized_shape = {list(normalized_shape)} and input of shape {list(input.shape)}"
        )
    if gate is not None:
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


# The functions below return the output or, with a residual, output and sum, each as _as_nested() takes it.


def _norm_values(
    norm: Callable[..., Any], input: Any, normalized_shape: Sequence[int], nested: Mapping[str, Any]
) -> Any:
    """Normalize all values of a jagged tensor in one call."""
    return norm(input.values(), normalized_shape, **{name: tensor.values() for name, tensor in nested.items()})


def _norm_components(
    norm: Callable[..., Any], input: Any, normalized_shape: Sequence[int], nested: Mapping[str, Any]
) -> Any:
    """Normalize each component."""
    jagged, dims = input.layout == torch.jagged, len(normalized_shape)
    components = {name: tensor.unbind() for name, tensor in nested.items()}
    results = []
    for i, x in enumerate(input.unbind()):
        shape = x.shape[-dims:] if jagged else normalized_shape  # each component has its own ragged size
        results.append(norm(x, shape, **{name: tensors[i] for name, tensors in components.items()}))
    return ([result[i] for result in results] for i in range(2)) if "residual" in nested else results


def _norm_over_ragged(
    input: Any, normalized_shape: Sequence[int], eps: float, residual: Any, rms: bool, inplace: bool
) -> Any:
    """Normalize over dimensions that include the ragged one, by aten's operators and with torch's precision."""
    values, lengths, ragged_dim = input.values(), input.offsets().diff(), input._ragged_idx - 1
    x, total = values.contiguous(), None  # so that sum and output are contiguous, too
    if residual is not None:
        x = x + residual.values()
        total = residual.values().copy_(x) if inplace else x
    x = tracing.cast(x, tracing.accumulation_dtype(values))
    dims = range(x.dim() - len(normalized_shape), x.dim())
    indices = torch.arange(lengths.size(0), device=values.device)
    component = torch.repeat_interleave(indices, lengths, output_size=x.size(ragged_dim))  # of each ragged index

    def mean(t: Tensor) -> Tensor:
        """Return the mean of each component, repeated for its elements of the ragged dimension."""
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


def _as_nested(result: Any, like: Any) -> Tensor:
    """Return a nested tensor, of the layout and dtype of another one, from its values or from a list of components."""
    if like.layout != torch.jagged:
        return torch.nested.as_nested_tensor(result, dtype=like.dtype, device=like.device)
    ragged_dim, values = like._ragged_idx - 1, result
    if isinstance(result, list):
        values = torch.cat(result or [like.values().narrow(ragged_dim, 0, 0)], ragged_dim)
    seqlens = like._maybe_min_seqlen, like._maybe_max_seqlen  # if known, attention need not wait for the GPU
    return torch.nested.nested_tensor_from_jagged(values, like.offsets(), like.lengths(), like._ragged_idx, *seqlens)
