"""PNG plots of the kernels' speed and of the errors."""

from itertools import product
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from .contenders import CONTENDERS
from .kernels import COPY
from .runs import Run

COLORS = {name: f"C{i}" for i, name in enumerate(CONTENDERS)}


@matplotlib.rc_context({"font.size": 7, "axes.grid": True, "grid.alpha": 0.3})
def draw_panels(points: list[dict], row: str, col: str, x: str, y: str, path: Path, title: str, **scales: str) -> None:
    """Draw y against x for each contender, with a panel for each pair of values of `row` and `col`.

    The lines connect the largest values at each x.
    """
    rows, cols = (list(dict.fromkeys(p[key] for p in points)) for key in (row, col))
    figure = Figure(figsize=(0.5 + 1.9 * len(cols), 0.9 + 1.5 * len(rows)), dpi=110, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(len(rows), len(cols), squeeze=False, sharex="col", sharey="col")
    lines = {}
    for panel, (row_value, col_value) in zip(panels.flat, product(rows, cols), strict=True):
        panel.set(title=f"{row_value}, {col_value}", **scales)
        if scales["xscale"] == "symlog":
            panel.set_xscale("symlog", linthresh=1)  # leaves room between 0 and 1
        for name in reversed(COLORS):  # ours is on top
            key = (row_value, col_value, name)
            here = sorted((p[x], p[y]) for p in points if (p[row], p[col], p["contender"]) == key)
            if here:
                largest = dict(here)  # later values replace earlier, smaller ones
                panel.plot(*zip(*here, strict=True), ".", color=COLORS[name], alpha=0.5)
                (lines[name],) = panel.plot(largest.keys(), largest.values(), color=COLORS[name])
    for panel in panels[-1]:
        panel.set_xlabel(x)
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines))
    figure.savefig(path)


def save(run: Run, folder: Path) -> None:
    """Draw a run of `kernels` or `accuracy`."""
    points = [r for r in run.records if r["contender"] != COPY and r["status"] != "failed"]
    if run.benchmark == "kernels" and points:
        points = [p | {"kind": f"{p['dtypes']}, {p['mode']}", "columns": p["cols"]} for p in points]
        path = folder / "copy_fraction.png"
        title = "Speed as a fraction of a copy of the same bytes (lines: best number of rows)"
        draw_panels(points, "pass", "kind", "columns", "of_copy", path, title, xscale="log")
    for sweep in dict.fromkeys(p["sweep"] for p in points) if run.benchmark == "accuracy" else ():
        swept = [p | {sweep: p["value"]} for p in points if p["sweep"] == sweep]
        path = folder / f"error_by_{sweep}.png"
        title = f"Largest error against float64, relative to the largest value, by {sweep}"
        scale = "symlog" if sweep == "offset" else "log"
        draw_panels(swept, "quantity", "dtypes", sweep, "error", path, title, xscale=scale, yscale="log")
