"""The compared implementations: this package, torch, torch.compile, other installed packages, and a copy.

Each is called as its authors document, as a differentiable function of rows, weight and bias. A contender that cannot
run a case is reported as failed, with its error message.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from pkgutil import resolve_name

import torch
from torch import Tensor

from .cases import EPS, TOLERANCE, Case, Exact, error, exact_results
from .timing import AGAIN, Device, first_line, make_sampler, sample_in_rounds, summarize

PASSES = ("forward", "backward", "both")
Function = Callable[[], Tensor | tuple[Tensor, ...]]


def like_torch(function: Callable, case: Case) -> Function:
    return partial(function, case.x, case.weight.shape, case.weight, case.bias, EPS)


@lru_cache(maxsize=1)
def compile_for(function: Callable, *shape: int | str) -> Callable:
    """Return a function compiled for static shapes. Only lru_cache reads `shape`: a new one is compiled again."""
    torch.compiler.reset()
    # The benchmark runs backward many times on the same graph, so its buffers must not be donated.
    torch._functorch.config.donated_buffer = False
    return torch.compile(function, fullgraph=True, dynamic=False)


def transformer_engine(layer_norm: Callable, case: Case) -> Function:
    layer = layer_norm(case.cols, eps=EPS)
    layer.weight, layer.bias = case.weight, case.bias
    return partial(layer, case.x)


# name -> the package, the location of its function, and a function that binds this one to the tensors of a case
CONTENDERS: dict[str, tuple[str, str, Callable[[Callable, Case], Function]]] = {
    "ours": ("layernorm-ext", "layernorm_ext:layer_norm", like_torch),
    "torch": ("torch", "torch.nn.functional:layer_norm", like_torch),
    "torch.compile": (
        "torch",
        "torch.nn.functional:layer_norm",
        lambda f, case: like_torch(compile_for(f, case.rows, case.cols, case.dtypes), case),
    ),
    "apex": (
        "apex",
        "apex.normalization.fused_layer_norm:fused_layer_norm_affine",
        lambda f, case: partial(f, case.x, case.weight, case.bias, case.weight.shape, EPS),
    ),
    "flash-attn": (
        "flash-attn",
        "flash_attn.ops.triton.layer_norm:layer_norm_fn",
        lambda f, case: partial(f, case.x, case.weight, case.bias, eps=EPS),
    ),
    "liger-kernel": (
        "liger-kernel",
        "liger_kernel.transformers.functional:liger_layer_norm",
        lambda f, case: partial(f, case.x, case.weight, case.bias, EPS),
    ),
    "quack-kernels": (
        "quack-kernels",
        "quack.rmsnorm:layernorm_fwd",
        lambda f, case: partial(f, case.x, case.weight, bias=case.bias, eps=EPS),
    ),
    "transformer-engine": ("transformer-engine", "transformer_engine.pytorch:LayerNorm", transformer_engine),
}


def installed() -> dict[str, str]:
    """Return the versions of the installed contenders."""
    versions = {}
    for name, (package, *_) in CONTENDERS.items():
        with suppress(PackageNotFoundError):
            versions[name] = version(package)
    return versions


class Calls:
    """The passes of a differentiable function of `inputs`; each returns a tuple of tensors."""

    def __init__(self, function: Function, inputs: Iterable[Tensor], dy: Tensor):
        self.function, self.inputs, self.dy = function, tuple(inputs), dy
        self.outputs = ()

    def forward(self) -> tuple[Tensor, ...]:
        results = self.function()
        return results if isinstance(results, tuple) else (results,)

    def gradients(self, outputs: tuple[Tensor, ...], keep: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, self.inputs, [self.dy] * len(outputs), retain_graph=keep)

    def backward(self) -> tuple[Tensor, ...]:
        if not self.outputs:
            with torch.enable_grad():
                self.outputs = self.forward()
        return self.gradients(self.outputs, keep=True)

    def both(self) -> tuple[Tensor, ...]:
        return self.gradients(self.forward())


class Copy(Calls):
    """The lower bound of each pass: a negation or an addition that moves the same number of bytes.

    torch copies by cudaMemcpyAsync, which takes 1.6 times as long for some sizes (NVIDIA H200).
    """

    def __init__(self, case: Case):
        forward, backward = case.bytes_moved()
        source, copied = (torch.ones(forward // 8, device=case.x.device) for _ in range(2))  # float32: 4 bytes each
        super().__init__(partial(torch.neg, source, out=copied), (), case.dy)
        self.terms = [torch.ones(backward // 12, device=case.x.device) for _ in range(3)]

    def gradients(self, outputs: tuple[Tensor, ...], keep: bool = False) -> tuple[Tensor, ...]:
        return (torch.add(*self.terms[:2], out=self.terms[2]),)


def is_computed(quantity: str, pass_name: str) -> bool:
    """Return whether a pass computes a quantity: forward the outputs, backward the gradients."""
    return pass_name == "both" or quantity.startswith("grad_") == (pass_name == "backward")


class Contender:
    """A contender's calls for each case (see make_cases()), the errors of its results, and its failures.

    `expected` has the exact outputs, then the exact gradients, whose names begin with "grad_". The errors are those of
    the first case.
    """

    def __init__(self, name: str, dtype: torch.dtype, bind: Callable[[], list[Calls]], expected: dict[str, Exact]):
        self.name, self.tolerance = name, TOLERANCE[dtype]
        self.calls: list[Calls] = []
        self.errors: dict[str, float] = {}  # quantity -> error, for the results that exist
        self.failed: dict[str, str] = {}  # pass -> message
        results, untried = (), PASSES  # untried: the passes that fail if the next call raises an error
        try:
            self.calls = bind()
            results = self.calls[0].forward()
            untried = PASSES[1:]
            results += self.calls[0].gradients(results)
        except Exception as failure:  # other packages may raise anything
            self.failed = dict.fromkeys(untried, first_line(failure))
        for result, (quantity, exact) in zip(results, expected.items(), strict=False):
            self.errors[quantity] = error(result, exact)

    def functions(self, pass_name: str) -> list[Callable[[], tuple[Tensor, ...]]]:
        return [getattr(calls, pass_name) for calls in self.calls]

    def record(self, pass_name: str, failed_later: dict[str, str]) -> dict:
        """Return the contender, the status (ok, wrong or failed), the message and the largest error in a pass.

        `failed_later` has the messages of contenders that raised errors while they were timed.
        """
        known = ((e, quantity) for quantity, e in self.errors.items() if is_computed(quantity, pass_name))
        largest, quantity = max(known, default=(None, ""))
        status, message = "ok", ""
        if pass_name in self.failed or self.name in failed_later:
            status, message = "failed", self.failed.get(pass_name) or failed_later[self.name]
        elif largest is not None and largest > self.tolerance:
            status, message = "wrong", f"{quantity} is off by {largest:.1e} of its largest value"
        return {"contender": self.name, "status": status, "message": message, "error": largest}


def bind_contenders(names: Iterable[str], cases: list[Case]) -> list[Contender]:
    """Bind contenders to the tensors of each case, and compare their results for the first case with float64.

    All cases have the same size: the calls take turns, so that a GPU's kernels do not find tensors in its caches.
    """

    def bind(name: str) -> list[Calls]:
        _, location, of_case = CONTENDERS[name]
        function = resolve_name(location)
        return [Calls(of_case(function, case), (case.x, case.weight, case.bias), case.dy) for case in cases]

    expected = exact_results(cases[0])
    return [Contender(name, cases[0].dtype, partial(bind, name), expected) for name in names]


def bind_functions(functions: dict[str, Callable], reference: Callable, tensors: list[Tensor]) -> list[Contender]:
    """Bind functions of all tensors but the last, the upstream gradient; compare them with a reference in float64."""

    def bind(function: Callable, tensors: list[Tensor]) -> list[Calls]:
        inputs = [tensor.detach().requires_grad_() for tensor in tensors[:-1]]
        return [Calls(partial(function, *inputs), inputs, tensors[-1])]

    (exact,) = bind(reference, [tensor.double() for tensor in tensors])
    expected = {f"output {i}": t for i, t in enumerate(exact.forward())}
    expected |= {f"grad_{i}": t for i, t in enumerate(exact.both())}
    dtype = tensors[0].dtype
    return [Contender(name, dtype, partial(bind, function, tensors), expected) for name, function in functions.items()]


def time_pass(
    device: Device,
    entries: Sequence[Contender],
    case: dict,
    pass_name: str,
    budget: float,
    mode: str = "eager",
    against: tuple[str, ...] = ("torch",),
    select: Callable[[Contender], Callable] | None = None,
) -> Iterator[dict]:
    """Time a pass, or the function that `select` returns for each contender; yield records that begin with `case`.

    The first contender takes part twice, the second time as AGAIN: the ratios of its times show the noise.
    """
    samplers, failed = {}, {}
    for entry in entries:
        if pass_name in entry.failed:
            continue
        try:
            calls = [select(entry)] if select else entry.functions(pass_name)
            for name in (entry.name,) if samplers else (entry.name, AGAIN):
                samplers[name] = make_sampler(device, calls, pass_name != "forward", mode)
        except Exception as error:  # other packages may raise anything
            failed[entry.name] = first_line(error)
    times = sample_in_rounds(samplers, budget * len(samplers)) if samplers else {}
    for entry in entries:
        yield case | entry.record(pass_name, failed) | summarize(times, entry.name, against)
