"""The build: which torch, CUDA or not, what ended up in the binary, and which package is imported."""

import importlib.machinery
import importlib.metadata
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from build_support import cuda, extension, target_torch
from build_support.errors import BuildError
from layernorm_ext import _C, _build_info, _locate

ROOT = Path(__file__).resolve().parents[1]


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


# Which torch


def test_finds_torch_outside_the_isolation(tmp_path):
    """As pip does, hide site-packages from the build by a sitecustomize.py on PYTHONPATH."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.path[:] = [entry for entry in sys.path if not entry.endswith('-packages')]\n"
    )
    code = "from build_support.target_torch import *; print(is_importable(), make_importable(), is_importable())"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONNOUSERSITE": "1"}
    assert run(sys.executable, "-P", "-c", code, env=environment).split() == ["False", "True", "True"]


def test_refuses_an_old_torch(monkeypatch):
    monkeypatch.setattr(extension, "torch", SimpleNamespace(__version__="2.10.1+cu128"))
    with pytest.raises(BuildError, match=r"torch 2\.10\.1\+cu128 is installed and torch>=2\.11 is needed"):
        extension.setup_arguments()


def test_oldest_torch_is_stated_once():
    assert f"torch>={'.'.join(map(str, target_torch.OLDEST))}" == target_torch.REQUIREMENT


def test_refuses_to_build_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "env no-such-compiler -m64")
    with pytest.raises(BuildError, match="the C\\+\\+ compiler 'no-such-compiler' is not on PATH; install g\\+\\+"):
        extension.setup_arguments()


# CUDA or not


class Machine:
    """A made-up machine: its torch, its GPUs and its toolkits."""

    def __init__(self, monkeypatch, folder):
        self.monkeypatch = monkeypatch
        self.folder = folder
        for name in ("FORCE_CUDA", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST"):
            monkeypatch.delenv(name, raising=False)
        self.homes = []
        monkeypatch.setattr(cuda, "_likely_homes", lambda: self.homes)
        self.use_torch("13.0")

    def use_torch(self, cuda_version, gpus=()):
        version = f"2.13.0+cu{cuda_version.replace('.', '')}" if cuda_version else "2.13.0+cpu"
        gpu = SimpleNamespace(
            is_available=lambda: bool(gpus),
            device_count=lambda: len(gpus),
            get_device_capability=gpus.__getitem__,
        )
        fake = SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda_version), cuda=gpu)
        self.monkeypatch.setattr(cuda, "torch", fake)

    def install_toolkit(self, version="13.0", known="sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", header=True):
        home = self.folder / f"cuda-{version}"
        nvcc = home / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "release {version}, V{version}.1" || echo {known}\n')
        nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
        if header:
            (home / "include").mkdir()
            (home / "include" / "cuda_runtime.h").touch()
        self.homes.append(home)
        return home

    def set(self, **variables):
        for name, value in variables.items():
            self.monkeypatch.setenv(name, str(value))


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def test_cuda_is_built_where_it_can_be(machine):
    home = machine.install_toolkit()
    plan = cuda.plan(has_kernels=True)
    assert plan.toolkit == cuda.Toolkit(home, "13.0")
    assert plan.architectures == "8.0;9.0;10.0+PTX"
    assert plan.reason == f"torch 2.13.0+cu130 and the CUDA 13.0 toolkit in {home}"


@pytest.mark.parametrize(
    ("torch_cuda", "has_kernels", "reason"),
    [
        (None, True, "torch 2.13.0+cpu was built without CUDA"),
        ("13.0", False, "this version has no CUDA kernels"),
        ("13.0", True, "no CUDA toolkit was found"),
    ],
)
def test_cpu_alone_has_a_reason_and_forcing_cuda_makes_it_an_error(machine, torch_cuda, has_kernels, reason):
    machine.use_torch(torch_cuda)
    assert cuda.plan(has_kernels) == cuda.Plan(reason)
    machine.set(FORCE_CUDA=1)
    with pytest.raises(BuildError, match=f"FORCE_CUDA=1, but {re.escape(reason)}; .+"):
        cuda.plan(has_kernels)


def test_force_cuda_0_asks_no_further(machine):
    machine.install_toolkit(version="12.4")
    machine.set(FORCE_CUDA=0)
    assert cuda.plan(has_kernels=True) == cuda.Plan("FORCE_CUDA=0")


def test_force_cuda_must_be_0_or_1(machine):
    machine.set(FORCE_CUDA="yes")
    with pytest.raises(BuildError, match="FORCE_CUDA is 'yes', neither 0 nor 1"):
        cuda.plan(has_kernels=True)


def test_a_visible_gpu_without_a_toolkit_is_an_error(machine):
    machine.use_torch("13.0", gpus=[(9, 0)])
    with pytest.raises(BuildError, match="a GPU is visible, but no CUDA toolkit was found; install the CUDA 13.0"):
        cuda.plan(has_kernels=True)


def test_another_major_version_of_cuda_is_an_error(machine):
    home = machine.install_toolkit(version="12.8")
    message = f"torch 2.13.0+cu130 uses CUDA 13.0, but the toolkit in {home} is CUDA 12.8; install the CUDA 13.0"
    with pytest.raises(BuildError, match=re.escape(message)):
        cuda.plan(has_kernels=True)


def test_a_toolkit_that_fits_is_preferred(machine):
    machine.install_toolkit(version="12.8")
    machine.install_toolkit(version="13.0")
    assert cuda.plan(has_kernels=True).toolkit.version == "13.0"


def test_another_minor_version_of_cuda_fits(machine):
    machine.install_toolkit(version="13.2")
    assert cuda.plan(has_kernels=True).toolkit.version == "13.2"


def test_missing_headers_are_an_error(machine):
    home = machine.install_toolkit(header=False)
    with pytest.raises(BuildError, match=re.escape(f"include/cuda_runtime.h not found in {home}; install")):
        cuda.plan(has_kernels=True)


def test_cuda_home_comes_first_and_must_be_a_toolkit(machine):
    machine.install_toolkit(version="13.0")
    chosen = machine.install_toolkit(version="13.1")
    machine.set(CUDA_HOME=chosen)
    assert cuda.find_toolkit().home == chosen
    machine.set(CUDA_HOME="/nowhere")
    with pytest.raises(BuildError, match=r"bin/nvcc and include/cuda_runtime\.h not found in /nowhere; install"):
        cuda.find_toolkit()


def test_nvcc_on_path_may_be_a_wrapper(monkeypatch, tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text('#!/bin/sh\necho "#$ TOP=/real/toolkit/bin/.." >&2\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(nvcc.parent), prepend=os.pathsep)
    monkeypatch.setattr(
        cuda, "torch", SimpleNamespace(__file__="/x/torch/__init__.py", version=SimpleNamespace(cuda="13.0"))
    )
    homes = list(cuda._likely_homes())
    assert homes[0] == tmp_path
    assert homes[2] == Path("/real/toolkit")
    assert homes[-1] == Path("/x/nvidia/cu13")


def test_architectures(machine):
    machine.install_toolkit(known="sm_75 sm_80 sm_86 sm_90")
    assert cuda.plan(has_kernels=True).architectures == "8.0;9.0+PTX"
    machine.use_torch("13.0", gpus=[(9, 0), (8, 6), (9, 0)])
    assert cuda.plan(has_kernels=True).architectures == "8.6;9.0+PTX"
    machine.set(TORCH_CUDA_ARCH_LIST="8.9")
    assert cuda.plan(has_kernels=True).architectures == "8.9"


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (
            [(9, 0), (7, 0)],
            "a visible GPU is sm_70 and the kernels need sm_80 or newer; hide it with CUDA_VISIBLE_",
        ),
        (
            [(12, 1)],
            "a visible GPU is sm_121, unknown to the CUDA 13.0 toolkit in .*; set CUDA_HOME to a newer",
        ),
    ],
)
def test_gpus_that_cannot_be_served_are_an_error(machine, gpus, message):
    machine.install_toolkit()
    machine.use_torch("13.0", gpus)
    with pytest.raises(BuildError, match=message):
        cuda.plan(has_kernels=True)


# What is in the binary


def test_debug(monkeypatch):
    monkeypatch.setenv("DEBUG", "1")
    debug = extension.compile_flags()
    assert {"-O0", "-g", "-UNDEBUG"} <= set(debug["cxx"])
    assert "-G" in debug["nvcc"]
    monkeypatch.setenv("DEBUG", "0")
    assert "-O3" in extension.compile_flags()["cxx"]


def test_no_fast_math():
    flags = [*extension.compile_flags()["cxx"], *extension.compile_flags()["nvcc"], *extension.KERNEL_FLAGS]
    assert not [flag for flag in flags if re.search("fast|unsafe|finite", flag)]


@pytest.fixture(scope="module")
def functions():
    """The instructions of every function of the compiled module, by its C++ name."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("only on x86-64 is there more than one instruction set")
    if _build_info.debug:
        pytest.skip("built with DEBUG=1, without optimisation")
    instructions = defaultdict(list)
    for line in run("objdump", "-d", "-C", "--no-show-raw-insn", _C.__file__).splitlines():
        if start := re.fullmatch(r"[0-9a-f]+ <(.*)>:", line):
            function = instructions[start[1]]
        elif "\t" in line:
            function.append(line.split("\t", 1)[1])
    return instructions


@pytest.mark.parametrize("kernel", ["forward", "backward"])
@pytest.mark.parametrize(("capability", "register"), [("AVX2", "%ymm"), ("AVX512", "%zmm")])
def test_kernels_use_vectors(functions, kernel, capability, register):
    bodies = [body for name, body in functions.items() if capability in name and kernel in name.lower()]
    fused = [i for body in bodies for i in body if re.match("vfn?m(add|sub)", i) and register in i]
    assert len(fused) >= 10


def test_vector_instructions_stay_in_the_kernels(functions):
    """Elsewhere they crash older CPUs, as when the linker keeps one instruction set's std::max for all.

    What is in an anonymous namespace, the linker does not share.
    """
    for name, body in functions.items():
        if not re.search(r"AVX|\(anonymous namespace\)", name):
            assert not [i for i in body if i.startswith("v") or "%zmm" in i], name


def test_the_torch_built_against_is_required():
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"torch=={minor}.*" in importlib.metadata.requires("layernorm-ext")


def test_build_info_describes_the_build():
    assert _build_info.torch_version == torch.__version__
    assert _build_info.cuda_reason
    assert _build_info.with_cuda == bool(_build_info.cuda_architectures)


# Which package is imported


@pytest.fixture
def checkout(tmp_path):
    """A copy of the Python sources without a compiled module, as in a fresh clone."""
    shutil.copytree(
        ROOT / "layernorm_ext", tmp_path / "layernorm_ext", ignore=shutil.ignore_patterns("*.so", "_build*")
    )
    return tmp_path


@pytest.mark.parametrize("where", [["-m", "layernorm_ext"], ["-c", "import layernorm_ext"]])
def test_the_installed_package_is_found_from_a_checkout(checkout, where):
    run(sys.executable, *where, cwd=checkout)


def test_every_module_is_the_installed_one(checkout):
    code = (
        "import layernorm_ext, pathlib, sys; "
        "modules = [module for name, module in sys.modules.items() if name.startswith('layernorm_ext')]; "
        "print(*{pathlib.Path(module.__file__).parent for module in modules})"
    )
    assert run(sys.executable, "-c", code, cwd=checkout).strip() == str(Path(_C.__file__).parent)


def test_without_an_installed_package_the_checkout_says_what_to_do(checkout):
    result = subprocess.run(
        [sys.executable, "-S", "-c", "import layernorm_ext"], cwd=checkout, capture_output=True, text=True
    )
    message = f"not installed in .*, and {checkout}/layernorm_ext is only its source; run `pip install .`"
    assert re.search(message, result.stderr)


def test_a_package_built_in_place_is_left_alone(tmp_path):
    (tmp_path / f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}").touch()
    spec = importlib.machinery.ModuleSpec("layernorm_ext", None, origin=str(tmp_path / "__init__.py"), is_package=True)
    spec.submodule_search_locations.append(str(tmp_path))
    before = dict(sys.modules)
    _locate.use_installed_package(spec)
    assert sys.modules == before


@pytest.mark.parametrize(
    ("built", "cuda_version"), [("2.12.1+cpu", None), (f"{torch.__version__}", "99.0")], ids=["torch", "CUDA"]
)
def test_a_torch_that_does_not_fit_is_refused(monkeypatch, built, cuda_version):
    monkeypatch.setattr(_build_info, "torch_version", built)
    monkeypatch.setattr(_build_info, "torch_cuda_version", cuda_version)
    monkeypatch.setattr(_build_info, "with_cuda", cuda_version is not None)
    message = f"compiled for torch {built} (CUDA {cuda_version}) and does not fit torch {torch.__version__}"
    with pytest.raises(ImportError, match=re.escape(message)):
        _locate.check_torch()


@pytest.mark.parametrize("local", ["", "+cpu", "+cu126", "a0+git1234"])
def test_another_build_of_the_same_minor_version_fits(monkeypatch, local):
    minor = ".".join(torch.__version__.split(".")[:2])
    monkeypatch.setattr(_build_info, "torch_version", f"{minor}.9{local}")
    monkeypatch.setattr(_build_info, "with_cuda", False)
    _locate.check_torch()
