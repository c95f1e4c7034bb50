"""The errors of output and gradients against the exact results, as the input gets harder."""

from collections.abc import Iterator

import torch

from .cases import PAIRS, QUANTITIES, Case
from .contenders import enter

# What is varied -> what Case is called with. Means are in standard deviations; a million rows are what weight gradients
# of long sequences are summed over; float16 ends at 65504, and its subnormal numbers at 6e-8.
SWEEPS = {
    "offset": [{"rows": 256, "cols": 1024, "offset": offset} for offset in (0, 1, 10, 1e2, 1e3, 1e4, 1e5, 1e6)],
    "rows": [{"rows": 4**k, "cols": 16} for k in range(11)],
    "cols": [{"rows": 8, "cols": 4**k} for k in range(10)],
    "scale": [{"rows": 64, "cols": 1024, "scale": 2.0**k} for k in (-24, -20, -16, -12, -8, -4, 0, 4, 8, 12, 13)],
}


def points(sweeps: list[str], dtypes: list[str], largest: int) -> Iterator[tuple[str, float, str, dict]]:
    """Yield sweep, the value that is varied, dtypes, and what Case is called with, up to `largest` elements."""
    for sweep in sweeps:
        for name in dtypes:
            for arguments in SWEEPS[sweep]:
                # A mean beyond the dtype's numbers would make every input infinite.
                fits = arguments.get("offset", 0) < torch.finfo(PAIRS[name][0]).max
                if fits and arguments["rows"] * arguments["cols"] <= largest:
                    yield sweep, arguments[sweep], name, arguments


def measure(device: str, sweep: str, value: float, dtypes: str, arguments: dict, names: list[str]) -> Iterator[dict]:
    """Yield a record for each contender."""
    case = Case(**arguments, dtypes=dtypes, device=device)
    for entry in enter(names, [case]):
        status, message = entry.status("both", {})
        record = {"sweep": sweep, "value": value, "rows": case.rows, "cols": case.cols, "dtypes": dtypes}
        record |= {"contender": entry.name, "status": status, "message": message}
        yield record | {quantity: entry.errors.get(quantity) for quantity in QUANTITIES}
