"""The emulator reports planted faults, accepts their correct counterparts, and computes what CUDA documents."""

import pathlib
import re
import subprocess

import emulated_build
import emulated_ops
import pytest
import torch

TABLES = [emulated_build.EMULATOR / "faults.cu", emulated_build.EMULATOR / "faults_async.cu"]
SCHEDULES = 8
CASES = [
    pytest.param(table, name, id=name)
    for table in TABLES
    for name in re.findall(r'^      \{"(\w+)"', table.read_text(), re.M)
]


@pytest.fixture(scope="module")
def reports():
    """Return {case: (expected report, {schedule: report})}."""
    found = {}
    for table in TABLES:
        done = subprocess.run([emulated_build.program(table)], capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            name, expected, schedule, report = line.split("\t")
            found.setdefault(name, (expected, {}))[1][schedule] = report
    return found


@pytest.mark.parametrize("table, name", CASES)
def test_planted_fault_is_reported_in_every_schedule(reports, table, name):
    expected, by_schedule = reports[name]
    assert len(by_schedule) == SCHEDULES
    for schedule, report in by_schedule.items():
        if not expected:
            assert report == "", schedule
            continue
        assert any(part in report for part in expected.split(" or ")), (schedule, report)
        # The report names a line of the fault, unless the launch was refused or the thread has returned.
        _, _, what = report.partition(": ")
        lines = {int(number) for number in re.findall(re.escape(table.name) + r":(\d+)", what)}
        marked = {n for n, text in enumerate(table.read_text().splitlines(), 1) if "// fault" in text}
        assert not lines or lines & marked, (schedule, report)


def test_every_case_has_its_test(reports):
    assert set(reports) == {param.id for param in CASES}


def test_launch_beyond_registers_or_shared_memory_is_refused():
    """A multiprocessor has 65536 registers: enough for 512 threads of 128, but not of 136."""
    library = emulated_ops.library(emulated_build.PLAIN)
    kernel = "layernorm::cuda::forward_rows<float, float, layernorm::cuda::Tile<512, 4> >"
    x = torch.ones(1, 512 * 4 * 4)
    try:
        library.set_resources(90, kernel, 128, 0)
        library.ops.forward(x, x.shape[1:])
        library.set_resources(90, kernel, 136, 0)
        with pytest.raises(RuntimeError, match="512 threads of 136 registers do not fit on a multiprocessor"):
            library.ops.forward(x, x.shape[1:])
        library.set_resources(90, kernel, 64, 200 * 1024)
        with pytest.raises(RuntimeError, match="204800 of them static, are more than 232448 that the GPU has"):
            library.ops.forward(x, x.shape[1:])
    finally:
        library.set_resources(90, kernel, 0, 0)


def test_build_is_cached_by_content(tmp_path):
    source = tmp_path / "empty.cu"
    source.write_text("int main() { return 0; }\n")
    first = emulated_build.program(source)
    assert emulated_build.program(source) == first
    source.write_text("int main() { return 1; }\n")
    assert emulated_build.program(source) != first


def test_compile_error_is_raised(tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text("int main() { return nothing; }\n")
    with pytest.raises(emulated_build.CompileError, match="nothing"):
        emulated_build.program(source)


def test_unknown_declaration_of_shared_memory_is_refused(tmp_path):
    source = tmp_path / "two.cu"
    source.write_text("__global__ void f() { __shared__ int a, b; }\n")
    with pytest.raises(emulated_build.CompileError, match="two.cu: .* shared memory"):
        emulated_build.program(source)


def test_missing_cuda_headers_are_reported(monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setattr(emulated_build.sysconfig, "get_path", lambda name: str(pathlib.Path("/nonexistent")))
    with pytest.raises(emulated_build.CompileError, match="no CUDA headers"):
        emulated_build.cuda_include.__wrapped__()
