"""The benchmarks, on inputs so small that their times mean nothing: what is measured, shown and refused."""

import csv
import json
import re
import subprocess
import sys
import types
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn

import layernorm_ext
from benchmarks import __main__ as program
from benchmarks import cases, compare, contenders, kernels, models, operators, report, runs, tables, timing

QUICK = ["--seconds", "0.001"]


@pytest.fixture(autouse=True)
def as_a_guest(monkeypatch):
    """Leave the allocator of the tests' process as it is, and pretend that nothing but torch is installed."""
    monkeypatch.setattr(program, "keep_pages", lambda: None)
    names = ["ours", "torch"]
    monkeypatch.setattr(program, "installed", lambda: names)
    for command in program.cli.commands.values():
        for option in command.params:
            if option.name == "contenders":
                monkeypatch.setattr(option, "default", lambda: names)


@pytest.fixture
def run(tmp_path):
    def invoke(command, *arguments, status=0):
        folder = [] if command == "report" else ["--out", str(tmp_path)]
        result = CliRunner().invoke(program.cli, [command, *folder, *arguments], catch_exceptions=False)
        assert result.exit_code == status, result.output
        return result.output

    return invoke


@pytest.fixture
def tiny_model(monkeypatch):
    def build(large):
        return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(4, 8)

    monkeypatch.setattr(models, "MODELS", {"transformer encoder": ("torch", build)})


def loaded(folder, benchmark):
    """The run that was saved; its CSV holds the same records."""
    found = runs.load(folder)[benchmark]
    with open(folder / f"{benchmark}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found.records) > 0
    assert all(row.keys() == record.keys() for row, record in zip(rows, found.records, strict=True))
    assert {"cpu", "torch", "checkout", "threads", "load"} <= found.machine.keys()
    assert {c["name"]: c["takes_part"] for c in found.contenders}["ours"]
    return found


# The commands.


def test_kernels(run, tmp_path):
    output = run("kernels", "40x64", "3x500", "--dtypes", "fp32,bf16-fp32", *QUICK)
    found = loaded(tmp_path, "kernels")
    assert len(found.records) == 2 * 2 * 3 * 3  # shapes, dtypes, passes; ours, torch and a copy
    for record in found.records:
        assert record["status"] == "ok" and record["how"] == "eager" and record["sets"] == 1
        assert 0 < record["us_low"] <= record["us"] <= record["us_high"]
        assert record["of_torch_low"] <= record["of_torch"] <= record["of_torch_high"]
        assert record["noise"] >= 1
        assert (record["error"] is None) == (record["contender"] == "copy")
        assert record["verdict"] in (
            {None} if record["contender"] in ("torch", "copy") else {"faster", "slower", "noise"}
        )
    copies = [r for r in found.records if r["contender"] == "copy"]
    assert {r["of_copy"] for r in copies} == {1}
    assert "torch / ours" in output
    assert len(re.findall(r" · \d+% · \de-\d\d", output)) == len(found.records) - len(copies)  # errors beside the times
    for plot in ("copy_fraction", "heat_map", "roofline"):
        assert (tmp_path / f"{plot}.png").stat().st_size > 5000


def test_kernels_go_on_where_they_were_interrupted(run, tmp_path, monkeypatch):
    command = ["kernels", "--resume", "--dtypes", "fp32", "--passes", "forward", *QUICK]
    run(*command, "4x64")
    first = loaded(tmp_path, "kernels").records

    def interrupted(device, rows, *case):
        if rows == 7:
            raise KeyboardInterrupt
        return measure(device, rows, *case)

    measure = kernels.measure
    monkeypatch.setattr(kernels, "measure", interrupted)
    run(*command, "4x64", "6x64", "7x64", status=1)
    assert {record["rows"] for record in loaded(tmp_path, "kernels").records} == {4, 6}
    monkeypatch.setattr(kernels, "measure", measure)
    run(*command, "4x64", "6x64", "7x64")
    records = loaded(tmp_path, "kernels").records
    assert records[: len(first)] == first and len(records) == 3 * len(first)

    message = run(*command, "8x64", "--contenders", "ours", status=1)
    assert "Expected the run in" in message and "to have the method" in message
    assert loaded(tmp_path, "kernels").records == records


def test_rotation_goes_through_as_many_bytes_as_asked_for(run, tmp_path):
    run("kernels", "40x64", "--dtypes", "fp32", "--rotate", "100000", *QUICK)
    sets = loaded(tmp_path, "kernels").records[0]["sets"]
    assert sets * 2 * 40 * 64 * 4 >= 100_000 > (sets - 1) * 2 * 40 * 64 * 4  # each reads x and writes y, at least


def test_operators(run, tmp_path, monkeypatch):
    """One whose library is not there is shown as failed."""

    def missing():
        raise OSError("libdnnl.so.3: cannot open shared object file")

    monkeypatch.setattr(operators.onednn, "library", missing)
    command = ["operators", "40x64", "3x500", "--dtypes", "fp32,bf16", "--contenders", "ours,torch,onednn"]
    output = run(*command, *QUICK)
    found = loaded(tmp_path, "operators")
    assert len(found.records) == 2 * 2 * 2 * 4  # shapes, dtypes, passes; and a copy
    for record in found.records:
        if record["contender"] == "onednn":
            assert record["status"] == "failed" and record["message"]
        else:
            assert record["status"] == "ok" and record["us"] > 0 and record["of_copy"] > 0
    assert "forward fp32, eager: torch / ours" in output
    stand_in = contenders.Contender("onednn", "onednn", operators.ours)
    monkeypatch.setitem(operators.CONTENDERS, "onednn", stand_in)
    run(*command, *QUICK)
    assert all(record["status"] == "ok" for record in loaded(tmp_path, "operators").records)
    assert (tmp_path / "operators_roofline.png").stat().st_size > 5000


def test_overhead(run, tmp_path):
    run("overhead", *QUICK)
    ways = {(r["way"], r["contender"]) for r in loaded(tmp_path, "overhead").records}
    assert {("operator", "ours"), ("module", "torch"), ("forward and backward", "ours")} <= ways


def test_memory(run, tmp_path):
    run("memory", "256x1024", "--dtypes", "fp32")
    ours = {r["stage"]: r for r in loaded(tmp_path, "memory").records if r["contender"] == "ours"}
    of_input = 256 * 1024 * 4
    # The output, mean and rstd; autograd keeps these beside the input, which was there before.
    assert of_input <= ours["inference"]["peak_bytes"] <= 1.1 * of_input
    assert of_input <= ours["forward that records"]["kept_bytes"] <= 1.1 * of_input
    assert 2 * of_input <= ours["forward and backward"]["peak_bytes"] <= 3 * of_input


def test_accuracy(run, tmp_path):
    run("accuracy", "--sweeps", "offset,rows,cols,scale", "--dtypes", "fp32,fp16", "--largest", "4096")
    run("accuracy", "--sweeps", "offset", "--dtypes", "fp32,fp16")
    records = loaded(tmp_path, "accuracy").records
    assert [r["value"] for r in records if (r["contender"], r["dtypes"]) == ("ours", "fp32")] == [
        0, 1, 10, 100, 1e3, 1e4, 1e5, 1e6,
    ]  # fmt: skip
    assert max(r["value"] for r in records if r["dtypes"] == "fp16") == 1e4  # 1e5 is more than fp16 holds
    ours, torchs = ([r for r in records if r["contender"] == name] for name in ("ours", "torch"))
    # The package's promise, in parts of the largest value instead of each; torch loses digits as the mean grows.
    assert max(r["output"] for r in ours if r["dtypes"] == "fp32") < 5e-7
    assert max(r["output"] for r in torchs if r["dtypes"] == "fp32") > 1e-4


def test_models(run, tmp_path, tiny_model):
    run("models", *QUICK)
    records = loaded(tmp_path, "models").records
    assert [(r["mode"], r["contender"]) for r in records] == [
        (mode, name) for mode in ("training", "inference") for name in ("torch", "ours")
    ]
    assert all(r["layers"] == 1 and r["status"] == "ok" and r["peak_bytes"] > 0 for r in records)


def test_models_of_our_own():
    for name in ("transformer encoder", "ConvNeXt blocks"):
        model, inputs = models.MODELS[name][1](False)
        assert name in models.available()
        assert layernorm_ext.convert(model).replaced
        with torch.inference_mode():
            assert models.output(model, inputs[:1]).shape == inputs[:1].shape


def test_a_model_that_cannot_be_built_is_shown(run, tmp_path, monkeypatch):
    def build(large):
        raise RuntimeError("no such configuration")

    monkeypatch.setattr(models, "MODELS", {"transformer encoder": ("torch", build)})
    output = run("models", *QUICK, status=1)
    assert "no such configuration" in output
    assert {r["status"] for r in loaded(tmp_path, "models").records} == {"failed"}


def test_all_and_its_report(run, tmp_path, tiny_model, monkeypatch):
    monkeypatch.setitem(program.SHAPES, "grid", "4x64 16x64")
    for name in ("kernels", "overhead", "accuracy", "models", "memory"):
        for option in program.cli.commands[name].params:
            small = {"seconds": 0.001, "largest": 4096, "dtypes": ["fp32"]}
            if option.name in small:
                monkeypatch.setattr(option, "default", small[option.name])
    run("all")
    page = (tmp_path / "report.html").read_text()
    for section in ("kernels", "overhead", "memory", "models", "accuracy"):
        assert f'<section id="{section}">' in page
    assert (
        page.count("<img") == page.count("data:image/png;base64,") == 3 + 1 + 1 + 2 + 2
    )  # offset and scale: too large
    assert "http" not in page  # nothing is fetched


def test_report_of_two_runs(run, tmp_path):
    for name in ("before", "after"):
        run("kernels", "4x64", "--dtypes", "fp32", "--out", str(tmp_path / name), *QUICK)
    files = [str(tmp_path / name) for name in ("before", "after")]
    run("report", *files, "--html", str(tmp_path / "two.html"), "--names", "old,new")
    page = (tmp_path / "two.html").read_text()
    assert "old → new" in page and page.count("<img") == 2 * 3
    run("report", *files, "--names", "one", status=2)
    run("report", *files, files[0], status=2)


def test_a_report_wants_results_of_its_schema(run, tmp_path):
    assert "found no .json file" in run("report", str(tmp_path), status=1)
    (tmp_path / "kernels.json").write_text(json.dumps({"machine": {}, "cells": {}}))
    assert "to have schema=1, but got schema=None" in run("report", str(tmp_path), status=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "64"], "Expected a shape ROWSxCOLS such as 4096x768, but got '64', or one of cpu, gpu, grid"),
        (["kernels", "0x64"], "but got '0x64'"),
        (
            ["kernels", "--dtypes", "fp8"],
            "Expected some of fp64, fp32, fp16, bf16, fp16-fp32, bf16-fp32, but got 'fp8'",
        ),
        (["overhead", "--contenders", "ours,theirs"], "but got 'theirs'"),
        (["compare", "no-such-revision"], "git knows no 'no-such-revision'"),
    ],
)
def test_refusals(run, arguments, message):
    assert message in " ".join(run(*arguments, status=1 if arguments[0] == "compare" else 2).split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(run):
    assert "sees no GPU; run this on a machine with one, or --device cpu" in run(
        "overhead", "--device", "cuda", status=1
    )


def test_it_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "--help"]
    done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, check=True)
    assert "python -m benchmarks" in done.stdout


# Contenders.


def contender(monkeypatch, bind, name="apex"):
    monkeypatch.setitem(contenders.ALL, name, contenders.Contender(name, "torch", bind))


def test_a_contender_that_fails_is_shown(run, tmp_path, monkeypatch):
    def bind(case):
        raise ImportError("it was built for another torch\nand a stack")

    contender(monkeypatch, bind)
    output = run("kernels", "4x64", "--dtypes", "fp32", "--contenders", "ours,torch,apex", *QUICK)
    assert "apex failed (3 of its cases): ImportError: it was built for another torch" in output
    failed = [r for r in loaded(tmp_path, "kernels").records if r["contender"] == "apex"]
    assert len(failed) == 3 and {r["us"] for r in failed} == {None}
    run("report", str(tmp_path))
    assert "it was built for another torch" in (tmp_path / "report.html").read_text()
    for command in ("overhead", "memory", "accuracy"):
        few = {"overhead": QUICK, "memory": ["4x64"], "accuracy": ["--sweeps", "cols", "--largest", "64"]}[command]
        assert "it was built for another torch" in run(command, "--contenders", "ours,torch,apex", *few)


def test_a_contender_without_backward_is_timed_in_forward(run, tmp_path, monkeypatch):
    contender(monkeypatch, lambda case: lambda x: F.layer_norm(x.detach(), (case.cols,)) * case.weight.detach()
              + case.bias.detach())  # fmt: skip
    run("kernels", "4x64", "--dtypes", "fp32", "--contenders", "ours,torch,apex", *QUICK)
    status = {r["pass"]: r["status"] for r in loaded(tmp_path, "kernels").records if r["contender"] == "apex"}
    assert status == {"forward": "ok", "backward": "failed", "both": "failed"}


def test_what_does_not_fit_into_memory_is_shown(run, tmp_path, monkeypatch):
    def sets_of(device, rows, cols, dtypes):
        if rows > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [cases.Case(rows, cols, dtypes)]

    monkeypatch.setattr(kernels, "sets_of", sets_of)
    output = run("kernels", "4x64", "8x64", "--dtypes", "fp32", *QUICK)
    assert "torch failed (3 of its cases): OutOfMemoryError: CUDA out of memory" in output
    assert sum(r["us"] is not None for r in loaded(tmp_path, "kernels").records) == 3 * 3


def test_a_wrong_contender_is_found(run, monkeypatch):
    contender(monkeypatch, lambda case: lambda x: F.layer_norm(x, (case.cols,), case.weight, case.bias, 0.1))
    output = run("kernels", "4x64", "--dtypes", "fp32", "--contenders", "ours,torch,apex", *QUICK)
    assert "apex wrong (1 of its cases): output is off by" in output and "WRONG" in output


def test_if_ours_is_wrong_the_command_fails(run, monkeypatch):
    contender(monkeypatch, lambda case: lambda x: 2 * layernorm_ext.layer_norm(x, (case.cols,)), "ours")
    assert "ours is wrong: output is off by" in run("kernels", "4x64", "--dtypes", "fp32", *QUICK, status=1)


def test_torch_compile():
    case = cases.Case(8, 64, "fp32")
    (entry,) = contenders.enter(["torch.compile"], [case])
    assert not entry.failed and not any(entry.wrong.values())
    for _ in range(2):  # the same backward graph, twice
        entry.calls[0].backward()


PEERS = {  # name -> module, function or class, and the parameters that its authors document
    "apex": (
        "apex.normalization.fused_layer_norm",
        "fused_layer_norm_affine",
        "input weight bias normalized_shape eps",
    ),
    "flash-attn": ("flash_attn.ops.triton.layer_norm", "layer_norm_fn", "x weight bias residual x1 weight1 bias1 eps"),
    "liger-kernel": ("liger_kernel.transformers.functional", "liger_layer_norm", "X W B eps"),
    "quack-kernels": ("quack.rmsnorm", "layernorm_fwd", "x weight bias eps return_rstd return_mean"),
}


@pytest.mark.parametrize("name", PEERS)
def test_peers_are_called_as_documented(monkeypatch, name):
    module_name, function, parameters = PEERS[name]
    namespace = {"F": F}
    x, weight, bias, *_ = parameters.split()
    defaults = ", ".join([x, weight, bias, *(f"{p}=None" for p in parameters.split()[3:])])
    exec(f"def f({defaults}): return F.layer_norm({x}, {weight}.shape, {weight}, {bias}, eps)", namespace)
    parts = module_name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    setattr(sys.modules[module_name], function, namespace["f"])
    (entry,) = contenders.enter([name], [cases.Case(8, 64, "fp32")])
    assert not entry.failed and not any(entry.wrong.values())


def test_transformer_engine_is_a_module(monkeypatch):
    module = types.ModuleType("transformer_engine.pytorch")
    module.LayerNorm = nn.LayerNorm
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    (entry,) = contenders.enter(["transformer-engine"], [cases.Case(8, 64, "fp32")])
    assert not entry.failed and not any(entry.wrong.values())


def test_what_is_installed_is_found_with_its_version(monkeypatch):
    def version(package):
        if package in ("apex", "torch"):
            return "1.2"
        raise PackageNotFoundError

    monkeypatch.setattr(contenders, "version", version)
    found = {c["name"]: c["version"] for c in runs.listed(["torch"])}
    assert found["apex"] == found["torch.compile"] == "1.2" and found["flash-attn"] is None


def test_copy_and_addition_move_the_bytes_of_the_operators():
    copy = contenders.Copy(cases.Case(30, 64, "bf16"))
    statistics = 2 * 30 * 4
    assert copy.source.nbytes + copy.copied.nbytes == 2 * 30 * 64 * 2 + statistics + 2 * 64 * 2
    assert sum(t.nbytes for t in copy.terms) == 3 * 30 * 64 * 2 + statistics + 3 * 64 * 2


@pytest.mark.parametrize("dtypes", cases.PAIRS)
def test_errors_are_those_of_the_worst_element(monkeypatch, dtypes):
    monkeypatch.setattr(cases, "CHUNK", 64)  # rows are compared in several parts
    case = cases.Case(5, 32, dtypes)
    (entry,) = contenders.enter(["ours"], [case])
    # Two roundings in which ours may be off, a third that it is rounded by.
    assert max(entry.errors.values()) <= 3 * torch.finfo(case.dtype).eps
    right = [t.clone() for t in contenders.Calls(contenders.ALL["ours"], case).both()]
    y = entry.calls[0].layer(case.x).detach()
    right[0][4, 31] += 1
    right[2][0] = torch.nan
    found = cases.errors(case, {"made up": (y, *right)})["made up"]
    assert found["output"] == entry.errors["output"] and found["grad_weight"] == entry.errors["grad_weight"]
    assert found["grad_input"] > 0.01 and found["grad_bias"] == torch.inf


# Times and noise.


def test_verdicts():
    again = timing.Quartiles.of([0.98, 0.99, 1.0, 1.01, 1.02, 1.03])
    noise = timing.noise(again)
    assert noise == again.high
    assert timing.noise(timing.Quartiles(0.9, 1, 1.05)) == 1 / 0.9
    assert [timing.verdict(ratio, noise) for ratio in (1.2, 1.01, 0.99, 0.8)] == ["faster", "noise", "noise", "slower"]


def test_figures_are_paired():
    """Rounds that are slow for all, as when another process runs, change no ratio."""
    slow = [1, 5, 1, 9, 1, 2, 30, 1, 1]
    times = {"ours": [1e-6 * s for s in slow], "again": [1e-6 * s for s in slow], "torch": [2e-6 * s for s in slow]}
    found = timing.figures(times, "ours", ("torch", "copy"))
    assert (found["of_torch_low"], found["of_torch_high"], found["noise"]) == (2, 2, 1)
    assert found["verdict"] == "faster" and found["of_copy"] is None
    assert timing.figures({}, "ours", ("torch",))["us"] is None


def test_samples_are_taken_in_turn_and_in_no_fixed_order():
    calls = []

    def taking(name):
        return lambda: calls.append(name) or 1.0

    times = timing.in_turn({name: taking(name) for name in "abc"}, 0)
    assert {name: len(t) for name, t in times.items()} == dict.fromkeys("abc", timing.LEAST_ROUNDS)
    rounds = ["".join(calls[i : i + 3]) for i in range(3, len(calls), 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds) and len(set(rounds)) > 1


class Graphs(timing.Device):
    """A CPU that goes through the motions of CUDA graphs."""

    hows = ("eager", "graph")

    def captured(self, run):
        result = run()
        return lambda: run() and result


def test_graphs_are_timed_beside_eager_calls():
    device = Graphs("cpu", rotate=30_000)
    records = list(kernels.measure(device, 16, 64, "fp32", ["ours", "torch"], ["forward", "both"], 0.001))
    assert {r["how"] for r in records} == {"eager", "graph"} and all(r["us"] for r in records)


def test_a_graph_that_gives_other_numbers_has_failed(monkeypatch):
    device = Graphs("cpu")
    monkeypatch.setattr(device, "captured", lambda run: lambda: [run()[0] + 1])
    records = kernels.measure(device, 16, 64, "fp32", ["ours"], ["forward"], 0.001)
    ours = {r["how"]: r["message"] for r in records if r["contender"] == "ours"}
    assert ours == {"eager": "", "graph": "RuntimeError: a CUDA graph gives other numbers than an eager call"}


# The guard.


def samples(head, again=1.0, scatter=0.01):
    """Times of one start, whose pairs scatter by so much."""
    base = [1e-3 * (1 + i % 3) for i in range(12)]
    wobble = [1 + scatter * (-1) ** i for i in range(12)]
    times = {"base": base, "again": [b * again * w for b, w in zip(base, wobble, strict=True)]}
    return times | {"head": [b * head for b in base]}


@pytest.mark.parametrize(
    ("starts", "verdict"),
    [
        ([samples(1.1), samples(1.1)], "slower"),
        ([samples(0.9), samples(0.9)], "faster"),
        ([samples(1.005), samples(1.005)], "noise"),
        ([samples(1.1, scatter=0.2)], "noise"),
        ([samples(1.1), samples(1.1, again=1.2)], "noise"),  # processes of the same build that differ by more
    ],
    ids=["slower", "faster", "within the pairs' scatter", "noisy clock", "noisy processes"],
)
def test_judgement(starts, verdict):
    assert compare.judge(starts)["verdict"] == verdict


def test_a_judgement_counts_if_it_is_repeated():
    slower, noise = compare.judge([samples(1.2)]), compare.judge([samples(1.0)])
    assert compare.confirmed(slower, slower)["verdict"] == "slower"
    assert compare.confirmed(slower, noise)["verdict"] == "noise"


@pytest.mark.parametrize(("kinds", "passes"), [(["noise", "faster"], True), (["noise", "slower"], False)])
def test_the_guard_fails_if_a_case_is_slower(kinds, passes):
    records = [{"of_base": 1.0, "verdict": kind, "status": "ok"} for kind in kinds]
    text, passed = compare.summary(records)
    assert passed is passes and "base / head 1.000" in text


def test_compare(run, tmp_path, monkeypatch):
    """With the installed package as both builds: a build takes minutes."""
    place = Path(layernorm_ext.__file__).parents[1]
    monkeypatch.setattr(compare, "build", lambda revision, folder: place)
    # A machine that is busy may well tell the same build from itself.
    monkeypatch.setattr(compare, "summary", lambda records: ("", True))
    run("compare", "HEAD", "16x64", "--dtypes", "fp32", "--passes", "both", "--starts", "1", "--threads", "1", *QUICK)
    (record,) = loaded(tmp_path, "compare").records
    assert record["contender"] == "head" and record["us"] > 0 and record["noise"] >= 1
    run("report", str(tmp_path))


def test_another_package_than_the_one_built_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="to be loaded, but got"):
        compare.Worker(tmp_path, "cpu", 1)


def test_tables_name_each_fault_once():
    record = {"contender": "apex", "status": "failed", "message": "no", "us": None}
    assert tables.notes(runs.Run("kernels", {}, {}, [], [record, record])) == ["apex failed (2 of its cases): no"]


def test_changes_between_runs_know_the_noise_of_both():
    def made_up(us):
        keys = {"rows": 1, "cols": 1, "dtypes": "fp32", "pass": "forward", "how": "eager", "contender": "ours"}
        return runs.Run("kernels", {}, {}, [], [keys | {"us": us, "noise": 1.1}])

    (same,), (other,) = (list(report.changes(made_up(1.0), made_up(us))) for us in (0.9, 0.5))
    assert (same["verdict"], other["verdict"]) == ("noise", "faster")
