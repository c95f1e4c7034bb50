"""Times of forward, backward and both for every contender, relative to torch and to a copy of the same bytes.

Results are compared with the exact ones before they are timed; wrong and failing contenders are reported.
"""

from collections.abc import Iterator
from itertools import product

import torch

from .cases import Case
from .contenders import Copy, enter
from .timing import Device, contest, figures, first_line

COPY = "copy"
AGAINST = ("torch", COPY)


def sets_of(device: Device, rows: int, cols: int, dtypes: str) -> list[Case]:
    """Return enough sets of tensors that their inputs and outputs fill `device.rotate` bytes."""
    first = Case(rows, cols, dtypes, device.name)
    count = max(1, -(-device.rotate // (2 * first.x.nbytes)))
    return [first, *(Case(rows, cols, dtypes, device.name) for _ in range(count - 1))]


def measure(
    device: Device, rows: int, cols: int, dtypes: str, names: list[str], passes: list[str], budget: float
) -> Iterator[dict]:
    """Yield a record for each pass, call mode and contender."""
    cell = {"rows": rows, "cols": cols, "dtypes": dtypes}
    try:
        sets = sets_of(device, rows, cols, dtypes)
        entries, copies = enter(names, sets), [Copy(case) for case in sets]
    except torch.OutOfMemoryError as error:
        failed = {"status": "failed", "message": first_line(error), "error": None} | figures({}, "", AGAINST)
        for which, name in product(passes, names):
            yield cell | {"pass": which, "mode": None, "sets": None, "bytes": None, "contender": name} | failed
        return
    for which, mode in product(passes, device.modes):
        calls = {entry.name: [getattr(c, which) for c in entry.calls] for entry in entries if which not in entry.failed}
        calls[COPY] = [getattr(copy, which) for copy in copies]
        times, failed = contest(device, calls, which != "forward", mode, budget)
        cell |= {"pass": which, "mode": mode, "sets": len(sets), "bytes": sets[0].bytes_moved(which)}
        for entry in entries:
            yield cell | entry.record(which, failed) | figures(times, entry.name, AGAINST)
        copied = {"contender": COPY, "status": "ok", "message": "", "error": None}
        yield cell | copied | figures(times, COPY, AGAINST) | {"verdict": None}
