"""Layer normalization over the channels of images: the functional form and the module."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import _script, tracing
from ._ops import _C
from .modules import LayerNorm

__all__ = ["LayerNorm2d", "layer_norm_2d"]


def layer_norm_2d(input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    r"""Normalize each pixel of images over its channels, as ConvNeXt does.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \mathrm{weight} + \mathrm{bias}

    Mean and (biased) variance are taken over the dimension ``C``. The result equals :func:`layernorm_ext.layer_norm`
    of ``input.permute(0, 2, 3, 1)``, permuted back. Sources: Ba, Kiros and Hinton,
    `Layer Normalization <https://arxiv.org/abs/1607.06450>`_, 2016; Liu et al., `A ConvNet for the 2020s
    <https://arxiv.org/abs/2201.03545>`_, 2022.

    Args:
        input: Tensor of shape ``[N, C, H, W]`` and dtype float64, float32, float16 or bfloat16. Channels may have any
            stride if the pixels of a channel are contiguous; ``channels_last`` is read in place, and other layouts are
            copied.
        weight: Tensor of shape ``[C]`` and any of these dtypes. Ones if ``None``.
        bias: Like ``weight``. Zeros if ``None``.
        eps: Added to the variance.

    Returns:
        A tensor of the shape, dtype and memory format of ``input``: ``torch.channels_last`` if the strides of ``input``
        have that order (as in a slice of a ``channels_last`` tensor), else contiguous. The gradient of ``input`` has
        the same memory format.

    Raises:
        RuntimeError: A shape, dtype or device does not fit; the message names the argument and both values.
        NotImplementedError: The dtype of ``input`` is not supported.

    Note:
        Precision, determinism, derivatives and dtypes of gradients are those of :func:`layernorm_ext.layer_norm`. The
        last bits also depend on the memory format.

    Example:
        >>> x = torch.randn(2, 8, 4, 4)
        >>> layer_norm_2d(x, torch.ones(8), torch.zeros(8)).shape
        torch.Size([2, 8, 4, 4])
    """
    if has_torch_function_variadic(input, weight, bias):
        return handle_torch_function(layer_norm_2d, (input, weight, bias), input, weight=weight, bias=bias, eps=eps)
    if input.dim() != 4:
        raise RuntimeError(f"Expected input of shape [N, C, H, W], but got input of size{list(input.shape)}")
    if not torch.compiler.is_dynamo_compiling():
        output = _C.layer_norm_2d(input, weight, bias, eps)
        if output is not None:
            return output
    if tracing.records_aten():
        return tracing.layer_norm_2d(input, weight, bias, eps)
    torch.ops.layernorm.check_images(input, weight, bias)
    rows = input.permute(0, 2, 3, 1)
    output = torch.ops.layernorm.forward(rows, rows.shape[-1:], weight, bias, eps, preserve_layout=True)[0]
    return output.permute(0, 3, 1, 2)


vars(layer_norm_2d)["__prepare_scriptable__"] = lambda: _script.layer_norm_2d  # torch.jit.script compiles this instead


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
        Input and output: ``[N, C, H, W]``. ``weight`` (initially ones) and ``bias`` (initially zeros): ``[C]``.

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
    ):
        """Create the parameters."""
        super().__init__(num_channels, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``, of dtype float64, float32, float16 or bfloat16."""
        # torch.fx passes a proxy, which control flow must not depend on.
        if isinstance(input, Tensor) and input.dim() == 4 and input.size(1) != self.normalized_shape[0]:
            raise RuntimeError(
                f"Expected input of shape [N, {self.normalized_shape[0]}, H, W], but got input of size"
                f"{list(input.shape)}"
            )
        return layer_norm_2d(input, self.weight, self.bias, self.eps)
