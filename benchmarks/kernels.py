"""Check every contender's results, then time forward, backward and both, relative to torch and to a copy."""

from collections.abc import Iterator
from itertools import product

from .cases import Case
from .contenders import Copy, bind_contenders
from .timing import Device, measure_times, summarize

COPY = "copy"
AGAINST = ("torch", COPY)


def make_cases(device: Device, rows: int, cols: int, dtypes: str) -> list[Case]:
    """Return enough cases that their inputs and outputs fill `device.rotate` bytes."""
    first = Case(rows, cols, dtypes, device.name)
    count = max(1, -(-device.rotate // (2 * first.x.nbytes)))
    return [first, *(Case(rows, cols, dtypes, device.name) for _ in range(count - 1))]


def measure(
    device: Device, rows: int, cols: int, dtypes: str, names: list[str], passes: list[str], budget: float
) -> Iterator[dict]:
    """Yield a record for each pass, call mode and contender."""
    sets = make_cases(device, rows, cols, dtypes)
    entries, copies = bind_contenders(names, sets), [Copy(case) for case in sets]
    for pass_name, mode in product(passes, device.modes):
        calls = {entry.name: entry.functions(pass_name) for entry in entries if pass_name not in entry.failed}
        calls[COPY] = [getattr(copy, pass_name) for copy in copies]
        times, failed = measure_times(device, calls, pass_name != "forward", mode, budget)
        cell = {"rows": rows, "cols": cols, "dtypes": dtypes, "pass": pass_name, "mode": mode, "sets": len(sets)}
        for entry in entries:
            yield cell | entry.record(pass_name, failed) | summarize(times, entry.name, AGAINST)
        copied = {"contender": COPY, "status": "ok", "message": "", "error": None}
        yield cell | copied | summarize(times, COPY, AGAINST) | {"verdict": None}
