"""`python -m benchmarks COMMAND` runs one benchmark, prints its table and saves its records."""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path

import click
import torch

from . import blocks, compare, norm, plots, report
from .cases import DTYPE_PAIRS
from .contenders import CONTENDERS, PASSES, installed
from .runs import ROOT, Run, describe_machine
from .timing import Device, first_line, keep_pages

OURS = ("ours", "written", "fused", "by hand")  # the contenders that are this package


def parse_shape(text: str) -> tuple[int, int]:
    rows, _, cols = text.partition("x")
    if not (rows.isdecimal() and cols.isdecimal() and int(rows) and int(cols)):
        raise click.BadParameter(f"Expected a shape ROWSxCOLS such as 4096x768, but got {text!r}")
    return int(rows), int(cols)


def grid(defaults: dict[str, str], dtypes: list[str], device: str, shapes: tuple) -> list[tuple[int, int, str]]:
    """Return a case (rows, columns, dtypes) for each shape and dtypes; `defaults` has the shapes if none are given."""
    default = defaults.get(device, defaults["cpu"])
    return [(*shape, pair) for shape in shapes or map(parse_shape, default.split()) for pair in dtypes]


def choices(name: str, names: Iterable[str], default: str | Callable, **settings: object) -> click.Option:
    """Return an option whose value is a comma-separated selection of `names`."""

    def split(value: str | list) -> list[str]:
        chosen = value.split(",") if isinstance(value, str) else value
        for name in chosen:
            if name not in names:
                raise click.BadParameter(f"Expected some of {', '.join(names)}, but got {name!r}")
        return chosen

    help = f"Some of {', '.join(names)}."
    return click.Option([name], default=default, type=split, metavar="NAME,...", help=help, **settings)


def dtypes(default: str) -> click.Option:
    return choices("--dtypes", DTYPE_PAIRS, default)


def seconds(default: float, per: str = "contender and case") -> click.Option:
    return click.Option(["--seconds"], default=default, help=f"Measuring time per {per}.")


SHAPES = click.Argument(["shapes"], type=parse_shape, nargs=-1)
DEVICE = click.Option(["--device"], type=click.Choice(["cpu", "cuda"]), default="cpu")
OUT = click.Option(["--out"], type=click.Path(path_type=Path), default=Path("build/benchmarks"), help="Output folder.")
NAMES = choices("--contenders", CONTENDERS, lambda: list(installed()), show_default="all installed")
PASS = choices("--passes", PASSES, ",".join(PASSES))
KERNEL_SHAPES = {
    "cpu": "32x128 32x768 512x768 487x513 244x1025 4096x768 4097x771 8192x1024 1024x4096 256x16384 1024x16384 "
    "64x65536 65536x64 262144x32",
    "cuda": "1048576x64 65536x128 65536x512 32768x768 8192x1024 16384x4096 8192x8192 4096x16384 2048x65536 512x262144 "
    "8191x1023 32x768 1x4096",
}
KERNEL_CASES = partial(grid, KERNEL_SHAPES)
FAMILY_CASES = partial(grid, {"cpu": "64x768 64x2048 256x768 256x2048"})


def open_device(name: str) -> Device:
    if name == "cpu":
        keep_pages()
    torch.manual_seed(0)
    try:
        return Device(name)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from None


def finish(run: Run, folder: Path) -> None:
    """Save, draw and print a run; fail if this package's results are wrong or missing."""
    run.save(folder)
    if run.benchmark == "accuracy":
        plots.save_errors(run.records, folder / "error_by_offset.png")
    if run.benchmark == "kernels":
        plots.save_speeds(run.records, folder / "speed_by_columns.png")
    click.echo("; ".join(f"{name} {value}" for name, value in run.machine.items()))
    click.echo(run.table())
    for note in run.notes():
        click.secho(note, fg="red")
    click.echo(f"{folder}/{run.benchmark}.json and .csv")
    ours = [r for r in run.records if r["contender"] in OURS]
    wrong = [r for r in ours if r["status"] == "wrong"]
    if wrong or (ours and all(r["status"] == "failed" for r in ours)):
        first = (wrong or ours)[0]
        raise click.ClickException(f"{first['contender']} is {first['status']}: {first['message']}")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True})
def cli() -> None:
    """Measure layer normalization by this package, by torch, and by other installed packages.

    docs/benchmarks.md describes the method and how to read the results.
    """


def add(name: str, callback: Callable, *parameters: click.Parameter) -> None:
    """Add a command, which also has the options --device and --out."""
    cli.add_command(click.Command(name, callback=callback, params=[*parameters, DEVICE, OUT], help=callback.__doc__))


def add_benchmark(name: str, measure: Callable, cases: Callable, *parameters: click.Parameter) -> None:
    """Add the command of a benchmark, which measures all cases and saves the records after each case.

    `cases` returns the arguments that `measure` gets for each case. Its own arguments are the values of --dtypes, if
    the command has this option, and then the device and the shapes, if the command takes shapes.
    """

    def execute(device: str, out: Path, **settings: object) -> None:
        arguments = [settings.pop("dtypes")] if "dtypes" in settings else []
        arguments += [device, settings.pop("shapes")] if "shapes" in settings else []
        opened = open_device(device)
        run = Run(name, describe_machine(opened))
        with click.progressbar(list(cases(*arguments)), label=name, file=sys.stderr) as selected:
            for case in selected:
                try:
                    run.records += list(measure(opened, *case, **settings))
                except torch.OutOfMemoryError as error:
                    click.echo(f"skipped {case}: {first_line(error)}")
                run.save(out)
        finish(run, out)

    execute.__doc__ = measure.__doc__
    add(name, execute, *parameters)


def run_compare(base: str, shapes: tuple, dtypes: list[str], device: str, seconds: float, out: Path) -> None:
    """Build the revision BASE and the working tree and time both; fail if a case is slower."""
    machine = describe_machine(open_device(device))
    builds = compare.build_both(base, ROOT / "build" / "compare")
    cases = [(*case, which) for case in KERNEL_CASES(dtypes, device, shapes) for which in ("forward", "backward")]
    run = Run("compare", machine | {"base": builds[compare.BASE].name})
    run.records += compare.measure(builds, cases, device, seconds)
    finish(run, out)
    text, passed = compare.summary(run.records)
    click.echo(text)
    if not passed:
        sys.exit(1)


add_benchmark("kernels", norm.measure_kernels, KERNEL_CASES, SHAPES, dtypes("fp32,bf16"), NAMES, PASS, seconds(0.3))
add_benchmark("overhead", norm.measure_overhead, product, dtypes("fp32"), NAMES, seconds(0.3))
add_benchmark("accuracy", norm.measure_accuracy, norm.accuracy_points, dtypes(",".join(DTYPE_PAIRS)), NAMES)
add_benchmark("family", blocks.measure_family, FAMILY_CASES, SHAPES, dtypes("fp32,bf16"), seconds(0.3))
add_benchmark("compile", blocks.measure_compiled, partial(product, blocks.BLOCKS), dtypes("fp32,bf16"), seconds(0.5))
add("compare", run_compare, click.Argument(["base"]), SHAPES, dtypes("fp32,bf16"), seconds(0.5, "start and case"))
RUN = click.Argument(["run"], type=click.Path(exists=True, dir_okay=False, path_type=Path))
cli.add_command(
    click.Command("store", callback=report.store, params=[RUN, click.Argument(["machine"])], help=report.store.__doc__)
)

if __name__ == "__main__":
    cli(prog_name="python -m benchmarks")
