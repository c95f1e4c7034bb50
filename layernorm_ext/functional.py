"""The functional form of layer normalization."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from ._ops import _C

__all__ = ["layer_norm"]


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
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
        weight: Tensor of shape ``normalized_shape`` and the dtype of ``input``, or float32 for a float16 or bfloat16
            input. Ones if ``None``.
        bias: Like ``weight``, and of its dtype. Zeros if ``None``.
        eps: Added to the variance.

    Returns:
        A contiguous tensor of the shape and dtype of ``input``.

    Raises:
        RuntimeError: A shape, dtype or device does not fit; the message names the argument and both values.
        NotImplementedError: ``input`` is of an unsupported dtype.

    Note:
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
    # The compiled entry is quick but can be neither traced by torch.compile nor overridden by __torch_function__.
    if torch.compiler.is_compiling() or has_torch_function_variadic(input, weight, bias):
        return _layer_norm_general(input, normalized_shape, weight, bias, eps)
    return _C.layer_norm(input, normalized_shape, weight, bias, eps)


def _layer_norm_general(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    if _is_jagged(input):
        return _layer_norm_jagged(input, normalized_shape, weight, bias, eps)
    if has_torch_function_variadic(input, weight, bias):
        tensors = (input, weight, bias)
        return handle_torch_function(layer_norm, tensors, input, normalized_shape, weight=weight, bias=bias, eps=eps)
    return torch.ops.layernorm.forward(input, normalized_shape, weight, bias, eps)[0]


def _is_jagged(input: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():  # a subclass is asked for layer_norm alone
        return isinstance(input, Tensor) and input.is_nested and input.layout == torch.jagged


def _layer_norm_jagged(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalize the rows of a jagged tensor, which lie one after the other in ``input.values()``."""
    if input._ragged_idx != 1 or len(normalized_shape) > input.dim() - 2:
        raise RuntimeError(
            f"Given normalized_shape={list(normalized_shape)}, expected a jagged input with only regular dimensions "
            f"among the last {len(normalized_shape)}, and the ragged one second, but got input of size"
            f"{list(input.shape)}"
        )
    values = layer_norm(input.values(), normalized_shape, weight, bias, eps)
    return torch.nested.nested_tensor_from_jagged(values, input.offsets(), input.lengths())
