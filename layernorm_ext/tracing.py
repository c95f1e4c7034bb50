"""The operators that torch's tracers record: this package's or aten's."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ._ops import _C

__all__ = ["trace_as"]

_operators: Literal["kernel", "aten"] | None = None

# The output, and the sum or None; Any spares callers that pass a residual the check for None.
Results = tuple[Tensor, Any]


class trace_as:  # noqa: N801  # a context manager, named like torch.set_grad_enabled
    """Choose the operators that tracers record for this package's functions and modules.

    With ``"kernel"``, a graph calls this package's kernels and needs the package to run. With ``"aten"``, it calls
    :func:`torch.nn.functional.layer_norm` or :func:`torch.nn.functional.rms_norm`, with additions, permutations and
    dtype conversions as the arguments require. Such a graph runs without this package, other tools can read it,
    compilers may fuse the norm with its neighbours, and the results have torch's precision: the error grows with the
    mean, and numbers whose squares overflow (1e20 in float32) give NaN or zero. ``None`` restores the defaults:
    ``"kernel"`` for :func:`torch.compile`, whose graphs stay in the process, and ``"aten"`` for
    :func:`torch.export.export`, :func:`torch.onnx.export` and :func:`torch.jit.trace`.

    A call sets the choice for the whole process. A ``with`` statement restores the previous choice at its end.

    Args:
        operators: ``"kernel"``, ``"aten"`` or ``None``.

    Raises:
        ValueError: ``operators`` is none of these.

    Note:
        Eager calls always run the kernels. :func:`torch.compile` recompiles when the choice changes. Calls of
        ``torch.ops.layernorm`` always record this package's operators, and :func:`torch.jit.script` aten's. With
        ``"aten"``, ``memory_efficient=True`` has no effect. :func:`torch.jit.trace` compares its graph with an eager
        call, which runs the kernels, and warns of the difference if the input has 16 bits or a large mean.

    Example:
        >>> norm, x = torch.nn.RMSNorm(8), torch.randn(2, 8)
        >>> layernorm_ext.convert(norm).replaced
        {'': 'torch.nn.modules.normalization.RMSNorm by RMSNorm((8,), eps=None, elementwise_affine=True)'}
        >>> with layernorm_ext.trace_as("kernel"):
        ...     program = torch.export.export(norm, (x,))
        >>> [node.target for node in program.graph.nodes if "norm" in str(node.target)]
        [<OpOverload(op='layernorm.forward', overload='default')>]
        >>> program = torch.export.export(norm, (x,))
        >>> [node.target for node in program.graph.nodes if "norm" in str(node.target)]
        [<OpOverload(op='aten.rms_norm', overload='default')>]
    """

    def __init__(self, operators: Literal["kernel", "aten"] | None):
        """Set the choice."""
        global _operators
        if operators not in ("kernel", "aten", None):
            raise ValueError(f'Expected operators to be "kernel", "aten" or None, but got {operators!r}')
        self._previous = _operators
        _operators = operators

    def __enter__(self) -> None:
        """Do nothing: the constructor has set the choice."""

    def __exit__(self, *exception: object) -> None:
        """Restore the previous choice."""
        global _operators
        _operators = self._previous


def records_aten() -> bool:
    """Return whether an active tracer should record aten's operators."""
    if _operators is not None:
        return _operators == "aten" and (torch.compiler.is_compiling() or torch.jit.is_tracing())
    return _is_exporting() or torch.jit.is_tracing()


def _is_exporting() -> bool:
    return torch.compiler._is_exporting_flag  # in some versions, is_exporting() is also True under torch.compile


def _is_in_torchscript_exporter() -> bool:
    """Return whether ``torch.onnx.export(..., dynamo=False)`` is tracing; ``dynamo=True`` uses torch.export."""
    return torch.jit.is_tracing() and torch.onnx.is_in_onnx_export()


def constant_sizes(sizes: Sequence[int]) -> Sequence[int]:
    """Convert the sizes, which torch.jit.trace represents as tensors, to integers."""
    if not torch.jit.is_tracing():
        return sizes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return [int(size) for size in sizes]


def check(name: str, *arguments: object) -> None:
    """Raise the errors that the kernels raise, by the check of this name, without adding a node to the graph."""
    if not torch.compiler.is_dynamo_compiling():
        getattr(_C, name)(*arguments)
    elif not _is_exporting():  # an exported program would keep the operator, and torch's functions check as well
        getattr(torch.ops.layernorm, name)(*arguments)


def norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    gate: Tensor | None = None,
    activation: str | None = None,
    gate_first: bool = False,
    rms: bool = False,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> Results:
    """Compute the output, and the sum with a residual, of any member of the family by torch's functions."""
    check("check_forward", input, residual, normalized_shape, weight, bias, gate, activation)
    accumulate_dtype = accumulation_dtype(input)
    x, total, output_factor = input, None, None
    if gate is not None:
        factor = cast(gate, accumulate_dtype)
        if activation is not None:
            factor = F.silu(factor) if activation == "silu" else torch.sigmoid(factor)
        if activation is None or gate_first:
            x = cast(input, accumulate_dtype) * factor
        else:
            output_factor = factor
    if residual is not None:
        # This rounds once, as torch's addition does in 16 bits; onnxruntime cannot add bfloat16.
        x = cast(cast(x, accumulate_dtype) + cast(residual, accumulate_dtype), residual.dtype)
        total = residual.copy_(x) if inplace else x
    if weight is not None and zero_centered_weight:
        weight = cast(weight, accumulate_dtype) + 1
    # torch's functions take neither parameters with batch dimensions nor a bias of RMSNorm.
    parameters = [parameter for parameter in (weight, bias) if parameter is not None]
    apart = (rms and bias is not None) or any(parameter.dim() > len(normalized_shape) for parameter in parameters)
    # torch's kernels for some devices require equal dtypes. After these conversions the output is still rounded once.
    mixed = apart or output_factor is not None or any(parameter.dtype != x.dtype for parameter in parameters)
    dtype = accumulate_dtype if mixed else x.dtype
    x = cast(x, dtype)
    weight, bias = (None if parameter is None else cast(parameter, dtype) for parameter in (weight, bias))
    if rms and _is_in_torchscript_exporter():  # it cannot export aten::rms_norm
        apart = True
        dims = [-1 - d for d in range(len(normalized_shape))]
        wide = cast(x, accumulate_dtype)
        output = wide * torch.rsqrt((wide * wide).mean(dims, keepdim=True) + eps)
    elif rms:
        output = F.rms_norm(x, normalized_shape, None if apart else weight, eps)
    else:
        output = F.layer_norm(x, normalized_shape, *((None, None) if apart else (weight, bias)), eps)
    if apart:
        output = output if weight is None else output * weight
        output = output if bias is None else output + bias
    output = output if output_factor is None else output * output_factor
    return cast(output, input.dtype), total  # under autocast, torch's functions may return float32


def with_format_of(input: Tensor, output: Tensor) -> Tensor:
    """Return the images that torch's functions have computed from ``input``, channels last, in its memory format."""
    batch, channels, *pixels = input.stride()
    strides = batch, *pixels, channels
    is_channels_last = strides[-1] < strides[-2] and all(a >= b for a, b in pairwise(strides))
    return output if is_channels_last else output.contiguous()


def accumulation_dtype(input: Tensor) -> torch.dtype:
    """Return the dtype of statistics and sums."""
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor, without a node in the graph if it has the dtype."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
