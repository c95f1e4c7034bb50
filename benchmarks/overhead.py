"""The host's part of one call, for each way to call layer_norm."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

import layernorm_ext

from .cases import EPS, Case
from .contenders import bind_contenders, time_pass
from .timing import Device

ROWS, COLS = 8, 64
OPERATORS = {"ours": torch.ops.layernorm.forward.default, "torch": torch.ops.aten.native_layer_norm.default}
MODULES = {"ours": layernorm_ext.LayerNorm, "torch": nn.LayerNorm}


def measure(device: Device, dtypes: str, contenders: list[str], seconds: float) -> Iterator[dict]:
    """Time the host's part of one call, on an input so small that the kernel takes almost no time."""
    case = Case(ROWS, COLS, dtypes, device.name)
    arguments = case.x, list(case.weight.shape), case.weight, case.bias, EPS
    settings = {"eps": EPS, "device": device.name, "dtype": case.parameter_dtype}
    entries = bind_contenders(contenders, [case])
    # Other packages have neither an operator nor a module that is called alike.
    native = [entry for entry in entries if entry.name in OPERATORS]
    # Way of calling, the pass that must work for it, its contenders, and the function to time. All but the "forward"
    # ways build an autograd graph.
    ways = (
        ("operator", "forward", native, lambda entry: partial(OPERATORS[entry.name], *arguments)),
        ("function", "forward", entries, lambda entry: entry.calls[0].function),
        ("module", "forward", native, lambda entry: partial(MODULES[entry.name](COLS, **settings), case.x)),
        ("function with graph", "both", entries, lambda entry: entry.calls[0].function),
        ("forward and backward", "both", entries, lambda entry: entry.calls[0].both),
    )
    for way, pass_name, entered, select in ways:
        keys = {"rows": ROWS, "cols": COLS, "dtypes": dtypes, "way": way}
        yield from time_pass(device, entered, keys, pass_name, seconds, "host", select=select)
