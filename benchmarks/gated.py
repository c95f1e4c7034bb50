"""Time gated RMSNorm on 4 x SHAPES (default: 64 and 256 rows of 768, 2048 and 4096 columns).

`last` multiplies the output by silu(gate), as gated delta networks do, and `first` the input, as Mamba-2 does. Input
and gate are slices of a projection. The contenders are this package, torch's composition, and torch.compile of it.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import layernorm_ext

from .cases import EPS, PAIRS
from .contenders import bind_function, compile_for, time_pass
from .timing import Device

BATCH = 4


def last(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS) * F.silu(gate)


def first(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x * F.silu(gate), x.shape[-1:], weight, EPS)


def ours_last(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return layernorm_ext.gated_rms_norm(x, gate, x.shape[-1:], weight, EPS)


def ours_first(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return layernorm_ext.gated_rms_norm(x, gate, x.shape[-1:], weight, EPS, gate_first=True)


GATES: dict[str, tuple[Callable, Callable]] = {"last": (last, ours_last), "first": (first, ours_first)}


def measure(device: Device, rows: int, cols: int, dtypes: str, seconds: float) -> Iterator[dict]:
    """Yield a record for each position of the gate, pass and contender."""
    dtype, parameter_dtype = PAIRS[dtypes]
    x, gate = torch.randn(BATCH, rows, 2 * cols, device=device.name).to(dtype).chunk(2, dim=-1)
    weight, dy = torch.randn(cols, device=device.name).to(parameter_dtype), torch.randn_like(x)
    tensors = [x, gate, weight, dy.contiguous()]
    for position, (theirs, fused) in GATES.items():
        entries = [
            bind_function("ours", fused, theirs, tensors),
            bind_function("torch", theirs, theirs, tensors),
            bind_function("torch.compile", compile_for(theirs, rows, cols, dtypes), theirs, tensors),
        ]
        for pass_name in ("forward", "backward"):
            case = {"gate": position, "batch": BATCH, "rows": rows, "cols": cols, "dtypes": dtypes, "pass": pass_name}
            yield from time_pass(device, entries, case, pass_name, seconds)
