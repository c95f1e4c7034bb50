"""Measure layer_norm alone: its time (`kernels`), the host's part of a call (`overhead`) and errors (`accuracy`)."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import nn

import layernorm_ext

from .cases import DTYPE_PAIRS, EPS, QUANTITIES, Case
from .contenders import Contender, Copy, bind_contenders, time_pass
from .timing import Device

COPY = "copy"
OPERATORS = {"ours": torch.ops.layernorm.forward.default, "torch": torch.ops.aten.native_layer_norm.default}
MODULES = {"ours": layernorm_ext.LayerNorm, "torch": nn.LayerNorm}

# sweep -> arguments of Case. The standard deviation is 1 unless `scale` says otherwise. 4^10 rows test the sums of the
# weight gradients. The scales reach from float16's smallest subnormal number, 2^-24, to its largest numbers.
SWEEPS = {
    "offset": [{"rows": 256, "cols": 1024, "offset": offset} for offset in (0, 1, 10, 1e2, 1e3, 1e4, 1e5, 1e6)],
    "rows": [{"rows": 4**k, "cols": 16} for k in range(11)],
    "cols": [{"rows": 8, "cols": 4**k} for k in range(10)],
    "scale": [{"rows": 64, "cols": 1024, "scale": 2.0**k} for k in (-24, -20, -16, -12, -8, -4, 0, 4, 8, 12, 13)],
}


def make_cases(device: Device, rows: int, cols: int, dtypes: str) -> list[Case]:
    """Return as many cases of one size as fill `device.rotate` bytes with their inputs and outputs."""
    first = Case(rows, cols, dtypes, device.name)
    count = max(1, -(-device.rotate // (2 * first.x.nbytes)))
    return [first, *(Case(rows, cols, dtypes, device.name) for _ in range(count - 1))]


def measure_kernels(
    device: Device, rows: int, cols: int, dtypes: str, contenders: list[str], passes: list[str], seconds: float
) -> Iterator[dict]:
    """Time forward, backward and both on SHAPES, relative to torch and to a copy, after checking the results."""
    cases = make_cases(device, rows, cols, dtypes)
    copied = Contender(COPY, cases[0].dtype, lambda: [Copy(case) for case in cases], {})
    entries = [*bind_contenders(contenders, cases), copied]
    for pass_name, mode in product(passes, device.modes):
        case = {"rows": rows, "cols": cols, "dtypes": dtypes, "pass": pass_name, "mode": mode, "sets": len(cases)}
        yield from time_pass(device, entries, case, pass_name, seconds, mode, ("torch", COPY))


def measure_overhead(device: Device, dtypes: str, contenders: list[str], seconds: float) -> Iterator[dict]:
    """Time the host's part of one call, on an input so small that the kernel takes almost no time."""
    rows, cols = 8, 64
    case = Case(rows, cols, dtypes, device.name)
    arguments = case.x, list(case.weight.shape), case.weight, case.bias, EPS
    settings = {"eps": EPS, "device": device.name, "dtype": case.parameter_dtype}
    entries = bind_contenders(contenders, [case])
    # Only torch and this package have an operator and a module with the same arguments.
    native = [entry for entry in entries if entry.name in OPERATORS]
    # The name of a way of calling, the pass that must work for it, its contenders, and the function to time. With the
    # pass "both", calls build an autograd graph.
    ways = (
        ("operator", "forward", native, lambda entry: partial(OPERATORS[entry.name], *arguments)),
        ("function", "forward", entries, lambda entry: entry.calls[0].function),
        ("module", "forward", native, lambda entry: partial(MODULES[entry.name](cols, **settings), case.x)),
        ("function with graph", "both", entries, lambda entry: entry.calls[0].function),
        ("forward and backward", "both", entries, lambda entry: entry.calls[0].both),
    )
    for way, pass_name, entered, select in ways:
        keys = {"rows": rows, "cols": cols, "dtypes": dtypes, "way": way}
        yield from time_pass(device, entered, keys, pass_name, seconds, "host", select=select)


def accuracy_points(dtypes: list[str]) -> Iterator[tuple[str, float, str, dict]]:
    """Yield sweep, swept value, dtypes and the arguments of Case for all inputs."""
    for sweep, name in product(SWEEPS, dtypes):
        for arguments in SWEEPS[sweep]:
            if arguments.get("offset", 0) < torch.finfo(DTYPE_PAIRS[name][0]).max:  # the dtype can represent the mean
                yield sweep, arguments[sweep], name, arguments


def measure_accuracy(
    device: Device, sweep: str, value: float, dtypes: str, arguments: dict, contenders: list[str]
) -> Iterator[dict]:
    """Compare output and gradients with float64 over ranges of offset, rows, columns and scale."""
    case = Case(**arguments, dtypes=dtypes, device=device.name)
    for entry in bind_contenders(contenders, [case]):
        for quantity in QUANTITIES:
            record = {"sweep": sweep, "dtypes": dtypes, "quantity": quantity, "contender": entry.name}
            record |= {"value": value, "rows": case.rows, "cols": case.cols, "status": "ok", "message": ""}
            if quantity not in entry.errors:  # an error of any size is a valid record
                record |= {"status": "failed", "message": entry.failed["both"]}
            yield record | {"error": entry.errors.get(quantity)}
