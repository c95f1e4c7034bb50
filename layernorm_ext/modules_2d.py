"""The normalizations over the channels of images, as modules."""

from numbers import Integral

import torch
from torch import Tensor

from .channels_first import (
    ada_layer_norm_2d,
    ada_rms_norm_2d,
    add_ada_layer_norm_2d,
    add_ada_rms_norm_2d,
    add_layer_norm_2d,
    add_rms_norm_2d,
    layer_norm_2d,
    rms_norm_2d,
)
from .modules import AddLayerNorm, AddRMSNorm, LayerNorm, RMSNorm, describe_options, to_fp32

__all__ = ["AdaLayerNorm2d", "AdaRMSNorm2d", "AddAdaLayerNorm2d", "AddAdaRMSNorm2d", "AddLayerNorm2d", "AddRMSNorm2d"]
__all__ += ["LayerNorm2d", "RMSNorm2d"]

torch.fx.wrap("to_fp32")


class LayerNorm2d(LayerNorm):
    r"""Layer normalization over the channels of images, as in ConvNeXt.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \mathrm{weight} + \mathrm{bias}

    :func:`layernorm_ext.layer_norm_2d` describes results, precision and errors. Parameters, ``state_dict`` and the
    arguments not listed here are those of :class:`LayerNorm`. Sources: Ba, Kiros and Hinton, `Layer Normalization
    <https://arxiv.org/abs/1607.06450>`_, 2016; Liu et al., `A ConvNet for the 2020s
    <https://arxiv.org/abs/2201.03545>`_, 2022.

    Args:
        num_channels: The number of channels ``C``.

    Shape:
        Input and output: ``[N, C, *]``. ``weight`` (initially ones) and ``bias`` (initially zeros): ``[C]``.

    Example:
        >>> norm = LayerNorm2d(8)
        >>> norm(torch.randn(2, 8, 4, 4)).shape
        torch.Size([2, 8, 4, 4])
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_weight: bool = False,
        memory_efficient: bool = False,
    ):
        """Create the parameters."""
        options = {"zero_centered_weight": zero_centered_weight, "memory_efficient": memory_efficient}
        super().__init__(_checked(num_channels), eps, elementwise_affine, bias, device, dtype, **options)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``, of dtype float64, float32, float16 or bfloat16."""
        _check_channels(input, self.normalized_shape[0])
        return layer_norm_2d(
            input,
            self.weight,
            self.bias,
            self.eps,
            zero_centered_weight=self.zero_centered_weight,
            memory_efficient=self.memory_efficient,
        )


class RMSNorm2d(RMSNorm):
    r"""Division by the root mean square over the channels of images.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} * \mathrm{weight}

    :func:`layernorm_ext.rms_norm_2d` describes results, precision and errors. ``num_channels`` and the shapes are those
    of :class:`LayerNorm2d`, the other arguments and the ``state_dict`` those of :class:`RMSNorm`. Source: Zhang and
    Sennrich, `Root Mean Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_, 2019.
    """

    def __init__(
        self,
        num_channels: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_weight: bool = False,
    ):
        """Create the weight."""
        options = {"zero_centered_weight": zero_centered_weight}
        super().__init__(_checked(num_channels), eps, elementwise_affine, device, dtype, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``, of dtype float64, float32, float16 or bfloat16."""
        _check_channels(x, self.normalized_shape[0])
        return rms_norm_2d(x, self.weight, self.eps, zero_centered_weight=self.zero_centered_weight)


class AddLayerNorm2d(AddLayerNorm):
    r"""Layer normalization of the sum with a residual over the channels of images: both in one pass over memory.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s - \mathrm{E}[s]}{\sqrt{\mathrm{Var}[s] + \epsilon}} *
        \mathrm{weight} + \mathrm{bias}

    :func:`layernorm_ext.add_layer_norm_2d` describes results, precision and errors. ``num_channels`` and the shapes are
    those of :class:`LayerNorm2d`, the other arguments and the ``state_dict`` those of :class:`AddLayerNorm`. Source:
    Ba, Kiros and Hinton, `Layer Normalization <https://arxiv.org/abs/1607.06450>`_, 2016.
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_weight: bool = False,
        inplace: bool = False,
        residual_in_fp32: bool = False,
    ):
        """Create the parameters."""
        options = {
            "zero_centered_weight": zero_centered_weight,
            "inplace": inplace,
            "residual_in_fp32": residual_in_fp32,
        }
        super().__init__(_checked(num_channels), eps, elementwise_affine, bias, device, dtype, **options)

    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor | None = None, gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the normalized sum, and the sum, as :meth:`AddLayerNorm.forward` does."""
        _check_channels(input, self.normalized_shape[0])
        weight, bias, eps, zero_centered = self.weight, self.bias, self.eps, self.zero_centered_weight
        if residual is None:
            total = to_fp32(input) if self.residual_in_fp32 else input
            if gate is None:
                return layer_norm_2d(input, weight, bias, eps, zero_centered_weight=zero_centered), total
            residual = torch.zeros_like(total)
        return add_layer_norm_2d(
            input, residual, weight, bias, eps, gate=gate, zero_centered_weight=zero_centered, inplace=self.inplace
        )


class AddRMSNorm2d(AddRMSNorm):
    r"""Division of the sum with a residual by its root mean square over the channels of images: both in one pass.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s}{\sqrt{\mathrm{E}[s^2] + \epsilon}} * \mathrm{weight}

    :func:`layernorm_ext.add_rms_norm_2d` describes results, precision and errors. ``num_channels`` and the shapes are
    those of :class:`LayerNorm2d`, the other arguments and the ``state_dict`` those of :class:`AddRMSNorm`. Source:
    Zhang and Sennrich, `Root Mean Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_, 2019.
    """

    def __init__(
        self,
        num_channels: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_weight: bool = False,
        inplace: bool = False,
        residual_in_fp32: bool = False,
    ):
        """Create the weight."""
        options = {
            "zero_centered_weight": zero_centered_weight,
            "inplace": inplace,
            "residual_in_fp32": residual_in_fp32,
        }
        super().__init__(_checked(num_channels), eps, elementwise_affine, device, dtype, **options)

    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor | None = None, gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the normalized sum, and the sum, as :meth:`AddLayerNorm.forward` does."""
        _check_channels(input, self.normalized_shape[0])
        weight, eps, zero_centered = self.weight, self.eps, self.zero_centered_weight
        if residual is None:
            total = to_fp32(input) if self.residual_in_fp32 else input
            if gate is None:
                return rms_norm_2d(input, weight, eps, zero_centered_weight=zero_centered), total
            residual = torch.zeros_like(total)
        return add_rms_norm_2d(
            input, residual, weight, eps, gate=gate, zero_centered_weight=zero_centered, inplace=self.inplace
        )


class AdaLayerNorm2d(torch.nn.Module):
    r"""Layer normalization over the channels of images, with a scale and a shift per image.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * (1 + \mathrm{scale}) + \mathrm{shift}

    :func:`layernorm_ext.ada_layer_norm_2d` describes results and errors. The module has no parameters. Source: Peebles
    and Xie, `Scalable Diffusion Models with Transformers <https://arxiv.org/abs/2212.09748>`_, 2022.

    Args:
        num_channels: The number of channels ``C``.
        eps: Added to the variance.

    Shape:
        Input and output: ``[N, C, *]``. Scale and shift: ``[N, C]``, or as in the function.

    Example:
        >>> norm, condition = AdaLayerNorm2d(8), torch.nn.Linear(5, 16)
        >>> scale, shift = condition(torch.randn(2, 5)).chunk(2, 1)
        >>> norm(torch.randn(2, 8, 4, 4), scale, shift).shape
        torch.Size([2, 8, 4, 4])
    """

    __constants__ = ["num_channels", "eps"]

    def __init__(self, num_channels: int, eps: float = 1e-6):
        """Store the number of channels, to check inputs, and eps."""
        super().__init__()
        self.num_channels = _checked(num_channels)
        self.eps = eps

    def forward(self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """Normalize ``input`` and apply scale and shift."""
        _check_channels(input, self.num_channels)
        return ada_layer_norm_2d(input, scale, shift, self.eps)

    def extra_repr(self) -> str:
        """Return the arguments of the constructor."""
        return f"{self.num_channels}, eps={self.eps}{describe_options(self)}"


class AdaRMSNorm2d(AdaLayerNorm2d):
    r"""Division by the root mean square over the channels of images, with a scale and a shift per image.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} * (1 + \mathrm{scale}) + \mathrm{shift}

    :func:`layernorm_ext.ada_rms_norm_2d` describes results and errors. Arguments and shapes are those of
    :class:`AdaLayerNorm2d`. Source: Zhang and Sennrich, `Root Mean Square Layer Normalization
    <https://arxiv.org/abs/1910.07467>`_, 2019.
    """

    def forward(self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """Normalize ``input`` and apply scale and shift."""
        _check_channels(input, self.num_channels)
        return ada_rms_norm_2d(input, scale, shift, self.eps)


class AddAdaLayerNorm2d(AdaLayerNorm2d):
    r"""Layer normalization of the sum of gated images and a residual over the channels; scale and shift are inputs.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s - \mathrm{E}[s]}{\sqrt{\mathrm{Var}[s] + \epsilon}} *
        (1 + \mathrm{scale}) + \mathrm{shift}

    :func:`layernorm_ext.add_ada_layer_norm_2d` describes results and errors. The module has no parameters. Source:
    Peebles and Xie, `Scalable Diffusion Models with Transformers <https://arxiv.org/abs/2212.09748>`_, 2022.

    Args:
        num_channels: The number of channels ``C``.
        eps: Added to the variance.
        inplace: Whether to overwrite the residual with the sum.

    Shape:
        Input, residual, output and sum: ``[N, C, *]``. Scale, shift and gate: ``[N, C]``, or as in the function.

    Example:
        >>> norm, condition = AddAdaLayerNorm2d(8), torch.nn.Linear(5, 24)
        >>> scale, shift, gate = condition(torch.randn(2, 5)).chunk(3, 1)
        >>> output, residual = norm(torch.randn(2, 8, 4, 4), torch.randn(2, 8, 4, 4), scale, shift, gate)
        >>> output.shape
        torch.Size([2, 8, 4, 4])
    """

    __constants__ = [*AdaLayerNorm2d.__constants__, "inplace"]

    def __init__(self, num_channels: int, eps: float = 1e-6, *, inplace: bool = False):
        """Store the arguments."""
        super().__init__(num_channels, eps)
        self.inplace = inplace

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        residual: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the normalized sum, multiplied by ``1 + scale`` and shifted, and the sum."""
        _check_channels(input, self.num_channels)
        return add_ada_layer_norm_2d(input, residual, scale, shift, self.eps, gate=gate, inplace=self.inplace)


class AddAdaRMSNorm2d(AddAdaLayerNorm2d):
    r"""Division of the sum of gated images and a residual by the root mean square of the channels.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s}{\sqrt{\mathrm{E}[s^2] + \epsilon}} * (1 + \mathrm{scale}) +
        \mathrm{shift}

    :func:`layernorm_ext.add_ada_rms_norm_2d` describes results and errors. Arguments and shapes are those of
    :class:`AddAdaLayerNorm2d`. Source: Zhang and Sennrich, `Root Mean Square Layer Normalization
    <https://arxiv.org/abs/1910.07467>`_, 2019.
    """

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        residual: Tensor,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the divided sum, multiplied by ``1 + scale`` and shifted, and the sum."""
        _check_channels(input, self.num_channels)
        return add_ada_rms_norm_2d(input, residual, scale, shift, self.eps, gate=gate, inplace=self.inplace)


def _checked(num_channels: int) -> int:
    if not isinstance(num_channels, Integral):
        raise TypeError(f"Expected num_channels to be an int, but got num_channels={num_channels!r}")
    return num_channels


def _check_channels(input: Tensor, num_channels: int) -> None:
    # torch.fx passes a proxy, which control flow must not depend on.
    if isinstance(input, Tensor) and input.dim() >= 2 and input.size(1) != num_channels:
        raise RuntimeError(f"Expected input of shape [N, {num_channels}, *], but got input of size{list(input.shape)}")
