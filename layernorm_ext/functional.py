"""The normalizations as functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.overrides import has_torch_function_variadic as has_override

from ._calls import default_eps, is_sigmoid, override
from ._ops import norm

__all__ = ["ada_layer_norm", "ada_rms_norm", "add_ada_layer_norm", "add_ada_rms_norm", "add_layer_norm"]
__all__ += ["add_rms_norm", "gated_layer_norm", "gated_rms_norm", "layer_norm", "layer_norm_2d", "rms_norm"]
__all__ += ["rms_norm_2d"]


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
        weight: Tensor of shape ``[*batch, *normalized_shape]``, of any of these dtypes. The sizes ``batch`` belong to
            the first batch dimensions of ``input``; each equals the input's or 1, and the others count as 1. For an
            input ``[B, S, N]``, ``[N]`` is shared, ``[B, N]`` and ``[B, 1, N]`` are per sample, ``[1, S, N]`` is per
            position and ``[B, S, N]`` per row. Ones if ``None``.
        bias: Like ``weight``. If both have batch sizes other than 1, these must be equal. Zeros if ``None``.
        eps: Added to the variance.
        zero_centered_weight: Whether to multiply by ``weight + 1``, as Gemma does. The sum is not rounded to 16 bits.
        memory_efficient: Whether to save the output for backward instead of the input. See :class:`LayerNorm`.

    Returns:
        A contiguous tensor of the shape and dtype of ``input``.

    Raises:
        RuntimeError: A shape, dtype or device does not fit; the message names the argument and both values.
        NotImplementedError: The dtype of ``input`` is not supported, or an argument is sparse, or nested while
            ``input`` is not. Or a second derivative is computed with ``memory_efficient``.

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
    if has_override(input, normalized_shape, weight, bias, eps):
        options = {"zero_centered_weight": zero_centered_weight, "memory_efficient": memory_efficient}
        return override(layer_norm, input, normalized_shape, weight=weight, bias=bias, eps=eps, **options)
    return norm(
        "layer_norm",
        input,
        normalized_shape,
        weight,
        bias,
        eps,
        zero_centered_weight=zero_centered_weight,
        memory_efficient=memory_efficient,
    )


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
    if has_override(input, normalized_shape, weight, eps):
        options = {"zero_centered_weight": zero_centered_weight}
        return override(rms_norm, input, normalized_shape, weight=weight, eps=eps, **options)
    eps = default_eps(input) if eps is None else eps
    options = {"rms": True, "zero_centered_weight": zero_centered_weight}
    return norm("rms_norm", input, normalized_shape, weight, None, eps, **options)


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
        inplace: Whether to overwrite ``residual`` with the sum and return it, instead of a new tensor. No other
            argument may share memory with it. The holes of a jagged residual are overwritten, too. Backward reads the
            sum. If the next call overwrites it in turn, backward raises an error, as after :meth:`torch.Tensor.add_`,
            so that a chain of such calls cannot be trained.

    Returns:
        Output and sum, each of the shape of ``input``. The output has the dtype of ``input``, the sum that of
        ``residual``. The gradients have the shapes and dtypes of the arguments.

    Raises:
        RuntimeError: As :func:`layer_norm`. Or ``residual`` cannot be changed in place: it is a leaf that requires
            grad, a view while autograd records, several of its elements share memory, or it shares memory with another
            argument.
        NotImplementedError: The dtype of ``input`` is not supported.

    Example:
        >>> x, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        >>> output, residual = add_layer_norm(x, residual, (8,), torch.ones(8), torch.zeros(8))
        >>> output.shape
        torch.Size([2, 3, 8])
    """
    if has_override(input, residual, normalized_shape, weight, bias, eps, gate):
        options = {"gate": gate, "zero_centered_weight": zero_centered_weight, "inplace": inplace}
        arguments = input, residual, normalized_shape
        return override(add_layer_norm, *arguments, weight=weight, bias=bias, eps=eps, **options)
    options = {"residual": residual, "input_scale": gate, "inplace": inplace}
    options |= {"zero_centered_weight": zero_centered_weight}
    return norm("add_layer_norm", input, normalized_shape, weight, bias, eps, **options)


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
    if has_override(input, residual, normalized_shape, weight, eps, gate):
        options = {"gate": gate, "zero_centered_weight": zero_centered_weight, "inplace": inplace}
        return override(add_rms_norm, input, residual, normalized_shape, weight=weight, eps=eps, **options)
    eps = default_eps(input) if eps is None else eps
    options = {"residual": residual, "input_scale": gate, "inplace": inplace}
    options |= {"rms": True, "zero_centered_weight": zero_centered_weight}
    return norm("add_rms_norm", input, normalized_shape, weight, None, eps, **options)


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
    have their shapes and dtypes; those of one sample do not depend on the values of the others. On a GPU, a batch of
    one sample may be summed in another order than a larger batch. Source: Peebles and Xie, `Scalable Diffusion Models
    with Transformers <https://arxiv.org/abs/2212.09748>`_, 2022.

    Args:
        input: As in :func:`layer_norm`.
        normalized_shape: As in :func:`layer_norm`.
        scale: Like ``weight`` in :func:`layer_norm`, for example ``[B, N]``. Slices such as
            ``modulation.chunk(6, -1)[0]`` are read in place. Zeros if ``None``.
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
    if has_override(input, normalized_shape, scale, shift, eps):
        return override(ada_layer_norm, input, normalized_shape, scale=scale, shift=shift, eps=eps)
    return norm("ada_layer_norm", input, normalized_shape, scale, shift, eps, zero_centered_weight=True)


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
    if has_override(input, normalized_shape, scale, shift, eps):
        return override(ada_rms_norm, input, normalized_shape, scale=scale, shift=shift, eps=eps)
    return norm("ada_rms_norm", input, normalized_shape, scale, shift, eps, rms=True, zero_centered_weight=True)


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

    A diffusion transformer computes this between its attention and its MLP, and between two blocks.
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
    if has_override(input, residual, normalized_shape, scale, shift, eps, gate):
        options = {"gate": gate, "inplace": inplace}
        arguments = input, residual, normalized_shape
        return override(add_ada_layer_norm, *arguments, scale=scale, shift=shift, eps=eps, **options)
    options = {"residual": residual, "input_scale": gate, "inplace": inplace}
    options |= {"zero_centered_weight": True}
    return norm("add_ada_layer_norm", input, normalized_shape, scale, shift, eps, **options)


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
    if has_override(input, residual, normalized_shape, scale, shift, eps, gate):
        options = {"gate": gate, "inplace": inplace}
        arguments = input, residual, normalized_shape
        return override(add_ada_rms_norm, *arguments, scale=scale, shift=shift, eps=eps, **options)
    options = {"residual": residual, "input_scale": gate, "inplace": inplace}
    options |= {"rms": True, "zero_centered_weight": True}
    return norm("add_ada_rms_norm", input, normalized_shape, scale, shift, eps, **options)


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

    ``f(z)`` is ``silu(z) = z / (1 + exp(-z))`` or ``sigmoid(z) = 1 / (1 + exp(-z))``. Nothing is rounded to 16 bits
    before the output, which is rounded once. Backward needs the input, the gate, the parameters and two numbers per
    row. Precision, determinism and derivatives are those of :func:`layer_norm`, except that the product ``u`` is
    rounded to float32 (float64 for float64 input): if its mean is ``m`` standard deviations, the output is off by up to
    ``6e-8 * m * |weight|``, for example by 6e-4 for ``m = 1e4``. Sources: Yang, Kautz and Hatamizadeh, `Gated
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
        num_groups: The number of groups of equal size into which the last dimension is divided. Each group is
            normalized separately; weight and bias have the size of the whole dimension.
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
    options: dict[str, Any] = {"gate_first": gate_first, "num_groups": num_groups}
    options |= {"zero_centered_weight": zero_centered_weight}
    if has_override(input, gate, normalized_shape, weight, bias, eps):
        arguments, options = (input, gate, normalized_shape), options | {"activation": activation}
        return override(gated_layer_norm, *arguments, weight=weight, bias=bias, eps=eps, **options)
    options |= {"gate": gate, "sigmoid": is_sigmoid(activation, input)}
    return norm("gated_layer_norm", input, normalized_shape, weight, bias, eps, **options)


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

    Arguments, results and errors are those of :func:`gated_layer_norm`, and the default of ``eps`` and the memory
    format of the output are those of :func:`rms_norm`. Sources: Yang, Kautz and Hatamizadeh, `Gated Delta Networks
    <https://arxiv.org/abs/2412.06464>`_, 2024; with ``gate_first``, Dao and Gu, `Transformers are SSMs
    <https://arxiv.org/abs/2405.21060>`_, 2024; Zhang and Sennrich, `Root Mean Square Layer Normalization
    <https://arxiv.org/abs/1910.07467>`_, 2019.

    Example:
        >>> x, gate = torch.randn(2, 3, 16).chunk(2, dim=-1)
        >>> gated_rms_norm(x, gate, (8,), torch.ones(8), gate_first=True, num_groups=2).shape
        torch.Size([2, 3, 8])
    """
    options: dict[str, Any] = {"gate_first": gate_first, "num_groups": num_groups}
    options |= {"zero_centered_weight": zero_centered_weight}
    if has_override(input, gate, normalized_shape, weight, eps):
        arguments, options = (input, gate, normalized_shape), options | {"activation": activation}
        return override(gated_rms_norm, *arguments, weight=weight, eps=eps, **options)
    eps = default_eps(input) if eps is None else eps
    options |= {"gate": gate, "sigmoid": is_sigmoid(activation, input), "rms": True}
    return norm("gated_rms_norm", input, normalized_shape, weight, None, eps, **options)


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
        weight: Tensor of any of these dtypes. Its shape is ``[C]`` or, for a weight per image, ``[N, C]`` or
            ``[N, C, 1, ...]``. Ones if ``None``.
        bias: Like ``weight``. Zeros if ``None``.
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
    options = {"zero_centered_weight": zero_centered_weight, "memory_efficient": memory_efficient}
    if has_override(input, weight, bias, eps):
        return override(layer_norm_2d, input, weight=weight, bias=bias, eps=eps, **options)
    return norm("layer_norm_2d", input, (), weight, bias, eps, images=True, **options)


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
    options = {"zero_centered_weight": zero_centered_weight}
    if has_override(input, weight, eps):
        return override(rms_norm_2d, input, weight=weight, eps=eps, **options)
    eps = default_eps(input) if eps is None else eps
    return norm("rms_norm_2d", input, (), weight, None, eps, rms=True, images=True, **options)
