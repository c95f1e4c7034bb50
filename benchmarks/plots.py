"""Plots of the kernels' speed and of the errors."""

from pathlib import Path

from matplotlib.figure import Figure

from .accuracy import SWEEPS
from .contenders import ALL
from .kernels import COPY
from .runs import Run

COLORS = {name: f"C{i}" for i, name in enumerate(ALL)}


def curves(points: list[dict], row: str, col: str, x: str, y: str, title: str, **axis: str) -> Figure:
    """Draw y against x for each contender, with a panel for each pair of values of `row` and `col`.

    The lines connect the largest values at each x.
    """
    rows, cols = (list(dict.fromkeys(p[key] for p in points)) for key in (row, col))
    names = [name for name in reversed(COLORS) if any(p["contender"] == name for p in points)]  # ours is on top
    lines = {}
    figure = Figure(figsize=(1 + 3 * len(cols), 1 + 2.2 * len(rows)), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(len(rows), len(cols), squeeze=False, sharex="col", sharey="col")
    for i, j in ((i, j) for i in range(len(rows)) for j in range(len(cols))):
        panels[i, j].set_title(f"{rows[i]}, {cols[j]}", fontsize=9)
        panels[i, j].set(xlabel=x, **axis)
        panels[i, j].grid(alpha=0.3)
        for name in names:
            here = sorted((p[x], p[y]) for p in points if (p[row], p[col], p["contender"]) == (rows[i], cols[j], name))
            largest = dict(here)  # later values replace earlier, smaller ones
            if here:
                panels[i, j].plot(*zip(*here, strict=True), ".", color=COLORS[name], alpha=0.5)
                (lines[name],) = panels[i, j].plot(largest.keys(), largest.values(), color=COLORS[name])
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines))
    return figure


def save(run: Run, folder: Path) -> None:
    """Draw a run of `kernels` or `accuracy` as PNG files."""
    points = [r for r in run.records if r["contender"] != COPY and r["status"] != "failed"]
    if run.benchmark == "kernels" and points:
        points = [p | {"kind": f"{p['dtypes']}, {p['mode']}"} for p in points]
        title = "Speed as a fraction of a copy of the same bytes (lines: best number of rows)"
        figure = curves(points, "pass", "kind", "cols", "of_copy", title, xscale="log")
        figure.savefig(folder / "copy_fraction.png", dpi=110)
    for sweep in SWEEPS if run.benchmark == "accuracy" else ():
        if swept := [p | {sweep: p["value"]} for p in points if p["sweep"] == sweep]:
            title = f"Largest error against float64, relative to the largest value, by {sweep}"
            scale = "symlog" if sweep == "offset" else "log"
            figure = curves(swept, "quantity", "dtypes", sweep, "error", title, xscale=scale, yscale="log")
            figure.savefig(folder / f"error_by_{sweep}.png", dpi=110)
