"""Layer normalization (Ba et al. 2016, arXiv:1607.06450) for PyTorch, by hand-written CPU and CUDA kernels."""

from . import _locate

_locate.use_installed_package(__spec__)
_locate.check_torch()

from importlib.metadata import version as _version

from .functional import layer_norm
from .modules import LayerNorm, LazyLayerNorm

__all__ = ["LayerNorm", "LazyLayerNorm", "layer_norm"]
__version__ = _version("layernorm-ext")
