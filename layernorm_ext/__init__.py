"""Layer normalization (Ba et al. 2016, arXiv:1607.06450) for PyTorch, by hand-written CPU and CUDA kernels."""

from . import _locate

_locate.use_installed_package(__spec__)
_locate.check_torch()

from importlib.metadata import version as _version

from ._ops import register_with_torch as _register_with_torch
from .channels_first import LayerNorm2d, layer_norm_2d
from .conversion import ConversionReport, convert, converted, register_conversion, revert
from .functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .modules import AddLayerNorm, AddRMSNorm, LayerNorm, LazyLayerNorm, RMSNorm
from .tracing import trace_as

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "ConversionReport",
    "LayerNorm",
    "LayerNorm2d",
    "LazyLayerNorm",
    "RMSNorm",
    "add_layer_norm",
    "add_rms_norm",
    "convert",
    "converted",
    "layer_norm",
    "layer_norm_2d",
    "register_conversion",
    "revert",
    "rms_norm",
    "trace_as",
]
__version__ = _version("layernorm-ext")

_register_with_torch()
