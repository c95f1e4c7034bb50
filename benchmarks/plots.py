"""The pictures of a run, each from the records of one benchmark."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from .accuracy import SWEEPS
from .cases import PAIRS, QUANTITIES
from .contenders import ALL, PASSES
from .kernels import COPY
from .runs import Run

# Ours is dark and last, so that it lies on top.
COLORS = {"ours": "#16336b", "torch": "#f4b06a", "torch.compile": "#d1495b", "onednn": "#4a90b8", COPY: "#9a9a9a"}
OTHERS = dict(
    zip(
        [name for name in ALL if name not in COLORS],
        ("#2e8b57", "#8e6bbf", "#17a2b8", "#b5651d", "#708238"),
        strict=True,
    )
)
COLORS |= OTHERS
# Where an error of zero is drawn on a logarithmic axis: below all others of the dtype.
ZERO = dict.fromkeys(PAIRS, 1e-9) | {"fp64": 1e-18}
AXES = {
    "offset": "mean / standard deviation",
    "rows": "rows (of 16 columns)",
    "cols": "columns (8 rows)",
    "scale": "standard deviation",
}


def by_importance(names: set[str]) -> list[str]:
    """Return contenders in the order in which they are drawn."""
    return sorted(names, key=list(reversed(COLORS)).index)


def grid(rows: int, cols: int, width: float = 3.2, height: float = 2.5, **options: object) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(max(6, width * cols), 0.8 + height * rows), layout="constrained")
    return figure, figure.subplots(rows, cols, squeeze=False, **options)


def tidy(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def with_legend(figure: Figure, axes: np.ndarray) -> Figure:
    """Put one legend for all panels at the bottom."""
    found = {}
    for one in axes.flat:
        found |= dict(zip(*reversed(one.get_legend_handles_labels()), strict=True))
    if found:
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=min(6, len(found)), frameon=False)
    return figure


def panels(records: list[dict]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the passes, and the pairs of dtypes and way of calling, that were measured."""
    passes = [which for which in PASSES if any(r["pass"] == which for r in records)]
    return passes, list(dict.fromkeys((r["dtypes"], r["how"]) for r in records))


def copy_fraction(run: Run) -> Figure:
    """Draw how fast each contender is as a fraction of a copy, against the number of columns."""
    timed = [r for r in run.records if r["us"] and r["contender"] != COPY]
    passes, kinds = panels(timed)
    figure, axes = grid(len(passes), len(kinds), sharex=True, sharey=True)
    for row, which in zip(axes, passes, strict=True):
        for one, (dtypes, how) in zip(row, kinds, strict=True):
            here = [r for r in timed if (r["pass"], r["dtypes"], r["how"]) == (which, dtypes, how)]
            for name in by_importance({r["contender"] for r in here}):
                points = sorted((r["cols"], r["of_copy"]) for r in here if r["contender"] == name)
                one.plot(*zip(*points, strict=True), "o", color=COLORS[name], markersize=3, alpha=0.5)
                cols = sorted({c for c, _ in points})
                best = [max(f for c, f in points if c == col) for col in cols]
                one.plot(cols, best, color=COLORS[name], label=name)
            one.axhline(1, color=COLORS[COPY], linestyle=":")
            one.set_xscale("log", base=2)
            one.set_title(f"{which}, {dtypes}, {how}", fontsize=9)
            tidy(one)
    for one in axes[-1]:
        one.set_xlabel("columns")
    figure.suptitle("Speed as a fraction of a copy of the same bytes (lines: best number of rows)")
    return with_legend(figure, axes)


def heat_map(run: Run) -> Figure | None:
    """Draw torch's time / ours over rows and columns; what is noise is in brackets."""
    ours = [r for r in run.records if r["contender"] == "ours" and r["of_torch"]]
    if not ours:
        return None
    passes, kinds = panels(ours)
    rows, cols = (sorted({r[what] for r in ours}) for what in ("rows", "cols"))
    width, height = 1.2 + 0.55 * len(cols), 0.8 + 0.35 * len(rows)
    figure, axes = grid(len(passes), len(kinds), width, height)
    largest = max(2.0, *(r["of_torch"] for r in ours))
    norm = TwoSlopeNorm(vmin=0.5, vcenter=1, vmax=min(4.0, largest))
    for line, which in zip(axes, passes, strict=True):
        for one, (dtypes, how) in zip(line, kinds, strict=True):
            image = np.full((len(rows), len(cols)), np.nan)
            for r in ours:
                if (r["pass"], r["dtypes"], r["how"]) == (which, dtypes, how):
                    y, x = rows.index(r["rows"]), cols.index(r["cols"])
                    image[y, x] = r["of_torch"]
                    text = f"{r['of_torch']:.2f}"
                    text = f"({text})" if r["verdict"] == "noise" else text
                    one.text(x, y, text, ha="center", va="center", fontsize=7)
            drawn = one.imshow(image, norm=norm, cmap="RdYlGn", aspect="auto", origin="lower")
            one.set_xticks(range(len(cols)), cols, rotation=45, fontsize=7)
            one.set_yticks(range(len(rows)), rows, fontsize=7)
            one.set_title(f"{which}, {dtypes}, {how}", fontsize=9)
    figure.colorbar(drawn, ax=axes, shrink=0.6)
    figure.suptitle("torch's time / ours: more than 1 is faster, brackets are noise")
    figure.supxlabel("columns")
    figure.supylabel("rows")
    return figure


def roofline(run: Run) -> Figure:
    """Draw operations a second against operations a byte, below what copies and a matrix product reach."""
    timed = [r for r in run.records if r["us"]]
    passes = panels(timed)[0]
    figure, axes = grid(1, len(passes), 3.6, 3.2, sharey=True)
    peak = run.method["matmul_gflops"]
    for one, which in zip(axes[0], passes, strict=True):
        here = [r for r in timed if r["pass"] == which]
        copies = [r for r in here if r["contender"] == COPY]
        intensity = np.logspace(-1, 2, 200)
        for style, label, pick in (
            ("-", "largest copy", max(copies, key=lambda r: r["bytes"])),
            ("--", "fastest copy", min(copies, key=lambda r: r["us"] / r["bytes"])),
        ):
            speed = pick["bytes"] / pick["us"] / 1e3  # GB/s
            one.plot(
                intensity,
                np.minimum(intensity * speed, peak),
                style,
                color=COLORS[COPY],
                label=f"{label}, matrix product",
            )
        names = by_importance({r["contender"] for r in here} - {COPY})
        for index, name in enumerate(names):
            points = [r for r in here if r["contender"] == name]
            # Contenders share their intensity: they are drawn a little apart.
            x = [r["operations"] / r["bytes"] * 1.06 ** (index - len(names) / 2) for r in points]
            y = [r["operations"] / r["us"] / 1e3 for r in points]
            one.plot(x, y, "o", color=COLORS[name], markersize=3, alpha=0.7, label=name)
        one.set(xscale="log", yscale="log", title=which, xlabel="operations per byte")
        tidy(one)
    axes[0, 0].set_ylabel("GFLOP/s")
    figure.suptitle("Roofline: every shape and dtype")
    return with_legend(figure, axes)


def error_curves(run: Run, sweep: str) -> Figure | None:
    """Draw the errors of all quantities along one sweep, by dtypes."""
    records = [r for r in run.records if r["sweep"] == sweep and r["output"] is not None]
    if not records:
        return None
    dtypes = list(dict.fromkeys(r["dtypes"] for r in records))
    figure, axes = grid(len(QUANTITIES), len(dtypes), 2.6, 1.9, sharex="col", sharey="col")
    for row, quantity in zip(axes, QUANTITIES, strict=True):
        for one, pair in zip(row, dtypes, strict=True):
            here = [r for r in records if r["dtypes"] == pair and r[quantity] is not None]
            for name in by_importance({r["contender"] for r in here}):
                points = sorted((r["value"], max(ZERO[pair], r[quantity])) for r in here if r["contender"] == name)
                x, y = zip(*points, strict=True)
                finite = np.where(np.isfinite(y), y, np.nan)
                one.plot(x, finite, "o-", color=COLORS[name], markersize=3, label=name)
            one.set_yscale("log")
            one.set_xscale("symlog", linthresh=1) if sweep == "offset" else one.set_xscale("log", base=2)
            tidy(one)
        row[0].set_ylabel(quantity)
    for one, pair in zip(axes[0], dtypes, strict=True):
        one.set_title(pair, fontsize=9)
    for one in axes[-1]:
        one.set_xlabel(AXES[sweep], fontsize=8)
    figure.suptitle("Largest error against float64, in parts of the largest value")
    return with_legend(figure, axes)


def bars(records: list[dict], key: tuple[str, ...], value: str, unit: float, title: str, label: str) -> Figure | None:
    """Draw a bar for each contender in each group of records that share `key`, a panel for each pair of dtypes."""
    known = [r for r in records if r[value] is not None]
    if not known:
        return None
    names = by_importance({r["contender"] for r in known})[::-1]
    groups = list(dict.fromkeys(tuple(r[k] for k in key) for r in known))
    dtypes = list(dict.fromkeys(r["dtypes"] for r in known))
    figure, axes = grid(len(dtypes), 1, 1.5 * len(groups), 2.4, sharex=True)
    width = 0.8 / max(1, len(names))
    for one, pair in zip(axes.flat, dtypes, strict=True):
        for index, name in enumerate(names):
            here = [r for r in known if (r["dtypes"], r["contender"]) == (pair, name)]
            shift = (index - (len(names) - 1) / 2) * width
            where = [groups.index(tuple(r[k] for k in key)) + shift for r in here]
            drawn = one.bar(where, [r[value] * unit for r in here], width, color=COLORS[name], label=name)
            one.bar_label(drawn, fmt="%.3g", fontsize=7)
        one.set_xticks(range(len(groups)), ["\n".join(map(str, group)) for group in groups], fontsize=8)
        one.set_ylabel(f"{label}, {pair}")
        tidy(one)
    figure.suptitle(title)
    return with_legend(figure, axes)


def draw(run: Run) -> Iterator[tuple[str, Figure]]:
    """Yield name and figure of everything that there is to see of a run."""
    records = run.records
    if run.benchmark == "kernels" and any(r["us"] for r in records):
        yield "copy_fraction", copy_fraction(run)
        yield "heat_map", heat_map(run)
        yield "roofline", roofline(run)
    elif run.benchmark == "operators" and any(r["us"] for r in records):
        yield "operators_roofline", roofline(run)
    elif run.benchmark == "accuracy":
        for sweep in SWEEPS:
            yield f"error_by_{sweep}", error_curves(run, sweep)
    elif run.benchmark == "overhead":
        yield "overhead", bars(records, ("way",), "us", 1, "What a call costs the host", "microseconds")
    elif run.benchmark == "memory":
        key, mib = ("stage", "rows", "cols"), 2.0**-20
        yield "memory", bars(records, key, "peak_bytes", mib, "Memory at its peak, by rows and columns", "MiB")
    elif run.benchmark == "models":
        key = ("model", "mode")
        yield "model_time", bars(records, key, "us", 1e-3, "Time of a step", "milliseconds")
        yield "model_memory", bars(records, key, "peak_bytes", 2.0**-20, "Memory of a step at its peak", "MiB")


def save(run: Run, folder: Path) -> list[Path]:
    """Draw a run into PNG files, and return their paths."""
    files = []
    for name, figure in draw(run):
        if figure:
            files.append(folder / f"{name}.png")
            figure.savefig(files[-1], dpi=110)
    return files
