"""Sharding rules: importing this module registers the operators with DTensor.

Rows are independent, so batch dimensions (including the sequence) may be sharded, and normalized dimensions are
replicated. Residuals and gates of a gated norm are sharded like the input. Parameters that all rows share are
replicated, and their gradients, which are sums over rows, are partial: the rules of ``aten::native_layer_norm``. A
parameter of the input's size in the sharded dimension is sharded like the input, and so is its gradient. ``forward_``
has no rule, because DTensor expects an in-place operator to change its first argument.
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
Rule = tuple[Placements, Placements]  # of outputs and arguments that fit together in one dimension of a mesh
RuleFunction = Callable[..., list[Rule]]

_ops = torch.ops.layernorm


def _register(op: torch._ops.OpOverload) -> Callable[[RuleFunction], RuleFunction]:
    def register(rules: RuleFunction) -> RuleFunction:
        register_sharding(op)(rules)
        # DTensor caches the result of the rules, and register_sharding makes only tensors and integers part of the key.
        # The result also depends on normalized_shape, output_mask and missing parameters, so this adds all arguments.
        options = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
        DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = RuntimeSchemaInfo(0, options)
        return rules

    return register


def _batch_dims_of(normalized_shape: Sequence[int], input: DTensorSpec, images: bool) -> list[int]:
    return [0, *range(2, input.ndim)] if images else list(range(input.ndim - len(normalized_shape)))


def _batch_placements(batch_dims: Sequence[int], *tensors: DTensorSpec | None) -> list[Placement]:
    """Return the placements for one mesh dimension: replicated, or as an existing shard of a batch dimension.

    If other shards were possible, DTensor would scatter replicated tensors. The placements are those of the tensors,
    which may be strided shards after a reshape.
    """
    existing = [placement for tensor in tensors if tensor is not None for placement in tensor.placements]
    shards = [placement for placement in existing if getattr(placement, "dim", None) in batch_dims]
    return [Replicate(), *dict.fromkeys(shards)]


def _if_given(tensor: DTensorSpec | None, placement: Placement) -> Placement | None:
    return None if tensor is None else placement


def _parameter(parameter: DTensorSpec | None, normalized_dims: int, images: bool, batch: Placement) -> Placement | None:
    """Return ``batch``, the input's placement, if the parameter has a size other than 1 there; else, replicate it."""
    if parameter is None:
        return None
    dim, batch_dims = getattr(batch, "dim", 0), parameter.ndim - normalized_dims
    end = batch_dims + 1 if images else batch_dims  # in images, dimension 1 is normalized, between batch dimensions
    is_per_sample = batch_dims > 0 and dim < end and parameter.shape[dim] != 1
    return batch if is_per_sample else Replicate()


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
    for batch in _batch_placements(_batch_dims_of(normalized_shape, input, images), input, residual, gate):
        dims = len(normalized_shape)
        parameters = [_parameter(parameter, dims, images, batch) for parameter in (weight, bias, input_scale)]
        outputs = [batch, _if_given(residual, batch), None if rms else batch, batch]  # output, sum, mean, rstd
        others = [_if_given(residual, batch), _if_given(gate, batch), parameters[2]]
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
    batch_dims = _batch_dims_of(normalized_shape, input, images)
    for batch in _batch_placements(batch_dims, grad_output, input, grad_sum, gate, scaled_input):
        dims = len(normalized_shape)
        w, b, scale = (_parameter(parameter, dims, images, batch) for parameter in (weight, bias, input_scale))
        summed = Replicate() if batch.is_replicate() else Partial()

        def gradient(parameter: Placement | None, batch: Placement = batch, summed: Placement = summed) -> Placement:
            """Return the parameter's placement if it is sharded, else that of a sum over the rows of all shards."""
            return batch if parameter == batch else summed

        # A weight or bias that is absent although its gradient is wanted has the shape of the other one.
        gradients = [batch, gradient(w or b), gradient(b or w), _if_given(gate, batch)]
        # With an input_scale, the gradient of the residual is not that of the input.
        gradients += [_if_given(input_scale, batch), None if scale is None else gradient(scale)]
        outputs = [placement if wanted else None for placement, wanted in zip(gradients, output_mask, strict=True)]
        tensors = [batch, batch, None, _if_given(mean, batch), batch, w, b, None]
        others = [_if_given(grad_sum, batch), _if_given(gate, batch), scale, _if_given(scaled_input, batch)]
        rules.append((outputs, [*tensors, *others]))
    return rules
