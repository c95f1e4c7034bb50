"""The compared implementations: this package, torch, torch.compile, other installed packages, and a copy.

Each is called as its authors document, as a differentiable function of rows, weight and bias. A contender that cannot
run a case is reported as failed, with its error message.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.nn.functional as F
from torch import Tensor

import layernorm_ext

from .cases import EPS, RESULTS, TOLERANCE, Case, errors
from .timing import first_line

PASSES = ("forward", "backward", "both")
Layer = Callable[[Tensor], Tensor]


def functional(function: Callable) -> Callable[[Case], Layer]:
    def bind(case: Case) -> Layer:
        weight, bias, shape = case.weight, case.bias, case.weight.shape
        return lambda x: function(x, shape, weight, bias, EPS)

    return bind


@lru_cache(maxsize=1)
def compiled_for(rows: int, cols: int, dtypes: str) -> Callable:
    """Return torch's function, compiled for a single static shape."""
    torch.compiler.reset()
    # The benchmark runs backward many times on the same graph, so its buffers must not be donated.
    torch._functorch.config.donated_buffer = False
    return torch.compile(F.layer_norm, fullgraph=True, dynamic=False)


def torch_compiled(case: Case) -> Layer:
    return functional(compiled_for(case.rows, case.cols, case.dtypes))(case)


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


# name -> its package, and a function that binds the parameters of a case
CONTENDERS: dict[str, tuple[str, Callable[[Case], Layer]]] = {
    "ours": ("layernorm-ext", functional(layernorm_ext.layer_norm)),
    "torch": ("torch", functional(F.layer_norm)),
    "torch.compile": ("torch", torch_compiled),
    "apex": ("apex", apex),
    "flash-attn": ("flash-attn", flash_attn),
    "liger-kernel": ("liger-kernel", liger),
    "quack-kernels": ("quack-kernels", quack),
    "transformer-engine": ("transformer-engine", transformer_engine),
}


def installed() -> dict[str, str]:
    """Return the versions of the installed contenders."""
    versions = {}
    for name, (package, _) in CONTENDERS.items():
        with suppress(PackageNotFoundError):
            versions[name] = version(package)
    return versions


class Calls:
    """The three passes of one contender on one case; each returns a tuple of tensors."""

    def __init__(self, name: str, case: Case):
        self.layer = CONTENDERS[name][1](case)
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
class Contender:
    """A contender's calls on each set of tensors, the errors of its results, and its failures."""

    name: str
    tolerance: float
    calls: list[Calls] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)  # quantity -> error, for the results that exist
    failed: dict[str, str] = field(default_factory=dict)  # pass -> message

    def functions(self, pass_name: str) -> list[Callable[[], tuple[Tensor, ...]]]:
        return [getattr(calls, pass_name) for calls in self.calls]

    def record(self, pass_name: str, failed_later: dict[str, str]) -> dict:
        """Return the contender, the status (ok, wrong or failed), the message and the largest error in a pass."""
        known = ((self.errors[quantity], quantity) for quantity in RESULTS[pass_name] if quantity in self.errors)
        error, quantity = max(known, default=(None, ""))
        status, message = "ok", ""
        if pass_name in self.failed or self.name in failed_later:
            status, message = "failed", self.failed.get(pass_name) or failed_later[self.name]
        elif error is not None and error > self.tolerance:
            status, message = "wrong", f"{quantity} is off by {error:.1e} of its largest value"
        return {"contender": self.name, "status": status, "message": message, "error": error}


def bind_contenders(names: Iterable[str], sets: list[Case]) -> list[Contender]:
    """Bind contenders to all sets of tensors and compare their results on the first set with float64."""
    entries, results = [Contender(name, TOLERANCE[sets[0].dtype]) for name in names], {}
    for entry in entries:
        try:
            entry.calls = [Calls(entry.name, case) for case in sets]
            y = entry.calls[0].layer(sets[0].x)
            results[entry.name] = (y.detach(),)
        except Exception as error:  # other packages may raise anything
            entry.failed = dict.fromkeys(PASSES, first_line(error))
            continue
        try:
            results[entry.name] += torch.autograd.grad(y, entry.calls[0].inputs, sets[0].dy)
        except Exception as error:
            entry.failed = dict.fromkeys(PASSES[1:], first_line(error))
    found = errors(sets[0], results)
    for entry in entries:
        entry.errors = found.get(entry.name, {})
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
