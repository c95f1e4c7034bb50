"""The normalizations with a residual, with a scale and shift that are inputs, or with a gate, as modules.

This file has no ``from __future__ import annotations`` either, see modules.py.
"""

from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .functional import (
    ada_layer_norm,
    ada_rms_norm,
    add_ada_layer_norm,
    add_ada_rms_norm,
    add_layer_norm,
    add_rms_norm,
    gated_layer_norm,
    gated_rms_norm,
    layer_norm,
    rms_norm,
)
from .modules import LayerNorm, RMSNorm, describe_options

__all__ = ["AdaLayerNorm", "AdaRMSNorm", "AddAdaLayerNorm", "AddAdaRMSNorm", "AddLayerNorm", "AddRMSNorm"]
__all__ += ["GatedLayerNorm", "GatedRMSNorm"]


class TakesSeveralInputs(torch.nn.Module):
    """A module with further inputs after the first one, which parallel styles of torch must not drop.

    The hook of torch's SequenceParallel returns the first input alone, which is silently wrong if the others have
    defaults. This class makes such a call an error.
    """

    def register_forward_pre_hook(self, hook: Any, **options: bool) -> RemovableHandle:
        """Register a hook; if torch.distributed defines it, check that it returns all inputs."""
        if is_of_parallel_style(hook) and not options.get("with_kwargs"):
            hook = partial(_checked_inputs, hook)
        return super().register_forward_pre_hook(hook, **options)


def is_of_parallel_style(hook: Any) -> bool:
    """Return whether a hook is defined in torch.distributed, as the hooks of its parallel styles are."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def _checked_inputs(hook: Any, module: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    """Call a hook and return its result; raise an error if this is only one of several inputs."""
    results = hook(module, inputs)
    if len(inputs) > 1 and results is not None and not isinstance(results, tuple):
        raise RuntimeError(
            f"Expected all inputs of {type(module).__name__} to be distributed, but got one of {len(inputs)}, as from "
            "SequenceParallel; use PrepareModuleInput and distribute_module, as docs/pytorch.md of layernorm_ext says"
        )
    return results


@torch.fx.wrap  # torch.fx records the call, because its proxies have no dtype to compare
def to_fp32(input: Tensor) -> Tensor:
    """Convert to float32, except from float64."""
    return input if input.dtype == torch.float64 else input.float()


class AddLayerNorm(TakesSeveralInputs, LayerNorm):
    r"""Layer normalization of the sum with a residual, for pre-norm blocks: both in one pass over memory.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s - \mathrm{E}[s]}{\sqrt{\mathrm{Var}[s] + \epsilon}} *
        \mathrm{weight} + \mathrm{bias}

    :func:`layernorm_ext.add_layer_norm` describes results, precision and errors. Parameters, ``state_dict`` and the
    arguments not listed here are those of :class:`LayerNorm`. Source: Ba, Kiros and Hinton, `Layer Normalization
    <https://arxiv.org/abs/1607.06450>`_, 2016.

    Args:
        inplace: Whether to overwrite the residual with the sum. It may share memory with no other argument, and a
            chain of such modules cannot be trained, see :func:`layernorm_ext.add_layer_norm`. Without a residual, the
            sum is ``input`` itself, unless ``residual_in_fp32`` converts it, so that the next block overwrites the
            caller's tensor.
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

        With ``residual_in_fp32``, the sum is then ``input.float()``, unless ``input`` is float64. With a gate,
        a missing residual counts as zeros, whose dtype is that of the sum.
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


class AddRMSNorm(TakesSeveralInputs, RMSNorm):
    r"""Division of the sum with a residual by its root mean square, for pre-norm blocks: both in one pass over memory.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s}{\sqrt{\mathrm{E}[s^2] + \epsilon}} * \mathrm{weight}

    :func:`layernorm_ext.add_rms_norm` describes results, precision and errors. The weight, ``state_dict`` and ``eps``
    are those of :class:`RMSNorm`, the other arguments and the shapes those of :class:`AddLayerNorm`. Source: Zhang and
    Sennrich, `Root Mean Square Layer Normalization <https://arxiv.org/abs/1910.07467>`_, 2019.
    """

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


class AdaLayerNorm(TakesSeveralInputs):
    r"""Layer normalization whose scale and shift are inputs, as in diffusion transformers (adaLN).

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * (1 + \mathrm{scale}) + \mathrm{shift}

    :func:`layernorm_ext.ada_layer_norm` describes shapes, precision and errors. The module has no parameters and
    replaces ``LayerNorm(normalized_shape, eps, elementwise_affine=False)`` and the operations that scale and shift its
    output. Source: Peebles and Xie, `Scalable Diffusion Models with Transformers <https://arxiv.org/abs/2212.09748>`_,
    2022.

    Args:
        normalized_shape: Sizes of the last dimensions, over which to normalize; an int is the size of one dimension.
        eps: Added to the variance.

    Shape:
        Input and output: ``[*, normalized_shape[0], ..., normalized_shape[-1]]``. Scale and shift:
        ``[*batch, normalized_shape[0], ..., normalized_shape[-1]]``, for example ``[B, N]`` for an input ``[B, S, N]``.

    Example:
        >>> norm, modulation = AdaLayerNorm(8), torch.nn.Linear(4, 16)
        >>> x, condition = torch.randn(2, 3, 8), torch.randn(2, 4)
        >>> scale, shift = modulation(condition).chunk(2, dim=-1)
        >>> norm(x, scale, shift).shape
        torch.Size([2, 3, 8])
    """

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-6):
        """Keep the arguments."""
        super().__init__()
        if isinstance(normalized_shape, (int, Integral)):
            normalized_shape = (normalized_shape,)
        self.normalized_shape = tuple(normalized_shape)
        self.eps = eps

    def forward(self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """Normalize ``input``, multiply by ``1 + scale`` and add ``shift``."""
        return ada_layer_norm(input, self.normalized_shape, scale, shift, self.eps)

    def extra_repr(self) -> str:
        """Return the arguments of the constructor."""
        return f"{self.normalized_shape}, eps={self.eps}{describe_options(self)}"


class AdaRMSNorm(AdaLayerNorm):
    r"""Division by the root mean square, with scale and shift that are inputs.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{E}[x^2] + \epsilon}} * (1 + \mathrm{scale}) + \mathrm{shift}

    :func:`layernorm_ext.ada_rms_norm` describes precision and errors. Arguments and shapes are those of
    :class:`AdaLayerNorm`. Sources: those of :class:`AdaLayerNorm` and :class:`RMSNorm`.
    """

    def forward(self, input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """Divide ``input`` by its root mean square, multiply by ``1 + scale`` and add ``shift``."""
        return ada_rms_norm(input, self.normalized_shape, scale, shift, self.eps)


class AddAdaLayerNorm(AdaLayerNorm):
    r"""Layer normalization of the sum of a gated input and a residual, whose gate, scale and shift are inputs.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s - \mathrm{E}[s]}{\sqrt{\mathrm{Var}[s] + \epsilon}} *
        (1 + \mathrm{scale}) + \mathrm{shift}

    :func:`layernorm_ext.add_ada_layer_norm` describes results and errors. The module has no parameters. Source:
    Peebles and Xie, `Scalable Diffusion Models with Transformers <https://arxiv.org/abs/2212.09748>`_, 2022.

    Args:
        normalized_shape: Sizes of the last dimensions, over which to normalize; an int is the size of one dimension.
        eps: Added to the variance.
        inplace: Whether to overwrite the residual with the sum. It may share memory with no other argument, and a
            chain of such modules cannot be trained, see :func:`layernorm_ext.add_layer_norm`.

    Shape:
        Input, residual, output and sum: ``[*, normalized_shape[0], ..., normalized_shape[-1]]``. Scale, shift and gate:
        ``[*batch, normalized_shape[0], ..., normalized_shape[-1]]``, for example ``[B, N]`` for an input ``[B, S, N]``.

    Example:
        >>> norm, modulation = AddAdaLayerNorm(8), torch.nn.Linear(4, 24)
        >>> x, residual, condition = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 4)
        >>> scale, shift, gate = modulation(condition).chunk(3, dim=-1)
        >>> output, residual = norm(x, residual, scale, shift, gate)
        >>> output.shape
        torch.Size([2, 3, 8])
    """

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-6, *, inplace: bool = False):
        """Keep the arguments."""
        super().__init__(normalized_shape, eps)
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
        return add_ada_layer_norm(
            input, residual, self.normalized_shape, scale, shift, self.eps, gate=gate, inplace=self.inplace
        )


class AddAdaRMSNorm(AddAdaLayerNorm):
    r"""Division of the sum of a gated input and a residual by its root mean square; gate, scale and shift are inputs.

    .. math::
        s = \mathrm{gate} * x + r \qquad y = \frac{s}{\sqrt{\mathrm{E}[s^2] + \epsilon}} * (1 + \mathrm{scale}) +
        \mathrm{shift}

    :func:`layernorm_ext.add_ada_rms_norm` describes results and errors. Arguments and shapes are those of
    :class:`AddAdaLayerNorm`. Sources: those of :class:`AddAdaLayerNorm` and :class:`RMSNorm`.
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
        return add_ada_rms_norm(
            input, residual, self.normalized_shape, scale, shift, self.eps, gate=gate, inplace=self.inplace
        )


def _check_gate_options(normalized_shape: tuple[int, ...], activation: str, num_groups: int) -> None:
    """Raise the errors of gated_layer_norm for these options as ValueErrors."""
    input = torch.empty(normalized_shape, device="meta")
    try:
        gated_layer_norm(input, None, normalized_shape, activation=activation, num_groups=num_groups)
    except RuntimeError as error:
        raise ValueError(str(error)) from None


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
        num_groups: The number of groups of equal size into which the last dimension is divided. Each group is
            normalized separately; weight and bias have the size of the whole dimension.

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
        _check_gate_options(self.normalized_shape, activation, num_groups)
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
        _check_gate_options(self.normalized_shape, activation, num_groups)
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
