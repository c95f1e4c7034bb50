"""Compiles device code for the emulator: single programs, and the whole operator library.

What is built is kept under build/emulator, named by a hash of everything it was made of.
"""

import concurrent.futures
import functools
import hashlib
import os
import pathlib
import subprocess
import sysconfig
import tempfile

EMULATOR = pathlib.Path(__file__).resolve().parent
ROOT = EMULATOR.parent.parent
CACHE = ROOT / "build" / "emulator"

RUNTIME = sorted(path for path in EMULATOR.glob("*.cpp") if path.name != "audit_runtime.cpp")

# How device code is compiled. -fsanitize only instruments: checker.cpp takes the place of the libraries.
CHECKED = (
    "-O1",
    "-fno-omit-frame-pointer",
    "-ftrivial-auto-var-init=pattern",  # an uninitialised local is a NaN
    "-fsanitize=thread,undefined,bounds-strict",  # strict: of a Vector's elements, too
    "-fno-sanitize=vptr,null,object-size,nonnull-attribute,returns-nonnull-attribute",
    "-fno-sanitize-recover=all",
)
PLAIN = ("-O1",)
HASTY = ("-O0",)  # for what is run but once
COVERAGE = ("-O0", "--coverage")

COMMON = (
    "-g1",  # lines, for the reports
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",  # unroll
    "-fno-strict-aliasing",  # nvcc's rules
    "-ffp-contract=off",
    "-fno-gnu-unique",  # or statics would be shared with the extension in the same process
    "-DLAYERNORM_EMULATE",
)


class CompileError(Exception):
    pass


@functools.cache
def cuda_include():
    """The toolkit's headers: CUDA_HOME's, or those of the packages nvidia-cuda-{runtime,crt,cccl}."""
    site = pathlib.Path(sysconfig.get_path("purelib"))
    places = [
        pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include"),
        *site.glob("nvidia/*/include"),
    ]
    for place in places:
        if (place / "cuda_bf16.h").exists():
            return place
    raise CompileError(f"no CUDA headers in {', '.join(map(str, places))}")


def _run(command, **kwargs):
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    if done.returncode != 0:
        raise CompileError(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


@functools.cache
def _compiler():
    return os.environ.get("CXX", "g++"), _run([os.environ.get("CXX", "g++"), "--version"])


def _make(suffix, command, inputs, folder=None):
    """Runs `command` with `-o` a new file, unless its result is in the cache already.

    Where `folder` lies does not matter: copies of it share what is made of them.
    """
    words = [word.replace(str(folder), "") for word in command]
    digest = hashlib.sha256(repr((words, _compiler())).encode())
    for path in inputs:
        digest.update(path.read_bytes())
    made = CACHE / (digest.hexdigest()[:24] + suffix)
    if not made.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        # Another process may be making the same: whoever is last wins, with the same bytes.
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            # The names of coverage files are compiled in.
            coverage = ["-dumpbase", str(made.with_suffix(""))] if {"-c", "--coverage"} <= set(command) else []
            _run([*command, *coverage, "-o", made.name], cwd=scratch)
            pathlib.Path(scratch, made.name).rename(made)
    return made


def _headers(folder):
    return sorted(path for path in folder.rglob("*") if path.suffix in (".h", ".cuh"))


def _object(source, flags, csrc):
    command = [
        _compiler()[0],
        *COMMON,
        *flags,
        f"-I{csrc / 'cuda'}",
        f"-I{EMULATOR}",
        "-isystem",
        str(cuda_include()),
    ]
    # nvcc takes host code of 2017 as well; the emulator itself needs std::source_location.
    command += ["-std=c++20", "-x", "c++", "-c", str(source)]
    headers = [*_headers(csrc), *_headers(EMULATOR)]
    if source.suffix != ".cu":
        headers = [path for path in headers if path.suffix != ".cuh"]
    return _make(".o", command, [source, *headers], csrc)


def _objects(jobs):
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", 2))) as pool:
        return list(pool.map(lambda job: _object(*job), jobs))


def _link(suffix, flags, objects):
    return _make(suffix, [_compiler()[0], *flags, *map(str, objects)], objects)


def program(*sources, mode=CHECKED):
    """Builds device code with a main() of its own, and returns the path of the executable."""
    csrc = ROOT / "csrc"
    objects = _objects([(path, ("-O2",), csrc) for path in RUNTIME] + [(path, mode, csrc) for path in sources])
    return _link("", (), objects)


def shared_library(source):
    """Builds a file that includes CUDA's headers and gpu_models.h, and returns the path of the shared library."""
    flags = ("-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", f"-I{EMULATOR}")
    command = [_compiler()[0], *flags, "-isystem", str(cuda_include()), str(source), "-ldl"]
    return _make(".so", command, [source, *_headers(EMULATOR)])


def namespace(mode):
    """That of a library's operators. What looks at every access has its own: a process may load another one, too."""
    return "layernorm_checked" if mode == CHECKED else "layernorm_emulated"


def library(mode=CHECKED, csrc=None):
    """Builds the operators with the CUDA kernels, on another namespace's CPU key: for torch.ops.load_library.

    The sources are those of `csrc`, of LAYERNORM_EMULATED_SOURCES (for mutants), or of this tree.
    """
    import torch

    csrc = pathlib.Path(csrc or os.environ.get("LAYERNORM_EMULATED_SOURCES", ROOT / "csrc"))
    torch_root = pathlib.Path(torch.__file__).parent
    host_flags = (
        "-O1",
        f"-DLAYERNORM_NAMESPACE={namespace(mode)}",
        "-DLAYERNORM_CUDA_KEY=CPU",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-DLAYERNORM_TORCH_VERSION={torch.__version__}",  # only to tell the cache
        "-Wno-deprecated",
        *(("--coverage",) if "--coverage" in mode else ()),
        "-isystem",
        str(torch_root / "include"),
        "-isystem",
        str(torch_root / "include/torch/csrc/api/include"),
    )
    host = [path for path in sorted(csrc.glob("*.cpp")) if path.name != "bindings.cpp"]
    device = sorted((csrc / "cuda").glob("*.cu"))
    objects = _objects(
        [(path, ("-O2",), csrc) for path in RUNTIME]
        + [(path, mode, csrc) for path in device]
        + [(path, host_flags, csrc) for path in host]
    )
    flags = [
        "-shared",
        "-Wl,-Bsymbolic",
        "-Wl,--no-undefined",
        *(("--coverage",) if "--coverage" in mode else ()),
    ]
    libraries = [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
    return _make(".so", [_compiler()[0], *flags, *map(str, objects), *libraries], objects)
