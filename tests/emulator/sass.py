"""The way that a kernel's machine code takes for a full, aligned row, found in its control flow.

Nothing is run. Looked for is a way from the entry to an EXIT that goes through no loop twice and makes just the
accesses of 16 bytes to global memory that the source makes for full vectors; of these ways it is the one of fewest
instructions: no slow division, no scaling of huge numbers. That there is one shows that the vectors are accessed 16
bytes at a time. A predicated instruction counts like any other, because it is issued all the same; what a branch can
skip without access to memory (adding up a gradient that is not wanted) does not, so that the figures are lower bounds.
"""

import re
from collections.abc import Iterator

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


def wide_access(opcode: str) -> tuple[int, int]:
    """Return (1, 0) for a load of 16 bytes from global memory, (0, 1) for such a store, else (0, 0)."""
    name, *modifiers = opcode.split(".")
    return ("128" in modifiers and name == "LDG"), ("128" in modifiers and name == "STG")


def blocks(section: str) -> tuple[list[tuple[int, int, int, bool]], list[list[int]]]:
    """Return (instructions, wide loads, wide stores, whether it may end) of the basic blocks, and their successors."""
    code, labels = instructions(section)
    onward = successors(code, labels)
    starts = {0, *labels.values(), *(next for at, ways in enumerate(onward) for next in ways if ways != [at + 1])}
    starts |= {at + 1 for at, ways in enumerate(onward) if ways != [at + 1] or code[at][1] == "EXIT"}
    starts = sorted(start for start in starts if start < len(code))
    number = {start: i for i, start in enumerate(starts)}
    contents, edges = [], []
    for start, end in zip(starts, [*starts[1:], len(code)], strict=True):
        opcodes = [opcode for _, opcode, _ in code[start:end]]
        loads, stores = (sum(column) for column in zip(*map(wide_access, opcodes), strict=True))
        issued = sum(opcode != "NOP" for opcode in opcodes)
        contents.append((issued, loads, stores, any(opcode == "EXIT" for opcode in opcodes)))
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


def executed(section: str, loads: int, stores: int) -> int | None:
    """Return the number of instructions on the way with so many accesses of 16 bytes; None if there is none."""
    contents, edges = blocks(section)
    fewest: dict[int, dict[tuple[int, int], int]] = {}  # from a block to the end, by the accesses on the way
    for at, ways in finished(edges):
        issued, own_loads, own_stores, may_end = contents[at]
        fewest[at] = {(own_loads, own_stores): issued} if may_end else {}
        for way in ways:
            for (later_loads, later_stores), count in fewest[way].items():
                accesses = (own_loads + later_loads, own_stores + later_stores)
                if accesses[0] <= loads and accesses[1] <= stores:
                    fewest[at][accesses] = min(issued + count, fewest[at].get(accesses, issued + count))
    return fewest[0].get((loads, stores))
