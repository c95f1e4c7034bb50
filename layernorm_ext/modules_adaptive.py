"""The normalizations whose scale, shift and gate are inputs, as modules."""

from collections.abc import Sequence
from numbers import Integral

from torch import Tensor

from .functional import ada_layer_norm, ada_rms_norm, add_ada_layer_norm, add_ada_rms_norm
from .modules import TakesSeveralInputs, describe_options

__all__ = ["AdaLayerNorm", "AdaRMSNorm", "AddAdaLayerNorm", "AddAdaRMSNorm"]


class AdaLayerNorm(TakesSeveralInputs):
    r"""Layer normalization whose scale and shift are inputs, as in diffusion transformers (adaLN).

    .. math::
        y = \frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} * (1 + \mathrm{scale}) + \mathrm{shift}

    :func:`layernorm_ext.ada_layer_norm` describes shapes, precision and errors. The module has no parameters and
    replaces ``LayerNorm(normalized_shape, eps, elementwise_affine=False)`` and the operations behind it. Source:
    Peebles and Xie, `Scalable Diffusion Models with Transformers <https://arxiv.org/abs/2212.09748>`_, 2022.

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

    __constants__ = ["eps", "normalized_shape"]
    normalized_shape: tuple[int, ...]

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
        inplace: Whether to overwrite the residual with the sum. A chain of such modules cannot be trained, see
            :func:`layernorm_ext.add_layer_norm`.

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

    __constants__ = [*AdaLayerNorm.__constants__, "inplace"]

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
