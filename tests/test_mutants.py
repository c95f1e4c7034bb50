"""The rules of mutants.py: what it breaks, what it leaves alone, and that a broken program is so."""

import os
import subprocess
import types

import emulated_build
import mutants
import pytest

PROGRAM = """\
#include <cstdio>
#include "device.h"
using namespace layernorm;
constexpr int kThreads = 64;
template <int kStep>
__global__ void __launch_bounds__(kThreads) sum(const int* in, int* out, int n, bool negative) {
  LAYERNORM_SHARED(tile, int[kThreads]);
  int total = 0;
  for (int i = threadIdx.x; i < n; i += kStep) total += negative ? -in[i] : in[i];
  tile[threadIdx.x] = __shfl_xor_sync(0xffffffffu, total, 1);
  __syncthreads();
  static_assert(kThreads % 32 == 0 && kStep > 0);
  if (threadIdx.x == 0 && n != 1) *out = tile[1];
}
int main() {
  int in[65] = {}, out = 0;
  for (int i = 0; i < 65; ++i) in[i] = i * i;
  emulator::register_buffer(in, sizeof in, "in", emulator::Contents::kInput);
  emulator::register_buffer(&out, sizeof out, "out", emulator::Contents::kOutput);
  launch({1, kThreads}, sum<kThreads>, in, &out, 65, false);
  std::printf("%d", out);
}
"""


@pytest.fixture(scope="module")
def csrc(tmp_path_factory):
    folder = tmp_path_factory.mktemp("csrc")
    (folder / "cuda").mkdir()
    (folder / "cuda" / "sum.cu").write_text(PROGRAM)
    return folder


@pytest.fixture(scope="module")
def made(csrc):
    return mutants.Instrumented(csrc)


def changes(made, constant):
    return [
        m.name.rpartition(";: ")[2].rpartition("{: ")[2]
        for m in made.mutants
        if m.constant is constant and ": sum: " in m.name
    ]


def test_what_is_broken_when_the_tests_run(made):
    assert changes(made, constant=False) == [
        "0 => 0 + 1",
        "0 => 0 - 1",
        "i < n => i <= n",
        "i < n => i >= n",
        "i += kStep => i -= kStep",
        "negative => !(negative)",
        "i => (i) + 1",
        "-in[i] => in[i]",
        "i => (i) + 1 (2)",
        "total += negative ? -in[i] : in[i] => total -= negative ? -in[i] : in[i]",
        "threadIdx.x => (threadIdx.x) + 1",
        "0xffffffffu => 0xffffffffu + 1",
        "0xffffffffu => 0xffffffffu - 1",
        "0xffffffffu => (0xffffffffu) >> 1",
        "1 => 1 + 1",
        "1 => 1 - 1",
        "__syncthreads() => void()",
        "0 => 0 + 1",
        "0 => 0 - 1",
        "threadIdx.x == 0 => threadIdx.x != 0",
        "1 => 1 + 1",
        "1 => 1 - 1",
        "n != 1 => n == 1",
        "threadIdx.x == 0 && n != 1 => bool(threadIdx.x == 0)",
        "threadIdx.x == 0 && n != 1 => bool(n != 1)",
        "1 => 1 + 1 (2)",
        "1 => 1 - 1 (2)",
    ]


def test_what_is_compiled_in(made):
    assert [m.name for m in made.mutants if m.constant] == [
        "sum.cu: : constexpr int kThreads = 64;: 64 => 64 + 1",
        "sum.cu: : constexpr int kThreads = 64;: 64 => 64 - 1",
        "sum.cu: main: int in[65] = {}, out = 0;: 65 => 65 - 1",
    ]


def test_names_are_unique(made):
    assert len({m.name for m in made.mutants}) == len(made.mutants)


def run(made, tmp_path, mutant=0):
    (tmp_path / "cuda").mkdir(parents=True, exist_ok=True)
    made.write(tmp_path)
    program = emulated_build.program(tmp_path / "cuda" / "sum.cu")
    environment = {**os.environ, "LAYERNORM_MUTANT": str(mutant)}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else done.stderr


def test_mutants_do_what_they_say(csrc, made, tmp_path):
    by_change = {m.name.rpartition(": ")[2]: m for m in made.mutants}
    assert run(made, tmp_path) == "4096"  # the neighbour's 0 * 0 + 64 * 64
    assert run(made, tmp_path, by_change["negative => !(negative)"].id) == "-4096"
    assert "shared memory 'tile'" in run(made, tmp_path, by_change["__syncthreads() => void()"].id)
    assert "outside any buffer" in run(made, tmp_path, by_change["i < n => i <= n"].id)
    with pytest.raises(emulated_build.CompileError, match="static assertion failed"):
        run(mutants.Instrumented(csrc, compiled=by_change["64 => 64 + 1"].id), tmp_path)


def test_a_sum_of_negations_stays_a_number(tmp_path):
    """Without a mutant, a program is what it was; its sources lie in a folder of their own."""
    (tmp_path / "cuda").mkdir()
    source = '#include <cstdio>\nint main(int n, char**) { std::printf("%d", !(n > 9) + !(n > 9)); }\n'
    (tmp_path / "cuda" / "sum.cu").write_text(source)
    assert run(mutants.Instrumented(tmp_path), tmp_path / "made") == "2"


def test_which_mutants_are_reached(tmp_path):
    (tmp_path / "cuda").mkdir()
    source = """#include <cstdio>
    int main(int n, char**) {
      n = n > 9 ? n * 2 : n;
      for (int id = 0; id < 99; ++id) if (reached_mutants[id]) std::printf("%d ", id);
    }"""
    (tmp_path / "cuda" / "sum.cu").write_text(source)
    made = mutants.Instrumented(tmp_path)
    reached = set(map(int, run(made, tmp_path / "made").split()))
    assert {m.id in reached for m in made.mutants if "n > 9 =>" in m.name} == {True}
    assert {m.id in reached for m in made.mutants if "n * 2 =>" in m.name} == {False}


def test_which_tests_a_mutant_meets():
    """Those that come to it; first what has noticed others, then what is quick and unlike; some seconds, then all."""
    seconds = {"other": 0, "long": 0.75, "short[b]": 0.5, "short[a]": 0.25, "noticed": 2, "longest": 100}
    forks = mutants.Forks(lambda forks: None)
    forks.pytest_runtestloop(types.SimpleNamespace(items=[types.SimpleNamespace(nodeid=name) for name in seconds]))
    forks.usual = dict.fromkeys(mutants.MODES, seconds)
    forks.reached = {name: {1} if name == "other" else {1, 2} for name in seconds}

    def chosen(mode, mutant, constant=False):
        mutant = mutants.Mutant(mutant, "a.cu", 1, "a.cu: f: a", constant)
        return [test.nodeid for test in forks._chosen(mode, mutant, ["noticed"])]

    assert chosen("PLAIN", 2) == ["noticed", "short[a]", "long"]
    assert chosen("CHECKED", 2) == ["noticed", "short[a]", "long", "short[b]", "longest"]
    assert chosen("CHECKED", 1)[:2] == ["noticed", "other"]
    assert chosen("PLAIN", 3) == []
    assert len(chosen("CHECKED", 3, constant=True)) == len(seconds)


def test_what_is_not_understood_is_refused(tmp_path):
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "odd.cu").write_text("int main() { return 1 +; }\n")
    with pytest.raises(SystemExit, match="odd.cu is not understood, at line 1"):
        mutants.Instrumented(tmp_path)


def test_the_kernels_are_understood():
    made = mutants.Instrumented(emulated_build.ROOT / "csrc")
    assert len(made.mutants) > 2000 and {"forward.cu", "backward.cu", "row.cuh"} <= made.files.keys()
    assert mutants.equivalents(mutants.EQUIVALENTS) <= {m.name for m in made.mutants}


def test_culprits_of_a_compile_error():
    files = {"a.cu": "int x = (MUTANT(7) ? (p + q) : (MUTANT(8) ? (p * q) : (p - q)));"}
    column = files["a.cu"].index("p * q") + 1
    assert mutants.culprits(f"/tmp/a.cu:1:{column}: error: invalid operands", files) == {8}


def test_the_list_of_equivalents(tmp_path):
    """An entry has names, and a reason."""
    listed = tmp_path / "equivalent.toml"
    listed.write_text('[[equivalent]]\nmutants = ["a", "c"]\nreason = "a tunable number"\n')
    assert mutants.equivalents(listed) == {"a", "c"}
    assert mutants.equivalents(tmp_path / "none.toml") == set()
    listed.write_text('[[equivalent]]\nmutants = ["b"]\nreason = ""\n')
    assert mutants.equivalents(listed) == set()
