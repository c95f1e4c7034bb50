"""Reads the resources and instructions of the compiled package's kernels, without a GPU.

Needs cuobjdump and nvdisasm from the CUDA toolkit, or from the package triton, which comes with torch.
"""

import collections
import functools
import importlib.util
import os
import pathlib
import re
import subprocess
from typing import NamedTuple

RESERVED_SHARED = 1024  # bytes per block from 9.0 on, which cuobjdump counts and the CUDA runtime does not


class Kernel(NamedTuple):
    architecture: int
    name: str  # from plain_names()
    registers: int  # per thread
    static_shared: int  # bytes
    local: int  # bytes of stack and local memory
    opcodes: collections.Counter  # the number of instructions by opcode with modifiers, such as LDG.E.128

    @property
    def function(self):
        """The name without namespaces and template arguments."""
        return self.name.partition("<")[0].rpartition("::")[2]

    def count(self, *parts):
        """Count the instructions whose opcode and modifiers include all of `parts`."""
        return sum(n for opcode, n in self.opcodes.items() if {*parts} <= {*opcode.split(".")})


def library():
    """Return the path of the installed package's compiled module."""
    return pathlib.Path(importlib.util.find_spec("layernorm_ext._C").origin)


def cuobjdump(*options, path=None):
    """Return what cuobjdump prints about a file, by default the installed package's module."""
    folders = [os.environ["PATH"], os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    if spec := importlib.util.find_spec("triton"):
        folders.append(str(pathlib.Path(spec.origin).parent / "backends" / "nvidia" / "bin"))
    environment = {**os.environ, "PATH": os.pathsep.join(folders)}  # cuobjdump looks there for nvdisasm
    command = ["cuobjdump", *options, path or library()]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def plain_names(mangled):
    """Return demangled names, without anonymous namespaces and parameters."""
    done = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    return [
        re.sub(r"^void |\(anonymous namespace\)::|\((?!anonymous).*", "", name) for name in done.stdout.splitlines()
    ]


@functools.cache
def kernels():
    """Return {architecture: {mangled name: Kernel}}, whose opcodes are empty until disassembled() counts them."""
    rows = []
    for line in cuobjdump("-res-usage").splitlines():
        if match := re.match(r"arch = sm_(\d+)", line):
            architecture = int(match[1])
        elif match := re.match(r"\s*Function (\S+):", line):
            mangled = match[1]
        elif match := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line):
            rows.append((architecture, mangled, *map(int, match.groups())))
    names, found = plain_names([mangled for _, mangled, *_ in rows]), collections.defaultdict(dict)
    for name, (architecture, mangled, registers, stack, shared, local) in zip(names, rows, strict=True):
        shared = max(shared - (RESERVED_SHARED if architecture >= 90 else 0), 0)
        kernel = Kernel(architecture, name, registers, shared, stack + local, collections.Counter())
        found[architecture][mangled] = kernel
    return found


@functools.cache
def disassembled(architecture):
    """Return the kernels of an architecture with their instructions."""
    for line in cuobjdump("-sass", f"-arch=sm_{architecture}").splitlines():
        if match := re.search(r"Function : (\S+)", line):
            opcodes = kernels()[architecture][match[1]].opcodes
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            opcodes[match[1]] += 1
    return list(kernels()[architecture].values())
