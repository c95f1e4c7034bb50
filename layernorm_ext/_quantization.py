"""Eager static quantization: importing this module has torch replace :class:`LayerNorm` as it replaces its own."""

from __future__ import annotations

import torch
from torch.ao.quantization.quantization_mappings import DEFAULT_STATIC_QUANT_MODULE_MAPPINGS

from .modules import LayerNorm


class _QuantizedLayerNorm(torch.ao.nn.quantized.LayerNorm):
    """Makes torch's quantized layer, with a weight that is not zero-centred."""

    @classmethod
    def from_float(cls, mod: LayerNorm, use_precomputed_fake_quant: bool = False) -> torch.ao.nn.quantized.LayerNorm:
        quantized = torch.ao.nn.quantized.LayerNorm.from_float(mod, use_precomputed_fake_quant)
        if mod.zero_centered_weight and mod.weight is not None:
            quantized.weight = torch.nn.Parameter(mod.weight.detach() + 1)
        return quantized


DEFAULT_STATIC_QUANT_MODULE_MAPPINGS[LayerNorm] = _QuantizedLayerNorm
