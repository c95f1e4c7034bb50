"""The operators that torch's tracers record for a call: this package's, or aten's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ._ops import _C

__all__ = ["trace_as"]

_operators: Literal["kernel", "aten"] | None = None


class trace_as:  # noqa: N801  # a context manager, named like torch.set_grad_enabled
    """Choose the operators that tracers record for this package's functions and modules.

    With ``"kernel"``, a graph calls this package's kernels and needs the package to run. With ``"aten"``, it calls
    :func:`torch.nn.functional.layer_norm` or :func:`torch.nn.functional.rms_norm`, between additions, permutations and
    conversions of dtype where the arguments ask for them: it runs anywhere, compilers may fuse it with its
    neighbours, and its results are torch's, with torch's precision. ``None`` restores the default of each tool:

    ============================================================ ============
    tool                                                         default
    ============================================================ ============
    :func:`torch.compile`, :func:`torch.jit.trace`               ``"kernel"``
    :func:`torch.export.export`, :func:`torch.onnx.export`       ``"aten"``
    ============================================================ ============

    A call sets the choice for the whole process; in a ``with`` statement, the previous choice returns at the end.

    Args:
        operators: ``"kernel"``, ``"aten"`` or ``None``.

    Raises:
        ValueError: ``operators`` is something else.

    Note:
        Eager calls always run the kernels. Code that :func:`torch.compile` has compiled is compiled again when the
        choice changes. :func:`torch.jit.script` and calls of ``torch.ops.layernorm`` always record the operators of
        this package. With ``"aten"``, ``memory_efficient=True`` has no effect.

    Example:
        >>> norm, x = torch.nn.RMSNorm(8), torch.randn(2, 8)
        >>> layernorm_ext.convert(norm).replaced
        {'': 'torch.nn.modules.normalization.RMSNorm by RMSNorm((8,), eps=None, elementwise_affine=True)'}
        >>> with layernorm_ext.trace_as("kernel"):
        ...     program = torch.export.export(norm, (x,))
        >>> [node.target for node in program.graph.nodes if "norm" in node.name]
        [<OpOverload(op='layernorm.norm_forward', overload='default')>]
        >>> program = torch.export.export(norm, (x,))
        >>> [node.target for node in program.graph.nodes if "norm" in node.name]
        [<OpOverload(op='aten.rms_norm', overload='default')>]
    """

    def __init__(self, operators: Literal["kernel", "aten"] | None):
        """Make the choice."""
        global _operators
        if operators not in ("kernel", "aten", None):
            raise ValueError(f'Expected operators to be "kernel", "aten" or None, but got {operators!r}')
        self._previous = _operators
        _operators = operators

    def __enter__(self) -> None:
        """Enter the ``with`` statement; the constructor has set the choice."""

    def __exit__(self, *exception: object) -> None:
        """Return to the previous choice."""
        global _operators
        _operators = self._previous


def records_aten() -> bool:
    """Return whether a tracer is active that is to record aten's operators."""
    if _operators is not None:
        return _operators == "aten" and (torch.compiler.is_compiling() or torch.jit.is_tracing())
    return _is_exporting() or _is_in_torchscript_exporter()


def _is_exporting() -> bool:
    return torch.compiler._is_exporting_flag  # is_exporting() is True under torch.compile, too, in some torch versions


def _is_in_torchscript_exporter() -> bool:
    """Return whether ``torch.onnx.export(..., dynamo=False)`` traces. The other exporter is one of torch.export."""
    return torch.jit.is_tracing() and torch.onnx.is_in_onnx_export()


def constant_sizes(sizes: Sequence[int]) -> Sequence[int]:
    """Return sizes that an operator takes: torch.jit.trace gives those of tensors as tensors."""
    if not torch.jit.is_tracing():
        return sizes
    with warnings.catch_warnings(action="ignore", category=torch.jit.TracerWarning):
        return [int(size) for size in sizes]


def norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool = False,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the output and, if there is a residual, the sum, of any member of the family by torch's functions."""
    _check(torch.ops.layernorm.check_forward, _C.check_forward, input, residual, normalized_shape, weight, bias)
    accumulate_dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    x, total = input, None
    if residual is not None:
        # In 16 bits this is one rounding, as torch's addition; onnxruntime has no addition of bfloat16.
        x = total = _cast(_cast(input, accumulate_dtype) + _cast(residual, accumulate_dtype), input.dtype)
        if inplace:
            total = residual.copy_(total)
    if weight is not None and zero_centered_weight:
        weight = _cast(weight, accumulate_dtype) + 1
    # On some devices torch's kernels need one dtype for all. With these conversions the output is rounded once.
    mixed = any(parameter is not None and parameter.dtype != x.dtype for parameter in (weight, bias))
    x, weight, bias = (_cast(t, accumulate_dtype if mixed else input.dtype) for t in (x, weight, bias))
    if rms and _is_in_torchscript_exporter():  # which does not know aten::rms_norm
        dims = [-1 - d for d in range(len(normalized_shape))]
        wide = _cast(x, accumulate_dtype)
        output = wide * torch.rsqrt((wide * wide).mean(dims, keepdim=True) + eps)
        output = output if weight is None else output * weight
    elif rms:
        output = F.rms_norm(x, normalized_shape, weight, eps)
    else:
        output = F.layer_norm(x, normalized_shape, weight, bias, eps)
    return _cast(output, input.dtype), total  # under autocast, torch's functions may return float32


def norm_over_ragged(
    values: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: None,
    bias: None,
    eps: float,
    *,
    offsets: Tensor,
    ragged_dim: int,
    rms: bool,
    inplace: bool,
    **_: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the output and the sum of a jagged tensor's values, normalized over the ragged dimension and others."""
    x, total = values, None
    if residual is not None:
        x = total = values + residual
        if inplace:
            total = residual.copy_(total)
    x = _cast(x, torch.float64 if values.dtype == torch.float64 else torch.float32)
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
    return _cast(x * torch.rsqrt(mean(x * x) + eps), values.dtype), total


def layer_norm_2d(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalize over the channels by torch's function; the output has the memory format of the input."""
    _check(torch.ops.layernorm.channels_first_check_forward, _C.check_images, input, weight, bias)
    rows = input.permute(0, 2, 3, 1)
    output = norm(rows, None, constant_sizes(rows.shape[-1:]), weight, bias, eps)[0].permute(0, 3, 1, 2)
    is_channels_last = input.stride(1) < input.stride(3) <= input.stride(2) <= input.stride(0)
    return output if is_channels_last else output.contiguous()


def _check(operator: Callable, function: Callable, *arguments: object) -> None:
    """Refuse the arguments that the kernels refuse, without a trace in the graph."""
    if not torch.compiler.is_dynamo_compiling():
        function(*arguments)
    elif not _is_exporting():  # an exported program would keep the operator; torch's functions have checks of their own
        operator(*arguments)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)
