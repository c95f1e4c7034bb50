"""Export to ONNX, by torch's exporter, as the standard operator ``LayerNormalization``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch._ops import OpOverload

from . import _ops  # noqa: F401  # registers the operators

if TYPE_CHECKING:
    from onnxscript.ir import Value

__all__ = ["translations"]


def translations() -> dict[OpOverload, Callable]:
    r"""Return what :func:`torch.onnx.export` needs to know, for its argument ``custom_translation_table``.

    Each normalization of the model becomes one node of the standard operator `LayerNormalization
    <https://onnx.ai/onnx/operators/onnx__LayerNormalization.html>`_ (opset 17 and later),

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \mathrm{weight} + \mathrm{bias}

    over the last ``len(normalized_shape)`` dimensions, with statistics in float32. Batch dimensions may be dynamic.
    ``LayerNormalization`` has one dtype for input and parameters: a float16 or bfloat16 input with float32 parameters
    is converted to float32 before it and back after it, which rounds once, as layernorm_ext does. A missing weight
    becomes ones, which it demands; a missing bias stays missing.

    RMSNorm is written out, in float32, for want of a standard operator before opset 23; a residual is an ``Add``, a
    zero-centred weight likewise; images whose channels come first are transposed around the node.

    Returns:
        A table from the operators ``forward``, ``norm_forward`` and ``channels_first_forward`` of
        ``torch.ops.layernorm`` to functions of ONNX Script; merge it with your own by ``|``.

    Raises:
        ImportError: The packages ``onnx`` and ``onnxscript`` are not installed.

    Note:
        Only inference is exported: ONNX has no operator for ``layernorm::backward``; nor for ``norm_forward_``, which
        changes a residual in place.

    Example:
        >>> import layernorm_ext.onnx
        >>> program = torch.onnx.export(
        ...     layernorm_ext.LayerNorm(8).eval(),
        ...     (torch.randn(2, 8),),
        ...     dynamo=True,
        ...     custom_translation_table=layernorm_ext.onnx.translations(),
        ...     verbose=False,
        ... )
        >>> [node.op_type for node in program.model_proto.graph.node]
        ['LayerNormalization']
    """
    try:
        import onnx  # noqa: F401  # without it, the exporter would fail in its own words, later
        from onnxscript import ir
        from onnxscript import opset18 as op  # that the exporter writes its models in
    except ImportError as error:
        raise ImportError(
            "layernorm_ext.onnx needs the packages onnx and onnxscript, as torch.onnx.export does; "
            "run `pip install onnx onnxscript`"
        ) from error

    def constant(value: float, dtype: int) -> Value:
        return op.Constant(value=ir.tensor(value, dtype=dtype))

    def cast(value: Value, was: int, dtype: int) -> Value:  # the dtypes of values made here are not known to themselves
        return value if was == dtype else op.Cast(value, to=dtype)

    def wide(dtype: int) -> int:
        return ir.DataType.DOUBLE if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT

    def layer_norm(
        x: Value, was: int, dtype: int, weight: Value | None, bias: Value | None, axis: int, eps: float
    ) -> tuple[Value, Value, Value]:
        x = cast(x, was, dtype)
        if weight is None:
            weight = op.Expand(constant(1, dtype), op.Shape(x, start=axis))
        output, mean, rstd = op.LayerNormalization(x, weight, bias, axis=axis, epsilon=eps)
        return cast(output, dtype, was), mean, rstd

    def rms_norm(
        x: Value, was: int, dtype: int, weight: Value | None, bias: Value | None, axis: int, eps: float
    ) -> tuple[Value, Value, Value]:
        acc = wide(was)
        x = cast(x, was, acc)
        rstd = op.Reciprocal(
            op.Sqrt(op.ReduceMean(x * x, op.Constant(value_ints=[*range(axis, 0)])) + constant(eps, acc))
        )
        output = x * rstd
        if weight is not None:
            output = output * cast(weight, dtype, acc)
        if bias is not None:
            output = output + cast(bias, dtype, acc)
        return cast(output, acc, was), op.Identity(rstd), rstd  # there is no mean, and no use of one

    def dtype_of(input: Value, weight: Value | None, bias: Value | None) -> int:
        return next(value.dtype for value in (weight, bias, input) if value is not None)

    def forward(
        input: Value,
        normalized_shape: Sequence[int],
        weight: Value | None = None,
        bias: Value | None = None,
        eps: float = 1e-5,
    ) -> tuple[Value, Value, Value]:
        dtype = dtype_of(input, weight, bias)
        return layer_norm(input, input.dtype, dtype, weight, bias, -len(normalized_shape), eps)

    def norm_forward(
        input: Value,
        residual: Value | None,
        normalized_shape: Sequence[int],
        weight: Value | None = None,
        bias: Value | None = None,
        eps: float = 1e-5,
        rms: bool = False,
        zero_centered_weight: bool = False,
        memory_efficient: bool = False,
    ) -> tuple[Value, Value, Value, Value]:
        dtype = dtype_of(input, weight, bias)
        if weight is not None and zero_centered_weight:
            # As in the kernels, weight + 1 is rounded to no 16-bit number.
            weight, bias = (None if p is None else cast(p, dtype, wide(dtype)) for p in (weight, bias))
            dtype = wide(dtype)
            weight = weight + constant(1, dtype)
        total, was, acc = input, input.dtype, wide(input.dtype)
        if residual is not None:  # in float32, because not every runtime adds bfloat16
            total = cast(cast(input, was, acc) + cast(residual, was, acc), acc, was)
        norm = rms_norm if rms else layer_norm
        output, mean, rstd = norm(total, was, dtype, weight, bias, -len(normalized_shape), eps)
        return output, op.Identity(total), mean, rstd

    def channels_first_forward(
        input: Value, weight: Value | None = None, bias: Value | None = None, eps: float = 1e-6
    ) -> tuple[Value, Value, Value]:
        dims = [*range(len(input.shape))]
        rows = op.Transpose(input, perm=[0, *dims[2:], 1])
        results = layer_norm(rows, input.dtype, dtype_of(input, weight, bias), weight, bias, -1, eps)
        return tuple(op.Transpose(result, perm=[0, dims[-1], *dims[1:-1]]) for result in results)

    return {
        torch.ops.layernorm.forward.default: forward,
        torch.ops.layernorm.norm_forward.default: norm_forward,
        torch.ops.layernorm.channels_first_forward.default: channels_first_forward,
    }
