"""The operators that torch's tracers record: this package's or aten's."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F

from ._ops import _C

__all__ = ["trace_as"]

_operators: Literal["kernel", "aten"] | None = None
_last: trace_as | None = None  # the object whose constructor has just set _operators for its with statement, if any


class trace_as:  # noqa: N801  # a context manager, named like torch.set_grad_enabled
    """Choose the operators that tracers record for this package's functions and modules.

    With ``"kernel"``, a graph calls this package's kernels and needs the package to run. With ``"aten"``, it calls
    :func:`torch.nn.functional.layer_norm` or :func:`torch.nn.functional.rms_norm`, with additions, permutations and
    dtype conversions as the arguments require. Such a graph runs without this package, other tools can read it,
    compilers may fuse the norm with its neighbours, and the results have torch's precision: the error grows with the
    mean, and numbers whose squares overflow (1e20 in float32) give NaN or zero. The strides of the results are those
    of eager calls, and those of gradients are torch's. ``None`` restores the defaults: ``"kernel"`` for
    :func:`torch.compile` and ``make_fx``, whose graphs stay in the process, and ``"aten"`` for
    :func:`torch.export.export` and :func:`torch.onnx.export`. :func:`torch.jit.trace` always records aten's operators.

    A call sets the choice for all threads of the process. A ``with`` statement restores the choice before it at its
    end; like :class:`torch.set_grad_enabled`, the object can be used again. Statements of several threads must not
    overlap.

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
        if operators not in ("kernel", "aten", None):
            raise ValueError(f'Expected operators to be "kernel", "aten" or None, but got {operators!r}')
        self._operators = operators
        self._previous: list[Literal["kernel", "aten"] | None] = []  # a stack: with statements may be nested
        self._set()

    def _set(self) -> None:
        global _operators, _last
        self._previous.append(_operators)
        _operators, _last = self._operators, self

    def __enter__(self) -> None:
        """Set the choice, unless the constructor has just done so."""
        global _last
        if _last is not self:
            self._set()
        _last = None

    def __exit__(self, *exception: object) -> None:
        """Restore the choice before the statement."""
        global _operators, _last
        _operators, _last = self._previous.pop(), None


def records_aten() -> bool:
    """Return whether an active tracer should record aten's operators."""
    if torch.jit.is_tracing():  # torch.jit cannot record this package's operators, whose results may be None
        return True
    if _operators is None:
        return _is_exporting()
    return _operators == "aten" and (torch.compiler.is_compiling() or get_proxy_mode() is not None)


def _is_exporting() -> bool:
    return torch.compiler._is_exporting_flag  # some versions' is_exporting() is also True under torch.compile


def constant_sizes(sizes: Sequence[int]) -> Sequence[int]:
    """Convert the sizes, which torch.jit.trace represents as tensors, to integers."""
    if not torch.jit.is_tracing():
        return sizes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return [int(size) for size in sizes]


def check(input: Tensor, normalized_shape: Sequence[Any], **arguments: Any) -> None:
    """Raise the errors that the kernels raise for these arguments, if possible without a node in the graph."""
    arguments |= {"eps": 0.0}  # which is not checked
    if not torch.compiler.is_dynamo_compiling():
        schema = torch.ops.layernorm.check.default._schema.arguments
        # The C++ function takes no integers of other libraries, such as numpy's.
        sizes = [size if isinstance(size, (int, torch.SymInt, Tensor)) else index(size) for size in normalized_shape]
        _C.check(input, sizes, *(arguments.get(a.name, a.default_value) for a in schema[2:]))
    elif not _is_exporting():  # an exported program would keep the operator check
        torch.ops.layernorm.check(input, normalized_shape, **arguments)


def norm_by_aten(
    input: Tensor,
    normalized_shape: Sequence[int],
    eps: float,
    *,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    input_scale: Tensor | None,
    rms: bool = False,
    zero_centered_weight: bool = False,
    memory_efficient: bool = False,  # has no effect
    images: bool = False,
    num_groups: int = 1,
    sigmoid: bool = False,
    gate_first: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute the output, and the sum with a residual, of any member of the family by torch's functions."""
    wide, dims = accumulation_dtype(input), len(normalized_shape)
    if images:  # view [N, C, 1, ...] as [N, C], so that autograd gives the gradient contiguous strides
        weight, bias = (p if p is None or p.dim() <= 2 else p.flatten(1) for p in (weight, bias))

    def as_rows(tensor: Tensor | None) -> Any:
        return tensor if tensor is None else _as_rows(tensor, input.dim(), dims, images, num_groups)

    x, weight, bias, gate, input_scale, addend = map(as_rows, (input, weight, bias, gate, input_scale, residual))
    if num_groups != 1:
        normalized_shape = [normalized_shape[0] // num_groups]
    output_factor = None
    if gate is not None:
        activated = torch.sigmoid(cast(gate, wide)) if sigmoid else F.silu(cast(gate, wide))
        if gate_first:
            x = cast(x, wide) * activated
        else:
            output_factor = activated
    if input_scale is not None:
        x = cast(x, wide) * cast(input_scale, wide)
    total = None
    if residual is not None:
        # As in torch's addition of 16-bit tensors, the sum is rounded once. onnxruntime cannot add bfloat16 tensors.
        x = cast(cast(x, wide) + cast(addend, wide), residual.dtype).contiguous()
        total = residual.copy_(x) if inplace else x
    if weight is not None and zero_centered_weight:
        weight = cast(weight, wide) + 1
    if output_factor is None:
        output = _norm_rows(x, normalized_shape, weight, bias, eps, rms)
    else:  # only the product is rounded to 16 bits
        output = _norm_rows(cast(x, wide), normalized_shape, weight, bias, eps, rms) * output_factor
    output = cast(output, input.dtype)  # under autocast, torch's functions may return float32
    return _from_rows(output, input, rms, images, num_groups), total


def _norm_rows(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> Tensor:
    """Normalize the last dimensions; the parameters have these dimensions, and may have batch dimensions before them.

    The result is in the accumulation dtype, unless all arguments have 16 bits and one function of torch computes it.
    """
    # torch's functions take neither parameters with batch dimensions nor a bias of RMSNorm. These follow the function.
    dims, parameters = len(normalized_shape), [parameter for parameter in (weight, bias) if parameter is not None]
    affine_follows = (rms and bias is not None) or any(parameter.dim() > dims for parameter in parameters)
    # torch's kernels for some devices require equal dtypes. After these conversions the output is still rounded once.
    if affine_follows or any(parameter.dtype != x.dtype for parameter in parameters):
        x = cast(x, accumulation_dtype(x))
        weight, bias = (None if parameter is None else cast(parameter, x.dtype) for parameter in (weight, bias))
    if rms and torch.jit.is_tracing() and torch.onnx.is_in_onnx_export():  # the older exporter lacks aten::rms_norm
        affine_follows = True
        last = [-1 - d for d in range(dims)]
        x = cast(x, accumulation_dtype(x))
        output = x * torch.rsqrt((x * x).mean(last, keepdim=True) + eps)
    elif rms:
        output = F.rms_norm(x, normalized_shape, None if affine_follows else weight, eps)
    else:
        output = F.layer_norm(x, normalized_shape, *((None, None) if affine_follows else (weight, bias)), eps)
    if affine_follows:
        output = output if weight is None else output * weight
        output = output if bias is None else output + bias
    return output


def _from_rows(output: Tensor, input: Tensor, rms: bool, images: bool, num_groups: int) -> Tensor:
    """Undo _as_rows() for the output: return it with the shape of the input and the strides of an eager call."""
    channels_last = [0, *range(2, input.dim()), 1]  # the dimensions of images by descending stride
    if num_groups != 1:
        output = output.reshape_as(input)  # torch's older ONNX exporter makes the batch size in flatten() constant
        keeps_format = rms and input.dim() in (4, 5) and _memory_order(input) == channels_last
        output = _in_order(output, channels_last if keeps_format else sorted(channels_last))
    if images:
        output, order = output.movedim(input.dim() - 1, 1), _memory_order(input)
        if order != channels_last:  # the output has this order already
            output = _in_order(output, order)
    return output


def _as_rows(tensor: Tensor, input_dims: int, normalized_dims: int, images: bool, num_groups: int) -> Tensor:
    """Return a view of an argument with the normalized dimensions last, after the input's batch dimensions, if any.

    The batch sizes of a parameter belong to the first batch dimensions of the input; see csrc/ops/shapes.h.
    """
    if tensor.dim() > normalized_dims:
        while tensor.dim() < input_dims:
            tensor = tensor.unsqueeze(-1 if images else -1 - normalized_dims)
        if images:
            tensor = tensor.movedim(1, input_dims - 1)  # torch's older ONNX exporter does not support -1
    return tensor if num_groups == 1 else tensor.unflatten(-1, (num_groups, tensor.shape[-1] // num_groups))


def _memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions of ``torch.empty_like(tensor)``, the largest stride first, by torch's insertion sort."""
    sizes, strides, order = tensor.shape, tensor.stride(), list(reversed(range(tensor.dim())))
    if not tensor.is_contiguous():  # otherwise comparisons of symbolic strides would restrict the sizes
        for i in range(1, tensor.dim()):
            position = i
            for j in reversed(range(i)):
                inner, outer = order[j], order[position]
                if strides[inner] == 0 or strides[outer] == 0:  # torch does not move expanded dimensions either
                    continue
                if strides[inner] < strides[outer]:
                    break
                if strides[inner] > strides[outer] or sizes[inner] > sizes[outer]:
                    order[j], order[position] = outer, inner
                    position = j
    return order[::-1]


def _in_order(tensor: Tensor, order: list[int]) -> Tensor:
    """Return a tensor that is contiguous if its dimensions are permuted to ``order``."""
    if order == sorted(order):
        return tensor.contiguous()
    return tensor.permute(order).contiguous().permute([order.index(d) for d in range(tensor.dim())])


def accumulation_dtype(input: Tensor) -> torch.dtype:
    """Return the dtype of statistics and sums."""
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor, without a node in the graph if it has the dtype."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
