"""Times of layer_norm by shape and dtype."""

from collections.abc import Iterator
from itertools import product

from .cases import Case
from .contenders import Contender, Copy, bind_contenders, time_pass
from .timing import Device

COPY = "copy"


def make_cases(device: Device, rows: int, cols: int, dtypes: str) -> list[Case]:
    """Return enough cases that their inputs and outputs fill `device.rotate` bytes."""
    first = Case(rows, cols, dtypes, device.name)
    count = max(1, -(-device.rotate // (2 * first.x.nbytes)))
    return [first, *(Case(rows, cols, dtypes, device.name) for _ in range(count - 1))]


def measure(
    device: Device, rows: int, cols: int, dtypes: str, contenders: list[str], passes: list[str], seconds: float
) -> Iterator[dict]:
    """Time forward, backward and both on SHAPES, relative to torch and to a copy, after checking the results."""
    sets = make_cases(device, rows, cols, dtypes)
    copied = Contender(COPY, sets[0].dtype, lambda: [Copy(case) for case in sets], {})
    entries = [*bind_contenders(contenders, sets), copied]
    for pass_name, mode in product(passes, device.modes):
        case = {"rows": rows, "cols": cols, "dtypes": dtypes, "pass": pass_name, "mode": mode, "sets": len(sets)}
        yield from time_pass(device, entries, case, pass_name, seconds, mode, ("torch", COPY))
