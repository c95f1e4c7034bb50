"""Time a scale and a shift per sample on 16 x SHAPES (default: 64 and 256 rows of 384, 768 and 1152 columns).

`norm` is the adaptive layer norm, and `gated residual` adds the gated input to a residual before. The contenders are
this package, torch's composition, torch.compile of it, and `shared`: this package's layer norm with one weight, bias
and gate for all samples, the least that per-sample parameters can cost.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import layernorm_ext

from .cases import EPS, PAIRS
from .contenders import bind_function, compile_for, time_pass
from .timing import Device

BATCH = 16
Results = tuple[Tensor, Tensor]


def composition(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift


def ours(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return layernorm_ext.ada_layer_norm(x, x.shape[-1:], scale, shift, EPS)


def shared(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return layernorm_ext.layer_norm(x, x.shape[-1:], scale, shift, EPS, zero_centered_weight=True)


def gated_composition(x: Tensor, scale: Tensor, shift: Tensor, gate: Tensor, residual: Tensor) -> Results:
    total = residual + gate * x
    return composition(total, scale, shift), total


def gated_ours(x: Tensor, scale: Tensor, shift: Tensor, gate: Tensor, residual: Tensor) -> Results:
    return layernorm_ext.add_ada_layer_norm(x, residual, x.shape[-1:], scale, shift, EPS, gate=gate)


def gated_shared(x: Tensor, scale: Tensor, shift: Tensor, gate: Tensor, residual: Tensor) -> Results:
    return layernorm_ext.add_layer_norm(
        x, residual, x.shape[-1:], scale, shift, EPS, gate=gate, zero_centered_weight=True
    )


# block -> the functions of torch, of this package, and of this package with shared parameters; the number of parameters
BLOCKS: dict[str, tuple[Callable, Callable, Callable, int]] = {
    "norm": (composition, ours, shared, 2),
    "gated residual": (gated_composition, gated_ours, gated_shared, 3),
}


def measure(device: Device, rows: int, cols: int, dtypes: str, seconds: float) -> Iterator[dict]:
    """Yield a record for each block, pass and contender."""
    for block, (theirs, fused, of_all, count) in BLOCKS.items():
        whole = (BATCH, rows, cols)
        shapes = whole, *[(BATCH, 1, cols)] * count, *[whole] * (count - 2), whole
        tensors = [torch.randn(shape, device=device.name).to(PAIRS[dtypes][0]) for shape in shapes]
        first = [tensor[0, 0] if 0 < i <= count else tensor for i, tensor in enumerate(tensors)]
        entries = [
            bind_function("ours", fused, theirs, tensors),
            bind_function("torch", theirs, theirs, tensors),
            bind_function("torch.compile", compile_for(theirs, rows, cols, dtypes), theirs, tensors),
            bind_function("shared", of_all, theirs, first),
        ]
        for pass_name in ("forward", "backward"):
            case = {"block": block, "batch": BATCH, "rows": rows, "cols": cols, "dtypes": dtypes, "pass": pass_name}
            yield from time_pass(device, entries, case, pass_name, seconds)
