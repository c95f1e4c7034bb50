"""`python -m benchmarks COMMAND` runs one benchmark, prints its table and saves its records."""

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import track

from . import accuracy, adaln, compare, compiled, kernels, memory, models, overhead, plots, tables
from .cases import PAIRS
from .contenders import CONTENDERS, PASSES, installed
from .runs import ROOT, Run, describe_machine
from .timing import Device, first_line, keep_pages

SHAPES = {
    "cpu": "32x128 32x768 512x768 4096x768 4097x771 8192x1024 1024x4096 256x16384 1024x16384 64x65536 65536x64 "
    "262144x32",
    "cuda": "1048576x64 65536x128 65536x512 32768x768 8192x1024 16384x4096 8192x8192 4096x16384 2048x65536 512x262144 "
    "8191x1023 32x768 1x4096",
}

OURS = ("ours", "kernel", "aten")  # the contenders that are this package


def parse_shape(text: str) -> tuple[int, int]:
    rows, _, cols = text.partition("x")
    if not (rows.isdecimal() and cols.isdecimal() and int(rows) and int(cols)):
        raise click.BadParameter(f"Expected a shape ROWSxCOLS such as 4096x768, but got {text!r}")
    return int(rows), int(cols)


def choices(option: str, names: Iterable[str], default: str | Callable, **settings: object) -> Callable:
    """Return an option whose value is a comma-separated selection of `names`."""

    def split(value: str | list) -> list[str]:
        chosen = value.split(",") if isinstance(value, str) else value
        for name in chosen:
            if name not in names:
                raise click.BadParameter(f"Expected some of {', '.join(names)}, but got {name!r}")
        return chosen

    settings |= {"default": default, "metavar": "NAME,...", "help": f"Some of {', '.join(names)}."}
    return click.option(option, type=split, **settings)


def seconds_option(default: float, per: str) -> Callable:
    return click.option("--seconds", default=default, help=f"Measuring time per {per}.")


shapes_argument = click.argument("shapes", type=parse_shape, nargs=-1)
device_option = click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
out_option = click.option(
    "--out", type=click.Path(path_type=Path), default=Path("build/benchmarks"), help="Output folder."
)
contenders_option = choices("--contenders", CONTENDERS, lambda: list(installed()), show_default="all installed")


def open_device(name: str) -> Device:
    if name == "cpu":
        keep_pages()
    torch.manual_seed(0)
    try:
        return Device(name)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None


def cells(device: str, shapes: tuple[tuple[int, int], ...], dtypes: list[str]) -> list[tuple[int, int, str]]:
    shapes = shapes or [parse_shape(text) for text in SHAPES[device].split()]
    return [(*shape, pair) for shape in shapes for pair in dtypes]


def progress(steps: Iterable, name: str, total: int) -> Iterable:
    return track(steps, name, total, console=Console(stderr=True), transient=True)


def finish(run: Run, folder: Path) -> None:
    """Save, draw and print a run; fail if this package's results are wrong or missing."""
    run.save(folder)
    plots.save(run, folder)
    console = Console(width=None if sys.stdout.isatty() else 240)  # a log file should not wrap lines
    console.print(*(f"{name} {value}" for name, value in run.machine.items()), sep="; ", highlight=False)
    console.print(tables.terminal(run))
    for note in tables.notes(run):
        console.print(note, style="red", highlight=False)
    click.echo(f"{folder}/{run.benchmark}.json and .csv")
    ours = [r for r in run.records if r["contender"] in OURS]
    wrong = [r for r in ours if r["status"] == "wrong"]
    if wrong or (ours and all(r["status"] == "failed" for r in ours)):
        first = (wrong or ours)[0]
        raise click.ClickException(f"{first['contender']} is {first['status']}: {first['message']}")


def execute(name: str, device: Device, cases: list, measure: Callable[..., Iterable[dict]], folder: Path) -> None:
    """Run a benchmark: measure all cases, and save the records after each case."""
    run = Run(name, describe_machine(device))
    for case in progress(cases, name, len(cases)):
        try:
            run.records += list(measure(device, *case))
        except torch.OutOfMemoryError as error:
            click.echo(f"skipped {case}: {first_line(error)}")
        run.save(folder)
    finish(run, folder)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True})
def cli() -> None:
    """Measure layer normalization by this package, by torch, and by other installed packages.

    docs/benchmarks.md describes the method and how to read the results.
    """


@cli.command("kernels")
@shapes_argument
@choices("--dtypes", PAIRS, "fp32,bf16")
@device_option
@contenders_option
@choices("--passes", PASSES, ",".join(PASSES))
@seconds_option(0.3, "contender and case")
@out_option
def run_kernels(shapes, dtypes, device, contenders, passes, seconds, out) -> None:
    """Time forward, backward and both on SHAPES."""
    cases = [(*cell, contenders, passes, seconds) for cell in cells(device, shapes, dtypes)]
    execute("kernels", open_device(device), cases, kernels.measure, out)


@cli.command("overhead")
@choices("--dtypes", PAIRS, "fp32")
@device_option
@contenders_option
@seconds_option(0.3, "contender")
@out_option
def run_overhead(dtypes, device, contenders, seconds, out) -> None:
    """Time the host's part of one call on a tiny input."""
    cases = [(pair, contenders, seconds) for pair in dtypes]
    execute("overhead", open_device(device), cases, overhead.measure, out)


@cli.command("accuracy")
@choices("--dtypes", PAIRS, ",".join(PAIRS))
@device_option
@contenders_option
@out_option
def run_accuracy(dtypes, device, contenders, out) -> None:
    """Compare output and gradients with float64 over ranges of offset, rows, columns and scale."""
    cases = [(*point, contenders) for point in accuracy.points(dtypes)]
    execute("accuracy", open_device(device), cases, accuracy.measure, out)


@cli.command("models")
@choices("--dtypes", PAIRS, "fp32")
@device_option
@seconds_option(5.0, "model and mode")
@out_option
def run_models(dtypes, device, seconds, out) -> None:
    """Time steps of whole models, original and converted, and measure their memory."""
    cases = [(name, pair, seconds / 3) for name in models.MODELS for pair in dtypes]
    execute("models", open_device(device), cases, models.measure, out)


@cli.command("memory")
@shapes_argument
@choices("--dtypes", PAIRS, "fp32,bf16,bf16-fp32")
@device_option
@contenders_option
@out_option
def run_memory(shapes, dtypes, device, contenders, out) -> None:
    """Measure the memory of forward and backward on SHAPES (default: 4096x768 and 64x65536)."""
    cases = [(*cell, contenders) for cell in cells(device, shapes or [(4096, 768), (64, 65536)], dtypes)]
    execute("memory", open_device(device), cases, memory.measure, out)


@cli.command("adaln")
@shapes_argument
@choices("--dtypes", PAIRS, "fp32,bf16")
@device_option
@seconds_option(0.3, "contender and case")
@out_option
def run_adaln(shapes, dtypes, device, seconds, out) -> None:
    """Time scale and shift per sample on 16 x SHAPES (default: 64 and 256 rows of 384, 768 and 1152 columns)."""
    shapes = shapes or [(rows, cols) for rows in (64, 256) for cols in (384, 768, 1152)]
    cases = [(*cell, seconds) for cell in cells(device, shapes, dtypes)]
    execute("adaln", open_device(device), cases, adaln.measure, out)


@cli.command("compile")
@choices("--dtypes", PAIRS, "fp32,bf16")
@device_option
@seconds_option(0.5, "contender and case")
@out_option
def run_compile(dtypes, device, seconds, out) -> None:
    """Time blocks under torch.compile: trace_as("kernel"), trace_as("aten") and torch's layers.

    With one CPU thread, times are CPU time, which other programs disturb less.
    """
    cases = [(name, pair, seconds) for name in compiled.BLOCKS for pair in dtypes]
    opened = open_device(device)
    if device == "cpu" and torch.get_num_threads() == 1:
        opened.clock = time.process_time
    execute("compile", opened, cases, compiled.measure, out)


@cli.command("all")
@device_option
@contenders_option
@out_option
@click.pass_context
def run_all(context, device, contenders, out) -> None:
    """Run every benchmark except compile and compare with its defaults."""
    for command in (run_kernels, run_overhead, run_accuracy, run_memory):
        context.invoke(command, device=device, contenders=contenders, out=out)
    for command in (run_models, run_adaln):
        context.invoke(command, device=device, out=out)


@cli.command("compare")
@click.argument("base")
@shapes_argument
@choices("--dtypes", PAIRS, "fp32,bf16")
@device_option
@seconds_option(0.5, "start and case")
@out_option
def run_compare(base, shapes, dtypes, device, seconds, out) -> None:
    """Build the revision BASE and the working tree and time both; fail if a case is slower."""
    machine = describe_machine(open_device(device))
    try:
        builds = compare.build_both(base, ROOT / "build" / "compare")
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    run = Run("compare", machine | {"base": builds[compare.BASE].name})

    def sample(cases: list) -> Iterable:
        return progress(compare.sample(builds, cases, device, seconds), run.benchmark, compare.STARTS * len(cases))

    cases = [(*cell, which) for cell in cells(device, shapes, dtypes) for which in ("forward", "backward")]
    run.records.extend(compare.measure(cases, sample))
    finish(run, out)
    text, passed = compare.summary(run.records)
    click.echo(text)
    if not passed:
        sys.exit(1)


if __name__ == "__main__":
    cli(prog_name="python -m benchmarks")
