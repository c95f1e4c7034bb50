"""The way that a kernel's machine code takes for a full, aligned row, found in its control flow.

Nothing is run. Looked for is a way from the entry to an EXIT that goes through no loop twice and makes just the
accesses of 16 bytes to global memory that the source makes for full vectors: that there is one shows that the vectors
are accessed 16 bytes at a time. Of these ways it is the one of fewest instructions: no slow division, no scaling of
huge numbers. Where branches skip the arithmetic of vectors that a row does not have, it is the one of fewest among
those that multiply and add as much as any, or nearly. A predicated instruction counts like any other, because it is
issued all the same; what else a branch can skip without access to memory (adding up a gradient that is not wanted)
does not, so that the figures of kernels with such branches are lower bounds.
"""

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*)")
LABEL = re.compile(r"^(\.L_x_\d+):")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")


def instructions(section: str) -> tuple[list[tuple[str, str, str]], dict[str, int]]:
    """Return (predicate, opcode, operands) of each instruction, and the places of the labels."""
    code, labels = [], {}
    for line in section.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := INSTRUCTION.match(line):
            code.append((found[1] or "", found[2], found[3]))
    return code, labels


def successors(code: list[tuple[str, str, str]], labels: dict[str, int]) -> list[list[int]]:
    """Return where execution may go on after each instruction; a subroutine comes back."""
    barriers, result = {}, []
    for at, (predicate, opcode, operands) in enumerate(code):
        name, onward = opcode.partition(".")[0], [at + 1]
        target = TARGET.search(operands)
        if name == "BSSY":  # where the threads that part now meet at a BSYNC
            barriers[operands.split(",")[0].strip()] = labels[target[1]]
        elif name == "BSYNC":
            onward = [barriers[operands.strip()], *([at + 1] if predicate else [])]
        elif name == "BRA" or (name == "CALL" and target):  # for sm_80, nvcc jumps by calls, too
            conditional = predicate or opcode == "BRA.DIV" or "," in operands
            onward = [*([at + 1] if conditional else []), labels[target[1]]]
        elif name in ("EXIT", "RET"):
            onward = [at + 1] if predicate else []
        result.append([next for next in onward if next < len(code)])
    return result


class Work(NamedTuple):
    """What is done on a way: accesses of 16 bytes to global memory, and fused multiply-adds."""

    staged: int  # copied to shared memory
    loads: int
    stores: int
    multiply_adds: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def accesses(self) -> tuple[int, int, int]:
        return self[:3]


def work(opcode: str) -> Work:
    """Return what one instruction does."""
    name, *modifiers = opcode.split(".")
    wide = "128" in modifiers
    multiply_adds = {"FFMA": 1, "DFMA": 1, "FFMA2": 2}.get(name, 0)
    return Work(wide and name == "LDGSTS", wide and name == "LDG", wide and name == "STG", multiply_adds)


def blocks(section: str) -> tuple[list[tuple[int, list[Work], bool]], list[list[int]]]:
    """Return (instructions, possible work, whether it may end) of the basic blocks, and their successors.

    A predicated copy to shared memory may be that of a residual, which is not made: nvcc saves the branch.
    """
    code, labels = instructions(section)
    onward = successors(code, labels)
    starts = {0, *labels.values(), *(next for at, ways in enumerate(onward) for next in ways if ways != [at + 1])}
    starts |= {at + 1 for at, ways in enumerate(onward) if ways != [at + 1] or code[at][1] == "EXIT"}
    starts = sorted(start for start in starts if start < len(code))
    number = {start: i for i, start in enumerate(starts)}
    contents, edges = [], []
    for start, end in zip(starts, [*starts[1:], len(code)], strict=True):
        opcodes = [opcode for _, opcode, _ in code[start:end]]
        issued = sum(opcode != "NOP" for opcode in opcodes)
        total = sum(map(work, opcodes), Work(0, 0, 0))
        perhaps = sum(work(opcode).staged for predicate, opcode, _ in code[start:end] if predicate)
        possible = [total._replace(staged=total.staged - n) for n in range(perhaps + 1)]
        contents.append((issued, possible, "EXIT" in opcodes))
        edges.append([number[next] for next in onward[end - 1]])
    return contents, edges


def finished(edges: list[list[int]]) -> Iterator[tuple[int, list[int]]]:
    """Yield blocks after their successors, less those that begin a loop the block is in."""
    state, stack = {0: "open"}, [0]
    while stack:
        at = stack[-1]
        unseen = next((to for to in edges[at] if to not in state), None)
        if unseen is None:
            yield at, [to for to in edges[at] if state[to] == "done"]
            state[stack.pop()] = "done"
        else:
            state[unseen] = "open"
            stack.append(unseen)


def executed(section: str, wanted: Work, skipped: int | None) -> int | None:
    """Return the number of instructions on the way with these accesses of 16 bytes; None if there is none.

    On it, at most `skipped` fewer numbers are multiplied and added than on another such way; any number, if None.
    """
    contents, edges = blocks(section)
    fewest: dict[int, dict[Work, int]] = {}  # from a block to the end, by the work on the way
    for at, ways in finished(edges):
        issued, possible, may_end = contents[at]
        if skipped is None:
            possible = [Work(*own.accesses) for own in possible]
        fewest[at] = dict.fromkeys(possible, issued) if may_end else {}
        for own, way in itertools.product(possible, ways):
            for later, count in fewest[way].items():
                both = own + later
                if all(a <= b for a, b in zip(both.accesses, wanted.accesses, strict=True)):
                    fewest[at][both] = min(issued + count, fewest[at].get(both, issued + count))
    found = {w.multiply_adds: count for w, count in fewest[0].items() if w.accesses == wanted.accesses}
    return min((count for n, count in found.items() if n >= max(found) - (skipped or 0)), default=None)
