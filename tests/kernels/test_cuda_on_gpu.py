"""Promises that need a GPU: every kernel, streams, CUDA graphs, threads, several GPUs, autocast and torch.compile."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.backends import assert_same_bits, check, check_images, installed, run, run_images
from support.inputs import all_dtypes, random_args
from support.reference import F32

from layernorm_ext import LayerNorm, _build_info

pytestmark = pytest.mark.skipif(
    not (_build_info.with_cuda and torch.cuda.is_available()), reason="needs a GPU, and the package built with CUDA"
)

CUDA = installed("cuda")

# Rows and columns for each path: rows of a few lanes, of a block and of a cluster, two sizes that take two launches,
# and few rows whose gradients take one launch.
SHAPES = [(300, 64), (70, 4096), (9, 40000), (3, 400000), (2, 3000000), (20, 768)]
# Images [N, C, P] whose channels fit into shared memory in both passes, in forward alone, and in neither.
IMAGES = [(3, 64, 300), (2, 500, 70), (2, 1000, 50)]
all_shapes = pytest.mark.parametrize("shape", [*SHAPES, *IMAGES], ids=str)


def run_kernels(x, dy, w, b):
    """Return the results and gradients of rows or images."""
    return (run if x.dim() == 2 else run_images)(CUDA, x, dy, w, b)


@all_dtypes
def test_every_path(dtypes):
    """`make gpu-sanitize` runs this test in compute-sanitizer.

    Rows are the longest of each kernel, or have one more element, which makes them unaligned. Images have fewer pixels
    than a warp has lanes, or more, and are staged in shared memory or not.
    """
    vector = 16 // dtypes[0].itemsize  # elements
    limits = (1, 8, 16, 32, 64, 128, 256, 1024, 2048, 2560, 20 * 1024)  # in vectors
    rows = [(5, limit * vector + more) for limit in limits for more in (0, 1)]
    for shape in [*rows, (3, 7, 5), (2, 64, 33), (1, 700, 40), (1, 1700, 40)]:
        x, dy, w, b = random_args(CUDA, dtypes, *shape)
        checked = check if len(shape) == 2 else check_images
        checked(run_kernels(x, dy, w, b), x, dy, w, b, context=shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_current_stream_is_used(shape):
    """The arguments are written late on a stream. Kernels on another stream would read zeros."""
    arguments = random_args(CUDA, (F32, F32), *shape)
    expected = run_kernels(*arguments)
    late = [torch.zeros_like(t) for t in arguments]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # cycles, about 30 ms
        for to, source in zip(late, arguments, strict=True):
            to.copy_(source)
        actual = run_kernels(*late)
    torch.cuda.synchronize()
    assert_same_bits(actual, expected)


def capture(function, *args):
    """Return a CUDA graph of a call, and the results that replays write."""
    with torch.cuda.stream(torch.cuda.Stream()):
        function(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, function(*args)


@all_shapes
def test_cuda_graph(shape):
    """A replay with other numbers gives the bits of eager calls."""
    arguments = random_args(CUDA, (F32, F32), *shape)
    graph, captured = capture(run_kernels, *arguments)
    for _ in range(2):
        for tensor in arguments:
            tensor.normal_()
        for result in captured:
            result.fill_(torch.nan)
        graph.replay()
        assert_same_bits(captured, run_kernels(*arguments))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuda_graph_of_a_training_step(shape):
    """Forward, backward and the optimizer's step in one graph give the parameters of eager steps."""
    x, dy, *_ = random_args(CUDA, (F32, F32), *shape)
    modules = [LayerNorm(shape[1], device="cuda") for _ in range(2)]
    optimizers = [torch.optim.SGD(module.parameters(), 0.1, momentum=0.9) for module in modules]

    def step(module, optimizer):
        optimizer.zero_grad(set_to_none=False)
        module(x).backward(dy)
        optimizer.step()

    graph, _ = capture(step, modules[0], optimizers[0])
    step(modules[1], optimizers[1])  # like the step before the capture, which records but does not run the kernels
    for _ in range(3):
        x.normal_()
        graph.replay()
        step(modules[1], optimizers[1])
        assert_same_bits(modules[0].parameters(), modules[1].parameters())


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
    # If the GPUs differ, so does the order in which the gradients of parameters are added.
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
    module = LayerNorm(64, device="cuda")
    compiled = torch.compile(module, fullgraph=True)
    x = torch.randn(5, 64, device="cuda")
    assert torch.equal(compiled(x), module(x))
    gradients = []
    for function in (module, compiled):
        leaf = x.clone().requires_grad_()
        function(leaf).sin().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)  # Inductor computes the cosine


def test_no_memory_is_kept():
    arguments = random_args(CUDA, (F32, F32), 300, 4096)
    run_kernels(*arguments)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        run_kernels(*arguments)
    assert torch.cuda.memory_allocated() == before
