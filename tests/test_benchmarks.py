"""The benchmarks on tiny inputs with meaningless times: records, messages and exit codes."""

import csv
import json
from itertools import product
from pathlib import Path

import pytest
import torch

import layernorm_ext
from layernorm_ext import fusion

pytestmark = pytest.mark.integration
pytest.importorskip("matplotlib")
CliRunner = pytest.importorskip("click.testing").CliRunner

from benchmarks import __main__ as program  # noqa: E402
from benchmarks import blocks, cases, compare, contenders, norm, report, timing  # noqa: E402

QUICK = ["--seconds", "0.001"]
ALL = "ours,torch,torch.compile"
WAYS = ["operator", "function", "module", "function with graph", "forward and backward"]
BLOCKS = ["norm, GELU", "residual, norm, modulate"]  # without and with a function that computes all of it


@pytest.fixture(autouse=True)
def small_and_isolated(monkeypatch):
    """Use few samples, small sweeps, little of Inductor, no other packages, and the malloc settings of this process."""
    monkeypatch.setattr(timing, "MIN_ROUNDS", 3)  # the quartiles of two samples are extrapolated, even below zero
    monkeypatch.setitem(norm.SWEEPS, "rows", [{"rows": 1, "cols": 16}])
    monkeypatch.setitem(norm.SWEEPS, "cols", [{"rows": 8, "cols": 1}])
    monkeypatch.setattr(program, "keep_pages", lambda: None)
    monkeypatch.setattr(program, "installed", lambda: ["ours", "torch"])
    monkeypatch.setattr(blocks, "compile_for", lambda function, *_: function)  # `kernels` still compiles
    for name in blocks.BLOCKS.keys() - set(BLOCKS):
        monkeypatch.delitem(blocks.BLOCKS, name)


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a command and returns its output and its records, if it writes them."""

    def invoke(command, *arguments, status=0):
        arguments = [command, "--out", str(tmp_path), *arguments]
        result = CliRunner().invoke(program.cli, arguments, catch_exceptions=False)
        assert result.exit_code == status, result.output
        if not (tmp_path / f"{command}.json").exists():
            return result.output, []
        found = json.loads((tmp_path / f"{command}.json").read_text())
        assert {"cpu", "torch", "checkout", "load"} <= found["machine"].keys()
        with open(tmp_path / f"{command}.csv", newline="") as file:
            assert [row.keys() for row in csv.DictReader(file)] == [record.keys() for record in found["records"]]
        return result.output, found["records"]

    return invoke


def test_kernels_records_times_errors_and_verdicts(run):
    _, records = run("kernels", "40x64", "--dtypes", "bf16-fp32", "--contenders", ALL, *QUICK)
    assert len(records) == 3 * 4  # passes and contenders
    for record in records:
        assert record["status"] == "ok" and record["mode"] == "eager" and record["sets"] == 1
        assert record["us"] > 0 and record["of_torch"] > 0 and record["noise"] >= 1
        assert (record["error"] is None) == (record["contender"] == "copy")
        assert (record["verdict"] is None) == (record["contender"] in ("copy", "torch"))


@pytest.mark.parametrize(
    ("arguments", "cases"),
    [
        (["overhead"], {"way": WAYS, "contender": ["ours", "torch"]}),
        (
            ["family", "4x64"],
            {
                "norm": list(blocks.FAMILY),
                "pass": ["forward", "backward"],
                "contender": ["ours", "torch", "torch.compile"],
            },
        ),
    ],
)
def test_every_case_and_contender_is_recorded(run, arguments, cases):
    _, records = run(*arguments, "--dtypes", "fp32", *QUICK)
    assert [tuple(r[key] for key in cases) for r in records] == list(product(*cases.values()))
    assert all(r["status"] == "ok" and r["us"] > 0 and r["of_torch"] > 0 for r in records)


def test_blocks_are_compiled_as_written_fused_and_by_hand(run, monkeypatch):
    """Dynamo compiles them without Inductor; test_fusion.py gives Inductor the options of `fused`."""

    def compile_without_inductor(function, options, fullgraph, dynamic, compile=torch.compile):
        backend = fusion.eager if options else "eager"
        return compile(function, backend=backend, fullgraph=fullgraph, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", compile_without_inductor)
    fusion.fuse_neighbors.counts.clear()
    _, records = run("compile", "--dtypes", "fp32", *QUICK)
    found = [(r["block"], r["pass"], r["contender"]) for r in records]
    contenders = {BLOCKS[0]: ["written", "fused", "torch"], BLOCKS[1]: ["written", "fused", "by hand", "torch"]}
    assert found == [(b, p, c) for b in BLOCKS for p in ("forward", "training") for c in contenders[b]]
    assert all(r["status"] == "ok" and r["of_torch"] > 0 for r in records)
    assert fusion.fuse_neighbors.counts == {"add and modulate": 2}  # without and with a graph of autograd


def test_exact_results_are_computed_on_the_device():
    """numpy refuses tensors on a GPU, and those without memory."""
    results = cases.exact_results(cases.Case(3, 5, "bf16", device="meta"))
    assert {tensor.device.type for tensor in results.values()} == {"meta"}


def test_accuracy_shows_the_promised_errors(run):
    _, records = run("accuracy", "--dtypes", "fp32,fp16")
    offsets = [r for r in records if r["sweep"] == "offset" and r["quantity"] == "output"]
    assert max(r["value"] for r in offsets if r["dtypes"] == "fp16") == 1e4  # 1e5 overflows
    ours, torchs = ([r["error"] for r in offsets[i::2] if r["dtypes"] == "fp32"] for i in range(2))
    # The README promises 5e-7; torch's error grows with the mean.
    assert len(ours) == 8 and max(ours) < 5e-7 and max(torchs) > 1e-4


def not_importable(function, case):
    raise ImportError("built for another torch\nand a stack")


def other_eps(function, case):
    return lambda: function(case.x, (case.cols,), case.weight, case.bias, 0.1)


@pytest.mark.parametrize(
    ("name", "bind", "status", "message"),
    [
        ("apex", not_importable, 0, "ImportError: built for another torch\n"),
        ("apex", other_eps, 0, "output is off by "),
        ("ours", other_eps, 1, "ours is wrong: output is off by "),
    ],
)
def test_failing_and_wrong_contenders_are_reported(run, monkeypatch, name, bind, status, message):
    """Only wrong results of ours fail the command."""
    monkeypatch.setitem(contenders.CONTENDERS, name, ("apex", "torch.nn.functional:layer_norm", bind))
    arguments = ["4x64", "--dtypes", "fp32", "--contenders", f"torch,{name}", *QUICK]
    assert message in run("kernels", *arguments, status=status)[0]


def test_compare_times_both_builds(run, monkeypatch):
    """Uses the installed package as both builds, because a build takes minutes."""
    installed = Path(layernorm_ext._C.__file__).parents[1]
    monkeypatch.setattr(compare, "build_both", lambda *_: {"base": installed, "head": installed})
    monkeypatch.setattr(compare, "summary", lambda records: ("", True))  # a busy machine may make a build seem slower
    monkeypatch.setattr(compare, "STARTS", 1)
    _, records = run("compare", "HEAD", "16x64", "--dtypes", "fp32", *QUICK)
    assert [(r["contender"], r["pass"]) for r in records] == [("head", "forward"), ("head", "backward")]
    assert all(r["us"] > 0 and r["noise"] >= 1 for r in records)


STORED = sorted(report.RESULTS.glob("*/*.csv"))


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_stored_tables_are_those_of_the_stored_times(path):
    assert f"<!-- {path.parent.name}/{path.stem} -->\n" in (report.ROOT / "docs/results.md").read_text()
    for document, table in report.TABLES.items():
        text = document.read_text()
        assert report.update(text, path, table) == text


TIMES = [("ours", 2.0, 1e-7), ("torch", 3.0, 2e-7), ("copy", 1.0, None), ("apex", None, None)]


@pytest.mark.parametrize(
    ("benchmark", "cases", "times", "table"),
    [
        (
            "kernels",
            [{"rows": rows, "dtypes": "fp32", "pass": "forward", "mode": "eager"} for rows in (4, 8)],
            TIMES,
            [["pass", "fp32 torch", "fp32 copy"], ["forward", "1.50 (1.50 to 1.50)", "0.50 (0.50 to 0.50)"]],
        ),
        (
            "compile",
            [{"block": "norm", "dtypes": "bf16", "pass": "forward"}],
            [("written", 3.1, 1e-7), ("fused", 1.0, None), ("torch", 3.0, 1e-7)],
            [["block", "bf16 forward written", "bf16 forward fused"], ["norm", "≈ 1", "3.00"]],
        ),
    ],
)
def test_store_writes_the_table_of_a_run(monkeypatch, tmp_path, benchmark, cases, times, table):
    document, run = tmp_path / "results.md", tmp_path / "run.json"
    monkeypatch.setattr(report, "TABLES", {document: report.speeds})
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    document.write_text(f"before\n\n<!-- here/{benchmark} -->\n| old |\n\nafter\n")
    records = [
        case | {"contender": name, "us": us, "error": error, "noise": 1.04}
        for case in cases
        for name, us, error in times
    ]
    stored = {"benchmark": benchmark, "records": records, "command": "", "started": "", "machine": {}}
    run.write_text(json.dumps(stored))
    result = CliRunner().invoke(program.cli, ["store", str(run), "here"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    before, written = document.read_text().split(f"<!-- here/{benchmark} -->\n")
    written, after = written.split("\n\n")
    assert (before, after) == ("before\n\n", "after\n")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in written.splitlines()]
    assert [lines[0], *lines[2:]] == table
