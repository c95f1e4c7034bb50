"""The normalizations of one input, as modules.

This file has no ``from __future__ import annotations``: torch.fx copies annotations to its graphs, and pickle cannot
save graphs whose annotations are strings.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.jit import is_scripting
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

from .functional import layer_norm, layer_norm_2d, rms_norm, rms_norm_2d
from .tracing import constant_sizes

__all__ = ["LayerNorm", "LayerNorm2d", "LazyLayerNorm", "RMSNorm", "RMSNorm2d"]

# The options that torch's layers lack, with their defaults.
_OPTIONS: dict[str, Any] = {
    "zero_centered_weight": False,
    "memory_efficient": False,
    "inplace": False,
    "residual_in_fp32": False,
    "activation": "silu",
    "gate_first": False,
    "num_groups": 1,
}

# Parameter names in checkpoints of TensorFlow, of tutorials and of old BERT models.
_ALIASES = {"weight": ("gamma", "gain"), "bias": ("beta",)}


def options_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the options of a module that are not the defaults."""
    values = {option: getattr(module, option, default) for option, default in _OPTIONS.items()}
    return {option: value for option, value in values.items() if value != _OPTIONS[option]}


def describe_options(module: torch.nn.Module) -> str:
    """Return the options of a module that are not the defaults, for its description."""
    return "".join(f", {option}={value!r}" for option, value in options_of(module).items())


def _weight_for_torch(weight: Tensor | None, zero_centered: bool) -> Tensor | None:
    """Return the weight that torch's functions need for the same output, for torch.jit.script."""
    return weight + 1 if zero_centered and weight is not None else weight


class _Options(torch.nn.Module):
    """The methods of LayerNorm and RMSNorm that depend on options that torch's layers lack."""

    zero_centered_weight = False

    def reset_parameters(self: Any) -> None:
        """Reset the parameters to the identity transform."""
        super().reset_parameters()  # type: ignore[misc]
        if self.zero_centered_weight and self.weight is not None:
            torch.nn.init.zeros_(self.weight)

    def extra_repr(self) -> str:
        """Return torch's description, followed by this package's options that are set."""
        return super().extra_repr() + describe_options(self)


class LayerNorm(_Options, torch.nn.LayerNorm):
    r"""Layer normalization over the last dimensions; a drop-in subclass of :class:`torch.nn.LayerNorm`.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \mathrm{weight} + \mathrm{bias}

    :func:`layernorm_ext.layer_norm` describes results, precision and errors. Constructor, parameters, ``state_dict``
    and ``repr`` are torch's. ``load_state_dict`` also accepts ``gamma`` or ``gain`` for ``weight``, and ``beta`` for
    ``bias``. Source: Ba, Kiros and Hinton, `Layer Normalization <https://arxiv.org/abs/1607.06450>`_, 2016.

    Args:
        normalized_shape: Sizes of the last dimensions, over which to normalize; an int is the size of one dimension.
        eps: Added to the variance.
        elementwise_affine: Whether the layer has parameters.
        bias: Whether the layer has a bias in addition to the weight.
        device: Device of the parameters.
        dtype: Dtype of the parameters: float64, float32, float16 or bfloat16.
        zero_centered_weight: Whether to multiply by ``weight + 1``, with weights that are initially zeros.
        memory_efficient: Whether to save the output for backward instead of the input. Most next layers save this
            output anyway, so that the norm only adds one number per row.

    Shape:
        Input and output: ``[*, normalized_shape[0], ..., normalized_shape[-1]]``. ``weight`` (initially ones) and
        ``bias`` (initially zeros): ``normalized_shape``.

    Note:
        With ``memory_efficient``, backward computes the normalized input as ``(output - bias) / weight``. Its error is
        at most ``u * (|normalized input| + |bias / weight|)``, where ``u`` is the unit roundoff of the input's dtype
        (2^-8 for bfloat16, 2^-11 for float16, 2^-24 for float32), plus the error bound of
        :func:`layernorm_ext.layer_norm` divided by the weight, plus ``2^-25 / |weight|`` where a float16 output is
        subnormal. A weight of magnitude below 2^-16 gives NaN gradients on every device, because a float16 quotient
        would have no correct digit. Forward does not check the weights, since this would wait for the GPU. The
        backward pass is not differentiable.

    Example:
        >>> norm = LayerNorm(8)
        >>> norm(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    __constants__ = [*torch.nn.LayerNorm.__constants__, "zero_centered_weight", "memory_efficient"]
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
        """Create the parameters."""
        # Before super().__init__(), whose reset_parameters() reads zero_centered_weight.
        self.zero_centered_weight = zero_centered_weight
        self.memory_efficient = memory_efficient
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``, of dtype float64, float32, float16 or bfloat16."""
        if is_scripting():
            weight = _weight_for_torch(self.weight, self.zero_centered_weight)
            return torch.nn.functional.layer_norm(input, self.normalized_shape, weight, self.bias, self.eps)
        return layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            zero_centered_weight=self.zero_centered_weight,
            memory_efficient=self.memory_efficient,
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Rename aliases in the state, unless it also has the parameter's own name; the alias is then unexpected.

        The name of a parameter or buffer that a subclass adds is no alias.
        """
        own = self._parameters.keys() | self._buffers.keys()
        for name, aliases in _ALIASES.items():
            found = [prefix + alias for alias in aliases if alias not in own and prefix + alias in state_dict]
            if found and getattr(self, name) is not None and prefix + name not in state_dict:
                state_dict[prefix + name] = state_dict.pop(found[0])
        super()._load_from_state_dict(state_dict, prefix, *args)


class RMSNorm(_Options, torch.nn.RMSNorm):
    r"""Division by the root mean square over the last dimensions; a drop-in subclass of :class:`torch.nn.RMSNorm`.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} * \mathrm{weight}

    :func:`layernorm_ext.rms_norm` describes results, precision, errors and the default of ``eps``. Constructor,
    parameters, ``state_dict`` and ``repr`` are torch's. The arguments, the shapes and the initial weights are those of
    :class:`LayerNorm`. Source: Zhang and Sennrich, `Root Mean Square Layer Normalization
    <https://arxiv.org/abs/1910.07467>`_, 2019.
    """

    __constants__ = [*torch.nn.RMSNorm.__constants__, "zero_centered_weight"]

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
        """Create the weight."""
        self.zero_centered_weight = zero_centered_weight
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``, named as in torch, of dtype float64, float32, float16 or bfloat16."""
        if is_scripting():
            weight = _weight_for_torch(self.weight, self.zero_centered_weight)
            return torch.nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, zero_centered_weight=self.zero_centered_weight)


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
        super().__init__(_checked_num_channels(num_channels), eps, elementwise_affine, bias, device, dtype, **options)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``, of dtype float64, float32, float16 or bfloat16."""
        if is_scripting():
            weight, rows = _weight_for_torch(self.weight, self.zero_centered_weight), input.movedim(1, -1)
            rows = torch.nn.functional.layer_norm(rows, self.normalized_shape, weight, self.bias, self.eps)
            return _images_like(input, rows)
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
        super().__init__(_checked_num_channels(num_channels), eps, elementwise_affine, device, dtype, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``, of dtype float64, float32, float16 or bfloat16."""
        if is_scripting():
            weight, rows = _weight_for_torch(self.weight, self.zero_centered_weight), x.movedim(1, -1)
            return _images_like(x, torch.nn.functional.rms_norm(rows, self.normalized_shape, weight, self.eps))
        _check_channels(x, self.normalized_shape[0])
        return rms_norm_2d(x, self.weight, self.eps, zero_centered_weight=self.zero_centered_weight)


def _checked_num_channels(num_channels: int) -> int:
    if not isinstance(num_channels, Integral):
        raise TypeError(f"Expected num_channels to be an int, but got num_channels={num_channels!r}")
    return num_channels


def _images_like(input: Tensor, rows: Tensor) -> Tensor:
    """Return normalized rows as images with the strides of ``torch.empty_like(input)``, for torch.jit.script."""
    images = rows.movedim(-1, 1)
    if input.movedim(1, -1).is_contiguous():
        return images
    return torch.empty_like(input, dtype=rows.dtype).copy_(images)


def _check_channels(input: Tensor, num_channels: int) -> None:
    # The proxies of torch.fx have no sizes to compare.
    if isinstance(input, Tensor) and input.dim() >= 2 and constant_sizes([input.size(1)]) != [num_channels]:
        raise RuntimeError(f"Expected input of shape [N, {num_channels}, *], but got input of size{list(input.shape)}")


class LazyLayerNorm(LazyModuleMixin, LayerNorm):
    r"""A :class:`LayerNorm` that takes ``normalized_shape`` from its first input and then becomes a :class:`LayerNorm`.

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \mathrm{weight} + \mathrm{bias}

    As in torch's lazy modules, the parameters are :class:`torch.nn.UninitializedParameter` until the first call, or
    until a ``state_dict`` is loaded. The arguments not listed here are those of :class:`LayerNorm`. Source: Ba, Kiros
    and Hinton, `Layer Normalization <https://arxiv.org/abs/1607.06450>`_, 2016.

    Args:
        dimensions: The number of last dimensions to normalize over.

    Raises:
        ValueError: ``dimensions`` is less than 1.
        RuntimeError: The first input has fewer dimensions.

    Example:
        >>> norm = LazyLayerNorm(dimensions=2)
        >>> norm(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
        >>> type(norm).__name__, norm.normalized_shape
        ('LayerNorm', (3, 8))
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
        """Create uninitialized parameters."""
        if dimensions < 1:
            raise ValueError(f"Expected dimensions to be at least 1, but got dimensions={dimensions}")
        options = {"zero_centered_weight": zero_centered_weight, "memory_efficient": memory_efficient}
        super().__init__((0,) * dimensions, eps, elementwise_affine=False, **options)
        self.dimensions = dimensions
        self.elementwise_affine = elementwise_affine
        uninitialized: Any = UninitializedParameter  # torch's type stub lacks its arguments
        if elementwise_affine:
            self.weight = uninitialized(device=device, dtype=dtype)
            if bias:
                self.bias = uninitialized(device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Reset weight and bias to the identity transform, if they are initialized."""
        if not self.has_uninitialized_params():
            super().reset_parameters()

    def initialize_parameters(self, input: Tensor) -> None:
        """Take ``normalized_shape`` from ``input``; create the parameters that no ``state_dict`` has set."""
        if input.dim() < self.dimensions:
            raise RuntimeError(
                f"Expected an input of at least dimensions={self.dimensions} dimensions, but got input of size"
                f"{list(input.shape)}"
            )
        shape = tuple(input.shape[-self.dimensions :])
        loaded = {n: p.clone() for n, p in self.named_parameters() if not isinstance(p, UninitializedParameter)}
        for name, value in loaded.items():
            if value.shape != shape:
                raise RuntimeError(
                    f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape "
                    f"{list(value.shape)} and normalized_shape = {list(shape)}"
                )
        self.normalized_shape = shape
        if self.has_uninitialized_params():
            with torch.no_grad():
                for parameter in self.parameters():
                    if isinstance(parameter, UninitializedParameter):
                        parameter.materialize(shape)
                self.reset_parameters()
                for name, value in loaded.items():
                    self.get_parameter(name).copy_(value)
        del self.dimensions

    def extra_repr(self) -> str:
        """Describe the module before it has become a LayerNorm."""
        bias = self.bias is not None
        options = f"elementwise_affine={self.elementwise_affine}, bias={bias}{describe_options(self)}"
        return f"dimensions={self.dimensions}, eps={self.eps}, {options}"
