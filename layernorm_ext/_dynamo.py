"""Importing this module lets ``torch.compile`` trace ``norm`` of _calls.py in place of the C++ function."""

import torch

from . import _calls
from ._ops import norm

torch.compiler.substitute_in_graph(norm, skip_signature_check=True)(_calls.norm)
