"""Layer normalization (Ba et al. 2016, arXiv:1607.06450) for PyTorch, with hand-written CPU and CUDA kernels."""

import os
import sys
from importlib import metadata
from importlib.machinery import PathFinder

# In the root of a checkout, `python -m` finds this file before the installed package. The checkout has no compiled
# module, so take all submodules from the installed package.
if PathFinder.find_spec(f"{__name__}._C", __path__) is None:
    _folders = [os.path.join(entry, __name__) for entry in sys.path]
    _installed = next((folder for folder in _folders if PathFinder.find_spec(f"{__name__}._C", [folder])), None)
    if _installed is None:
        raise ImportError(
            f"{__path__[0]} has no compiled module and sys.path has no installed {__name__}; "
            "run `pip install .` in the checkout"
        )
    __path__[:] = [_installed]

from ._compatibility import check_torch

check_torch()

from ._ops import register_with_torch
from .channels_first import (
    AdaLayerNorm2d,
    AdaRMSNorm2d,
    AddLayerNorm2d,
    AddRMSNorm2d,
    LayerNorm2d,
    RMSNorm2d,
    ada_layer_norm_2d,
    ada_rms_norm_2d,
    add_layer_norm_2d,
    add_rms_norm_2d,
    layer_norm_2d,
    rms_norm_2d,
)
from .conversion import ConversionReport, convert, converted, register_conversion, revert
from .functional import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .modules import AddLayerNorm, AddRMSNorm, LayerNorm, LazyLayerNorm, RMSNorm
from .tracing import trace_as

__all__ = [
    "AdaLayerNorm2d",
    "AdaRMSNorm2d",
    "AddLayerNorm",
    "AddLayerNorm2d",
    "AddRMSNorm",
    "AddRMSNorm2d",
    "ConversionReport",
    "LayerNorm",
    "LayerNorm2d",
    "LazyLayerNorm",
    "RMSNorm",
    "RMSNorm2d",
    "ada_layer_norm_2d",
    "ada_rms_norm_2d",
    "add_layer_norm",
    "add_layer_norm_2d",
    "add_rms_norm",
    "add_rms_norm_2d",
    "convert",
    "converted",
    "layer_norm",
    "layer_norm_2d",
    "register_conversion",
    "revert",
    "rms_norm",
    "rms_norm_2d",
    "trace_as",
]
__version__ = metadata.version("layernorm-ext")

register_with_torch()
