"""What runs on a GPU is tried without one: the benchmark on a CPU, the summaries on made-up runs, the refusals."""

import json
import os
import subprocess
import sys

import gpu
import pytest
import torch

from layernorm_ext import _build_info


def executable(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def with_gpu(monkeypatch):
    """As if there were one."""
    monkeypatch.setattr(gpu, "check_machine", lambda: None)


def refusal(*arguments):
    with pytest.raises(SystemExit) as error:
        gpu.main(list(arguments))
    return str(error.value)


def test_refuses_a_package_without_cuda(monkeypatch):
    monkeypatch.setattr(_build_info, "with_cuda", False)
    assert "layernorm_ext was built without CUDA kernels (" in refusal("test")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refuses_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setattr(_build_info, "with_cuda", True)
    assert refusal("quick") == (
        f"gpu.py: torch {torch.__version__} sees no GPU; run this on a machine with one, and its driver."
    )
    command = [sys.executable, "-m", "benchmarks", "kernels", "--device", "cuda"]
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "sees no GPU" in done.stderr


def test_refuses_to_sanitize_without_the_tool(monkeypatch, with_gpu, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    message = f"compute-sanitizer is neither on PATH nor in {tmp_path}; it is part of the CUDA toolkit"
    assert message in refusal("sanitize", "--out", str(tmp_path))


def summary(folder, what):
    result = json.loads((folder / f"{what}.json").read_text())
    assert {"commit", "gpus", "driver", "cores", "python", "torch", "cuda", "seconds"} <= result.keys()
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
    assert result["passed"] == passed
    assert [result[name] for name in ("tests", "failures", "errors", "skipped")] == counts
    assert "pytest" in (tmp_path / "test.log").read_text()


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
    report = '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="0"/></testsuites>'
    script = f'for a; do case $a in --junitxml=*) echo \'{report}\' >"${{a#*=}}";; esac; done; echo "{printed}"'
    executable(tmp_path / "compute-sanitizer", script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gpu.main(["sanitize", "--out", str(tmp_path / "out")]) == (0 if passed else 1)
    result = summary(tmp_path / "out", "sanitize")
    assert list(result["tools"]) == ["memcheck", "racecheck", "initcheck", "synccheck"]
    assert {tool["passed"] for tool in result["tools"].values()} == {passed}
    assert "--tool initcheck" in (tmp_path / "out" / "sanitize.log").read_text()


def test_a_run_is_ended_in_time(tmp_path):
    assert gpu.run(["sleep", "60"], tmp_path / "log", 1) == 124


def test_quick(monkeypatch, with_gpu, tmp_path):
    """The benchmark itself goes through its motions on a CPU, correctness first."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for time, where other processes are busy
    sizes = ["--device", "cpu", "--seconds", "0.01", "--dtypes", "bf16,fp32"]
    assert gpu.main(["quick", "--out", str(tmp_path), "--", "40x64", "3x5000", *sizes]) == 0
    assert summary(tmp_path, "quick")["records"] == 2 * 2 * 2 * 3  # shapes, dtypes, passes; ours, torch and a copy
    assert (tmp_path / "quick" / "copy_fraction.png").exists()


def test_quick_fails_if_there_are_no_results(monkeypatch, with_gpu, tmp_path):
    assert gpu.main(["quick", "--out", str(tmp_path), "--", "0x64"]) == 1
    assert summary(tmp_path, "quick")["records"] == 0
