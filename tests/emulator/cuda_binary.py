"""What nvcc makes of the kernels, without a GPU: registers, spills, shared memory and instructions of each.

python tests/emulator/cuda_binary.py prints a table, --write keeps it in cuda_binary.md. It needs nvcc, and nvdisasm of
the toolkit or of the package nvidia-cuda-nvdisasm.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile

import sass
from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for a run as a script

from build_support import extension  # noqa: E402

CSRC = ROOT / "csrc" / "cuda"
SOURCES = sorted(CSRC.glob("*.cu"))
TABLE = pathlib.Path(__file__).with_suffix(".md")
ARCHITECTURES = (80, 90, 100)
# What the build passes; C++17, because that is what the oldest supported torch compiles extensions as.
FLAGS = ("-std=c++17", *COMMON_NVCC_FLAGS, *extension.compile_flags()["nvcc"])
WARNINGS = ("-Xcompiler=-Wextra", "-Werror=all-warnings", "-Xptxas=-v,-Werror")


class CompileError(Exception):
    pass


@dataclasses.dataclass
class Kernel:
    """One kernel for one architecture."""

    name: str
    architecture: int
    registers: int
    spilled: int  # bytes stored and loaded
    stack: int  # bytes
    shared: int  # bytes, static
    # Instructions by what they do and how many bits a thread moves: ("LDG", 128).
    memory: collections.Counter
    instructions: int
    path: "Path | None" = None
    section: str = dataclasses.field(default="", repr=False)  # of nvdisasm's listing


@dataclasses.dataclass(frozen=True)
class Path:
    """What a thread does for a full, aligned row, or a tile of one; see sass.py."""

    elements: int  # of the row, that it handles
    work: sass.Work  # the accesses of 16 bytes that the source makes
    instructions: int | None  # None: there is no way on which it makes just these


@functools.cache
def tool(name):
    """The path of one of CUDA's programs, or None."""
    packages = pathlib.Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin")
    folders = [pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"), *packages]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders)))


def _demangle(names):
    out = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [re.sub(r"^void |\(anonymous namespace\)::|\((?!anonymous).*", "", line) for line in out.splitlines()]


def _parse_ptxas(report):
    """Resource usage by mangled name."""
    kernels = {}
    for block in report.split("Compiling entry function '")[1:]:
        stack, *spills = map(int, re.search(r"(\d+) bytes stack frame, (\d+) .*?, (\d+)", block).groups())
        shared = re.search(r"(\d+) bytes smem", block)
        kernels[block.partition("'")[0]] = {
            "registers": int(re.search(r"Used (\d+) registers", block)[1]),
            "spilled": sum(spills),
            "stack": stack,
            "shared": int(shared[1]) if shared else 0,
        }
    return kernels


def _parse_sass(listing):
    """By mangled name: instructions by (opcode, bits), how many there are, and their listing."""
    kernels = {}
    for section in re.split(r"^\s*\.section\s+\.text\.", listing, flags=re.M)[1:]:
        opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", section, re.M)
        memory = collections.Counter()
        for opcode in opcodes:
            name, *modifiers = opcode.split(".")
            if re.fullmatch(r"(LD|ST)[GSL]?|LDGSTS|UBLKCP|STAS", name):
                bits = [int(m) for m in modifiers if m in ("64", "128", "256")]
                narrow = [int(m[1:]) for m in modifiers if m in ("U8", "S8", "U16", "S16")]
                memory[name, (bits or narrow or [32])[0]] += 1
        instructions = sum(name != "NOP" for name in opcodes)
        kernels[re.match(r"[^,\s]+", section)[0].strip('"')] = memory, instructions, section
    return kernels


def _source_path(name, architecture):
    """Elements of a full, aligned row, and the accesses of 16 bytes that the source makes of them; None: none."""
    sizes = {"double": 8, "float": 4, "__half": 2, "__nv_bfloat16": 2}
    tile = r"(?:, layernorm::cuda::(\w*)Tile(?:<(\d+)(?:, (\d+))?> ?)?)?"
    found = re.fullmatch(rf"layernorm::cuda::(\w+)<(\w+)(?:, (\w+))?{tile}>", name)
    if found is None or found[1] == "add_partials" or found[2] not in sizes:
        return None
    kernel, size = found[1], sizes[found[2]]
    count = 16 // size  # elements of a vector
    parameters = max(1, sizes.get(found[3], 0) // size)  # 16 bytes of them to a vector
    is_block = found[4] == "Block"  # a row's threads have it to themselves
    vectors = int(found[6] or 4)
    # Of backward, rows are staged before the loop and in it.
    staged, loads, stores = {
        "forward_rows": (1, 2 * parameters, 1),
        "forward_chunk_in_cluster": (1, 2 * parameters, 1),
        "forward_in_cluster": (1, 2 * parameters, 1),
        "forward_moments": (1, 0, 0),
        "forward_output": (1, 2 * parameters, 1),
        "backward_rows": (4, 2 * parameters, 1),
        "backward_sums": (4, parameters, 0),
    }[kernel]
    # Rows of such threads come by bulk copies, and leave their sums in the workspace.
    if is_block:
        staged = 0 if architecture >= 90 else staged
        stores += 2 * max(size, 4) // size
    return vectors * count, sass.Work(vectors * staged, vectors * loads, vectors * stores)


def _path(name, architecture, section):
    source = _source_path(name, architecture)
    if source is None or ("in_cluster" in name and architecture < 90):  # of which there is nothing but a trap
        return None
    elements, work = source
    # Of forward, branches skip the vectors that a row does not have; of one, all multiply-adds belong to the row.
    skipped = None if "backward" in name else elements // max(work.staged, 1) - 1
    return Path(elements, work, sass.executed(section, work, skipped))


@functools.cache
def compile_kernels(source, architecture, include=CSRC):
    """Compiles a .cu for one architecture. Raises CompileError with nvcc's words, also for a warning."""
    with tempfile.TemporaryDirectory() as scratch:
        cubin = os.path.join(scratch, "kernels.cubin")
        command = [
            tool("nvcc"),
            *FLAGS,
            *WARNINGS,
            f"-arch=sm_{architecture}",
            f"-I{include}",
            "-cubin",
            "-o",
            cubin,
        ]
        done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CompileError(f"{pathlib.Path(source).name} for sm_{architecture}:\n{done.stdout}{done.stderr}")
        listing = subprocess.run([tool("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True).stdout
    usage, code = _parse_ptxas(done.stdout + done.stderr), _parse_sass(listing)
    kernels = []
    for mangled, name in zip(usage, _demangle(usage), strict=True):
        memory, instructions, section = code[mangled]
        path = _path(name, architecture, section)
        found = {"memory": memory, "instructions": instructions, "path": path, "section": section}
        kernels.append(Kernel(name, architecture, **usage[mangled], **found))
    return kernels


PREFACE = (
    "# What nvcc makes of the kernels",
    "",
    "Written by `python tests/emulator/cuda_binary.py --write`, compared by `make test-device`: every change shows.",
    "No kernel spills registers or uses local memory. How the way of a full, aligned row is found, and what its",
    "figure leaves out, stands in [sass.py](sass.py).",
    "",
)


def faults(kernel):
    """What a kernel must not do, and does."""
    local = sum(count for (opcode, _), count in kernel.memory.items() if opcode in ("LDL", "STL"))
    if kernel.spilled:
        yield f"{kernel.name} for sm_{kernel.architecture} spills {kernel.spilled} bytes"
    if local:
        yield f"{kernel.name} for sm_{kernel.architecture} uses local memory in {local} instructions"
    if kernel.path and kernel.path.instructions is None:
        yield (f"{kernel.name} for sm_{kernel.architecture} does not make its accesses of 16 bytes: {kernel.path.work}")


def compile_all(sources=SOURCES):
    """Compiles for every architecture, on as many cores as MAX_JOBS says."""
    jobs = [(source, architecture) for source in sources for architecture in ARCHITECTURES]
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", 2))) as pool:
        return [kernel for made in pool.map(lambda job: compile_kernels(*job), jobs) for kernel in made]


def version():
    """nvcc's: another one makes other code."""
    return re.search(r"V([\d.]+)", subprocess.run([tool("nvcc"), "--version"], capture_output=True, text=True).stdout)[
        1
    ]


def table(kernels):
    """A row for each kernel, with the figures of all architectures."""
    rows = collections.defaultdict(dict)
    for kernel in kernels:
        rows[kernel.name.replace("layernorm::cuda::", "")][kernel.architecture] = kernel

    def per_element(kernel):
        path = kernel.path
        return f"{path.instructions / path.elements:.1f}" if path and path.instructions else "-"

    yield f"nvcc {version()}; figures for {', '.join(f'sm_{architecture}' for architecture in ARCHITECTURES)}"
    yield ""
    yield "| kernel | registers | shared bytes | SASS | per element of a full row | its 16-byte loads, stores |"
    yield "|---|---|---|---|---|---|"
    for name, of in sorted(rows.items()):
        figures = [of[architecture] for architecture in sorted(of)]
        columns = [
            [kernel.registers for kernel in figures],
            [figures[0].shared] if len({kernel.shared for kernel in figures}) == 1 else [k.shared for k in figures],
            [kernel.instructions for kernel in figures],
            [per_element(kernel) for kernel in figures],
        ]
        path = figures[-1].path
        accesses = f"{path.work.staged + path.work.loads}, {path.work.stores}" if path and path.instructions else "-"
        yield f"| `{name}` | {' | '.join(' / '.join(map(str, column)) for column in columns)} | {accesses} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", type=pathlib.Path, default=SOURCES)
    parser.add_argument("--write", action="store_true", help=f"to {TABLE.name}")
    options = parser.parse_args()
    kernels = compile_all(options.sources)
    lines = list(table(kernels))
    print(*lines, sep="\n")
    if options.write:
        TABLE.write_text("\n".join([*PREFACE, *lines]) + "\n")
    bad = [fault for kernel in kernels for fault in faults(kernel)]
    print(f"{len(kernels)} kernels", *bad, sep="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
