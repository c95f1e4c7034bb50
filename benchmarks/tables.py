"""The printed table of a run: a line per case, a column per contender."""

from collections import Counter

from rich.table import Table

from .runs import Run

KEYS = {  # benchmark -> the keys that identify a case
    "kernels": ("rows", "cols", "dtypes", "pass", "mode"),
    "overhead": ("dtypes", "way"),
    "memory": ("rows", "cols", "dtypes", "stage"),
    "accuracy": ("sweep", "dtypes", "quantity"),
    "adaln": ("batch", "rows", "cols", "dtypes", "pass"),
    "compile": ("block", "dtypes", "pass"),
    "compare": ("rows", "cols", "dtypes", "pass"),
}
CAPTION = "time · time of torch, or of the base, / this time · copy's time / this time · largest error · peak memory"


def text(record: dict) -> str:
    """Return the figures that a record has, in the order of CAPTION, and the status unless it is ok."""
    parts = []
    if record.get("us"):
        parts.append(f"{record['us']:.4g} µs")
    if record.get("verdict"):
        ratio = record["of_base"] if "of_base" in record else record["of_torch"]
        parts.append(f"{ratio:.3g}" + (" noise" if record["verdict"] == "noise" else ""))
    if record.get("of_copy"):
        parts.append(f"{record['of_copy']:.0%}")
    if record.get("error") is not None:
        parts.append(f"{record['error']:.0e}")
    if record.get("peak_bytes") is not None:
        parts.append(f"{record['peak_bytes'] / 2**20:.2f} MiB, keeps {record['kept_bytes'] / 2**20:.2f}")
    if record["status"] != "ok":
        parts.append(record["status"].upper())
    return " · ".join(parts)


def notes(run: Run) -> list[str]:
    """Return one line for each distinct failure of each contender."""
    found = Counter((r["contender"], r["status"], r["message"]) for r in run.records if r["status"] != "ok")
    return [f"{name} {status} ({count} of its cases): {message}" for (name, status, message), count in found.items()]


def terminal(run: Run) -> Table:
    """Return the table of a run."""
    keys = KEYS[run.benchmark]
    cases: dict[tuple, dict[str, dict]] = {}
    for r in run.records:
        found = cases.setdefault(tuple(str(r[key]) for key in keys), {})
        # A case of `accuracy` is a whole sweep: the record with the largest error represents it.
        if r["contender"] not in found or (r["error"] or 0) > (found[r["contender"]]["error"] or 0):
            found[r["contender"]] = r
    names = list(dict.fromkeys(r["contender"] for r in run.records))
    table = Table(*keys, "noise", *names, title=run.benchmark, caption=CAPTION)

    for case, found in cases.items():
        noise = next((f"{r['noise']:.3f}" for r in found.values() if r.get("noise")), "")
        table.add_row(*case, noise, *(text(found[name]) if name in found else "" for name in names))
    return table
