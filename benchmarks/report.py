"""Store the times of a run of `kernels`, and write them into docs/results.md as ratios to this package's times."""

import csv
import json
import statistics
from io import StringIO
from pathlib import Path

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from .runs import ROOT

RESULTS, DOCUMENT = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md"
CASE = ["dtypes", "pass", "rows", "cols"]


def by_case(records: list[dict]) -> list[dict]:
    """Return one line for each case, with the times of all contenders."""
    lines: dict[tuple, dict] = {}
    for r in records:
        line = lines.setdefault(tuple(r[key] for key in CASE), {key: r[key] for key in CASE})
        if r["us"]:
            line[f"{r['contender']} {r['mode']} us"] = f"{r['us']:.2f}"
        if r["error"] is not None:
            line[f"{r['contender']} error"] = f"{r['error']:.1e}"
        line[f"{r['mode']} noise"] = f"{r['noise']:.3f}"
    return list(lines.values())


def save(lines: list[dict], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for line in lines for name in line), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def markdown(path: Path) -> str:
    """Return a table of the times of each contender divided by this package's: more than 1 is slower than it."""
    with open(path, newline="") as file:
        lines = list(csv.DictReader(file))
    mode = "graph" if "ours graph us" in lines[0] else "eager"
    names = [name.removesuffix(f" {mode} us") for name in lines[0] if name.endswith(f" {mode} us")]
    names.remove("ours")
    columns = [(dtypes, name) for dtypes in dict.fromkeys(line["dtypes"] for line in lines) for name in names]
    ratios: dict[tuple, dict[tuple, float]] = {}
    for line in lines:
        case = ratios.setdefault((line["pass"], f"{line['rows']} x {line['cols']}"), {})
        for name in names:
            if line[f"{name} {mode} us"] and line[f"ours {mode} us"]:
                time = float(line[f"{name} {mode} us"]) / float(line[f"ours {mode} us"])
                case[line["dtypes"], name] = time
    table = Table("pass", "rows x columns", *(f"{dtypes}: {name}" for dtypes, name in columns), box=MARKDOWN)
    for which in dict.fromkeys(which for which, _ in ratios):
        cases = {shape: case for (found, shape), case in ratios.items() if found == which}
        means = {
            column: statistics.geometric_mean(case[column] for case in cases.values() if column in case)
            for column in columns
        }
        for shape, case in (cases | {"geometric mean": means}).items():
            table.add_row(which, shape, *(f"{case[column]:.2f}" if column in case else "" for column in columns))
    console = Console(file=StringIO(), width=1000)
    console.print(table)
    return "\n".join(line.strip() for line in console.file.getvalue().strip().splitlines()) + "\n"


def update(text: str, path: Path) -> str:
    """Return a document in which the table of a machine is the one of its file."""
    begin, end = f"<!-- {path.parent.name} -->\n", "<!-- end -->"
    before, found, after = text.partition(begin)
    if not found:
        raise ValueError(f"Expected the line {begin.strip()!r} in {DOCUMENT}, but there is none")
    return before + begin + "\n" + markdown(path) + "\n" + end + after.partition(end)[2]


def store(run: Path, machine: str) -> None:
    """Store the RUN of `kernels`, a JSON file, as the times of MACHINE, and update the tables of all machines."""
    save(by_case(json.loads(run.read_text())["records"]), RESULTS / machine / "kernels.csv")
    text = DOCUMENT.read_text()
    for path in sorted(RESULTS.glob("*/kernels.csv")):
        text = update(text, path)
    DOCUMENT.write_text(text)
