"""Counts the instructions that the CUDA kernels execute per element, from their machine code and without a GPU.

python tools/count_instructions.py [FILE...]    of the installed package, or of object files

A listing holds every option and every rare case, so its length says little. This walks the control flow graph: the
usual path is the cheapest one that performs the operations in CASES, such as the vectors that a thread loads and
stores, its shuffles and its barriers. From kernels that loop over rows, one iteration is taken. Calls are slow paths of
divisions and roots, and are not taken. An instruction that is predicated off counts, because it takes an issue slot.
What one of `warps` warps does for all is a second path, whose additional cost is divided among them.
"""

import collections
import heapq
import pathlib
import re
import sys
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "cuda_emulator"))
import cuda_binary


class Case(NamedTuple):
    label: str
    kernel: str  # a regular expression for its name
    elements: int  # of a thread, on the path
    operations: dict  # {regular expression for the opcode: least number on the path}
    is_loop: bool = False
    once: dict = {}  # more operations, of one warp
    warps: int = 1


FLOAT, BFLOAT = "float", "__nv_bfloat16"


def rows(dtype, cols, vectors, rows_of_thread, lanes=32, *, block=False):
    """Return the case of a kernel in forward_rows.cu: LayerNorm with weight and bias of the dtype of the input."""
    n = vectors * rows_of_thread
    operations = {"LDG.*128": n + 2 * vectors, "STG.*128": n, r"STG\.E$": 2 * rows_of_thread, "RSQ": rows_of_thread}
    operations |= {"SHFL": 18, "BAR": 1} if block else {"SHFL": (2 * lanes.bit_length() - 1) * rows_of_thread}
    elements = n * (4 if dtype == FLOAT else 8)
    operations |= {"CCTL": 2, "FFMA": 4 * elements, "FADD": 2 * elements}  # prefetches; sums and outputs
    name = f"^forward_rows<{dtype}, {dtype}, {vectors}, {rows_of_thread}>"
    return Case(f"{cols} columns", name, elements, operations)


def slices(label, function, dtype, path, operations, **more):
    """Return the case of an iteration of forward_slices or backward_rows, in which a thread has 16 elements."""
    return Case(label, f"^{function}<{dtype}, {dtype}, {path}>", 16, operations, is_loop=True, **more)


CASES = [
    *(rows(FLOAT, 64, 2, 4, 8), rows(FLOAT, 128, 4, 2, 8), rows(FLOAT, 512, 4, 2), rows(FLOAT, 1024, 8, 1)),
    *(rows(FLOAT, 4096, 8, 1, block=True), rows(BFLOAT, 64, 2, 4, 4), rows(BFLOAT, 128, 2, 4, 8)),
    *(
        rows(BFLOAT, 256, 4, 2, 8),
        rows(BFLOAT, 1024, 4, 2),
        rows(BFLOAT, 2048, 8, 1),
        rows(BFLOAT, 4096, 8, 1, block=True),
    ),
]
for dtype, n in ((FLOAT, 4), (BFLOAT, 2)):  # n: vectors of a thread
    sums = {"BAR": 1, "SHFL": 18, "FFMA": 64, "FADD": 32}
    vectors = {"LDGSTS": n + 1, "LDS.*128": 2 * n + 1, "STG.*128": n} | sums
    elements = {"LDGSTS": n + 1, "LDS": 33, "STG": 17} | sums
    once = {"SYNCS.*TRYWAIT": 1, "SHFL": 28, "RSQ": 1}
    CASES += [
        slices("cluster", "forward_slices", dtype, "BlockVectors", vectors, once=once, warps=16),
        slices("odd", "forward_slices", dtype, "BlockElements", elements),
        slices("gated", "forward_slices", dtype, "GatedRows", elements | {"LDGSTS": 2 * n + 2}),
    ]
    vectors = {"LDGSTS": 2 * n + 2, "LDS.*128": 2 * n, "STG.*128": n, "FFMA": 80}
    elements = {"LDGSTS": 2 * n + 2, "LDS": 32, "STG": 16, "FFMA": 80}
    warp, block = {"SHFL": 15}, {"SHFL": 12, "BAR": 1, "LDS": 4 * n}
    CASES += [
        slices("up to 512", "backward_rows", dtype, "WarpVectors", vectors | warp),
        slices("block", "backward_rows", dtype, "BlockVectors", vectors | block),
        slices("odd, up to 512", "backward_rows", dtype, "WarpElements", elements | warp),
        slices("odd", "backward_rows", dtype, "BlockElements", elements | block | {"LDS": 64}),
    ]


class Graph:
    """The basic blocks of a kernel: the opcodes of each, and its successors."""

    def __init__(self, instructions):
        jumps = {a: re.search(r"0x\w+", rest) for a, _, o, rest in instructions if o.split(".")[0] in ("BRA", "BSSY")}
        targets = {int(found[0], 16) for found in jumps.values()}
        self.opcodes, self.next, block, reconverge = collections.defaultdict(list), {}, None, {}
        for (address, predicate, opcode, rest), after in zip(instructions, [*instructions[1:], None], strict=True):
            if block is None or address in targets:
                if block is not None:
                    self.next.setdefault(block, [address])
                block = address
            self.opcodes[block].append(opcode)
            name, following = opcode.split(".")[0], [after[0]] if after else []
            target = int(jumps[address][0], 16) if address in jumps else None
            if name == "BSSY":
                reconverge[rest.split(",")[0]] = target
            if name in ("BRA", "BSYNC", "EXIT", "RET", "CALL"):
                jump = {"BRA": target, "BSYNC": reconverge.get(rest.strip())}.get(name)
                is_conditional = predicate or (name == "BRA" and not rest.startswith("0x"))
                self.next[block] = [jump] * (jump is not None) + following * bool(is_conditional)
                block = None
        self.entry = next(iter(self.opcodes))
        self.ends = [b for b, opcodes in self.opcodes.items() if opcodes[-1] == "EXIT"]
        self.order, self.back_edges = self.search()

    def search(self):
        """Return the blocks, each after its successors, and the edges that close a loop, by a depth-first search."""
        order, back_edges, state = [], set(), {self.entry: 1}
        stack = [(self.entry, iter(self.next.get(self.entry, [])))]
        while stack:
            block, successors = stack[-1]
            for s in successors:
                if state.get(s) == 1:
                    back_edges.add((block, s))
                elif s not in state:
                    state[s] = 1
                    stack.append((s, iter(self.next.get(s, []))))
                    break
            else:
                state[block] = 2
                order.append(block)
                stack.pop()
        return order, back_edges

    def cheapest(self, start, ends, operations):
        """Return the least number of instructions on a path that performs the operations; None if there is none."""
        wanted = [(re.compile(pattern), count) for pattern, count in operations.items()]
        done_by = {b: [sum(bool(p.search(o)) for o in ops) for p, _ in wanted] for b, ops in self.opcodes.items()}
        forward = {b: [s for s in self.next.get(b, []) if (b, s) not in self.back_edges] for b in self.order}
        # The most and the least operations on a path from a block to an end. A path that cannot reach the wanted number
        # is dropped, and one that must reach it is like one that has.
        most, least = {}, {}
        for block in self.order:
            after = [s for s in forward[block] if most[s]]
            stops = [[0] * len(wanted)] * (block in ends)
            for bound, choose in ((most, max), (least, min)):
                best = [choose(each) for each in zip(*stops, *(bound[s] for s in after), strict=True)]
                bound[block] = best and [x + y for x, y in zip(best, done_by[block], strict=True)]
        queue, seen = [(0, start, (0,) * len(wanted))], collections.defaultdict(list)
        while queue:
            cost, block, counts = heapq.heappop(queue)
            if not most[block] or any(c + m < n for c, m, (_, n) in zip(counts, most[block], wanted, strict=True)):
                continue
            counts = tuple(
                n if c + sure >= n else c for c, sure, (_, n) in zip(counts, least[block], wanted, strict=True)
            )
            if any(all(map(int.__ge__, other, counts)) for other in seen[block]):
                continue
            seen[block].append(counts)
            cost += len(self.opcodes[block])
            counts = tuple(min(c + d, n) for c, d, (_, n) in zip(counts, done_by[block], wanted, strict=True))
            if block in ends and all(c == n for c, (_, n) in zip(counts, wanted, strict=True)):
                return cost
            for s in forward[block]:
                heapq.heappush(queue, (cost, s, counts))
        return None

    def count(self, operations, is_loop):
        """Return cheapest() from the entry to the exit, or around the loop in which that is possible."""
        if not is_loop:
            return self.cheapest(self.entry, self.ends, operations)
        around = [self.cheapest(head, [tail], operations) for tail, head in self.back_edges]
        return min((n for n in around if n), default=None)


def graphs(path):
    """Yield (architecture, kernel name, Graph) for the kernels of a file that have a case."""
    listing = cuda_binary.cuobjdump("-sass", path=path)
    line = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)\s*(.*?) ;", re.M)
    for part in re.split(r"(?=Fatbin elf code)", listing):
        architecture = re.search(r"arch = sm_(\d+)", part)
        for function in re.split(r"Function : ", part)[1:]:
            name = cuda_binary.plain_names([function.split()[0]])[0].removeprefix("layernorm::cuda::")
            name = name.replace("layernorm::", "").replace("cuda::", "")
            if not any(re.search(case.kernel, name) for case in CASES):
                continue
            instructions = [(int(a, 16), p, o, rest) for a, p, o, rest in line.findall(function)]
            yield int(architecture[1]), name, Graph(instructions)


def main():
    found = [kernel for path in sys.argv[1:] or [None] for kernel in graphs(path)]
    for architecture in sorted({architecture for architecture, *_ in found}):
        for case in CASES:
            for _, name, graph in (k for k in found if k[0] == architecture and re.search(case.kernel, k[1])):
                usual = graph.count(case.operations, case.is_loop)
                more = graph.count(case.operations | case.once, case.is_loop) if case.once else usual
                if usual is None or more is None:
                    print(f"{architecture:4} no path has the operations of {case.label}: {name}")
                    continue
                total = usual + (more - usual) / case.warps
                text = f"{total / case.elements:5.1f} = {total:.0f} / {case.elements}"
                print(f"{architecture:4} {text}  {case.label}: {name}")


if __name__ == "__main__":
    main()
