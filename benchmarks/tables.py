"""The table of a run, for the terminal and for the report: a line for each case, a column for each contender."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table

from .cases import QUANTITIES
from .runs import Run

STYLES = {"faster": "green", "slower": "red", "noise": "dim", "wrong": "bold red", "failed": "red"}


@dataclass(frozen=True)
class Cell:
    """A text and what it stands for: one of STYLES, or nothing."""

    text: str
    kind: str = ""


def timed(unit: str, factor: float, ratio: str = "of_torch") -> Callable[[dict], Cell]:
    def cell(record: dict) -> Cell:
        text, meaning = f"{record['us'] * factor:.4g} {unit}", record["verdict"] or ""
        if meaning:
            text += f" · {record[ratio]:.3g}" + (" noise" if meaning == "noise" else "")
        return Cell(text, meaning)

    return cell


def kernel(record: dict) -> Cell:
    cell = timed("µs", 1)(record)
    off = "" if record["error"] is None else f" · {record['error']:.0e}"  # a copy's is not looked at
    return Cell(f"{cell.text} · {record['of_copy']:.0%}{off}", cell.kind)


def step(record: dict) -> Cell:
    cell = timed("ms", 1e-3)(record)
    return Cell(f"{cell.text} · {record['peak_bytes'] / 2**20:.1f} MiB", cell.kind)


def allocated(record: dict) -> Cell:
    return Cell(f"{record['peak_bytes'] / 2**20:.2f} MiB, keeps {record['kept_bytes'] / 2**20:.2f}")


def error(record: dict) -> Cell:
    return Cell(f"{record['error']:.1e}")


# benchmark -> the keys of a line, and what is said of a contender
COLUMNS: dict[str, tuple[tuple[str, ...], Callable[[dict], Cell]]] = {
    "kernels": (("rows", "cols", "dtypes", "pass", "how"), kernel),
    "operators": (("rows", "cols", "dtypes", "pass"), kernel),
    "overhead": (("dtypes", "way"), timed("µs", 1)),
    "memory": (("rows", "cols", "dtypes", "stage"), allocated),
    "models": (("model", "dtypes", "mode"), step),
    "accuracy": (("sweep", "dtypes", "quantity"), error),
    "compare": (("rows", "cols", "dtypes", "pass"), timed("µs", 1, "of_base")),
}
READING = {
    "kernels": "Microseconds · torch's time / this one's (more than 1 is faster than torch) · speed in parts of a "
    "copy's · largest error against float64, in parts of the largest value. Noise is the factor that two runs of the "
    "same differ by; a ratio within it says nothing.",
    "operators": "Microseconds · torch's time / this one's · speed in parts of a copy's · largest error against "
    "float64, in parts of the largest value.",
    "overhead": "Microseconds until a call returns · torch's time / this one's.",
    "memory": "What is allocated at the peak, beside the input, and what is kept when the call has returned.",
    "models": "Milliseconds of a step · the unconverted model's time / the converted one's · memory at its peak.",
    "accuracy": "The largest error of the whole sweep against float64, in parts of the largest value.",
    "compare": "Microseconds of the head · time of the base / that of the head (more than 1 is faster).",
}


def worst(records: list[dict]) -> list[dict]:
    """Return for each sweep, dtypes, contender and quantity the largest error; the curves show the rest."""
    lines: dict[tuple, dict] = {}
    for r in records:
        for quantity in QUANTITIES:
            key = (r["sweep"], r["dtypes"], quantity, r["contender"])
            line = lines.setdefault(key, {**r, "quantity": quantity, "error": None, "status": "ok"})
            if r[quantity] is not None:
                line["error"] = max(line["error"] or 0, r[quantity])
    for line in lines.values():
        if line["error"] is None:
            line["status"] = "failed"
    return list(lines.values())


def lines(run: Run) -> tuple[list[str], list[list[Cell]]]:
    """Return the header and the lines of a run's table."""
    keys, describe = COLUMNS[run.benchmark]
    records = worst(run.records) if run.benchmark == "accuracy" else run.records
    names = list(dict.fromkeys(r["contender"] for r in records))
    cases: dict[tuple, dict[str, dict]] = {}
    for r in records:
        cases.setdefault(tuple(r[key] for key in keys), {})[r["contender"]] = r
    has_noise = any(r.get("noise") for r in records)
    table = []
    for case, found in cases.items():
        line = [Cell(str(value)) for value in case]
        if has_noise:
            noise = next((r["noise"] for r in found.values() if r["noise"]), math.nan)
            line.append(Cell(f"{noise:.3f}", "noise"))
        for name in names:
            r = found.get(name)
            if r is None:
                line.append(Cell(""))
            elif r["status"] == "failed":
                line.append(Cell("failed", "failed"))
            else:
                cell = describe(r)
                line.append(Cell(f"{cell.text} · WRONG", "wrong") if r["status"] == "wrong" else cell)
        table.append(line)
    return [*keys, *(["noise"] if has_noise else []), *names], table


def notes(run: Run) -> list[str]:
    """Return what is wrong or has failed, once for each contender and message."""
    found: dict[tuple[str, str, str], int] = {}
    for r in run.records:
        if r["status"] != "ok":
            key = (r["contender"], r["status"], r["message"])
            found[key] = found.get(key, 0) + 1
    if run.benchmark == "accuracy":  # where being off is what the curves show
        found = {key: count for key, count in found.items() if key[1] == "failed"}
    return [f"{name} {status} ({count} of its cases): {message}" for (name, status, message), count in found.items()]


def terminal(run: Run) -> Table:
    """Return the table as rich draws it."""
    header, body = lines(run)
    table = Table(title=run.benchmark, caption=READING[run.benchmark], caption_justify="left")
    for name in header:
        table.add_column(name, overflow="fold")
    for line in body:
        table.add_row(*(f"[{STYLES[c.kind]}]{c.text}[/]" if c.kind else c.text for c in line))
    return table
