"""Derivatives of every order and mode, against finite differences or autograd through the formula."""

import itertools

import pytest
import torch
from support.backends import Results, forward, run
from support.family import EPS
from support.inputs import BATCH_SIZES, arguments, data_dtypes, hard_rows, randn, rms_or_not, tiny_rows
from support.reference import F32, F64, Backward, Forward, assert_within, check_backward, check_forward, exact, norm
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint


@pytest.fixture(params=["rows", "images"])
def layer_norm(request, backend):
    """The norm over the last dimension, computed by the kernels for rows, or by those for images [N, C, *]."""

    def of_rows(x, weight=None, bias=None):
        return backend.layer_norm(x, x.shape[-1:], weight, bias, EPS)

    def of_images(x, weight=None, bias=None):
        images = x.movedim(-1, 1).contiguous()
        return backend.forward(images, x.shape[-1:], weight, bias, EPS, images=True)[0].movedim(1, -1)

    return of_rows if request.param == "rows" else of_images


@pytest.fixture
def double(backend):
    return lambda *shape: torch.randn(shape, dtype=torch.float64, device=backend.device)


@pytest.fixture
def leaves(double):
    """Input, weight and bias."""
    return [double(*shape).requires_grad_() for shape in ((3, 4, 5), (5,), (5,))]


def formula(x, weight=None, bias=None):
    return norm(x, weight, bias, EPS)[0]


def assert_equal(actual, expected):
    """Allow for some hundred operations with a relative error of 1e-16 each."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# A case: batch sizes as in BATCH_SIZES, whether there is a residual, which of the tensors require a gradient, options.
SHARED = [((4,), *parameters) for parameters in itertools.product([(), None], repeat=2)]
CASES = [
    (batches, adds, requires_grad, {})
    for batches, adds in [*((batches, False) for batches in SHARED), (SHARED[1], True)]
    for requires_grad in itertools.product([True, False], repeat=1 + adds + batches.count(()))
    if any(requires_grad)
]
# Batch sizes are replaced by small ones, because an error of one element is small in a projection of many.
SMALLER = {1: 1, 2: 2, 3: 2, 4: 2, 5: 3, 7: 3}
CASES += [
    (
        [sizes and tuple(map(SMALLER.get, sizes)) for sizes in batches],
        adds,
        [True] * 4,
        {"rms": not adds, "zero_centered_weight": True},
    )
    for (name, batches), adds in itertools.product(BATCH_SIZES.items(), (False, True))
    if name != "many rows"
]


# Options of gradcheck. Random projections of the Jacobians (fast_mode) take a seventh of the time. The tolerances are a
# hundredth of the default ones, so that an error of 0.01 in one element of a gradient fails; finite differences of
# float64 have errors of 1e-9.
PROJECTED = {"fast_mode": True, "rtol": 1e-5, "atol": 1e-7, "check_batched_grad": True}


@pytest.mark.parametrize(("batches", "adds", "requires_grad", "options"), CASES)
def test_first_and_second_derivatives(backend, batches, adds, requires_grad, options):
    """First derivatives: reverse mode, forward mode, and batched. Second: forward and reverse mode over reverse."""
    x, residual, *parameters = arguments(batches, 4, (F64, F64), backend.device)
    tensors = [x, residual if adds else None, *parameters]
    present = [t.unflatten(-1, (2, 2)) for t in tensors if t is not None]
    inputs = [t.requires_grad_(required) for t, required in zip(present, requires_grad, strict=False)]

    def function(*inputs):
        given = iter(inputs)
        results = forward(backend, *(t if t is None else next(given) for t in tensors), EPS, (2, 2), **options)
        return (results.output, results.total * 1.5) if adds else results.output  # gradcheck takes one after the other

    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_forward_grad=True, **PROJECTED)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, **PROJECTED)


@pytest.mark.parametrize("order", [3, 4])
def test_higher_derivatives(layer_norm, double, leaves, order):
    """The derivatives along given directions. torch's own third derivative is silently wrong."""
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


SECOND_DERIVATIVES = {
    "hessian": hessian,
    "jacrev(jacrev)": lambda f, argnums: jacrev(jacrev(f, argnums), argnums),
    "jacrev(jacfwd)": lambda f, argnums: jacrev(jacfwd(f, argnums), argnums),
    "jacfwd(jacfwd)": lambda f, argnums: jacfwd(jacfwd(f, argnums), argnums),
}


@pytest.mark.parametrize("second_derivative", SECOND_DERIVATIVES.values(), ids=SECOND_DERIVATIVES)
def test_func_by_every_pair_of_input_weight_and_bias(layer_norm, double, second_derivative):
    """The second derivatives of torch's layer_norm are silently wrong.

    Derivatives by weight and input are wrong in all four ways, by input twice in the last two. They are off by 0.75
    where the largest value is 1.6, and by 1.5 where it is 4.7.
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
    """The output has a tangent if only the weight has one and no tensor requires a gradient."""
    x, w, b, tangent = double(2, 5), double(5), double(5), double(5)
    with forward_ad.dual_level():
        dual = layer_norm(x, forward_ad.make_dual(w, tangent), b)
        assert_equal(forward_ad.unpack_dual(dual).tangent, formula(x) * tangent)


@pytest.mark.filterwarnings("error")  # vmap warns if it falls back to a loop
@pytest.mark.parametrize("in_dims", [(0, None, None), (1, None, None), (None, 0, None), (None, None, 0), (2, 1, 0)])
def test_vmap(layer_norm, double, in_dims):
    """Map over the input, over one parameter, or over all three tensors, along any dimension."""
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


# Precision of the transforms. They compose the results of aten operations, which must keep the bounds of the kernels.

hard_or_tiny = pytest.mark.parametrize("rows, eps", [(hard_rows, 1e-5), (tiny_rows, 0.0)], ids=["hard", "tiny"])


@pytest.mark.parametrize("cols", [7, 64, 1100])
@data_dtypes
@rms_or_not
@hard_or_tiny
@pytest.mark.parametrize("adds", [False, True], ids=["", "residual"])
def test_vmap_is_as_exact_as_the_kernels(backend, dtype, cols, rms, rows, eps, adds):
    """Squares of some rows overflow or underflow. With a residual, the sum of two halves is the row."""
    x = rows(dtype, cols).to(backend.device)
    halves = (x / 2, x / 2) if adds else (x, torch.zeros_like(x))  # input and residual
    x = sum(halves)
    dy, w, b = (randn(shape, dtype, backend.device) for shape in (x.shape, (cols,), (cols,)))
    dy = dy / 256  # else float16 gradients of tiny rows overflow

    def both_passes(x, residual, dy):
        results = run(backend, x, dy, w, b, eps, residual=residual if adds else None, rms=rms)
        return {name: t for name, t in results._asdict().items() if t is not None}

    results = Results(**vmap(both_passes)(*(t[:, None] for t in (*halves, dy))))  # a call for each row
    matrices = results.rows((slice(None), 0))
    check_forward(matrices.forward, x, w, b, eps, rms=rms)
    check_backward(matrices.gradients, dy, x, w, b, eps, rms=rms)
    if dtype in (F32, F64):  # else each row's gradient of a parameter is rounded
        sums = (t.to(F64).sum(0).to(dtype) for t in (results.grad_weight, results.grad_bias))
        check_backward((None, *sums), dy, x, w, b, eps, rms=rms)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("cols", [7, 300])
@rms_or_not
@hard_or_tiny
def test_first_derivatives_of_hard_values(backend, dtype, cols, rms, rows, eps):
    """torch.func and forward mode compute them. The tangent is as large as the row, so its derivative is about one."""
    x, w = rows(dtype, cols).to(backend.device), randn((cols,), dtype, backend.device)
    dy, tangent = randn(x.shape, dtype, backend.device), x.flip(1) / 4

    def function(x):
        return forward(backend, x, None, w, None, eps, rms=rms).output

    check_backward((vjp(function, x)[1](dy)[0], None, None), dy, x, w, None, eps, rms=rms)
    exact_forward = Forward(exact(x), eps, rms)
    # The Jacobian of xhat is symmetric, so that Backward computes its product with the tangent as well.
    expected = Backward(exact(tangent), exact_forward, None, rms)
    # Means of the tangent are added in the dtype: a few roundings more than in the kernels, which use double.
    bound = 32 * torch.finfo(dtype).eps * expected.abs_terms * abs(exact(w))
    actual = jvp(function, (x,), (tangent,))[1]
    assert_within(actual, expected.grad_input * exact(w), bound + torch.finfo(dtype).tiny)
    with forward_ad.dual_level():
        actual = forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent
    assert_within(actual, expected.grad_input * exact(w), bound + torch.finfo(dtype).tiny)


@pytest.mark.parametrize("dtype, exponent", [(F32, 118), (F32, 66), (F32, -70), (F64, 1000), (F64, -530)], ids=str)
@rms_or_not
def test_second_derivatives_of_hard_values(backend, double, dtype, exponent, rms):
    """Squares of x * 2^k overflow or underflow. Without eps, the norm of it is that of x, and each derivative by x has
    a factor of 2^-k."""
    x, w, v = (double(*shape).to(dtype).double() for shape in ((3, 40), (40,), (3, 40)))

    def function(x, w):
        return forward(backend, x, None, w, None, 0.0, rms=rms).output.pow(2).sum()

    def of_autograd(x, w, v):
        inputs = [x.detach().requires_grad_(), w.detach().requires_grad_()]
        (first,) = torch.autograd.grad(function(*inputs), inputs[:1], create_graph=True)
        return first.detach(), *torch.autograd.grad(first, inputs, v)

    def of_func(x, w, v):
        first, pullback = vjp(grad(function), x, w)
        return first, *pullback(v)

    expected = of_autograd(x, w, v)
    scaled = (x * 2.0**exponent).to(dtype), w.to(dtype), (v * 2.0**exponent).to(dtype)
    # The CUDA kernels do not rescale rows whose squares underflow, unlike the CPU kernels and of_func's composition.
    for derivative in (of_autograd, of_func) if backend.name == "cpu" or exponent > 0 else (of_func,):
        first, by_x, by_w = derivative(*scaled)
        actual = [(first.double(), exponent), (by_x.double(), exponent), (by_w.double(), 0)]
        for (value, power), e in zip(actual, expected, strict=True):
            # A hundred roundings relative to the largest element.
            tolerance = {"rtol": 0, "atol": 100 * torch.finfo(dtype).eps * e.abs().max().item()}
            torch.testing.assert_close(value * 2.0**power, e, **tolerance)


@rms_or_not
def test_transforms_of_nan_infinity_and_constants(backend, rms):
    """NaN stays in its row. A constant row gives exactly the bias, also for the largest numbers."""
    huge = torch.finfo(F32).max
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0, 0.1, 1e6, 1e20, -3e37, huge])[:, None].repeat(1, 49)
    x[:3, :-1] = 1
    x, bias = x.to(backend.device), torch.ones(49, device=backend.device)
    for eps in (1e-5, 1e-30, 1e-300):
        y = vmap(lambda x, eps=eps: forward(backend, x, None, None, bias, eps, rms=rms).output)(x)
        assert y[0].isnan().all()
        assert rms or y[1:3].isnan().all()
        assert y[1:3, -1].isnan().all()
        assert torch.equal(y[3], bias)
        if rms:
            expected = x[4:, :1].double() / (x[4:, :1].double().square() + eps).sqrt() + 1
            torch.testing.assert_close(y[4:], expected.float().expand(-1, 49), rtol=5e-7, atol=0)  # as for the kernels
        else:
            assert (y[4:] == 1).all()
    gradient = vmap(grad(lambda x: forward(backend, x, None, None, None, rms=rms).output.sum()))(x[3:])
    assert gradient.isfinite().all()
    empty = vmap(lambda x: forward(backend, x, None, None, None, rms=rms).output)(x[:, None, :0])
    assert empty.shape == (9, 1, 0)


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5)])
def test_vmapped_backward_sums_parameter_gradients_over_rows(backend, double, shape):
    """Gradients of the shape of the rows would go unnoticed in autograd, which reduces gradients that are too large."""
    x, dy, w, b = double(3, *shape), double(3, *shape), double(5), double(5)

    def backward(x, dy):
        _, mean, rstd = backend.forward(x, (5,), w, b, EPS)
        return backend.backward(dy, x, (5,), mean, rstd, w, b, [True, True, True])

    expected = zip(*(backward(*tensors) for tensors in zip(x, dy, strict=True)), strict=True)
    for actual, parts in zip(vmap(backward)(x, dy), expected, strict=True):
        torch.testing.assert_close(actual, torch.stack(parts))  # float64
