"""Sharding rules: importing this module registers the operators with DTensor.

Rows are independent, so batch dimensions (including the sequence) may be sharded: all tensors with batch dimensions are
sharded alike, parameters are replicated, and parameter gradients, which are sums over rows, are partial. Normalized
dimensions are replicated. These are the rules of ``aten::native_layer_norm``. ``norm_forward_`` has no rule, because
DTensor expects an in-place operator to change its first argument.
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
        DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = RuntimeSchemaInfo(0, options or None)
        return rules

    return register


def _batch_placements(
    normalized_shape: Sequence[int], first: DTensorSpec, *others: DTensorSpec | None
) -> list[Placement]:
    """Return the placements for one mesh dimension: replicated, or a tensor's existing shard of a batch dimension.

    With new shards in the list, DTensor would scatter replicated tensors. The shards are copied from the tensors
    because reshaped tensors may have strided shards.
    """
    batch_dims = range(first.ndim - len(normalized_shape))
    existing = [placement for tensor in (first, *others) if tensor is not None for placement in tensor.placements]
    shards = [placement for placement in existing if getattr(placement, "dim", None) in batch_dims]
    return [Replicate(), *dict.fromkeys(shards)]


def _replicated(parameter: DTensorSpec | None) -> Placement | None:
    return None if parameter is None else Replicate()


def _gradients(batch: Placement, output_mask: Sequence[bool]) -> Placements:
    parameter = Replicate() if batch.is_replicate() else Partial()
    placements = (batch, parameter, parameter)
    return [placement if wanted else None for placement, wanted in zip(placements, output_mask, strict=True)]


@_register(_ops.norm_forward.default)
def _norm_forward(
    input: DTensorSpec,
    residual: DTensorSpec | None,
    normalized_shape: Sequence[int],
    weight: DTensorSpec | None = None,
    bias: DTensorSpec | None = None,
    eps: float = 1e-5,
    *,
    rms: bool = False,
    **options: bool,
) -> list[Rule]:
    rules: list[Rule] = []
    for batch in _batch_placements(normalized_shape, input, residual):
        added = None if residual is None else batch
        outputs = [batch, added, None if rms else batch, batch]  # output, sum, mean, rstd
        rules.append((outputs, [batch, added, None, _replicated(weight), _replicated(bias), None]))
    return rules


@_register(_ops.norm_backward.default)
def _norm_backward(
    grad_output: DTensorSpec,
    grad_sum: DTensorSpec | None,
    input: DTensorSpec,
    normalized_shape: Sequence[int],
    mean: DTensorSpec | None,
    rstd: DTensorSpec,
    weight: DTensorSpec | None,
    bias: DTensorSpec | None,
    output_mask: Sequence[bool],
    **options: bool,
) -> list[Rule]:
    rules: list[Rule] = []
    for batch in _batch_placements(normalized_shape, grad_output, input, grad_sum):
        sum_placement, mean_placement = (None if tensor is None else batch for tensor in (grad_sum, mean))
        tensors = [batch, sum_placement, batch, None, mean_placement, batch]
        rules.append((_gradients(batch, output_mask), [*tensors, _replicated(weight), _replicated(bias), None]))
    return rules


@_register(_ops.forward.default)
def _forward(input: DTensorSpec, *arguments: Any) -> list[Rule]:
    rules = _norm_forward(input, None, *arguments)
    return [([output, mean, rstd], [x, *others]) for (output, _, mean, rstd), (x, _, *others) in rules]


@_register(_ops.backward.default)
def _backward(grad_output: DTensorSpec, *arguments: Any) -> list[Rule]:
    rules = _norm_backward(grad_output, None, *arguments)
    return [(gradients, [dy, *others]) for gradients, (dy, _, *others) in rules]
