"""The command line: `python -m benchmarks COMMAND`, each of which measures one thing, or shows what was measured."""

import sys
from collections.abc import Callable, Iterable
from functools import reduce
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import track

from . import accuracy, compare, kernels, memory, models, operators, overhead, plots, report, tables
from .cases import PAIRS, parse_shape
from .contenders import ALL, PASSES
from .runs import ROOT, Run, listed, machine
from .timing import Device, keep_pages

# What README.md tells of; a name in place of shapes stands for its list.
SHAPES = {
    "cpu": "32x128 32x768 512x768 4096x768 4097x771 8192x1024 1024x4096 256x16384 1024x16384 64x65536 65536x64 "
    "262144x32",
    "gpu": "1048576x64 65536x128 65536x512 32768x768 8192x1024 16384x4096 8192x8192 4096x16384 2048x65536 512x262144 "
    "8191x1023 32x768 1x4096",
    "grid": " ".join(
        f"{rows}x{cols}"
        for rows in (1, 32, 512, 4096, 32768)
        for cols in (64, 256, 768, 1024, 4096, 16384, 65536)
        if rows * cols <= 1 << 25
    ),
}


class Choices(click.ParamType):
    """Some of a list, separated by commas."""

    name = "names"

    def __init__(self, names: Iterable[str]):
        self.names = list(names)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "NAME,..."

    def convert(self, value: str | list, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        chosen = value.split(",") if isinstance(value, str) else value
        for name in chosen:
            if name not in self.names:
                self.fail(f"Expected some of {', '.join(self.names)}, but got {name!r}")
        return chosen


class Shape(click.ParamType):
    """ROWSxCOLS, or the name of a list."""

    name = "ROWSxCOLS"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> list[tuple[int, int]]:
        try:
            return [parse_shape(text) for text in SHAPES.get(value, value).split()]
        except ValueError as error:
            self.fail(f"{error}, or one of {', '.join(SHAPES)}")


def installed() -> list[str]:
    return [name for name, contender in ALL.items() if contender.version]


def options(*chosen: Callable) -> Callable:
    """Return a decorator that adds options in the order in which they are to be shown."""
    return lambda command: reduce(lambda command, option: option(command), reversed(chosen), command)


shapes_argument = click.argument("shapes", type=Shape(), nargs=-1)
device_option = click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
out_option = click.option(
    "--out", type=click.Path(path_type=Path), default=Path("build/benchmarks"), show_default=True, help="Folder."
)
contenders_option = click.option(
    "--contenders", type=Choices(ALL), default=installed, help=f"Of {', '.join(ALL)}; default: those installed."
)
seconds_option = click.option("--seconds", default=0.3, show_default=True, help="For each contender and case.")
threads_option = click.option("--threads", type=click.IntRange(1), help="Of the CPU; default: torch's choice.")
fresh_option = click.option("--fresh-pages", is_flag=True, help="Let glibc return memory to the system.")
rotate_option = click.option(
    "--rotate", type=int, help="Bytes of input to go through; default: 4 x L2 of a GPU, 0 of a CPU."
)


def dtypes_option(default: str) -> Callable:
    return click.option(
        "--dtypes", type=Choices(PAIRS), default=default, show_default=True, help=f"Of {', '.join(PAIRS)}."
    )


def prepared(device: str, threads: int | None = None, fresh_pages: bool = False, rotate: int | None = None) -> Device:
    if threads:
        torch.set_num_threads(threads)
    if device == "cpu" and not fresh_pages:
        keep_pages()
    torch.manual_seed(0)
    try:
        return Device(device, rotate)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None


def show(run: Run) -> None:
    """Print the table of a run, and what is wrong with it."""
    console = Console(width=None if sys.stdout.isatty() else 240)  # wide in a file: whoever reads it can scroll
    console.print(*(f"{name} {value}" for name, value in run.machine.items()), sep="; ", highlight=False)
    console.print(tables.terminal(run))
    for note in tables.notes(run):
        console.print(note, style="red", highlight=False)


def finish(run: Run, folder: Path) -> None:
    """Save, draw and show a run; end with an error if a result of ours is wrong, or if there is none."""
    run.save(folder)
    plots.save(run, folder)
    show(run)
    click.echo(f"{folder}/{run.benchmark}.json, .csv and plots")
    ours = [r for r in run.records if r["contender"] == "ours"]
    wrong = [r for r in ours if r["status"] == "wrong" and run.benchmark != "accuracy"]
    if wrong or (ours and all(r["status"] == "failed" for r in ours)):
        worst = (wrong or ours)[0]
        raise click.ClickException(f"ours is {worst['status']}: {worst['message']}")


def gather(run: Run, cases: list, measure: Callable[..., Iterable[dict]], folder: Path | None = None) -> Run:
    """Fill a run with the records of all cases; if there is a folder, save it after each."""
    for case in track(cases, run.benchmark, console=Console(stderr=True), transient=True):
        run.records += list(measure(*case))
        if folder:
            run.save(folder)
    return run


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
def cli() -> None:
    """Measure layer normalization: ours, torch's, and that of every other package that is installed.

    How it is done, and how to read it: docs/benchmarks.md.
    """


@cli.command("kernels")
@options(
    shapes_argument,
    dtypes_option("fp32,bf16"),
    device_option,
    contenders_option,
    click.option("--passes", type=Choices(PASSES), default=",".join(PASSES), show_default=True),
    seconds_option,
    threads_option,
    rotate_option,
    fresh_option,
    click.option("--resume", is_flag=True, help="Go on with the run in --out, where it was interrupted."),
    out_option,
)
def run_kernels(shapes, dtypes, device, contenders, passes, seconds, threads, rotate, fresh_pages, resume, out) -> None:
    """Time forward, backward and both, on SHAPES: ROWSxCOLS, or the lists cpu, gpu, grid (default: of the device)."""
    measured = prepared(device, threads, fresh_pages, rotate)
    shapes = sum(shapes, []) or [parse_shape(text) for text in SHAPES["gpu" if device == "cuda" else "cpu"].split()]
    method = {"seconds": seconds, "rotate_bytes": measured.rotate, "fresh_pages": fresh_pages}
    method |= {"passes": passes, "contenders": contenders, "matmul_gflops": kernels.matrix_product(measured)}
    run = Run("kernels", method, machine(measured), listed(contenders))
    if resume:
        try:
            run.go_on(out)
        except ValueError as error:
            raise click.ClickException(str(error)) from None
    done = {(record["rows"], record["cols"], record["dtypes"]) for record in run.records}
    cells = [(*shape, pair) for shape in shapes for pair in dtypes]
    cases = [(measured, *cell, contenders, passes, seconds) for cell in cells if cell not in done]
    finish(gather(run, cases, kernels.measure, out), out)
    for which, how, pair, mean, least in kernels.geometric_means(run.records):
        click.echo(f"{which} {pair}, {how}: torch / ours {mean:.2f} in the geometric mean, {least:.2f} at worst")


@cli.command("operators")
@options(
    shapes_argument,
    dtypes_option("fp32,bf16,fp16"),
    click.option("--contenders", type=Choices(operators.CONTENDERS), default="ours,torch", show_default=True),
    seconds_option,
    threads_option,
    fresh_option,
    out_option,
)
def run_operators(shapes, dtypes, contenders, seconds, threads, fresh_pages, out) -> None:
    """Time the bare operators on a CPU, on SHAPES: ROWSxCOLS, or the list cpu."""
    measured = prepared("cpu", threads, fresh_pages)
    shapes = sum(shapes, []) or [parse_shape(text) for text in SHAPES["cpu"].split()]
    method = {"seconds": seconds, "fresh_pages": fresh_pages, "matmul_gflops": kernels.matrix_product(measured)}
    run = Run("operators", method, machine(measured), listed(contenders, operators.CONTENDERS))
    cases = [(measured, *shape, pair, contenders, seconds) for shape in shapes for pair in dtypes]
    finish(gather(run, cases, operators.measure, out), out)
    for which, how, pair, mean, least in kernels.geometric_means(run.records):
        click.echo(f"{which} {pair}, {how}: torch / ours {mean:.2f} in the geometric mean, {least:.2f} at worst")


@cli.command("overhead")
@options(dtypes_option("fp32"), device_option, contenders_option, seconds_option, out_option)
def run_overhead(dtypes, device, contenders, seconds, out) -> None:
    """Time what a call costs the host."""
    measured = prepared(device)
    run = Run("overhead", {"seconds": seconds}, machine(measured), listed(contenders))
    cases = [(measured, pair, contenders, seconds) for pair in dtypes]
    finish(gather(run, cases, overhead.measure), out)


@cli.command("accuracy")
@options(
    dtypes_option(",".join(PAIRS)),
    device_option,
    contenders_option,
    click.option("--sweeps", type=Choices(accuracy.SWEEPS), default=",".join(accuracy.SWEEPS), show_default=True),
    click.option("--largest", default=1 << 24, show_default=True, help="Elements; larger cases are left out."),
    out_option,
)
def run_accuracy(dtypes, device, contenders, sweeps, largest, out) -> None:
    """Compare output and gradients with float64, over offsets, rows, columns and scales."""
    measured = prepared(device)
    run = Run("accuracy", {"largest": largest}, machine(measured), listed(contenders))
    cases = [(device, *point, contenders) for point in accuracy.points(sweeps, dtypes, largest)]
    finish(gather(run, cases, accuracy.measure), out)


@cli.command("models")
@options(
    click.option(
        "--models",
        "names",
        type=Choices(models.MODELS),
        default=models.available,
        help=f"Of {', '.join(models.MODELS)}; default: those installed.",
    ),
    dtypes_option("fp32"),
    device_option,
    click.option("--modes", type=Choices(models.MODES), default=",".join(models.MODES), show_default=True),
    click.option("--seconds", default=5.0, show_default=True, help="For each model and mode."),
    threads_option,
    out_option,
)
def run_models(names, dtypes, device, modes, seconds, threads, out) -> None:
    """Time steps of whole models, as they are and converted, with their memory."""
    measured = prepared(device, threads)
    run = Run("models", {"seconds": seconds}, machine(measured), listed(["ours", "torch"]))
    cases = [(measured, name, pair, modes, seconds / 3) for name in names for pair in dtypes]
    finish(gather(run, cases, models.measure), out)


@cli.command("memory")
@options(shapes_argument, dtypes_option("fp32,bf16,bf16-fp32"), device_option, contenders_option, out_option)
def run_memory(shapes, dtypes, device, contenders, out) -> None:
    """Measure the memory of forward and backward on SHAPES (default: 4096x768 and 64x65536)."""
    measured = prepared(device)
    run = Run("memory", {}, machine(measured), listed(contenders))
    shapes = sum(shapes, []) or [(4096, 768), (64, 65536)]
    cases = [(measured, *shape, pair, contenders) for shape in shapes for pair in dtypes]
    finish(gather(run, cases, memory.measure), out)


@cli.command("all")
@options(device_option, contenders_option, out_option)
@click.pass_context
def run_all(context, device, contenders, out) -> None:
    """Run every benchmark with its defaults, the kernels on the grid of shapes, and write the report."""
    shared = {"device": device, "out": out}
    grid = Shape().convert("grid", None, None)
    context.invoke(run_kernels, shapes=[grid], contenders=contenders, **shared)
    for command in (run_overhead, run_accuracy, run_memory):
        context.invoke(command, contenders=contenders, **shared)
    context.invoke(run_models, **shared)
    context.invoke(run_report, folders=(out,), names=None, html=None)


@cli.command("report")
@click.argument("folders", type=click.Path(exists=True, file_okay=False, path_type=Path), nargs=-1)
@click.option("--names", help="What to call the runs, separated by a comma (default: their folders).")
@click.option("--html", type=click.Path(path_type=Path), help="Where to write it (default: report.html in the first).")
def run_report(folders, names, html) -> None:
    """Write one static page of the run in a folder, or of two runs beside each other."""
    folders = folders or (Path("build/benchmarks"),)
    if len(folders) > 2:
        raise click.UsageError(f"Expected one or two folders, but got {len(folders)}")
    labels = names.split(",") if names else [folder.resolve().name for folder in folders]
    if len(labels) != len(folders):
        raise click.UsageError(f"Expected as many names as folders, {len(folders)}, but got {len(labels)}")
    html = html or folders[0] / "report.html"
    try:
        report.write(list(folders), labels, html)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    click.echo(html)


@cli.command("compare")
@options(
    click.argument("base"),
    shapes_argument,
    click.option("--head", help="A revision (default: the working tree)."),
    dtypes_option("fp32,bf16"),
    device_option,
    click.option("--passes", type=Choices(PASSES), default="forward,backward", show_default=True),
    click.option("--starts", type=click.IntRange(1), default=3, show_default=True, help="Of all processes."),
    click.option("--seconds", default=0.5, show_default=True, help="For each start and case."),
    threads_option,
    click.option("--builds", type=click.Path(path_type=Path), default=ROOT / "build" / "compare", show_default=True),
    out_option,
)
def run_compare(base, shapes, head, dtypes, device, passes, starts, seconds, threads, builds, out) -> None:
    """Build the revision BASE and the working tree, time both in turn; end with an error if a case is slower."""
    measured = prepared(device, threads)
    shapes = sum(shapes, []) or [parse_shape(text) for text in SHAPES["gpu" if device == "cuda" else "cpu"].split()]
    try:
        places = {compare.BASE: compare.build(base, builds), compare.HEAD: compare.build(head, builds)}
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    method = {
        "base": places[compare.BASE].name,
        "head": places[compare.HEAD].name,
        "starts": starts,
        "seconds": seconds,
    }
    run = Run("compare", method, machine(measured), listed(["ours"]))

    def progress(items: Iterable, total: int) -> Iterable:
        return track(items, run.benchmark, total, console=Console(stderr=True), transient=True)

    cells = [(*shape, pair, which) for shape in shapes for pair in dtypes for which in passes]
    run.records.extend(compare.measure(places, cells, device, threads, starts, seconds, progress))
    finish(run, out)
    text, passed = compare.summary(run.records)
    click.echo(text)
    if not passed:
        sys.exit(1)


if __name__ == "__main__":
    cli(prog_name="python -m benchmarks")
