"""Store the times of a run, and write them into docs/results.md as the table of its benchmark."""

import csv
import json
import statistics
from collections import defaultdict
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import NamedTuple

from .runs import ROOT

RESULTS, DOCUMENT = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md"


class Layout(NamedTuple):
    """The table of a benchmark: its lines and columns are the values of some fields.

    A cell has the figures of all contenders, divided by commas, unless the column is that of a contender. The other
    fields differ between the cases of a cell, which has the geometric mean, the least and the most of several cases.
    The figures are ratios to the base: more than 1 is slower than "ours", or faster than "torch".
    """

    line: str
    columns: tuple[str, ...]
    base: str


LAYOUTS = {
    "kernels": Layout("pass", ("dtypes", "contender"), "ours"),
    "family": Layout("norm", ("dtypes", "pass", "contender"), "ours"),
    "compile": Layout("block", ("dtypes", "pass"), "torch"),
}


def figures(times: dict[str, float], base: str) -> dict[str, float]:
    """Return the figure of each contender but the base."""
    others = {name: us for name, us in times.items() if name != base}
    return {name: us / times[base] if base == "ours" else times[base] / us for name, us in others.items()}


def by_case(records: list[dict]) -> list[dict]:
    """Return one line for each case, with the times of all contenders."""
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


def save(lines: list[dict], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for line in lines for name in line), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def describe(figures: list[float], noise: float) -> str:
    """Return a figure, in brackets for a ratio within the noise, or the geometric mean, least and most of several."""
    if len(figures) > 1:
        return f"{statistics.geometric_mean(figures):.2f} ({min(figures):.2f} to {max(figures):.2f})"
    (figure,) = figures
    return f"({figure:.2f})" if 1 / noise < figure < noise else f"{figure:.2f}"


def markdown(path: Path) -> str:
    """Return the table of a stored run."""
    with open(path, newline="") as file:
        cases = list(csv.DictReader(file))
    line, keys, base = LAYOUTS[path.stem]
    mode = "graph" if "ours graph us" in cases[0] else "eager"
    suffix = f" {mode} us"
    cells: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    noise: dict[tuple[str, str], float] = {}
    for case in cases:
        times = {name.removesuffix(suffix): float(us) for name, us in case.items() if us and name.endswith(suffix)}
        for name, figure in figures(times, base).items():
            place = case[line], " ".join((case | {"contender": name})[key] for key in keys)
            cells[place][name].append(figure)
            noise[place] = float(case[f"{mode} noise"])
    columns = list(dict.fromkeys(column for _, column in cells))
    table = [[line, *columns], ["---"] * (1 + len(columns))]
    for value in dict.fromkeys(value for value, _ in cells):
        texts = ([describe(f, noise[value, c]) for f in cells[value, c].values()] for c in columns)
        table.append([value, *map(", ".join, texts)])
    return "".join(f"| {' | '.join(row)} |\n" for row in table)


def update(text: str, path: Path) -> str:
    """Return a document in which the table of a run is the one of its file."""
    marker = f"<!-- {path.parent.name}/{path.stem} -->\n"
    before, found, after = text.partition(marker)
    if not found:
        raise ValueError(f"Expected the line {marker.strip()!r} in {DOCUMENT}, but there is none")
    return before + marker + markdown(path) + "".join(dropwhile(lambda line: line[0] == "|", after.splitlines(True)))


def store(run: Path, machine: str) -> None:
    """Store a RUN, a JSON file, as the one of MACHINE, and update the tables of all stored runs."""
    found = json.loads(run.read_text())
    save(by_case(found["records"]), RESULTS / machine / f"{found['benchmark']}.csv")
    text = DOCUMENT.read_text()
    for path in sorted(RESULTS.glob("*/*.csv")):
        text = update(text, path)
    DOCUMENT.write_text(text)
