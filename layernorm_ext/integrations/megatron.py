"""This package's norms for Megatron-Core's layer specs."""

from __future__ import annotations

from typing import Any

from .._compatibility import require
from ..modules import LayerNorm, RMSNorm

__all__ = ["Norm"]

require("megatron-core", "0.16", "megatron.core")


class Norm:
    """Builds a :class:`LayerNorm` or :class:`RMSNorm`, as ``WrappedTorchNorm`` builds torch's, for any place of a spec.

    It honours these attributes of the config:

    ================================  ==================================================================
    ``normalization``                 ``"LayerNorm"`` or ``"RMSNorm"``
    ``layernorm_zero_centered_gamma``  the layer multiplies by ``weight + 1``
    ``sequence_parallel``             Megatron adds up the gradients of the parameters over the ranks
    ``memory_efficient_layer_norm``   a LayerNorm saves its output instead of its input
    ``persist_layer_norm``            has no effect: the kernels are the same
    ================================  ==================================================================

    Megatron calls it with ``config``, ``hidden_size`` and ``eps``. The other arguments are those of Megatron's norms,
    and have no effect: the config has the same options.

    Raises:
        ValueError: ``config.normalization`` is another one.
    """

    def __new__(  # type: ignore[misc]
        cls,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
        has_residual: bool = False,
    ) -> LayerNorm | RMSNorm:
        """Return the layer."""
        zero_centered = config.layernorm_zero_centered_gamma
        norm: LayerNorm | RMSNorm
        if config.normalization == "LayerNorm":
            memory_efficient = config.memory_efficient_layer_norm
            norm = LayerNorm(hidden_size, eps, zero_centered_weight=zero_centered, memory_efficient=memory_efficient)
        elif config.normalization == "RMSNorm":
            norm = RMSNorm(hidden_size, eps, zero_centered_weight=zero_centered)
        else:
            raise ValueError(
                f"Expected config.normalization to be 'LayerNorm' or 'RMSNorm', but got {config.normalization!r}"
            )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
