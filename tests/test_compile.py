"""torch.compile, compiled autograd and AOTInductor with layer_norm and LayerNorm.

test_functions.py tests the rest of the family, and test_tracing.py which operators a graph calls.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from layernorm_ext import LayerNorm, layer_norm

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
forward, backward = torch.ops.layernorm.forward, torch.ops.layernorm.backward

# The compiler may add float32 numbers around the operator in another order. The operator itself gives the same bits.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def loss(x, w, b):
    return layer_norm(x, x.shape[-1:], w, b).sin().sum()


def leaves(rows, cols):
    return [torch.randn(size, requires_grad=True) for size in ((rows, cols), (cols,), (cols,))]


def parameter_gradients(model, function):
    """Return the gradients of the model's parameters for the loss that the function computes."""
    return torch.autograd.grad(function().float().sin().sum(), list(model.parameters()))


@pytest.mark.parametrize(
    "options",
    [{"dynamic": None}, {"dynamic": True}, {"mode": "reduce-overhead"}, {"mode": "max-autotune-no-cudagraphs"}],
    ids=str,
)
def test_compiled_training_matches_eager(options):
    """The batch and normalized_shape=x.shape[-1:] change between calls."""
    compiled = torch.compile(loss, fullgraph=True, **options)
    for rows, cols in [(3, 8), (6, 16), (4, 8)]:
        tensors = leaves(rows, cols)
        results = [(f(*tensors), *torch.autograd.grad(f(*tensors), tensors)) for f in (compiled, loss)]
        torch.testing.assert_close(*results, **TOLERANCE)


def test_batch_size_changes_recompile_once():
    counter = CompileCounter()
    module = torch.compile(LayerNorm(8), backend=counter, fullgraph=True)
    for rows in (3, 4, 5, 6):
        module(torch.randn(rows, 8))
    assert counter.frame_count == 2  # first for a constant batch size, then for any


def test_compiles_between_convolutions():
    """Inductor makes tensors near a convolution channels last, including statistics of four dimensions."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = torch.nn.Conv2d(3, 8, 3), LayerNorm(8), torch.nn.Conv2d(8, 4, 3)

        def forward(self, x):
            return self.last(self.norm(self.first(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))

    block, x = Block(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(block, fullgraph=True)
    gradients = [parameter_gradients(block, lambda f=f: f(x)) for f in (compiled, block)]
    torch.testing.assert_close(*gradients, **TOLERANCE)


def test_compiled_training_under_autocast_matches_eager():
    """Autocast computes the products in bfloat16; the norm has float32 parameters."""
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 16), LayerNorm(16), torch.nn.Linear(16, 4)), torch.randn(8, 16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", BF16):
        assert compiled(x).dtype == BF16
        gradients = [parameter_gradients(model, lambda f=f: f(x)) for f in (compiled, model)]
    for actual, expected in zip(*gradients, strict=True):
        assert actual.dtype == F32
        # Compiled code may round to bfloat16, which has 8 bits, at other places.
        torch.testing.assert_close(actual, expected, rtol=2**-5, atol=2**-5 * expected.abs().max().item())


def test_ahead_of_time_compiled_operators_have_the_same_bits(tmp_path):
    class ForwardAndBackward(torch.nn.Module):
        def forward(self, dy, x, w, b):
            output, mean, rstd = forward(x, x.shape[-1:], w, b)
            return output, *backward(dy, x, x.shape[-1:], mean, rstd, w, b, [True, True, True])

    module, tensors = ForwardAndBackward(), (torch.randn(3, 8), *(t.detach() for t in leaves(3, 8)))
    program = torch.export.export(module, tensors)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "module.pt2"))
    actual = torch._inductor.aoti_load_package(package)(*tensors)
    torch.testing.assert_close(tuple(actual), module(*tensors), rtol=0, atol=0)
