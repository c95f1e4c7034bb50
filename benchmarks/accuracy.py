"""Errors of layer_norm by offset, rows, columns and scale."""

from collections.abc import Iterator
from itertools import product

import torch

from .cases import PAIRS, QUANTITIES, Case
from .contenders import bind_contenders
from .timing import Device

# sweep -> arguments of Case. Offsets are in standard deviations. 4^10 rows test the sums of the weight gradients. The
# scales reach from float16's smallest subnormal number, 2^-24, to its largest numbers.
SWEEPS = {
    "offset": [{"rows": 256, "cols": 1024, "offset": offset} for offset in (0, 1, 10, 1e2, 1e3, 1e4, 1e5, 1e6)],
    "rows": [{"rows": 4**k, "cols": 16} for k in range(11)],
    "cols": [{"rows": 8, "cols": 4**k} for k in range(10)],
    "scale": [{"rows": 64, "cols": 1024, "scale": 2.0**k} for k in (-24, -20, -16, -12, -8, -4, 0, 4, 8, 12, 13)],
}


def points(dtypes: list[str]) -> Iterator[tuple[str, float, str, dict]]:
    """Yield sweep, swept value, dtypes and the arguments of Case for all inputs."""
    for sweep, name in product(SWEEPS, dtypes):
        for arguments in SWEEPS[sweep]:
            if arguments.get("offset", 0) < torch.finfo(PAIRS[name][0]).max:  # the dtype can represent the mean
                yield sweep, arguments[sweep], name, arguments


def measure(
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
