"""The implementations that are compared: this package, torch, torch.compile, other installed packages, and a copy.

Each is called as its authors document, as a differentiable function of rows, weight and bias. A contender that cannot
run a case is reported as failed with its own message.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.nn.functional as F
from torch import Tensor

import layernorm_ext

from .cases import EPS, Case, errors, fault
from .timing import first_line

PASSES = ("forward", "backward", "both")
Layer = Callable[[Tensor], Tensor]


def ours(case: Case) -> Layer:
    weight, bias, shape = case.weight, case.bias, case.weight.shape
    return lambda x: layernorm_ext.layer_norm(x, shape, weight, bias, EPS)


def torch_eager(case: Case) -> Layer:
    weight, bias, shape = case.weight, case.bias, case.weight.shape
    return lambda x: F.layer_norm(x, shape, weight, bias, EPS)


@lru_cache(maxsize=1)
def compiled_for(rows: int, cols: int, dtypes: str) -> Callable:
    """Return torch's function, compiled for a single static shape."""
    torch.compiler.reset()
    # The benchmark runs backward many times on the same graph, so its buffers must not be donated.
    torch._functorch.config.donated_buffer = False
    return torch.compile(
        lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPS), fullgraph=True, dynamic=False
    )


def torch_compiled(case: Case) -> Layer:
    weight, bias, function = case.weight, case.bias, compiled_for(case.rows, case.cols, case.dtypes)
    return lambda x: function(x, weight, bias)


def apex(case: Case) -> Layer:
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    return lambda x: fused_layer_norm_affine(x, case.weight, case.bias, case.weight.shape, EPS)


def flash_attn(case: Case) -> Layer:
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    return lambda x: layer_norm_fn(x, case.weight, case.bias, eps=EPS)


def liger(case: Case) -> Layer:
    from liger_kernel.transformers.functional import liger_layer_norm

    return lambda x: liger_layer_norm(x, case.weight, case.bias, EPS)


def quack(case: Case) -> Layer:
    from quack.rmsnorm import layernorm_fwd

    return lambda x: layernorm_fwd(x, case.weight, bias=case.bias, eps=EPS)


def transformer_engine(case: Case) -> Layer:
    from transformer_engine.pytorch import LayerNorm

    layer = LayerNorm(case.cols, eps=EPS)
    layer.weight, layer.bias = case.weight, case.bias
    return layer


@dataclass(frozen=True)
class Contender:
    """One implementation. `bind` takes a Case and returns the layer with its parameters."""

    package: str
    bind: Callable[[Case], Layer]

    @property
    def version(self) -> str | None:
        """Return the installed version, or None if the package is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


ALL = {
    "ours": Contender("layernorm-ext", ours),
    "torch": Contender("torch", torch_eager),
    "torch.compile": Contender("torch", torch_compiled),
    "apex": Contender("apex", apex),
    "flash-attn": Contender("flash-attn", flash_attn),
    "liger-kernel": Contender("liger-kernel", liger),
    "quack-kernels": Contender("quack-kernels", quack),
    "transformer-engine": Contender("transformer-engine", transformer_engine),
}


class Calls:
    """The three passes of one contender on one case; each returns a tuple of tensors."""

    def __init__(self, contender: Contender, case: Case):
        self.layer = contender.bind(case)
        self.x, self.dy = case.x, case.dy
        self.inputs = (case.x, case.weight, case.bias)
        self.y = None

    def forward(self) -> tuple[Tensor, ...]:
        return (self.layer(self.x),)

    def backward(self) -> tuple[Tensor, ...]:
        if self.y is None:
            with torch.enable_grad():
                self.y = self.layer(self.x)
        return torch.autograd.grad(self.y, self.inputs, self.dy, retain_graph=True)

    def both(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.layer(self.x), self.inputs, self.dy)


@dataclass
class Entry:
    """A contender on one case: its calls on each set of tensors, and its faults."""

    name: str
    calls: list[Calls]
    errors: dict[str, float]  # quantity -> error, for the results that exist
    failed: dict[str, str]  # pass -> message
    wrong: dict[str, str]  # pass -> message

    def each(self, which: str) -> list[Callable[[], tuple[Tensor, ...]]]:
        """Return the calls of a pass, one for each set of tensors."""
        return [getattr(calls, which) for calls in self.calls]

    def status(self, which: str, failed_later: dict[str, str]) -> tuple[str, str]:
        """Return "ok", "wrong" or "failed", and the message."""
        message = self.failed.get(which) or failed_later.get(self.name)
        if message:
            return "failed", message
        return ("wrong", self.wrong[which]) if self.wrong.get(which) else ("ok", "")


def enter(names: Iterable[str], sets: list[Case], checks: bool = True) -> list[Entry]:
    """Bind contenders to all sets of tensors and compare their results on the first set with the exact ones.

    `checks=False` skips the comparison for builds whose results have been compared before.
    """
    entries, results = [], {}
    for name in names:
        entry = Entry(name, [], {}, {}, {})
        entries.append(entry)
        try:
            entry.calls = [Calls(ALL[name], case) for case in sets]
            y = entry.calls[0].layer(sets[0].x)
            results[name] = (y.detach(),)
        except Exception as error:  # other packages may raise anything
            entry.failed = dict.fromkeys(PASSES, first_line(error))
            continue
        try:
            results[name] += torch.autograd.grad(y, entry.calls[0].inputs, sets[0].dy)
        except Exception as error:
            entry.failed = dict.fromkeys(PASSES[1:], first_line(error))
    found = errors(sets[0], results) if checks else {}
    for entry in entries:
        if entry.name in found:
            entry.errors = found[entry.name]
            entry.wrong = {which: fault(sets[0], entry.errors, which) for which in PASSES if which not in entry.failed}
    return entries


class Copy:
    """The lower bound of each pass: a copy or an addition that moves the same number of bytes."""

    def __init__(self, case: Case):
        device = case.x.device
        self.source, self.copied = (torch.ones(case.bytes_moved("forward") // 8, device=device) for _ in range(2))
        self.terms = [torch.ones(case.bytes_moved("backward") // 12, device=device) for _ in range(3)]

    def forward(self) -> tuple[Tensor, ...]:
        return (self.copied.copy_(self.source),)

    def backward(self) -> tuple[Tensor, ...]:
        return (torch.add(*self.terms[:2], out=self.terms[2]),)

    def both(self) -> tuple[Tensor, ...]:
        return *self.forward(), *self.backward()
