"""The functional forms of the normalizations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

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
            float16 or bfloat16. Rows may be any number of elements apart; other layouts are copied.
        normalized_shape: Sizes of the dimensions to normalize over; at least one.
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
    if not (torch.compiler.is_compiling() or has_torch_function_variadic(input, weight, bias)):
        if not variant:
            return _C.layer_norm(input, normalized_shape, weight, bias, eps)
        if not _is_jagged(input):
            return _C.layer_norm(input, normalized_shape, weight, bias, eps, **options)
    if _is_overridden(input, weight, bias):
        options = options if variant else {}  # whoever overrides it may know torch's arguments only
        arguments = {"weight": weight, "bias": bias, "eps": eps, **options}
        return _overridden(layer_norm, (input, weight, bias), input, normalized_shape, **arguments)
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
        options = {"zero_centered_weight": True} if zero_centered_weight else {}
        return _overridden(rms_norm, (input, weight), input, normalized_shape, weight=weight, eps=eps, **options)
    if not torch.compiler.is_compiling():
        return _C.rms_norm(input, normalized_shape, weight, eps, zero_centered_weight=zero_centered_weight)
    options = {"rms": True, "zero_centered_weight": zero_centered_weight}
    return _norm(input, None, normalized_shape, weight, None, _rms_eps(input, eps), **options)[0]


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
        return _overridden(add_layer_norm, tensors, input, residual, normalized_shape, **options)
    if not torch.compiler.is_compiling():
        return _C.add_layer_norm(input, residual, normalized_shape, weight, bias, eps, **options)
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
        return _overridden(add_rms_norm, (input, residual, weight), input, residual, normalized_shape, **options)
    if not torch.compiler.is_compiling():
        return _C.add_rms_norm(input, residual, normalized_shape, weight, eps, **options)
    return _norm(input, residual, normalized_shape, weight, None, _rms_eps(input, eps), rms=True, **options)


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
    """Return the output and, if there is a residual, the sum, of any member of the family, for torch.compile."""
    arguments = (input, residual, normalized_shape, weight, bias, eps)
    variant = {"rms": rms, "zero_centered_weight": zero_centered_weight}
    if inplace:
        return torch.ops.layernorm.norm_forward_(*arguments, **variant)[0], residual
    if residual is None and not (memory_efficient or any(variant.values())):
        return torch.ops.layernorm.forward(input, normalized_shape, weight, bias, eps)[0], None
    return torch.ops.layernorm.norm_forward(*arguments, **variant, memory_efficient=memory_efficient)[:2]


def _rms_eps(input: Tensor, eps: float | None) -> float:
    if eps is None:
        return torch.finfo(torch.float64 if input.dtype == torch.float64 else torch.float32).eps
    return eps


def _is_overridden(input: Tensor, *others: Tensor | None) -> bool:
    return has_torch_function_variadic(input, *others) or _is_jagged(input)


def _is_jagged(input: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():  # a subclass is asked for the function alone
        return isinstance(input, Tensor) and input.is_nested and input.layout == torch.jagged


def _overridden(
    function: Callable, tensors: tuple[Tensor | None, ...], input: Tensor, *arguments: object, **options: object
) -> Tensor | tuple[Tensor, Tensor]:
    """Have ``__torch_function__`` of one of the tensors do it, or do it to the values of jagged ones."""
    if not _is_jagged(input):
        return handle_torch_function(function, tensors, input, *arguments, **options)

    normalized_shape = arguments[-1]
    if input._ragged_idx != 1 or len(normalized_shape) > input.dim() - 2:
        raise RuntimeError(
            f"Given normalized_shape={list(normalized_shape)}, expected a jagged input with only regular dimensions "
            f"among the last {len(normalized_shape)}, and the ragged one second, but got input of size"
            f"{list(input.shape)}"
        )

    def jagged(values: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(values, input.offsets(), input.lengths())

    if len(arguments) == 1:
        return jagged(function(input.values(), normalized_shape, **options))
    residual = arguments[0]
    if not _is_jagged(residual) or residual.shape != input.shape:
        raise RuntimeError(
            "Expected residual to be jagged as input is, with its offsets, but got residual of size"
            f"{list(residual.shape)} and input of size{list(input.shape)}"
        )
    output, total = function(input.values(), residual.values(), normalized_shape, **options)
    return jagged(output), jagged(total)
