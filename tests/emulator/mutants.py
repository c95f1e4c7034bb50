"""Breaks the device code in every way its rules know, one at a time, and asks whether the tests notice.

    python tests/emulator/mutants.py [--jobs 2] [--list] [--only FILE] -- -x -q tests -k emulated

Everything after `--` are arguments of pytest. A mutant that no test notices survives, and is an error, unless
equivalent_mutants.toml proves that it cannot be noticed. There is no sampling, and no mark in the sources
excludes anything.

Most mutants are compiled together and chosen when the tests run: `a < b` becomes
`(MUTANT(7) ? (a <= b) : (a < b))`. Those in constant expressions (template arguments, array sizes, constexpr)
are built one by one. A run that was interrupted goes on where it stopped, unless the sources or the tests
have changed. Needs the packages tree-sitter and tree-sitter-cpp.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import time
import tomllib

import emulated_build
import pytest
import tree_sitter
import tree_sitter_cpp

EQUIVALENTS = emulated_build.EMULATOR / "equivalent_mutants.toml"
PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_cpp.language()))

# ---- the rules -------------------------------------------------------------------------------------------

OPERATORS = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "+": ("-",),
    "-": ("+",),
    "*": ("+",),
    "/": ("*",),
    "%": ("/",),
    "<<": (">>",),
    ">>": ("<<",),
    "&": ("|",),
    "|": ("&",),
    "^": ("|",),
    "+=": ("-=",),
    "-=": ("+=",),
    "*=": ("/=",),
    "/=": ("*=",),
}


# Conditions that are no comparison.
BARE = {"call_expression", "field_expression", "identifier", "pointer_expression"}


def text(node):
    return node.text.decode()


def replacements(node):
    """What a node may be replaced by, as source text."""
    parent = node.parent
    if node.type in ("binary_expression", "assignment_expression"):
        left, right = text(node.child_by_field_name("left")), text(node.child_by_field_name("right"))
        operator = text(node.child_by_field_name("operator"))
        if operator in ("&&", "||"):
            yield from (left, right)
        for other in OPERATORS.get(operator, ()):
            yield f"{left} {other} {right}"
    elif node.type == "unary_expression":
        yield text(node.child_by_field_name("argument"))
    elif node.type == "number_literal":
        if not parent.type.endswith("array_declarator"):  # no test can tell a larger array
            yield f"{text(node)} + 1"
        if re.fullmatch(r"0x[\da-f]+[ul]*|\d+[ul]*", text(node), re.I):
            yield f"{text(node)} - 1"
    elif node.type == "call_expression" and parent.type == "expression_statement":
        yield "void()"

    if parent.type == "subscript_argument_list":
        yield f"({text(node)}) + 1"
    elif parent.type == "argument_list" and node == parent.named_children[0]:
        function = text(parent.parent.child_by_field_name("function") or parent.parent)
        if re.fullmatch(r"__\w+_sync|__syncwarp", function):
            yield f"({text(node)}) >> 1"  # the mask
    elif node.type in BARE and (parent.type == "condition_clause" or node == parent.child_by_field_name("condition")):
        yield f"!({text(node)})"


CONSTANT = {
    "abstract_array_declarator",
    "alias_declaration",
    "alignas_qualifier",
    "enumerator",
    "template_argument_list",
    "template_parameter_list",
}


def is_constexpr(node):
    return any(child.type in ("type_qualifier", "constexpr") and text(child) == "constexpr" for child in node.children)


def is_constant(node):
    """Whether what is in a node must be known to the compiler."""
    if node.type in CONSTANT:
        return True
    parent = node.parent
    if node.type in ("declaration", "field_declaration", "function_definition"):
        return is_constexpr(node)
    if node.type == "condition_clause":
        return is_constexpr(parent)
    return parent is not None and (
        (parent.type == "array_declarator" and node == parent.child_by_field_name("size"))
        or (parent.type == "case_statement" and node == parent.child_by_field_name("value"))
    )


# ---- finding and compiling them in -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mutant:
    id: int
    file: str
    line: int
    name: str  # stays the same when lines move
    constant: bool


def parse(source):
    """Parses device code; the words that are CUDA's and not C++'s are replaced, in the same length."""

    def blank(match):
        return re.sub(rb"[^\n]", b" ", match.group())

    words = rb"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)|__(?:global|device|host|forceinline|restrict)__"
    source = re.sub(words, blank, source)
    source = re.sub(
        rb"LAYERNORM_(?:DYNAMIC_)?SHARED\((\w+),(.*?)\)(?=;)",
        lambda m: b"using".ljust(m.start(1) - m.start()) + m[1] + b"=" + m[2] + b" ",
        source,
    )
    root = PARSER.parse(source).root_node
    errors = [node for node in walk(root) if node.type == "ERROR" or node.is_missing]
    return root, [f"line {node.start_point.row + 1}: {text(node)[:60]}" for node in errors]


def walk(node):
    yield node
    for child in node.children:
        yield from walk(child)


class Instrumented:
    """A copy of the sources with all mutants in it."""

    def __init__(self, csrc, stillborn=()):
        self.mutants, self.files, self._names, self._stillborn = [], {}, {}, set(stillborn)
        for path in sorted([*csrc.glob("cuda/*.cu"), *csrc.glob("cuda/*.cuh")]):
            root, errors = parse(path.read_bytes())
            if errors:
                raise SystemExit(f"{path.name} is not understood, at {'; '.join(errors)}")
            self._file, self._source = path.name, path.read_bytes()
            self.files[path.name] = self._render(root, "", False).decode()

    def _render(self, node, function, constant):
        if node.type == "static_assert_declaration" or node.type.startswith("preproc_"):
            return self._source[node.start_byte : node.end_byte]
        if node.type == "function_definition":
            function = re.match(r"[\w:~]*", text(node.child_by_field_name("declarator")).lstrip("*& ")).group()
        constant = constant or is_constant(node)
        made, end = b"", node.start_byte
        for child in node.children:
            made += self._source[end : child.start_byte] + self._render(child, function, constant)
            end = child.end_byte
        made += self._source[end : node.end_byte]
        for replacement in replacements(node) if node.is_named and node.parent else ():
            mutant = self._add(node, replacement, function, constant)
            if mutant.id not in self._stillborn:
                which = "COMPILED_MUTANT" if constant else "MUTANT"
                otherwise = b"void(" + made + b")" if replacement == "void()" else made
                made = f"({which}({mutant.id}) ? ({replacement}) : (".encode() + otherwise + b"))"
        return made

    def _add(self, node, replacement, function, constant):
        row = node.start_point.row
        line = self._source.splitlines()[row].decode()
        change = " ".join(f"{text(node)} => {replacement}".split())
        name = f"{self._file}: {function}: {line.strip()}: {change}"
        self._names[name] = self._names.get(name, 0) + 1
        if self._names[name] > 1:
            name += f" ({self._names[name]})"
        self.mutants.append(Mutant(len(self.mutants) + 1, self._file, row + 1, name, constant))
        return self.mutants[-1]

    def write(self, csrc, compiled=0):
        (csrc / "cuda" / "mutant.h").write_text(RUNTIME)
        for name, instrumented in self.files.items():
            # Only a .cu tells which mutant is compiled in: host code need not be compiled again.
            head = f"#define COMPILED_MUTANT(id) ((id) == {compiled})\n" if name.endswith(".cu") else ""
            body = instrumented.replace("#pragma once", "", 1)
            guard = "#pragma once\n" if name.endswith(".cuh") else ""
            (csrc / "cuda" / name).write_text(f'{guard}{head}#include "mutant.h"\n#line 1 "{name}"\n{body}')


RUNTIME = """\
#pragma once
#include <cstdlib>
#pragma GCC diagnostic ignored "-Wnarrowing"  // a chosen constant is none any more
// Not to be seen by the checker.
__attribute__((no_sanitize("thread"))) inline bool is_mutant(int id) {
  static const int chosen = [] {
    const char* text = std::getenv("LAYERNORM_MUTANT");
    return text ? std::atoi(text) : 0;
  }();
  return id == chosen;
}
#define MUTANT(id) is_mutant(id)
"""


def culprits(error, files):
    """The mutants a compiler's message is about: on each line that it names, the last before the column."""
    found = set()
    for name, line, column in re.findall(r"(\w+\.cuh?):(\d+):(\d+): error", error):
        if name in files:
            before = files[name].splitlines()[int(line) - 1].encode()[: int(column)].decode(errors="ignore")
            found.update(int(id) for id in re.findall(r"MUTANT\((\d+)\)", before)[-1:])
    return found


# ---- running them ----------------------------------------------------------------------------------------


def warm_up():
    """Imports once what else every fork would."""
    import torch.testing

    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    with contextlib.suppress(ImportError):
        import hypothesis  # noqa: F401


def run_tests(arguments, csrc, mutant, log, limit):
    """Runs pytest in a fork, which saves importing torch. True: all passed; False: not; None: out of time."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.environ.update(LAYERNORM_EMULATED_SOURCES=str(csrc), LAYERNORM_MUTANT=str(mutant))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 99
        with contextlib.suppress(BaseException):
            code = pytest.main(["-p", "no:cacheprovider", *arguments])
        os._exit(int(code))
    end = time.monotonic() + limit
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def reason(log):
    """The first line that says why a test failed."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("E  ")]
    return lines[0][1:].strip()[:200] if lines else "the process died"


def instrument(csrc, work, arguments):
    """Compiles all mutants in, less those that are not C++, and checks that without one the tests pass."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(csrc, work)
    stillborn = set()
    while True:
        made = Instrumented(csrc, stillborn)
        made.write(work)
        try:
            emulated_build.library(csrc=work)
            break
        except emulated_build.CompileError as error:
            more = culprits(str(error), made.files) - stillborn
            if not more:
                raise
            stillborn |= more
    begin = time.monotonic()
    if not run_tests(arguments, work, 0, work / "log", 3600):
        raise SystemExit("the tests fail without a mutant:\n" + (work / "log").read_text()[-4000:])
    return made, stillborn, time.monotonic() - begin


def outcome(made, work, mutant, arguments, limit):
    """Whether the tests notice a mutant, and how."""
    log = work.parent / f"{mutant.id}.log"
    if mutant.constant:
        own = work.parent / f"mutant{mutant.id}"
        shutil.copytree(work, own)
        try:
            made.write(own, compiled=mutant.id)
            emulated_build.library(csrc=own)
            passed = run_tests(arguments, own, 0, log, limit)
        except emulated_build.CompileError:
            return "does not compile"
        finally:
            shutil.rmtree(own)
    else:
        passed = run_tests(arguments, work, mutant.id, log, limit)
    result = "survived" if passed else "out of time" if passed is None else reason(log)
    log.unlink(missing_ok=True)
    return result


def digest(options):
    """Of all that the results depend on."""
    tests = emulated_build.EMULATOR.parent.rglob("*.py")
    inputs = sorted(path for path in [*options.csrc.rglob("*"), *tests, *emulated_build.RUNTIME] if path.is_file())
    content = repr(options.pytest).encode() + b"".join(path.read_bytes() for path in inputs)
    return hashlib.sha256(content).hexdigest()[:16]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csrc", type=pathlib.Path, default=emulated_build.ROOT / "csrc")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--only", metavar="FILE", help="of the mutants, those of one source file")
    parser.add_argument("--equivalents", type=pathlib.Path, default=EQUIVALENTS)
    parser.add_argument("pytest", nargs="*", help="arguments of pytest")
    options = parser.parse_args()

    if options.list:
        for mutant in Instrumented(options.csrc).mutants:
            print(f"{mutant.id:5} {'compiled' if mutant.constant else 'chosen  '} {mutant.name}")
        return 0

    folder = emulated_build.ROOT / "build" / "mutants" / digest(options)
    folder.mkdir(parents=True, exist_ok=True)
    results_file = folder / "results.jsonl"
    lines = results_file.read_text().splitlines() if results_file.exists() else []
    results = dict(json.loads(line) for line in lines)

    warm_up()
    made, stillborn, seconds = instrument(options.csrc, folder / "csrc", options.pytest)
    mutants = [m for m in made.mutants if m.id not in stillborn and options.only in (None, m.file)]
    todo = [m for m in mutants if m.name not in results]
    constant = sum(m.constant for m in mutants)
    print(f"{len(mutants)} mutants, {constant} of them built one by one; {len(stillborn)} more are not C++")
    print(f"{len(todo)} to go, the others are in {results_file}")
    print(f"without a mutant the tests take {seconds:.1f} s", flush=True)

    def outcome_of(mutant):
        return mutant, outcome(made, folder / "csrc", mutant, options.pytest, 30 + 10 * seconds)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool, results_file.open("a") as kept:
        jobs = [pool.submit(outcome_of, mutant) for mutant in todo]
        for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            mutant, result = job.result()
            results[mutant.name] = result
            print(json.dumps([mutant.name, result]), file=kept, flush=True)
            print(f"[{done}/{len(todo)}] {mutant.name}: {result}", flush=True)

    equivalent = set()
    if options.equivalents.exists():
        entries = tomllib.loads(options.equivalents.read_text())["equivalent"]
        equivalent = {entry["mutant"] for entry in entries if entry["reason"]}
    survivors = {m.name for m in mutants if results[m.name] == "survived"}
    unproven = sorted(survivors - equivalent)
    stale = sorted(equivalent - survivors) if options.only is None else []
    print(f"{len(mutants)} mutants: {len(mutants) - len(survivors)} noticed, ", end="")
    print(f"{len(survivors & equivalent)} equivalent, {len(unproven)} survived")
    for name in unproven:
        print(f"survived: {name}")
    for name in stale:
        print(f"listed as equivalent, and noticed or gone: {name}")
    return 1 if unproven or stale else 0


if __name__ == "__main__":
    sys.exit(main())
