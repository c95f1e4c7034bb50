"""Time norms that also add, scale, shift or gate on 8 x SHAPES (default: 64 and 256 rows of 768 and 2048 columns).

The contenders are this package, torch's composition, and torch.compile of it. Scales and shifts are per sample, as in
diffusion transformers; activated gates are slices of a projection, as in state space models.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from layernorm_ext import ada_layer_norm, add_ada_layer_norm, gated_rms_norm

from .cases import EPS, PAIRS
from .contenders import bind_function, compile_for, time_pass
from .timing import Device

BATCH = 8


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift


def modulated_sum(x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + gate * x
    return modulated(total, scale, shift), total


def gated(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS) * F.silu(gate)


def gated_first(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x * F.silu(gate), x.shape[-1:], weight, EPS)


# name -> torch's composition, this package's function, and the kinds of their arguments
NORMS: dict[str, tuple[Callable, Callable, tuple[str, ...]]] = {
    "ada_layer_norm": (
        modulated,
        lambda x, *modulation: ada_layer_norm(x, x.shape[-1:], *modulation, EPS),
        ("rows", "sample", "sample"),
    ),
    "add_ada_layer_norm with a gate": (
        modulated_sum,
        lambda x, residual, scale, shift, gate: add_ada_layer_norm(
            x, residual, x.shape[-1:], scale, shift, EPS, gate=gate
        ),
        ("rows", "rows", "sample", "sample", "sample"),
    ),
    "gated_rms_norm": (
        gated,
        lambda x, gate, weight: gated_rms_norm(x, gate, x.shape[-1:], weight, EPS),
        ("slice", "slice", "weight"),
    ),
    "gated_rms_norm, gate first": (
        gated_first,
        lambda x, gate, weight: gated_rms_norm(x, gate, x.shape[-1:], weight, EPS, gate_first=True),
        ("slice", "slice", "weight"),
    ),
}


def measure(device: Device, rows: int, cols: int, dtypes: str, seconds: float) -> Iterator[dict]:
    """Yield a record for each norm, pass and contender."""
    dtype, parameter_dtype = PAIRS[dtypes]
    shapes = {"rows": (BATCH, rows, cols), "slice": (BATCH, rows, 2 * cols), "sample": (BATCH, 1, cols), "weight": cols}
    for name, (composition, ours, kinds) in NORMS.items():
        tensors = [torch.randn(shapes[kind], device=device.name)[..., :cols] for kind in (*kinds, "rows")]
        tensors = [tensor.to(parameter_dtype if tensor.dim() == 1 else dtype) for tensor in tensors]
        entries = [
            bind_function("ours", ours, composition, tensors),
            bind_function("torch", composition, composition, tensors),
            bind_function("torch.compile", compile_for(composition, rows, cols, dtypes), composition, tensors),
        ]
        for pass_name in ("forward", "backward"):
            case = {"norm": name, "batch": BATCH, "rows": rows, "cols": cols, "dtypes": dtypes, "pass": pass_name}
            yield from time_pass(device, entries, case, pass_name, seconds)
