"""The emulator itself: what it must find, what it must let pass, and what CUDA's documentation promises."""

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
    """Per case what was expected, and what was reported in every schedule."""
    found = {}
    for table in TABLES:
        done = subprocess.run([emulated_build.program(table)], capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            name, expected, schedule, report = line.split("\t")
            found.setdefault(name, (expected, {}))[1][schedule] = report
    return found


@pytest.mark.parametrize("table, name", CASES)
def test_case(reports, table, name):
    expected, by_schedule = reports[name]
    assert len(by_schedule) == SCHEDULES
    for schedule, report in by_schedule.items():
        if not expected:
            assert report == "", schedule
            continue
        assert any(part in report for part in expected.split(" or ")), (schedule, report)
        # The report names a line of the fault, unless the launch itself was refused or the thread is gone.
        _, _, what = report.partition(": ")
        lines = {int(number) for number in re.findall(re.escape(table.name) + r":(\d+)", what)}
        marked = {n for n, text in enumerate(table.read_text().splitlines(), 1) if "// fault" in text}
        assert not lines or lines & marked, (schedule, report)


def test_every_case_has_its_test(reports):
    assert set(reports) == {param.id for param in CASES}


@pytest.mark.parametrize("mode", [emulated_build.CHECKED, emulated_build.PLAIN], ids=["checked", "plain"])
def test_semantics(mode):
    done = subprocess.run(
        [emulated_build.program(emulated_build.EMULATOR / "semantics.cu", mode=mode)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_registers_times_threads():
    """A multiprocessor has 65536 registers: 512 threads of 128 fit, of 136 they do not."""
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


def test_compile_error_is_told(tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text("int main() { return nothing; }\n")
    with pytest.raises(emulated_build.CompileError, match="nothing"):
        emulated_build.program(source)


def test_no_cuda_headers_is_told(monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setattr(emulated_build.sysconfig, "get_path", lambda name: str(pathlib.Path("/nonexistent")))
    with pytest.raises(emulated_build.CompileError, match="no CUDA headers"):
        emulated_build.cuda_include.__wrapped__()
