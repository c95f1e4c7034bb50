"""Changes the C++ code in random places, one at a time, and prints which changes the tests do not notice.

    python tests/mutants.py cuda [--number 100] [--seed 1]    # the CUDA kernels, by the tests of the emulator
    python tests/mutants.py cpu [--number all]                # the CPU kernels and the host code, by the fast tests

All mutants of a sample are compiled into one copy of the repository, build/mutants: `a < b` becomes
`(MUTANT(7) ? (a >= b) : (a < b))`, and a file that the library maps into its memory selects one of them. The tests run
once without a mutant, which shows what mutants each test reaches and how long it takes. Then each mutant runs the tests
that reach it, quick ones first, until a test fails.

Mutants that compute the same result cannot be noticed. The rules avoid the kinds of changes that often produce them:
no number becomes larger or smaller by one unless it is an operand of arithmetic, `<` becomes `>=` but not `<=`, and no
operand of `&&` and `||` is dropped. They also leave alone

* what the compiler must know: template arguments, array sizes, constexpr and static_assert;
* hints: prefetches, __syncwarp, and when the next grid may start;
* code that divides the work: the host functions of csrc/cuda, and functions of csrc/cpu that return a size or a bool.

Needs the packages tree-sitter and tree-sitter-cpp, and the package itself with its extra "test".
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import mmap
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys

import pytest
import tree_sitter
import tree_sitter_cpp

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_cpp.language()))
LIMIT = 10_000  # mutants of one sample


@dataclasses.dataclass(frozen=True)
class Target:
    """What is changed, which tests run, and the share of the mutants that they must notice."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]  # arguments of pytest
    goal: float


TARGETS = {
    "cuda": Target(("csrc/cuda/*.cu", "csrc/cuda/*.cuh"), ("tests/emulator/test_kernels.py",), 0.97),
    "cpu": Target(
        ("csrc/cpu/*", "csrc/ops.cpp", "csrc/autograd.cpp", "csrc/channels_first.cpp"),
        ("tests", *(f"--ignore=tests/test_{name}.py" for name in ("benchmarks", "build", "mutants"))),
        0.95,
    ),
}

# ---- what is changed -------------------------------------------------------------------------------------------------

SWAPS = {
    **{"<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "=="},
    **{"+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "|"},
    **{"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*="},
}
ARITHMETIC = {"+", "-", "*", "/", "%", "<<", ">>", "&", "|", "^"}
CONDITIONS = {"call_expression", "field_expression", "identifier", "pointer_expression", "qualified_identifier"}

NOT_CODE = {
    "ERROR",
    "preproc_include",
    "preproc_def",
    "preproc_function_def",
    "preproc_call",
    "static_assert_declaration",
}
CONSTANTS = {
    *("alias_declaration", "alignas_qualifier", "enumerator", "template_argument_list", "template_parameter_list"),
    *("abstract_array_declarator", "array_declarator"),
}
HINT = re.compile(r"([\w:<>]+::)?(\w*prefetch\w*|fetch_to_\w+|let_next_grid_start|__syncwarp|finish_writes\w*)\b")
MACRO = re.compile(r"(?!TORCH_CHECK)[A-Z_0-9]+\(")
CUDA_WORDS = re.compile(
    rb"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)|__(?:global|device|host|shared|forceinline|restrict)__"
)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A change of the text from byte `begin` to byte `end` of a file."""

    file: str
    lines: tuple[int, int]
    begin: int
    end: int
    old: str
    new: str  # empty for a statement that is left out
    type: str  # a cast to it gives both versions of an expression the same type; may be empty

    def __str__(self):
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}:{self.lines[0]}: {old} -> {new or '(left out)'}"

    def brackets(self, number):
        """Return the text to insert before and behind the old text."""
        if self.new:
            return f"(MUTANT({number}) ? ({self.new}) : {self.type}(", "))"
        return f"{{ if (!MUTANT({number})) ", " }"


def text(node):
    return node.text.decode()


def changes(node):
    """Yield the replacements of a node, each with the type that it shares with the node if the two might differ."""
    parent = node.parent
    operator = node.child_by_field_name("operator")
    of_parent = parent.child_by_field_name("operator")
    if node.type in ("binary_expression", "assignment_expression") and text(operator) in SWAPS:
        left, right = (text(node.child_by_field_name(side)) for side in ("left", "right"))
        yield f"{left} {SWAPS[text(operator)]} {right}", ""
    elif node.type == "unary_expression" and text(operator) in "!-~":
        yield text(node.child_by_field_name("argument")), "bool" if text(operator) == "!" else ""
    elif node.type == "number_literal" and parent.type == "binary_expression" and text(of_parent) in ARITHMETIC:
        yield f"{text(node)} + 1", ""
    elif node.type == "expression_statement" and node.named_children[:1] and not MACRO.match(text(node)):
        if node.named_children[0].type == "call_expression":
            yield "", ""

    if parent.type == "subscript_argument_list" and node.type != "number_literal":
        yield f"({text(node)}) + 1", ""
    elif node.type in CONDITIONS:
        in_logic = parent.type == "binary_expression" and text(of_parent) in ("&&", "||")
        if in_logic or parent.type == "condition_clause" or node == parent.child_by_field_name("condition"):
            yield f"!({text(node)})", "bool"


def is_left_alone(node, source, file):
    """Return whether a rule leaves out a node and all of its parts."""
    if node.type in NOT_CODE or node.type in CONSTANTS:
        return True
    if node.type in ("declaration", "field_declaration", "if_statement", "function_definition"):
        if any(text(child) == "constexpr" for child in node.children):
            return True
    if node.type in ("expression_statement", "if_statement"):
        return bool(HINT.match(text(node.child_by_field_name("consequence") or node)))
    if node.type != "function_definition" or node.child_by_field_name("body") is None:
        return False
    if HINT.match(text(node.child_by_field_name("declarator"))):
        return True
    of_class = node.parent.type == "field_declaration_list"
    if file.startswith("csrc/cuda/"):
        before = node.prev_sibling.end_byte if node.prev_sibling else node.start_byte
        head = source[before : node.child_by_field_name("body").start_byte]
        return b"__device__" not in head and b"__global__" not in head
    result = node.child_by_field_name("type")
    return file.startswith("csrc/cpu/") and not of_class and result and text(result) in ("bool", "int", "int64_t")


def find(node, source, file):
    """Yield the mutants of a node and of its parts."""
    if is_left_alone(node, source, file):
        return
    condition = node.child_by_field_name("condition") if node.type.startswith("preproc_") else None
    for child in node.named_children:
        if child != condition and not (node.type == "case_statement" and child == node.child_by_field_name("value")):
            yield from find(child, source, file)
    for new, of_type in changes(node) if node.parent else ():
        lines = node.start_point.row + 1, node.end_point.row + 1
        yield Mutant(file, lines, node.start_byte, node.end_byte, text(node), new, of_type)


def mutants_of(source, file):
    """Return all mutants of a source file, given as bytes."""
    cpp = CUDA_WORDS.sub(lambda match: re.sub(rb"[^\n]", b" ", match.group()), source)
    return list(find(PARSER.parse(cpp).root_node, source, file))


def population(target, root=ROOT):
    """Return all mutants of a target."""
    files = sorted(path for pattern in TARGETS[target].sources for path in root.glob(pattern))
    return [mutant for path in files for mutant in mutants_of(path.read_bytes(), str(path.relative_to(root)))]


# ---- compiling mutants -----------------------------------------------------------------------------------------------

RUNTIME = f"""\
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <cstdlib>
#pragma GCC diagnostic ignored "-Wnarrowing"  // a number that a mutant may change is no constant
#pragma GCC diagnostic ignored "-Wunused-function"
namespace {{
struct MutantControl {{
  int chosen, reached[{LIMIT}];
}};
MutantControl* map_mutant_control() {{
  static MutantControl none;
  const char* file = std::getenv("LAYERNORM_MUTANTS");
  if (!file) return &none;
  const int opened = open(file, O_RDWR);
  return static_cast<MutantControl*>(mmap(nullptr, sizeof none, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0));
}}
MutantControl* const mutant_control = map_mutant_control();
// The emulator must not see these accesses to memory.
__attribute__((no_sanitize("thread", "undefined"))) inline bool MUTANT(int id) {{
  if (!mutant_control->reached[id]) mutant_control->reached[id] = 1;
  return mutant_control->chosen == id;
}}
}}  // namespace
"""


def instrument(source, numbered, header):
    """Return a source file, as bytes, with mutants that MUTANT(number) selects; `numbered` maps numbers to mutants."""
    opening, closing = collections.defaultdict(str), collections.defaultdict(str)
    for number, mutant in sorted(numbered.items(), key=lambda item: (item[1].begin, -item[1].end)):
        before, after = mutant.brackets(number)
        opening[mutant.begin] += before
        closing[mutant.end] = after + closing[mutant.end]
    places = sorted({0, len(source), *opening, *closing})
    parts = [
        (closing[place] + opening[place]).encode() + source[place:end]
        for place, end in itertools.pairwise([*places, None])
    ]
    return f'#include "{header}"\n#line 1\n'.encode() + b"".join(parts)


class BuildError(Exception):
    """The output of a compiler."""


def build(target, tree):
    """Build the library of a copy of the repository."""
    environment = {**os.environ, "FORCE_CUDA": "0", "PYTHONPATH": f"{tree / 'tests/emulator'}"}
    command = ["setup.py", "-q", "build_ext", "--inplace"]
    if target == "cuda":
        command = ["-c", "import emulated_build as build; build.library(build.CHECKED)"]
    done = subprocess.run([sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(done.stdout + done.stderr)


def culprits(output, numbered, tree):
    """Return the numbers of the mutants in the lines that a compiler calls wrong."""
    errors = {(str(pathlib.Path(tree, file).resolve()), int(line)) for file, line in ERROR.findall(output)}
    return {
        number
        for number, mutant in numbered.items()
        if any(file == str(tree / mutant.file) and mutant.lines[0] <= line <= mutant.lines[1] for file, line in errors)
    }


ERROR = re.compile(r"(\S+?):(\d+):\d+: error")


def build_sample(target, tree, waiting, count):
    """Compile the first `count` mutants of `waiting` that are valid C++ into a copy of the repository; return them."""
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "build", "*.so", "__pycache__", ".*_cache"))
    if target == "cuda":
        shutil.rmtree(tree / "layernorm_ext")  # the installed package is used instead
    header = tree / "csrc" / "mutant.h"
    header.write_text(RUNTIME)
    sample = {}
    while True:
        while waiting and len(sample) < count:
            sample[max(sample, default=0) + 1] = waiting.pop()
        for path in sorted(path for pattern in TARGETS[target].sources for path in ROOT.glob(pattern)):
            file = str(path.relative_to(ROOT))
            of_file = {number: mutant for number, mutant in sample.items() if mutant.file == file}
            made = instrument(path.read_bytes(), of_file, header)
            if (tree / file).read_bytes() != made:
                (tree / file).write_bytes(made)
        try:
            build(target, tree)
            return sample
        except BuildError as error:
            wrong = culprits(str(error), sample, tree)
            if not wrong:
                raise SystemExit(f"The mutants do not compile:\n{error}") from None
            for number in wrong:
                del sample[number]


# ---- running the tests -----------------------------------------------------------------------------------------------


class Runner:
    """A plugin of pytest that runs the collected tests in a child process without a mutant, then for each mutant."""

    def __init__(self, sample, control, log):
        self.sample, self.log, self.survivors = sample, pathlib.Path(log), []
        self.memory = memoryview(mmap.mmap(os.open(control, os.O_RDWR), 4 * (LIMIT + 1))).cast("i")

    def pytest_runtestloop(self, session):
        usual = {}
        for test, result, seconds, reached in self.run(session.items, 0):
            if result == "passed":
                usual[test] = seconds, set(reached)
            elif result == "failed":
                print(f"without a mutant, {test} fails; it is left out", flush=True)
        print(f"{len(usual)} tests take {sum(seconds for seconds, _ in usual.values()):.0f} s", flush=True)
        for done, (number, mutant) in enumerate(self.sample.items(), 1):
            tests = in_order({test: seconds for test, (seconds, reached) in usual.items() if number in reached})
            limits = {test: int(60 + 10 * usual[test][0]) for test in tests}
            items = {item.nodeid: item for item in session.items}
            results = self.run([items[test] for test in tests], number, limits)
            survives = not results or results[-1][1] == "passed"
            if survives:
                self.survivors.append(mutant)
            verdict = f"SURVIVES {len(tests)} tests" if survives else f"noticed by {results[-1][0]}"
            print(f"{done}/{len(self.sample)} {mutant}: {verdict}", flush=True)
        return True

    def run(self, items, number, limits=None):
        """Run tests on a mutant until one fails (on none: to the end); return [test, result, seconds, reached] each."""
        self.log.write_text("")
        for i in range(LIMIT + 1):
            self.memory[i] = 0
        self.memory[0] = number
        child = os.fork()
        if not child:
            self.run_in_child(items, limits)
        try:
            os.waitpid(child, 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        results = {}
        for line in self.log.read_text().splitlines():
            test, *result = json.loads(line)
            if results.get(test, ["started"])[0] in ("started", "passed"):
                results[test] = result
        return [[test, *result] for test, result in results.items()]

    def run_in_child(self, items, limits):
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        os.environ["PYTEST_ADDOPTS"] = "-x"  # for tests that run tests
        self.stops = limits is not None
        try:
            for item, following in itertools.pairwise([*items, None]):
                self.write(item.nodeid, "started")
                signal.alarm(limits[item.nodeid] if limits else 0)  # ends the process
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        finally:
            os._exit(0)

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and not report.failed:
            return
        reached = [i for i in range(1, LIMIT + 1) if self.memory[i]]
        self.write(report.nodeid, report.outcome, report.duration, reached)
        for i in reached:
            self.memory[i] = 0
        if report.failed and self.stops:
            os._exit(1)

    def write(self, *line):
        with self.log.open("a") as log:
            print(json.dumps(line), file=log)


def in_order(seconds):
    """Order tests: quick ones first, and each function's first case before its others, which rarely notice more."""
    cases, weights = collections.Counter(), {}
    for test in sorted(seconds, key=seconds.get):
        cases[test.partition("[")[0]] += 1
        weights[test] = seconds[test] * cases[test.partition("[")[0]]
    return sorted(weights, key=weights.get)


def run_tests(target, tests):
    """Run the tests of the copy of the repository that is the current folder; called in a process of its own."""
    sample = {int(n): Mutant(**mutant) for n, mutant in json.loads(pathlib.Path("sample.json").read_text()).items()}
    runner = Runner(sample, os.environ["LAYERNORM_MUTANTS"], pathlib.Path("tests.log").resolve())
    pytest.main(["-q", "-s", "-pno:cacheprovider", "-pno:faulthandler", *(tests or TARGETS[target].tests)], [runner])
    noticed = len(sample) - len(runner.survivors)
    print(f"\n{noticed} of {len(sample)} mutants are noticed ({noticed / len(sample):.1%})")
    for mutant in runner.survivors:
        print(f"survives: {mutant}")
    raise SystemExit(noticed < TARGETS[target].goal * len(sample))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--number", default="100", help="how many mutants; `all` for every one (default: 100)")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="of the random sample")
    parser.add_argument("--tests", nargs="*", help="arguments of pytest, instead of the target's tests")
    options = parser.parse_args()

    mutants = population(options.target)
    count = min(LIMIT, len(mutants) if options.number == "all" else int(options.number))
    print(f"{count} of {len(mutants)} mutants of the target {options.target}, --seed {options.seed}", flush=True)
    random.Random(options.seed).shuffle(mutants)
    tree = ROOT / "build" / "mutants" / options.target
    sample = build_sample(options.target, tree, mutants, count)
    (tree / "sample.json").write_text(json.dumps({n: dataclasses.asdict(mutant) for n, mutant in sample.items()}))
    (tree / "control").write_bytes(bytes(4 * (LIMIT + 1)))
    command = [sys.executable, "-c", f"import mutants; mutants.run_tests({options.target!r}, {options.tests!r})"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "tests")]),
        "LAYERNORM_MUTANTS": str(tree / "control"),
    }
    sys.exit(subprocess.run(command, cwd=tree, env=environment).returncode)


if __name__ == "__main__":
    main()
