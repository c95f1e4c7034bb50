"""Time blocks under torch.compile: trace_as("kernel"), trace_as("aten") and torch's layers.

The contenders `kernel` and `aten` are this package's layers. Training is forward and backward. With one CPU thread,
times are CPU time, which other programs disturb less.
"""

import copy
import time
from collections.abc import Iterator
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layernorm_ext

from .adaln import BATCH, composition
from .cases import EPS, PAIRS
from .contenders import Calls, Contender, results_of, time_pass
from .timing import Device
from .train_digits import Block

ROWS, COLS = 256, 768
X, PARAMETER, PER_SAMPLE = (BATCH, ROWS, COLS), (COLS,), (BATCH, 1, COLS)


class ResidualNorm(nn.Module):
    """An addition and a norm, whose weight and bias are inputs or, if `modulated`, a scale and a shift per sample."""

    def __init__(self, library: ModuleType, modulated: bool):
        super().__init__()
        self.ours, self.modulated = library is layernorm_ext, modulated

    def forward(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        if self.ours:
            add_norm = layernorm_ext.add_layer_norm
            return add_norm(x, residual, (COLS,), weight, bias, EPS, zero_centered_weight=self.modulated)
        total = x + residual
        norm = composition(total, weight, bias) if self.modulated else F.layer_norm(total, (COLS,), weight, bias, EPS)
        return norm, total


# name -> the shapes of the inputs, and a function that builds the block with the layers of a library
BLOCKS = {
    "norm": ([X], lambda library: library.LayerNorm(COLS)),
    "norm, GELU": ([X], lambda library: nn.Sequential(library.LayerNorm(COLS), nn.GELU())),
    "residual, norm": ([X, X, PARAMETER, PARAMETER], lambda library: ResidualNorm(library, modulated=False)),
    "residual, norm, modulate": ([X, X, PER_SAMPLE, PER_SAMPLE], lambda library: ResidualNorm(library, modulated=True)),
    "pre-norm transformer block": (
        [(BATCH // 8, ROWS, COLS)],
        lambda library: Block(COLS, COLS // 64, library.LayerNorm),
    ),
}


def bind(block: nn.Module, inputs: list[Tensor], traced: str | None) -> list[Calls]:
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]

    def function() -> Tensor | tuple[Tensor, ...]:
        with layernorm_ext.trace_as(traced):
            return block(*inputs)

    return [Calls(function, [*inputs, *block.parameters()], inputs[0].detach().flip(0))]


def measure(device: Device, block: str, dtypes: str, seconds: float) -> Iterator[dict]:
    """Yield a record for each pass and contender."""
    if not device.is_cuda and torch.get_num_threads() == 1:
        device.clock = time.process_time
    torch.compiler.reset()
    dtype = PAIRS[dtypes][0]
    shapes, build = BLOCKS[block]
    inputs = [torch.randn(shape, device=device.name).to(dtype) for shape in shapes]
    theirs, ours = (build(library).to(device.name, dtype) for library in (nn, layernorm_ext))
    ours.load_state_dict(theirs.state_dict())
    (exact,) = bind(copy.deepcopy(theirs).double(), [tensor.double() for tensor in inputs], None)
    expected, entries = results_of(exact), []
    for name, module, traced in ("kernel", ours, "kernel"), ("aten", ours, "aten"), ("torch", theirs, None):
        compiled = torch.compile(module, fullgraph=True, dynamic=False)
        entries.append(Contender(name, dtype, partial(bind, compiled, inputs, traced), expected))
    for name, pass_name in ("forward", "forward"), ("training", "both"):
        yield from time_pass(device, entries, {"block": block, "dtypes": dtypes, "pass": name}, pass_name, seconds)
