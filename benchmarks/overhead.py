"""What a call costs the host, at a size where nothing else counts: the time until it returns, by way of calling."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

import layernorm_ext

from .cases import EPS, Case
from .contenders import Entry, enter
from .timing import Device, contest, figures

ROWS, COLS = 8, 64
OPERATORS = {"ours": torch.ops.layernorm.forward.default, "torch": torch.ops.aten.native_layer_norm.default}
MODULES = {"ours": layernorm_ext.LayerNorm, "torch": nn.LayerNorm}
# Way of calling -> the pass that must work for it; all but forward record for a backward.
WAYS = {
    "operator": "forward",
    "function": "forward",
    "module": "forward",
    "function that records": "both",
    "forward and backward": "both",
}


def call(way: str, case: Case, entry: Entry) -> Callable[[], object] | None:
    """Return what is called; None if the contender has no such thing."""
    if way == "operator":
        operator, shape = OPERATORS.get(entry.name), list(case.weight.shape)
        return operator and (lambda: operator(case.x, shape, case.weight, case.bias, EPS))
    if way == "module":
        module = MODULES.get(entry.name, lambda *_, **__: None)(
            case.cols, EPS, device=case.x.device, dtype=case.parameter_dtype
        )
        return module and (lambda: module(case.x))
    calls = entry.calls[0]
    return calls.both if way == "forward and backward" else lambda: calls.layer(case.x)


def measure(device: Device, dtypes: str, names: list[str], budget: float) -> Iterator[dict]:
    """Yield a record for each way of calling and contender."""
    case = Case(ROWS, COLS, dtypes, device.name)
    entries = enter(names, [case])
    for way, which in WAYS.items():
        working = {entry.name: call(way, case, entry) for entry in entries if which not in entry.failed}
        calls = {name: [function] for name, function in working.items() if function}
        times, failed = contest(device, calls, which != "forward", "host", budget)
        for entry in entries:
            if entry.name in calls or which in entry.failed:
                status, message = entry.status(which, failed)
                record = {"rows": ROWS, "cols": COLS, "dtypes": dtypes, "way": way, "contender": entry.name}
                yield record | {"status": status, "message": message} | figures(times, entry.name, ("torch",))
