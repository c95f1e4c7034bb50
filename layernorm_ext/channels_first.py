"""The normalizations over the channels of images, as functions.

Images have the shape ``[N, C, *]``. Each pixel is normalized over its channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function_variadic

from . import tracing
from ._calls import norm, override, rms_eps
from ._ops import _C

__all__ = ["layer_norm_2d", "rms_norm_2d"]


def layer_norm_2d(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    zero_centered_weight: bool = False,
    memory_efficient: bool = False,
) -> Tensor:
    r"""Normalize each pixel of images over its channels, as ConvNeXt does.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \mathrm{weight} + \mathrm{bias}

    Mean and (biased) variance are taken over the dimension ``C``. The result equals :func:`layernorm_ext.layer_norm`
    of ``input.movedim(1, -1)``, moved back. Errors, precision, determinism, derivatives and dtypes of gradients are
    those of that function. The last bits also depend on the memory format. Sources: Ba, Kiros and Hinton, `Layer
    Normalization <https://arxiv.org/abs/1607.06450>`_, 2016; Liu et al., `A ConvNet for the 2020s
    <https://arxiv.org/abs/2201.03545>`_, 2022.

    Args:
        input: Tensor of shape ``[N, C, *]``, with any number of further dimensions, and dtype float64, float32, float16
            or bfloat16. Channels may have any stride if the pixels of a channel are contiguous; ``channels_last`` is
            read in place, and other layouts are copied.
        weight: Tensor of any of these dtypes. Its shape is ``[C]``; or ``[N, C]``, for a weight per image; or has as
            many dimensions as ``input``, where each size except ``C`` is the input's or 1. Ones if ``None``.
        bias: Like ``weight``. If both vary between pixels, they vary in the same dimensions. Zeros if ``None``.
        eps: Added to the variance.
        zero_centered_weight: Whether to multiply by ``weight + 1``.
        memory_efficient: Whether to save the output for backward instead of the input. See :class:`LayerNorm`.

    Returns:
        A tensor of the shape, dtype and memory format of ``input``: it has the strides of :func:`torch.empty_like`,
        also for a slice of a ``channels_last`` tensor. So has the gradient of ``input``.

    Example:
        >>> x = torch.randn(2, 8, 4, 4)
        >>> layer_norm_2d(x, torch.ones(8), torch.zeros(8)).shape
        torch.Size([2, 8, 4, 4])
    """
    options: dict[str, Any] = {"zero_centered_weight": zero_centered_weight, "memory_efficient": memory_efficient}
    if has_torch_function_variadic(input, weight, bias):
        return override(layer_norm_2d, input, weight=weight, bias=bias, eps=eps, **options)
    if not torch.compiler.is_dynamo_compiling():
        output = _C.layer_norm_2d(input, weight, bias, eps, **options)
        if output is not None:
            return output
    return _norm_2d(input, weight, bias, eps, **options)


def rms_norm_2d(
    input: Tensor, weight: Tensor | None = None, eps: float | None = None, *, zero_centered_weight: bool = False
) -> Tensor:
    r"""Divide each pixel of images by the root mean square of its channels.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} * \mathrm{weight}

    Shapes, dtypes, results and errors are those of :func:`layer_norm_2d`. The default of ``eps`` is that of
    :func:`layernorm_ext.rms_norm`, so that rows and images give the same results. Source: Zhang and Sennrich, `Root
    Mean Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_, 2019.
    """
    if has_torch_function_variadic(input, weight):
        return override(rms_norm_2d, input, weight=weight, eps=eps, zero_centered_weight=zero_centered_weight)
    if not torch.compiler.is_dynamo_compiling():
        output = _C.rms_norm_2d(input, weight, eps, zero_centered_weight=zero_centered_weight)
        if output is not None:
            return output
    return _norm_2d(input, weight, None, rms_eps(input, eps), rms=True, zero_centered_weight=zero_centered_weight)


def _norm_2d(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, **options: Any) -> Tensor:
    """Compute the norm by operators that a tracer can record."""
    tracing.check("check_images", input, weight, bias)
    last = input.dim() - 1
    weight, bias = (_channels_last(parameter, last + 1) for parameter in (weight, bias))
    rows = input.movedim(1, last)
    output, _ = norm(rows, None, rows.shape[-1:], weight, bias, eps, preserve_layout=True, **options)
    output = output.movedim(last, 1)
    return tracing.with_format_of(input, output) if tracing.records_aten() else output


def _channels_last(parameter: Tensor | None, dims: int) -> Tensor | None:
    """Move the channels of a parameter of images last; a parameter ``[N, C]`` lacks the last of ``dims`` dimensions."""
    parameter = _without_pixels(parameter)
    if parameter is None or parameter.dim() == 1:
        return parameter
    while parameter.dim() < dims:
        parameter = parameter.unsqueeze(-1)
    return parameter.movedim(1, dims - 1)  # torch's older ONNX exporter does not support -1


def _without_pixels(parameter: Tensor | None) -> Tensor | None:
    """Return a parameter ``[N, C, 1, 1]`` as ``[N, C]``, so that autograd gives its gradient contiguous strides."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    if parameter is None or parameter.dim() <= 2:
        return parameter
    sizes = tracing.constant_sizes(parameter.shape[2:])
    return parameter.flatten(1) if all(statically_known_true(size == 1) for size in sizes) else parameter
