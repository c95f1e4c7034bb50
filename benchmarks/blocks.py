"""Time norms with their neighbors: eager calls (`family`), and blocks under torch.compile (`compile`)."""

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import layernorm_ext
from layernorm_ext import ada_layer_norm, add_ada_layer_norm, add_layer_norm, gated_rms_norm, rms_norm
from layernorm_ext.fusion import fuse_neighbors

from .cases import DTYPE_PAIRS, EPS
from .contenders import bind_functions, compile_for, time_pass
from .timing import Device

Results = Tensor | tuple[Tensor, ...]


# The blocks. `library` has their norms: torch.nn.functional or layernorm_ext.


def norm_gelu(library: ModuleType, x: Tensor, weight: Tensor, bias: Tensor) -> Results:
    return F.gelu(library.layer_norm(x, x.shape[-1:], weight, bias, EPS))


def residual_norm(library: ModuleType, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Results:
    total = x + residual
    return library.layer_norm(total, x.shape[-1:], weight, bias, EPS), total


def residual_norm_modulate(library: ModuleType, x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor) -> Results:
    total = x + residual
    return norm_modulate(library, total, scale, shift), total


def gate_residual_norm_modulate(
    library: ModuleType, x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, gate: Tensor
) -> Results:
    total = residual + gate * x
    return norm_modulate(library, total, scale, shift), total


def norm_modulate(library: ModuleType, x: Tensor, scale: Tensor, shift: Tensor) -> Results:
    return library.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift


def norm_gate(library: ModuleType, x: Tensor, gate: Tensor, weight: Tensor) -> Results:
    return library.rms_norm(x, x.shape[-1:], weight, EPS) * F.silu(gate)


def gate_norm(library: ModuleType, x: Tensor, gate: Tensor, weight: Tensor) -> Results:
    return library.rms_norm(x * F.silu(gate), x.shape[-1:], weight, EPS)


def add_ada(x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor, gate: Tensor | None = None) -> Results:
    return add_ada_layer_norm(x, residual, x.shape[-1:], scale, shift, EPS, gate=gate)


class Block(NamedTuple):
    """A block, the kinds of its tensors, and this package's function that computes all of it, if there is one.

    A kind determines the shape (see draw()). Scales, shifts and gates of residuals are per sample, as in diffusion
    transformers; activated gates are slices of a projection, as in state space models.
    """

    kinds: tuple[str, ...]
    composition: Callable[..., Results]
    by_hand: Callable[..., Results] | None = None


BLOCKS = {
    "norm, GELU": Block(("rows", "weight", "weight"), norm_gelu),
    "residual, norm": Block(
        ("rows", "rows", "weight", "weight"),
        residual_norm,
        lambda x, residual, weight, bias: add_layer_norm(x, residual, x.shape[-1:], weight, bias, EPS),
    ),
    "residual, norm, modulate": Block(("rows", "rows", "sample", "sample"), residual_norm_modulate, add_ada),
    "gate, residual, norm, modulate": Block(
        ("rows", "rows", "sample", "sample", "sample"), gate_residual_norm_modulate, add_ada
    ),
    "norm, modulate": Block(
        ("rows", "sample", "sample"),
        norm_modulate,
        lambda x, scale, shift: ada_layer_norm(x, x.shape[-1:], scale, shift, EPS),
    ),
}
FAMILY = {
    "rms_norm": Block(
        ("rows", "weight"),
        lambda library, x, weight: library.rms_norm(x, x.shape[-1:], weight, EPS),
        lambda x, weight: rms_norm(x, x.shape[-1:], weight, EPS),
    ),
    "add_layer_norm": BLOCKS["residual, norm"],
    "ada_layer_norm": BLOCKS["norm, modulate"],
    "add_ada_layer_norm with a gate": BLOCKS["gate, residual, norm, modulate"],
    "gated_rms_norm": Block(
        ("slice", "slice", "weight"),
        norm_gate,
        lambda x, gate, weight: gated_rms_norm(x, gate, x.shape[-1:], weight, EPS),
    ),
    "gated_rms_norm, gate first": Block(
        ("slice", "slice", "weight"),
        gate_norm,
        lambda x, gate, weight: gated_rms_norm(x, gate, x.shape[-1:], weight, EPS, gate_first=True),
    ),
}


def draw(kinds: tuple[str, ...], device: Device, dtypes: str, batch: int, rows: int, cols: int) -> list[Tensor]:
    """Return the tensors of a block, and an upstream gradient."""
    dtype, parameter_dtype = DTYPE_PAIRS[dtypes]
    shapes = {"rows": (batch, rows, cols), "slice": (batch, rows, 2 * cols), "sample": (batch, 1, cols), "weight": cols}
    # A slice is the first half of the columns of its tensor; other tensors are used whole.
    tensors = [torch.randn(shapes[kind], device=device.name)[..., :cols] for kind in (*kinds, "rows")]
    return [tensor.to(parameter_dtype if tensor.dim() == 1 else dtype) for tensor in tensors]


def measure_family(device: Device, rows: int, cols: int, dtypes: str, seconds: float) -> Iterator[dict]:
    """Time norms that also add, scale, shift or gate on 8 x SHAPES (default: 64 and 256 rows of 768 and 2048 columns).

    The contenders are this package, torch's composition, and torch.compile of it.
    """
    for name, block in FAMILY.items():
        composition = partial(block.composition, F)
        compiled = compile_for(composition, rows, cols, dtypes)
        functions = {"ours": block.by_hand, "torch": composition, "torch.compile": compiled}
        entries = bind_functions(functions, composition, draw(block.kinds, device, dtypes, 8, rows, cols))
        for pass_name in ("forward", "backward"):
            case = {"norm": name, "batch": 8, "rows": rows, "cols": cols, "dtypes": dtypes, "pass": pass_name}
            yield from time_pass(device, entries, case, pass_name, seconds)


def measure_compiled(device: Device, name: str, dtypes: str, seconds: float) -> Iterator[dict]:
    """Time a block under torch.compile, for four contenders.

    `written` has this package's norms in plain code, `fused` is the same code with `fuse_neighbors`, `by hand` calls
    the function that adds, gates and modulates, and `torch` has torch's norms. Training is forward and backward. The
    inputs are 16 x 256 x 768.
    """
    torch.compiler.reset()
    block = BLOCKS[name]
    written, theirs = (partial(block.composition, library) for library in (layernorm_ext, F))
    functions = {"written": written, "fused": written, "by hand": block.by_hand, "torch": theirs}
    compiled = {
        contender: torch.compile(
            function,
            fullgraph=True,
            dynamic=False,
            options={"pre_grad_custom_pass": fuse_neighbors} if contender == "fused" else None,
        )
        for contender, function in functions.items()
        if function
    }
    entries = bind_functions(compiled, theirs, draw(block.kinds, device, dtypes, 16, 256, 768))
    for label, pass_name in ("forward", "forward"), ("training", "both"):
        yield from time_pass(device, entries, {"block": name, "dtypes": dtypes, "pass": label}, pass_name, seconds)
