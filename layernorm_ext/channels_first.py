"""The normalizations over the channels of images, as functions.

Images have the shape ``[N, C, *]``. Each pixel is normalized over its channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function_variadic

from . import tracing
from ._calls import check_residual, norm, override, rms_eps
from ._ops import _C
from ._script import compile_as_operators

__all__ = ["ada_layer_norm_2d", "ada_rms_norm_2d", "add_ada_layer_norm_2d", "add_ada_rms_norm_2d"]
__all__ += ["add_layer_norm_2d", "add_rms_norm_2d", "layer_norm_2d", "rms_norm_2d"]


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
    return _norm_2d(input, None, weight, bias, eps, **options)


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
    return _norm_2d(input, None, weight, None, rms_eps(input, eps), rms=True, zero_centered_weight=zero_centered_weight)


def add_layer_norm_2d(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    gate: Tensor | None = None,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Add a residual to images and normalize each pixel of the sum over its channels, in one pass over memory.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s - \mathrm{E}[s]}{\sqrt{\mathrm{Var}[s] + \epsilon}} *
        \mathrm{weight} + \mathrm{bias}

    The residual, the sum, their dtypes, ``inplace`` and the errors are those of
    :func:`layernorm_ext.add_layer_norm`. The other arguments are those of :func:`layer_norm_2d`; ``gate`` has the
    shapes of ``weight``. Source: Ba, Kiros and Hinton, `Layer Normalization <https://arxiv.org/abs/1607.06450>`_, 2016.

    Returns:
        Output and sum, both of the shape and memory format of ``input``.

    Example:
        >>> x, residual = torch.randn(2, 8, 4, 4), torch.randn(2, 8, 4, 4)
        >>> output, residual = add_layer_norm_2d(x, residual, torch.ones(8), torch.zeros(8))
        >>> output.shape
        torch.Size([2, 8, 4, 4])
    """
    options: dict[str, Any] = {"gate": gate, "zero_centered_weight": zero_centered_weight, "inplace": inplace}
    if has_torch_function_variadic(input, residual, weight, bias, gate):
        return override(add_layer_norm_2d, input, residual, weight=weight, bias=bias, eps=eps, **options)
    if not torch.compiler.is_dynamo_compiling():
        results = _C.add_layer_norm_2d(input, residual, weight, bias, eps, **options)
        if results is not None:
            return results
    return _norm_2d(input, residual, weight, bias, eps, **options)


def add_rms_norm_2d(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    gate: Tensor | None = None,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Add a residual to images and divide each pixel of the sum by the root mean square of its channels.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s}{\sqrt{\mathrm{E}[s^2] + \epsilon}} * \mathrm{weight}

    Arguments, results and errors are those of :func:`add_layer_norm_2d`, and the default of ``eps`` is that of
    :func:`rms_norm_2d`. Source: Zhang and Sennrich, `Root Mean Square Layer Normalization
    <https://arxiv.org/abs/1910.07467>`_, 2019.
    """
    options: dict[str, Any] = {"gate": gate, "zero_centered_weight": zero_centered_weight, "inplace": inplace}
    if has_torch_function_variadic(input, residual, weight, gate):
        return override(add_rms_norm_2d, input, residual, weight=weight, eps=eps, **options)
    if not torch.compiler.is_dynamo_compiling():
        results = _C.add_rms_norm_2d(input, residual, weight, eps, **options)
        if results is not None:
            return results
    return _norm_2d(input, residual, weight, None, rms_eps(input, eps), rms=True, **options)


def ada_layer_norm_2d(
    input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    r"""Normalize each pixel of images over its channels, with a scale and a shift per image.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * (1 + \mathrm{scale}) + \mathrm{shift}

    A network computes scale and shift from a condition. Both are tensors of shape ``[N, C]``, or of any shape of a
    weight of :func:`layer_norm_2d`, which also describes the input, the result and the errors. If both vary between
    pixels, they vary in the same dimensions. ``None`` means zeros. Source: Peebles and Xie, `Scalable Diffusion
    Models with Transformers <https://arxiv.org/abs/2212.09748>`_, 2022.

    Example:
        >>> x, scale, shift = torch.randn(2, 8, 4, 4), torch.randn(2, 8), torch.randn(2, 8)
        >>> ada_layer_norm_2d(x, scale, shift).shape
        torch.Size([2, 8, 4, 4])
    """
    if has_torch_function_variadic(input, scale, shift):
        return override(ada_layer_norm_2d, input, scale=scale, shift=shift, eps=eps)
    if not torch.compiler.is_dynamo_compiling():
        output = _C.ada_layer_norm_2d(input, scale, shift, eps)
        if output is not None:
            return output
    return _norm_2d(input, None, scale, shift, eps, adaptive=True)


def ada_rms_norm_2d(
    input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    r"""Divide each pixel of images by the root mean square of its channels, with a scale and a shift per image.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} * (1 + \mathrm{scale}) + \mathrm{shift}

    Arguments, results and errors are those of :func:`ada_layer_norm_2d`. Sources: Zhang and Sennrich, `Root Mean Square
    Layer Normalization <https://arxiv.org/abs/1910.07467>`_, 2019; Peebles and Xie, `Scalable Diffusion Models with
    Transformers <https://arxiv.org/abs/2212.09748>`_, 2022.
    """
    if has_torch_function_variadic(input, scale, shift):
        return override(ada_rms_norm_2d, input, scale=scale, shift=shift, eps=eps)
    if not torch.compiler.is_dynamo_compiling():
        output = _C.ada_rms_norm_2d(input, scale, shift, eps)
        if output is not None:
            return output
    return _norm_2d(input, None, scale, shift, eps, rms=True, adaptive=True)


def add_ada_layer_norm_2d(
    input: Tensor,
    residual: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    *,
    gate: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Add a residual to gated images and normalize each pixel of the sum over its channels, then scale and shift.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s - \mathrm{E}[s]}{\sqrt{\mathrm{Var}[s] + \epsilon}} *
        (1 + \mathrm{scale}) + \mathrm{shift}

    Residual, ``gate``, sum, ``inplace`` and errors are those of :func:`add_layer_norm_2d`; scale, shift and output are
    those of :func:`ada_layer_norm_2d`. Source: Peebles and Xie, `Scalable Diffusion Models with Transformers
    <https://arxiv.org/abs/2212.09748>`_, 2022.

    Example:
        >>> x, residual = torch.randn(2, 8, 4, 4), torch.randn(2, 8, 4, 4)
        >>> scale, shift, gate = torch.randn(2, 24).chunk(3, dim=1)
        >>> output, residual = add_ada_layer_norm_2d(x, residual, scale, shift, gate=gate)
        >>> output.shape
        torch.Size([2, 8, 4, 4])
    """
    options: dict[str, Any] = {"gate": gate, "inplace": inplace}
    if has_torch_function_variadic(input, residual, scale, shift, gate):
        return override(add_ada_layer_norm_2d, input, residual, scale=scale, shift=shift, eps=eps, **options)
    if not torch.compiler.is_dynamo_compiling():
        results = _C.add_ada_layer_norm_2d(input, residual, scale, shift, eps, **options)
        if results is not None:
            return results
    return _norm_2d(input, residual, scale, shift, eps, adaptive=True, **options)


def add_ada_rms_norm_2d(
    input: Tensor,
    residual: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    *,
    gate: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Add a residual to gated images, divide each pixel by the root mean square of its channels, scale and shift.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s}{\sqrt{\mathrm{E}[s^2] + \epsilon}} * (1 + \mathrm{scale}) +
        \mathrm{shift}

    Arguments, results and errors are those of :func:`add_ada_layer_norm_2d`. Sources: Zhang and Sennrich, `Root Mean
    Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_, 2019; Peebles and Xie, `Scalable Diffusion Models
    with Transformers <https://arxiv.org/abs/2212.09748>`_, 2022.
    """
    options: dict[str, Any] = {"gate": gate, "inplace": inplace}
    if has_torch_function_variadic(input, residual, scale, shift, gate):
        return override(add_ada_rms_norm_2d, input, residual, scale=scale, shift=shift, eps=eps, **options)
    if not torch.compiler.is_dynamo_compiling():
        results = _C.add_ada_rms_norm_2d(input, residual, scale, shift, eps, **options)
        if results is not None:
            return results
    return _norm_2d(input, residual, scale, shift, eps, rms=True, adaptive=True, **options)


compile_as_operators(layer_norm_2d, rms_norm_2d, add_layer_norm_2d, add_rms_norm_2d)
compile_as_operators(ada_layer_norm_2d, ada_rms_norm_2d, add_ada_layer_norm_2d, add_ada_rms_norm_2d)


def _norm_2d(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    gate: Tensor | None = None,
    zero_centered_weight: bool = False,
    inplace: bool | None = None,
    adaptive: bool = False,
    **options: bool,
) -> Any:
    """Compute any member of the family by operators that a tracer can record; ``inplace`` as in :func:`_norm`."""
    check_residual(input, residual, inplace)
    tracing.check("check_images", input, residual, weight, bias, adaptive, gate)
    last = input.dim() - 1
    rows = input.movedim(1, last)
    output, total = norm(
        rows,
        None if residual is None else residual.movedim(1, last),
        rows.shape[-1:],
        _channels_last(weight, last + 1),
        _channels_last(bias, last + 1),
        eps,
        gate=_channels_last(gate, last + 1),
        zero_centered_weight=zero_centered_weight or adaptive,
        preserve_layout=True,
        **options,
    )
    output = output.movedim(last, 1)
    if tracing.records_aten():
        output = tracing.with_format_of(input, output)
    if residual is None:
        return output
    total = total.movedim(last, 1)
    return output, residual.copy_(total) if inplace else total  # the operator refuses to change a view


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
