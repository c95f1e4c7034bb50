"""Derivatives of every order and mode, against finite differences or autograd through the formula written out."""

import itertools
import sys

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

SHAPE = (3, 4, 5)
NORMALIZED = (5,)
EPS = 1e-5

# Parameters present x arguments that require a gradient, but for none.
CASES = [
    (weight, bias, requires_grad)
    for weight, bias in itertools.product([True, False], repeat=2)
    for requires_grad in itertools.product([True, False], repeat=1 + weight + bias)
    if any(requires_grad)
]


device = "cpu"  # of the backend under test


@pytest.fixture(autouse=True)
def use_device(backend, monkeypatch):
    """As torch.device() in a with statement would, but that sends every call on a detour through Python."""
    monkeypatch.setattr(sys.modules[__name__], "device", backend.device)


def randn(*shape):
    return torch.randn(shape, device=device)


def double(*shape):
    return torch.randn(shape, dtype=torch.float64, device=device)


def formula(x, weight=None, bias=None):
    """Written out; autograd differentiates this to any order."""
    d = x - x.mean(-1, keepdim=True)
    y = d / (d.square().mean(-1, keepdim=True) + EPS).sqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@pytest.fixture
def layer_norm(backend):
    return lambda x, weight=None, bias=None: backend.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def assert_equal(actual, expected):
    """Equal but for rounding in double: up to some hundred operations of relative error 1e-16."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("weight", "bias", "requires_grad"), CASES)
def test_first_and_second_order(backend, weight, bias, requires_grad):
    """Reverse, forward, and batched; forward over reverse and reverse over reverse."""
    tensors = [double(*SHAPE), *([double(*NORMALIZED)] * weight), *([double(*NORMALIZED)] * bias)]
    inputs = [t.clone().requires_grad_(r) for t, r in zip(tensors, requires_grad, strict=True)]

    def function(x, *parameters):
        parameters = list(parameters)
        w = parameters.pop(0) if weight else None
        b = parameters.pop(0) if bias else None
        return backend.layer_norm(x, NORMALIZED, w, b, EPS)

    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_batched_grad=True)


def test_several_normalized_dimensions(backend):
    x, w, b = (t.requires_grad_() for t in (double(2, 3, 4), double(3, 4), double(3, 4)))
    function = lambda x, w, b: backend.layer_norm(x, (3, 4), w, b, EPS)  # noqa: E731
    assert gradcheck(function, (x, w, b), check_forward_ad=True)
    assert gradgradcheck(function, (x, w, b))


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_higher_order(layer_norm, order):
    """torch's own third derivative is silently wrong."""

    def derivative(function):
        x, w, b = (t.clone().requires_grad_() for t in tensors)
        value = function(x, w, b).pow(3).sum()
        for _ in range(order):
            grads = torch.autograd.grad(value, (x, w, b), create_graph=True)
            value = sum((g * c).sum() for g, c in zip(grads, directions, strict=True))
        return value

    tensors = [double(*SHAPE), double(5), double(5)]
    directions = [double(*SHAPE), double(5), double(5)]
    assert_equal(derivative(layer_norm), derivative(formula))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("param_dtype", [None, torch.float32])
def test_double_backward_keeps_dtypes(layer_norm, dtype, param_dtype):
    x = randn(4, 8).to(dtype).requires_grad_()
    w, b = (randn(8).to(param_dtype or dtype).requires_grad_() for _ in range(2))
    first = torch.autograd.grad(layer_norm(x, w, b).float().pow(2).sum(), (x, w, b), create_graph=True)
    second = torch.autograd.grad(sum(g.float().pow(2).sum() for g in first), (x, w))
    assert [g.dtype for g in (*first, *second)] == [x.dtype, w.dtype, b.dtype, x.dtype, w.dtype]

    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    first_wide = torch.autograd.grad(formula(*wide).pow(2).sum(), wide, create_graph=True)
    second_wide = torch.autograd.grad(sum(g.pow(2).sum() for g in first_wide), wide[:2])
    for actual, expected in zip((*first, *second), (*first_wide, *second_wide), strict=True):
        # The loss is computed from rounded results: a few roundings to the dtype, amplified by at most rstd ~ 2.
        tolerance = 16 * torch.finfo(dtype).eps * expected.abs().max()
        assert (actual.double() - expected).abs().max() <= tolerance


def test_only_the_gradients_asked_for(layer_norm):
    """The node computes what the engine needs of it: a frozen weight gets none."""
    x, w, b = double(*SHAPE).requires_grad_(), double(5), double(5).requires_grad_()
    layer_norm(x, w, b).sum().backward()
    assert x.grad is not None and w.grad is None and b.grad is not None
    node = layer_norm(x, w, b).grad_fn
    assert node.name() == "LayerNormBackward"
    assert [edge is None for edge, _ in node.next_functions] == [False, True, False]


def test_statistics_are_not_differentiable(backend):
    _, mean, rstd = backend.forward(double(2, 5).requires_grad_(), [5], None, None, EPS)
    assert not mean.requires_grad and not rstd.requires_grad


def test_no_graph_without_gradients(layer_norm):
    x = double(*SHAPE).requires_grad_()
    assert layer_norm(x.detach()).grad_fn is None
    with torch.no_grad():
        assert layer_norm(x).grad_fn is None
    with torch.inference_mode():
        assert layer_norm(x).is_inference()


def test_input_changed_before_backward(layer_norm):
    x = double(*SHAPE).requires_grad_() * 1
    y = layer_norm(x)
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_backward_without_retained_graph(layer_norm):
    x = double(*SHAPE).requires_grad_()
    loss = layer_norm(x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_saves_no_bias_beside_a_weight(layer_norm):
    saved = []
    x, w, b = double(*SHAPE).requires_grad_(), double(5).requires_grad_(), double(5).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        layer_norm(x, w, b)
    assert {x.data_ptr(), w.data_ptr()} < set(saved) and b.data_ptr() not in saved and len(saved) == 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(layer_norm, reentrant):
    x, w, b = double(*SHAPE).requires_grad_(), double(5).requires_grad_(), double(5).requires_grad_()
    expected = torch.autograd.grad(layer_norm(x, w, b).pow(2).sum(), (x, w, b))
    checkpoint(layer_norm, x, w, b, use_reentrant=reentrant).pow(2).sum().backward()
    for t, g in zip((x, w, b), expected, strict=True):
        assert torch.equal(t.grad, g)


def test_undefined_gradient(layer_norm):
    """Only a statistic-free branch reaches the loss: no gradient flows, and nothing fails."""
    x = double(*SHAPE).requires_grad_()
    y = layer_norm(x)
    (y.detach().sum() + x.sum()).backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def scalar(function, w, b):
    return lambda x: function(x, w, b).pow(3).sum()


@pytest.mark.parametrize(
    "transform", [grad, jacrev, jacfwd, hessian, lambda f: jacrev(grad(f)), lambda f: grad(vjp_of(f))]
)
def test_func(layer_norm, transform):
    x, w, b = double(2, 5), double(5), double(5)
    assert_equal(transform(scalar(layer_norm, w, b))(x), transform(scalar(formula, w, b))(x))


def vjp_of(function):
    def value(x):
        y, pull = vjp(function, x)
        return pull(torch.ones_like(y))[0].sin().sum()

    return value


def test_func_over_parameters(layer_norm):
    x, w, b = double(2, 5), double(5), double(5)
    for arguments in (0, 1, 2, (0, 1, 2)):
        actual = grad(lambda *t: layer_norm(*t).pow(3).sum(), arguments)(x, w, b)
        expected = grad(lambda *t: formula(*t).pow(3).sum(), arguments)(x, w, b)
        for a, e in zip(*((t,) if torch.is_tensor(t) else t for t in (actual, expected)), strict=True):
            assert_equal(a, e)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nested_jvp(layer_norm, depth):
    """torch's own nested forward mode gives -0.385 for a true 0.775."""

    def derivative(function):
        for _ in range(depth):
            function = lambda x, f=function: jvp(f, (x,), (direction * x,))[1]  # noqa: E731
        return function(x)

    x, direction, w, b = double(2, 5), double(2, 5), double(5), double(5)
    assert_equal(derivative(lambda t: layer_norm(t, w, b)), derivative(lambda t: formula(t, w, b)))


def test_forward_mode_is_never_dropped(layer_norm):
    """A tangent counts even where nothing requires a gradient; one in the parameters alone, too."""
    x, w, b, tangent = double(2, 5), double(5), double(5), double(5)
    with forward_ad.dual_level():
        dual = layer_norm(x, forward_ad.make_dual(w, tangent), b)
        assert_equal(forward_ad.unpack_dual(dual).tangent, formula(x) * tangent)
        dual = layer_norm(forward_ad.make_dual(x, double(2, 5)), w, b)
        assert forward_ad.unpack_dual(dual).tangent is not None


IN_DIMS = [(0, None, None), (1, None, None), (None, 0, None), (None, None, 0), (0, 0, 0), (2, 1, 0)]


@pytest.mark.filterwarnings("error")  # of a slow fall-back
@pytest.mark.parametrize("in_dims", IN_DIMS)
def test_vmap(layer_norm, in_dims):
    """Over input, parameters and both, each along any dimension."""
    shapes = [(4, 5), (5,), (5,)]
    tensors = [
        double(*shape) if d is None else double(*shape[:d], 3, *shape[d:])
        for shape, d in zip(shapes, in_dims, strict=True)
    ]
    assert_equal(vmap(layer_norm, in_dims)(*tensors), vmap(formula, in_dims)(*tensors))
    gradient = lambda f: vmap(grad(lambda *t: f(*t).pow(3).sum(), (0, 1, 2)), in_dims)(*tensors)  # noqa: E731
    for actual, expected in zip(gradient(layer_norm), gradient(formula), strict=True):
        assert_equal(actual, expected)


def test_transforms_check_their_arguments(layer_norm, backend):
    with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[4\], expected input with shape \[\*, 4\]"):
        vmap(lambda x: backend.layer_norm(x, [4], None, None, EPS))(double(2, 3, 5))
    with pytest.raises(RuntimeError, match="Expected weight to be of same shape as normalized_shape"):
        grad(lambda x: layer_norm(x, double(4)).sum())(double(2, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_transforms_are_as_exact_as_the_kernels(layer_norm, dtype):
    """In the accumulation type, and with the mean corrected: at an offset the plain formula is off by 1e-4."""
    x = (randn(4, 64) + (1e4 if dtype == torch.float32 else 0)).to(dtype)
    expected = formula(x.double())
    actual = vmap(layer_norm)(x)
    assert actual.dtype == dtype
    # 5e-7 is the kernels' own bound in float32; half an ulp for rounding to the dtype.
    bound = 5e-7 * (1 + expected.abs()) + torch.finfo(dtype).eps / 2 * expected.abs()
    assert ((actual.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5)])
def test_vmapped_backward_sums_parameter_gradients_over_rows(backend, shape):
    """The operator itself must return the right shape, although the autograd engine reduces larger gradients."""
    x, dy, w, b = double(3, *shape), double(3, *shape), double(5), double(5)

    def backward(x, dy):
        _, mean, rstd = backend.forward(x, (5,), w, b, EPS)
        return backend.backward(dy, x, (5,), mean, rstd, w, b, [True, True, True])

    expected = zip(*(backward(*tensors) for tensors in zip(x, dy, strict=True)), strict=True)
    for actual, parts in zip(vmap(backward)(x, dy), expected, strict=True):
        assert_equal(actual, torch.stack(parts))
