"""The operators inside torch's tracers and compilers."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx

import layernorm_ext
from layernorm_ext import LayerNorm, layer_norm, trace_as

# Compiled code may order the sums around the operator in its own way; the operator itself gives the same bits.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def loss(x, w, b):
    return layer_norm(x, x.shape[-1:], w, b).sin().sum()


def arguments(rows, cols, dtype=torch.float32, param_dtype=None):
    x = torch.randn(rows, cols).to(dtype).requires_grad_()
    return [x, *(torch.randn(cols).to(param_dtype or dtype).requires_grad_() for _ in range(2))]


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_forward_and_backward(dynamic):
    """With the batch changing, and with normalized_shape=x.shape[-1:] changing."""
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic)
    for rows, cols in [(3, 8), (4, 8), (7, 8), (5, 12), (6, 16)]:
        args = arguments(rows, cols)
        expected, actual = loss(*args), compiled(*args)
        torch.testing.assert_close(actual, expected, **TOLERANCE)
        gradients = [torch.autograd.grad(value, args) for value in (actual, expected)]
        for a, e in zip(*gradients, strict=True):
            torch.testing.assert_close(a, e, **TOLERANCE)


def test_no_recompilation_when_the_batch_changes():
    counter = CompileCounter()
    module = torch.compile(LayerNorm(8), backend=counter, fullgraph=True)
    for rows in (3, 4, 5, 6, 7, 8):
        module(torch.randn(rows, 8))
    assert counter.frame_count == 2  # with a fixed and then with a free batch, as for any operator


def test_between_convolutions():
    """The compiler lays out what is near a convolution channels last, statistics of four dimensions too."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = torch.nn.Conv2d(3, 8, 3), LayerNorm(8), torch.nn.Conv2d(8, 4, 3)

        def forward(self, x):
            return self.last(self.norm(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))

    block, x = Block(), torch.randn(2, 3, 8, 8)
    gradients = [
        torch.autograd.grad(f(x).sin().sum(), list(block.parameters()))
        for f in (block, torch.compile(block, fullgraph=True))
    ]
    for expected, actual in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_compiled_output_has_the_kernels_bits():
    module, x = LayerNorm(64), torch.randn(5, 64)
    assert torch.equal(torch.compile(module, fullgraph=True)(x), module(x))


def test_under_autocast():
    module = LayerNorm(16)
    x = torch.randn(4, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y, compiled = module(x), torch.compile(module, fullgraph=True)(x)
    assert y.dtype == compiled.dtype == torch.bfloat16
    assert torch.equal(y, compiled)


PAIRS = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize(("dtype", "param_dtype"), PAIRS)
@pytest.mark.parametrize(("weight", "bias"), list(itertools.product([True, False], repeat=2)))
def test_opcheck_forward(backend, dtype, param_dtype, weight, bias):
    x = torch.randn(3, 2, 4, device=backend.device).to(dtype).requires_grad_()
    w = torch.randn(2, 4, device=backend.device).to(param_dtype).requires_grad_() if weight else None
    b = torch.randn(2, 4, device=backend.device).to(param_dtype).requires_grad_() if bias else None
    torch.library.opcheck(backend.forward.default, (x, (2, 4), w, b, 1e-5))


@pytest.mark.parametrize(("weight", "bias"), list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=3)), ids=str)
def test_opcheck_backward(backend, weight, bias, mask):
    x = torch.randn(3, 2, 4, device=backend.device, requires_grad=True)
    w = torch.randn(2, 4, device=backend.device, requires_grad=True) if weight else None
    b = torch.randn(2, 4, device=backend.device, requires_grad=True) if bias else None
    _, mean, rstd = backend.forward(x, (2, 4), w, b, 1e-5)
    dy = torch.randn(3, 2, 4, device=backend.device, requires_grad=True)
    torch.library.opcheck(backend.backward.default, (dy, x, (2, 4), mean, rstd, w, b, list(mask)))


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "sliced", "expanded", "empty"])
def test_opcheck_layouts(backend, layout):
    """Strides of the outputs are those that the shape functions promise, whatever those of the inputs."""
    x = {
        "transposed": torch.randn(4, 5, 3, device=backend.device).transpose(0, 1),
        "channels_last": torch.randn(2, 4, 5, 3, device=backend.device).to(memory_format=torch.channels_last),
        "sliced": torch.randn(6, 5, 3, device=backend.device)[::2],
        "expanded": torch.randn(1, 3, device=backend.device).expand(4, 3),
        "empty": torch.randn(0, 3, device=backend.device),
    }[layout]
    torch.library.opcheck(backend.forward.default, (x, x.shape[-1:]))
    _, mean, rstd = backend.forward(x, x.shape[-1:])
    arguments = (torch.randn_like(x), x, x.shape[-1:], mean, rstd, None, None, [True] * 3)
    torch.library.opcheck(backend.backward.default, arguments)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    module = LayerNorm(8)
    batch = torch.export.Dim("batch")
    with trace_as("kernel"):
        program = torch.export.export(module, (torch.randn(3, 8),), dynamic_shapes={"input": {0: batch}}, strict=strict)
    assert torch.ops.layernorm.forward.default in [node.target for node in program.graph.nodes]
    x = torch.randn(7, 8)
    assert torch.equal(program.module()(x), module(x))


@pytest.mark.parametrize("operators", ["kernel", "aten"])
def test_ahead_of_time_inductor(operators, tmp_path):
    module, x = LayerNorm(8), torch.randn(3, 8)
    with trace_as(operators):
        program = torch.export.export(module, (x,))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "norm.pt2"))
    tolerance = {"rtol": 0, "atol": 0} if operators == "kernel" else TOLERANCE
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), module(x), **tolerance)


def test_jit_trace():
    module, x = LayerNorm(8), torch.randn(3, 8)
    traced = torch.jit.trace(module, x)
    assert "layernorm::forward" in str(traced.graph)
    x = torch.randn(5, 8)
    assert torch.equal(traced(x), module(x))


def test_symbolic_normalized_shape():
    """Symbolic sizes pass through the compiled entry unspecialised."""
    graph = make_fx(lambda x: layer_norm(x, x.shape[-1:]), tracing_mode="symbolic")(torch.randn(3, 8))
    x = torch.randn(4, 12)
    assert torch.equal(graph(x), layer_norm(x, (12,)))


def test_compiled_func_grad():
    x, w, b = (t.detach() for t in arguments(3, 8))
    gradient = torch.func.grad(loss)
    compiled = torch.compile(gradient, fullgraph=True)
    torch.testing.assert_close(compiled(x, w, b), gradient(x, w, b), **TOLERANCE)


def test_double_backward_of_compiled_code_is_an_error():
    """torch's compiler refuses it; it must not be a silent zero."""
    args = arguments(3, 8)
    value = torch.compile(loss)(*args)
    with pytest.raises(RuntimeError, match="double backward|create_graph=False"):
        torch.autograd.grad(value, args[:1], create_graph=True)[0].sum().backward()


# Compiled autograd


@pytest.mark.parametrize(("weight", "bias"), list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("order", [1, 2])
def test_compiled_autograd(backend, weight, bias, order):
    """The graph of derivatives that eager code has left is compiled, with the batch changing."""

    def gradients(rows):
        x = torch.linspace(-1, 2, 8 * rows, dtype=torch.float64).exp().reshape(rows, 8).requires_grad_()
        w = torch.linspace(1, 2, 8, dtype=torch.float64).requires_grad_() if weight else None
        b = torch.linspace(2, 3, 8, dtype=torch.float64).requires_grad_() if bias else None
        value = backend.layer_norm(x, (8,), w, b).sin().sum()
        if order == 2:
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            value = gradient.square().sum()
        value.backward()
        return [t.grad for t in (x, w, b) if t is not None and t.grad is not None]

    for rows in (3, 4, 5):
        expected = gradients(rows)
        assert len(expected) >= 1 + weight
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            actual = gradients(rows)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)  # the same kernels; sums around them may differ


def test_compiled_autograd_computes_only_what_is_wanted(backend):
    w = torch.ones(8, requires_grad=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        backend.layer_norm(torch.randn(3, 8), (8,), w).sum().backward()
    assert w.grad is not None


def test_compiled_autograd_with_inductor():
    """Forward and backward compiled as one, as `torch._dynamo.config.compiled_autograd` asks for."""
    module, x = LayerNorm(16), torch.randn(4, 16)
    module(x).sin().sum().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: module(x).sin().sum().backward())()
    for p, e in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, e, **TOLERANCE)


# Modes of the compiler


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode):
    args = arguments(4, 16)
    expected = torch.autograd.grad(loss(*args), args)
    actual = torch.autograd.grad(torch.compile(loss, mode=mode, fullgraph=True)(*args), args)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, **TOLERANCE)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode):
    module, x = LayerNorm(64), torch.randn(5, 64)
    compiled = torch.compile(module, fullgraph=True)
    with mode():
        assert torch.equal(compiled(x), module(x))


def test_training_under_autocast():
    """A compiled block of matrix products in bfloat16 around the norm, whose parameters stay float32."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), LayerNorm(16), torch.nn.Linear(16, 4))
    x, gradients = torch.randn(8, 16), []
    for run in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for actual, expected in zip(*gradients, strict=True):
        assert actual.dtype == torch.float32
        # inductor may keep float32 where eager code rounds to bfloat16, which has 8 bits
        torch.testing.assert_close(actual, expected, rtol=2**-5, atol=2**-5 * expected.abs().max().item())


class Backward(torch.nn.Module):
    """The operator called by hand, for some of its gradients."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, dy, x, mean, rstd, w):
        gradients = torch.ops.layernorm.backward(dy, x, x.shape[-1:], mean, rstd, w, None, self.mask)
        return [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("mask", [[True, True, True], [True, False, False]], ids=["all", "masked"])
def test_export_of_backward(mask, tmp_path):
    """Exported, a masked backward runs; torch's ahead-of-time compiler takes it only where nothing is masked.

    (It gives an output that is None no C++ type, in 2.11 as in 2.13. Within torch.compile such a backward works.)
    """
    x, w = torch.randn(3, 8), torch.randn(8)
    _, mean, rstd = torch.ops.layernorm.forward(x, [8], w)
    arguments = (torch.randn(3, 8), x, mean, rstd, w)
    module = Backward(mask)
    program = torch.export.export(module, arguments)
    expected = module(*arguments)
    for actual in (program.module()(*arguments), torch.compile(module, fullgraph=True)(*arguments)):
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a, e)

    def compile_ahead():
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "backward.pt2"))
        return torch._inductor.aoti_load_package(package)(*arguments)

    if all(mask):
        for a, e in zip(compile_ahead(), expected, strict=True):
            assert torch.equal(a, e)
    else:
        with pytest.raises(torch._inductor.exc.InductorError):
            compile_ahead()


def test_public_names():
    assert set(layernorm_ext.__all__) == {
        *("LayerNorm", "LayerNorm2d", "LazyLayerNorm", "AddLayerNorm", "RMSNorm", "AddRMSNorm"),
        *("layer_norm", "layer_norm_2d", "add_layer_norm", "rms_norm", "add_rms_norm"),
        *("convert", "converted", "register_conversion", "revert", "ConversionReport"),
        "trace_as",
    }
