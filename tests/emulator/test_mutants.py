"""The rules of tests/mutants.py, and that it tells noticed mutants from surviving ones."""

import dataclasses
import json
import os
import subprocess
import sys

import mutants
import pytest

KERNEL = b"""\
constexpr int kThreads = 64 + 1;
template <int kStep>
__global__ void __launch_bounds__(kThreads) sum(const int* in, int* out, int n, bool negative) {
  __shared__ int tile[kThreads + 1];
  int total = 0;
  for (int i = threadIdx.x; i < n; i += kStep) total += negative ? -in[i] : in[2 * i];
  if constexpr (kStep > 1) total <<= 1;
  prefetch(in + n);
  __syncwarp();
  __syncthreads();
  if (threadIdx.x == 0 && n != 1) *out = total;
}
int blocks(int n) { return n / 2; }
"""
CHANGES = """\
6: i < n -> i >= n
6: i += kStep -> i -= kStep
6: -in[i] -> in[i]
6: i -> (i) + 1
6: 2 -> 2 + 1
6: 2 * i -> 2 + i
6: 2 * i -> (2 * i) + 1
6: negative -> !(negative)
6: total += negative ? -in[i] : in[2 * i] -> total -= negative ? -in[i] : in[2 * i]
10: __syncthreads(); -> (left out)
11: threadIdx.x == 0 -> threadIdx.x != 0
11: n != 1 -> n == 1
"""
PROGRAM = b"int main(int n, char**) { return n < 2 ? n - n : n + 9; }\n"
TEST = """\
import subprocess

def test_program():
    assert subprocess.run(["./program"]).returncode == 0
"""


def test_rules():
    found = [str(mutant).removeprefix("csrc/cuda/sum.cu:") for mutant in mutants.mutants_of(KERNEL, "csrc/cuda/sum.cu")]
    assert sorted(found) == sorted(CHANGES.splitlines())


@pytest.mark.parametrize("target", mutants.TARGETS)
def test_sources_have_mutants(target):
    assert len(mutants.population(target)) > 500


def test_planted_mutants(tmp_path):
    """A mutant that a test reaches through another process is noticed; one that no test reaches survives."""
    sample = dict(enumerate(mutants.mutants_of(PROGRAM, "main.cpp"), 1))
    (tmp_path / "mutant.h").write_text(mutants.RUNTIME)
    (tmp_path / "main.cpp").write_bytes(mutants.instrument(PROGRAM, sample, "mutant.h"))
    subprocess.run(["g++", "main.cpp", "-o", "program"], cwd=tmp_path, check=True)
    (tmp_path / "test_planted.py").write_text(TEST)
    (tmp_path / "sample.json").write_text(json.dumps({n: dataclasses.asdict(mutant) for n, mutant in sample.items()}))
    (tmp_path / "control").write_bytes(bytes(4 * mutants.LIMIT))
    environment = {
        **os.environ,
        "PYTHONPATH": str(mutants.ROOT / "tests"),
        "LAYERNORM_MUTANTS": str(tmp_path / "control"),
    }
    command = [sys.executable, "-c", "import mutants; mutants.run_tests(['test_planted.py'], 300, 0.95)"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "n < 2 -> n >= 2: noticed by test_planted.py::test_program" in done.stdout, done.stdout + done.stderr
    assert "n - n -> n + n: noticed" in done.stdout and "2 of 4 mutants are noticed (50.0%)" in done.stdout
    assert "survives: main.cpp:1: n + 9 -> n - 9" in done.stdout and done.returncode == 1


def test_quick_tests_come_first():
    assert mutants.in_order({"long": 5, "short[a]": 1, "short[b]": 2, "medium": 3}) == [
        *("short[a]", "medium", "short[b]", "long")
    ]


def test_invalid_mutants_are_found_by_line(tmp_path):
    (mutant,) = mutants.mutants_of(b"int f(int a) {\n  return a + b;\n}\n", "csrc/f.cpp")
    output = f"{tmp_path}/csrc/cpu/../f.cpp:2:10: error: no operator"
    assert mutants.culprits(output, {7: mutant}, tmp_path) == {7}
    assert not mutants.culprits(output.replace(":2:", ":3:"), {7: mutant}, tmp_path)
