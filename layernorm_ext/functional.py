"""The normalizations as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import tracing
from ._ops import _C
from ._script import compile_as_operators

__all__ = ["ada_layer_norm", "ada_rms_norm", "add_ada_layer_norm", "add_ada_rms_norm", "add_layer_norm"]
__all__ += ["add_rms_norm", "gated_layer_norm", "gated_rms_norm", "layer_norm", "rms_norm"]


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
            float16 or bfloat16. The kernels read it in place if the normalized dimensions are contiguous and the batch
            dimensions can be viewed as one or two, with any strides; this includes Q or K of a fused projection, as in
            ``qkv.unflatten(-1, (3, heads, -1))[..., 0, :, :]``. Other layouts are copied. The components of nested
            tensors are normalized separately.
        normalized_shape: Sizes of the dimensions to normalize over; at least one. The sizes for a jagged nested tensor
            may include the ragged dimension, as in ``input.shape[1:]``.
        weight: Tensor of shape ``normalized_shape``, or of the input's number of dimensions with each batch size equal
            to the input's or 1: ``[B, 1, N]`` is a weight per sample and ``[1, S, N]`` one per position of an input
            ``[B, S, N]``. It may have any of these dtypes. Ones if ``None``.
        bias: Like ``weight``. If both have batch sizes other than 1, these must be equal. Zeros if ``None``.
        eps: Added to the variance.
        zero_centered_weight: Whether to multiply by ``weight + 1``, as Gemma does. The sum is not rounded to 16 bits.
        memory_efficient: Whether to save the output for backward instead of the input. See :class:`LayerNorm`.

    Returns:
        A contiguous tensor of the shape and dtype of ``input``.

    Raises:
        RuntimeError: A shape, dtype or device does not fit; the message names the argument and both values.
        NotImplementedError: The dtype of ``input`` is not supported. Or a second derivative is computed with
            ``memory_efficient``.

    Note:
        The kernels read parameters of the dtype of ``input``, and float32 parameters of a float16 or bfloat16 input.
        Parameters of another dtype, or of two different dtypes, are converted to float32 (float64 for float64 input)
        in each call. The gradient of a parameter has the shape and dtype of the parameter.

        Sums are accumulated in float32 (float64 for float64 input). The error in float32 is at most
        ``5e-7 * (|weight| * (1 + |normalized input|) + |bias|)``, for any mean of the input up to 1e6 standard
        deviations and up to the largest numbers of the dtype, also under :mod:`torch.func` and ``vmap`` and in forward
        mode. On a CPU and in these transforms, ``eps`` may be 0 for the smallest numbers, too; on a GPU, their squares
        underflow unless ``eps`` is at least 1e-30 (1e-280 in float64). The operators of ``trace_as("aten")`` have
        torch's precision.

        The gradients have a similar precision if ``1 / sqrt(variance + eps)``, which is saved for backward, does not
        overflow. The sums over the rows in the gradients of the parameters are off by at most 1.1e-6 of the sum of the
        absolute values, on a GPU by 4.1e-6. With :func:`torch.set_flush_denormal`, second derivatives of rows that
        deviate by more than 8e37 are zero.

        The result of a row does not depend on the other rows, their number, memory addresses or the number of threads.
        Unlike torch's, the output has the dtype of ``input`` when the parameters are float32, on every device and under
        autocast.

        The function is differentiable to any order in reverse mode, in forward mode, and under :mod:`torch.func` and
        ``vmap``.

    Example:
        >>> x = torch.randn(2, 3, 8)
        >>> layer_norm(x, (8,), torch.ones(8), torch.zeros(8)).shape
        torch.Size([2, 3, 8])
    """
    # Empty by default: parsing options takes time, and overrides may know torch's arguments only.
    options: dict[str, Any] = {}
    if zero_centered_weight or memory_efficient:
        options = {"zero_centered_weight": zero_centered_weight, "memory_efficient": memory_efficient}
    # The compiled function is fast, but torch.compile cannot trace it and __torch_function__ cannot override it.
    if not (torch.compiler.is_dynamo_compiling() or has_torch_function_variadic(input, weight, bias)):
        output = _C.layer_norm(input, normalized_shape, weight, bias, eps, **options)
        if output is not None:
            return output
    if _is_overridden(input, weight, bias):
        return override(layer_norm, input, normalized_shape, weight=weight, bias=bias, eps=eps, **options)
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

    Shapes, dtypes, errors, precision, determinism and derivatives are those of :func:`layer_norm`. If ``eps`` is
    ``None``, it is, as in torch, ``torch.finfo(dtype).eps`` of the accumulation dtype: float64 for a float64 input,
    else float32. Source: Zhang and Sennrich, `Root Mean Square Layer Normalization
    <https://arxiv.org/abs/1910.07467>`_, 2019.

    Returns:
        A tensor of the shape and dtype of ``input``. As in torch, it is ``channels_last`` (``channels_last_3d``) if
        ``input`` is, else contiguous.
    """
    options: dict[str, Any] = {"zero_centered_weight": True} if zero_centered_weight else {}  # as in layer_norm
    if _is_overridden(input, weight):
        return override(rms_norm, input, normalized_shape, weight=weight, eps=eps, **options)
    if not torch.compiler.is_dynamo_compiling():
        output = _C.rms_norm(input, normalized_shape, weight, eps, **options)
        if output is not None:
            return output
    return _norm(input, None, normalized_shape, weight, None, rms_eps(input, eps), rms=True, **options)[0]


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    gate: Tensor | None = None,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Add a residual and normalize the sum over the last dimensions, in one pass over memory.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s - \mathrm{E}[s]}{\sqrt{\mathrm{Var}[s] + \epsilon}} *
        \mathrm{weight} + \mathrm{bias}

    ``s`` is rounded to the dtype of ``residual`` before ``y`` is computed. Results and gradients equal those of
    ``s = input + residual; layer_norm(s, ...)`` and take two thirds of the memory traffic. With a float32 residual
    beside a float16 or bfloat16 input, the residual stream stays in float32 through all blocks: ``y`` is computed from
    the unrounded sum and rounded once, and the gradient of the stream is float32 as well. The product with ``gate`` is
    not rounded before the sum. Precision, determinism and derivatives are those of :func:`layer_norm`. Hooks and
    ``retain_grad()`` of the returned sum see the gradient from its later uses, without that from ``y``. Sources: Ba,
    Kiros and Hinton, `Layer Normalization <https://arxiv.org/abs/1607.06450>`_, 2016; for a gate per sample, Peebles
    and Xie, `Scalable Diffusion Models with Transformers <https://arxiv.org/abs/2212.09748>`_, 2022; for one gate
    (LayerScale), Touvron et al., `Going deeper with Image Transformers <https://arxiv.org/abs/2103.17239>`_, 2021.

    Args:
        input: As in :func:`layer_norm`.
        residual: Tensor of the shape of ``input`` and of its dtype, or float32 if that is float16 or bfloat16.
        normalized_shape: As in :func:`layer_norm`.
        weight: As in :func:`layer_norm`.
        bias: As in :func:`layer_norm`.
        eps: Added to the variance.
        gate: Factor of the input, of any of these dtypes. Its shapes are those of ``scale`` in :func:`ada_layer_norm`:
            for an input ``[B, S, N]``, for example, ``[B, N]`` is a gate per sample, and ``[N]`` is one for all rows.
            If ``weight`` or ``bias`` have batch sizes other than 1 as well, these must be equal. Ones if ``None``.
        zero_centered_weight: Whether to multiply by ``weight + 1``.
        inplace: Whether to overwrite ``residual`` with the sum and return it, instead of a new tensor.

    Returns:
        Output and sum, each of the shape of ``input``. The output has the dtype of ``input``, the sum that of
        ``residual``. The gradients have the shapes and dtypes of the arguments.

    Raises:
        RuntimeError: As :func:`layer_norm`. Or ``residual`` cannot be changed in place: it is a leaf that requires
            grad, a view while autograd records, or several of its elements share memory.
        NotImplementedError: The dtype of ``input`` is not supported.

    Example:
        >>> x, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        >>> output, residual = add_layer_norm(x, residual, (8,), torch.ones(8), torch.zeros(8))
        >>> output.shape
        torch.Size([2, 3, 8])
    """
    options: dict[str, Any] = {"gate": gate, "zero_centered_weight": zero_centered_weight, "inplace": inplace}
    if _is_overridden(input, residual, weight, bias, gate):
        return override(add_layer_norm, input, residual, normalized_shape, weight=weight, bias=bias, eps=eps, **options)
    if not torch.compiler.is_dynamo_compiling():
        results = _C.add_layer_norm(input, residual, normalized_shape, weight, bias, eps, **options)
        if results is not None:
            return results
    return _modulated_norm(input, residual, normalized_shape, weight, bias, eps, **options)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    gate: Tensor | None = None,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Add a residual and divide the sum by its root mean square over the last dimensions, in one pass over memory.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s}{\sqrt{\mathrm{E}[s^2] + \epsilon}} * \mathrm{weight}

    Shapes, dtypes, ``gate``, the rounding of ``s``, results and errors are those of :func:`add_layer_norm`, and the
    default of ``eps`` is that of :func:`rms_norm`. Source: Zhang and Sennrich, `Root Mean Square Layer Normalization
    <https://arxiv.org/abs/1910.07467>`_, 2019.
    """
    options: dict[str, Any] = {"gate": gate, "zero_centered_weight": zero_centered_weight, "inplace": inplace}
    if _is_overridden(input, residual, weight, gate):
        return override(add_rms_norm, input, residual, normalized_shape, weight=weight, eps=eps, **options)
    if not torch.compiler.is_dynamo_compiling():
        results = _C.add_rms_norm(input, residual, normalized_shape, weight, eps, **options)
        if results is not None:
            return results
    return _modulated_norm(input, residual, normalized_shape, weight, None, rms_eps(input, eps), rms=True, **options)


def ada_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    r"""Normalize over the last dimensions, then scale and shift, for example each sample by its own conditioning.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * (1 + \mathrm{scale}) + \mathrm{shift}

    This is the adaptive layer norm (adaLN) of diffusion transformers, in one pass over memory. ``1 + scale`` is not
    rounded to 16 bits, and the output is rounded once. Backward needs the input, ``scale`` and two numbers per row.
    Precision, determinism and derivatives are those of :func:`layer_norm`. The gradients of ``scale`` and ``shift``
    have their shapes and dtypes; those of one sample do not depend on the other samples. Source: Peebles and Xie,
    `Scalable Diffusion Models with Transformers <https://arxiv.org/abs/2212.09748>`_, 2022.

    Args:
        input: As in :func:`layer_norm`.
        normalized_shape: As in :func:`layer_norm`.
        scale: Tensor of shape ``[*batch, *normalized_shape]`` and any of these dtypes. The sizes ``batch`` belong to
            the first batch dimensions of ``input``; each equals the input's or 1, and the others count as 1. For an
            input ``[B, S, N]``, ``[B, N]`` and ``[B, 1, N]`` are per sample, ``[1, S, N]`` is per position,
            ``[B, S, N]`` is per row and ``[N]`` is shared. Slices such as ``modulation.chunk(6, -1)[0]`` are read in
            place. Zeros if ``None``.
        shift: Like ``scale``. If both have batch sizes other than 1, these must be equal. Zeros if ``None``.
        eps: Added to the variance.

    Returns:
        A contiguous tensor of the shape and dtype of ``input``.

    Raises:
        RuntimeError: As :func:`layer_norm`. With a nested input, ``scale`` and ``shift`` must have
            ``normalized_shape``.
        NotImplementedError: The dtype of ``input`` is not supported.

    Example:
        >>> x, scale, shift = torch.randn(2, 3, 8), torch.randn(2, 8), torch.randn(2, 8)
        >>> ada_layer_norm(x, (8,), scale, shift).shape
        torch.Size([2, 3, 8])
    """
    if _is_overridden(input, scale, shift):
        return override(ada_layer_norm, input, normalized_shape, scale=scale, shift=shift, eps=eps)
    if not torch.compiler.is_dynamo_compiling():
        output = _C.ada_layer_norm(input, normalized_shape, scale, shift, eps)
        if output is not None:
            return output
    return _modulated_norm(input, None, normalized_shape, scale, shift, eps, adaptive=True)[0]


def ada_rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    r"""Divide by the root mean square over the last dimensions, then scale and shift as :func:`ada_layer_norm` does.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} * (1 + \mathrm{scale}) + \mathrm{shift}

    Shapes, dtypes and errors are those of :func:`ada_layer_norm`, and the memory format of the output is that of
    :func:`rms_norm`. Sources: Peebles and Xie, `Scalable Diffusion Models with Transformers
    <https://arxiv.org/abs/2212.09748>`_, 2022; Zhang and Sennrich, `Root Mean Square Layer Normalization
    <https://arxiv.org/abs/1910.07467>`_, 2019.
    """
    if _is_overridden(input, scale, shift):
        return override(ada_rms_norm, input, normalized_shape, scale=scale, shift=shift, eps=eps)
    if not torch.compiler.is_dynamo_compiling():
        output = _C.ada_rms_norm(input, normalized_shape, scale, shift, eps)
        if output is not None:
            return output
    return _modulated_norm(input, None, normalized_shape, scale, shift, eps, adaptive=True, rms=True)[0]


def add_ada_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    *,
    gate: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Add a residual to the gated input, normalize the sum, then scale and shift, in one pass over memory.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s - \mathrm{E}[s]}{\sqrt{\mathrm{Var}[s] + \epsilon}} *
        (1 + \mathrm{scale}) + \mathrm{shift}

    This is what a diffusion transformer computes between its attention and its perceptron, and between two blocks.
    Residual, ``gate``, sum, ``inplace`` and errors are those of :func:`add_layer_norm`; scale, shift and output are
    those of :func:`ada_layer_norm`. Source: Peebles and Xie, `Scalable Diffusion Models with Transformers
    <https://arxiv.org/abs/2212.09748>`_, 2022.

    Example:
        >>> x, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        >>> scale, shift, gate = torch.randn(2, 24).chunk(3, dim=-1)
        >>> output, residual = add_ada_layer_norm(x, residual, (8,), scale, shift, gate=gate)
        >>> output.shape
        torch.Size([2, 3, 8])
    """
    options: dict[str, Any] = {"gate": gate, "inplace": inplace}
    if _is_overridden(input, residual, scale, shift, gate):
        return override(
            add_ada_layer_norm, input, residual, normalized_shape, scale=scale, shift=shift, eps=eps, **options
        )
    if not torch.compiler.is_dynamo_compiling():
        results = _C.add_ada_layer_norm(input, residual, normalized_shape, scale, shift, eps, **options)
        if results is not None:
            return results
    return _modulated_norm(input, residual, normalized_shape, scale, shift, eps, adaptive=True, **options)


def add_ada_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    *,
    gate: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Add a residual to the gated input, divide the sum by its root mean square, then scale and shift.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s}{\sqrt{\mathrm{E}[s^2] + \epsilon}} * (1 + \mathrm{scale}) +
        \mathrm{shift}

    Arguments, results and errors are those of :func:`add_ada_layer_norm`. Sources: Peebles and Xie, `Scalable Diffusion
    Models with Transformers <https://arxiv.org/abs/2212.09748>`_, 2022; Zhang and Sennrich, `Root Mean Square Layer
    Normalization <https://arxiv.org/abs/1910.07467>`_, 2019.
    """
    options: dict[str, Any] = {"gate": gate, "inplace": inplace}
    if _is_overridden(input, residual, scale, shift, gate):
        return override(
            add_ada_rms_norm, input, residual, normalized_shape, scale=scale, shift=shift, eps=eps, **options
        )
    if not torch.compiler.is_dynamo_compiling():
        results = _C.add_ada_rms_norm(input, residual, normalized_shape, scale, shift, eps, **options)
        if results is not None:
            return results
    return _modulated_norm(input, residual, normalized_shape, scale, shift, eps, adaptive=True, rms=True, **options)


def gated_layer_norm(
    input: Tensor,
    gate: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str = "silu",
    gate_first: bool = False,
    num_groups: int = 1,
    zero_centered_weight: bool = False,
) -> Tensor:
    r"""Normalize over the last dimensions and multiply by an activated gate, in one pass over memory.

    .. math::
        y = \left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \mathrm{weight} +
        \mathrm{bias}\right) * f(\mathrm{gate})

    With ``gate_first``, the gate multiplies the input instead, and mean and variance are those of the product:

    .. math::
        u = x * f(\mathrm{gate}) \qquad
        y = \frac{u - \mathrm{E}[u]}{\sqrt{\mathrm{Var}[u] + \epsilon}} * \mathrm{weight} + \mathrm{bias}

    ``f(z)`` is ``silu(z) = z / (1 + exp(-z))`` or ``sigmoid(z) = 1 / (1 + exp(-z))``. Nothing is rounded before the
    output, which is rounded once. Backward needs the input, the gate, the parameters and two numbers per row.
    Precision, determinism and derivatives are those of :func:`layer_norm`. Sources: Yang, Kautz and Hatamizadeh, `Gated
    Delta Networks <https://arxiv.org/abs/2412.06464>`_, 2024; with ``gate_first``, Dao and Gu, `Transformers are SSMs
    <https://arxiv.org/abs/2405.21060>`_, 2024.

    Args:
        input: As in :func:`layer_norm`.
        gate: Tensor of the shape of ``input``, of dtype float64, float32, float16 or bfloat16. A slice of a fused
            projection, as in ``projection.chunk(2, dim=-1)[1]``, is read in place. Without a gate, the function is
            :func:`layer_norm` with groups.
        normalized_shape: As in :func:`layer_norm`; with groups, the size of one dimension.
        weight: As in :func:`layer_norm`.
        bias: As in :func:`layer_norm`.
        eps: Added to the variance.
        activation: The function ``f``: ``"silu"`` or ``"sigmoid"``.
        gate_first: Whether the gate multiplies the input instead of the output.
        num_groups: The number of groups of equal size into which the last dimension is divided. Each is normalized
            apart; the weight has all elements.
        zero_centered_weight: Whether to multiply by ``weight + 1``.

    Returns:
        A contiguous tensor of the shape and dtype of ``input``. The gradients have the dtypes of the arguments.

    Raises:
        RuntimeError: As :func:`layer_norm`. Or ``activation`` is unknown, or ``num_groups`` does not divide the only
            dimension of ``normalized_shape``. With a nested input, ``gate`` must have the same components, and the
            ragged dimension cannot be normalized.
        NotImplementedError: The dtype of ``input`` is not supported.

    Example:
        >>> x, gate = torch.randn(2, 3, 16).chunk(2, dim=-1)
        >>> gated_layer_norm(x, gate, (8,), torch.ones(8), torch.zeros(8)).shape
        torch.Size([2, 3, 8])
    """
    options: dict[str, Any] = {"activation": activation, "gate_first": gate_first, "num_groups": num_groups}
    options["zero_centered_weight"] = zero_centered_weight
    if _is_overridden(input, gate, weight, bias):
        return override(gated_layer_norm, input, gate, normalized_shape, weight=weight, bias=bias, eps=eps, **options)
    if not torch.compiler.is_dynamo_compiling():
        output = _C.gated_layer_norm(input, gate, normalized_shape, weight, bias, eps, **options)
        if output is not None:
            return output
    return _gated_norm(input, gate, normalized_shape, weight, bias, eps, **options)


def gated_rms_norm(
    input: Tensor,
    gate: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str = "silu",
    gate_first: bool = False,
    num_groups: int = 1,
    zero_centered_weight: bool = False,
) -> Tensor:
    r"""Divide by the root mean square over the last dimensions and multiply by an activated gate, in one pass.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} * \mathrm{weight} * f(\mathrm{gate})

    With ``gate_first``, as in Mamba-2, the gate multiplies the input instead:

    .. math::
        u = x * f(\mathrm{gate}) \qquad y = \frac{u}{\sqrt{\mathrm{E}[u^2] + \epsilon}} * \mathrm{weight}

    Arguments, results and errors are those of :func:`gated_layer_norm`, and the default of ``eps`` is that of
    :func:`rms_norm`. Sources: Yang, Kautz and Hatamizadeh, `Gated Delta Networks <https://arxiv.org/abs/2412.06464>`_,
    2024; with ``gate_first``, Dao and Gu, `Transformers are SSMs <https://arxiv.org/abs/2405.21060>`_, 2024; Zhang and
    Sennrich, `Root Mean Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_, 2019.

    Example:
        >>> x, gate = torch.randn(2, 3, 16).chunk(2, dim=-1)
        >>> gated_rms_norm(x, gate, (8,), torch.ones(8), gate_first=True, num_groups=2).shape
        torch.Size([2, 3, 8])
    """
    options: dict[str, Any] = {"activation": activation, "gate_first": gate_first, "num_groups": num_groups}
    options["zero_centered_weight"] = zero_centered_weight
    if _is_overridden(input, gate, weight):
        return override(gated_rms_norm, input, gate, normalized_shape, weight=weight, eps=eps, **options)
    if not torch.compiler.is_dynamo_compiling():
        output = _C.gated_rms_norm(input, gate, normalized_shape, weight, eps, **options)
        if output is not None:
            return output
    return _gated_norm(input, gate, normalized_shape, weight, None, rms_eps(input, eps), rms=True, **options)


compile_as_operators(layer_norm, rms_norm, add_layer_norm, add_rms_norm, ada_layer_norm, ada_rms_norm)
compile_as_operators(add_ada_layer_norm, add_ada_rms_norm, gated_layer_norm, gated_rms_norm)


def _modulated_norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    *,
    gate: Tensor | None = None,
    adaptive: bool = False,
    **options: bool,
) -> tracing.Results:
    """Insert the batch dimensions that scale and shift, if ``adaptive``, and the gate of a residual lack."""
    scale, shift = (weight, bias) if adaptive else (None, None)
    if input.is_nested:
        for name, parameter in {"scale": scale, "shift": shift, "gate": gate}.items():
            if parameter is not None and parameter.dim() != len(normalized_shape):
                raise RuntimeError(
                    f"Expected {name} to be of same shape as normalized_shape for a nested input, but got {name} of "
                    f"shape {list(parameter.shape)} and normalized_shape = {list(normalized_shape)}"
                )
    elif adaptive or gate is not None:
        normalized_shape = tracing.constant_sizes(normalized_shape)
        tracing.check("check_modulation", input, normalized_shape, scale, shift, gate)
        scale, shift, gate = (_insert_batch_dims(t, input, len(normalized_shape)) for t in (scale, shift, gate))
    if adaptive:
        weight, bias = scale, shift
        options["zero_centered_weight"] = True
    return _norm(input, residual, normalized_shape, weight, bias, eps, gate=gate, **options)


def _gated_norm(
    input: Tensor,
    gate: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    *,
    activation: str,
    gate_first: bool,
    num_groups: int,
    **options: Any,
) -> Tensor:
    """Check the options, which a plain norm without a gate ignores."""
    if activation not in ("silu", "sigmoid"):
        raise RuntimeError(
            f'Expected activation to be "silu" or "sigmoid", but got activation = "{activation}" and input of shape '
            f"{list(input.shape)}"
        )
    if num_groups != 1 and (len(normalized_shape) != 1 or num_groups < 1 or normalized_shape[0] % num_groups):
        raise RuntimeError(
            f"Expected num_groups to divide the only dimension of normalized_shape, but got num_groups = {num_groups}, "
            f"normalized_shape = {list(normalized_shape)} and input of shape {list(input.shape)}"
        )
    if gate is not None:
        options |= {"activation": activation, "gate_first": gate_first}
    return _norm(input, None, normalized_shape, weight, bias, eps, gate=gate, num_groups=num_groups, **options)[0]


def _norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    *,
    gate: Tensor | None = None,
    num_groups: int = 1,
    rms: bool = False,
    zero_centered_weight: bool = False,
    memory_efficient: bool = False,
    preserve_layout: bool = False,
    inplace: bool | None = None,
    **gate_options: Any,
) -> tracing.Results:
    """Compute any member of the family by operators that a tracer can record; also of nested tensors.

    ``inplace`` is None for functions without a residual. ``gate_options`` are ``activation`` and ``gate_first`` of a
    gated norm with a gate.
    """
    if eps is None:
        raise TypeError("layer_norm(): argument 'eps' must be float, not NoneType")
    check_residual(input, residual, inplace)
    # Operators take numbers that the tracer knows. This test makes torch.compile break its graph before it calls one
    # with the item of a tensor, as torch's functions do.
    if eps == 0:
        eps = 0.0
    options = {"rms": rms, "zero_centered_weight": zero_centered_weight, **gate_options}
    if input.is_nested:
        options |= {"memory_efficient": memory_efficient, "inplace": inplace, "num_groups": num_groups}
        return _norm_nested(input, residual, normalized_shape, weight, bias, eps, gate=gate, **options)
    normalized_shape = tracing.constant_sizes(normalized_shape)
    if num_groups != 1:
        activation = gate_options.get("activation")
        tracing.check("check_forward", input, None, normalized_shape, weight, bias, gate, activation)
        sizes, dims = (num_groups, normalized_shape[0] // num_groups), input.dim()
        input, gate, weight, bias = (_divide(t, sizes, dims) for t in (input, gate, weight, bias))
        output, _ = _norm(input, None, sizes[1:], weight, bias, eps, gate=gate, **options)
        return output.flatten(dims - 1), None
    if tracing.records_aten():
        return tracing.norm(
            input, residual, normalized_shape, weight, bias, eps, gate=gate, inplace=bool(inplace), **options
        )
    ops = torch.ops.layernorm  # torch.compile cannot choose an overload if sizes are symbolic
    arguments = (normalized_shape, weight, bias, eps)
    options |= {"memory_efficient": memory_efficient, "preserve_layout": preserve_layout}
    if inplace:
        return ops.forward_.fused(input, *arguments, residual, gate, **options)[0], residual
    if residual is None and gate is None:
        return ops.forward.default(input, *arguments, **options)[0], None
    return ops.forward.fused(input, *arguments, residual, gate, **options)[:2]


def check_residual(input: Tensor, residual: Tensor | None, inplace: bool | None) -> None:
    """Raise the error of eager calls for a missing residual; ``inplace`` is None for functions without one."""
    if residual is None and inplace is not None:
        raise TypeError(f"argument 'residual' must be Tensor, not NoneType, for input of shape {list(input.shape)}")


def _divide(tensor: Any, sizes: tuple[int, int], dims: int) -> Any:
    """Return a view with the last dimension divided and, for a shared parameter, the batch dimensions that it lacks."""
    return None if tensor is None else tensor.unflatten(-1, sizes)[(None,) * (dims - tensor.dim())]


def rms_eps(input: Tensor, eps: float | None) -> float:
    """Return eps, by default torch.finfo(dtype).eps of the accumulation dtype, as in torch."""
    if eps is None:
        return 2.0**-52 if input.dtype == torch.float64 else 2.0**-23
    return eps


def _insert_batch_dims(parameter: Tensor | None, input: Tensor, normalized_dims: int) -> Tensor | None:
    """Insert the batch dimensions that a scale, a shift or the gate of a residual lacks after those that it has."""
    if parameter is None or parameter.dim() == normalized_dims:
        return parameter
    for _ in range(input.dim() - parameter.dim()):
        parameter = parameter.unsqueeze(-1 - normalized_dims)
    return parameter


def _is_overridden(input: Tensor, *others: Tensor | None) -> bool:
    if not has_torch_function_variadic(input, *others):
        return False
    with torch._C.DisableTorchFunctionSubclass():  # do not call the override for is_nested
        # torch's override for jagged tensors looks functions up by name, and would mistake this rms_norm for torch's.
        return not (isinstance(input, Tensor) and input.is_nested)


def override(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call the ``__torch_function__`` of an argument instead of a function."""
    return handle_torch_function(function, (*arguments, *keywords.values()), *arguments, **keywords)


def _norm_nested(
    input: Any,  # torch's class of jagged tensors is private
    residual: Any,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    gate: Any = None,
    **options: Any,
) -> tracing.Results:
    """Normalize all values of a jagged tensor at once, and the components of other nested tensors one by one."""
    jagged, dims, inplace = input.layout == torch.jagged, len(normalized_shape), options["inplace"]
    if jagged and tuple(normalized_shape) != tuple(input.shape[1:][-dims:]):
        raise RuntimeError(
            f"Given normalized_shape={list(normalized_shape)}, expected a jagged input with shape [B, *, "
            f"{str(list(normalized_shape))[1:-1]}], but got input of size{list(input.shape)}"
        )
    parameters = {"weight": weight, "bias": bias}
    alike = {"residual": residual}  # tensors with the components of the input
    (alike if "activation" in options else parameters)["gate"] = gate
    for name, tensor in alike.items():
        if tensor is not None and not (
            tensor.is_nested and tensor.layout == input.layout and _sizes(tensor) == _sizes(input)
        ):
            raise RuntimeError(
                f"Expected {name} to be nested as input is, with components of the same sizes, but got {name} of "
                f"size{_sizes(tensor)} and input of size{_sizes(input)}"
            )
    over_ragged = jagged and input._ragged_idx >= input.dim() - dims
    if over_ragged:
        if "activation" in options:
            raise RuntimeError(
                f"Expected gate to be None for normalized_shape = {list(normalized_shape)}, which includes the ragged "
                f"dimension, but got gate of shape {list(gate.shape)}"
            )
        for name, tensor in parameters.items():
            if tensor is not None:
                raise RuntimeError(
                    f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape "
                    f"{list(tensor.shape)} and normalized_shape = {list(normalized_shape)}, which includes "
                    "the ragged dimension"
                )
        if input.lengths() is not None:
            raise RuntimeError(
                f"Given normalized_shape={list(normalized_shape)} with the ragged dimension, expected a jagged "
                "input without holes, but got one with lengths"
            )

    def join(values: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(values, input.offsets(), input.lengths(), input._ragged_idx)

    if jagged and (not over_ragged or torch.compiler.is_compiling()):
        values, added = input.values(), None if residual is None else residual.values()
        if over_ragged:  # torch.compile does not know the number of components
            offsets, ragged_dim, rms = input.offsets(), input._ragged_idx - 1, options["rms"]
            output, total = tracing.norm_over_ragged(
                values, added, normalized_shape, eps, offsets, ragged_dim, rms=rms, inplace=inplace
            )
        else:
            factor = gate.values() if gate is not None and gate.is_nested else gate
            output, total = _norm(values, added, normalized_shape, weight, bias, eps, gate=factor, **options)
        return join(output), residual if inplace or residual is None else join(total)

    components = input.unbind()
    residuals = [None] * len(components) if residual is None else residual.unbind()
    gates = gate.unbind() if gate is not None and gate.is_nested else [gate] * len(components)
    results = []
    for x, added, factor in zip(components, residuals, gates, strict=True):
        shape = x.shape[-dims:] if jagged else normalized_shape
        results.append(_norm(x, added, shape, weight, bias, eps, gate=factor, **options))

    def gather(parts: list[Tensor]) -> Tensor:
        return join(torch.cat(parts, input._ragged_idx - 1)) if jagged else torch.nested.as_nested_tensor(parts)

    output = gather([output for output, _ in results])
    return output, residual if inplace or residual is None else gather([total for _, total in results])


def _sizes(tensor: Tensor) -> list[Any]:
    """Return the shape, or the shapes of the components of a strided nested tensor."""
    is_strided = tensor.is_nested and tensor.layout != torch.jagged
    return tensor._nested_tensor_size().tolist() if is_strided else list(tensor.shape)
