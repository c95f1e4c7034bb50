"""The normalizations as modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from .functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = ["AddLayerNorm", "AddRMSNorm", "LayerNorm", "LazyLayerNorm", "RMSNorm"]

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
        zero_centered_weight: Whether to multiply by ``weight + 1``, with a weight that is zeros at first.
        memory_efficient: Whether training keeps the output for backward, which the next layer most often keeps anyway,
            instead of the input: nothing but one number a row is kept beside it.

    Shape:
        Input and output: ``[*, normalized_shape[0], ..., normalized_shape[-1]]``. ``weight`` (ones at first) and
        ``bias`` (zeros): ``normalized_shape``.

    Note:
        With ``memory_efficient``, backward recovers the normalized input as ``(output - bias) / weight``. It is then
        off by at most ``u * (|normalized input| + |bias / weight|)`` for the unit roundoff ``u`` of the input's dtype
        (2^-8 for bfloat16, 2^-11 for float16, 2^-24 for float32), by the error that :func:`layernorm_ext.layer_norm`
        allows divided by the weight, and for float16 by ``2^-25 / |weight|`` where the output is subnormal. A
        weight of magnitude below 2^-16 is too small to divide by, because float16 would keep no digit of the quotient:
        it gives NaN gradients, on every device. Nothing looks at the weights beforehand, so forward never waits for a
        GPU. There is no derivative of the backward pass.

    Example:
        >>> norm = LayerNorm(8)
        >>> norm(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    __constants__ = [*torch.nn.LayerNorm.__constants__, "zero_centered_weight", "memory_efficient"]
    zero_centered_weight = False
    memory_efficient = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_weight: bool = False,
        memory_efficient: bool = False,
    ):
        """Make the parameters."""
        self.zero_centered_weight = zero_centered_weight
        self.memory_efficient = memory_efficient
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Have the weight multiply by one, and the bias add zero."""
        super().reset_parameters()
        _centre(self)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``, of dtype float64, float32, float16 or bfloat16."""
        return layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            zero_centered_weight=self.zero_centered_weight,
            memory_efficient=self.memory_efficient,
        )

    def extra_repr(self) -> str:
        """Describe the module as torch does, and what torch's has not."""
        return super().extra_repr() + _describe(self, "zero_centered_weight", "memory_efficient")

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Rename what is known by another name, unless it is there by its own; what is left over is unexpected."""
        for name, aliases in _ALIASES.items():
            known = [prefix + alias for alias in aliases if prefix + alias in state_dict]
            if known and getattr(self, name) is not None and prefix + name not in state_dict:
                state_dict[prefix + name] = state_dict.pop(known[0])
        super()._load_from_state_dict(state_dict, prefix, *args)


class AddLayerNorm(LayerNorm):
    r"""Layer normalization of the sum with a residual, for pre-norm blocks: both in one pass.

    .. math::
        s = x + r \qquad y = \frac{s - \mathrm{E}[s]}{\sqrt{\mathrm{Var}[s] + \epsilon}} * \mathrm{weight} +
        \mathrm{bias}

    See :func:`layernorm_ext.add_layer_norm` for what is computed; parameters and ``state_dict`` are those of
    :class:`LayerNorm`. Source: Ba, Kiros and Hinton, `Layer Normalization <https://arxiv.org/abs/1607.06450>`_, 2016.

    Args:
        normalized_shape: Sizes of the last dimensions, over which to normalize; an int stands for one dimension.
        eps: Added to the variance.
        elementwise_affine: Whether there are parameters at all.
        bias: Whether there is a bias beside the weight.
        device: Device of the parameters.
        dtype: Dtype of the parameters: float64, float32, float16 or bfloat16.
        zero_centered_weight: Whether to multiply by ``weight + 1``, with a weight that is zeros at first.
        inplace: Whether to write the sum over the residual.

    Shape:
        Input, residual, output and sum: ``[*, normalized_shape[0], ..., normalized_shape[-1]]``.

    Example:
        >>> norm, attention = AddLayerNorm(8), torch.nn.Linear(8, 8)
        >>> x, residual = torch.randn(2, 3, 8), None
        >>> for _ in range(2):  # blocks
        ...     x, residual = norm(x, residual)
        ...     x = attention(x)
        >>> (x + residual).shape
        torch.Size([2, 3, 8])
    """

    __constants__ = [*LayerNorm.__constants__, "inplace"]
    inplace = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_weight: bool = False,
        inplace: bool = False,
    ):
        """Make the parameters."""
        self.inplace = inplace
        super().__init__(
            normalized_shape, eps, elementwise_affine, bias, device, dtype, zero_centered_weight=zero_centered_weight
        )

    def forward(self, input: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the normalized sum, and the sum; without a residual, as before the first block, that is ``input``."""
        if residual is None:
            return layer_norm(
                input,
                self.normalized_shape,
                self.weight,
                self.bias,
                self.eps,
                zero_centered_weight=self.zero_centered_weight,
            ), input
        return add_layer_norm(
            input,
            residual,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            zero_centered_weight=self.zero_centered_weight,
            inplace=self.inplace,
        )

    def extra_repr(self) -> str:
        """Describe the module."""
        return super().extra_repr() + _describe(self, "inplace")


class RMSNorm(torch.nn.RMSNorm):
    r"""Division by the root mean square over the last dimensions; drops in for :class:`torch.nn.RMSNorm`.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} * \mathrm{weight}

    Constructor, parameters, ``state_dict`` and ``repr`` are those of torch's, which it subclasses. See
    :func:`layernorm_ext.rms_norm` for what is computed. Source: Zhang and Sennrich, `Root Mean Square Layer
    Normalization <https://arxiv.org/abs/1910.07467>`_, 2019.

    Args:
        normalized_shape: Sizes of the last dimensions, over which to normalize; an int stands for one dimension.
        eps: Added to the mean square; if ``None``, as in :func:`layernorm_ext.rms_norm`.
        elementwise_affine: Whether there is a weight.
        device: Device of the weight.
        dtype: Dtype of the weight: float64, float32, float16 or bfloat16.
        zero_centered_weight: Whether to multiply by ``weight + 1``, with a weight that is zeros at first.

    Shape:
        Input and output: ``[*, normalized_shape[0], ..., normalized_shape[-1]]``. ``weight`` (ones at first):
        ``normalized_shape``.

    Example:
        >>> norm = RMSNorm(8)
        >>> norm(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    __constants__ = [*torch.nn.RMSNorm.__constants__, "zero_centered_weight"]
    zero_centered_weight = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_weight: bool = False,
    ):
        """Make the weight."""
        self.zero_centered_weight = zero_centered_weight
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """Have the weight multiply by one."""
        super().reset_parameters()
        _centre(self)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``, of dtype float64, float32, float16 or bfloat16."""
        return rms_norm(
            input, self.normalized_shape, self.weight, self.eps, zero_centered_weight=self.zero_centered_weight
        )

    def extra_repr(self) -> str:
        """Describe the module as torch does, and what torch's has not."""
        return super().extra_repr() + _describe(self, "zero_centered_weight")


class AddRMSNorm(RMSNorm):
    r"""Division of the sum with a residual by its root mean square, for pre-norm blocks: both in one pass.

    .. math::
        s = x + r \qquad y = \frac{s}{\sqrt{\mathrm{E}[s^2] + \epsilon}} * \mathrm{weight}

    What :class:`AddLayerNorm` is to :class:`LayerNorm`, to :class:`RMSNorm`. Source: Zhang and Sennrich, `Root Mean
    Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_, 2019.

    Args:
        normalized_shape: Sizes of the last dimensions, over which to normalize; an int stands for one dimension.
        eps: Added to the mean square; if ``None``, as in :func:`layernorm_ext.rms_norm`.
        elementwise_affine: Whether there is a weight.
        device: Device of the weight.
        dtype: Dtype of the weight: float64, float32, float16 or bfloat16.
        zero_centered_weight: Whether to multiply by ``weight + 1``, with a weight that is zeros at first.
        inplace: Whether to write the sum over the residual.

    Shape:
        Input, residual, output and sum: ``[*, normalized_shape[0], ..., normalized_shape[-1]]``.

    Example:
        >>> norm = AddRMSNorm(8)
        >>> output, residual = norm(torch.randn(2, 3, 8), torch.randn(2, 3, 8))
        >>> output.shape
        torch.Size([2, 3, 8])
    """

    __constants__ = [*RMSNorm.__constants__, "inplace"]
    inplace = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_weight: bool = False,
        inplace: bool = False,
    ):
        """Make the weight."""
        self.inplace = inplace
        super().__init__(
            normalized_shape, eps, elementwise_affine, device, dtype, zero_centered_weight=zero_centered_weight
        )

    def forward(self, input: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the normalized sum, and the sum; without a residual, as before the first block, that is ``input``."""
        if residual is None:
            return rms_norm(
                input, self.normalized_shape, self.weight, self.eps, zero_centered_weight=self.zero_centered_weight
            ), input
        return add_rms_norm(
            input,
            residual,
            self.normalized_shape,
            self.weight,
            self.eps,
            zero_centered_weight=self.zero_centered_weight,
            inplace=self.inplace,
        )

    def extra_repr(self) -> str:
        """Describe the module."""
        return super().extra_repr() + _describe(self, "inplace")


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
        zero_centered_weight: As in :class:`LayerNorm`.
        memory_efficient: As in :class:`LayerNorm`.

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
        *,
        zero_centered_weight: bool = False,
        memory_efficient: bool = False,
    ):
        """Prepare for inputs of at least so many dimensions."""
        if dimensions < 1:
            raise ValueError(f"Expected dimensions to be at least 1, but got dimensions={dimensions}")
        super().__init__(
            (0,) * dimensions,
            eps,
            elementwise_affine=False,
            zero_centered_weight=zero_centered_weight,
            memory_efficient=memory_efficient,
        )
        self.dimensions = dimensions
        self.elementwise_affine = elementwise_affine
        if elementwise_affine:
            self.weight = UninitializedParameter(device=device, dtype=dtype)
            self.bias = UninitializedParameter(device=device, dtype=dtype) if bias else None

    def reset_parameters(self) -> None:
        """Have the weight multiply by one and the bias add zero, once they are there."""
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
            + _describe(self, "zero_centered_weight", "memory_efficient")
        )


def _centre(module: LayerNorm | RMSNorm) -> None:
    """Make of a weight of ones what multiplies by one."""
    if module.zero_centered_weight and module.weight is not None:
        torch.nn.init.zeros_(module.weight)


def _describe(module: torch.nn.Module, *flags: str) -> str:
    return "".join(f", {flag}=True" for flag in flags if getattr(module, flag))
