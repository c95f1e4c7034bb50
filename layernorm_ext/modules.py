"""The normalizations as modules.

Files with modules evaluate annotations: torch.fx copies them to its graphs, which pickle cannot save with strings.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.jit import is_scripting
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from ._calls import gate_options_error, is_integer
from .functional import add_layer_norm, add_rms_norm, gated_layer_norm, gated_rms_norm, layer_norm, rms_norm

__all__ = ["AddLayerNorm", "AddRMSNorm", "GatedLayerNorm", "GatedRMSNorm", "LayerNorm", "LazyLayerNorm", "RMSNorm"]

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


@torch.fx.wrap  # symbolic tracing knows no dtypes
def to_fp32(input: Tensor) -> Tensor:
    """Convert 16-bit numbers to float32."""
    return input if input.dtype == torch.float64 else input.float()


def describe_options(module: torch.nn.Module) -> str:
    """Return the options of a module that are not the defaults, for its description."""
    values = {option: getattr(module, option, default) for option, default in _OPTIONS.items()}
    return "".join(f", {option}={value!r}" for option, value in values.items() if value != _OPTIONS[option])


def factor_of(weight: Tensor | None, zero_centered: bool) -> Tensor | None:
    """Return the factor that torch's functions take, for torch.jit.script."""
    return weight + 1 if zero_centered and weight is not None else weight


class TakesSeveralInputs(torch.nn.Module):
    """A module whose first input is not its only one.

    torch's SequenceParallel replaces all inputs by the first one, which is silently wrong where the others have
    defaults. This refuses the call instead.
    """

    def register_forward_pre_hook(self, hook: Any, **options: bool) -> RemovableHandle:
        """Check the results of the hooks of torch.distributed."""
        if is_of_parallel_style(hook) and not options.get("with_kwargs"):
            hook = partial(_checked_inputs, hook)
        return super().register_forward_pre_hook(hook, **options)


def is_of_parallel_style(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def _checked_inputs(hook: Any, module: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Return the inputs that a hook gives a module, which it may not leave out."""
    results = hook(module, inputs)
    if len(inputs) > 1 and results is not None and not isinstance(results, tuple):
        raise RuntimeError(
            f"Expected all inputs of {type(module).__name__} to be distributed, but got one of {len(inputs)}, as from "
            "SequenceParallel; use PrepareModuleInput and distribute_module, as docs/pytorch.md of layernorm_ext says"
        )
    return results


class _Options(torch.nn.Module):
    """The part of LayerNorm and RMSNorm that depends on the options that torch's layers lack."""

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
        self.zero_centered_weight = zero_centered_weight
        self.memory_efficient = memory_efficient
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``, of dtype float64, float32, float16 or bfloat16."""
        if is_scripting():
            weight = factor_of(self.weight, self.zero_centered_weight)
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
        """Rename aliases, unless the parameter also has its own name; the alias is then an unexpected key.

        The name of a subclass's own parameter or buffer is no alias.
        """
        own = self._parameters.keys() | self._buffers.keys()
        for name, aliases in _ALIASES.items():
            found = [prefix + alias for alias in aliases if alias not in own and prefix + alias in state_dict]
            if found and getattr(self, name) is not None and prefix + name not in state_dict:
                state_dict[prefix + name] = state_dict.pop(found[0])
        super()._load_from_state_dict(state_dict, prefix, *args)


class AddLayerNorm(TakesSeveralInputs, LayerNorm):
    r"""Layer normalization of the sum with a residual, for pre-norm blocks: both in one pass over memory.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s - \mathrm{E}[s]}{\sqrt{\mathrm{Var}[s] + \epsilon}} *
        \mathrm{weight} + \mathrm{bias}

    :func:`layernorm_ext.add_layer_norm` describes results, precision and errors. Parameters, ``state_dict`` and the
    arguments not listed here are those of :class:`LayerNorm`. Source: Ba, Kiros and Hinton, `Layer Normalization
    <https://arxiv.org/abs/1607.06450>`_, 2016.

    Args:
        inplace: Whether to overwrite the residual with the sum. A chain of such modules cannot be trained, see
            :func:`layernorm_ext.add_layer_norm`. Without a residual, the sum is ``input`` itself, unless
            ``residual_in_fp32`` converts it, so that the next block overwrites the caller's tensor.
        residual_in_fp32: Whether the sum is float32 without a residual, as in a first block. The following blocks then
            have a float32 residual, in which no digit of a float16 or bfloat16 input is lost.

    Shape:
        Input, residual, output and sum: ``[*, normalized_shape[0], ..., normalized_shape[-1]]``. Gate: ``[*batch,
        normalized_shape[0], ..., normalized_shape[-1]]``, for example ``[B, N]`` for an input ``[B, S, N]``.

    Example:
        >>> norm, attention = AddLayerNorm(8), torch.nn.Linear(8, 8)
        >>> x, residual = torch.randn(2, 3, 8), None
        >>> for _ in range(2):  # blocks
        ...     x, residual = norm(x, residual)
        ...     x = attention(x)
        >>> (x + residual).shape
        torch.Size([2, 3, 8])
    """

    __constants__ = [*LayerNorm.__constants__, "inplace", "residual_in_fp32"]

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
        residual_in_fp32: bool = False,
    ):
        """Create the parameters."""
        super().__init__(
            normalized_shape, eps, elementwise_affine, bias, device, dtype, zero_centered_weight=zero_centered_weight
        )
        self.inplace = inplace
        self.residual_in_fp32 = residual_in_fp32

    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor | None = None, gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the normalized sum, and the sum; without a residual, as in a first block, the sum is ``input``.

        It is ``input.float()`` with ``residual_in_fp32``, unless ``input`` is float64. A gate without a residual gates
        the input beside a residual of zeros, whose dtype is that of the sum.
        """
        shape, weight, bias, eps = self.normalized_shape, self.weight, self.bias, self.eps
        zero_centered = self.zero_centered_weight
        if residual is None:
            total = to_fp32(input) if self.residual_in_fp32 else input
            if gate is None:
                return layer_norm(input, shape, weight, bias, eps, zero_centered_weight=zero_centered), total
            residual = torch.zeros_like(total)
        return add_layer_norm(
            input,
            residual,
            shape,
            weight,
            bias,
            eps,
            gate=gate,
            zero_centered_weight=zero_centered,
            inplace=self.inplace,
        )


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
        """Normalize ``x``, of dtype float64, float32, float16 or bfloat16. The name is torch's."""
        if is_scripting():
            weight = factor_of(self.weight, self.zero_centered_weight)
            return torch.nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, zero_centered_weight=self.zero_centered_weight)


class AddRMSNorm(TakesSeveralInputs, RMSNorm):
    r"""Division of the sum with a residual by its root mean square, for pre-norm blocks: both in one pass over memory.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s}{\sqrt{\mathrm{E}[s^2] + \epsilon}} * \mathrm{weight}

    :func:`layernorm_ext.add_rms_norm` describes results, precision and errors. The weight, ``state_dict`` and ``eps``
    are those of :class:`RMSNorm`, the other arguments and the shapes those of :class:`AddLayerNorm`. Source: Zhang and
    Sennrich, `Root Mean Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_, 2019.
    """

    __constants__ = [*RMSNorm.__constants__, "inplace", "residual_in_fp32"]

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
        residual_in_fp32: bool = False,
    ):
        """Create the weight."""
        super().__init__(
            normalized_shape, eps, elementwise_affine, device, dtype, zero_centered_weight=zero_centered_weight
        )
        self.inplace = inplace
        self.residual_in_fp32 = residual_in_fp32

    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor | None = None, gate: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the normalized sum, and the sum, as :meth:`AddLayerNorm.forward` does."""
        shape, weight, eps, zero_centered = self.normalized_shape, self.weight, self.eps, self.zero_centered_weight
        if residual is None:
            total = to_fp32(input) if self.residual_in_fp32 else input
            if gate is None:
                return rms_norm(input, shape, weight, eps, zero_centered_weight=zero_centered), total
            residual = torch.zeros_like(total)
        return add_rms_norm(
            input, residual, shape, weight, eps, gate=gate, zero_centered_weight=zero_centered, inplace=self.inplace
        )


def _check_gate_options(activation: str, num_groups: int, normalized_shape: tuple[int, ...]) -> None:
    if not is_integer(num_groups):
        raise TypeError(f"Expected num_groups to be an int, but got num_groups={num_groups!r}")
    error = gate_options_error(activation, num_groups, normalized_shape)
    if error is not None:
        raise ValueError(error)


class GatedLayerNorm(TakesSeveralInputs, LayerNorm):
    r"""Layer normalization whose output, or input, is multiplied by an activated gate.

    .. math::
        y = \left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * \mathrm{weight} +
        \mathrm{bias}\right) * f(\mathrm{gate})

    :func:`layernorm_ext.gated_layer_norm` describes results and errors, and the norm with ``gate_first``. Parameters,
    ``state_dict`` and the arguments not listed here are those of :class:`LayerNorm`. Sources: Yang, Kautz and
    Hatamizadeh, `Gated Delta Networks <https://arxiv.org/abs/2412.06464>`_, 2024; with ``gate_first``, Dao and Gu,
    `Transformers are SSMs <https://arxiv.org/abs/2405.21060>`_, 2024.

    Args:
        activation: The function ``f``: ``"silu"`` or ``"sigmoid"``.
        gate_first: Whether the gate multiplies the input instead of the output.
        num_groups: The number of groups of equal size into which the last dimension is divided. Each is normalized
            apart; the weight has all elements.

    Raises:
        TypeError: ``num_groups`` is no int.
        ValueError: ``activation`` is unknown, or ``num_groups`` does not divide the only dimension of
            ``normalized_shape``.

    Shape:
        Input, gate and output: ``[*, normalized_shape[0], ..., normalized_shape[-1]]``. ``weight`` (initially ones) and
        ``bias`` (initially zeros): ``normalized_shape``.

    Example:
        >>> norm = GatedLayerNorm(8)
        >>> x, gate = torch.randn(2, 3, 16).chunk(2, dim=-1)
        >>> norm(x, gate).shape
        torch.Size([2, 3, 8])
    """

    __constants__ = [*LayerNorm.__constants__, "activation", "gate_first", "num_groups"]

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
        activation: str = "silu",
        gate_first: bool = False,
        num_groups: int = 1,
    ):
        """Create the parameters."""
        super().__init__(
            normalized_shape, eps, elementwise_affine, bias, device, dtype, zero_centered_weight=zero_centered_weight
        )
        _check_gate_options(activation, num_groups, self.normalized_shape)
        self.activation = activation
        self.gate_first = gate_first
        self.num_groups = num_groups

    def forward(self, input: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalize ``input`` and apply the gate, if there is one."""
        return gated_layer_norm(
            input,
            gate,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            activation=self.activation,
            gate_first=self.gate_first,
            num_groups=self.num_groups,
            zero_centered_weight=self.zero_centered_weight,
        )


class GatedRMSNorm(TakesSeveralInputs, RMSNorm):
    r"""Division by the root mean square, with an activated gate on the output or, as in Mamba-2, on the input.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} * \mathrm{weight} * f(\mathrm{gate})

    :func:`layernorm_ext.gated_rms_norm` describes results and errors, and the norm with ``gate_first``. The weight,
    ``state_dict`` and ``eps`` are those of :class:`RMSNorm`, the other arguments and the shapes those of
    :class:`GatedLayerNorm`. Sources: those of :class:`GatedLayerNorm` and :class:`RMSNorm`.

    Example:
        >>> norm = GatedRMSNorm(8, gate_first=True, num_groups=2)
        >>> x, gate = torch.randn(2, 3, 16).chunk(2, dim=-1)
        >>> norm(x, gate).shape
        torch.Size([2, 3, 8])
    """

    __constants__ = [*RMSNorm.__constants__, "activation", "gate_first", "num_groups"]

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_weight: bool = False,
        activation: str = "silu",
        gate_first: bool = False,
        num_groups: int = 1,
    ):
        """Create the weight."""
        super().__init__(
            normalized_shape, eps, elementwise_affine, device, dtype, zero_centered_weight=zero_centered_weight
        )
        _check_gate_options(activation, num_groups, self.normalized_shape)
        self.activation = activation
        self.gate_first = gate_first
        self.num_groups = num_groups

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalize ``x`` and apply the gate, if there is one."""
        return gated_rms_norm(
            x,
            gate,
            self.normalized_shape,
            self.weight,
            self.eps,
            activation=self.activation,
            gate_first=self.gate_first,
            num_groups=self.num_groups,
            zero_centered_weight=self.zero_centered_weight,
        )


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
        """Take ``normalized_shape`` from ``input``; create parameters, unless a ``state_dict`` was loaded."""
        if input.dim() < self.dimensions:
            raise RuntimeError(
                f"Expected an input of at least dimensions={self.dimensions} dimensions, but got input of size"
                f"{list(input.shape)}"
            )
        self.normalized_shape = tuple(input.shape[-self.dimensions :])
        if self.has_uninitialized_params():
            with torch.no_grad():
                for parameter in self.parameters():
                    if isinstance(parameter, UninitializedParameter):
                        parameter.materialize(self.normalized_shape)
            self.reset_parameters()
        del self.dimensions

    def extra_repr(self) -> str:
        """Describe the module before it has become a LayerNorm."""
        bias = self.bias is not None
        options = f"elementwise_affine={self.elementwise_affine}, bias={bias}{describe_options(self)}"
        return f"dimensions={self.dimensions}, eps={self.eps}, {options}"
