"""The normalizations over the channels of images, as modules."""

from numbers import Integral

import torch
from torch import Tensor
from torch.jit import is_scripting

from .functional import layer_norm_2d, rms_norm_2d
from .modules import LayerNorm, RMSNorm, factor_of

__all__ = ["LayerNorm2d", "RMSNorm2d"]


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
        if is_scripting():
            weight, rows = factor_of(self.weight, self.zero_centered_weight), input.movedim(1, -1)
            return torch.nn.functional.layer_norm(rows, self.normalized_shape, weight, self.bias, self.eps).movedim(
                -1, 1
            )
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
        if is_scripting():
            weight, rows = factor_of(self.weight, self.zero_centered_weight), x.movedim(1, -1)
            return torch.nn.functional.rms_norm(rows, self.normalized_shape, weight, self.eps).movedim(-1, 1)
        _check_channels(x, self.normalized_shape[0])
        return rms_norm_2d(x, self.weight, self.eps, zero_centered_weight=self.zero_centered_weight)


def _checked(num_channels: int) -> int:
    if not isinstance(num_channels, Integral):
        raise TypeError(f"Expected num_channels to be an int, but got num_channels={num_channels!r}")
    return num_channels


def _check_channels(input: Tensor, num_channels: int) -> None:
    # torch.fx passes a proxy, which control flow must not depend on.
    if isinstance(input, Tensor) and input.dim() >= 2 and input.size(1) != num_channels:
        raise RuntimeError(f"Expected input of shape [N, {num_channels}, *], but got input of size{list(input.shape)}")
