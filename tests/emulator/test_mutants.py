"""The rules of tests/mutants.py, and that an environment variable selects a mutant of a compiled program."""

import os
import subprocess

import mutants

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


def test_rules():
    found = [str(mutant).removeprefix("csrc/cuda/sum.cu:") for mutant in mutants.mutants_of(KERNEL, "csrc/cuda/sum.cu")]
    assert sorted(found) == sorted(CHANGES.splitlines())


def test_selected_mutant_runs(tmp_path):
    source = b"int main(int n, char**) { return n < 2 ? n - n : n + 9; }\n"
    sample = dict(enumerate(mutants.mutants_of(source, "main.cpp"), 1))
    (tmp_path / "mutant.h").write_text(mutants.RUNTIME)
    (tmp_path / "main.cpp").write_bytes(mutants.instrument(source, sample, "mutant.h"))
    subprocess.run(["g++", "main.cpp", "-o", "program"], cwd=tmp_path, check=True)
    results = {"the original": 0, "n < 2 -> n >= 2": 10, "n - n -> n + n": 2, "9 -> 9 + 1": 0, "n + 9 -> n - 9": 0}
    texts = {0: "the original"} | {
        number: str(mutant).removeprefix("main.cpp:1: ") for number, mutant in sample.items()
    }
    assert sorted(texts.values()) == sorted(results)
    for number, text in texts.items():
        environment = {**os.environ, "LAYERNORM_MUTANT": str(number)}
        assert subprocess.run([tmp_path / "program"], env=environment).returncode == results[text]
