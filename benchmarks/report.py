"""Store the times of a run, and write its tables into the documents.

A table follows the line `<!-- MACHINE/BENCHMARK -->` of docs/results.md, or of the README for the times of SHAPES.
"""

import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import NamedTuple

from .runs import ROOT

RESULTS = ROOT / "benchmarks" / "results"
# The shapes of the README's table, rows x columns.
SHAPES = {
    "6304x768": "ViT-B, 32 images",
    "4096x768": "BERT, 32 sequences of 128",
    "2048x4096": "2048 tokens of 4096 features",
    "25088x96": "Swin, 8 images",
    "487x513": "an odd width",
}


class Layout(NamedTuple):
    """The table of a benchmark: `line` and `columns` are the fields whose values are its lines and columns.

    A cell summarizes the cases that differ in other fields. Its figures are speeds: how many times as fast "ours" is as
    each contender if `base` is "ours", or each contender as torch if it is "torch".
    """

    line: str
    columns: tuple[str, ...]
    base: str


LAYOUTS = {
    "kernels": Layout("pass", ("dtypes", "contender"), "ours"),
    "family": Layout("norm", ("dtypes", "pass", "contender"), "ours"),
    "compile": Layout("block", ("dtypes", "pass", "contender"), "torch"),
}


def figures(times: dict[str, float], base: str) -> dict[str, float]:
    """Return the figure (see Layout) of each contender but the base, from the times of a case."""
    others = {name: us for name, us in times.items() if name != base}
    return {name: us / times[base] if base == "ours" else times[base] / us for name, us in others.items()}


def by_case(records: list[dict]) -> list[dict]:
    """Return one line of the CSV file for each case, with the times of all contenders."""
    keys = [key for key in takewhile(lambda key: key != "contender", records[0]) if key not in ("mode", "sets")]
    lines: dict[tuple, dict] = {}
    for r in records:
        line = lines.setdefault(tuple(r[key] for key in keys), {key: r[key] for key in keys})
        mode = r.get("mode", "eager")
        if r["us"]:
            line[f"{r['contender']} {mode} us"] = f"{r['us']:.2f}"
        if r["error"] is not None:
            line[f"{r['contender']} error"] = f"{r['error']:.1e}"
        line[f"{mode} noise"] = f"{r['noise']:.3f}"
    return list(lines.values())


def save(lines: list[dict], path: Path, header: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        file.writelines(f"# {line}\n" for line in header)
        writer = csv.DictWriter(file, dict.fromkeys(name for line in lines for name in line), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def describe(figures: list[float], noise: float) -> str:
    """Return one figure, or "≈ 1" if it is within the noise; of several, the geometric mean, the least and the most."""
    if len(figures) > 1:
        return f"{statistics.geometric_mean(figures):.2f} ({min(figures):.2f} to {max(figures):.2f})"
    (figure,) = figures
    return "≈ 1" if 1 / noise < figure < noise else f"{figure:.2f}"


def load(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(line for line in file if line[0] != "#"))


def markdown(table: list[list[str]]) -> str:
    lines = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def speeds(path: Path) -> str:
    """Return the table of a stored run's speeds (see Layout)."""
    cases = load(path)
    line, keys, base = LAYOUTS[path.stem]
    mode = "graph" if "ours graph us" in cases[0] else "eager"
    suffix = f" {mode} us"
    cells: dict[tuple[str, tuple[str, ...]], list[float]] = defaultdict(list)
    noise: dict[tuple[str, tuple[str, ...]], float] = {}
    for case in cases:
        times = {name.removesuffix(suffix): float(us) for name, us in case.items() if us and name.endswith(suffix)}
        for name, figure in figures(times, base).items():
            cell = case[line], tuple((case | {"contender": name})[key] for key in keys)  # its line and its column
            cells[cell].append(figure)
            noise[cell] = float(case[f"{mode} noise"])
    # Columns of the same dtypes and pass are neighbors, also if a contender is missing in the first line.
    groups = list(dict.fromkeys(column[:-1] for _, column in cells))
    columns = sorted(dict.fromkeys(column for _, column in cells), key=lambda column: groups.index(column[:-1]))
    table = [[line, *map(" ".join, columns)]]
    for value in dict.fromkeys(value for value, _ in cells):
        line_cells = ((value, column) for column in columns)
        table.append([value, *(describe(cells[cell], noise[cell]) if cell in cells else "" for cell in line_cells)])
    return markdown(table)


def times(path: Path) -> str:
    """Return the table of torch's and this package's microseconds, and how many times as fast this package is."""
    columns = [(dtypes, name) for dtypes in ("fp32", "bf16") for name in ("forward", "backward")]
    cells = {}
    for case in load(path):
        theirs, ours = (float(case[f"{name} eager us"]) for name in ("torch", "ours"))
        cell = f"{case['rows']}x{case['cols']}", case["dtypes"], case["pass"]
        cells[cell] = f"{theirs:.0f} → {ours:.0f} ({theirs / ours:.1f})"
    lines = [[f"{name} ({shape})", *(cells[shape, *column] for column in columns)] for shape, name in SHAPES.items()]
    return markdown([["shape", *map(" ".join, columns)], *lines])


TABLES = {ROOT / "docs" / "results.md": speeds, ROOT / "README.md": times}


def update(text: str, path: Path, table: Callable[[Path], str]) -> str:
    """Return a document's text with a new table of the stored run `path`, if it has a table of this run."""
    before, marker, after = text.partition(f"<!-- {path.parent.name}/{path.stem} -->\n")
    if not marker:
        return text
    return before + marker + table(path) + "".join(dropwhile(lambda line: line[0] == "|", after.splitlines(True)))


def store(run: Path, machine: str) -> None:
    """Store the times of RUN, a JSON file, for MACHINE, and update the tables of all stored runs."""
    found = json.loads(run.read_text())
    header = [found["command"], found["started"], *(f"{name} {value}" for name, value in found["machine"].items())]
    save(by_case(found["records"]), RESULTS / machine / f"{found['benchmark']}.csv", header)
    for document, table in TABLES.items():
        text = document.read_text()
        for path in sorted(RESULTS.glob("*/*.csv")):
            text = update(text, path, table)
        document.write_text(text)
