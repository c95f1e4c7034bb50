"""Describes layernorm_ext._C: its sources and compiler flags.

Environment variables, besides those of cuda.py and of torch.utils.cpp_extension (MAX_JOBS, CXX, ...):
  DEBUG            1: no optimisation, debug information, assertions
  USE_NATIVE_ARCH  1: only the CPU kernels that this machine runs, and the CUDA kernels of its GPUs
"""

import contextlib
import glob
import hashlib
import os
import platform
import re
import shutil
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from setuptools.command.build_py import build_py
from torch.utils import cpp_extension

from . import BuildError, check_system, cuda, jobs, target_torch

NAME = "layernorm_ext._C"
SOURCES = [*sorted([*glob.glob("csrc/*.cpp"), *glob.glob("csrc/ops/*.cpp")]), "csrc/cpu/dispatch.cpp"]
CUDA_SOURCES = sorted(glob.glob("csrc/cuda/*.cu"))
# These include no torch header and are compiled once per CPU capability.
KERNEL_SOURCES = ["csrc/cpu/backward.cpp", "csrc/cpu/channels_first.cpp", "csrc/cpu/forward.cpp"]
# Only explicit multiply-adds are fused, so that results do not depend on the compiler's choice.
KERNEL_FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]

IS_X86 = platform.machine() in ("x86_64", "AMD64")
CPU_CAPABILITIES = {"DEFAULT": []}
if IS_X86:
    CPU_CAPABILITIES["DEFAULT"] = ["-O2"]  # for CPUs without AVX2; a sixth smaller than with -O3
    CPU_CAPABILITIES["AVX2"] = ["-mavx2", "-mfma", "-mf16c", "-mprfchw"]  # older CPUs ignore PREFETCHW
    CPU_CAPABILITIES["AVX512"] = [
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprfchw"),
        "-mprefer-vector-width=512",
    ]


def setup_arguments() -> dict:
    """Return the arguments of setup() for the torch that can be imported."""
    check_system()
    major, minor = map(int, torch.__version__.split(".")[:2])
    if (major, minor) < target_torch.OLDEST:
        raise BuildError(
            f"torch {torch.__version__} is installed and {target_torch.REQUIREMENT} is needed",
            f'run: pip install "{target_torch.REQUIREMENT}"',
        )
    _check_host_tools()
    return {
        "install_requires": [f"torch=={major}.{minor}.*"],
        "ext_modules": [_extension(cuda.plan())],
        "cmdclass": {"build_ext": BuildExtension, "build_py": BuildPython},
    }


def is_debug() -> bool:
    """Return whether DEBUG=1 is set."""
    return os.environ.get("DEBUG") == "1"


def link_flags() -> list[str]:
    """Return the linker's flags. Only debug builds keep the names of local functions, a tenth of the module's size."""
    return ["-fopenmp"] if is_debug() else ["-fopenmp", "-Wl,--discard-all"]


def compile_flags(toolkit: cuda.Toolkit | None = None) -> dict[str, list[str]]:
    """Return the compiler's flags for all sources; torch adds the -std that its headers need."""
    if is_debug():
        host, device = ["-O0", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"], ["-O0", "-g", "-G"]
    else:
        # -g0, because the debug information that Python's own flags may request makes the module 20 times as large.
        host, device = ["-O3", "-g0"], ["-O3", "-Xfatbin", "-compress-all"]
        if toolkit and int(toolkit.version.split(".")[0]) >= 13:  # older drivers cannot load this compression
            device.append("--compress-mode=size")
    # Restore the operators and conversions of __half and __nv_bfloat16 that torch's flags disable.
    disabled = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
    device += ["-fmad=false", *(f"-U__CUDA_NO_{name}__" for name in disabled)]
    both = ["-fvisibility=hidden", "-Wall"]
    # Without -fopenmp, at::parallel_for would silently be serial.
    return {"cxx": [*host, "-fopenmp", *both], "nvcc": [*device, f"-Xcompiler={','.join(both)}"]}


class BuildPython(build_py):
    """Copies the Python modules into build_lib, which all builds share and from which pip installs all files."""

    def run(self):
        """Remove the copies of the last build first, because some of the modules may have been deleted since."""
        shutil.rmtree(Path(self.build_lib) / "layernorm_ext", ignore_errors=True)
        super().run()


class BuildExtension(cpp_extension.BuildExtension):
    """Compiles the kernels once per instruction set and writes _build_info.py."""

    def finalize_options(self):
        """Keep the objects of each version of torch, and let ninja decide which are out of date.

        An editable installation would otherwise compile everything again, because its build_temp is a temporary folder.
        """
        super().finalize_options()
        build_base = self.get_finalized_command("build").build_base
        abi = sysconfig.get_config_var("SOABI")  # names the version, free threading, debug builds and the platform
        self.build_temp = os.path.join(build_base, f"{abi}-torch-{torch.__version__}")
        self.force = True

    def run(self):
        """Report the plan, build with as many compiler processes as max_jobs() allows, and record the plan."""
        plan = self.extensions[0].plan
        target = "CUDA and the CPU" if plan.toolkit else "the CPU alone"
        # pip shows warnings even where it hides the other output of a build.
        warnings.warn(f"layernorm-ext is built for {target}: {plan.reason}", stacklevel=1)
        os.environ.setdefault("MAX_JOBS", str(jobs.max_jobs()))
        super().run()
        version = self.get_finalized_command("egg_info").egg_version  # with the tag of a wheel
        info = f"{_build_info(plan)}version = {version!r}\n"
        Path(self.get_ext_fullpath(NAME)).with_name("_build_info.py").write_text(info)

    def build_extension(self, ext):
        """Compile all sources in one ninja file, or reuse the module of the last build if the fingerprint is the same.

        Without this, ninja would compile everything again when the folder of torch changes: a first `pip install .`
        installs torch into pip's isolated build environment, and a second one finds it in the target environment.
        """
        library = Path(self.get_ext_fullpath(ext.name))
        last_build = Path(self.build_temp) / f"{fingerprint(ext.plan)}{library.suffix}"
        if last_build.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(last_build, library)
            return
        if not cpp_extension.is_ninja_available():  # without it, torch would ignore the flags of single sources
            raise BuildError("ninja is not on PATH", "pip install ninja")
        flags = _write_kernel_sources(Path(self.build_temp).parent)  # one path for all versions of torch, for ccache
        ext.sources += flags
        with _flags_of_sources(flags):
            super().build_extension(ext)
        for older_build in last_build.parent.glob(f"*{library.suffix}"):
            older_build.unlink()
        shutil.copy(library, last_build)


def cpu_capabilities() -> dict[str, list[str]]:
    """Return the CPU capabilities to build, with their flags."""
    if not cuda.is_native():
        return CPU_CAPABILITIES
    own = torch.backends.cpu.get_cpu_capability()
    own = own if own in CPU_CAPABILITIES else "DEFAULT"
    return {own: CPU_CAPABILITIES[own]}


def _write_kernel_sources(folder: Path) -> dict[str, list[str]]:
    """Write a source for each CPU capability and kernel source, which it includes; return the flags of each."""
    flags = {}
    for capability, options in cpu_capabilities().items():
        for source in map(Path, KERNEL_SOURCES):
            written = folder / "kernels" / capability / source.name
            text = f'#define CPU_CAPABILITY {capability}\n#include "{source.resolve()}"\n'
            if not written.exists() or written.read_text() != text:  # ninja compiles files again that have a new time
                written.parent.mkdir(parents=True, exist_ok=True)
                written.write_text(text)
            # The kernels for images on CPUs without AVX2 are optimized for size: 0.2 MB less.
            size = ["-Os"] if IS_X86 and capability == "DEFAULT" and source.stem == "channels_first" else []
            flags[str(written)] = [*KERNEL_FLAGS, *options, *size]
    return flags


@contextlib.contextmanager
def _flags_of_sources(flags: dict[str, list[str]]) -> Iterator[None]:
    """Add flags of single sources to the ninja file that torch writes, and start the longest compilations first.

    torch has one set of flags for all C++ sources. In a ninja file, a build statement may extend a variable for itself,
    and ninja starts the statements in their order, as many at a time as there are jobs.
    """
    flags = {os.path.abspath(source): " ".join(options) for source, options in flags.items()}
    write_ninja_file = cpp_extension._write_ninja_file

    def source(statement: str) -> str:
        return re.search(r": \w+ (.+)", statement)[1].replace("$ ", " ")

    def with_flags(statement: str) -> str:
        options = flags.get(source(statement))
        return f"{statement}\n  post_cflags = $post_cflags {options}" if options else statement

    def write(path: str, **arguments):
        write_ninja_file(path, **arguments)
        lines = Path(path).read_text().splitlines()
        statements = [line for line in lines if line.startswith("build ")]
        # CUDA kernels, then CPU kernels, then the sources that include torch
        statements.sort(key=lambda line: (not line.endswith(".cu"), source(line) not in flags))
        others = [line for line in lines if not line.startswith("build ")]
        Path(path).write_text("\n".join([*others, *map(with_flags, statements), ""]))

    with mock.patch.object(cpp_extension, "_write_ninja_file", write):
        yield


def fingerprint(plan: cuda.Plan) -> str:
    """Hash everything that determines the compiled module, but not the folder of torch."""
    compiler = _host_compiler()
    inputs = [_build_info(plan), torch.version.git_version, *compiler, cuda.output(*compiler, "--version")]
    inputs += [f"{name}={value}" for name, value in sorted(os.environ.items()) if "FLAGS" in name]
    files = [*Path("csrc").rglob("*.[ch]*"), *Path("build_support").glob("*.py")]
    inputs += [f"{path}\n{path.read_text()}" for path in sorted(files)]
    return hashlib.sha256("\n".join(inputs).encode()).hexdigest()


def _extension(plan: cuda.Plan):
    arguments = {
        "define_macros": [(f"WITH_{capability}", None) for capability in cpu_capabilities()],
        "extra_compile_args": compile_flags(plan.toolkit),
        "extra_link_args": link_flags(),
    }
    if plan.toolkit:
        os.environ["TORCH_CUDA_ARCH_LIST"] = plan.architectures
        cpp_extension.CUDA_HOME = str(plan.toolkit.home)
        arguments["define_macros"].append(("WITH_CUDA", None))
        extension = cpp_extension.CUDAExtension(NAME, SOURCES + CUDA_SOURCES, **arguments)
        _link_versioned_cudart(extension)
    else:
        extension = cpp_extension.CppExtension(NAME, SOURCES, **arguments)
    extension.plan = plan
    return extension


def _link_versioned_cudart(extension):
    """Link libcudart.so.X if there is no libcudart.so, as in NVIDIA's pip packages."""
    names = {path.name for folder in extension.library_dirs for path in Path(folder).glob("libcudart.so*")}
    if names and "libcudart.so" not in names:
        extension.libraries[extension.libraries.index("cudart")] = f":{min(names)}"


def _build_info(plan: cuda.Plan) -> str:
    facts = {
        "torch_version": str(torch.__version__),
        "torch_cuda_version": torch.version.cuda,
        "with_cuda": plan.toolkit is not None,
        "cuda_reason": plan.reason,
        "cuda_architectures": plan.architectures,
        "cpu_capabilities": tuple(cpu_capabilities()),
        "debug": is_debug(),
    }
    return "# Written by the build.\n" + "".join(f"{name} = {value!r}\n" for name, value in facts.items())


def _host_compiler() -> list[str]:
    return os.environ.get("CXX", "c++").split()  # may begin with a wrapper and end with options


def _check_host_tools():
    for program in _host_compiler():
        if not program.startswith("-") and shutil.which(program) is None:
            raise BuildError(f"the C++ compiler {program!r} is not on PATH", "install g++, or set CXX")
    include = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(include, "Python.h")):
        raise BuildError(f"Python.h is not in {include}", "install Python's headers (python3-dev on Debian)")
