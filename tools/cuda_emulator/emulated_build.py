"""Compiles device code for the emulator: single programs, and the operators with the CUDA kernels on the CPU.

The results are kept under build/emulator. Their names are hashes of the sources, the commands and the compiler.
"""

import concurrent.futures
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import pathlib
import re
import subprocess
import sysconfig
import tempfile

import cuda_binary
import torch

EMULATOR = pathlib.Path(__file__).resolve().parent
ROOT = EMULATOR.parent.parent
CACHE = ROOT / "build" / "emulator"

UNLIMITED = 2**63 - 1  # a path_limit that lowers no limit

RUNTIME = [EMULATOR / name for name in ("scheduler.cpp", "checker.cpp")]
# The headers of csrc that the emulator replaces by headers of its own.
REPLACED_HEADERS = {"cuda/launch_and_ptx.h": "emulated_device.h", "cuda/launch_limits.h": "lowered_limits.h"}

# Host code for CPU tensors calls backend.cpp of this folder, so its constants must be those of the CUDA kernels. These
# are lines of csrc/ops/host.cpp.
CONSTANTS = "has_float64 = {}, needs_alignment = {};"
CPU_CONSTANTS, CUDA_CONSTANTS = CONSTANTS.format("true", "false"), CONSTANTS.format("false", "true")

# The flags for device code in each mode. checker.cpp implements the functions that -fsanitize calls.
CHECKED, PLAIN = "checked", "plain"
FLAGS = {
    CHECKED: [
        *("-O1", "-fno-omit-frame-pointer"),
        "-ftrivial-auto-var-init=pattern",  # an uninitialized local is a NaN
        "-fsanitize=thread,undefined,bounds-strict",  # strict: also for the elements of a Vector
        "-fno-sanitize=vptr,null,object-size,nonnull-attribute,returns-nonnull-attribute",
        "-fno-sanitize-recover=all",
    ],
    PLAIN: ["-O1"],
}
COMMON = [
    *("-std=c++20", "-g1", "-fPIC", "-Wall", "-Wextra"),  # g1: lines, for the reports
    "-Wno-unknown-pragmas",  # unroll
    "-fno-strict-aliasing",  # like nvcc
    "-ffp-contract=off",
    "-fno-gnu-unique",  # otherwise the installed extension would share its static variables
    f"-I{EMULATOR}",
]


class CompileError(Exception):
    pass


@functools.cache
def cuda_include():
    """Return the toolkit's headers: those of CUDA_HOME, or of the packages nvidia-cuda-{runtime,crt,cccl}."""
    site = pathlib.Path(sysconfig.get_path("purelib"))
    folders = [pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include"), *site.glob("nvidia/*/include")]
    for folder in folders:
        if (folder / "cuda_bf16.h").exists():
            return folder
    raise CompileError(f"no CUDA headers in {', '.join(map(str, folders))}")


def _run(command, **kwargs):
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    if done.returncode != 0:
        raise CompileError(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


@functools.cache
def _compiler():
    return os.environ.get("CXX", "g++"), _run([os.environ.get("CXX", "g++"), "--version"])


def _make(suffix, command, inputs, folder=None):
    """Return the file that `command` makes, from the cache if it is there. The cache ignores the path of `folder`."""
    words = [word.replace(str(folder), "") for word in command]
    digest = hashlib.sha256(repr((words, _compiler())).encode())
    for path in inputs:
        digest.update(path.read_bytes())
    made = CACHE / (digest.hexdigest()[:24] + suffix)
    if not made.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        # Another process may make the same file at the same time; both write the same bytes.
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            _run([*command, "-o", made.name], cwd=scratch)
            pathlib.Path(scratch, made.name).rename(made)
    return made


# Patterns of declarations of shared memory, and the emulator's macros that replace them.
TYPE = r"((?:[\w: ]|<[^;]*>)+)"
SHARED = [
    (rf"extern __shared__ (?:__align__\(\d+\) )?{TYPE} (\w+)\[\];", r"EMULATOR_DYNAMIC_SHARED(\2, \1);"),
    (rf"__shared__ (?:__align__\(\d+\) )?{TYPE} (\w+)((?:\[[^;]*\])?);", r"EMULATOR_SHARED(\2, \1\3);"),
]


def _mirror(csrc, namespace=None):
    """Return a copy of the folder `csrc` with the emulator's headers, and its macros in the place of shared memory.

    With a namespace, the operators are registered in this namespace of torch.ops, and have CUDA_CONSTANTS.
    ops/host_code.cpp then has all sources of ops, so that g++ reads torch's headers once instead of six times.
    """
    suffixes = (".h", ".cuh", ".cpp", ".cu")
    origins = {path.relative_to(csrc): path for path in csrc.rglob("*") if path.suffix in suffixes}
    origins |= {pathlib.Path(path): EMULATOR / own for path, own in REPLACED_HEADERS.items()}
    files = {}
    for path, origin in origins.items():
        text = origin.read_text()
        for declaration, macro in SHARED if path.suffix in (".cu", ".cuh") else ():
            text = re.sub(declaration, macro, text)
        if path.suffix in (".cu", ".cuh") and "__shared__" in text:
            raise CompileError(f"{origin}: the emulator does not understand a declaration of shared memory")
        if path.suffix == ".cpp" and namespace:
            text = re.sub(r'(TORCH_LIBRARY(?:_IMPL)?\(|")layernorm(,|::)', rf"\1{namespace}\2", text)
            text = text.replace(CPU_CONSTANTS, CUDA_CONSTANTS)
        files[path] = f'#line 1 "{origin}"\n{text}'.encode()  # messages name the original file
    if namespace:
        sources = sorted(path for path in files if path.match("ops/*.cpp"))
        files[pathlib.Path("ops/host_code.cpp")] = b"".join(files.pop(path) for path in sources)
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:24]
    folder = CACHE / f"{digest}.csrc"
    for path, content in files.items():
        if not (folder / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as scratch:
                scratch.write(content)
            pathlib.Path(scratch.name).rename(folder / path)
    return folder


def _headers(folder):
    return sorted(path for path in folder.rglob("*") if path.suffix in (".h", ".cuh"))


def _object(source, flags, csrc):
    """Return the object file of a source, which includes headers of `csrc`."""
    # nvcc and torch compile C++17; the emulator itself needs std::source_location.
    command = [_compiler()[0], *COMMON, *flags, f"-I{csrc}", f"-I{csrc / 'cuda'}", f"-isystem{cuda_include()}"]
    headers = [*_headers(csrc), *_headers(source.parent), EMULATOR / "emulator.h"]
    if source.suffix != ".cu":
        headers = [path for path in headers if path.suffix != ".cuh"]
    return _make(".o", [*command, "-x", "c++", "-c", str(source)], [source, *headers], csrc)


def _objects(jobs):
    """Return the object file of each job, the arguments of _object()."""
    with (
        open(CACHE / "lock", "w") as lock,  # the processes of a test run need the same objects at the same time
        concurrent.futures.ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", 2))) as pool,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        return list(pool.map(lambda job: _object(*job), jobs))


def program(source):
    """Build device code with a main() of its own, and return the path of the executable."""
    csrc, own = _mirror(ROOT / "csrc"), _mirror(source.parent)
    flags = [*FLAGS[CHECKED], f"-I{own}"]
    objects = _objects([*((path, ["-O2"], csrc) for path in RUNTIME), (own / source.name, flags, csrc)])
    return _make("", [_compiler()[0], *map(str, objects)], objects)


def shared_library(source):
    """Build a file that includes CUDA's headers and gpu_models.h, and return the path of the shared library."""
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", f"-I{EMULATOR}", f"-isystem{cuda_include()}"]
    return _make(".so", [_compiler()[0], *flags, str(source), "-ldl"], [source, *_headers(EMULATOR)])


def operators(mode):
    """Build a library that registers the emulated CUDA kernels for CPU tensors, in the namespace layernorm_<mode>."""
    csrc = _mirror(ROOT / "csrc", f"layernorm_{mode}")
    torch_root = pathlib.Path(torch.__file__).parent
    host_flags = [
        *("-O0", "-g0", "-Wno-deprecated"),
        *(f"-isystem{torch_root / folder}" for folder in ("include", "include/torch/csrc/api/include")),
        f"-DLAYERNORM_TORCH_VERSION={torch.__version__}",  # so that the cache depends on torch's version
    ]
    objects = _objects(
        [
            *((path, host_flags, csrc) for path in (csrc / "ops" / "host_code.cpp", EMULATOR / "backend.cpp")),
            *((path, FLAGS[mode], csrc) for path in sorted(csrc.glob("cuda/*.cu"))),
            *((path, ["-O2"], csrc) for path in RUNTIME),
        ]
    )
    flags = ["-shared", "-Wl,-Bsymbolic", "-Wl,--no-undefined"]
    libraries = [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
    return _make(".so", [_compiler()[0], *flags, *map(str, objects), *libraries], objects)


class Library:
    """The operators of a mode (`ops`), and the schedule of their threads."""

    device = "cpu"  # of the tensors

    def __init__(self, mode):
        path = operators(mode)
        torch.ops.load_library(path)
        self.ops = getattr(torch.ops, f"layernorm_{mode}")
        emulator = ctypes.CDLL(str(path))
        self._configure = emulator.emulator_configure
        self._configure.argtypes = (ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        self._launched = emulator.emulator_launched
        self._launched.restype = ctypes.c_char_p

    @contextlib.contextmanager
    def schedule(self, seed=0, architecture=90, path_limit=UNLIMITED, few_iterations=0, resident=3):
        """Run threads in order (seed 0) or at random, on a GPU of this compute capability, within the `with` block.

        `path_limit` lowers the sizes up to which a kernel handles a row (in vectors) or stages pixels (in bytes): see
        lowered_limits.h. Backward of rows that take up to `few_iterations` iterations is one launch. The GPU holds
        `resident` blocks or clusters at once.
        """
        self._configure(seed, architecture, resident, path_limit, few_iterations)
        try:
            yield
        finally:
            self._configure(0, 90, 3, UNLIMITED, 0)

    def launched(self):
        """Return {(kernel, blocks of a cluster): number of launches} since the last call."""
        lines = [line.split(maxsplit=2) for line in self._launched().decode().splitlines()]
        names = cuda_binary.plain_names([name for _, _, name in lines])
        return {(name, int(cluster)): int(count) for name, (count, cluster, _) in zip(names, lines, strict=True)}


@functools.cache
def library(mode):
    """Return this process's library for a mode."""
    return Library(mode)
