"""PNG plots: the errors that `accuracy` records for growing offsets, and the speeds that `kernels` records."""

from itertools import product
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from .contenders import CONTENDERS

COLORS = {name: f"C{i}" for i, name in enumerate(CONTENDERS)}


def save_errors(records: list[dict], path: Path) -> None:
    """Draw the errors of each contender by offset, with a panel for each pair of dtypes and each quantity."""
    records = [r for r in records if r["sweep"] == "offset" and r["status"] != "failed"]
    title = "Largest error against float64, relative to the largest value, by offset"
    save(records, path, title, "quantity", "value", "error", "log")


def save_speeds(records: list[dict], path: Path) -> None:
    """Draw the speed of each contender by columns, in CUDA graphs if there are any, with a panel for each pass."""
    mode = "graph" if any(r["mode"] == "graph" for r in records) else "eager"
    records = [r for r in records if r["mode"] == mode and r["of_copy"] and r["contender"] in COLORS]
    records.sort(key=lambda r: r["cols"])
    save(records, path, "Speed by columns, copy = 1", "pass", "cols", "of_copy", "linear")


@matplotlib.rc_context({"font.size": 7, "axes.grid": True, "grid.alpha": 0.3})
def save(records: list[dict], path: Path, title: str, column: str, x: str, y: str, yscale: str) -> None:
    """Draw `y` by `x` for each contender, with a panel for each pair of dtypes and each value of `column`."""
    if not records:
        return
    rows, cols = (list(dict.fromkeys(r[key] for r in records)) for key in ("dtypes", column))
    figure = Figure(figsize=(0.5 + 1.9 * len(cols), 0.9 + 1.5 * len(rows)), dpi=110, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(len(rows), len(cols), squeeze=False, sharex="col", sharey="row")
    lines = {}
    for panel, (dtypes, value) in zip(panels.flat, product(rows, cols), strict=True):
        panel.set(title=f"{value}, {dtypes}", yscale=yscale)
        panel.set_xscale("symlog", linthresh=1)  # leaves room between 0 and 1
        panel.minorticks_off()
        for name in reversed(COLORS):  # ours is on top
            key = (value, dtypes, name)
            points = [(r[x], r[y]) for r in records if (r[column], r["dtypes"], r["contender"]) == key]
            if points:
                (lines[name],) = panel.plot(*zip(*points, strict=True), ".-", color=COLORS[name])
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines))
    figure.savefig(path)
