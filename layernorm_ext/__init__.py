"""Layer normalization (Ba et al. 2016, arXiv:1607.06450) for PyTorch, by hand-written CPU and CUDA kernels."""

from .functional import layer_norm
from .modules import LayerNorm

__all__ = ["LayerNorm", "layer_norm"]
