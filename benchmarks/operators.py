"""The bare operators on a CPU, without autograd: ours, torch's, oneDNN's if its package is there, and a copy.

What the kernels alone take, but for the allocation of their results, is at the limits of memory (the copy) or of
arithmetic (a shape that lies in the caches).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from . import onednn
from .cases import EPS, Case, errors, fault, largest_error
from .contenders import Contender, Copy
from .kernels import AGAINST, COPY
from .timing import Device, contest, figures, first_line

PASSES = ("forward", "backward")


class Operators:
    """Forward and backward of a package that has operators of aten's signatures."""

    def __init__(self, case: Case, forward: Callable, backward: Callable):
        x, w, b = (tensor.detach() for tensor in (case.x, case.weight, case.bias))
        shape = [case.cols]
        self.forward = lambda: forward(x, shape, w, b, EPS)
        _, mean, rstd = self.forward()
        self.backward = lambda: backward(case.dy, x, shape, mean, rstd, w, b, [True] * 3)

    def __call__(self) -> tuple[Tensor, ...]:
        """Return output and gradients."""
        return self.forward()[0], *self.backward()


def ours(case: Case) -> Operators:
    return Operators(case, torch.ops.layernorm.forward, torch.ops.layernorm.backward)


def torch_operators(case: Case) -> Operators:
    return Operators(case, torch.ops.aten.native_layer_norm, torch.ops.aten.native_layer_norm_backward)


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("ours", "layernorm-ext", ours),
        Contender("torch", "torch", torch_operators),
        Contender("onednn", "onednn", onednn.Normalization),
    )
}


def measure(device: Device, rows: int, cols: int, dtypes: str, names: list[str], budget: float) -> Iterator[dict]:
    """Yield a record for each pass and contender."""
    case = Case(rows, cols, dtypes)
    copy, entered, failed, results = Copy(case), {}, {}, {}
    for name in names:
        try:
            entered[name] = CONTENDERS[name].bind(case)
            results[name] = entered[name]()
        except Exception as error:  # of any kind: it is others' code
            failed[name] = first_line(error)
    error = errors(case, results)
    for which in PASSES:
        calls = {name: [getattr(contender, which)] for name, contender in entered.items() if name not in failed}
        times, failed_later = contest(device, calls | {COPY: [getattr(copy, which)]}, False, "eager", budget)
        cell = {"rows": rows, "cols": cols, "dtypes": dtypes, "pass": which, "how": "eager", "sets": 1}
        cell |= {"bytes": case.bytes_moved(which), "operations": case.operations(which)}
        for name in [*names, COPY]:
            message = failed.get(name) or failed_later.get(name)
            wrong = fault(case, error[name], which) if name in error else ""
            status = "failed" if message else "wrong" if wrong else "ok"
            largest = largest_error(error.get(name, {}), which)
            record = cell | {"contender": name, "status": status, "message": message or wrong, "error": largest}
            yield record | figures(times, name, AGAINST)
