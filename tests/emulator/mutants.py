"""Breaks the device code in every way its rules know, one at a time, and asks whether the tests notice.

    python tests/emulator/mutants.py [--jobs 2] [--list] [--only TEXT] [--listed]

A mutant that no test notices survives, and is an error, unless equivalent_mutants.toml proves that it cannot be
noticed. There is no sampling, and no mark in the sources excludes anything. Those that are listed there are run with
--listed, which takes long.

Most mutants are compiled together and chosen when the tests run: `a < b` becomes
`(MUTANT(7) ? (a <= b) : (a < b))`. Those in constant expressions (template arguments, array sizes, constexpr)
are built one by one. A mutant meets the tests that come to its place: some seconds of them look at values first (all
of them, if it was built), then all look at every access; those go first that have noticed other mutants of the same
function, and then the quickest, of each function one before its others. A run that was interrupted goes on where it
stopped; one after other tests, with the mutants that had survived. Needs the packages tree-sitter and tree-sitter-cpp.
"""

import argparse
import collections
import ctypes
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import sys
import time
import tomllib
import traceback
import typing

import emulated_build
import pytest
import tree_sitter
import tree_sitter_cpp

EQUIVALENTS = emulated_build.EMULATOR / "equivalent_mutants.toml"
TESTS = [str(emulated_build.EMULATOR / "test_kernels.py")]  # arguments of pytest
MODES = ("PLAIN", "CHECKED")  # of emulated_build: first what is quick, then everything
BROKEN = 3  # the exit code of what could not be tested
QUICK = 3  # seconds of tests in the first mode, for each mutant
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
    """What a node may be replaced by, as source text, and the type that both must have; "" if they have one."""
    parent = node.parent
    if node.type in ("binary_expression", "assignment_expression"):
        left, right = text(node.child_by_field_name("left")), text(node.child_by_field_name("right"))
        operator = text(node.child_by_field_name("operator"))
        if operator in ("&&", "||"):
            yield from ((f"bool({left})", "bool"), (f"bool({right})", "bool"))
        for other in OPERATORS.get(operator, ()):
            yield f"{left} {other} {right}", ""
    elif node.type == "unary_expression":
        argument = text(node.child_by_field_name("argument"))
        yield (f"bool({argument})", "bool") if text(node).startswith("!") else (argument, "")
    elif node.type == "number_literal":
        if not parent.type.endswith("array_declarator"):  # no test can tell a larger array
            yield f"{text(node)} + 1", ""
        if re.fullmatch(r"0x[\da-f]+[ul]*|\d+[ul]*", text(node), re.I):
            yield f"{text(node)} - 1", ""
    elif node.type == "call_expression" and parent.type == "expression_statement":
        yield "void()", "void"

    if parent.type == "subscript_argument_list" and node.type != "number_literal":
        yield f"({text(node)}) + 1", ""
    elif parent.type == "argument_list" and node == parent.named_children[0]:
        function = text(parent.parent.child_by_field_name("function") or parent.parent)
        if re.fullmatch(r"__\w+_sync|__syncwarp", function):
            yield f"({text(node)}) >> 1", ""  # the mask
    elif node.type in BARE and (parent.type == "condition_clause" or node == parent.child_by_field_name("condition")):
        yield f"!({text(node)})", "bool"


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

    @property
    def function(self):
        """With its file."""
        return tuple(self.name.split(": ")[:2])


def parse(source):
    """Parses device code; the words that are CUDA's and not C++'s are replaced, in the same length."""

    def blank(match):
        return re.sub(rb"[^\n]", b" ", match.group())

    source = re.sub(rb"__(?:launch_bounds|align)__\s*\((?:[^()]|\([^()]*\))*\)", blank, source)
    source = re.sub(rb"__(?:global|device|host|forceinline|restrict|shared)__", blank, source)
    root = PARSER.parse(source).root_node
    errors = [node for node in walk(root) if node.type == "ERROR" or node.is_missing]
    return root, [f"line {node.start_point.row + 1}: {text(node)[:60]}" for node in errors]


def walk(node):
    yield node
    for child in node.children:
        yield from walk(child)


class Instrumented:
    """A copy of the sources with all mutants in it that can be chosen, or with the one that is `compiled` in."""

    def __init__(self, csrc, stillborn=(), compiled=None):
        self.mutants, self.files, self._names = [], {}, {}
        self._stillborn, self._compiled = set(stillborn), compiled
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
        for replacement, of_type in replacements(node) if node.is_named and node.parent else ():
            mutant = self._add(node, replacement, function, constant)
            if mutant.id == self._compiled:
                made = f"({replacement})".encode()
            elif not (self._compiled or constant or mutant.id in self._stillborn):
                made = f"(MUTANT({mutant.id}) ? ({replacement}) : {of_type}(".encode() + made + b"))"
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

    def write(self, csrc):
        (csrc / "cuda" / "mutant.h").write_text(RUNTIME)
        assert len(self.mutants) < PLACES
        for name, instrumented in self.files.items():
            body = instrumented.replace("#pragma once", "", 1)
            guard = "#pragma once\n" if name.endswith(".cuh") else ""
            (csrc / "cuda" / name).write_text(f'{guard}#include "mutant.h"\n#line 1 "{name}"\n{body}')


PLACES = 10_000
RUNTIME = f"""\
#pragma once
#include <cstdlib>
#pragma GCC diagnostic ignored "-Wnarrowing"  // a chosen constant is none any more
static const int chosen_mutant = std::getenv("LAYERNORM_MUTANT") ? std::atoi(std::getenv("LAYERNORM_MUTANT")) : 0;
extern "C" {{
inline unsigned char reached_mutants[{PLACES}];
}}
inline bool is_mutant(int id) {{
  int chosen;
  asm("movl %1, %0" : "=r"(chosen) : "m"(chosen_mutant));  // the checker does not see it
  asm("movb $1, %0" : "=m"(reached_mutants[id]));
  return id == chosen;
}}
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


class Forks:
    """A plugin of pytest: once the tests are collected, `body` runs them again and again, in forks of this process."""

    def __init__(self, body):
        self._body = body
        self.usual = {}  # by mode: how many seconds a test takes without a mutant
        self.reached = {}  # by test: the numbers of the mutants that it comes to

    def learn(self, mode, seconds, places):
        """What a run without a mutant has told."""
        self.usual[mode] = seconds
        if mode == "PLAIN":
            self.usual["HASTY"] = {test: 4 * usual for test, usual in seconds.items()}
        self.reached = {test: frozenset(reached) for test, reached in places.items()}

    def pytest_runtestloop(self, session):
        self._tests = session.items
        self._body(self)
        return True

    def pytest_runtest_logreport(self, report):
        """In a fork: stops at the first failure."""
        if report.when == "call" and self._reached:
            self._seconds[report.nodeid] = report.duration
            self._places[report.nodeid] = [place for place, reached in enumerate(self._reached) if reached]
            ctypes.memset(self._reached, 0, len(self._reached))
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._finish(1, f"{report.nodeid}\n{crash.message if crash else report.longrepr}")

    def _finish(self, code, message):
        self._log.write_text(message)
        os._exit(code)

    def start(self, mode, csrc, mutant, log, first=()):
        """Starts the tests on the library made of `csrc`, some of them first; returns the process.

        The log has the name of a test that fails, or does not end, and then what it says; without a mutant: how long
        each test took and what it came to.
        """
        child = os.fork()
        if child:
            return child
        self._log, self._seconds, self._places, self._reached = log, {}, {}, None
        try:
            self._run(mode, csrc, mutant, log, first)
        except BaseException:
            self._finish(BROKEN, traceback.format_exc())

    def _run(self, mode, csrc, mutant, log, first):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        chosen = mutant.id if mutant and not mutant.constant else 0
        os.environ.update(
            LAYERNORM_EMULATED_SOURCES=str(csrc), LAYERNORM_EMULATED_MODE=mode, LAYERNORM_MUTANT=str(chosen)
        )
        try:
            library = emulated_build.library(mode=getattr(emulated_build, mode))
        except emulated_build.CompileError as error:
            self._finish(1, f"\ndoes not compile: {error}")
        if not mutant:
            self._reached = (ctypes.c_ubyte * PLACES).in_dll(ctypes.CDLL(str(library)), "reached_mutants")
        for test, following in itertools.pairwise([*self._chosen(mode, mutant, first), None]):
            log.write_text(f"{test.nodeid}\n")
            spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            limit = int(spent + 5 + 4 * self.usual.get(mode, {}).get(test.nodeid, 600))
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        self._finish(0, json.dumps([self._seconds, self._places]))

    def _chosen(self, mode, mutant, first):
        """The tests that may notice a mutant, in their order: all, or as many as are `QUICK`."""
        if not mutant:
            return self._tests
        usual, order = self.usual[mode], {test: i for i, test in enumerate(first)}
        tests = [test for test in self._tests if mutant.constant or mutant.id in self.reached[test.nodeid]]
        turns, before = {}, collections.Counter()
        for test in sorted((test.nodeid for test in tests), key=usual.get):
            function = test.partition("[")[0]
            before[function] += 1  # what has passed with some parameters is likely to pass with others
            turns[test] = order.get(test, len(order)), usual[test] * before[function]
        tests.sort(key=lambda test: turns[test.nodeid])
        if mode == MODES[-1] or mutant.constant:  # to build that one again takes longer
            return tests
        total = itertools.accumulate(usual[test.nodeid] for test in tests)
        return [test for test, until in zip(tests, total, strict=True) if until <= QUICK or test.nodeid in order]


def instrument(csrc, work):
    """Compiles all mutants in, less those that are not C++, which are returned, too."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(csrc, work)
    stillborn = set()
    while True:
        made = Instrumented(csrc, stillborn)
        made.write(work)
        try:
            emulated_build.library(getattr(emulated_build, MODES[0]), work)
            return made, stillborn
        except emulated_build.CompileError as error:
            more = culprits(str(error), made.files) - stillborn
            if not more:
                raise
            stillborn |= more


class Job(typing.NamedTuple):
    """The tests in a fork, with a mutant or without."""

    mode: str
    mutant: Mutant | None
    sources: pathlib.Path
    log: pathlib.Path
    first: list  # the tests that have noticed other mutants of the function
    begin: float


def outcomes(forks, csrc, work, mutants, jobs, results):
    """Yields each mutant with how the tests notice it, or "survived" and the mode, which are not `results` already."""
    running, killers = {}, {}

    def start(mode, mutant=None):
        sources, build, log = work, mode, work.parent / f"{mutant.id if mutant else mode}.log"
        if mutant and mutant.constant:
            sources = work.parent / f"mutant{mutant.id}"
            build = "HASTY" if mode == "PLAIN" else mode
            shutil.copytree(csrc, sources, dirs_exist_ok=True)
            Instrumented(csrc, compiled=mutant.id).write(sources)
        log.write_text("")
        first = killers.setdefault((mode, mutant.function), []) if mutant else []
        process = forks.start(build, sources, mutant, log, first)
        running[process] = Job(mode, mutant, sources, log, first, time.monotonic())

    for mode in MODES:
        start(mode)
    for mode in MODES:  # quick tests for all mutants, before slow ones for any
        survivors = [mutant for mutant in mutants if results.get(mutant.name) == f"survived {mode}"]
        waiting = [mutant for mutant in reversed(mutants) if mutant not in survivors]
        while waiting or mode not in forks.usual or any(job.mutant for job in running.values()):
            while waiting and mode in forks.usual and len(running) < jobs:
                start(mode, waiting.pop())
            process, status = os.wait()
            job = running.pop(process)
            said, mutant = job.log.read_text(), job.mutant
            if not mutant:
                if status:
                    raise SystemExit(f"the tests fail without a mutant: {said}")
                forks.learn(job.mode, *json.loads(said))
                took = time.monotonic() - job.begin
                print(f"built, and tested without a mutant, in {took:.0f} s: mode {job.mode}", flush=True)
                continue
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) == BROKEN:
                raise SystemExit(f"{mutant.name} could not be run: {said}")
            test, _, message = said.partition("\n")
            if not status:
                survivors.append(mutant)
            elif test:
                job.first[:] = [test, *(other for other in job.first if other != test)][:5]
            out_of_time = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
            how = message[:200] or ("out of time" if out_of_time else "the process died")
            yield mutant, how if status else f"survived {mode}"
            job.log.unlink()
            if mutant.constant:
                shutil.rmtree(job.sources)
        mutants = survivors


def digest(*paths):
    files = sorted(path for path in paths if path.is_file())
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def run(forks, options):
    """Runs what has not been run yet; returns the exit code."""
    emulator = emulated_build.EMULATOR
    sources = [*options.csrc.glob("*"), *options.csrc.glob("cuda/*"), *emulator.glob("*.h"), *emulated_build.RUNTIME]
    tests = digest(*emulator.glob("emulated_*.py"), *emulator.parent.glob("[crs]*.py"), *map(pathlib.Path, TESTS))
    folder = emulated_build.ROOT / "build" / "mutants" / digest(*sources)
    folder.mkdir(parents=True, exist_ok=True)
    results_file = folder / "results.jsonl"
    lines = results_file.read_text().splitlines() if results_file.exists() else []
    before = map(json.loads, lines)
    results = {name: result for name, result, of_tests in before if "survived" not in result or of_tests == tests}

    made, stillborn = instrument(options.csrc, folder / "csrc")
    os.environ["MAX_JOBS"] = "1"  # there are enough processes
    alive = [m for m in made.mutants if m.id not in stillborn]
    proven = equivalents(options.equivalents)
    listed = {m.name for m in alive} & proven
    stale = sorted(proven - listed)
    mutants = [m for m in alive if options.only in m.name and (m.name in listed) == options.listed]
    todo = [m for m in mutants if results.get(m.name, f"survived {MODES[0]}") == f"survived {MODES[0]}"]
    constant = sum(m.constant for m in mutants)
    print(f"{len(mutants)} mutants, {constant} of them built one by one; {len(stillborn)} more are not C++, ", end="")
    print(f"{len(listed)} are listed as equivalent")
    print(f"{len(todo)} to go, the others are in {results_file}", flush=True)
    with results_file.open("a") as kept:
        found = outcomes(forks, options.csrc, folder / "csrc", todo, options.jobs, dict(results)) if todo else ()
        for mutant, result in found:
            results[mutant.name] = result
            print(json.dumps([mutant.name, result, tests]), file=kept, flush=True)
            print(f"{mutant.name}: {' '.join(result.split())}", flush=True)

    noticed = {m.name for m in mutants if "survived" not in results[m.name]}
    wrong = noticed if options.listed else {m.name for m in mutants} - noticed
    print(f"{len(mutants)} mutants: {len(noticed)} noticed, {len(mutants) - len(noticed)} survived")
    for name in sorted(wrong):
        print(f"{'listed as equivalent, but noticed' if options.listed else 'survived'}: {name}")
    for name in stale:
        print(f"listed as equivalent, but no mutant is called: {name}")
    return 1 if wrong or stale else 0


def equivalents(file):
    """The names that the list has, with reasons."""
    entries = tomllib.loads(file.read_text())["equivalent"] if file.exists() else []
    return {name for entry in entries if entry["reason"] for name in entry["mutants"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csrc", type=pathlib.Path, default=emulated_build.ROOT / "csrc")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--only", metavar="TEXT", default="", help="of the mutants, those with this in their names")
    parser.add_argument("--listed", action="store_true", help="run those, and no others, that are listed as equivalent")
    parser.add_argument("--equivalents", type=pathlib.Path, default=EQUIVALENTS)
    options = parser.parse_args()

    if options.list:
        for mutant in Instrumented(options.csrc).mutants:
            print(f"{mutant.id:5} {'compiled' if mutant.constant else 'chosen  '} {mutant.name}")
        return 0

    code = []
    forks = Forks(lambda forks: code.append(run(forks, options)))
    pytest.main(["-pno:cacheprovider", "-pno:faulthandler", "-sq", "--backends=emulated", *TESTS], plugins=[forks])
    return code[0] if code else 2


if __name__ == "__main__":
    sys.exit(main())
