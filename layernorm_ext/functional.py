"""The functional forms of the normalizations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import _script, tracing
from ._ops import _C

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_weight: bool = False,
    memory_efficient: bool = False,
) -> Tensor:
    r"""Normalize over the last dimensions, as :func:`torch.nn.functional.layer_norm` does.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \mathrm{weight} + \mathrm{bias}

    Mean and (biased) variance are taken over the last ``len(normalized_shape)`` dimensions. Source: Ba, Kiros and
    Hinton, `Layer Normalization <https://arxiv.org/abs/1607.06450>`_, 2016.

    Args:
        input: Tensor of shape ``[*, normalized_shape[0], ..., normalized_shape[-1]]`` and dtype float64, float32,
            float16 or bfloat16. Rows may be any number of elements apart; other layouts are copied. Nested tensors are
            normalized component by component.
        normalized_shape: Sizes of the dimensions to normalize over; at least one. For a jagged nested tensor they may
            include the ragged one, as in ``input.shape[1:]``.
        weight: Tensor of shape ``normalized_shape`` and any of these dtypes. Ones if ``None``.
        bias: Like ``weight``. Zeros if ``None``.
        eps: Added to the variance.
        zero_centered_weight: Whether to multiply by ``weight + 1``, rounded to no 16-bit number in between, as models
            do whose weight is kept as its difference from one.
        memory_efficient: Whether to keep the output for backward instead of the input. See :class:`LayerNorm`.

    Returns:
        A contiguous tensor of the shape and dtype of ``input``.

    Raises:
        RuntimeError: A shape, dtype or device does not fit; the message names the argument and both values.
        NotImplementedError: ``input`` is of an unsupported dtype. Or, with ``memory_efficient``, the derivative of a
            backward pass is asked for.

    Note:
        There are kernels for parameters of the dtype of ``input``, and for float32 parameters of a float16 or bfloat16
        input. Parameters of any other dtype, or of two different ones, are converted to float32 (float64 for float64
        input) in each call. Gradients have the dtype of their parameter.

        Sums are kept in float32 (float64 for float64 input). The error in float32 is at most
        ``5e-7 * (1 + |weight * normalized input| + |bias|)``, whatever the mean of the input, and up to the largest
        numbers of the dtype. A row's result depends on nothing but the row: not on the other rows, their number, its
        place in memory or the number of threads. Unlike torch's, the output keeps the dtype of ``input`` when the
        parameters are float32, on every device and under autocast.

        Differentiable to any order in reverse mode, in forward mode, and under :mod:`torch.func` and ``vmap``.

    Example:
        >>> x = torch.randn(2, 3, 8)
        >>> layer_norm(x, (8,), torch.ones(8), torch.zeros(8)).shape
        torch.Size([2, 3, 8])
    """
    variant = zero_centered_weight or memory_efficient
    options = {"zero_centered_weight": zero_centered_weight, "memory_efficient": memory_efficient}
    # The compiled entry is quick but can be neither traced by torch.compile nor overridden by __torch_function__.
    if not (torch.compiler.is_dynamo_compiling() or has_torch_function_variadic(input, weight, bias)):
        if variant:
            output = _C.layer_norm(input, normalized_shape, weight, bias, eps, **options)
        else:
            output = _C.layer_norm(input, normalized_shape, weight, bias, eps)
        if output is not None:
            return output
    if _is_overridden(input, weight, bias):
        options = options if variant else {}  # whoever overrides it may know torch's arguments only
        arguments = {"weight": weight, "bias": bias, "eps": eps, **options}
        return handle_torch_function(layer_norm, (input, weight, bias), input, normalized_shape, **arguments)
    return _norm(input, None, normalized_shape, weight, bias, eps, **options)[0]


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered_weight: bool = False,
) -> Tensor:
    r"""Divide by the root mean square over the last dimensions, as :func:`torch.nn.functional.rms_norm` does.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} * \mathrm{weight}

    Source: Zhang and Sennrich, `Root Mean Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_, 2019.

    Args:
        input: Tensor of shape ``[*, normalized_shape[0], ..., normalized_shape[-1]]`` and dtype float64, float32,
            float16 or bfloat16.
        normalized_shape: Sizes of the dimensions to normalize over; at least one.
        weight: Tensor of shape ``normalized_shape`` and any of these dtypes. Ones if ``None``.
        eps: Added to the mean square. If ``None``, as torch has it, ``torch.finfo(dtype).eps`` of the dtype that sums
            are kept in: float64 for a float64 input, else float32.
        zero_centered_weight: Whether to multiply by ``weight + 1``, as Gemma does.

    Returns:
        A tensor of the shape and dtype of ``input``; as torch's, ``channels_last`` (``channels_last_3d``) if ``input``
        is, else contiguous.

    Raises:
        RuntimeError: A shape, dtype or device does not fit; the message names the argument and both values.
        NotImplementedError: ``input`` is of an unsupported dtype.

    Note:
        All that is said of :func:`layer_norm` holds: its precision, its independence of other rows, its derivatives.

    Example:
        >>> x = torch.randn(2, 3, 8)
        >>> rms_norm(x, (8,), torch.ones(8)).shape
        torch.Size([2, 3, 8])
    """
    if _is_overridden(input, weight):
        options = {"weight": weight, "eps": eps} | ({"zero_centered_weight": True} if zero_centered_weight else {})
        return handle_torch_function(rms_norm, (input, weight), input, normalized_shape, **options)
    if not torch.compiler.is_dynamo_compiling():
        output = _C.rms_norm(input, normalized_shape, weight, eps, zero_centered_weight=zero_centered_weight)
        if output is not None:
            return output
    options = {"rms": True, "zero_centered_weight": zero_centered_weight}
    return _norm(input, None, normalized_shape, weight, None, _script.rms_eps(input, eps), **options)[0]


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Add a residual and normalize the sum over the last dimensions, in one pass over both.

    .. math::
        s = x + r \qquad y = \frac{s - \mathrm{E}[s]}{\sqrt{\mathrm{Var}[s] + \epsilon}} * \mathrm{weight} +
        \mathrm{bias}

    ``s`` is rounded to the dtype of ``input``, and ``y`` computed from what it was rounded to: the results, and their
    gradients, are those of ``s = input + residual; layer_norm(s, ...)``, for two thirds of the memory traffic. Source:
    Ba, Kiros and Hinton, `Layer Normalization <https://arxiv.org/abs/1607.06450>`_, 2016.

    Args:
        input: Tensor of shape ``[*, normalized_shape[0], ..., normalized_shape[-1]]`` and dtype float64, float32,
            float16 or bfloat16.
        residual: Tensor of the shape and dtype of ``input``.
        normalized_shape: Sizes of the dimensions to normalize over; at least one.
        weight: Tensor of shape ``normalized_shape`` and any of these dtypes. Ones if ``None``.
        bias: Like ``weight``. Zeros if ``None``.
        eps: Added to the variance.
        zero_centered_weight: Whether to multiply by ``weight + 1``.
        inplace: Whether to write the sum over ``residual``, which is returned, instead of into a new tensor.

    Returns:
        Output and sum, each of the shape and dtype of ``input``.

    Raises:
        RuntimeError: A shape, dtype or device does not fit; the message names the argument and both values. Or
            ``residual`` cannot be changed in place, because it is a leaf that requires grad, or a view and gradients
            are recorded, or because several of its elements share memory.
        NotImplementedError: ``input`` is of an unsupported dtype.

    Note:
        All that is said of :func:`layer_norm` holds: its precision, its independence of other rows, its derivatives.

    Example:
        >>> x, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        >>> output, residual = add_layer_norm(x, residual, (8,), torch.ones(8), torch.zeros(8))
        >>> output.shape
        torch.Size([2, 3, 8])
    """
    options = {"zero_centered_weight": zero_centered_weight, "inplace": inplace}
    if _is_overridden(input, residual, weight, bias):
        options |= {"weight": weight, "bias": bias, "eps": eps}
        tensors = (input, residual, weight, bias)
        return handle_torch_function(add_layer_norm, tensors, input, residual, normalized_shape, **options)
    if not torch.compiler.is_dynamo_compiling():
        results = _C.add_layer_norm(input, residual, normalized_shape, weight, bias, eps, **options)
        if results is not None:
            return results
    return _norm(input, residual, normalized_shape, weight, bias, eps, **options)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Add a residual and divide the sum by its root mean square over the last dimensions, in one pass over both.

    .. math::
        s = x + r \qquad y = \frac{s}{\sqrt{\mathrm{E}[s^2] + \epsilon}} * \mathrm{weight}

    What :func:`add_layer_norm` is to :func:`layer_norm`, to :func:`rms_norm`. Source: Zhang and Sennrich, `Root Mean
    Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_, 2019.

    Args:
        input: Tensor of shape ``[*, normalized_shape[0], ..., normalized_shape[-1]]`` and dtype float64, float32,
            float16 or bfloat16.
        residual: Tensor of the shape and dtype of ``input``.
        normalized_shape: Sizes of the dimensions to normalize over; at least one.
        weight: Tensor of shape ``normalized_shape`` and any of these dtypes. Ones if ``None``.
        eps: Added to the mean square; if ``None``, as in :func:`rms_norm`.
        zero_centered_weight: Whether to multiply by ``weight + 1``.
        inplace: Whether to write the sum over ``residual``, which is returned, instead of into a new tensor.

    Returns:
        Output and sum, each of the shape and dtype of ``input``.

    Raises:
        RuntimeError: As :func:`add_layer_norm`.
        NotImplementedError: ``input`` is of an unsupported dtype.

    Example:
        >>> x, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        >>> output, residual = add_rms_norm(x, residual, (8,), torch.ones(8))
        >>> output.shape
        torch.Size([2, 3, 8])
    """
    options = {"zero_centered_weight": zero_centered_weight, "inplace": inplace}
    if _is_overridden(input, residual, weight):
        options |= {"weight": weight, "eps": eps}
        tensors = (input, residual, weight)
        return handle_torch_function(add_rms_norm, tensors, input, residual, normalized_shape, **options)
    if not torch.compiler.is_dynamo_compiling():
        results = _C.add_rms_norm(input, residual, normalized_shape, weight, eps, **options)
        if results is not None:
            return results
    return _norm(input, residual, normalized_shape, weight, None, _script.rms_eps(input, eps), rms=True, **options)


layer_norm.__prepare_scriptable__ = lambda: _script.layer_norm
rms_norm.__prepare_scriptable__ = lambda: _script.rms_norm
add_layer_norm.__prepare_scriptable__ = lambda: _script.add_layer_norm
add_rms_norm.__prepare_scriptable__ = lambda: _script.add_rms_norm


def _norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool = False,
    zero_centered_weight: bool = False,
    memory_efficient: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the output and, if there is a residual, the sum, of any member of the family."""
    variant = {"rms": rms, "zero_centered_weight": zero_centered_weight}
    if input.is_nested:
        return _norm_of_nested(
            *(input, residual, normalized_shape, weight, bias, eps),
            **variant,
            memory_efficient=memory_efficient,
            inplace=inplace,
        )
    normalized_shape = tracing.constant_sizes(normalized_shape)
    arguments = (input, residual, normalized_shape, weight, bias, eps)
    if tracing.records_aten():
        return tracing.norm(*arguments, **variant, inplace=inplace)
    if inplace:
        return torch.ops.layernorm.norm_forward_(*arguments, **variant)[0], residual
    if residual is None and not (memory_efficient or any(variant.values())):
        return torch.ops.layernorm.forward(input, normalized_shape, weight, bias, eps)[0], None
    return torch.ops.layernorm.norm_forward(*arguments, **variant, memory_efficient=memory_efficient)[:2]


def _is_overridden(input: Tensor, *others: Tensor | None) -> bool:
    if not has_torch_function_variadic(input, *others):
        return False
    with torch._C.DisableTorchFunctionSubclass():  # a subclass is asked for the function alone
        # torch overrides functions of jagged tensors by name, and would take rms_norm for its own.
        return not (isinstance(input, Tensor) and input.is_nested)


def _norm_of_nested(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    *parameters: Tensor | float | None,
    inplace: bool,
    **options: bool,
) -> tuple[Tensor, Tensor | None]:
    """Normalize the values of a jagged tensor at once, and the components of other nested tensors one by one."""
    jagged, dims = input.layout == torch.jagged, len(normalized_shape)
    if jagged and tuple(normalized_shape) != tuple(input.shape[1:][-dims:]):
        raise RuntimeError(
            f"Given normalized_shape={list(normalized_shape)}, expected a jagged input with shape [B, *, "
            f"{str(list(normalized_shape))[1:-1]}], but got input of size{list(input.shape)}"
        )
    if residual is not None and not _is_nested_alike(residual, input):
        raise RuntimeError(
            "Expected residual to be nested as input is, with components of the same sizes, but got residual of "
            f"size{_sizes(residual)} and input of size{_sizes(input)}"
        )

    def join(values: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(values, input.offsets(), input.lengths(), input._ragged_idx)

    over_ragged = jagged and input._ragged_idx >= input.dim() - dims
    for name, parameter in zip(("weight", "bias"), parameters, strict=False):
        if over_ragged and parameter is not None:
            raise RuntimeError(
                f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape "
                f"{list(parameter.shape)} and normalized_shape = {list(normalized_shape)}, of which the first is ragged"
            )
    if over_ragged and input.lengths() is not None:
        raise RuntimeError(
            f"Given normalized_shape={list(normalized_shape)}, which has the ragged dimension, expected a jagged input "
            "without holes, but got one with lengths"
        )
    if jagged and (not over_ragged or torch.compiler.is_compiling()):
        arguments = (input.values(), None if residual is None else residual.values(), normalized_shape, *parameters)
        if over_ragged:  # torch.compile does not know how many components there are
            ragged = {"offsets": input.offsets(), "ragged_dim": input._ragged_idx - 1}
            output, total = tracing.norm_over_ragged(*arguments, **ragged, inplace=inplace, **options)
        else:
            output, total = _norm(*arguments, inplace=inplace, **options)
        return join(output), residual if inplace or residual is None else join(total)

    components = input.unbind()
    residuals = [None] * len(components) if residual is None else residual.unbind()
    outputs, totals = [], []
    for x, added in zip(components, residuals, strict=True):
        shape = x.shape[-dims:] if jagged else normalized_shape
        output, total = _norm(x, added, shape, *parameters, inplace=inplace, **options)
        outputs.append(output)
        totals.append(total)

    def gather(parts: list[Tensor]) -> Tensor:
        return join(torch.cat(parts, input._ragged_idx - 1)) if jagged else torch.nested.as_nested_tensor(parts)

    return gather(outputs), residual if inplace or residual is None else gather(totals)


def _is_nested_alike(residual: Tensor, input: Tensor) -> bool:
    if not residual.is_nested or residual.layout != input.layout:
        return False
    if input.layout == torch.jagged:
        return residual.shape == input.shape
    return torch.equal(residual._nested_tensor_size(), input._nested_tensor_size())


def _sizes(tensor: Tensor) -> list[int] | list[list[int]]:
    """Return the shape; of a strided nested tensor, which has none, the shapes of its components."""
    if tensor.is_nested and tensor.layout != torch.jagged:
        return [list(component.shape) for component in tensor.unbind()]
    return list(tensor.shape)
