"""Describes layernorm_ext._C: its sources and the flags of each.

Environment variables, besides those of cuda.py and of torch.utils.cpp_extension (MAX_JOBS, CXX, ...):
  DEBUG  1: no optimisation, debug information, assertions
"""

import glob
import os
import platform
import shutil
import sysconfig
import warnings
from pathlib import Path

import torch
from torch.utils import cpp_extension

from . import cuda, target_torch
from .errors import BuildError

NAME = "layernorm_ext._C"
SOURCES = [
    *("csrc/registration.cpp", "csrc/ops.cpp", "csrc/autograd.cpp", "csrc/channels_first.cpp"),
    *("csrc/bindings.cpp", "csrc/cpu/dispatch.cpp"),
]
CUDA_SOURCES = sorted(glob.glob("csrc/cuda/*.cpp") + glob.glob("csrc/cuda/*.cu"))

# These see no torch header and are compiled once per instruction set.
KERNEL_SOURCES = ["csrc/cpu/forward.cpp", "csrc/cpu/backward.cpp", "csrc/cpu/channels_first.cpp"]
# Only the multiply-adds that are written out may be fused: results must not depend on the compiler's choice.
KERNEL_FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
DEVICE_FLAGS = ["-fmad=false"]

IS_X86 = platform.machine() in ("x86_64", "AMD64")
CPU_CAPABILITIES = {"DEFAULT": []}
if IS_X86:
    CPU_CAPABILITIES["AVX2"] = ["-mavx2", "-mfma", "-mf16c"]
    CPU_CAPABILITIES["AVX512"] = [
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
    ]


def setup_arguments() -> dict:
    """Return what setup() needs to build against the torch that is importable here."""
    major, minor = _check_torch()
    _check_host_tools()
    plan = cuda.plan(has_kernels=bool(CUDA_SOURCES))
    return {
        "install_requires": [f"torch=={major}.{minor}.*"],
        "ext_modules": [_extension(plan)],
        "cmdclass": {"build_ext": BuildExtension},
    }


def is_debug() -> bool:
    """Say whether DEBUG=1 is set."""
    return os.environ.get("DEBUG") == "1"


def compile_flags() -> dict[str, list[str]]:
    """Return the flags of all sources. No -std: torch adds the one that its headers need."""
    if is_debug():
        host, device = ["-O0", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"], ["-O0", "-g", "-G"]
    else:
        # -g0: Python's own flags may ask for debug information, which makes the module twenty times as large.
        host, device = ["-O3", "-g0"], ["-O3", "-Xfatbin", "-compress-all"]
    # torch's own flags take the operators and conversions of __half and __nv_bfloat16 away.
    hidden = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
    device += [*DEVICE_FLAGS, *(f"-U__CUDA_NO_{what}__" for what in hidden)]
    # Without -fopenmp, at::parallel_for is silently serial.
    both = ["-fvisibility=hidden", "-Wall"]
    return {"cxx": [*host, "-fopenmp", *both], "nvcc": [*device, f"-Xcompiler={','.join(both)}"]}


def kernel_flags(capability: str) -> list[str]:
    """Return what KERNEL_SOURCES are compiled with for an instruction set, besides compile_flags()."""
    return [*KERNEL_FLAGS, *CPU_CAPABILITIES[capability], f"-DCPU_CAPABILITY={capability}"]


class BuildExtension(cpp_extension.BuildExtension):
    """Compiles the kernels once per instruction set, and leaves a record of the build in the package."""

    def finalize_options(self):
        """Keep the objects of different torch versions apart, and let ninja judge which are out of date."""
        super().finalize_options()
        self.build_temp = os.path.join(self.build_temp, f"torch-{torch.__version__}")
        self.force = True

    def run(self):
        """Build, say for what, and record it."""
        plan = self.extensions[0].plan
        target = "CUDA and the CPU" if plan.toolkit else "the CPU alone"
        # A warning, because recent versions of pip show those of a build even when they hide its output.
        warnings.warn(f"layernorm-ext is built for {target}: {plan.reason}", stacklevel=1)
        super().run()
        record = Path(self.get_ext_fullpath(NAME)).with_name("_build_info.py")
        record.write_text(_build_info(plan))

    def build_extension(self, ext):
        """Compile the kernels, then everything else."""
        for capability in CPU_CAPABILITIES:
            flags = {**ext.extra_compile_args}
            flags["cxx"] = [*flags["cxx"], *kernel_flags(capability)]
            ext.extra_objects += self.compiler.compile(
                KERNEL_SOURCES,
                output_dir=os.path.join(self.build_temp, capability),
                macros=ext.define_macros,
                extra_postargs=flags,
            )
        super().build_extension(ext)


def _extension(plan: cuda.Plan):
    arguments = {
        "define_macros": [("LAYERNORM_X86", None)] if IS_X86 else [],
        "extra_compile_args": compile_flags(),
        "extra_link_args": ["-fopenmp"],
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
    """Give the linker libcudart.so.X where there is no libcudart.so, as in NVIDIA's pip packages."""
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
        "cpu_capabilities": tuple(CPU_CAPABILITIES),
        "debug": is_debug(),
    }
    return "# Written by the build.\n" + "".join(f"{name} = {value!r}\n" for name, value in facts.items())


def _check_torch() -> tuple[int, int]:
    major, minor = map(int, torch.__version__.split(".")[:2])
    if (major, minor) < target_torch.OLDEST:
        raise BuildError(
            f"torch {torch.__version__} is installed and {target_torch.REQUIREMENT} is needed",
            f'run: pip install "{target_torch.REQUIREMENT}"',
        )
    return major, minor


def _check_host_tools():
    command = os.environ.get("CXX", "c++")  # may begin with a wrapper and end with options
    for program in command.split():
        if not program.startswith("-") and shutil.which(program) is None:
            raise BuildError(f"the C++ compiler {program!r} is not on PATH", "install g++, or set CXX")
    include = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(include, "Python.h")):
        raise BuildError(f"Python.h is not in {include}", "install Python's headers (python3-dev on Debian)")
