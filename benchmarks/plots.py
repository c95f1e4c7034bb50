"""PNG plots of the kernels' speed and of the errors."""

from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from .contenders import CONTENDERS
from .kernels import COPY
from .runs import Run

COLORS = {name: f"C{i}" for i, name in enumerate(CONTENDERS)}


def draw_panels(points: list[dict], row: str, col: str, x: str, y: str, title: str, **scales: str) -> Figure:
    """Draw y against x for each contender, with a panel for each pair of values of `row` and `col`.

    The lines connect the largest values at each x.
    """
    rows, cols = (list(dict.fromkeys(p[key] for p in points)) for key in (row, col))
    names = [name for name in reversed(COLORS) if any(p["contender"] == name for p in points)]  # ours is on top
    lines = {}
    figure = Figure(figsize=(0.5 + 1.9 * len(cols), 0.9 + 1.5 * len(rows)), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(len(rows), len(cols), squeeze=False, sharex="col", sharey="col")
    for i, row_value in enumerate(rows):
        for j, col_value in enumerate(cols):
            panel = panels[i, j]
            panel.set_title(f"{row_value}, {col_value}", fontsize=8)
            panel.set(**scales)
            if scales["xscale"] == "symlog":
                panel.set_xscale("symlog", linthresh=1)  # leaves room between 0 and 1
            panel.tick_params(labelsize=7)
            panel.grid(alpha=0.3)
            if row_value == rows[-1]:
                panel.set_xlabel(x, fontsize=8)
            for name in names:
                key = (row_value, col_value, name)
                here = sorted((p[x], p[y]) for p in points if (p[row], p[col], p["contender"]) == key)
                if here:
                    largest = dict(here)  # later values replace earlier, smaller ones
                    panel.plot(*zip(*here, strict=True), ".", color=COLORS[name], alpha=0.5)
                    (lines[name],) = panel.plot(largest.keys(), largest.values(), color=COLORS[name])
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines), fontsize=9)
    return figure


def save_png(figure: Figure, path: Path) -> None:
    """Write a PNG with a palette, which takes a third of the bytes of one with full colors."""
    buffer = BytesIO()
    figure.savefig(buffer)
    Image.open(buffer).convert("RGB").quantize(64).save(path, optimize=True)


def save(run: Run, folder: Path) -> None:
    """Draw a run of `kernels` or `accuracy`."""
    points = [r for r in run.records if r["contender"] != COPY and r["status"] != "failed"]
    if run.benchmark == "kernels" and points:
        points = [p | {"kind": f"{p['dtypes']}, {p['mode']}", "columns": p["cols"]} for p in points]
        title = "Speed as a fraction of a copy of the same bytes (lines: best number of rows)"
        figure = draw_panels(points, "pass", "kind", "columns", "of_copy", title, xscale="log")
        save_png(figure, folder / "copy_fraction.png")
    for sweep in dict.fromkeys(p["sweep"] for p in points) if run.benchmark == "accuracy" else ():
        swept = [p | {sweep: p["value"]} for p in points if p["sweep"] == sweep]
        title = f"Largest error against float64, relative to the largest value, by {sweep}"
        scale = "symlog" if sweep == "offset" else "log"
        figure = draw_panels(swept, "quantity", "dtypes", sweep, "error", title, xscale=scale, yscale="log")
        save_png(figure, folder / f"error_by_{sweep}.png")
