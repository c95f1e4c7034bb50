"""Eager static quantization: importing this module makes torch quantize :class:`LayerNorm` like its own layer."""

from __future__ import annotations

import torch
from torch.ao.quantization.quantization_mappings import DEFAULT_STATIC_QUANT_MODULE_MAPPINGS

from ..modules import LayerNorm


class _QuantizedLayerNorm(torch.ao.nn.quantized.LayerNorm):
    """Creates torch's quantized layer, which multiplies by the weight itself instead of ``weight + 1``."""

    @classmethod
    def from_float(cls, mod: LayerNorm, use_precomputed_fake_quant: bool = False) -> torch.ao.nn.quantized.LayerNorm:
        quantized = torch.ao.nn.quantized.LayerNorm.from_float(mod, use_precomputed_fake_quant)
        if mod.zero_centered_weight and mod.weight is not None:
            quantized.weight = torch.nn.Parameter(mod.weight.detach() + 1)
        return quantized


DEFAULT_STATIC_QUANT_MODULE_MAPPINGS[LayerNorm] = _QuantizedLayerNorm
