"""A PNG plot of the errors that `accuracy` records for growing offsets."""

from itertools import product
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from .contenders import CONTENDERS

COLORS = {name: f"C{i}" for i, name in enumerate(CONTENDERS)}


@matplotlib.rc_context({"font.size": 7, "axes.grid": True, "grid.alpha": 0.3})
def save(records: list[dict], path: Path) -> None:
    """Draw the errors of each contender, with a panel for each pair of dtypes and each quantity."""
    records = [r for r in records if r["sweep"] == "offset" and r["status"] != "failed"]
    if not records:
        return
    rows, cols = (list(dict.fromkeys(r[key] for r in records)) for key in ("dtypes", "quantity"))
    figure = Figure(figsize=(0.5 + 1.9 * len(cols), 0.9 + 1.5 * len(rows)), dpi=110, layout="constrained")
    figure.suptitle("Largest error against float64, relative to the largest value, by offset")
    panels = figure.subplots(len(rows), len(cols), squeeze=False, sharex="col", sharey="row")
    lines = {}
    for panel, (dtypes, quantity) in zip(panels.flat, product(rows, cols), strict=True):
        panel.set(title=f"{quantity}, {dtypes}", yscale="log")
        panel.set_xscale("symlog", linthresh=1)  # leaves room between 0 and 1
        panel.minorticks_off()
        for name in reversed(COLORS):  # ours is on top
            key = (quantity, dtypes, name)
            points = [(r["value"], r["error"]) for r in records if (r["quantity"], r["dtypes"], r["contender"]) == key]
            if points:
                (lines[name],) = panel.plot(*zip(*points, strict=True), ".-", color=COLORS[name])
    for panel in panels[-1]:
        panel.set_xlabel("offset")
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines))
    figure.savefig(path)
