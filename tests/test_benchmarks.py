"""The benchmarks on tiny inputs with meaningless times: records, tables and error messages."""

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
from benchmarks import cases, compare, contenders, kernels, models, runs, timing  # noqa: E402

QUICK = ["--seconds", "0.001"]
TINY = ["4x64", "--dtypes", "fp32"]
WITH_APEX = ["--contenders", "ours,torch,apex"]


@pytest.fixture(autouse=True)
def only_ours_and_torch(monkeypatch):
    """Hide other installed packages, and keep the allocator settings of the test process."""
    monkeypatch.setattr(program, "keep_pages", lambda: None)
    monkeypatch.setattr(program, "installed", lambda: ["ours", "torch"])


@pytest.fixture
def run(tmp_path):
    def invoke(command, *arguments, status=0):
        arguments = [command, "--out", str(tmp_path), *arguments]
        result = CliRunner().invoke(program.cli, arguments, catch_exceptions=False)
        assert result.exit_code == status, result.output
        return result.output

    return invoke


def saved_records(folder, benchmark):
    """Return the records of the JSON file, and check its other parts and the CSV file."""
    found = json.loads((folder / f"{benchmark}.json").read_text())
    with open(folder / f"{benchmark}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["records"]) > 0
    assert all(row.keys() == record.keys() for row, record in zip(rows, found["records"], strict=True))
    assert {"cpu", "torch", "checkout", "threads", "load"} <= found["machine"].keys()
    assert {"ours", "torch"} <= found["machine"]["installed"].keys()
    return found["records"]


# Commands


def test_kernels_records_times_errors_and_verdicts(run, tmp_path):
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
    run("kernels", "40x64", "--dtypes", "fp32", "--passes", "forward", "--rotate", "100000", *QUICK)
    sets = saved_records(tmp_path, "kernels")[0]["sets"]
    assert sets * 2 * 40 * 64 * 4 >= 100_000 > (sets - 1) * 2 * 40 * 64 * 4  # each set has an input and an output


def test_overhead_records_every_way_of_calling(run, tmp_path):
    run("overhead", *QUICK)
    found = {(r["way"], r["contender"]) for r in saved_records(tmp_path, "overhead")}
    ways = ["operator", "function", "module", "function with graph", "forward and backward"]
    assert found == {(way, name) for way in ways for name in ("ours", "torch")}


def test_memory_counts_outputs_and_saved_tensors(run, tmp_path):
    run("memory", "256x1024", "--dtypes", "fp32")
    ours = {r["stage"]: r for r in saved_records(tmp_path, "memory") if r["contender"] == "ours"}
    input_bytes = 256 * 1024 * 4
    # Forward allocates the output, mean and rstd. Autograd keeps them and the input, which existed before the call.
    assert input_bytes <= ours["inference"]["peak_bytes"] <= 1.1 * input_bytes
    assert input_bytes <= ours["forward with graph"]["kept_bytes"] <= 1.1 * input_bytes
    assert 2 * input_bytes <= ours["forward and backward"]["peak_bytes"] <= 3 * input_bytes


def test_accuracy_sweeps_show_the_promised_errors(run, tmp_path):
    run("accuracy", "--sweeps", "offset,cols", "--dtypes", "fp32,fp16", "--largest", str(256 * 1024))
    records = saved_records(tmp_path, "accuracy")
    ours, torchs = (
        [
            r
            for r in records
            if (r["sweep"], r["quantity"], r["dtypes"], r["contender"]) == ("offset", "output", "fp32", n)
        ]
        for n in ("ours", "torch")
    )
    assert [r["value"] for r in ours] == [0, 1, 10, 100, 1e3, 1e4, 1e5, 1e6]
    assert max(r["value"] for r in records if r["sweep"] == "offset" and r["dtypes"] == "fp16") == 1e4  # 1e5 overflows
    # The README promises 5e-7; torch's error grows with the mean.
    assert max(r["error"] for r in ours) < 5e-7 and max(r["error"] for r in torchs) > 1e-4
    assert all((tmp_path / f"error_by_{sweep}.png").stat().st_size > 5000 for sweep in ("offset", "cols"))


@pytest.fixture
def tiny_model(monkeypatch):
    def build(large):
        return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(4, 8)

    monkeypatch.setattr(models, "MODELS", dict.fromkeys(models.MODELS, build))


def test_models_records_both_modes(run, tmp_path, tiny_model):
    run("models", "--models", "ConvNeXt blocks", *QUICK)
    records = saved_records(tmp_path, "models")
    expected = [(mode, name) for mode in ("training", "inference") for name in ("torch", "ours")]
    assert [(r["mode"], r["contender"]) for r in records] == expected
    assert all(r["layers"] == 1 and r["status"] == "ok" and r["peak_bytes"] > 0 for r in records)


@pytest.mark.parametrize("name", models.MODELS)
def test_models_can_be_built_and_converted(name):
    model, inputs = models.MODELS[name](False)
    assert layernorm_ext.convert(model).replaced
    with torch.inference_mode():
        assert model(inputs[:1]).shape == inputs[:1].shape


def test_models_reports_failures_and_wrong_results(run, tmp_path, tiny_model, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(models, "errors", lambda models, inputs: {"ours": float("nan"), "torch": 1e-7})
        assert "ours is wrong: the error is nan of the largest value" in run("models", *QUICK, status=1)
    monkeypatch.setattr(models, "MODELS", dict.fromkeys(models.MODELS, lambda large: 1 / 0))
    assert "ZeroDivisionError: division by zero" in run("models", *QUICK, status=1)
    assert {r["status"] for r in saved_records(tmp_path, "models")} == {"failed"}


def test_all_runs_every_benchmark_but_compare(run, monkeypatch):
    first_case = {}
    monkeypatch.setattr(program, "execute", lambda name, _, __, cases, *___: first_case.update({name: cases[0]}))
    run("all")
    assert list(first_case) == ["kernels", "overhead", "accuracy", "memory", "models"]
    assert first_case["kernels"] == (32, 128, "fp32", ["ours", "torch"], ["forward", "backward", "both"], 0.3)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["kernels", "64"], 2, "Expected a shape ROWSxCOLS such as 4096x768, but got '64'"),
        (["kernels", "0x64"], 2, "but got '0x64'"),
        (["kernels", "--dtypes", "fp8"], 2, f"Expected some of {', '.join(cases.PAIRS)}, but got 'fp8'"),
        (["overhead", "--contenders", "ours,theirs"], 2, "but got 'theirs'"),
        (["compare", "no-such-revision"], 1, "git knows no 'no-such-revision'"),
        pytest.param(
            ["overhead", "--device", "cuda"],
            1,
            "sees no GPU; run this on a machine with one, or --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_invalid_arguments_are_reported(run, arguments, status, message):
    assert message in " ".join(run(*arguments, status=status).split())


def test_package_runs_as_a_module():
    command = [sys.executable, "-m", "benchmarks", "--help"]
    done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, check=True)
    assert "python -m benchmarks" in done.stdout


# Contenders


@pytest.fixture
def set_contender(monkeypatch):
    def replace(bind, name="apex"):
        monkeypatch.setitem(contenders.CONTENDERS, name, ("torch", bind))

    return replace


@pytest.mark.parametrize(
    ("command", "arguments", "count"),
    [
        ("kernels", [*TINY, *QUICK], 3),
        ("overhead", QUICK, 5),
        ("memory", TINY, 3),
        ("accuracy", ["--sweeps", "cols", "--largest", "8", "--dtypes", "fp32"], 4),
    ],
)
def test_failing_contenders_are_reported(run, tmp_path, set_contender, command, arguments, count):
    def bind(case):
        raise ImportError("it was built for another torch\nand a stack")

    set_contender(bind)
    output = run(command, *WITH_APEX, *arguments)
    assert f"apex failed ({count} of its cases): ImportError: it was built for another torch\n" in output
    failed = [r for r in saved_records(tmp_path, command) if r["contender"] == "apex"]
    assert len(failed) == count and {(r["status"], r.get("us")) for r in failed} == {("failed", None)}


def test_contenders_without_backward_are_timed_in_forward(run, tmp_path, set_contender):
    set_contender(
        lambda case: lambda x: F.layer_norm(x.detach(), (case.cols,)) * case.weight.detach() + case.bias.detach()
    )
    run("kernels", *TINY, *WITH_APEX, *QUICK)
    status = {r["pass"]: r["status"] for r in saved_records(tmp_path, "kernels") if r["contender"] == "apex"}
    assert status == {"forward": "ok", "backward": "failed", "both": "failed"}


def test_out_of_memory_fails_only_its_case(run, tmp_path, monkeypatch):
    def make_cases(device, rows, cols, dtypes):
        if rows > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [cases.Case(rows, cols, dtypes)]

    monkeypatch.setattr(kernels, "make_cases", make_cases)
    output = run("kernels", "8x64", *TINY, *QUICK)
    assert "torch failed (3 of its cases): OutOfMemoryError: CUDA out of memory" in output
    assert sum(r["us"] is not None for r in saved_records(tmp_path, "kernels")) == 3 * 3


def test_wrong_results_are_reported_and_ours_fail_the_command(run, set_contender):
    set_contender(lambda case: lambda x: F.layer_norm(x, (case.cols,), case.weight, case.bias, 0.1))
    output = run("kernels", *TINY, *WITH_APEX, *QUICK)
    assert re.search(r"apex wrong \(\d of its cases\): output is off by", output) and "WRONG" in output
    set_contender(lambda case: lambda x: 2 * layernorm_ext.layer_norm(x, (case.cols,)), "ours")
    assert "ours is wrong: output is off by" in run("kernels", *TINY, *QUICK, status=1)


def assert_contender_works(name):
    (entry,) = contenders.bind_contenders([name], [cases.Case(8, 64, "fp32")])
    assert entry.record("both", {})["status"] == "ok"
    return entry


def test_torch_compile_runs_backward_repeatedly_on_one_graph():
    entry = assert_contender_works("torch.compile")
    for _ in range(2):
        entry.calls[0].backward()


def apex(input, weight, bias, normalized_shape, eps):
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def flash_attn(x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6):
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def liger(X, W, B, eps):
    return F.layer_norm(X, W.shape, W, B, eps)


def quack(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@pytest.mark.parametrize(
    ("name", "module", "function", "stand_in"),
    [
        ("apex", "apex.normalization.fused_layer_norm", "fused_layer_norm_affine", apex),
        ("flash-attn", "flash_attn.ops.triton.layer_norm", "layer_norm_fn", flash_attn),
        ("liger-kernel", "liger_kernel.transformers.functional", "liger_layer_norm", liger),
        ("quack-kernels", "quack.rmsnorm", "layernorm_fwd", quack),
        ("transformer-engine", "transformer_engine.pytorch", "LayerNorm", nn.LayerNorm),
    ],
)
def test_other_packages_are_called_as_documented(monkeypatch, name, module, function, stand_in):
    """The stand-ins have the documented parameters of the functions."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    setattr(sys.modules[module], function, stand_in)
    assert_contender_works(name)


def test_installed_lists_the_versions_of_contenders(monkeypatch):
    def version(package):
        if package in ("apex", "torch"):
            return "1.2"
        raise PackageNotFoundError

    monkeypatch.setattr(contenders, "version", version)
    assert contenders.installed() == {"torch": "1.2", "torch.compile": "1.2", "apex": "1.2"}


def test_copy_moves_the_bytes_of_the_formulas():
    copy = contenders.Copy(cases.Case(30, 64, "bf16"))
    statistics = 2 * 30 * 4
    assert copy.source.nbytes + copy.copied.nbytes == 2 * 30 * 64 * 2 + statistics + 2 * 64 * 2
    assert sum(t.nbytes for t in copy.terms) == 3 * 30 * 64 * 2 + statistics + 3 * 64 * 2


@pytest.mark.parametrize("dtypes", cases.PAIRS)
def test_errors_find_the_worst_element(monkeypatch, dtypes):
    monkeypatch.setattr(cases, "CHUNK", 64)  # compares the rows in several chunks
    case = cases.Case(5, 32, dtypes)
    (entry,) = contenders.bind_contenders(["ours"], [case])
    # The computation rounds twice and the result once.
    assert max(entry.errors.values()) <= 3 * torch.finfo(case.dtype).eps
    gradients = [t.clone() for t in contenders.Calls("ours", case).both()]
    gradients[0][4, 31] += 1
    gradients[2][0] = torch.nan
    found = cases.errors(case, {"modified": (entry.calls[0].layer(case.x).detach(), *gradients)})["modified"]
    assert found["output"] == entry.errors["output"] and found["grad_weight"] == entry.errors["grad_weight"]
    assert found["grad_input"] > 0.01 and found["grad_bias"] == torch.inf


# Times and noise


def test_noise_contains_the_middle_half_and_decides_the_verdict():
    noise = timing.noise([0.98, 0.99, 1.0, 1.01, 1.02, 1.03])
    assert 1.02 < noise < 1.03
    assert timing.noise([0.8, 0.8, 1, 1.1]) == 1 / 0.8
    assert [timing.verdict(ratio, noise) for ratio in (1.2, 1.01, 0.99, 0.8)] == ["faster", "noise", "noise", "slower"]


def test_ratios_compare_samples_of_the_same_round():
    slow_rounds = [1, 5, 1, 9, 1, 2, 30, 1, 1]  # slow for all contenders
    ours = [1e-6 * s for s in slow_rounds]
    found = timing.summarize({"ours": ours, "again": ours, "torch": [2 * s for s in ours]}, "ours", ("torch", "copy"))
    assert found == {"us": 1, "of_torch": 2, "of_copy": None, "noise": 1, "verdict": "faster"}
    assert timing.summarize({}, "ours", ("torch",))["us"] is None


def test_rounds_sample_all_contenders_in_random_order():
    calls = []
    samplers = {name: (lambda name=name: calls.append(name) or 1.0) for name in "abc"}
    times = timing.sample_in_rounds(samplers, 0)
    assert {name: len(t) for name, t in times.items()} == dict.fromkeys("abc", timing.MIN_ROUNDS)
    rounds = ["".join(calls[i : i + 3]) for i in range(3, len(calls), 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds) and len(set(rounds)) > 1


@pytest.mark.parametrize("is_equal", [True, False], ids=["equal", "different"])
def test_graphs_are_timed_if_their_results_equal_eager_ones(is_equal):
    device = timing.Device("cpu", rotate=30_000)
    device.modes = ("eager", "graph")
    device.captured = lambda run: lambda: run() if is_equal else [run()[0] + 1]
    records = list(kernels.measure(device, 16, 64, "fp32", ["ours", "torch"], ["forward"], 0.001))
    message = "" if is_equal else "RuntimeError: the results of a CUDA graph differ from those of an eager call"
    ours = {r["mode"]: (r["message"], r["us"] is not None) for r in records if r["contender"] == "ours"}
    assert ours == {"eager": ("", True), "graph": (message, is_equal)}


# compare


def samples(head, again=1.0, scatter=0.01):
    """Return the times of one start; the ratio again / base scatters by `scatter` between samples."""
    base = [1e-3 * (1 + i % 3) for i in range(12)]
    again = [b * again * (1 + scatter * (-1) ** i) for i, b in enumerate(base)]
    return {"base": base, "again": again, "head": [b * head for b in base]}


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
def test_compare_verdict_exceeds_the_noise_of_samples_and_processes(starts, verdict):
    assert compare.judge(starts)["verdict"] == verdict


CELL, OTHER = (16, 64, "fp32", "forward"), (32, 64, "fp32", "forward")


@pytest.mark.parametrize(("repeated", "verdict"), [(1.2, "slower"), (1.0, "noise")])
def test_compare_measures_suspects_twice(repeated, verdict):
    rounds = iter([[(CELL, samples(1.2)), (OTHER, samples(1.0))], [(CELL, samples(repeated))]])
    requests = []
    records = list(compare.measure([CELL, OTHER], lambda cells: requests.append(cells) or next(rounds)))
    assert requests == [[CELL, OTHER], [CELL]]
    assert [r["verdict"] for r in records] == [verdict, "noise"]
    assert compare.summary(records)[1] is (verdict == "noise")


def test_compare_fails_if_a_build_is_wrong():
    (record,) = compare.measure([CELL], lambda cells: [(CELL, "head: output is off by 1")])
    assert record["status"] == "failed" and record["message"] == "head: output is off by 1" and record["us"] is None
    text, passed = compare.summary([record])
    assert not passed and "1 failed" in text


def test_compare_times_both_builds(run, tmp_path, monkeypatch):
    """Uses the installed package as both builds, because a build takes minutes."""
    installed = Path(layernorm_ext.__file__).parents[1]
    monkeypatch.setattr(compare, "build", lambda revision, folder: installed)
    monkeypatch.setattr(compare, "summary", lambda records: ("", True))  # a busy machine may make a build seem slower
    run("compare", "HEAD", "16x64", "--dtypes", "fp32", "--passes", "both", "--starts", "1", "--threads", "1", *QUICK)
    (record,) = saved_records(tmp_path, "compare")
    assert record["contender"] == "head" and record["us"] > 0 and record["noise"] >= 1


def test_compare_refuses_a_package_from_another_folder(tmp_path):
    with pytest.raises(RuntimeError, match="to be loaded, but got"):
        compare.Worker(tmp_path, "cpu", 1)
