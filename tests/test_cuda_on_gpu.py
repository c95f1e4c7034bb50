"""Promises that need a GPU: every kernel, streams, CUDA graphs, threads, several GPUs, autocast and torch.compile."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import installed
from family import with_gradients
from reference import F32
from shapes import all_dtypes, assert_same_bits, check, check_images, random_args, run, run_images

from layernorm_ext import LayerNorm, LayerNorm2d, _build_info

pytestmark = pytest.mark.skipif(
    not (_build_info.with_cuda and torch.cuda.is_available()), reason="needs a GPU, and the package built with CUDA"
)

CUDA = installed("cuda")

# Rows and columns for each path: a tile of a few threads or of many, a cluster, two launches, and one launch for all
# gradients.
SHAPES = [(300, 64), (70, 4096), (9, 40000), (3, 400000), (20, 768)]
# Images [N, C, P] whose channels fit into shared memory in both passes, in forward alone, and in neither.
IMAGES = [(3, 64, 300), (2, 500, 70), (2, 1000, 50)]
all_shapes = pytest.mark.parametrize("shape", [*SHAPES, *IMAGES], ids=str)


def run_kernels(x, dy, w, b):
    """Return the results and gradients of rows or images."""
    return (run if x.dim() == 2 else run_images)(CUDA, x, dy, w, b)


@all_dtypes
def test_every_path(dtypes):
    """compute-sanitizer runs this.

    Rows are the longest of each tile, or have one more element, which makes them unaligned. Images have fewer pixels
    than a warp has lanes, or more, and are staged in shared memory or not.
    """
    vector = 16 // dtypes[0].itemsize
    limits = (1, 8, 16, 32, 64, 128, 1024, 2048, 2049, 80 * 1024)
    rows = [(5, limit * vector + more) for limit in limits for more in (0, 1)]
    for shape in [*rows, (3, 7, 5), (2, 64, 33), (1, 700, 40), (1, 1700, 40)]:
        x, dy, w, b = random_args(CUDA, dtypes, *shape)
        checked = check if len(shape) == 2 else check_images
        checked(run_kernels(x, dy, w, b), x, dy, w, b, context=shape)


@all_shapes
def test_cuda_graphs(shape):
    """Replays of forward and backward with other numbers give the bits of eager calls.

    A capture records its own stream alone, so that all kernels must run on the current stream.
    """
    x, dy, w, b = random_args(CUDA, (F32, F32), *shape)
    module = (LayerNorm if x.dim() == 2 else LayerNorm2d)(shape[1], device="cuda")
    module.load_state_dict({"weight": w, "bias": b})
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(module), (x.requires_grad_(),))
    for _ in range(2):
        x, dy = torch.randn_like(x).requires_grad_(), torch.randn_like(dy)
        results = [with_gradients(lambda x, *_, f=f: [f(x)], [x, *f.parameters()], [dy]) for f in (graphed, module)]
        for actual, expected in zip(*results, strict=True):
            assert_same_bits(actual, expected)


def test_two_python_threads_on_two_streams():
    calls = [random_args(CUDA, (F32, F32), *shape) for shape in SHAPES[:2]]
    expected = [run_kernels(*arguments) for arguments in calls]
    torch.cuda.synchronize()

    def work(arguments, expected):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                actual = run_kernels(*arguments)
                torch.cuda.current_stream().synchronize()
                assert_same_bits(actual, expected)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, calls, expected))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@all_shapes
def test_tensors_on_another_gpu_than_the_current_one(shape):
    arguments = random_args(CUDA, (F32, F32), *shape)
    expected = run_kernels(*arguments)
    actual = run_kernels(*(t.to("cuda:1") for t in arguments))
    assert torch.cuda.current_device() == 0 and {t.device for t in actual} == {torch.device("cuda:1")}
    torch.testing.assert_close([t.cpu() for t in actual], [t.cpu() for t in expected], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_keeps_the_dtype_of_the_input(dtype):
    """torch's own layer norm returns float32."""
    module = LayerNorm(64, device="cuda")
    with torch.autocast("cuda", dtype):
        assert module(torch.randn(3, 64, device="cuda", dtype=dtype)).dtype == dtype
        assert module(torch.randn(3, 64, device="cuda")).dtype == torch.float32


def test_compiled_module():
    """Inductor calls the operator, so that the output has its bits."""
    torch._dynamo.reset()
    module = LayerNorm(64, device="cuda")
    compiled = torch.compile(module, fullgraph=True)
    x = torch.randn(5, 64, device="cuda")
    assert torch.equal(compiled(x), module(x))
    tensors = [x.requires_grad_(), *module.parameters()]
    results = [with_gradients(lambda x, *_, f=f: [f(x)], tensors) for f in (compiled, module)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_no_memory_is_kept():
    arguments = random_args(CUDA, (F32, F32), 300, 4096)
    run_kernels(*arguments)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        run_kernels(*arguments)
    assert torch.cuda.memory_allocated() == before
