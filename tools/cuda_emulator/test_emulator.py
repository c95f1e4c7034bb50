"""The emulator reports planted faults, and nothing about their correct counterparts."""

import re
import subprocess

import emulated_build
import pytest

TABLE = emulated_build.EMULATOR / "faults.cu"
FAULTY_LINES = {number for number, text in enumerate(TABLE.read_text().splitlines(), 1) if "// fault" in text}


def test_planted_faults_are_reported_in_every_schedule():
    done = subprocess.run([emulated_build.program(TABLE)], capture_output=True, text=True, check=True)
    assert done.stdout
    for name, expected, report in (line.split("\t") for line in done.stdout.splitlines()):
        if not expected:
            assert report == "", name
            continue
        assert any(part in report for part in expected.split(" or ")), (name, report)
        # The report names a line of the fault, unless the launch was refused or the thread has returned.
        _, _, what = report.partition(": ")
        lines = {int(number) for number in re.findall(r"faults.cu:(\d+)", what)}
        assert not lines or lines & FAULTY_LINES, (name, report)


def test_unknown_declaration_of_shared_memory_is_an_error(tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text("__global__ void f() { __shared__ int a, b; }\n")
    with pytest.raises(emulated_build.CompileError, match="broken.cu: .* shared memory"):
        emulated_build.program(source)
