"""The benchmarks on tiny inputs, whose times are meaningless: the records, the tables and the error messages."""

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
from torch import nn

import layernorm_ext

pytestmark = pytest.mark.integration
pytest.importorskip("matplotlib")
pytest.importorskip("rich")
CliRunner = pytest.importorskip("click.testing").CliRunner

from benchmarks import __main__ as program  # noqa: E402
from benchmarks import cases, compare, contenders, kernels, models, runs, tables, timing  # noqa: E402

QUICK = ["--seconds", "0.001"]


@pytest.fixture(autouse=True)
def only_ours_and_torch(monkeypatch):
    """Hide other installed packages, and keep the allocator settings of the test process."""
    monkeypatch.setattr(program, "keep_pages", lambda: None)
    for command in program.cli.commands.values():
        for option in command.params:
            if option.name == "contenders":
                monkeypatch.setattr(option, "default", lambda: ["ours", "torch"])


@pytest.fixture
def run(tmp_path):
    def invoke(command, *arguments, status=0):
        arguments = [command, "--out", str(tmp_path), *arguments]
        result = CliRunner().invoke(program.cli, arguments, catch_exceptions=False)
        assert result.exit_code == status, result.output
        return result.output

    return invoke


@pytest.fixture
def tiny_model(monkeypatch):
    def build(large):
        return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(4, 8)

    monkeypatch.setattr(models, "MODELS", dict.fromkeys(models.MODELS, build))


def saved_records(folder, benchmark):
    """Return the records of the JSON file, after a check of its other parts and of the CSV file."""
    found = json.loads((folder / f"{benchmark}.json").read_text())
    with open(folder / f"{benchmark}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["records"]) > 0
    assert all(row.keys() == record.keys() for row, record in zip(rows, found["records"], strict=True))
    assert {"cpu", "torch", "checkout", "threads", "load"} <= found["machine"].keys()
    assert {"ours", "torch"} <= found["machine"]["installed"].keys()
    return found["records"]


# The commands


def test_kernels(run, tmp_path):
    output = run("kernels", "40x64", "3x500", "--dtypes", "fp32,bf16-fp32", *QUICK)
    records = saved_records(tmp_path, "kernels")
    assert len(records) == 2 * 2 * 3 * 3  # shapes, dtypes, passes and contenders
    for record in records:
        assert record["status"] == "ok" and record["mode"] == "eager" and record["sets"] == 1
        assert record["us"] > 0 and record["of_torch"] > 0 and record["noise"] >= 1
        assert (record["error"] is None) == (record["contender"] == "copy")
        assert record["verdict"] in ({"faster", "slower", "noise"} if record["contender"] == "ours" else {None})
    copies = [r for r in records if r["contender"] == "copy"]
    assert {r["of_copy"] for r in copies} == {1}
    assert len(re.findall(r" · \d+% · \de-\d\d", output)) == len(records) - len(copies)  # errors beside the times
    assert (tmp_path / "copy_fraction.png").stat().st_size > 5000


def test_rotate_sets_the_number_of_tensor_sets(run, tmp_path):
    run("kernels", "40x64", "--dtypes", "fp32", "--rotate", "100000", *QUICK)
    sets = saved_records(tmp_path, "kernels")[0]["sets"]
    assert sets * 2 * 40 * 64 * 4 >= 100_000 > (sets - 1) * 2 * 40 * 64 * 4  # each set has an input and an output


def test_overhead(run, tmp_path):
    run("overhead", *QUICK)
    ways = {(r["way"], r["contender"]) for r in saved_records(tmp_path, "overhead")}
    assert {("operator", "ours"), ("module", "torch"), ("forward and backward", "ours")} <= ways


def test_memory(run, tmp_path):
    run("memory", "256x1024", "--dtypes", "fp32")
    ours = {r["stage"]: r for r in saved_records(tmp_path, "memory") if r["contender"] == "ours"}
    input_bytes = 256 * 1024 * 4
    # Forward allocates the output, mean and rstd. Autograd keeps them and the input, which existed before the call.
    assert input_bytes <= ours["inference"]["peak_bytes"] <= 1.1 * input_bytes
    assert input_bytes <= ours["forward with graph"]["kept_bytes"] <= 1.1 * input_bytes
    assert 2 * input_bytes <= ours["forward and backward"]["peak_bytes"] <= 3 * input_bytes


def test_accuracy(run, tmp_path):
    run("accuracy", "--sweeps", "offset,rows,cols,scale", "--dtypes", "fp32,fp16", "--largest", "4096")
    run("accuracy", "--sweeps", "offset", "--dtypes", "fp32,fp16")
    records = saved_records(tmp_path, "accuracy")
    outputs = {n: [r for r in records if (r["quantity"], r["dtypes"], r["contender"]) == ("output", "fp32", n)]
               for n in ("ours", "torch")}  # fmt: skip
    assert [r["value"] for r in outputs["ours"]] == [0, 1, 10, 100, 1e3, 1e4, 1e5, 1e6]
    assert max(r["value"] for r in records if r["dtypes"] == "fp16") == 1e4  # float16 overflows at 1e5
    # The README promises 5e-7; torch's error grows with the mean.
    assert max(r["error"] for r in outputs["ours"]) < 5e-7 and max(r["error"] for r in outputs["torch"]) > 1e-4
    assert (tmp_path / "error_by_offset.png").stat().st_size > 5000


def test_models(run, tmp_path, tiny_model):
    run("models", "--models", "ConvNeXt blocks", *QUICK)
    records = saved_records(tmp_path, "models")
    assert [(r["mode"], r["contender"]) for r in records] == [
        (mode, name) for mode in ("training", "inference") for name in ("torch", "ours")
    ]
    assert all(r["layers"] == 1 and r["status"] == "ok" and r["peak_bytes"] > 0 for r in records)


@pytest.mark.parametrize("name", models.MODELS)
def test_models_can_be_built_and_converted(name):
    model, inputs = models.MODELS[name](False)
    assert layernorm_ext.convert(model).replaced
    with torch.inference_mode():
        assert model(inputs[:1]).shape == inputs[:1].shape


def test_a_model_that_cannot_be_built_is_reported(run, tmp_path, monkeypatch):
    def build(large):
        raise RuntimeError("no such configuration")

    monkeypatch.setattr(models, "MODELS", dict.fromkeys(models.MODELS, build))
    assert "no such configuration" in run("models", *QUICK, status=1)
    assert {r["status"] for r in saved_records(tmp_path, "models")} == {"failed"}


def test_a_converted_model_with_wrong_results_is_reported(run, tiny_model, monkeypatch):
    monkeypatch.setattr(models, "errors", lambda models, inputs: {"ours": float("nan"), "torch": 1e-7})
    assert "ours is wrong: the error is nan of the largest value" in run("models", *QUICK, status=1)


def test_all(run, tmp_path, tiny_model, monkeypatch):
    monkeypatch.setitem(program.SHAPES, "cpu", "4x64 16x64")
    for name in ("kernels", "overhead", "accuracy", "models", "memory"):
        for option in program.cli.commands[name].params:
            small = {"seconds": 0.001, "largest": 4096, "dtypes": ["fp32"]}
            if option.name in small:
                monkeypatch.setattr(option, "default", small[option.name])
    run("all")
    for benchmark in ("kernels", "overhead", "memory", "models", "accuracy"):
        assert saved_records(tmp_path, benchmark)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "64"], "Expected a shape ROWSxCOLS such as 4096x768, but got '64'"),
        (["kernels", "0x64"], "but got '0x64'"),
        (
            ["kernels", "--dtypes", "fp8"],
            "Expected some of fp64, fp32, fp16, bf16, fp16-fp32, bf16-fp32, but got 'fp8'",
        ),
        (["overhead", "--contenders", "ours,theirs"], "but got 'theirs'"),
        (["compare", "no-such-revision"], "git knows no 'no-such-revision'"),
    ],
)
def test_invalid_arguments(run, arguments, message):
    assert message in " ".join(run(*arguments, status=1 if arguments[0] == "compare" else 2).split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(run):
    assert "sees no GPU; run this on a machine with one, or --device cpu" in run(
        "overhead", "--device", "cuda", status=1
    )


def test_run_as_a_module():
    command = [sys.executable, "-m", "benchmarks", "--help"]
    done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, check=True)
    assert "python -m benchmarks" in done.stdout


# The contenders


def add_contender(monkeypatch, bind, name="apex"):
    monkeypatch.setitem(contenders.ALL, name, ("torch", bind))


@pytest.mark.parametrize(
    ("command", "arguments", "cases"),
    [
        ("kernels", ["4x64", "--dtypes", "fp32", *QUICK], 3),
        ("overhead", QUICK, 5),
        ("memory", ["4x64", "--dtypes", "fp32"], 3),
        ("accuracy", ["--sweeps", "cols", "--largest", "8", "--dtypes", "fp32"], 4),
    ],
)
def test_a_failing_contender_is_reported(run, tmp_path, monkeypatch, command, arguments, cases):
    def bind(case):
        raise ImportError("it was built for another torch\nand a stack")

    add_contender(monkeypatch, bind)
    output = run(command, "--contenders", "ours,torch,apex", *arguments)
    assert f"apex failed ({cases} of its cases): ImportError: it was built for another torch\n" in output
    failed = [r for r in saved_records(tmp_path, command) if r["contender"] == "apex"]
    assert len(failed) == cases and {r["status"] for r in failed} == {"failed"}
    assert {r.get("us") for r in failed} == {None}


def test_a_contender_without_backward_is_timed_in_forward(run, tmp_path, monkeypatch):
    def bind(case):
        return lambda x: F.layer_norm(x.detach(), (case.cols,)) * case.weight.detach() + case.bias.detach()

    add_contender(monkeypatch, bind)
    run("kernels", "4x64", "--dtypes", "fp32", "--contenders", "ours,torch,apex", *QUICK)
    status = {r["pass"]: r["status"] for r in saved_records(tmp_path, "kernels") if r["contender"] == "apex"}
    assert status == {"forward": "ok", "backward": "failed", "both": "failed"}


def test_out_of_memory_is_reported(run, tmp_path, monkeypatch):
    def sets_of(device, rows, cols, dtypes):
        if rows > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [cases.Case(rows, cols, dtypes)]

    monkeypatch.setattr(kernels, "sets_of", sets_of)
    output = run("kernels", "4x64", "8x64", "--dtypes", "fp32", *QUICK)
    assert "torch failed (3 of its cases): OutOfMemoryError: CUDA out of memory" in output
    assert sum(r["us"] is not None for r in saved_records(tmp_path, "kernels")) == 3 * 3


def test_a_wrong_contender_is_reported(run, monkeypatch):
    add_contender(monkeypatch, lambda case: lambda x: F.layer_norm(x, (case.cols,), case.weight, case.bias, 0.1))
    output = run("kernels", "4x64", "--dtypes", "fp32", "--contenders", "ours,torch,apex", *QUICK)
    assert re.search(r"apex wrong \(\d of its cases\): output is off by", output) and "WRONG" in output


def test_the_command_fails_if_ours_is_wrong(run, monkeypatch):
    add_contender(monkeypatch, lambda case: lambda x: 2 * layernorm_ext.layer_norm(x, (case.cols,)), "ours")
    assert "ours is wrong: output is off by" in run("kernels", "4x64", "--dtypes", "fp32", *QUICK, status=1)


def test_torch_compile():
    (entry,) = contenders.enter(["torch.compile"], [cases.Case(8, 64, "fp32")])
    assert entry.record("both", {})["status"] == "ok"
    for _ in range(2):  # backward runs repeatedly on the same graph
        entry.calls[0].backward()


PEERS = {  # name -> module, function, and its documented parameters
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
    assert entry.record("both", {})["status"] == "ok"


def test_transformer_engine_is_a_module(monkeypatch):
    module = types.ModuleType("transformer_engine.pytorch")
    module.LayerNorm = nn.LayerNorm
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    (entry,) = contenders.enter(["transformer-engine"], [cases.Case(8, 64, "fp32")])
    assert entry.record("both", {})["status"] == "ok"


def test_installed_packages_and_versions(monkeypatch):
    def version(package):
        if package in ("apex", "torch"):
            return "1.2"
        raise PackageNotFoundError

    monkeypatch.setattr(contenders, "version", version)
    assert contenders.installed() == {"torch": "1.2", "torch.compile": "1.2", "apex": "1.2"}


def test_copy_moves_the_bytes_of_the_operators():
    copy = contenders.Copy(cases.Case(30, 64, "bf16"))
    statistics = 2 * 30 * 4
    assert copy.source.nbytes + copy.copied.nbytes == 2 * 30 * 64 * 2 + statistics + 2 * 64 * 2
    assert sum(t.nbytes for t in copy.terms) == 3 * 30 * 64 * 2 + statistics + 3 * 64 * 2


@pytest.mark.parametrize("dtypes", cases.PAIRS)
def test_errors_find_the_worst_element(monkeypatch, dtypes):
    monkeypatch.setattr(cases, "CHUNK", 64)  # compares the rows in several chunks
    case = cases.Case(5, 32, dtypes)
    (entry,) = contenders.enter(["ours"], [case])
    # Two roundings of the computation and one of the result.
    assert max(entry.errors.values()) <= 3 * torch.finfo(case.dtype).eps
    gradients = [t.clone() for t in contenders.Calls("ours", case).both()]
    y = entry.calls[0].layer(case.x).detach()
    gradients[0][4, 31] += 1
    gradients[2][0] = torch.nan
    found = cases.errors(case, {"modified": (y, *gradients)})["modified"]
    assert found["output"] == entry.errors["output"] and found["grad_weight"] == entry.errors["grad_weight"]
    assert found["grad_input"] > 0.01 and found["grad_bias"] == torch.inf


# Times and noise


def test_verdicts():
    noise = timing.noise([0.98, 0.99, 1.0, 1.01, 1.02, 1.03])
    assert 1.02 < noise < 1.03
    assert timing.noise([0.8, 0.8, 1, 1.1]) == 1 / 0.8
    assert [timing.verdict(ratio, noise) for ratio in (1.2, 1.01, 0.99, 0.8)] == ["faster", "noise", "noise", "slower"]


def test_ratios_are_paired():
    """A round that is slow for all contenders changes no ratio."""
    slow = [1, 5, 1, 9, 1, 2, 30, 1, 1]
    times = {"ours": [1e-6 * s for s in slow], "again": [1e-6 * s for s in slow], "torch": [2e-6 * s for s in slow]}
    found = timing.figures(times, "ours", ("torch", "copy"))
    assert found == {"us": 1, "of_torch": 2, "of_copy": None, "noise": 1, "verdict": "faster"}
    assert timing.figures({}, "ours", ("torch",))["us"] is None


def test_samples_are_interleaved_in_random_order():
    calls = []

    def taking(name):
        return lambda: calls.append(name) or 1.0

    times = timing.in_turn({name: taking(name) for name in "abc"}, 0)
    assert {name: len(t) for name, t in times.items()} == dict.fromkeys("abc", timing.MIN_ROUNDS)
    rounds = ["".join(calls[i : i + 3]) for i in range(3, len(calls), 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds) and len(set(rounds)) > 1


@pytest.fixture
def graph_device(monkeypatch):
    """A CPU that pretends to capture CUDA graphs."""
    device = timing.Device("cpu", rotate=30_000)
    device.modes = ("eager", "graph")

    def captured(run):
        result = run()
        return lambda: run() and result

    device.captured = captured
    return device


def test_graphs_are_timed_beside_eager_calls(graph_device):
    records = list(kernels.measure(graph_device, 16, 64, "fp32", ["ours", "torch"], ["forward", "both"], 0.001))
    assert {r["mode"] for r in records} == {"eager", "graph"} and all(r["us"] for r in records)


def test_a_graph_with_other_results_fails(graph_device):
    graph_device.captured = lambda run: lambda: [run()[0] + 1]
    records = kernels.measure(graph_device, 16, 64, "fp32", ["ours"], ["forward"], 0.001)
    ours = {r["mode"]: r["message"] for r in records if r["contender"] == "ours"}
    assert ours == {
        "eager": "",
        "graph": "RuntimeError: the results of a CUDA graph differ from those of an eager call",
    }


# compare


def samples(head, again=1.0, scatter=0.01):
    """Return the times of one start; the ratio again / base scatters by `scatter` between samples."""
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
        ([samples(1.1), samples(1.1, again=1.2)], "noise"),
    ],
    ids=["slower", "faster", "within the scatter", "noisy samples", "noisy processes"],
)
def test_compare_verdict(starts, verdict):
    assert compare.judge(starts)["verdict"] == verdict


@pytest.mark.parametrize(("repeated", "verdict"), [(1.2, "slower"), (1.0, "noise")])
def test_compare_measures_suspects_twice(repeated, verdict):
    cell, other = (16, 64, "fp32", "forward"), (32, 64, "fp32", "forward")
    rounds = iter([[(cell, samples(1.2)), (other, samples(1.0))], [(cell, samples(repeated))]])
    requests = []

    def sample(cells):
        requests.append(cells)
        return next(rounds)

    records = list(compare.measure([cell, other], sample))
    assert requests == [[cell, other], [cell]]
    assert [r["verdict"] for r in records] == [verdict, "noise"]
    assert compare.summary(records)[1] is (verdict == "noise")


def test_compare_fails_if_a_build_is_wrong():
    cell = (16, 64, "fp32", "forward")
    (record,) = compare.measure([cell], lambda cells: [(cell, "head: output is off by 1")])
    assert record["status"] == "failed" and record["message"] == "head: output is off by 1" and record["us"] is None
    text, passed = compare.summary([record])
    assert not passed and "1 failed" in text


def test_compare(run, tmp_path, monkeypatch):
    """Uses the installed package as both builds, because a build takes minutes."""
    installed = Path(layernorm_ext.__file__).parents[1]
    monkeypatch.setattr(compare, "build", lambda revision, folder: installed)
    # On a busy machine the same build may differ from itself.
    monkeypatch.setattr(compare, "summary", lambda records: ("", True))
    run("compare", "HEAD", "16x64", "--dtypes", "fp32", "--passes", "both", "--starts", "1", "--threads", "1", *QUICK)
    (record,) = saved_records(tmp_path, "compare")
    assert record["contender"] == "head" and record["us"] > 0 and record["noise"] >= 1


def test_compare_refuses_a_package_from_another_folder(tmp_path):
    with pytest.raises(RuntimeError, match="to be loaded, but got"):
        compare.Worker(tmp_path, "cpu", 1)


def test_faults_are_listed_once():
    record = {"contender": "apex", "status": "failed", "message": "no", "us": None}
    assert tables.notes(runs.Run("kernels", {}, {}, [record, record])) == ["apex failed (2 of its cases): no"]
