"""Forward, backward and both: the time of every contender on every case, beside torch's and a copy's.

Correctness comes first: whatever is wrong or fails is shown as that. A copy of the same bytes takes part as "copy":
where memory is the limit, as it is for all but small inputs, nothing can be faster.
"""

import statistics
from collections.abc import Iterator
from itertools import product

import torch

from .cases import Case, largest_error
from .contenders import PASSES, Copy, enter
from .timing import Device, contest, figures, first_line, sampler

COPY = "copy"
AGAINST = ("torch", COPY)


def sets_of(device: Device, rows: int, cols: int, dtypes: str) -> list[Case]:
    """Return as many sets of tensors as calls rotate through."""
    first = Case(rows, cols, dtypes, device.name)
    count = max(1, -(-device.rotate // (2 * first.x.nbytes)))
    return [first, *(Case(rows, cols, dtypes, device.name) for _ in range(count - 1))]


def measure(
    device: Device, rows: int, cols: int, dtypes: str, names: list[str], passes: list[str], budget: float
) -> Iterator[dict]:
    """Yield a record for each pass, way of calling and contender."""
    cell = {"rows": rows, "cols": cols, "dtypes": dtypes}
    try:
        sets = sets_of(device, rows, cols, dtypes)
        entries, copies = enter(names, sets), [Copy(case) for case in sets]
    except torch.OutOfMemoryError as error:
        unknown = dict.fromkeys(("how", "sets", "bytes", "operations"))
        failed = {"status": "failed", "message": first_line(error), "error": None} | figures({}, "", AGAINST)
        for which, name in product(passes, names):
            yield cell | {"pass": which} | unknown | {"contender": name} | failed
        return
    for which in passes:
        calls = {entry.name: entry.each(which) for entry in entries if which not in entry.failed}
        calls[COPY] = [getattr(copy, which) for copy in copies]
        for how in device.hows:
            times, failed = contest(device, calls, which != "forward", how, budget)
            cell |= {"pass": which, "how": how, "sets": len(sets)}
            cell |= {"bytes": sets[0].bytes_moved(which), "operations": sets[0].operations(which)}
            for entry in entries:
                status, message = entry.status(which, failed)
                record = cell | {"contender": entry.name, "status": status, "message": message}
                record["error"] = largest_error(entry.errors, which)
                yield record | figures(times, entry.name, AGAINST)
            copied = {"contender": COPY, "status": "ok", "message": "", "error": None}
            yield cell | copied | figures(times, COPY, AGAINST) | {"verdict": None}


def geometric_means(records: list[dict]) -> Iterator[tuple[str, str, str, float, float]]:
    """Yield pass, way of calling, dtypes, geometric mean and least of torch's time / ours."""
    ours = [r for r in records if r["contender"] == "ours" and r["of_torch"]]
    for which in PASSES:
        for how, dtypes in sorted({(r["how"], r["dtypes"]) for r in ours}):
            ratios = [r["of_torch"] for r in ours if (r["pass"], r["how"], r["dtypes"]) == (which, how, dtypes)]
            if ratios:
                yield which, how, dtypes, statistics.geometric_mean(ratios), min(ratios)


def matrix_product(device: Device, size: int = 1024) -> float:
    """Return the GFLOP/s of a float32 matrix product: the roof of whatever computes rather than moves."""
    a, b = (torch.randn(size, size, device=device.name) for _ in range(2))
    product = sampler(device, [lambda: (a @ b,)], grad=False)
    return 2 * size**3 / min(product() for _ in range(5)) / 1e9
