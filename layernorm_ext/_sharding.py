"""How the operators are sharded: importing this module tells DTensor the rules of each.

Batch dimensions (sequences among them) may be sharded, because a row depends on nothing but itself: every tensor that
has them is then sharded alike, the parameters are replicated, and parameter gradients, which are sums over rows, are
partial sums. Normalized dimensions are replicated. These are the rules of ``aten::native_layer_norm``. An operator that
changes a residual in place has none: DTensor takes it for one that changes its first argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

Placements = list[Placement | None]  # None for what is not a tensor
Rules = list[tuple[Placements, Placements]]  # of the outputs, of the arguments

_ops = torch.ops.layernorm


def _register(op: torch._ops.OpOverload, first_static_argument: int) -> Callable:
    """Register the decorated rules; arguments from the given one on decide about them as the placements do."""

    def register(rules: Callable[..., Rules]) -> Callable[..., Rules]:
        register_sharding(op)(rules)
        # DTensor keeps what it has derived. Of register_sharding it learns that only tensors and integers matter; two
        # calls that differ in normalized_shape, a missing parameter or output_mask would be given the same rules.
        known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
        flags = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
        known[op] = RuntimeSchemaInfo(first_static_argument, flags or None)
        return rules

    return register


def _batch_placements(normalized_shape: Sequence[int], *tensors: DTensorSpec | None) -> list[Placement]:
    """Return the ways to lay out one dimension of the mesh: replicated, or one of the tensors' own shards of the batch.

    No other shards are offered, because DTensor would scatter what can stay whole; and not a ``Shard`` of the same
    dimension, because those of reshaped tensors may be strided.
    """
    batch_dims = range(tensors[0].ndim - len(normalized_shape))
    own = [placement for tensor in tensors if tensor is not None for placement in tensor.placements]
    shards = [placement for placement in own if getattr(placement, "dim", None) in batch_dims]
    return [Replicate(), *dict.fromkeys(shards)]


def _parameter(present: object) -> Placement | None:
    return None if present is None else Replicate()


def _gradients(batch: Placement, output_mask: Sequence[bool]) -> Placements:
    of_parameters = Replicate() if batch.is_replicate() else Partial()
    placements = (batch, of_parameters, of_parameters)
    return [placement if wanted else None for placement, wanted in zip(placements, output_mask, strict=True)]


@_register(_ops.forward.default, first_static_argument=1)
def _forward(
    input: DTensorSpec,
    normalized_shape: Sequence[int],
    weight: DTensorSpec | None = None,
    bias: DTensorSpec | None = None,
    eps: float = 1e-5,
) -> Rules:
    return [
        (
            [batch, batch, batch],  # output, mean, rstd
            [batch, None, _parameter(weight), _parameter(bias), None],
        )
        for batch in _batch_placements(normalized_shape, input)
    ]


@_register(_ops.backward.default, first_static_argument=2)
def _backward(
    grad_output: DTensorSpec,
    input: DTensorSpec,
    normalized_shape: Sequence[int],
    mean: DTensorSpec,
    rstd: DTensorSpec,
    weight: DTensorSpec | None,
    bias: DTensorSpec | None,
    output_mask: Sequence[bool],
) -> Rules:
    return [
        (
            _gradients(batch, output_mask),
            [batch, batch, None, batch, batch, _parameter(weight), _parameter(bias), None],
        )
        for batch in _batch_placements(normalized_shape, grad_output, input)
    ]


@_register(_ops.norm_forward.default, first_static_argument=2)
def _norm_forward(
    input: DTensorSpec,
    residual: DTensorSpec | None,
    normalized_shape: Sequence[int],
    weight: DTensorSpec | None = None,
    bias: DTensorSpec | None = None,
    eps: float = 1e-5,
    *,
    rms: bool = False,
    **flags: bool,
) -> Rules:
    rules = []
    for batch in _batch_placements(normalized_shape, input, residual):
        added = None if residual is None else batch
        outputs = [batch, added, None if rms else batch, batch]  # output, sum, mean, rstd
        rules.append((outputs, [batch, added, None, _parameter(weight), _parameter(bias), None]))
    return rules


@_register(_ops.norm_backward.default, first_static_argument=3)
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
    **flags: bool,
) -> Rules:
    rules = []
    for batch in _batch_placements(normalized_shape, grad_output, input, grad_sum):
        of_sum, of_mean = (None if tensor is None else batch for tensor in (grad_sum, mean))
        inputs = [batch, of_sum, batch, None, of_mean, batch, _parameter(weight), _parameter(bias), None]
        rules.append((_gradients(batch, output_mask), inputs))
    return rules
