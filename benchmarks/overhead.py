"""Host time of one call on an input so small that the kernel's time is negligible."""

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
# What is called -> the pass that must work for it. All but the "forward" entries build an autograd graph.
WAYS = {
    "operator": "forward",
    "function": "forward",
    "module": "forward",
    "function with graph": "both",
    "forward and backward": "both",
}


def call(way: str, case: Case, entry: Entry) -> Callable[[], object] | None:
    """Return the function to time, or None if the contender has no such interface."""
    layer = entry.calls[0].layer
    if way == "operator":
        if entry.name not in OPERATORS:
            return None
        operator, shape = OPERATORS[entry.name], list(case.weight.shape)
        return lambda: operator(case.x, shape, case.weight, case.bias, EPS)
    if way == "module":
        if entry.name not in MODULES:
            return None
        layer = MODULES[entry.name](case.cols, EPS, device=case.x.device, dtype=case.parameter_dtype)
    return entry.calls[0].both if way == "forward and backward" else lambda: layer(case.x)


def measure(device: Device, dtypes: str, names: list[str], budget: float) -> Iterator[dict]:
    """Yield a record for each way of calling and contender."""
    case = Case(ROWS, COLS, dtypes, device.name)
    entries = enter(names, [case])
    for way, which in WAYS.items():
        functions = {entry.name: call(way, case, entry) for entry in entries if which not in entry.failed}
        calls = {name: [function] for name, function in functions.items() if function}
        times, failed = contest(device, calls, which != "forward", "host", budget)
        for entry in entries:
            if entry.name in calls or which in entry.failed:
                status, message = entry.status(which, failed)
                record = {"rows": ROWS, "cols": COLS, "dtypes": dtypes, "way": way, "contender": entry.name}
                yield record | {"status": status, "message": message} | figures(times, entry.name, ("torch",))
