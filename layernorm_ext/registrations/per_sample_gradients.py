"""Per-sample gradients: importing this module teaches torch's expanded weights about :func:`layer_norm`.

``torch.nn.utils._per_sample_grad.call_for_per_sample_grads`` then handles it like torch's function.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils._expanded_weights.expanded_weights_impl import HANDLED_FUNCTIONS, implements_per_sample_grads

from ..functional import layer_norm

_TorchLayerNorm = HANDLED_FUNCTIONS[torch.nn.functional.layer_norm]


@implements_per_sample_grads(layer_norm)
class _LayerNorm:
    """Calls the autograd function of torch's layer norm, which knows none of this package's options."""

    @staticmethod
    def apply(names: tuple[str, ...], function: object, *arguments: object) -> Tensor:
        if "zero_centered_weight" in names:
            raise RuntimeError("Per-sample gradients do not support zero_centered_weight and memory_efficient")
        return _TorchLayerNorm.apply(names, function, *arguments)
