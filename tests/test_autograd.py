"""Derivatives of every order and mode, against finite differences or autograd through the formula."""

import itertools

import pytest
import torch
from family import EPS, formula
from reference import F64
from shapes import forward
from test_family import GROUPS, arguments
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint


@pytest.fixture(params=["rows", "images"])
def layer_norm(request, backend):
    """The norm over the last dimension, computed as it is or as that of images, which have the channels second."""

    def of_rows(x, weight=None, bias=None):
        return backend.layer_norm(x, x.shape[-1:], weight, bias, EPS)

    def of_images(x, weight=None, bias=None):
        images = x.movedim(-1, 1).contiguous()
        return backend.forward(images.movedim(1, -1), x.shape[-1:], weight, bias, EPS, preserve_layout=True)[0]

    return of_rows if request.param == "rows" else of_images


@pytest.fixture
def double(backend):
    return lambda *shape: torch.randn(shape, dtype=torch.float64, device=backend.device)


@pytest.fixture
def leaves(double):
    """Input, weight and bias."""
    return [double(*shape).requires_grad_() for shape in ((3, 4, 5), (5,), (5,))]


def assert_equal(actual, expected):
    """Allow for some hundred operations with a relative error of 1e-16 each."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# Batch sizes as in test_family.py, with a residual or without, which of the tensors require a gradient, and options.
SHARED = [((4,), *parameters) for parameters in itertools.product([(), None], repeat=2)]
CASES = [
    (batches, adds, requires_grad, {})
    for batches, adds in [*((batches, False) for batches in SHARED), (SHARED[1], True)]
    for requires_grad in itertools.product([True, False], repeat=1 + adds + batches.count(()))
    if any(requires_grad)
]
CASES += [
    (batches, adds, [True] * 4, {"rms": not adds, "zero_centered_weight": True})
    for batches, adds in itertools.product(GROUPS.values(), (False, True))
    if batches != GROUPS["many rows"]  # whose finite differences take seconds
]


@pytest.mark.parametrize(("batches", "adds", "requires_grad", "options"), CASES)
def test_first_and_second_derivatives(backend, batches, adds, requires_grad, options):
    """In reverse and forward mode and batched; forward over reverse, and reverse over reverse.

    gradcheck differentiates the output and the sum one at a time.
    """
    x, residual, *parameters = arguments(batches, 4, (F64, F64), backend.device)
    tensors = [x, residual if adds else None, *parameters]
    present = [t.unflatten(-1, (2, 2)) for t in tensors if t is not None]
    inputs = [t.requires_grad_(required) for t, required in zip(present, requires_grad, strict=False)]

    def function(*inputs):
        given = iter(inputs)
        y, total, *_ = forward(backend, *(t if t is None else next(given) for t in tensors), EPS, (2, 2), **options)
        return y if total is None else (y, total * 1.5)

    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("order", [3, 4])
def test_higher_derivatives(layer_norm, double, leaves, order):
    """torch's own third derivative is silently wrong."""
    directions = [double(*t.shape) for t in leaves]

    def derivative(function):
        value = function(*leaves).pow(3).sum()
        for _ in range(order):
            gradients = torch.autograd.grad(value, leaves, create_graph=True)
            value = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
        return value

    assert_equal(derivative(layer_norm), derivative(formula))


def test_statistics_are_not_differentiable(backend, leaves):
    _, mean, rstd = backend.forward(leaves[0], [5])
    assert not mean.requires_grad and not rstd.requires_grad


def test_no_graph_without_gradients(layer_norm, leaves):
    x = leaves[0]
    assert layer_norm(x).requires_grad and layer_norm(x.detach()).grad_fn is None
    with torch.no_grad():
        assert layer_norm(x).grad_fn is None
    with torch.inference_mode():
        assert layer_norm(x).is_inference()


def test_saved_tensors_are_checked(layer_norm, leaves):
    x = leaves[0][0] * 1
    y, loss = layer_norm(x), layer_norm(leaves[0]).sum()
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(layer_norm, leaves, reentrant):
    expected = torch.autograd.grad(layer_norm(*leaves).pow(2).sum(), leaves)
    checkpoint(layer_norm, *leaves, use_reentrant=reentrant).pow(2).sum().backward()
    assert all(torch.equal(t.grad, g) for t, g in zip(leaves, expected, strict=True))


# torch.func and forward mode


def of_vjp(function):
    return grad(lambda x: vjp(function, x)[1](function(x))[0].sum())


@pytest.mark.parametrize("transform", [grad, jacrev, jacfwd, hessian, lambda f: jacrev(grad(f)), of_vjp])
def test_func(layer_norm, double, transform):
    x, w, b = double(2, 5), double(5), double(5)
    actual, expected = (transform(lambda x, f=f: f(x, w, b).pow(3).sum())(x) for f in (layer_norm, formula))
    assert_equal(actual, expected)


SECOND_DERIVATIVES = {
    "hessian": hessian,
    "jacrev(jacrev)": lambda f, argnums: jacrev(jacrev(f, argnums), argnums),
    "jacrev(jacfwd)": lambda f, argnums: jacrev(jacfwd(f, argnums), argnums),
    "jacfwd(jacfwd)": lambda f, argnums: jacfwd(jacfwd(f, argnums), argnums),
}


@pytest.mark.parametrize("second_derivative", SECOND_DERIVATIVES.values(), ids=SECOND_DERIVATIVES)
def test_func_by_every_pair_of_input_weight_and_bias(layer_norm, double, second_derivative):
    """Torch's own are silently wrong: all four by weight and input, and the last two by input and input.

    They are off by 0.75 where the largest value is 1.6, and by 1.5 where it is 4.7.
    """
    tensors = double(4, 8), double(8), double(8)
    ours, reference = (
        second_derivative(lambda *t, f=f: f(*t).sin().sum(), (0, 1, 2))(*tensors) for f in (layer_norm, formula)
    )
    for actual, expected in zip(itertools.chain(*ours), itertools.chain(*reference), strict=True):
        assert_equal(actual, expected)


@pytest.mark.parametrize("depth", [2, 3])
def test_nested_forward_mode(layer_norm, double, depth):
    """torch's own nested forward mode gives -0.385 where 0.775 is right."""
    x, direction, w, b = double(2, 5), double(2, 5), double(5), double(5)

    def derivative(function):
        for _ in range(depth):
            function = lambda x, f=function: jvp(f, (x,), (direction * x,))[1]  # noqa: E731
        return function(x)

    assert_equal(derivative(lambda t: layer_norm(t, w, b)), derivative(lambda t: formula(t, w, b)))


def test_forward_mode_without_requires_grad(layer_norm, double):
    """A tangent counts even if no tensor requires a gradient and only the weight has one."""
    x, w, b, tangent = double(2, 5), double(5), double(5), double(5)
    with forward_ad.dual_level():
        dual = layer_norm(x, forward_ad.make_dual(w, tangent), b)
        assert_equal(forward_ad.unpack_dual(dual).tangent, formula(x) * tangent)


@pytest.mark.filterwarnings("error")  # vmap warns if it falls back to a loop
@pytest.mark.parametrize("in_dims", [(0, None, None), (1, None, None), (None, 0, None), (None, None, 0), (2, 1, 0)])
def test_vmap(layer_norm, double, in_dims):
    """Over input, parameters and all of them, along any dimension."""
    shapes = zip([(4, 5), (5,), (5,)], in_dims, strict=True)
    tensors = [double(*s) if d is None else double(*s[:d], 3, *s[d:]) for s, d in shapes]
    assert_equal(vmap(layer_norm, in_dims)(*tensors), vmap(formula, in_dims)(*tensors))
    gradient = lambda f: vmap(grad(lambda *t: f(*t).pow(3).sum(), (0, 1, 2)), in_dims)(*tensors)  # noqa: E731
    assert_equal(gradient(layer_norm), gradient(formula))


def test_transforms_check_their_arguments(backend, double):
    with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[4\], expected input with shape \[\*, 4\]"):
        vmap(lambda x: backend.layer_norm(x, [4], None, None, EPS))(double(2, 3, 5))
    with pytest.raises(RuntimeError, match="Expected weight to be of same shape as normalized_shape"):
        grad(lambda x: backend.layer_norm(x, [5], double(4), None, EPS).sum())(double(2, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_vmap_is_as_exact_as_the_kernels(layer_norm, double, dtype):
    """It corrects the mean in the accumulation type. At this offset, the plain formula is off by 1e-4."""
    x = (double(4, 3, 64) + (1e4 if dtype == torch.float32 else 0)).to(dtype)
    expected, actual = formula(x.double()), vmap(layer_norm)(x)
    assert actual.dtype == dtype
    # 5e-7 is the kernels' own bound in float32. Rounding to the dtype adds half a unit in the last place.
    bound = 5e-7 * (1 + expected.abs()) + torch.finfo(dtype).eps / 2 * expected.abs()
    assert ((actual.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5)])
def test_vmapped_backward_sums_parameter_gradients_over_rows(backend, double, shape):
    """The operator itself must return the right shape, although the autograd engine reduces larger gradients."""
    x, dy, w, b = double(3, *shape), double(3, *shape), double(5), double(5)

    def backward(x, dy):
        _, mean, rstd = backend.forward(x, (5,), w, b, EPS)
        return backend.backward(dy, x, (5,), mean, rstd, w, b, [True, True, True])

    expected = zip(*(backward(*tensors) for tensors in zip(x, dy, strict=True)), strict=True)
    for actual, parts in zip(vmap(backward)(x, dy), expected, strict=True):
        torch.testing.assert_close(actual, torch.stack(parts))  # float64
