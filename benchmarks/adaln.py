"""Time layer norm with a scale and a shift per sample: this package, torch's composition, and torch.compile of it.

The contender `shared` is this package's layer norm with one weight and bias for all samples: the least that per-sample
parameters can cost.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import layernorm_ext

from .cases import EPS, PAIRS, QUANTITIES, TOLERANCE
from .contenders import Calls, Contender
from .timing import Device, measure_times, summarize

BATCH = 16
PASSES = ("forward", "backward")


def composition(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift


def ours(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return layernorm_ext.ada_layer_norm(x, x.shape[-1:], scale, shift, EPS)


def shared(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return layernorm_ext.layer_norm(x, x.shape[-1:], scale, shift, EPS, zero_centered_weight=True)


class AdaCalls(Calls):
    """The passes of a function of input [batch, rows, cols], scale and shift."""

    def __init__(self, function: Callable, x: Tensor, scale: Tensor, shift: Tensor, dy: Tensor):
        self.inputs = tuple(t.detach().requires_grad_() for t in (x, scale, shift))
        self.layer = lambda x: function(x, *self.inputs[1:])
        self.x, self.dy, self.y = self.inputs[0], dy, None

    def results(self) -> tuple[Tensor, ...]:
        return *self.forward(), *self.backward()


def bind(name: str, function: Callable, tensors: list[Tensor]) -> Contender:
    """Return a contender with its errors relative to the composition in float64."""
    entry = Contender(name, TOLERANCE[tensors[0].dtype], [AdaCalls(function, *tensors)])
    expected = AdaCalls(composition, *(t.double() for t in tensors)).results()
    for quantity, found, exact in zip(QUANTITIES, entry.calls[0].results(), expected, strict=True):
        entry.errors[quantity] = ((found - exact).abs().max() / exact.abs().max()).item()
    return entry


def measure(device: Device, rows: int, cols: int, dtypes: str, budget: float) -> Iterator[dict]:
    """Yield a record for each pass and contender."""
    shapes = (BATCH, rows, cols), (BATCH, 1, cols), (BATCH, 1, cols), (BATCH, rows, cols)
    tensors = [torch.randn(shape, device=device.name).to(PAIRS[dtypes][0]) for shape in shapes]
    torch.compiler.reset()
    torch._functorch.config.donated_buffer = False  # backward runs many times on the same graph
    compiled = torch.compile(composition, fullgraph=True, dynamic=False)
    entries = [
        bind("ours", ours, tensors),
        bind("torch", composition, tensors),
        bind("torch.compile", compiled, tensors),
        bind("shared", shared, [tensors[0], tensors[1][0, 0], tensors[2][0, 0], tensors[3]]),
    ]
    for pass_name in PASSES:
        calls = {entry.name: entry.functions(pass_name) for entry in entries}
        times, failed = measure_times(device, calls, pass_name != "forward", "eager", budget)
        cell = {"batch": BATCH, "rows": rows, "cols": cols, "dtypes": dtypes, "pass": pass_name}
        for entry in entries:
            yield cell | entry.record(pass_name, failed) | summarize(times, entry.name, ("torch",))
