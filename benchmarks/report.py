"""One static page of one run, or of two beside each other: machines, plots, tables, and what has changed."""

import base64
from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from . import plots, tables
from .runs import Run, load
from .timing import verdict

# What makes two records of a benchmark comparable; those that have times are.
KEYS = {
    "kernels": ("rows", "cols", "dtypes", "pass", "how", "contender"),
    "overhead": ("dtypes", "way", "contender"),
    "models": ("model", "dtypes", "mode", "contender"),
}


def changes(before: Run, after: Run) -> Iterator[dict]:
    """Yield key, time before / after and verdict of all that both have timed.

    The two were not measured in turn, so the noise of both counts: what is beyond it is a hint, `compare` the proof.
    """
    keys = KEYS.get(before.benchmark, ())
    old = {tuple(r[key] for key in keys): r for r in before.records if keys and r["us"]}
    for r in after.records:
        key = tuple(r[key] for key in keys)
        if key in old and r["us"]:
            ratio, noise = old[key]["us"] / r["us"], old[key]["noise"] * r["noise"]
            yield {"key": key, "ratio": ratio, "noise": noise, "verdict": verdict(ratio, noise)}


def embedded(file: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()


def write(folders: list[Path], names: list[str], path: Path) -> None:
    """Draw the plots of each folder's runs into it, and write the page."""
    runs = [load(folder) for folder in folders]
    benchmarks = [name for name in tables.COLUMNS if any(name in found for found in runs)]
    sections = []
    for benchmark in benchmarks:
        present = [found.get(benchmark) for found in runs]
        sides = []
        for run, folder in zip(present, folders, strict=True):
            if run is None:
                sides.append(None)
                continue
            images = [(file.stem.replace("_", " "), embedded(file)) for file in plots.save(run, folder)]
            header, lines = tables.lines(run)
            sides.append({"run": run, "images": images, "header": header, "lines": lines, "notes": tables.notes(run)})
        changed = list(changes(*present)) if len(present) == 2 and all(present) else []
        reading, keys = tables.READING[benchmark], KEYS.get(benchmark, ())
        sections.append({"name": benchmark, "sides": sides, "changed": changed, "reading": reading, "keys": keys})
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    firsts = [next(iter(found.values())) for found in runs]
    facts = list(dict.fromkeys(key for run in firsts for key in run.machine))
    template = environment.get_template("report.html.jinja")
    path.write_text(template.render(names=names, firsts=firsts, facts=facts, sections=sections))
