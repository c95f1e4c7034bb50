"""Input, weight and bias of any floating dtypes, including the combinations that have no kernel of their own.

Compiled calls with such dtypes are in test_family.py.
"""

import itertools

import pytest
import torch
from reference import BF16, DTYPES, F16, F32, F64, check_backward, check_forward, dtype_id, statistics_dtype
from shapes import ALL, as_rows, assert_same_bits, randn, run_images
from torch.nn import functional as F

import layernorm_ext

FLOATS = [F64, F32, F16, BF16]
# (input, weight, bias): every combination without a kernel.
TRIPLES = [(x, w, b) for x, w, b in itertools.product(FLOATS, repeat=3) if w != b or (x, w) not in DTYPES]
# One of each kind for slow tests: wider parameters, narrower ones, and two parameter dtypes.
SOME = [(F32, F64, F64), (F32, F16, F16), (F64, F32, BF16), (F16, F16, F32), (BF16, F64, F16)]


def triple_id(value):
    return "-".join(map(dtype_id, value)) if isinstance(value, tuple) else str(value)


some_triples = pytest.mark.parametrize("dtypes", SOME, ids=triple_id)


def arguments(dtypes, device="cpu", rows=5, cols=40):
    """Return input, grad_output, weight and bias."""
    x, dy = (randn((rows, cols), dtypes[0], device) for _ in range(2))
    return x, dy, *(randn(cols, dtype, device) for dtype in dtypes[1:])


@pytest.mark.parametrize("dtypes", TRIPLES, ids=triple_id)
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero_centered"])
def test_results_match_float64(backend, dtypes, rms, zero_centered):
    """The results also have the bits that they have for parameters converted to the accumulation type beforehand.

    Rounding a float64 parameter to float32 adds 2^-24 of a term to bounds of 8 such roundings, of which random rows
    reach half.
    """
    x, dy, w, b = arguments(dtypes, backend.device)
    options = {"rms": rms, "zero_centered_weight": zero_centered}
    output, mean, rstd = backend.forward(x, (40,), w, b, **options)
    check_forward((output, mean, rstd), x, w, b, **options)
    dx, dw, db = backend.backward(dy, x, (40,), mean, rstd, w, b, ALL, **options)
    check_backward((dx, dw, None), dy, x, w, dtypes[1], **options)
    check_backward((None, None, db), dy, x, w, dtypes[2], **options)

    converted = [parameter.to(statistics_dtype(x.dtype)) for parameter in (w, b)]
    assert_same_bits([output], backend.forward(x, (40,), *converted, **options)[:1])
    expected = backend.backward(dy, x, (40,), mean, rstd, *converted, ALL, **options)
    assert_same_bits([dx, dw, db], [right.to(dtype) for right, dtype in zip(expected, dtypes, strict=True)])


@pytest.mark.parametrize("x_dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_one_parameter(backend, x_dtype, dtype):
    """The gradient of an absent parameter, if requested, has the dtype of the other one."""
    for rows in (5, 0):
        x, dy, p, _ = arguments((x_dtype, dtype, dtype), backend.device, rows)
        for w, b in ((p, None), (None, p)):
            results = backend.forward(x, (40,), w, b)
            gradients = backend.backward(dy, x, (40,), *results[1:], w, b, ALL)
            assert results[0].dtype == x_dtype and [g.dtype for g in gradients] == [x_dtype, dtype, dtype]
            if rows:
                check_forward(results, x, w, b)
                check_backward(gradients, dy, x, w, dtype)
            else:
                assert not gradients[1].any() and not gradients[2].any()


@some_triples
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
def test_images_match_float64(backend, dtypes, memory_format):
    x, dy = (randn((2, 6, 3, 4), dtypes[0], backend.device).to(memory_format=memory_format) for _ in range(2))
    w, b = (randn(6, dtype, backend.device) for dtype in dtypes[1:])
    *results, dw, db = run_images(backend, x, dy, w, b)
    output, mean, rstd, dx, dy, x = (as_rows(t) for t in (*results, dy, x))
    check_forward((output, mean, rstd), x, w, b)
    check_backward((dx, dw, None), dy, x, w, dtypes[1])
    check_backward((None, None, db), dy, x, w, dtypes[2])


@some_triples
def test_residual(backend, dtypes):
    """The sum has the dtype of the input, whatever those of the parameters."""
    x, residual, w, b = arguments(dtypes, backend.device)
    output, total, *_ = backend.ops.forward.residual(x, residual, (40,), w, b)
    assert_same_bits([total, output], [x + residual, backend.forward(x + residual, (40,), w, b)[0]])
    in_place = residual.clone()
    assert_same_bits([backend.ops.forward_(x, in_place, (40,), w, b)[0], in_place], [output, total])


def test_opcheck(backend):
    x, dy, w, b = (t.requires_grad_() for t in arguments((BF16, F64, F16), backend.device, cols=6))
    mean, rstd = (torch.rand(5, 1, device=x.device) for _ in range(2))
    torch.library.opcheck(backend.ops.forward.default, (x, (6,), w, b))
    torch.library.opcheck(backend.ops.backward.default, (dy, x, (6,), mean, rstd, w, b, ALL))
    torch.library.opcheck(backend.ops.forward.residual, (x, dy, (6,), w, b), {"rms": True})
    x, dy, mean, rstd = (t.detach().t()[None].contiguous().mT.requires_grad_() for t in (x, dy, mean, rstd))
    images = {"preserve_layout": True}
    torch.library.opcheck(backend.ops.forward.default, (x, (6,), w, b), images)
    torch.library.opcheck(backend.ops.backward.default, (dy, x, (6,), mean, rstd, w, b, ALL), images)


# Functions and modules, against torch in float64


SHAPE = (40,)
OURS = {
    "layer_norm": lambda x, w, b: layernorm_ext.layer_norm(x, SHAPE, w, b),
    "memory_efficient": lambda x, w, b: layernorm_ext.layer_norm(x, SHAPE, w, b, memory_efficient=True),
    "rms_norm": lambda x, w, b: layernorm_ext.rms_norm(x, SHAPE, w, 1e-5) + b.sum() * 0,
    "add_layer_norm": lambda x, w, b: layernorm_ext.add_layer_norm(x, 2 * x, SHAPE, w, b)[0],
    "layer_norm_2d": lambda x, w, b: layernorm_ext.layer_norm_2d(x, w, b, 1e-5),
}
TORCHS = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, SHAPE, w, b),
    "memory_efficient": lambda x, w, b: F.layer_norm(x, SHAPE, w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x, SHAPE, w, 1e-5) + b.sum() * 0,
    "add_layer_norm": lambda x, w, b: F.layer_norm(3 * x, SHAPE, w, b),
    "layer_norm_2d": lambda x, w, b: F.layer_norm(x.movedim(1, -1), SHAPE, w, b).movedim(-1, 1),
}
all_functions = pytest.mark.parametrize("name", OURS)


def leaves(name, dtypes):
    """Return input, weight and bias, and copies of them in float64. The parameters are at least 0.1."""
    x = randn((2, 40, 2, 3) if name == "layer_norm_2d" else (5, 40), dtypes[0])
    tensors = [x, *((randn(40, F64).abs() + 0.1).to(dtype) for dtype in dtypes[1:])]
    return [t.requires_grad_() for t in tensors], [t.detach().double().requires_grad_() for t in tensors]


def loss(y):
    """Return a scalar to which each element contributes with another weight."""
    return (y.double().flatten() * torch.linspace(-1, 1, y.numel(), dtype=F64)).sum()


def assert_near(actual, expected, dtypes, result_dtypes):
    """Allow an error of 64 roundings to the narrowest dtype, relative to the largest value.

    The gradients are sums of 5 to 12 products of size 1. A memory-efficient backward divides the rounded output by
    weights as small as 0.1.
    """
    tolerance = 64 * max(torch.finfo(dtype).eps for dtype in dtypes)
    for a, e, dtype in zip(actual, expected, result_dtypes, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), e.double(), rtol=0, atol=tolerance * max(1, e.abs().max().item()))


@some_triples
@all_functions
def test_derivatives(dtypes, name):
    """The second derivative is that of a product of gradients. Memory-efficient backward has none."""

    def derivatives(function, tensors):
        y = function(*tensors)
        dx, dw, db = torch.autograd.grad(loss(y), tensors, create_graph=name != "memory_efficient")
        if name == "memory_efficient":
            return y, dx, dw, db
        return y, dx, dw, db, *torch.autograd.grad(loss(dx) * dw.double().sin().sum(), tensors[:2])

    tensors, wide = leaves(name, dtypes)
    actual = derivatives(OURS[name], tensors)
    assert_near(actual, derivatives(TORCHS[name], wide), dtypes, (dtypes[0], *dtypes, *dtypes[:2])[: len(actual)])
    with torch.inference_mode():
        assert_same_bits([OURS[name](*(t.detach().clone() for t in tensors))], actual[:1])


@some_triples
@all_functions
def test_func(dtypes, name):
    """torch.func's gradient and vmap, and forward mode."""
    tensors, wide = leaves(name, dtypes)
    tangents = [torch.randn_like(t) for t in tensors]

    def results(function, tensors):
        gradients = torch.func.grad(lambda *a: loss(function(*a)), argnums=(0, 1, 2))(*tensors)
        batched = torch.vmap(function, (0, None, None))(torch.stack([tensors[0], 2 * tensors[0]]), *tensors[1:])
        directions = tuple(t.to(a.dtype) for t, a in zip(tangents, tensors, strict=True))
        return *gradients, batched, torch.func.jvp(function, tuple(tensors), directions)[1]

    assert_near(results(OURS[name], tensors), results(TORCHS[name], wide), dtypes, (*dtypes, dtypes[0], dtypes[0]))


def test_rms_norm_returns_the_dtype_of_torch():
    """torch accepts every pair. For 16-bit input it rounds the output twice."""
    for x_dtype, w_dtype in itertools.product(FLOATS, repeat=2):
        x, _, w, _ = arguments((x_dtype, w_dtype, w_dtype))
        eps = max(torch.finfo(dtype).eps for dtype in (x_dtype, F32 if w_dtype == F64 else w_dtype))
        expected = F.rms_norm(x, (40,), w, 1e-6)
        torch.testing.assert_close(layernorm_ext.rms_norm(x, (40,), w, 1e-6), expected, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "AddLayerNorm", "AddRMSNorm", "LayerNorm2d"])
def test_fp16_modules_train_on_float32_input(name):
    norm = getattr(layernorm_ext, name)(8, dtype=F16)
    x = torch.randn(2, 8, 3, 8)
    y = norm(x, x)[0] if name.startswith("Add") else norm(x)
    y.square().mean().backward()
    assert y.dtype == F32 and all(p.grad.dtype == p.dtype == F16 for p in norm.parameters())


def test_bias_is_saved_only_for_its_dtype():
    """If the weight has the bias's dtype, backward needs nothing from the bias."""
    for dtype, kept in ((F32, False), (F64, True)):
        saved = []
        b = torch.randn(8, dtype=dtype, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            layernorm_ext.layer_norm(torch.randn(3, 8), (8,), torch.ones(8), b)
        assert any(t.data_ptr() == b.data_ptr() for t in saved if t is not None) == kept
