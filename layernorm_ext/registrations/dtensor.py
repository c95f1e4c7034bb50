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


def _batch_placements(normalized_shape: Sequence[int], *tensors: DTensorSpec | None) -> list[Placement]:
    """Return the placements for one mesh dimension: replicated, or a tensor's existing shard of a batch dimension.

    With new shards in the list, DTensor would scatter replicated tensors. The shards are copied from the tensors
    because reshaped tensors may have strided shards.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    batch_dims = range(present[0].ndim - len(normalized_shape))
    existing = [placement for tensor in present for placement in tensor.placements]
    shards = [placement for placement in existing if getattr(placement, "dim", None) in batch_dims]
    return [Replicate(), *dict.fromkeys(shards)]


def _like(tensor: DTensorSpec | None, batch: Placement) -> Placement | None:
    return None if tensor is None else batch


def _parameter(parameter: DTensorSpec | None, input: DTensorSpec, batch: Placement) -> Placement | None:
    """Return the placement of a parameter of inputs with the placement ``batch``."""
    if parameter is None:
        return None
    has_own = parameter.ndim == input.ndim and parameter.shape[getattr(batch, "dim", 0)] != 1
    return batch if has_own else Replicate()


def _gate(gate: DTensorSpec | None, input: DTensorSpec, batch: Placement, activation: str | None) -> Placement | None:
    """Return the placement of a gate: like the input in a gated norm, and beside a residual a parameter."""
    return _like(gate, batch) if activation else _parameter(gate, input, batch)


@_register(_ops.forward.fused)
def _forward_fused(
    input: DTensorSpec,
    normalized_shape: Sequence[int],
    weight: DTensorSpec | None = None,
    bias: DTensorSpec | None = None,
    eps: float = 1e-5,
    residual: DTensorSpec | None = None,
    gate: DTensorSpec | None = None,
    *,
    rms: bool = False,
    activation: str | None = None,
    **options: bool,
) -> list[Rule]:
    rules: list[Rule] = []
    for batch in _batch_placements(normalized_shape, input, residual):
        parameters = [_parameter(parameter, input, batch) for parameter in (weight, bias)]
        outputs = [batch, _like(residual, batch), None if rms else batch, batch]  # output, sum, mean, rstd
        gates = [_like(residual, batch), _gate(gate, input, batch, activation)]
        rules.append((outputs, [batch, None, *parameters, None, *gates]))
    return rules


@_register(_ops.forward.default)
def _forward(input: DTensorSpec, *arguments: object, **options: bool) -> list[Rule]:
    rules = _forward_fused(input, *arguments, **options)
    return [([output, mean, rstd], placements[:-2]) for (output, _, mean, rstd), placements in rules]


@_register(_ops.backward.fused)
def _backward_fused(
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
    gated_input: DTensorSpec | None = None,
    *,
    activation: str | None = None,
    **options: bool,
) -> list[Rule]:
    rules: list[Rule] = []
    for batch in _batch_placements(normalized_shape, grad_output, input, grad_sum, gated_input):
        weight_placement, bias_placement = (_parameter(parameter, input, batch) for parameter in (weight, bias))
        gate_placement = _gate(gate, input, batch, activation)
        tensors = [batch, batch, None, _like(mean, batch), batch, weight_placement, bias_placement, None]
        # The gradient of an absent parameter has the shape of the other parameter, if any.
        models = (weight_placement or bias_placement, bias_placement or weight_placement, batch, gate_placement)
        summed = Replicate() if batch.is_replicate() else Partial()
        gradients = [batch, *(batch if model == batch else summed for model in models)]
        wanted = [gradient if wanted else None for gradient, wanted in zip(gradients, output_mask, strict=False)]
        rules.append((wanted, [*tensors, _like(grad_sum, batch), gate_placement, _like(gated_input, batch)]))
    return rules


@_register(_ops.backward.default)
def _backward(*arguments: Any, **options: bool) -> list[Rule]:
    """Return the rules of ``backward.fused`` for the first three gradients, whose mask is shorter, without a gate."""
    return [(gradients, placements[:-2]) for gradients, placements in _backward_fused(*arguments, **options)]
