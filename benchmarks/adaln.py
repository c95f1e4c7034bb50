"""Time a scale and a shift per sample on 16 x SHAPES (default: 64 and 256 rows of 384, 768 and 1152 columns).

The contenders are this package, torch's composition, torch.compile of it, and `shared`: this package's layer norm with
one weight and bias for all samples, the least that per-sample parameters can cost.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import layernorm_ext

from .cases import EPS, PAIRS
from .contenders import Calls, Contender, compile_for, results_of, time_pass
from .timing import Device

BATCH = 16


def composition(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift


def ours(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return layernorm_ext.ada_layer_norm(x, x.shape[-1:], scale, shift, EPS)


def shared(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return layernorm_ext.layer_norm(x, x.shape[-1:], scale, shift, EPS, zero_centered_weight=True)


def bind(name: str, function: Callable, tensors: list[Tensor]) -> Contender:
    """Return a function of input [batch, rows, cols], scale and shift, compared with the composition in float64."""

    def calls(function: Callable, tensors: list[Tensor]) -> Calls:
        inputs = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
        return Calls(partial(function, *inputs), inputs, tensors[3])

    expected = results_of(calls(composition, [tensor.double() for tensor in tensors]))
    return Contender(name, tensors[0].dtype, lambda: [calls(function, tensors)], expected)


def measure(device: Device, rows: int, cols: int, dtypes: str, seconds: float) -> Iterator[dict]:
    """Yield a record for each pass and contender."""
    shapes = (BATCH, rows, cols), (BATCH, 1, cols), (BATCH, 1, cols), (BATCH, rows, cols)
    tensors = [torch.randn(shape, device=device.name).to(PAIRS[dtypes][0]) for shape in shapes]
    entries = [
        bind("ours", ours, tensors),
        bind("torch", composition, tensors),
        bind("torch.compile", compile_for(composition, rows, cols, dtypes), tensors),
        bind("shared", shared, [tensors[0], tensors[1][0, 0], tensors[2][0, 0], tensors[3]]),
    ]
    for pass_name in ("forward", "backward"):
        case = {"batch": BATCH, "rows": rows, "cols": cols, "dtypes": dtypes, "pass": pass_name}
        yield from time_pass(device, entries, case, pass_name, seconds)
