"""Options and fixtures."""

import contextlib
import gc
import importlib
import os

# Threads without work sleep, instead of taking the cores from other processes of pytest-xdist. libgomp reads this when
# torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from support.backends import BACKENDS, EMULATED, PATHS, run_pixels

from layernorm_ext import _C, _build_info
from layernorm_ext.conversion import _candidates


def pytest_addoption(parser):
    default = "cpu cuda" if torch.cuda.is_available() and _build_info.with_cuda else "cpu"
    parser.addoption(
        "--backends", default=default, help=f"which of {', '.join(BACKENDS)} to test, in quotes (default: {default})"
    )


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        names = metafunc.config.getoption("backends").split()
        metafunc.parametrize("backend", names, indirect=True)


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by the marks that this function adds
def pytest_collection_modifyitems(items):
    def backend_of(item):
        return getattr(item, "callspec", None) and item.callspec.params.get("backend")

    def differs_on_path(item, path):
        """Whether a path of the CUDA kernels runs other code for the test than the other backends."""
        dtypes = [item.callspec.params.get("dtype"), *item.callspec.params.get("dtypes", ())]
        if not item.get_closest_marker("every_path") or torch.float64 in dtypes:  # float64 has no kernels
            return False
        # The kernels for images have no clusters, so "clusters" and "launches" run the same ones.
        return path != "launches" or item.callspec.params.get("run") is not run_pixels

    def applies(item):
        backend = backend_of(item)
        if backend in (None, "cpu"):
            return True
        if backend in PATHS and not differs_on_path(item, backend):
            return False
        if "use_threads" in item.fixturenames:  # such tests vary the threads of the CPU
            return False
        return backend == "cuda" or not item.get_closest_marker("large")  # the emulator does 10^7 elements/s

    items[:] = [item for item in items if applies(item)]
    for item in items:
        if item.get_closest_marker("large") and backend_of(item) == "cpu":
            item.add_marker("integration")
        if backend_of(item) in EMULATED or "cuda_emulator" in item.path.parts:
            item.add_marker("emulated")
    # The longest tests, test_lesser_set, start first, so that no worker of pytest-xdist ends long after the others. The
    # tests that use Inductor follow each other, so that one worker runs them all.
    items.sort(key=lambda item: ("lesser_set" not in item.name, not item.get_closest_marker("inductor")))


def pytest_collection_finish():
    gc.freeze()  # Python then does not search the modules and the collected tests for garbage again and again


@pytest.fixture(scope="session")
def torchvision():
    """Return torchvision, which timm, transformers and diffusers import, or None if it is not installed.

    PyPI has it for GPUs only. Next to a torch for the CPU it lacks its operators, which no test calls, and its import
    fails because it describes them.
    """
    register_fake = torch.library.register_fake

    def register_unless_torchvision(name, *args, **kwargs):
        if torch.version.cuda is None and str(name).startswith("torchvision::"):
            return lambda function: function
        return register_fake(name, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ModuleNotFoundError):
        patch.setattr(torch.library, "register_fake", register_unless_torchvision)
        return importlib.import_module("torchvision")


@pytest.fixture
def backend(request):
    backend = BACKENDS[request.param]()
    with backend.limits():
        yield backend


@pytest.fixture(autouse=True)
def independence_of_other_tests():
    # torch.manual_seed() takes a millisecond, because it formats the stack for each kind of device that is not in use.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    torch._dynamo.reset()  # else torch.compile reuses graphs, and gives up recompiling after some of them


@pytest.fixture
def poisoned_memory():
    """Fill every new floating-point tensor, including outputs and workspaces, with NaN.

    Elements that a kernel reads before writing them, or never writes, then show up in the results.
    """
    torch.use_deterministic_algorithms(True)
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        assert torch.empty(3, device=device).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def use_threads():
    """`torch.set_num_threads`, undone after the test."""
    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread(use_threads):
    """One thread, for models so small that threads would only wait for each other."""
    use_threads(1)


@pytest.fixture
def restore_registry(monkeypatch):
    """Forget the classes that the test registers for convert()."""
    monkeypatch.setattr(_candidates, "REGISTRY", dict(_candidates.REGISTRY))


def pytest_report_header():
    return f"layernorm_ext: {_C.__file__}, CPU kernels {_C.cpu_capability()}, torch {torch.__version__}"


def pytest_configure(config):
    config.addinivalue_line("markers", "large: takes gigabytes; on a CPU, only with -m integration, and never emulated")
    config.addinivalue_line("markers", "emulated: runs the CUDA kernels in the emulator, or tests the emulator")
    config.addinivalue_line("markers", "every_path: also for all paths of the CUDA kernels (support/backends.py)")
    config.addinivalue_line("markers", "inductor: uses Inductor, whose first use in a process takes seconds")
    config.addinivalue_line("markers", "integration: takes the extra test-all or minutes; runs with -m integration")
