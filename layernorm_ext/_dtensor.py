"""Sharding rules: importing this module registers the operators with DTensor.

Rows are independent, so batch dimensions (including the sequence) may be sharded: all tensors with batch dimensions are
sharded alike. Normalized dimensions are replicated. Parameters that all rows share are replicated, and their gradients,
which are sums over rows, are partial: the rules of ``aten::native_layer_norm``. A parameter of the input's size in the
sharded dimension is sharded like the input, and so is its gradient. The gate of a gated norm is sharded like the
input. ``forward_`` has no rule, because DTensor expects an in-place operator to change its first argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

Placements = list[Placement | None]  # None for arguments that are not tensors
Rule = tuple[Placements, Placements]  # of the outputs, of the arguments
RuleFunction = Callable[..., list[Rule]]

_ops = torch.ops.layernorm


def _register(op: torch._ops.OpOverload) -> Callable[[RuleFunction], RuleFunction]:
    def register(rules: RuleFunction) -> RuleFunction:
        register_sharding(op)(rules)
        # DTensor caches the rules, and register_sharding makes only tensors and integers part of the cache key. Calls
        # also differ in normalized_shape, output_mask and missing parameters, so this adds all arguments to the key.
        options = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
        DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = RuntimeSchemaInfo(0, options)
        return rules

    return register


def _batch_dims(normalized_shape: Sequence[int], input: DTensorSpec, images: bool) -> list[int]:
    return [0, *range(2, input.ndim)] if images else list(range(input.ndim - len(normalized_shape)))


def _batch_placements(batch_dims: Sequence[int], *tensors: DTensorSpec | None) -> list[Placement]:
    """Return the placements for one mesh dimension: replicated, or a tensor's existing shard of a batch dimension.

    With new shards in the list, DTensor would scatter replicated tensors. The shards are copied from the tensors
    because reshaped tensors may have strided shards.
    """
    existing = [placement for tensor in tensors if tensor is not None for placement in tensor.placements]
    shards = [placement for placement in existing if getattr(placement, "dim", None) in batch_dims]
    return [Replicate(), *dict.fromkeys(shards)]


def _like(tensor: DTensorSpec | None, batch: Placement) -> Placement | None:
    return None if tensor is None else batch


def _parameter(parameter: DTensorSpec | None, normalized_dims: int, images: bool, batch: Placement) -> Placement | None:
    """Return the placement of a parameter of inputs with the placement ``batch``."""
    if parameter is None:
        return None
    dim, own_dims = getattr(batch, "dim", 0), parameter.ndim - normalized_dims
    last = own_dims + 1 if images else own_dims  # the channels come second, among the batch dimensions
    has_own = own_dims > 0 and dim < last and parameter.shape[dim] != 1
    return batch if has_own else Replicate()


@_register(_ops.forward.fused)
def _forward_fused(
    input: DTensorSpec,
    normalized_shape: Sequence[int],
    weight: DTensorSpec | None = None,
    bias: DTensorSpec | None = None,
    eps: float = 1e-5,
    residual: DTensorSpec | None = None,
    gate: DTensorSpec | None = None,
    input_scale: DTensorSpec | None = None,
    *,
    rms: bool = False,
    images: bool = False,
    **options: object,
) -> list[Rule]:
    rules: list[Rule] = []
    for batch in _batch_placements(_batch_dims(normalized_shape, input, images), input, residual, gate):
        dims = len(normalized_shape)
        parameters = [_parameter(parameter, dims, images, batch) for parameter in (weight, bias, input_scale)]
        outputs = [batch, _like(residual, batch), None if rms else batch, batch]  # output, sum, mean, rstd
        others = [_like(residual, batch), _like(gate, batch), parameters[2]]
        rules.append((outputs, [batch, None, *parameters[:2], None, *others]))
    return rules


@_register(_ops.forward.default)
def _forward(*arguments: Any, **options: Any) -> list[Rule]:
    rules = _forward_fused(*arguments, **options)
    return [([output, mean, rstd], placements[:-3]) for (output, _, mean, rstd), placements in rules]


@_register(_ops.backward.default)
def _backward(
    grad_output: DTensorSpec,
    input: DTensorSpec,
    normalized_shape: Sequence[int],
    mean: DTensorSpec | None,
    rstd: DTensorSpec,
    weight: DTensorSpec | None,
    bias: DTensorSpec | None,
    output_mask: Sequence[bool],
    grad_sum: DTensorSpec | None = None,
    gate: DTensorSpec | None = None,
    input_scale: DTensorSpec | None = None,
    scaled_input: DTensorSpec | None = None,
    *,
    images: bool = False,
    **options: object,
) -> list[Rule]:
    rules: list[Rule] = []
    batch_dims = _batch_dims(normalized_shape, input, images)
    for batch in _batch_placements(batch_dims, grad_output, input, grad_sum, gate, scaled_input):
        dims = len(normalized_shape)
        w, b, scale = (_parameter(parameter, dims, images, batch) for parameter in (weight, bias, input_scale))
        summed = Replicate() if batch.is_replicate() else Partial()

        def gradient(model: Placement | None, batch: Placement = batch, summed: Placement = summed) -> Placement:
            return batch if model == batch else summed

        # The gradient of an absent parameter has the shape of the other parameter, if any.
        gradients = [batch, gradient(w or b), gradient(b or w), _like(gate, batch)]
        gradients += [_like(input_scale, batch), None if scale is None else gradient(scale)]
        wanted = [gradient if wanted else None for gradient, wanted in zip(gradients, output_mask, strict=True)]
        tensors = [batch, batch, None, _like(mean, batch), batch, w, b, None]
        others = [_like(grad_sum, batch), _like(gate, batch), scale, _like(scaled_input, batch)]
        rules.append((wanted, [*tensors, *others]))
    return rules
