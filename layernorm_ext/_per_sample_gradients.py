"""Per-sample gradients: importing this module tells torch's expanded weights how to handle :func:`layer_norm`.

``torch.nn.utils._per_sample_grad.call_for_per_sample_grads`` then computes them as it does for torch's function.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils._expanded_weights.expanded_weights_impl import HANDLED_FUNCTIONS, implements_per_sample_grads

from .functional import layer_norm

_TorchLayerNorm = HANDLED_FUNCTIONS[torch.nn.functional.layer_norm]


@implements_per_sample_grads(layer_norm)
class _LayerNorm:
    """Calls the autograd function for torch's layer norm, which has none of our options."""

    @staticmethod
    def apply(names: tuple[str, ...], function: object, *arguments: object) -> Tensor:
        if "zero_centered_weight" in names:
            raise RuntimeError(
                "Expected a layer_norm without zero_centered_weight and memory_efficient for per-sample gradients"
            )
        return _TorchLayerNorm.apply(names, function, *arguments)
