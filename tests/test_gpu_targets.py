"""What runs on a GPU is tried without one: benchmarks on a CPU, made-up runs and tools, the refusals."""

import json
import os
import re
import subprocess
import sys

import gpu
import pytest
import torch
import workload

from layernorm_ext import _build_info

REPORT = '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="0"/></testsuites>'
# A program that leaves pytest's report where it is told to.
WRITE_REPORT = f"for a; do case $a in --junitxml=*) echo '{REPORT}' >\"${{a#*=}}\";; esac; done"


def executable(path, script):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def with_gpu(monkeypatch):
    """As if there were one, and a commit without changes."""
    known = gpu.machine("0123456789ab")
    monkeypatch.setattr(gpu, "machine", lambda commit=None: known | ({"commit": commit} if commit else {}))
    monkeypatch.setattr(gpu, "check_gpu", lambda: None)
    monkeypatch.setattr(gpu, "check_package", lambda: None)
    monkeypatch.setattr(gpu, "devices_and_capability", lambda: (1, (9, 0)))


def refusal(*arguments):
    with pytest.raises(SystemExit) as error:
        gpu.main(list(arguments))
    return str(error.value)


def test_refuses_a_package_without_cuda(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "check_gpu", lambda: None)
    monkeypatch.setattr(_build_info, "with_cuda", False)
    message = "layernorm_ext was built without CUDA kernels ("
    assert message in refusal("test", "--out", str(tmp_path))
    assert message in summary(tmp_path, "test")["missing"]


def test_refuses_a_package_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "check_gpu", lambda: None)
    monkeypatch.setitem(sys.modules, "layernorm_ext", None)
    assert "; run `make gpu-build` first." in refusal("graphs", "--out", str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("part", ["quick", "build", "all"])
def test_refuses_a_machine_without_a_gpu(part, tmp_path):
    assert refusal(part, "--out", str(tmp_path)) == (
        f"gpu.py: torch {torch.__version__} sees no GPU; run this on a machine with one, and its driver."
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_benchmarks_refuse_a_machine_without_a_gpu():
    done = subprocess.run([sys.executable, *gpu.KERNELS], cwd=gpu.ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "sees no GPU" in done.stderr


def test_refuses_to_sanitize_without_the_tool(monkeypatch, with_gpu, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    message = f"compute-sanitizer is neither on PATH nor in {tmp_path}; it is part of the CUDA toolkit"
    assert message in refusal("sanitize", "--out", str(tmp_path))
    assert message in summary(tmp_path, "sanitize")["missing"]


def summary(folder, what):
    result = json.loads((folder / f"{what}.json").read_text())
    assert {"date", "commit", "gpus", "driver", "cores", "python", "torch", "cuda", "toolkit"} <= result.keys()
    return result


@pytest.mark.parametrize(
    ("body", "passed", "counts"),
    [
        ("def test_one(): pass", True, [1, 0, 0, 0]),
        ("def test_one(): pass\ndef test_two(): assert 0", False, [2, 1, 0, 0]),
        ("import pytest\ndef test_one(): pytest.skip('')", False, [1, 0, 0, 1]),
        ("", False, [0, 0, 0, 0]),
        ("import os; os._exit(0)", False, [0, 0, 0, 0]),
    ],
    ids=["passes", "fails", "skips all", "has none", "ends the process"],
)
def test_summary_of_tests(with_gpu, tmp_path, body, passed, counts):
    file = tmp_path / "test_made_up.py"
    file.write_text(body)
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--backends')")
    arguments = ["test", "--out", str(tmp_path), "--", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(file)]
    assert gpu.main(arguments) == (0 if passed else 1)
    result = summary(tmp_path, "test")
    assert result["passed"] == passed and result["layernorm_ext"]
    assert [result[name] for name in ("tests", "failures", "errors", "skipped")] == counts
    assert "pytest" in (tmp_path / "test.log").read_text()


def test_files_are_tested_in_groups(monkeypatch):
    """Each file once; of so many tests that starting pytest does not count, and no more than one file too many."""
    collected = [("a", 300), ("b", 199), ("c", 900), ("d", 1), ("e", 2)]
    printed = "".join(f"tests/test_{file}.py::test_{i}[cuda]\n" * count for i, (file, count) in enumerate(collected))
    monkeypatch.setattr(gpu, "output", lambda *command: printed + "\n1402 tests collected")
    assert gpu.groups_of_files() == [[f"tests/test_{file}.py" for file in files] for files in ("abc", "de")]


def selected(arguments):
    """Return the tests that pytest would run."""
    command = [sys.executable, "-m", "pytest", "--backends", "cuda", "--collect-only", "-q", *arguments]
    return [line.partition("::")[2] for line in gpu.output(*command).splitlines() if "::" in line]


def test_what_is_selected():
    """Every path; graphs of rows and images and of a training step; rows and images on a second GPU."""
    names = {part: selected(getattr(gpu, part)) for part in ("PATHS", "GRAPHS", "DEVICES")}
    functions = {part: {name.partition("[")[0] for name in found} for part, found in names.items()}
    assert functions == {
        "PATHS": {"test_every_path", "test_every_path_of_images"},
        "GRAPHS": {"test_cuda_graph", "test_cuda_graph_of_a_training_step"},
        "DEVICES": {"test_another_gpu_than_the_current_one"},
    }
    assert len(names["DEVICES"]) > 1


@pytest.mark.parametrize(
    ("printed", "passed"),
    [
        ("========= ERROR SUMMARY: 0 errors", True),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", True),
        ("========= ERROR SUMMARY: 2 errors", False),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)", False),
        ("========= Device not supported", False),
    ],
)
def test_summary_of_the_sanitizer(monkeypatch, with_gpu, tmp_path, printed, passed):
    """The tool's exit status alone is no proof: it is 0 for warnings, too."""
    executable(tmp_path / "compute-sanitizer", f'{WRITE_REPORT}; echo "{printed}"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gpu.main(["sanitize", "--out", str(tmp_path / "out")]) == (0 if passed else 1)
    result = summary(tmp_path / "out", "sanitize")
    assert list(result["pieces"]) == ["memcheck", "racecheck", "initcheck", "synccheck"]
    assert {piece["passed"] for piece in result["pieces"].values()} == {passed}
    assert result["tests"] == 12
    assert "--tool initcheck" in (tmp_path / "out" / "sanitize.log").read_text()


def test_a_run_is_ended_in_time(tmp_path):
    assert gpu.run(["sleep", "60"], tmp_path / "log", 1) == (gpu.ENDED, "")


def test_what_was_ended_goes_on(monkeypatch, with_gpu, tmp_path):
    """A tool that takes too long leaves no time for the next two; run again, the first is not repeated."""
    slow = 'echo "$2" >>"$CALLS"; [ "$2" = racecheck ] && [ ! -e "$CALLS.fast" ] && sleep 60'
    executable(tmp_path / "compute-sanitizer", f"{WRITE_REPORT}; {slow}; echo 'ERROR SUMMARY: 0 errors'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(gpu, "SECONDS", 2)
    arguments = ["sanitize", "--out", str(tmp_path / "out")]
    assert gpu.main(arguments) == 1
    pieces = summary(tmp_path / "out", "sanitize")["pieces"]
    assert [piece["passed"] for piece in pieces.values()] == [True, False, False, False]
    assert pieces["racecheck"]["status"] == gpu.ENDED
    assert "run again" in pieces["racecheck"]["problem"] and "no time was left" in pieces["synccheck"]["problem"]
    (tmp_path / "calls.fast").touch()
    monkeypatch.setattr(gpu, "SECONDS", 60)
    assert gpu.main(arguments) == 0
    assert (tmp_path / "calls").read_text().split() == [
        "memcheck", "racecheck", "racecheck", "initcheck", "synccheck"
    ]  # fmt: skip
    assert (tmp_path / "out" / "sanitize.log").read_text().count("--tool memcheck") == 1
    assert summary(tmp_path / "out", "sanitize")["tests"] == 12


def test_an_interrupted_part_goes_on(monkeypatch, with_gpu, tmp_path):
    """Also one that had no chance to say how it ended."""
    calls = []

    def piece(name):
        calls.append(name)
        if calls == ["one", "two"]:
            raise KeyboardInterrupt
        return {"passed": True, "status": 0}

    pieces = {name: lambda name=name: piece(name) for name in ("one", "two", "three")}
    monkeypatch.setitem(gpu.PARTS, "test", lambda task: pieces)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["test", "--out", str(tmp_path)])
    assert summary(tmp_path, "test")["passed"] is False
    assert gpu.main(["test", "--out", str(tmp_path)]) == 0
    assert calls == ["one", "two", "two", "three"]
    assert gpu.main(["test", "--out", str(tmp_path)]) == 0 and len(calls) == 4
    assert gpu.main(["test", "--out", str(tmp_path), "--again"]) == 0 and calls[4:] == ["one", "two", "three"]


def test_what_is_not_repeated(monkeypatch, with_gpu):
    now = gpu.machine()
    assert gpu.is_same(now, now)
    for name in ("commit", "gpus", "driver", "python", "torch"):
        assert not gpu.is_same(now | {name: "another"}, now)
    for commit in ("unknown", "0123456789ab-dirty"):
        changed = now | {"commit": commit}
        assert not gpu.is_same(changed, changed)


PIP = """case "$*" in
  *"-m pip install --no-index --no-build-isolation --no-deps .") echo "FORCE_CUDA=$FORCE_CUDA"; echo built >>"$MODULE";;
  "-m layernorm_ext") echo ok;;
  "-c "*) [ -e "$MODULE" ] && cat "$MODULE" | tr -d "\\n";;
  *) exit 9;;
esac"""


def test_build(monkeypatch, with_gpu, tmp_path):
    """Not repeated as long as what it has built is what is installed."""
    monkeypatch.setattr(sys, "executable", str(executable(tmp_path / "python", PIP)))
    monkeypatch.setenv("MODULE", str(tmp_path / "module"))
    arguments = ["build", "--out", str(tmp_path / "out")]
    for built in ("built", "built"):
        assert gpu.main(arguments) == 0
        assert (tmp_path / "module").read_text().split() == [built]
    assert "FORCE_CUDA=1" in (tmp_path / "out" / "build.log").read_text()
    (tmp_path / "module").unlink()  # as on a machine that has been set up again
    assert gpu.main(arguments) == 0 and (tmp_path / "module").exists()


def test_build_that_fails(monkeypatch, with_gpu, tmp_path):
    monkeypatch.setattr(sys, "executable", str(executable(tmp_path / "python", "echo 'FORCE_CUDA=1, but'; exit 1")))
    assert gpu.main(["build", "--out", str(tmp_path)]) == 1
    assert summary(tmp_path, "build")["pieces"]["pip"]["status"] == 1
    assert "FORCE_CUDA=1, but" in (tmp_path / "build.log").read_text()


def test_a_second_gpu_is_not_always_there(monkeypatch, with_gpu, tmp_path):
    """That is neither a failure, nor tests that have passed."""
    assert gpu.main(["devices", "--out", str(tmp_path)]) == 0
    result = summary(tmp_path, "devices")
    assert result["passed"] is None and result["not_applicable"] == "it needs two GPUs, and there is 1"
    assert "tests" not in result and not (tmp_path / "devices.log").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("part", ["graphs", "devices"])
def test_tests_that_are_skipped_have_not_passed(monkeypatch, with_gpu, tmp_path, part):
    monkeypatch.setattr(gpu, "devices_and_capability", lambda: (2, (9, 0)))
    assert gpu.main([part, "--out", str(tmp_path)]) == 1
    result = summary(tmp_path, part)
    assert result["tests"] == result["skipped"] > 1 and result["pieces"][part]["status"] == 0


# Leaves a report, and shows it: the name of the kernel that it was asked for.
NCU = """echo "ncu $*"
while [ $# -gt 0 ]; do
  case "$1" in
    --kernel-name) kernel=${2#regex:};;
    --export) echo "$kernel" >"$2";;
    --import) echo '"ID","Kernel Name"'; cat "$2"; exit;;
  esac
  shift
done"""


def profile(monkeypatch, tmp_path, script):
    executable(tmp_path / "bin" / "ncu", script)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    status = gpu.main(["profile", "--out", str(tmp_path)])
    return status, summary(tmp_path, "profile")


def test_profile(monkeypatch, with_gpu, tmp_path):
    status, result = profile(monkeypatch, tmp_path, NCU)
    assert status == 0 and result["passed"] is True
    assert result["pieces"] == {name: {"passed": True, "status": 0} for name in workload.FAMILIES}
    for name, family in workload.FAMILIES.items():
        assert (tmp_path / "profile" / f"{name}.ncu-rep").read_text().strip() == family.kernel
        assert family.kernel in (tmp_path / "profile" / f"{name}.csv").read_text()
    log = (tmp_path / "profile.log").read_text()
    assert f"--launch-count 1 --kernel-name regex:forward_rows --export {tmp_path}/profile/forward_rows_warp" in log


def test_profile_on_an_older_gpu(monkeypatch, with_gpu, tmp_path):
    monkeypatch.setattr(gpu, "devices_and_capability", lambda: (1, (8, 9)))
    status, result = profile(monkeypatch, tmp_path, NCU)
    assert status == 0
    without = {name for name, piece in result["pieces"].items() if piece["passed"] is None}
    assert without == {"forward_chunk_in_cluster", "forward_in_cluster", "backward_rows_cluster"}
    assert result["pieces"]["forward_in_cluster"]["not_applicable"] == "it needs compute capability 9.0"


@pytest.mark.parametrize(
    "printed",
    [
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters",
        "==ERROR== Failed to initialize the profiler: LibraryNotLoaded",
    ],
)
def test_profile_without_counters(monkeypatch, with_gpu, tmp_path, printed):
    status, result = profile(monkeypatch, tmp_path, f"echo '{printed}'; exit 1")
    assert status == 0 and result["passed"] is None and result["pieces"] == {}
    assert result["not_applicable"] == f"ncu cannot read the counters: {printed.partition(' ')[2]}"


def test_profile_of_nothing_has_failed(monkeypatch, with_gpu, tmp_path):
    """ncu's status is 0 also where no kernel has that name."""
    status, result = profile(monkeypatch, tmp_path, "echo '==WARNING== No kernels were profiled.'")
    assert status == 1 and {piece["passed"] for piece in result["pieces"].values()} == {False}


def test_profile_without_the_tool(monkeypatch, with_gpu, tmp_path):
    monkeypatch.setattr(gpu, "tool", lambda *_: None)
    assert gpu.main(["profile", "--out", str(tmp_path)]) == 0
    assert "ncu, of Nsight Compute, is neither on PATH nor in " in summary(tmp_path, "profile")["not_applicable"]


@pytest.mark.parametrize("name", workload.FAMILIES)
def test_workload(name):
    """Which kernels it launches is tested in the emulator."""
    workload.main([name, "--device", "cpu", "--rows", "1"])


BENCHMARK = ["40x64", "3x5000", "--device", "cpu", "--seconds", "0.01"]


def test_quick(monkeypatch, with_gpu, tmp_path):
    """The benchmark itself goes through its motions on a CPU, correctness first."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for time, where other processes are busy
    assert gpu.main(["quick", "--out", str(tmp_path), "--", *BENCHMARK, "--dtypes", "bf16,fp32"]) == 0
    assert summary(tmp_path, "quick")["records"] == 2 * 2 * 2 * 3  # shapes, dtypes, passes; ours, torch and a copy
    assert (tmp_path / "quick" / "copy_fraction.png").exists()


def test_quick_fails_if_there_are_no_results(monkeypatch, with_gpu, tmp_path):
    assert gpu.main(["quick", "--out", str(tmp_path), "--", "0x64"]) == 1
    assert summary(tmp_path, "quick")["records"] == 0


def test_a_benchmark_goes_on(monkeypatch, with_gpu, tmp_path):
    """After the shapes that it had come to."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    program = [*gpu.KERNELS, *BENCHMARK, "--passes", "forward"]
    monkeypatch.setattr(gpu, "KERNELS", program)
    arguments = ["bench-fp32", "--out", str(tmp_path)]
    assert gpu.main(arguments) == 0
    results, summarized = tmp_path / "bench-fp32" / "kernels.json", summary(tmp_path, "bench-fp32")
    content = json.loads(results.read_text())
    assert summarized["records"] == len(content["records"]) == 2 * 3  # shapes; ours, torch and a copy
    assert all(record["error"] < 1e-5 for record in content["records"] if record["contender"] != "copy")
    assert len(re.findall(r"% · \de-\d\d", (tmp_path / "bench-fp32.log").read_text())) == 2 * 2

    results.write_text(json.dumps(content | {"records": content["records"][:3]}))  # as if ended after one shape
    unfinished = {"passed": False, "status": gpu.ENDED}
    (tmp_path / "bench-fp32.json").write_text(json.dumps(summarized | {"pieces": {"kernels": unfinished}}))
    assert gpu.main(arguments) == 0
    went_on = json.loads(results.read_text())["records"]
    assert went_on[:3] == content["records"][:3] and len(went_on) == 6 and went_on[3:] != content["records"][3:]

    (tmp_path / "bench-fp32.json").write_text(json.dumps(summarized | {"commit": "another"}))
    assert gpu.main(arguments) == 0  # begins anew
    assert json.loads(results.read_text())["records"][:3] != content["records"][:3]


@pytest.fixture
def made_up_parts(monkeypatch, with_gpu):
    """Parts that tell when they are run. Of them one fails until it is mended, and one has no meaning here."""
    calls, failing = [], {"sanitize"}

    def made_up(part):
        def piece():
            calls.append(part)
            return {"passed": part not in failing, "status": 0, "tests": 3}

        def pieces(task):
            if part == "devices":
                raise gpu.NotApplicable("it needs two GPUs, and there is 1")
            if part == "graphs" and "graphs" in failing:
                raise gpu.Missing("a thing is missing", "get it")
            return {part: piece}

        return pieces

    for part in gpu.GROUPS["all"]:
        monkeypatch.setitem(gpu.PARTS, part, made_up(part))
    return calls, failing


def test_all(made_up_parts, tmp_path, capsys):
    """Goes on after a failure; run again, repeats what has not passed alone."""
    calls, failing = made_up_parts
    failing.add("graphs")
    everything = gpu.GROUPS["all"]
    benchmarks = [f"{kind}-{dtypes}" for kind in ("bench", "peers") for dtypes in ("bf16", "fp32", "bf16-fp32")]
    assert sorted(everything) == sorted(["build", "test", "sanitize", "graphs", "devices", "profile", *benchmarks])
    arguments = ["all", "--out", str(tmp_path)]

    assert gpu.main(arguments) == 1
    assert calls == [part for part in everything if part not in ("graphs", "devices")]
    found = summary(tmp_path, "summary")
    assert found["passed"] is False
    assert {part for part, result in found["parts"].items() if result["passed"] is False} == {"sanitize", "graphs"}
    assert found["parts"]["devices"]["not_applicable"] == "it needs two GPUs, and there is 1"
    assert "a thing is missing; get it." in found["parts"]["graphs"]["missing"]
    assert found["parts"]["test"]["tests"] == 3
    assert "sanitize FAILED in 0 s" in capsys.readouterr().out

    calls.clear()
    failing.clear()
    assert gpu.main(arguments) == 0
    assert calls == ["sanitize", "graphs"]
    assert summary(tmp_path, "summary")["passed"] is True

    calls.clear()
    assert gpu.main([*arguments, "--commit", "another"]) == 0 and len(calls) == len(everything) - 1
    assert summary(tmp_path, "summary")["commit"] == "another"


def test_a_summary_of_parts_that_have_not_run(made_up_parts, tmp_path):
    assert gpu.main(["test", "--out", str(tmp_path)]) == 0
    found = summary(tmp_path, "summary")
    assert found["passed"] is False and found["parts"]["test"]["passed"] is True
    assert found["parts"]["profile"] == {"passed": False, "problem": "has not run"}


def test_all_takes_no_arguments_for_others(made_up_parts, tmp_path, capsys):
    assert refusal("all", "--out", str(tmp_path), "--", "-x") == "2"
    assert "cannot be meant for all parts" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["all", "build", "test", "sanitize", "graphs", "devices", "profile", "quick"])
def test_makefile(target):
    printed = gpu.output("make", "-n", f"gpu-{target}", "OUT=a/folder", "COMMIT=0123")
    assert printed == f"python tests/gpu.py {target} --out a/folder --commit 0123"
