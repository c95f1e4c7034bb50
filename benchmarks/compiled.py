"""Time blocks of a model under torch.compile.

The contenders `kernel` and `aten` are this package's layers, traced with `trace_as("kernel")` and `trace_as("aten")`.
Training is forward and backward.
"""

import copy
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layernorm_ext

from .cases import EPS, PAIRS, TOLERANCE
from .contenders import Contender
from .timing import Device, measure_times, summarize
from .train_digits import Block

BATCH, ROWS, COLS = 16, 256, 768
SHAPE = (COLS,)


class Norm(nn.Module):
    """A norm and an activation."""

    def __init__(self, ours: bool, activation: nn.Module):
        super().__init__()
        self.norm, self.activation = (layernorm_ext if ours else nn).LayerNorm(COLS), activation

    def forward(self, x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.activation(self.norm(x))


class ResidualNorm(nn.Module):
    """An addition and a norm, whose scale and shift are parameters or belong to the samples."""

    def __init__(self, ours: bool, modulated: bool):
        super().__init__()
        self.ours, self.modulated = ours, modulated
        if not modulated:
            self.weight, self.bias = nn.Parameter(torch.ones(COLS)), nn.Parameter(torch.zeros(COLS))

    def forward(self, x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = (scale, shift) if self.modulated else (self.weight, self.bias)
        if self.ours:
            add_norm = layernorm_ext.add_layer_norm
            return add_norm(x, residual, SHAPE, weight, bias, EPS, zero_centered_weight=self.modulated)
        total = x + residual
        if self.modulated:
            return F.layer_norm(total, SHAPE, eps=EPS) * (1 + scale) + shift, total
        return F.layer_norm(total, SHAPE, weight, bias, EPS), total


class Transformer(nn.Module):
    """A pre-norm transformer block on an eighth of the samples."""

    def __init__(self, ours: bool):
        super().__init__()
        self.block = Block(COLS, COLS // 64, (layernorm_ext if ours else nn).LayerNorm)

    def forward(self, x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.block(x[: BATCH // 8])


# name -> a function that builds the block with this package's layers or with torch's
BLOCKS = {
    "norm": lambda ours: Norm(ours, nn.Identity()),
    "norm, GELU": lambda ours: Norm(ours, nn.GELU()),
    "residual, norm": lambda ours: ResidualNorm(ours, modulated=False),
    "residual, norm, modulate": lambda ours: ResidualNorm(ours, modulated=True),
    "pre-norm transformer block": Transformer,
}
TRACED = {"kernel": "kernel", "aten": "aten", "torch": None}  # contender -> the argument of trace_as


def calls(module: nn.Module, inputs: list[Tensor], traced: str | None) -> dict[str, Callable[[], tuple]]:
    """Return functions that run forward, and forward and backward."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    leaves, upstream = [*inputs, *module.parameters()], inputs[0].detach().flip(0)

    def forward() -> tuple[Tensor, ...]:
        with layernorm_ext.trace_as(traced):
            results = module(*inputs)
        return results if isinstance(results, tuple) else (results,)

    def training() -> tuple[Tensor, ...]:
        outputs = forward()
        gradients = [upstream[: len(output)] for output in outputs]
        return torch.autograd.grad(outputs, leaves, gradients, materialize_grads=True)

    return {"forward": forward, "training": training}


def bind(name: str, module: nn.Module, inputs: list[Tensor], expected: tuple[tuple, tuple]) -> tuple[Contender, dict]:
    """Compile a block, and return it with its errors relative to the eager block in float64, and its calls."""
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, dynamic=False)
    found = calls(compiled, inputs, TRACED[name])
    entry = Contender(name, TOLERANCE[inputs[0].dtype])
    with torch.no_grad():
        outputs = found["forward"]()
    results = outputs, found["training"]()
    for quantity, actual, exact in zip(("output", "grad_input"), results, expected, strict=True):
        pairs = zip(actual, exact, strict=True)
        entry.errors[quantity] = max(((a - e).abs().max() / (e.abs().max() or 1)).item() for a, e in pairs)
    return entry, found


def measure(device: Device, block: str, dtypes: str, budget: float) -> Iterator[dict]:
    """Yield a record for each pass and contender."""
    torch.compiler.reset()
    dtype = PAIRS[dtypes][0]
    shapes = (BATCH, ROWS, COLS), (BATCH, ROWS, COLS), (BATCH, 1, COLS), (BATCH, 1, COLS)
    inputs = [torch.randn(shape, device=device.name).to(dtype) for shape in shapes]
    theirs, ours = (BLOCKS[block](ours).to(device.name, dtype) for ours in (False, True))
    ours.load_state_dict(theirs.state_dict())
    exact = calls(copy.deepcopy(theirs).double(), [tensor.double() for tensor in inputs], None)
    expected = exact["forward"](), exact["training"]()
    modules = {"kernel": ours, "aten": ours, "torch": theirs}
    bound = [bind(name, module, inputs, expected) for name, module in modules.items()]
    for pass_name, checked in (("forward", "forward"), ("training", "both")):
        functions = {entry.name: [found[pass_name]] for entry, found in bound}
        times, failed = measure_times(device, functions, pass_name == "training", "eager", budget)
        for entry, _ in bound:
            record = {"block": block, "dtypes": dtypes, "pass": pass_name} | entry.record(checked, failed)
            yield record | summarize(times, entry.name, ("torch",))
