"""Tests of nested tensors of both layouts: each component gives the bits that it gives alone."""

import pytest
import torch
from torch.nn import functional as F

from layernorm_ext import AddLayerNorm, LayerNorm, RMSNorm, add_layer_norm, add_rms_norm, layer_norm, rms_norm

LENGTHS = (2, 5, 1)
layouts = pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])


def nested(layout, *lengths, dtype=torch.float32):
    rows = [torch.randn(length, 8).to(dtype) for length in lengths or LENGTHS]
    return torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)


def like(x):
    """Return another nested tensor with the same offsets."""
    return (x.detach() * 0.5 + 1).requires_grad_()


def assert_same_components(actual, expected):
    assert actual.is_nested
    for a, e in zip(actual.unbind(), expected, strict=True):
        assert a.dtype == e.dtype and torch.equal(a, e)


CALLS = {
    "layer_norm": lambda x, w, b: layer_norm(x, (8,), w, b),
    "zero-centred, memory-efficient": lambda x, w, b: layer_norm(
        x, (8,), w, b, zero_centered_weight=True, memory_efficient=True
    ),
    "no parameters": lambda x, w, b: layer_norm(x, (8,)),
    "rms_norm": lambda x, w, b: rms_norm(x, (8,), w),
}


@layouts
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_components(layout, call, dtype):
    """Outputs and input gradients are those of the components; parameter gradients are sums over the components."""
    x = nested(layout, dtype=dtype)
    w, b = (torch.randn(8).to(dtype).requires_grad_() for _ in range(2))
    y = call(x, w, b)
    assert y.layout == layout and y.dtype == dtype
    components = [component.detach().requires_grad_() for component in x.unbind()]
    expected = [call(component, w, b) for component in components]
    assert_same_components(y, expected)
    inputs = [t for t in (w, b) if call is not CALLS["no parameters"] and (t is w or call is not CALLS["rms_norm"])]
    actual = torch.autograd.grad(sum(part.sin().sum() for part in y.unbind()), [x, *inputs])
    right = torch.autograd.grad(sum(part.sin().sum() for part in expected), [*components, *inputs])
    assert_same_components(actual[0], right[: len(components)])
    # The sums over eight rows are rounded once for each component, and added in another order.
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual[1:], right[len(components) :], rtol=tolerance, atol=tolerance)


@layouts
def test_near_torchs(layout):
    x, w, b = nested(layout), torch.randn(8), torch.randn(8)
    expected = F.layer_norm(x, (8,), w, b)
    for a, e in zip(layer_norm(x, (8,), w, b).unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)  # torch's float32 result has this error


@layouts
@pytest.mark.parametrize("module", [LayerNorm(8), RMSNorm(8)], ids=["LayerNorm", "RMSNorm"])
def test_modules(layout, module):
    x = nested(layout)
    assert_same_components(module(x), [module(component) for component in x.unbind()])


@layouts
@pytest.mark.parametrize("function", [add_layer_norm, add_rms_norm])
def test_residual(layout, function):
    x, w = nested(layout), torch.randn(8)
    residual = like(x)
    output, total = function(x, residual, (8,), w)
    expected = [function(*pair, (8,), w) for pair in zip(x.unbind(), residual.unbind(), strict=True)]
    assert_same_components(output, [pair[0] for pair in expected])
    assert_same_components(total, [pair[1] for pair in expected])
    gradient, residual_gradient = torch.autograd.grad(sum(part.sum() for part in total.unbind()), (x, residual))
    ones = [torch.ones(length, 8) for length in LENGTHS]
    assert_same_components(gradient, ones)
    assert_same_components(residual_gradient, ones)


@layouts
def test_residual_in_place(layout):
    with torch.no_grad():
        x = nested(layout)
        residual = like(x)
        expected = AddLayerNorm(8)(x, residual)
        output, total = AddLayerNorm(8, inplace=True)(x, residual)
        assert total is residual
        assert_same_components(output, expected[0].unbind())
        assert_same_components(total, expected[1].unbind())


@layouts
def test_errors(layout):
    x = nested(layout)
    for other in (nested(layout, 1, 2, 3), torch.randn(3, 5, 8)):
        with pytest.raises(RuntimeError, match="Expected residual to be nested as input is, with components of the sa"):
            add_layer_norm(x, other, (8,))
    with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[7\], expected .*input with shape \[.*\*, 7\]"):
        layer_norm(x, (7,))
    with pytest.raises(RuntimeError, match="Expected weight to be of same shape as normalized_shape"):
        rms_norm(x, (8,), torch.ones(7))


# Over the ragged dimension


def over_all(function, x, **options):
    """Return each component normalized over all its elements."""
    return [function(component, component.shape, **options) for component in x.unbind()]


@pytest.mark.parametrize("function", [layer_norm, rms_norm])
@pytest.mark.parametrize("compiled", [False, True])
def test_ragged_dimension(function, compiled):
    """Compiled code uses another formula, which differs by some roundings of 1e-16 of values of size 1."""
    x = nested(torch.jagged, dtype=torch.float64)
    tolerance = 1e-14 if compiled else 0
    torch._dynamo.reset()

    def call(x):
        return function(x, x.shape[1:])

    y = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(x)
    assert y.shape == x.shape
    torch.testing.assert_close(y.values(), torch.cat(over_all(function, x)), rtol=0, atol=tolerance)
    (y + x).values().sin().sum().backward()  # the sum needs the same ragged shape
    components = [component.detach().requires_grad_() for component in x.unbind()]
    sum((function(c, c.shape) + c).sin().sum() for c in components).backward()
    expected = torch.cat([component.grad for component in components])
    torch.testing.assert_close(x.grad.values(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("function", [add_layer_norm, add_rms_norm])
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_ragged_dimension_between_others(function, inplace):
    torch._dynamo.reset()
    rows = [torch.randn(length, 4, 8, dtype=torch.float64) for length in LENGTHS]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)  # [3, 4, ragged, 8]

    def call(x, residual):
        return function(x, residual, x.shape[2:], inplace=inplace)

    expected = call(x, x * 0.5)
    actual = torch.compile(call, backend="aot_eager", fullgraph=True)(x, x * 0.5)
    for a, e in zip(actual, expected, strict=True):
        # Compiled code differs by some roundings of 1e-16 of values of size 1.
        torch.testing.assert_close(a.values(), e.values(), rtol=0, atol=1e-14)


def test_ragged_dimension_near_torchs():
    x = nested(torch.jagged)
    expected = F.layer_norm(x, x.shape[1:])
    # torch's float32 result has this error.
    torch.testing.assert_close(layer_norm(x, x.shape[1:]).values(), expected.values(), rtol=1e-5, atol=1e-5)


def test_ragged_dimension_with_residual():
    x = nested(torch.jagged)
    output, total = add_layer_norm(x, like(x), x.shape[1:])
    assert output.shape == total.shape == x.shape
    assert_same_components(output, over_all(layer_norm, total))


def test_transposed():
    """The ragged dimension may be the last one or between others."""
    x = nested(torch.jagged).transpose(1, 2)
    assert_same_components(layer_norm(x, x.shape[1:]), over_all(layer_norm, x))
    assert_same_components(layer_norm(x, x.shape[2:]), [layer_norm(c, c.shape[1:]) for c in x.unbind()])
    rows = [torch.randn(length, 4, 8) for length in LENGTHS]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    assert_same_components(layer_norm(x, (8,)), [layer_norm(c, (8,)) for c in x.unbind()])


def test_errors_of_the_ragged_dimension():
    """A number is not the ragged size, even if all components have it. The batch cannot be normalized over."""
    x = nested(torch.jagged, 2, 2)
    with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[2, 8\], expected a jagged input with shape \[B"):
        layer_norm(x, [2, 8])
    with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[2\], expected a jagged input with shape \[B"):
        layer_norm(x.transpose(1, 2), [2])
    with pytest.raises(RuntimeError, match=r"expected a jagged input with shape \[B"):
        layer_norm(x, x.shape)
    with pytest.raises(RuntimeError, match="Expected weight to be of same shape as normalized_shape"):
        rms_norm(x, x.shape[1:], torch.ones(8))
    holes = torch.nested.nested_tensor_from_jagged(
        torch.randn(9, 8), torch.tensor([0, 3, 6, 9]), torch.tensor([2, 1, 3])
    )
    with pytest.raises(RuntimeError, match="expected a jagged input without holes"):
        layer_norm(holes, holes.shape[1:])
    assert_same_components(layer_norm(holes, (8,)), [layer_norm(c, (8,)) for c in holes.unbind()])
