"""Time the host's part of one call, on an input so small that the kernel takes almost no time."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

import layernorm_ext

from .cases import EPS, Case
from .contenders import Contender, bind_contenders
from .timing import Device, measure_times, summarize

ROWS, COLS = 8, 64
OPERATORS = {"ours": torch.ops.layernorm.forward.default, "torch": torch.ops.aten.native_layer_norm.default}
MODULES = {"ours": layernorm_ext.LayerNorm, "torch": nn.LayerNorm}
# Way of calling -> the pass that must work for it. All but the "forward" entries build an autograd graph.
WAYS = {
    "operator": "forward",
    "function": "forward",
    "module": "forward",
    "function with graph": "both",
    "forward and backward": "both",
}


def functions(case: Case, entry: Contender) -> dict[str, Callable[[], object]]:
    """Return the function to time for each of WAYS that the contender has."""
    calls, shape = entry.calls[0], list(case.weight.shape)
    found = {"function": lambda: calls.layer(case.x), "forward and backward": calls.both}
    found["function with graph"] = found["function"]
    if entry.name in OPERATORS:
        operator = OPERATORS[entry.name]
        module = MODULES[entry.name](case.cols, EPS, device=case.x.device, dtype=case.parameter_dtype)
        found["operator"] = lambda: operator(case.x, shape, case.weight, case.bias, EPS)
        found["module"] = lambda: module(case.x)
    return found


def measure(device: Device, dtypes: str, names: list[str], budget: float) -> Iterator[dict]:
    """Yield a record for each way of calling and contender."""
    case = Case(ROWS, COLS, dtypes, device.name)
    entries = bind_contenders(names, [case])
    for way, pass_name in WAYS.items():
        working = {entry.name: functions(case, entry) for entry in entries if pass_name not in entry.failed}
        calls = {name: [found[way]] for name, found in working.items() if way in found}
        times, failed = measure_times(device, calls, pass_name != "forward", "host", budget)
        for entry in entries:
            if entry.name in calls or pass_name in entry.failed:
                record = {"rows": ROWS, "cols": COLS, "dtypes": dtypes, "way": way} | entry.record(pass_name, failed)
                yield record | summarize(times, entry.name, ("torch",))
