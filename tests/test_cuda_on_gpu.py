"""What only a GPU can show: every kernel on it, streams, graphs, threads, another GPU, autocast and the compiler."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from reference import F32, check_backward, check_forward
from shapes import all_dtypes, bits, randn

from layernorm_ext import LayerNorm, _build_info

pytestmark = pytest.mark.skipif(
    not (_build_info.with_cuda and torch.cuda.is_available()), reason="needs a GPU, and the package built with CUDA"
)

ALL = [True, True, True]

# (rows, columns) that are taken by a tile of a few threads, by one of many, by a cluster, and by two launches; and by a
# single launch for all gradients.
SHAPES = [(300, 64), (70, 4096), (9, 40000), (3, 400000), (20, 768)]
# Images [N, C, P] whose channels fit into shared memory, in forward alone, and not at all.
IMAGES = [(3, 64, 300), (2, 500, 70), (2, 1000, 50)]


def tensors(*shape):
    return [randn(size, F32, "cuda") for size in (shape, shape, shape[1:2], shape[1:2])]


def everything(x, dy, w, b):
    """Return output, statistics and gradients of rows or of images."""
    if x.dim() == 2:
        output, mean, rstd = torch.ops.layernorm.forward(x, w.shape, w, b)
        return output, mean, rstd, *torch.ops.layernorm.backward(dy, x, w.shape, mean, rstd, w, b, ALL)
    output, mean, rstd = torch.ops.layernorm.channels_first_forward(x, w, b, 1e-5)
    return output, mean, rstd, *torch.ops.layernorm.channels_first_backward(dy, x, mean, rstd, w, b, ALL)


def assert_same(actual, expected):
    assert all(torch.equal(bits(a), bits(e)) for a, e in zip(actual, expected, strict=True))


@all_dtypes
def test_every_path(dtypes):
    """Every kernel, at the longest row of each tile and one more, aligned and not; what compute-sanitizer looks at."""
    vector = 16 // dtypes[0].itemsize
    for limit in (1, 8, 16, 32, 64, 128, 1024, 2048, 2049, 80 * 1024):
        for cols in (limit * vector, limit * vector + 1):
            x, dy = (randn((5, cols), dtypes[0], "cuda") for _ in range(2))
            w, b = (randn(cols, dtypes[1], "cuda") for _ in range(2))
            results = everything(x, dy, w, b)
            check_forward(results[:3], x, w, b, context=(cols,))
            check_backward(results[3:], dy, x, w, context=(cols,))


@all_dtypes
def test_every_path_of_images(dtypes):
    """Fewer pixels than lanes, of several images in a warp, and more; staged in shared memory and not."""
    for shape in [(3, 7, 5), (2, 64, 33), (1, 700, 40), (1, 1700, 40)]:
        x, dy = (randn(shape, dtypes[0], "cuda") for _ in range(2))
        w, b = (randn(shape[1], dtypes[1], "cuda") for _ in range(2))
        results = everything(x, dy, w, b)
        rows = [t.movedim(1, -1).reshape(-1, t.size(1)).contiguous() for t in (x, dy, *results[:4])]
        check_forward(rows[2:5], rows[0], w, b, context=shape)
        check_backward((rows[5], *results[4:]), rows[1], rows[0], w, context=shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_current_stream_is_used(shape):
    """What is written late on a stream is read there, and on no other."""
    arguments = tensors(*shape)
    expected = everything(*arguments)
    late = [torch.zeros_like(t) for t in arguments]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # cycles: some 30 ms
        for to, source in zip(late, arguments, strict=True):
            to.copy_(source)
        actual = everything(*late)
    torch.cuda.synchronize()
    assert_same(actual, expected)


@pytest.mark.parametrize("shape", [*SHAPES, *IMAGES], ids=str)
def test_cuda_graph(shape):
    """Captured, and replayed with other numbers: bit by bit what eager calls give."""
    arguments = tensors(*shape)
    warm_up = torch.cuda.Stream()
    with torch.cuda.stream(warm_up):
        everything(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything(*arguments)
    for _ in range(2):
        for tensor in arguments:
            tensor.normal_()
        for result in captured:
            result.fill_(torch.nan)
        graph.replay()
        assert_same(captured, everything(*arguments))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuda_graph_of_a_training_step(shape):
    """Forward, backward and the optimizer's step, captured as one: replays give the parameters of eager steps."""
    x, dy, *_ = tensors(*shape)
    modules = [LayerNorm(shape[1], device="cuda") for _ in range(2)]
    optimizers = [torch.optim.SGD(module.parameters(), 0.1, momentum=0.9) for module in modules]

    def step(module, optimizer):
        optimizer.zero_grad(set_to_none=False)
        module(x).backward(dy)
        optimizer.step()

    with torch.cuda.stream(torch.cuda.Stream()):
        for module, optimizer in zip(modules, optimizers, strict=True):
            step(module, optimizer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(modules[0], optimizers[0])
    for _ in range(3):
        x.normal_()
        graph.replay()
        step(modules[1], optimizers[1])
        assert_same(modules[0].parameters(), modules[1].parameters())


def test_two_python_threads_on_two_streams():
    """The first calls of a kernel too, which fill the caches of its properties."""
    arguments = [tensors(*shape) for shape in SHAPES[:2]]
    expected = [everything(*a) for a in arguments]
    torch.cuda.synchronize()

    def work(a, e):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                actual = everything(*a)
                torch.cuda.current_stream().synchronize()
                assert_same(actual, e)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, arguments, expected))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("shape", [*SHAPES, *IMAGES], ids=str)
def test_another_gpu_than_the_current_one(shape):
    arguments = tensors(*shape)
    expected = everything(*arguments)
    with torch.cuda.device(1):
        on_second = [t.to("cuda:1") for t in arguments]
    assert torch.cuda.current_device() == 0
    actual = everything(*on_second)
    assert torch.cuda.current_device() == 0 and {t.device for t in actual} == {torch.device("cuda:1")}
    torch.testing.assert_close([t.cpu() for t in actual], [t.cpu() for t in expected], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_keeps_the_dtype_of_the_input(dtype):
    """torch's own layer norm gives float32."""
    module = LayerNorm(64, device="cuda")
    with torch.autocast("cuda", dtype):
        assert module(torch.randn(3, 64, device="cuda", dtype=dtype)).dtype == dtype
        assert module(torch.randn(3, 64, device="cuda")).dtype == torch.float32


def test_compiled():
    """By inductor: the operator's own bits, and gradients through what stands around it."""
    torch._dynamo.reset()
    module = LayerNorm(64, device="cuda")
    compiled = torch.compile(module, fullgraph=True)
    x = torch.randn(5, 64, device="cuda")
    assert torch.equal(compiled(x), module(x))
    gradients = []
    for function in (module, compiled):
        leaf = x.clone().requires_grad_()
        function(leaf).sin().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_no_memory_is_kept():
    arguments = tensors(300, 4096)
    everything(*arguments)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        everything(*arguments)
    assert torch.cuda.memory_allocated() == before
