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

    Returns:
        A table from ``torch.ops.layernorm.forward.default`` to a function of ONNX Script; merge it with your own by
        ``|``.

    Raises:
        ImportError: The packages ``onnx`` and ``onnxscript`` are not installed.

    Note:
        Only inference is exported: ONNX has no operator for ``layernorm::backward``.

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

    def forward(
        input: Value,
        normalized_shape: Sequence[int],
        weight: Value | None = None,
        bias: Value | None = None,
        eps: float = 1e-5,
    ) -> tuple[Value, Value, Value]:
        parameter = weight if weight is not None else bias
        dtype = input.dtype if parameter is None else parameter.dtype
        x = input if input.dtype == dtype else op.Cast(input, to=dtype)
        axis = -len(normalized_shape)
        if weight is None:
            one = op.Constant(value=ir.tensor(1, dtype=dtype))
            weight = op.Expand(one, op.Shape(x, start=axis))
        output, mean, rstd = op.LayerNormalization(x, weight, bias, axis=axis, epsilon=eps)
        if input.dtype == dtype:
            return output, mean, rstd
        return op.Cast(output, to=input.dtype), mean, rstd

    return {torch.ops.layernorm.forward.default: forward}
