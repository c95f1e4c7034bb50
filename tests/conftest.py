"""What the tests run on, and how."""

from collections.abc import Callable
from dataclasses import dataclass

import hypothesis
import pytest
import torch

import layernorm_ext
from layernorm_ext import _C, _build_info


@dataclass(frozen=True)
class Backend:
    """One implementation of the operators. Tests reach them through this alone."""

    name: str
    device: str
    ops: object  # the namespace of torch.ops
    forward: Callable  # (input, normalized_shape, weight, bias, eps) -> output, mean, rstd
    backward: Callable  # (grad_output, input, normalized_shape, mean, rstd, weight, bias, output_mask)
    layer_norm: Callable  # (input, normalized_shape, weight, bias, eps) -> output, differentiable

    def __str__(self):
        return self.name


def installed(device):
    """The package as it is installed."""
    return Backend(
        name=device,
        device=device,
        ops=torch.ops.layernorm,
        forward=torch.ops.layernorm.forward,
        backward=torch.ops.layernorm.backward,
        layer_norm=layernorm_ext.layer_norm,
    )


def emulated():
    """The CUDA kernels, run on CPU tensors; tests/emulator runs fewer examples, and checks every access."""
    import emulated_build  # of tests/emulator; needs CUDA's headers
    import emulated_ops

    ops = emulated_ops.library(emulated_build.PLAIN).ops
    return Backend(
        name="emulated",
        device="cpu",
        ops=ops,
        forward=ops.forward,
        backward=ops.backward,
        layer_norm=lambda input, normalized_shape, weight=None, bias=None, eps=1e-5: ops.forward(
            input, normalized_shape, weight, bias, eps
        )[0],
    )


BACKENDS = {"cpu": lambda: installed("cpu"), "cuda": lambda: installed("cuda"), "emulated": emulated}


def pytest_addoption(parser):
    default = "cpu cuda" if torch.cuda.is_available() and _build_info.with_cuda else "cpu"
    parser.addoption(
        "--backends",
        default=default,
        help=f"which of {', '.join(BACKENDS)} to test, in quotes (default: {default})",
    )


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        names = metafunc.config.getoption("backends").split()
        metafunc.parametrize("backend", names, indirect=True, scope="session")


def pytest_collection_modifyitems(items):
    def has_meaning(item):
        backend = getattr(item, "callspec", None) and item.callspec.params.get("backend")
        if backend == "emulated":  # some 10^7 elements a second
            return not item.get_closest_marker("large")
        return backend != "cuda" or "use_threads" not in item.fixturenames  # of the CPU

    items[:] = [item for item in items if has_meaning(item)]


@pytest.fixture(scope="session")
def backend(request):
    return BACKENDS[request.param]()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory():
    """Fill the memory of every new tensor, outputs and workspaces too, with NaN (with 255 if they are bytes).

    What a kernel reads without having written it, or leaves unwritten, then shows up in the results.
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
    """For models so small that threads would only wait for each other."""
    use_threads(1)


def pytest_report_header():
    return f"layernorm_ext: {layernorm_ext.__file__}, CPU kernels {_C.cpu_capability()}, torch {torch.__version__}"


def pytest_configure(config):
    config.addinivalue_line("markers", "large: takes gigabytes or seconds; runs for one instruction set only")
    config.addinivalue_line("markers", "integration: needs the extra test-all; runs with -m integration")


# The same examples every time, so that a failure is due to the change under test; for a search that takes hours,
# HYPOTHESIS_PROFILE=thorough or --hypothesis-profile=thorough.
hypothesis.settings.register_profile("quick", max_examples=100, deadline=None, database=None, derandomize=True)
hypothesis.settings.register_profile("thorough", max_examples=100_000, deadline=None, database=None)
