"""Store the times of a run, and write them into docs/results.md as the table of its benchmark."""

import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path

from .runs import ROOT

RESULTS, DOCUMENT = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md"
Times = dict[str, float]  # contender -> microseconds


def relative_to_ours(times: Times, name: str) -> float:
    return times[name] / times["ours"]


def relative_to_torch(times: Times, name: str) -> float:
    return times["torch"] / times[name]


@dataclass(frozen=True)
class Layout:
    """The table of a benchmark: its lines and columns are the values of some fields.

    A cell has the figure of one contender, or of all, divided by commas. The other fields differ between the cases of a
    cell, which has the geometric mean, the least and the most of several cases.
    """

    line: str
    column: tuple[str, ...]
    contenders: tuple[str, ...]  # those that a run has
    figure: Callable[[Times, str], float]
    one_contender: bool  # in a cell


LAYOUTS = {
    "kernels": Layout(
        "pass", ("dtypes",), ("torch", "torch.compile", "liger-kernel", "copy"), relative_to_ours, one_contender=True
    ),
    "family": Layout("norm", ("dtypes", "pass"), ("torch", "torch.compile"), relative_to_ours, one_contender=True),
    "compile": Layout(
        "block", ("dtypes", "pass"), ("written", "fused", "by hand"), relative_to_torch, one_contender=False
    ),
    "allocator": Layout("setting", ("case",), ("ours", "torch"), lambda times, name: times[name], one_contender=False),
}


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
    if figure >= 100:
        return f"{figure:,.0f}"
    return f"({figure:.2f})" if 1 / noise < figure < noise else f"{figure:.2f}"


def markdown(path: Path) -> str:
    """Return the table of a stored run."""
    with open(path, newline="") as file:
        cases = list(csv.DictReader(file))
    layout = LAYOUTS[path.stem]
    mode = "graph" if "ours graph us" in cases[0] else "eager"
    cells: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    noise: dict[tuple[str, str], float] = {}
    for case in cases:
        suffix = f" {mode} us"
        times = {name.removesuffix(suffix): float(us) for name, us in case.items() if us and name.endswith(suffix)}
        for name in (name for name in layout.contenders if name in times):
            column = " ".join(case[key] for key in layout.column)
            place = case[layout.line], f"{column}: {name}" if layout.one_contender else column
            cells[place][name].append(layout.figure(times, name))
            noise[place] = float(case[f"{mode} noise"])
    columns = list(dict.fromkeys(column for _, column in cells))
    table = [[layout.line, *columns], ["---"] * (1 + len(columns))]
    for line in dict.fromkeys(line for line, _ in cells):
        figures = ([describe(f, noise[line, c]) for f in cells[line, c].values()] for c in columns)
        table.append([line, *map(", ".join, figures)])
    return "".join(f"| {' | '.join(line)} |\n" for line in table)


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
