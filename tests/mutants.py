"""Changes the C++ code in random places, one at a time, and prints which changes the tests do not notice.

    python tests/mutants.py cuda [--number 120] [--seed 1]    # the CUDA kernels, tested in the emulator
    python tests/mutants.py cpu [--number all]                # the CPU kernels and the host code, by the fast tests

All mutants of a sample are compiled into one copy of the repository, in build/mutants: `a < b` becomes
`(MUTANT(7) ? (a >= b) : (a < b))`, and an environment variable selects a mutant. The tests run once without a mutant,
which shows how long they take, and then for each mutant until one fails.

A change that leaves the results the same cannot be noticed. Changes of the kinds that often do so are not made: a
number grows by one only as an operand of arithmetic, `<` becomes `>=` and not `<=`, and no operand of `&&` or `||` is
left out. These places stay as they are:

* whatever the compiler must know: template arguments, array sizes, constexpr and static_assert;
* what no test can notice: prefetches, fences, __syncwarp, when the next grid starts, how much work is worth a thread;
* code that divides the work: host functions of csrc/cuda, and functions of csrc/cpu that return a size or a bool.

Needs the dependency group "mutants", and the installed package with its extra "test".
"""

import argparse
import collections
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import tree_sitter
import tree_sitter_cpp

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_cpp.language()))

# For each target: the files to change, the arguments of pytest, and the share of mutants that must be noticed.
TARGETS = {
    "cuda": (["csrc/cuda/*.cu", "csrc/cuda/*.cuh"], ["tests/emulator/test_kernels.py"], 0.97),
    "cpu": (
        ["csrc/cpu/*", "csrc/*.cpp"],
        ["tests", "--ignore=tests/test_benchmarks.py", "--ignore=tests/test_build.py"],
        0.95,
    ),
}

# ---- the changes -----------------------------------------------------------------------------------------------------

SWAPS = {
    **{"<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "=="},
    **{"+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "|"},
    **{"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*="},
}
ARITHMETIC = {"+", "-", "*", "/", "%", "<<", ">>", "&", "|", "^"}
CONDITIONS = {"call_expression", "field_expression", "identifier", "pointer_expression", "qualified_identifier"}

# Nodes of the syntax tree that are no code, or whose values the compiler must know.
LEFT_ALONE = re.compile(
    "ERROR|preproc_(include|def|function_def|call)|static_assert_declaration|alias_declaration|alignas_qualifier|"
    "enumerator|template_(argument|parameter)_list|(abstract_)?array_declarator"
)
HINT = re.compile(
    r"([\w:<>]+::)?(\w*prefetch\w*|let_next_grid_start|__syncwarp|streaming_fence|_mm_sfence|RowSteps)\b|"
    r"ceil_div\(kGrain"
)
MACRO = re.compile(r"(?!TORCH_CHECK)[A-Z_0-9]+\(")
CUDA_WORDS = re.compile(
    rb"__(?:launch_bounds|align)__\s*\((?:[^()]|\([^()]*\))*\)|__(?:global|device|host|shared|forceinline|restrict)__"
)


def text(node):
    return node.text.decode()


class Mutant(NamedTuple):
    """A change of a node of the syntax tree."""

    file: str
    node: tree_sitter.Node
    new: str  # empty if a statement is left out
    type: str  # what the old and the new expression are cast to if their types may differ

    @property
    def lines(self):
        return range(self.node.start_point.row + 1, self.node.end_point.row + 2)

    def __str__(self):
        old, new = (" ".join(code.split()) for code in (text(self.node), self.new))
        return f"{self.file}:{self.lines[0]}: {old} -> {new or '(left out)'}"


def changes(node):
    """Yield what may replace a node, and a type if both must be cast to it."""
    parent = node.parent
    operator = text(node.child_by_field_name("operator") or node)
    outer_operator = text(parent.child_by_field_name("operator") or parent)
    if node.type in ("binary_expression", "assignment_expression") and operator in SWAPS:
        left, right = (text(node.child_by_field_name(side)) for side in ("left", "right"))
        yield f"{left} {SWAPS[operator]} {right}", ""
    elif node.type == "unary_expression" and operator in "!-~":
        yield text(node.child_by_field_name("argument")), "bool" if operator == "!" else ""
    elif node.type == "number_literal" and parent.type == "binary_expression" and outer_operator in ARITHMETIC:
        yield f"{text(node)} + 1", ""
    elif node.type == "expression_statement" and "call_expression" in [child.type for child in node.children]:
        yield "", ""

    if parent.type == "subscript_argument_list" and node.type != "number_literal":
        yield f"({text(node)}) + 1", ""
    elif node.type in CONDITIONS:
        is_operand = parent.type == "binary_expression" and outer_operator in ("&&", "||")
        if is_operand or parent.type == "condition_clause" or node == parent.child_by_field_name("condition"):
            yield f"!({text(node)})", "bool"


def is_constexpr(node):
    return any(child.type in ("constexpr", "type_qualifier") and text(child) == "constexpr" for child in node.children)


def is_left_alone(node, source, file):
    """Return whether a node and all of its parts stay as they are."""
    if LEFT_ALONE.fullmatch(node.type):
        return True
    if node.type in ("call_expression", "expression_statement", "if_statement"):
        statement = text(node.child_by_field_name("consequence") or node)
        return bool(HINT.match(statement) or MACRO.match(statement))
    if node.type != "function_definition":
        return is_constexpr(node)
    name, body, result = (node.child_by_field_name(field) for field in ("declarator", "body", "type"))
    if is_constexpr(node) or HINT.match(text(name)) or MACRO.match(text(name)):  # macros register operators
        return True
    if file.startswith("csrc/cuda/") and body:
        head = source[node.prev_sibling.end_byte if node.prev_sibling else 0 : body.start_byte]
        return b"__device__" not in head and b"__global__" not in head
    is_method = node.parent.type == "field_declaration_list"
    return file.startswith("csrc/cpu/") and not is_method and result and text(result) in ("bool", "int", "int64_t")


def find(node, source, file):
    """Yield the mutants of a node and of its parts."""
    if is_left_alone(node, source, file):
        return
    constant = None
    if node.type.startswith("preproc_") or is_constexpr(node):
        constant = node.child_by_field_name("condition")
    elif node.type == "case_statement":
        constant = node.child_by_field_name("value")
    for child in node.named_children:
        if child != constant:
            yield from find(child, source, file)
    for change in changes(node) if node.parent else ():
        yield Mutant(file, node, *change)


def mutants_of(source, file):
    """Return all mutants of a source file, given as bytes."""
    cpp = CUDA_WORDS.sub(lambda match: re.sub(rb"[^\n]", b" ", match.group()), source)
    return list(find(PARSER.parse(cpp).root_node, source, file))


# ---- compiling the mutants -------------------------------------------------------------------------------------------

RUNTIME = """\
#pragma once
#include <cstdlib>
#pragma GCC diagnostic ignored "-Wnarrowing"  // a number that a mutant may change is no constant
static const int selected_mutant = std::getenv("LAYERNORM_MUTANT") ? std::atoi(std::getenv("LAYERNORM_MUTANT")) : 0;
// The emulator, which checks all accesses to memory, must not see these.
__attribute__((no_sanitize("thread", "undefined"))) static inline bool MUTANT(int number) {
  return number == selected_mutant;
}
"""
ERROR = re.compile(r"(\S+?):(\d+):\d+: error")


def instrument(source, sample, header):
    """Return a source file, as bytes, with the mutants of a sample {number: mutant}."""
    opening, closing = collections.defaultdict(str), collections.defaultdict(str)
    for number, mutant in sorted(sample.items(), key=lambda item: (item[1].node.start_byte, -item[1].node.end_byte)):
        before, after = f"{{ if (!MUTANT({number})) ", " }"
        if mutant.new:
            before, after = f"(MUTANT({number}) ? {mutant.type}({mutant.new}) : {mutant.type}(", "))"
        opening[mutant.node.start_byte] += before
        closing[mutant.node.end_byte] = after + closing[mutant.node.end_byte]
    made, end = f'#include "{header}"\n#line 1\n'.encode(), 0
    for place in sorted({*opening, *closing}):
        made += source[end:place] + (closing[place] + opening[place]).encode()
        end = place
    return made + source[end:]


def build(target, sample, tree):
    """Build a copy of the repository with the mutants of a sample; return those that are valid C++."""
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "build", "*.so", "__pycache__", ".*_cache"))
    if target == "cuda":
        shutil.rmtree(tree / "layernorm_ext")  # the installed package takes its place
        command = ["-c", "import emulated_build; emulated_build.operators(emulated_build.CHECKED)"]
    else:
        flags = tree / "build_support" / "extension.py"
        flags.write_text(flags.read_text().replace('"-O3"', '"-O1"'))  # which takes half the time
        command = ["setup.py", "-q", "build_ext", "--inplace"]
    environment = {**os.environ, "FORCE_CUDA": "0", "PYTHONPATH": str(tree / "tests" / "emulator")}
    header = tree / "csrc" / "mutant.h"
    header.write_text(RUNTIME)
    files = {mutant.file for mutant in sample.values()}
    while True:
        for file in files:
            of_file = {number: mutant for number, mutant in sample.items() if mutant.file == file}
            made = instrument((ROOT / file).read_bytes(), of_file, header)
            if (tree / file).read_bytes() != made:  # or everything would be compiled again
                (tree / file).write_bytes(made)
        done = subprocess.run([sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode == 0:
            return sample
        output = done.stdout + done.stderr
        errors = {(pathlib.Path(tree, path).resolve(), int(line)) for path, line in ERROR.findall(output)}
        wrong = [n for n, mutant in sample.items() if any((tree / mutant.file, i) in errors for i in mutant.lines)]
        if not wrong:
            raise SystemExit(f"The mutants do not compile:\n{output}")
        print(*(f"no valid C++: {sample[number]}" for number in wrong), sep="\n", flush=True)
        sample = {number: mutant for number, mutant in sample.items() if number not in wrong}


# ---- running the tests -----------------------------------------------------------------------------------------------


def run_tests(tree, arguments, number=0, timeout=None):
    """Run the tests of a built copy on a mutant, or on none (0). Return whether all pass, and the output."""
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'tests'}", "LAYERNORM_MUTANT": str(number)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", *arguments]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, cwd=tree, env=environment, **options)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return False, "timeout"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # and the workers
    return process.returncode == 0, output


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--number", default="120", help="of mutants; `all` for every one (default: 120)")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="of the random sample")
    options = parser.parse_args()

    patterns, arguments, goal = TARGETS[options.target]
    files = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    mutants = [mutant for path in files for mutant in mutants_of(path.read_bytes(), str(path.relative_to(ROOT)))]
    number = len(mutants) if options.number == "all" else int(options.number)
    print(f"{number} of {len(mutants)} mutants of the target {options.target}, --seed {options.seed}", flush=True)
    sample = dict(enumerate(random.Random(options.seed).sample(mutants, number), 1))
    tree = ROOT / "build" / "mutants" / options.target
    sample = build(options.target, sample, tree)

    start = time.monotonic()
    failing = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run_tests(tree, arguments)[1], re.M)
    seconds = time.monotonic() - start
    print(f"{seconds:.0f} s without a mutant; left out because they fail: {failing}", flush=True)
    arguments = ["-x", *arguments, *(f"--deselect={test}" for test in failing)]
    survivors = []
    for number, mutant in sample.items():
        survives, _ = run_tests(tree, arguments, number, 60 + 2 * seconds)
        survivors += [mutant] * survives
        print(f"{mutant}: {'SURVIVES' if survives else 'noticed'}", flush=True)
    noticed = len(sample) - len(survivors)
    print(f"\n{noticed} of {len(sample)} mutants are noticed ({noticed / len(sample):.1%})")
    print(*(f"survives: {mutant}" for mutant in survivors), sep="\n")
    sys.exit(noticed < goal * len(sample))


if __name__ == "__main__":
    main()
