"""The build: which torch, CUDA or not, the contents of the compiled module, and which package is imported."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from setuptools import Distribution

import layernorm_ext
from build_support import BuildError, backend, cuda, extension, jobs, target_torch
from layernorm_ext import _C, _build_info, _compatibility

ROOT = Path(__file__).resolve().parents[1]
MINOR = ".".join(torch.__version__.split(".")[:2])


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


# Which torch


def test_finds_torch_outside_the_isolation(tmp_path):
    """As pip does, a sitecustomize.py on PYTHONPATH hides site-packages from the build."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.path[:] = [entry for entry in sys.path if not entry.endswith('-packages')]\n"
    )
    code = "from build_support.target_torch import *; print(is_importable(), make_importable(), is_importable())"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONNOUSERSITE": "1"}
    assert run(sys.executable, "-P", "-c", code, env=environment).split() == ["False", "True", "True"]


def test_old_torch_is_an_error(monkeypatch):
    monkeypatch.setattr(extension, "torch", SimpleNamespace(__version__="2.10.1+cu128"))
    with pytest.raises(BuildError, match=r"torch 2\.10\.1\+cu128 is installed and torch>=2\.11 is needed"):
        extension.setup_arguments()
    assert f"torch>={'.'.join(map(str, target_torch.OLDEST))}" == target_torch.REQUIREMENT


def test_missing_compiler_is_an_error(monkeypatch):
    monkeypatch.setenv("CXX", "env no-such-compiler -m64")
    with pytest.raises(BuildError, match="the C\\+\\+ compiler 'no-such-compiler' is not on PATH; install g\\+\\+"):
        extension.setup_arguments()


def test_missing_ninja_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(extension.cpp_extension, "is_ninja_available", lambda: False)
    command = SimpleNamespace(build_temp=str(tmp_path), get_ext_fullpath=lambda name: str(tmp_path / "_C.so"))
    with pytest.raises(BuildError, match="ninja is not on PATH; pip install ninja"):
        extension.BuildExtension.build_extension(command, SimpleNamespace(name="_C", plan=cuda.Plan("FORCE_CUDA=0")))


@pytest.mark.parametrize(("system", "name"), [("Darwin", "macOS"), ("Windows", "Windows"), ("FreeBSD", "FreeBSD")])
@pytest.mark.parametrize(
    "step",
    [
        lambda: backend.get_requires_for_build_wheel(),
        lambda: backend.get_requires_for_build_editable(),
        lambda: backend.prepare_metadata_for_build_wheel("."),
        lambda: backend.build_wheel("."),
        lambda: backend.build_editable("."),
        lambda: extension.setup_arguments(),
    ],
    ids=["requires", "requires, editable", "metadata", "wheel", "editable", "setup.py"],
)
def test_other_systems_are_refused_before_anything_is_compiled(monkeypatch, step, system, name):
    """The first step comes before pip downloads torch. Only Linux has sched_getaffinity()."""
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.delattr(os, "sched_getaffinity")
    message = f"cannot be built: {name} is not supported; use Linux .x86-64 or aarch64., on Windows in WSL 2"
    with pytest.raises(BuildError, match=message):
        step()


# CUDA or not


def install_toolkit(home, version, known="sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", header="cuda_runtime.h"):
    """Create the files that the build looks for; nvcc answers --version and --list-gpu-code."""
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include" / header).touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "release {version}, V{version}.1" || echo {known}\n')
    nvcc.chmod(0o755)
    return home


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that simulates a machine with a torch, GPUs, CUDA toolkits and environment variables."""

    def simulate(torch_cuda="13.0", gpus=(), toolkits=("13.0",), header="cuda_runtime.h", **environment):
        version = f"2.13.0+cu{torch_cuda.replace('.', '')}" if torch_cuda else "2.13.0+cpu"
        gpu = SimpleNamespace(
            is_available=lambda: bool(gpus), device_count=lambda: len(gpus), get_device_capability=gpus.__getitem__
        )
        fake = SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=torch_cuda), cuda=gpu)
        monkeypatch.setattr(cuda, "torch", fake)
        homes = [install_toolkit(tmp_path / f"cuda-{toolkit}", toolkit, header=header) for toolkit in toolkits]
        monkeypatch.setattr(cuda, "_likely_homes", lambda: homes)
        for name in ("FORCE_CUDA", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "USE_NATIVE_ARCH"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return homes

    return simulate


@pytest.mark.parametrize(
    ("simulated", "toolkit", "architectures"),
    [
        ({"toolkits": ["12.8", "13.2"]}, "13.2", "8.0;9.0;10.0+PTX"),
        ({"gpus": [(9, 0), (8, 6), (9, 0)]}, "13.0", "8.6;9.0+PTX"),
        ({"gpus": [(9, 0)], "TORCH_CUDA_ARCH_LIST": "8.9"}, "13.0", "8.9"),
        ({"gpus": [(9, 0)], "USE_NATIVE_ARCH": "1"}, "13.0", "9.0+PTX"),
        ({"FORCE_CUDA": "1", "USE_NATIVE_ARCH": "1"}, "13.0", "8.0;9.0;10.0+PTX"),
    ],
)
def test_toolkit_that_matches_torch_enables_cuda(machine, simulated, toolkit, architectures):
    home = machine(**simulated)[-1]
    reason = f"torch 2.13.0+cu130 and the CUDA {toolkit} toolkit in {home}"
    assert cuda.plan() == cuda.Plan(reason, cuda.Toolkit(home, toolkit), architectures)


def test_cuda_home_is_preferred(machine, tmp_path):
    chosen = install_toolkit(tmp_path / "chosen", "13.1", known="sm_75 sm_80 sm_86 sm_90")
    machine(CUDA_HOME=str(chosen))
    plan = cuda.plan()
    assert plan.toolkit.home == chosen and plan.architectures == "8.0;9.0+PTX"


@pytest.mark.parametrize(
    ("simulated", "reason"),
    [
        ({"torch_cuda": None}, "torch 2.13.0+cpu was built without CUDA"),
        ({"toolkits": []}, "no CUDA toolkit was found"),
        ({"toolkits": ["12.4"], "FORCE_CUDA": "0"}, "FORCE_CUDA=0"),
        ({"USE_NATIVE_ARCH": "1"}, "USE_NATIVE_ARCH=1 and no GPU is visible"),
    ],
)
def test_without_cuda_only_the_cpu_kernels_are_built(machine, simulated, reason):
    machine(**simulated)
    assert cuda.plan() == cuda.Plan(reason)


@pytest.mark.parametrize(
    ("simulated", "message"),
    [
        ({"FORCE_CUDA": "yes"}, "FORCE_CUDA is 'yes', neither 0 nor 1"),
        ({"FORCE_CUDA": "1", "torch_cuda": None}, r"FORCE_CUDA=1, but torch 2\.13\.0\+cpu was built without CUDA; .+"),
        ({"FORCE_CUDA": "1", "toolkits": []}, "FORCE_CUDA=1, but no CUDA toolkit was found; install"),
        ({"gpus": [(9, 0)], "toolkits": []}, "a GPU is visible, but no CUDA toolkit was found; install the CUDA 13.0"),
        (
            {"toolkits": ["12.8"]},
            r"torch 2\.13\.0\+cu130 uses CUDA 13.0, but the toolkit in .*cuda-12.8 is CUDA 12.8; install the CUDA 13.0",
        ),
        ({"header": "other.h"}, r"include/cuda_runtime\.h not found in .*cuda-13\.0; install"),
        ({"CUDA_HOME": "/nowhere"}, r"bin/nvcc and include/cuda_runtime\.h not found in /nowhere; install"),
        ({"gpus": [(9, 0), (7, 0)]}, "GPU is sm_70 and the kernels need sm_80 or newer; hide it with CUDA_VISIBLE_"),
        ({"gpus": [(12, 1)]}, "GPU is sm_121, unknown to the CUDA 13.0 toolkit in .*; set CUDA_HOME to a newer"),
    ],
)
def test_impossible_builds_are_errors(machine, simulated, message):
    machine(**simulated)
    with pytest.raises(BuildError, match=message):
        cuda.plan()


def test_a_compiler_that_prints_no_version_is_an_error(tmp_path):
    nvcc = install_toolkit(tmp_path, "13.0") / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho cannot run\n")
    with pytest.raises(BuildError, match="bin/nvcc --version prints no release, but 'cannot run'; install"):
        cuda._nvcc_version(tmp_path)


def test_toolkit_is_found_behind_a_wrapper_of_nvcc(monkeypatch, tmp_path):
    nvcc = install_toolkit(tmp_path, "13.0") / "bin" / "nvcc"
    nvcc.write_text('#!/bin/sh\necho "#$ TOP=/real/toolkit/bin/.." >&2\n')
    monkeypatch.setenv("PATH", str(nvcc.parent), prepend=os.pathsep)
    fake = SimpleNamespace(__file__="/x/torch/__init__.py", version=SimpleNamespace(cuda="13.0"))
    monkeypatch.setattr(cuda, "torch", fake)
    homes = list(cuda._likely_homes())  # from nvcc's path, its symlink's target, its TOP, and fixed folders
    assert (homes[0], homes[2], homes[-1]) == (tmp_path, Path("/real/toolkit"), Path("/x/nvidia/cu13"))


# How many compilers run at once


GIB = 1024**3
JOBS = [
    pytest.param({}, 64, id="no limits"),
    pytest.param({"proc/self/cgroup": "0::/\n"}, 64, id="no files"),
    pytest.param({"sys/fs/cgroup/memory.max": f"{8 * GIB}\n"}, 4, id="memory"),
    pytest.param({"sys/fs/cgroup/memory.max": f"{GIB}\n"}, 1, id="little memory"),
    pytest.param({"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 64, id="unlimited"),
    pytest.param({"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3, id="cores"),
    pytest.param({"sys/fs/cgroup/cpu.max": "20000 100000\n"}, 1, id="less than a core"),
    pytest.param(
        {
            "proc/self/cgroup": "0::/user.slice/build.scope\n",
            "sys/fs/cgroup/user.slice/build.scope/memory.max": f"{16 * GIB}\n",
            "sys/fs/cgroup/user.slice/build.scope/cpu.max": "700000 100000\n",
        },
        7,
        id="nested group",
    ),
    pytest.param(
        {
            "proc/self/cgroup": "0::/user.slice/build.scope\n",
            "sys/fs/cgroup/user.slice/build.scope/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{6 * GIB}\n",
        },
        3,
        id="ancestor",
    ),
    pytest.param(
        {"proc/self/cgroup": "0::/../other\n", "sys/fs/cgroup/memory.max": f"{8 * GIB}\n"}, 4, id="outside the root"
    ),
    pytest.param(
        {
            "proc/self/cgroup": "5:memory:/docker/1f\n4:cpu,cpuacct:/docker/1f\n1:name=systemd:/docker/1f\n0::/\n",
            "sys/fs/cgroup/memory/docker/1f/memory.limit_in_bytes": f"{10 * GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/1f/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/1f/cpu.cfs_period_us": "100000\n",
        },
        5,
        id="version 1, memory",
    ),
    pytest.param(
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/1f\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "600000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        6,
        id="version 1, cores, the container's group as the root",
    ),
]


@pytest.mark.parametrize(("files", "expected"), JOBS)
def test_compilers_respect_the_limits_of_a_container(monkeypatch, tmp_path, files, expected):
    """The host has 64 cores and 256 GiB."""
    sizes = {"SC_PHYS_PAGES": 256 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    if files:
        files = {"proc/self/cgroup": "0::/\n"} | files
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert jobs.max_jobs(tmp_path) == expected


def test_max_jobs_of_this_machine():
    assert 1 <= jobs.max_jobs() <= len(os.sched_getaffinity(0))


# The compiled module


@pytest.mark.skipif(not extension.IS_X86, reason="other CPUs have one capability")
@pytest.mark.parametrize("own", ["AVX512", "AVX2", "DEFAULT"])
def test_native_builds_have_one_cpu_capability(monkeypatch, tmp_path, own):
    monkeypatch.setenv("USE_NATIVE_ARCH", "1")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: own)
    assert list(extension.cpu_capabilities()) == [own]
    assert f"cpu_capabilities = {(own,)}" in extension._build_info(cuda.Plan("FORCE_CUDA=0"))


@pytest.mark.parametrize(
    ("built", "used"), [(("AVX512",), "AVX2"), (("AVX2",), "AVX512"), (("AVX512",), "DEFAULT"), (("AVX2",), "DEFAULT")]
)
def test_native_build_on_another_cpu_is_an_error(monkeypatch, built, used):
    monkeypatch.setattr(_build_info, "cpu_capabilities", built)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: used)
    with pytest.raises(ImportError, match=f"compiled for {built[0]} alone and torch uses {used} on this machine"):
        _compatibility.check_torch()


def test_unchanged_build_is_reused(monkeypatch, tmp_path):
    """The compiled module of the last build is copied if nothing but the folder of torch has changed."""
    plan = cuda.Plan("FORCE_CUDA=0")
    library = tmp_path / "lib" / "_C.so"
    command = SimpleNamespace(build_temp=str(tmp_path), get_ext_fullpath=lambda name: str(library))
    (tmp_path / "csrc").mkdir()
    source = tmp_path / "csrc" / "host.cpp"
    source.write_text("int x;")
    monkeypatch.chdir(tmp_path)
    fingerprint = extension.fingerprint(plan)
    (tmp_path / f"{fingerprint}.so").write_text("compiled")
    monkeypatch.setattr(torch, "__file__", "/elsewhere/torch/__init__.py")
    extension.BuildExtension.build_extension(command, SimpleNamespace(name=extension.NAME, plan=plan))
    assert library.read_text() == "compiled"

    changed = [extension.fingerprint(cuda.Plan("no CUDA toolkit was found"))]
    for name, value in (("CXXFLAGS", "-O1"), ("DEBUG", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            changed.append(extension.fingerprint(plan))
    source.write_text("int y;")
    changed.append(extension.fingerprint(plan))
    assert len({fingerprint, *changed}) == 5


def test_modules_deleted_since_the_last_build_are_not_installed(tmp_path):
    deleted = tmp_path / "layernorm_ext" / "deleted.py"
    deleted.parent.mkdir()
    deleted.touch()
    command = extension.BuildPython(Distribution())
    command.build_lib = str(tmp_path)
    command.ensure_finalized()
    command.run()
    assert not deleted.exists()


@pytest.mark.parametrize(
    ("debug", "cxx", "nvcc"),
    [("0", {"-O3", "-g0"}, {"-O3", "-fmad=false"}), ("1", {"-O0", "-g", "-UNDEBUG"}, {"-O0", "-G", "-fmad=false"})],
)
def test_flags_keep_precision_and_obey_debug(monkeypatch, debug, cxx, nvcc):
    monkeypatch.setenv("DEBUG", debug)
    assert ("-Wl,--discard-all" in extension.link_flags()) == (debug == "0")
    flags = extension.compile_flags()
    assert cxx <= set(flags["cxx"]) and nvcc <= set(flags["nvcc"])
    assert not re.search("fast|unsafe|finite", " ".join([*flags["cxx"], *flags["nvcc"], *extension.KERNEL_FLAGS]))


@pytest.mark.skipif(not extension.IS_X86 or _build_info.debug, reason="needs an optimised build with vector kernels")
def test_vector_instructions_are_used_in_the_kernels_only():
    """Elsewhere they crash older CPUs, for example if the linker keeps the AVX-512 copy of an inline function.

    Local functions, which the linker does not share, have no names in the module. The kernels are such functions; an
    assertion in policy.h has checked the instruction set that each of them was compiled for.
    """
    symbols = [line.split() for line in run("nm", "--print-size", "--defined-only", _C.__file__).splitlines()]
    ends = {int(symbol[0], 16): int(symbol[0], 16) + int(symbol[1], 16) for symbol in symbols if len(symbol) == 4}
    named, local = defaultdict(list), []
    for line in run("objdump", "-d", "--no-show-raw-insn", _C.__file__).splitlines():
        address, tab, instruction = line.partition(":\t")
        if not tab and (start := re.fullmatch(r"([0-9a-f]+) <(.*)>:", line)):
            name, end = start[2], ends.get(int(start[1], 16), 0)
        elif tab:
            (named[name] if int(address, 16) < end else local).append(instruction)
    for register in ("%ymm", "%zmm"):
        assert len([i for i in local if re.match("vfn?m(add|sub)", i) and register in i]) >= 1000, register
    for name, body in named.items():
        if "AVX" not in name:
            assert not [i for i in body if i.startswith("v") or "%zmm" in i], name


@pytest.mark.skipif(not _build_info.with_cuda or _build_info.debug, reason="needs an optimised build with CUDA")
def test_size_of_a_build_with_cuda():
    """This project allows 10 MB for three architectures, and as much more for each further one."""
    assert Path(_C.__file__).stat().st_size < 10e6 / 3 * max(3, len(_build_info.cuda_architectures.split(";")))


def test_metadata_describes_the_build():
    assert f"torch=={MINOR}.*" in importlib.metadata.requires("layernorm-ext")
    assert _build_info.torch_version == torch.__version__
    assert _build_info.cuda_reason
    assert _build_info.with_cuda == bool(_build_info.cuda_architectures)
    assert layernorm_ext.__version__ == importlib.metadata.version("layernorm-ext")


def test_source_distribution_has_the_documents_and_all_that_they_link_to(tmp_path):
    """A copy is built without the list of an earlier build, because setuptools would add the files in it."""
    ignored = shutil.ignore_patterns(".*_cache", ".git", "__pycache__", "build", "shared", "*.egg-info", "*.so")
    shutil.copytree(ROOT, tmp_path / "checkout", ignore=ignored)
    code = "import setuptools.build_meta; print(setuptools.build_meta.build_sdist('..'))"
    environment = {**os.environ, "FORCE_CUDA": "0"}
    name = run(sys.executable, "-c", code, cwd=tmp_path / "checkout", env=environment).splitlines()[-1]
    shutil.unpack_archive(tmp_path / name, tmp_path)
    folder = tmp_path / name.removesuffix(".tar.gz")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    assert files >= {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Makefile",
        "conftest.py",
        "docs/pytorch.md",
        "tests/kernels/bits.json",
    }
    assert files >= {"tools/cuda_emulator/emulator.h", "tools/cuda_emulator/launch_audit.py"}
    for document in (folder / file for file in files if file.endswith(".md")):
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"


# The self-check


def test_self_check_passes_without_metadata():
    """A copied folder has no metadata, nor have the programs of some bundlers."""
    code = (
        "from importlib.metadata import Distribution, PackageNotFoundError as Missing\n"
        "find = Distribution.from_name\n"
        "def find_others(name):\n"
        "    if name.startswith('layernorm'): raise Missing(name)\n"
        "    return find(name)\n"
        "Distribution.from_name = find_others\n"
        "import runpy, layernorm_ext\n"
        "runpy.run_module('layernorm_ext', run_name='__main__', alter_sys=True)\n"
        "print(layernorm_ext.__version__)"
    )
    output = run(sys.executable, "-c", code)
    assert "cpu     fp32" in output and "FAIL" not in output
    assert output.splitlines()[-1] == importlib.metadata.version("layernorm-ext")


# Which package is imported


@pytest.fixture
def checkout(tmp_path):
    """A copy of the Python sources without a compiled module, as in a fresh clone."""
    ignore = shutil.ignore_patterns("*.so", "_build_info.py")
    shutil.copytree(ROOT / "layernorm_ext", tmp_path / "layernorm_ext", ignore=ignore)
    return tmp_path


def test_checkout_without_compiled_module_uses_the_installed_package(checkout):
    """A compiled module in the checkout, which is broken here, is preferred."""
    compiled = checkout / "layernorm_ext" / Path(_C.__file__).name
    compiled.write_text("broken")
    shutil.copy(_build_info.__file__, checkout / "layernorm_ext")
    code = (
        "import os, sys\n"
        "try: import layernorm_ext\n"
        "except ImportError as error: print(error)\n"
        "for name in [name for name in sys.modules if name.startswith('layernorm_ext')]: del sys.modules[name]\n"
        "os.remove(sys.argv[1])\n"
        "import layernorm_ext, layernorm_ext.__main__\n"
        "print(*{module.__file__ for name, module in sys.modules.items() if name.startswith('layernorm_ext')})"
    )
    error, files = run(sys.executable, "-c", code, str(compiled), cwd=checkout).splitlines()
    assert str(compiled) in error
    files = {Path(file) for file in files.split()}
    files.remove(checkout / "layernorm_ext" / "__init__.py")
    assert files and all(file.is_relative_to(Path(_C.__file__).parent) for file in files)


def test_checkout_without_installed_package_says_what_to_do(checkout):
    command = [sys.executable, "-S", "-c", "import layernorm_ext"]
    result = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    message = (
        f"{checkout}/layernorm_ext has no compiled module and .* has no installed layernorm_ext; run `pip install .`"
    )
    assert result.returncode == 1 and re.search(message, result.stderr.splitlines()[-1])


@pytest.mark.parametrize(
    ("version", "cuda_version", "is_compatible"),
    [(f"{MINOR}.9{local}", None, True) for local in ("", "+cpu", "+cu126", "a0+git1234")]
    + [("2.10.1+cpu", None, False), (torch.__version__, "99.0", False)],
)
def test_torch_of_another_minor_version_or_cuda_is_an_error(monkeypatch, version, cuda_version, is_compatible):
    monkeypatch.setattr(_build_info, "torch_version", version)
    monkeypatch.setattr(_build_info, "torch_cuda_version", cuda_version)
    monkeypatch.setattr(_build_info, "with_cuda", cuda_version is not None)
    message = f"for torch {version} (CUDA {cuda_version}) and does not fit the installed torch {torch.__version__}"
    with contextlib.nullcontext() if is_compatible else pytest.raises(ImportError, match=re.escape(message)):
        _compatibility.check_torch()
