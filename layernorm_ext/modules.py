"""Layer normalization as a module."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from .functional import layer_norm

__all__ = ["LayerNorm", "LazyLayerNorm"]

# What checkpoints from elsewhere call the parameters: TensorFlow's, tutorials', older BERTs'.
_ALIASES = {"weight": ("gamma", "gain"), "bias": ("beta",)}


class LayerNorm(torch.nn.LayerNorm):
    r"""Layer normalization over the last dimensions; drops in for :class:`torch.nn.LayerNorm`, which it subclasses.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \mathrm{weight} + \mathrm{bias}

    Constructor, parameters, ``state_dict`` and ``repr`` are torch's; ``load_state_dict`` also takes ``gamma`` or
    ``gain`` for ``weight``, and ``beta`` for ``bias``. See :func:`layernorm_ext.layer_norm` for what is computed, and
    with what precision. Source: Ba, Kiros and Hinton, `Layer Normalization
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

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Rename what is known by another name, unless it is there by its own; what is left over is unexpected."""
        for name, aliases in _ALIASES.items():
            known = [prefix + alias for alias in aliases if prefix + alias in state_dict]
            if known and getattr(self, name) is not None and prefix + name not in state_dict:
                state_dict[prefix + name] = state_dict.pop(known[0])
        super()._load_from_state_dict(state_dict, prefix, *args)


class LazyLayerNorm(LazyModuleMixin, LayerNorm):
    r"""A :class:`LayerNorm` that learns the sizes of the last dimensions from its first input, and then becomes one.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \mathrm{weight} + \mathrm{bias}

    As with torch's other lazy modules, the parameters are :class:`torch.nn.UninitializedParameter` until the first
    call, or until a ``state_dict`` is loaded. Source: Ba, Kiros and Hinton, `Layer Normalization
    <https://arxiv.org/abs/1607.06450>`_, 2016.

    Args:
        dimensions: How many of the last dimensions to normalize over.
        eps: Added to the variance.
        elementwise_affine: Whether there are parameters at all.
        bias: Whether there is a bias beside the weight.
        device: Device of the parameters.
        dtype: Dtype of the parameters: float64, float32, float16 or bfloat16.

    Raises:
        ValueError: ``dimensions`` is less than 1.
        RuntimeError: The first input has fewer dimensions.

    Example:
        >>> norm = LazyLayerNorm(dimensions=2)
        >>> norm(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
        >>> norm
        LayerNorm((3, 8), eps=1e-05, elementwise_affine=True, bias=True)
    """

    cls_to_become = LayerNorm

    def __init__(
        self,
        dimensions: int = 1,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        """Prepare for inputs of at least so many dimensions."""
        if dimensions < 1:
            raise ValueError(f"Expected dimensions to be at least 1, but got dimensions={dimensions}")
        super().__init__((0,) * dimensions, eps, elementwise_affine=False)
        self.dimensions = dimensions
        self.elementwise_affine = elementwise_affine
        if elementwise_affine:
            self.weight = UninitializedParameter(device=device, dtype=dtype)
            self.bias = UninitializedParameter(device=device, dtype=dtype) if bias else None

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros, once they are there."""
        if not self.has_uninitialized_params():
            super().reset_parameters()

    def initialize_parameters(self, input: Tensor) -> None:
        """Take the sizes from ``input``, unless a ``state_dict`` has brought parameters."""
        if input.dim() < self.dimensions:
            raise RuntimeError(
                f"Expected an input of at least dimensions={self.dimensions} dimensions, but got input of size"
                f"{list(input.shape)}"
            )
        self.normalized_shape = tuple(input.shape[-self.dimensions :])
        if self.has_uninitialized_params():
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.materialize(self.normalized_shape)
            self.reset_parameters()
        del self.dimensions

    def extra_repr(self) -> str:
        """Describe the module before it has become a LayerNorm."""
        bias = self.bias is not None
        return (
            f"dimensions={self.dimensions}, eps={self.eps}, elementwise_affine={self.elementwise_affine}, bias={bias}"
        )
