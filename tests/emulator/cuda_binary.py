"""What nvcc makes of the kernels, without a GPU: registers, spills, shared memory and instructions of each.

python tests/emulator/cuda_binary.py prints the table. It needs nvcc, and nvdisasm of the toolkit or of the package
nvidia-cuda-nvdisasm.
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

from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for a run as a script

from build_support import extension  # noqa: E402

CSRC = ROOT / "csrc" / "cuda"
SOURCES = sorted(CSRC.glob("*.cu"))
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
    """Instructions by mangled name: (opcode, bits) counted, and how many there are."""
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
        kernels[re.match(r"[^,\s]+", section)[0].strip('"')] = memory, sum(name != "NOP" for name in opcodes)
    return kernels


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
    usage, sass = _parse_ptxas(done.stdout + done.stderr), _parse_sass(listing)
    kernels = []
    for mangled, name in zip(usage, _demangle(usage), strict=True):
        memory, instructions = sass[mangled]
        kernels.append(Kernel(name, architecture, **usage[mangled], memory=memory, instructions=instructions))
    return kernels


def faults(kernel):
    """What a kernel must not do, and does."""
    local = sum(count for (opcode, _), count in kernel.memory.items() if opcode in ("LDL", "STL"))
    if kernel.spilled:
        yield f"{kernel.name} for sm_{kernel.architecture} spills {kernel.spilled} bytes"
    if local:
        yield f"{kernel.name} for sm_{kernel.architecture} uses local memory in {local} instructions"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", type=pathlib.Path, default=SOURCES)
    jobs = [(source, sm) for source in parser.parse_args().sources for sm in ARCHITECTURES]
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", 2))) as pool:
        kernels = [kernel for made in pool.map(lambda job: compile_kernels(*job), jobs) for kernel in made]
    print("| kernel | sm | registers | spilled | stack | shared | SASS | loads and stores |")
    print("|---|---|---|---|---|---|---|---|")
    for k in sorted(kernels, key=lambda k: (k.name, k.architecture)):
        memory = ", ".join(f"{count} {name}.{bits}" for (name, bits), count in sorted(k.memory.items()))
        row = (k.name, k.architecture, k.registers, k.spilled, k.stack, k.shared, k.instructions, memory)
        print("|", " | ".join(map(str, row)), "|")
    bad = [fault for kernel in kernels for fault in faults(kernel)]
    print(f"{len(kernels)} kernels", *bad, sep="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
