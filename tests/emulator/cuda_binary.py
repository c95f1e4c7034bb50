"""Reads the registers, shared memory and instructions of the kernels from the compiled package, without a GPU.

It needs cuobjdump and nvdisasm from the CUDA toolkit, or from the package triton, which comes with torch.
"""

import collections
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess

RESERVED_SHARED = 1024  # bytes of a block from 9.0 on, which cuobjdump counts and the runtime does not


@dataclasses.dataclass
class Kernel:
    """One kernel for one architecture."""

    name: str  # demangled, without namespaces and parameters
    registers: int  # of a thread
    static_shared: int  # bytes
    stack: int  # bytes of local memory
    opcodes: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # with their modifiers


def library():
    """Return the path of the installed package's compiled module."""
    package = pathlib.Path(importlib.util.find_spec("layernorm_ext").origin).parent
    return next(package.glob("_C*.so"))


@functools.cache
def tool(name):
    """Return the path of a program of the CUDA toolkit, or of the copy that comes with triton."""
    folders = [pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    if spec := importlib.util.find_spec("triton"):
        folders.append(pathlib.Path(spec.origin).parent / "backends" / "nvidia" / "bin")
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders)))
    if not found:
        raise FileNotFoundError(f"{name} is neither on PATH nor in {' or '.join(map(str, folders))}")
    return found


def _cuobjdump(*options):
    # cuobjdump looks for nvdisasm on PATH.
    path = os.pathsep.join([os.environ["PATH"], str(pathlib.Path(tool("nvdisasm")).parent)])
    command = [tool("cuobjdump"), *options, library()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PATH": path}) as process:
        yield from process.stdout
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _demangle(names):
    out = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [re.sub(r"^void |\(anonymous namespace\)::|\((?!anonymous).*", "", line) for line in out.splitlines()]


@functools.cache
def kernels():
    """Return {architecture: {mangled name: Kernel}}, without instructions."""
    found, architecture, name = collections.defaultdict(dict), None, None
    for line in _cuobjdump("-res-usage"):
        if match := re.match(r"arch = sm_(\d+)", line):
            architecture = int(match[1])
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match[1]
        elif match := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line):
            registers, stack, shared, local = map(int, match.groups())
            shared = max(shared - (RESERVED_SHARED if architecture >= 90 else 0), 0)
            found[architecture][name] = Kernel(name, registers, shared, stack + local)
    for of_architecture in found.values():
        for kernel, plain in zip(of_architecture.values(), _demangle(of_architecture), strict=True):
            kernel.name = plain
    return found


def disassembled(architecture):
    """Return the kernels of an architecture, with their instructions."""
    of_architecture, kernel = kernels()[architecture], None
    for line in _cuobjdump("-sass", f"-arch=sm_{architecture}"):
        if match := re.search(r"Function : (\S+)", line):
            kernel = of_architecture[match[1]]
            kernel.opcodes.clear()
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            kernel.opcodes[match[1]] += 1
    return list(of_architecture.values())


def count(kernel, opcode, *modifiers):
    """Count the instructions of an opcode that have all of these modifiers."""
    return sum(
        n for name, n in kernel.opcodes.items() if name.split(".")[0] == opcode and {*modifiers} <= {*name.split(".")}
    )
