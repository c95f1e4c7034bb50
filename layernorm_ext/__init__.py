"""Layer normalization (Ba et al. 2016, arXiv:1607.06450) for PyTorch, with hand-written CPU and CUDA kernels."""

import os
import sys
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

from . import _build_info, conversion, functional, modules, modules_fused, tracing
from ._ops import register_with_torch
from .conversion import *
from .functional import *
from .modules import *
from .modules_fused import *
from .tracing import *

__all__ = []
__all__ += conversion.__all__
__all__ += functional.__all__
__all__ += modules.__all__
__all__ += modules_fused.__all__
__all__ += tracing.__all__
__version__ = _build_info.version

register_with_torch()
