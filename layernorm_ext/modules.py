"""Layer normalization as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from .functional import layer_norm

__all__ = ["LayerNorm"]


class LayerNorm(torch.nn.LayerNorm):
    r"""Layer normalization over the last dimensions; drops in for :class:`torch.nn.LayerNorm`, which it subclasses.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \mathrm{weight} + \mathrm{bias}

    Constructor, parameters, ``state_dict`` and ``repr`` are torch's; see :func:`layernorm_ext.layer_norm` for what is
    computed, and with what precision. Source: Ba, Kiros and Hinton, `Layer Normalization
    <https://arxiv.org/abs/1607.06450>`_, 2016.

    Args:
        normalized_shape: Sizes of the last dimensions, over which to normalize; an int stands for one dimension.
        eps: Added to the variance.
        elementwise_affine: Whether there are parameters at all.
        bias: Whether there is a bias beside the weight.
        device: Device of the parameters.
        dtype: Dtype of the parameters: float64, float32, float16 or bfloat16.

    Shape:
        Input and output: ``[*, normalized_shape[0], ..., normalized_shape[-1]]``. ``weight`` (ones at first) and
        ``bias`` (zeros): ``normalized_shape``.

    Example:
        >>> norm = LayerNorm(8)
        >>> norm(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``, of dtype float64, float32, float16 or bfloat16."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
