"""Gates: beside a residual, where the operators call them input_scale, and in gated norms.

test_functions.py and the other tests of the family (support/family.py) test derivatives, transforms and tracers.
"""

import itertools

import numpy as np
import pytest
import torch
from support.backends import assert_same_bits
from support.family import EPS
from support.inputs import all_dtypes, amid_nans, data_dtypes, randn, rms_or_not
from support.reference import (
    BF16,
    F16,
    F32,
    F64,
    GRADIENT,
    OUTPUT,
    PARAMETER_GRADIENT,
    RESIDUALS,
    Backward,
    Forward,
    assert_within,
    broadcast_rows,
    check_backward,
    check_forward,
    dtypes_id,
    exact,
    rounding,
    statistics_dtype,
)
from torch.nn import functional as F

import layernorm_ext
from layernorm_ext import (
    add_layer_norm,
    gated_layer_norm,
    gated_rms_norm,
    layer_norm,
    rms_norm,
    trace_as,
)

ALL = [True] * 6  # output_mask


def unit(dtype):
    """Return the unit roundoff of the arithmetic for a dtype of the data."""
    return torch.finfo(statistics_dtype(dtype)).eps / 2


# Gates beside a residual

# Batch sizes of the input, of the weight, and of the gate.
GATES = {
    "shared": ((3, 5), (), ()),
    "per sample": ((3, 5), (), (3, 1)),
    "per position": ((3, 5), (), (1, 5)),
    "per row": ((3, 5), (), (3, 5)),
    "gate and weight per sample": ((3, 5), (3, 1), (3, 1)),
    "weight per sample, gate shared": ((3, 5), (3, 1), ()),
    "no weight": ((3, 5), None, (3, 1)),
    "no weight, gate per outer and inner dimension": ((2, 3, 4), None, (2, 1, 4)),
    "many rows": ((2, 70), (), (2, 1)),
    "one gate for many rows": ((300,), (), ()),
}
gates = pytest.mark.parametrize("batches", GATES.values(), ids=GATES)


def sum_of_groups(terms, batch, gate):
    """Sum rows [rows, cols] over the batch dimensions in which a gate has no size of its own."""
    dims = tuple(d for d, size in enumerate((1,) * (len(batch) + 1 - gate.dim()) + tuple(gate.shape[:-1])) if size == 1)
    return terms.reshape(*batch, -1).sum(dims).reshape(gate.shape)


def check_gated_residual(backend, x, residual, weight, bias, gate, dy, ds, **variant):
    """Compare forward and backward with float64.

    The product and the sum are rounded to float32, and before them a float64 gate. The other results start from the sum
    that is rounded to its dtype.
    """
    batch, shape, eps = x.shape[:-1], x.shape[-1:], unit(x.dtype)
    y, total, mean, rstd = backend.ops.forward.fused(x, shape, weight, bias, EPS, residual, None, gate, **variant)
    arguments = (shape, mean, rstd, weight, bias, ALL, ds, None, gate, x)
    gradients = backend.ops.backward(dy, total, *arguments, **variant)
    ds_total, dw, db, other, dx, dgate = (t if t is None else t.contiguous() for t in gradients)
    assert other is None

    wide_x, wide_residual, factor = (exact(broadcast_rows(t, batch)) for t in (x, residual, gate))
    product = factor * wide_x
    gate_error = eps if gate.dtype.itemsize > statistics_dtype(x.dtype).itemsize else 0
    error = (2 * eps + gate_error) * np.abs(product) + eps * np.abs(wide_residual)
    assert total.dtype == residual.dtype
    expected = product + wide_residual
    assert_within(total, expected, error + rounding(total.dtype, expected, error, statistics_dtype(x.dtype)), "sum")

    rows, parameter_rows = ([broadcast_rows(t, batch) for t in g] for g in ((y, mean, rstd), (total, weight, bias)))
    check_forward(rows, *parameter_rows, EPS, dtype=x.dtype, **variant)
    # The gradients of sums of other dtypes than the input's: check_backward() takes the arithmetic of the sum.
    reference = check_backward((ds_total, dw, db), dy, total, weight, bias, EPS, grad_sum=ds, **variant)
    found = reference.grad_input
    # The gradient of the sum may be rounded to the sum's dtype before the kernel multiplies it.
    error = GRADIENT[x.dtype] * reference.terms
    error = error + rounding(total.dtype, found, error, statistics_dtype(x.dtype))
    assert dx.dtype == x.dtype and dgate.dtype == gate.dtype and dgate.shape == gate.shape
    expected, bound = found * factor, np.abs(factor) * (error + (eps + gate_error) * np.abs(found))
    bound = bound + rounding(x.dtype, expected, bound, statistics_dtype(x.dtype))
    assert_within(dx, expected, bound, "grad_scaled_input")
    terms = found * wide_x
    bound = np.abs(wide_x) * error + PARAMETER_GRADIENT[x.dtype] * np.abs(terms)
    expected, bound = (sum_of_groups(t, batch, gate) for t in (terms, bound))
    bound = bound + rounding(gate.dtype, expected, bound, statistics_dtype(x.dtype))
    assert_within(dgate, expected, bound, "grad_input_scale")


def gated_residual_arguments(backend, batches, cols, dtypes, gate_dtype=None):
    """Return input, residual, weight, bias, gate, grad_output and grad_sum, surrounded by NaN."""
    dtype, parameter_dtype, residual_dtype = dtypes
    batch, of_weight, of_gate = batches

    def draw(shape, dtype):
        return amid_nans(randn((*shape, cols), dtype, backend.device))

    w, b = (None if of_weight is None else draw(of_weight, parameter_dtype) for _ in range(2))
    gate = draw(of_gate, gate_dtype or parameter_dtype)
    return draw(batch, dtype), draw(batch, residual_dtype), w, b, gate, draw(batch, dtype), draw(batch, residual_dtype)


@pytest.mark.parametrize("dtypes", RESIDUALS, ids=dtypes_id)
@gates
def test_gated_residual_matches_float64(backend, dtypes, batches):
    for cols, rms in itertools.product((3, 100, 1025, 4100), (False, True)):
        if batches[0] == (3, 5) or cols <= 100:
            check_gated_residual(backend, *gated_residual_arguments(backend, batches, cols, dtypes), rms=rms)


@pytest.mark.parametrize("gate_dtype", [F64, F32, F16, BF16], ids=dtypes_id)
@pytest.mark.parametrize("dtypes", [(F64,) * 3, (F32,) * 3, (F16,) * 3, (BF16, F32, F32)], ids=dtypes_id)
def test_gates_of_other_dtypes_match_float64(backend, dtypes, gate_dtype):
    """Rounding a float64 gate to float32 changes no result by more than the bounds, of which random rows need half."""
    for name in ("shared", "per sample"):
        check_gated_residual(backend, *gated_residual_arguments(backend, GATES[name], 40, dtypes, gate_dtype))


def test_a_gate_of_ones_changes_no_bit(backend):
    x, residual, w, b, _, dy, ds = gated_residual_arguments(backend, GATES["shared"], 100, (F32, F32, F32))
    gate, forward = torch.ones(100, device=backend.device), backend.ops.forward.fused
    expected, results = (forward(x, (100,), w, b, EPS, residual, None, scale) for scale in (None, gate))
    assert_same_bits(results, expected)
    arguments = (dy, expected[1], (100,), *expected[2:], w, b)
    plain = backend.backward(*arguments, [True] * 3, ds)
    gradients = backend.ops.backward(*arguments, ALL, ds, None, gate, x)
    assert_same_bits(gradients[:5], [*plain, None, plain[0]])
    for index in range(6):  # each alone
        mask = [i == index for i in range(6)]
        some = backend.ops.backward(*arguments, mask, ds, None, gate, x)
        assert_same_bits(some, [g if m else None for g, m in zip(gradients, mask, strict=True)], mask)


# Gated norms

ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}
# The largest relative error of sigmoid: an exponential of two units in the last place, an addition and a division; then
# one product for silu.
ACTIVATION_ERROR = 6


def activate(z, name):
    """Return the values and the derivatives of an activation in wide arithmetic, and the derivatives' terms."""
    e = np.exp(-np.abs(z))
    s, complement = (np.where(z > 0, a, b) for a, b in ((1 / (1 + e), e / (1 + e)), (e / (1 + e), 1 / (1 + e))))
    if name == "sigmoid":
        return s, s * complement, s * complement
    return z * s, s * (1 + z * complement), s * (1 + np.abs(z) * complement)


def check_gated_norm(backend, x, gate, weight, bias, dy, *, activation, gate_first, rms, zero_centered_weight=False):
    """Compare forward and backward with float64; all tensors are rows."""
    options = {"rms": rms, "zero_centered_weight": zero_centered_weight}
    options |= {"sigmoid": activation == "sigmoid", "gate_first": gate_first}
    shape = x.shape[-1:]
    y, total, mean, rstd = backend.ops.forward.fused(x, shape, weight, bias, EPS, None, gate, **options)
    arguments = (shape, mean, rstd, weight, bias, ALL, None, gate)
    dx, dw, db, dz, *others = backend.ops.backward(dy, x, *arguments, **options)
    assert total is None and others == [None, None]

    u, arithmetic = unit(x.dtype), statistics_dtype(x.dtype)
    delta = ACTIVATION_ERROR * u  # of the activation and its derivative, relative to their terms
    wide_x, z, wide_dy, w, b = (exact(t) for t in (x, gate, dy, weight, bias))
    w = w + int(zero_centered_weight)
    p, q, q_terms = activate(z, activation)
    normalized = wide_x * p if gate_first else wide_x
    forward = Forward(normalized, EPS, rms)
    xhat, rstd = forward.xhat, forward.rstd
    abs_xhat, abs_w = np.abs(xhat), np.abs(w)

    def mean_of(t):
        return t.mean(1, keepdims=True)

    # A relative error of the elements that are normalized changes xhat by the projection of the error.
    size = rstd * np.abs(normalized) * (delta + u if gate_first else 0)
    xhat_error = size + (0 if rms else mean_of(size)) + abs_xhat * mean_of(abs_xhat * size)
    norm, norm_error = forward.output(w, b), OUTPUT[x.dtype] * (abs_w * (1 + abs_xhat) + np.abs(b)) + abs_w * xhat_error
    after = 1 if gate_first else p

    def check(name, actual, dtype, value, error):
        assert actual.dtype == dtype, name
        assert_within(actual, value, error + rounding(dtype, value, error, arithmetic), name, options)

    relative = 0 if gate_first else delta + u  # of what the gate multiplies after the norm
    check("output", y, x.dtype, norm * after, np.abs(after) * (norm_error + relative * np.abs(norm)))

    dn = wide_dy * after
    backward = Backward(dn, forward, w, rms)
    du = backward.grad_input
    abs_g = np.abs(dn) * abs_w
    du_error = (GRADIENT[x.dtype] + relative) * backward.terms
    du_error = du_error + rstd * (abs_xhat * mean_of(abs_g * xhat_error) + xhat_error * mean_of(abs_g * abs_xhat))
    if gate_first:
        factor, upstream, error = wide_x, du, du_error
        check("grad_input", dx, x.dtype, du * p, np.abs(p) * (du_error + (delta + u) * np.abs(du)))
    else:
        factor, upstream, error = wide_dy, norm, norm_error
        check("grad_input", dx, x.dtype, du, du_error)
    terms = np.abs(factor) * q_terms
    bound = terms * (error + (delta + 2 * u) * np.abs(upstream))
    check("grad_gate", dz, gate.dtype, factor * upstream * q, bound)
    sums = (PARAMETER_GRADIENT[x.dtype] + relative) * np.abs(dn)
    bound = (sums * (1 + abs_xhat) + np.abs(dn) * xhat_error).sum(0)
    check("grad_weight", dw, weight.dtype, backward.grad_weight, bound)
    check("grad_bias", db, bias.dtype, backward.grad_bias, sums.sum(0))


gated_norms = pytest.mark.parametrize(
    "options",
    [{"activation": f, "gate_first": first} for f in ACTIVATIONS for first in (False, True)],
    ids=lambda options: f"{options['activation']}-{'first' if options['gate_first'] else 'last'}",
)


@all_dtypes
@gated_norms
@rms_or_not
def test_gated_norm_matches_float64(backend, dtypes, options, rms):
    """The tensors are surrounded by NaN, so that the gate has strides of its own."""
    for rows, cols in ((7, 3), (6, 64), (9, 100), (300, 40), (5, 1025), (3, 4100), (1, 20001)):
        x, dy = (amid_nans(randn((rows, cols), dtypes[0], backend.device)) for _ in range(2))
        gate = amid_nans(2 * randn((rows, cols), dtypes[0], backend.device), gap=cols)
        w, b = (amid_nans(randn((cols,), dtypes[1], backend.device)) for _ in range(2))
        check_gated_norm(backend, x, gate, w, b, dy, rms=rms, zero_centered_weight=rms, **options)


@pytest.mark.parametrize("gate_dtype", [F64, F32, F16, BF16], ids=dtypes_id)
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=dtypes_id)
@gated_norms
def test_gates_of_gated_norms_may_have_other_dtypes(backend, dtype, gate_dtype, options):
    """A float64 gate beside a narrower input is rounded to float32: a relative error of 2^-24 and one of z."""
    x, dy, w, b = (randn(shape, dtype, backend.device) for shape in ((9, 40), (9, 40), (40,), (40,)))
    gate = randn((9, 40), F32, backend.device).to(gate_dtype)
    check_gated_norm(backend, x, gate, w, b, dy, rms=False, **options)


def whole_range(dtype):
    """Return all numbers of a 16-bit dtype, or numbers of all exponents and signs, and many near the limits of exp."""
    if dtype in (F16, BF16):
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    integers = torch.int32 if dtype == F32 else torch.int64
    info = torch.iinfo(integers)
    bits = np.linspace(info.min, info.max, 200_001, dtype=np.float64).clip(info.min, info.max * (1 - 2.0**-50))
    limit = 110 if dtype == F32 else 750
    return torch.cat(
        [torch.from_numpy(bits).to(integers).view(dtype), torch.linspace(-limit, limit, 200_001).to(dtype)]
    )


@data_dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_over_the_whole_range(backend, dtype, activation):
    """f(z) is within 8 roundings (4 ulp) of float or double arithmetic, and one rounding to a 16-bit dtype.

    exp has up to 4 roundings, or 2 with fused multiply-adds; 1 + e, its reciprocal, and the products with e and z have
    one each. A subnormal exp(-|z|), by which silu multiplies z, is off by half of the smallest number on a CPU, and may
    be zero on a GPU. f'(z) is a product of two such results, relative to the magnitudes of its terms, because it has a
    zero. NaN and infinities give torch's results.
    """
    z = whole_range(dtype)
    z, special = z[z.isfinite()], torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype)
    z = torch.cat([z[len(z) % 64 :].view(-1, 64), special[:, None].expand(-1, 64)]).to(backend.device)
    ones, options = torch.ones_like(z), {"rms": True, "sigmoid": activation == "sigmoid"}  # xhat is 1
    y, _, _, rstd = backend.ops.forward.fused(ones, (64,), None, None, 0.0, None, z, **options)
    mask = [False, False, False, True, False, False]
    *_, dz, _, _ = backend.ops.backward(ones, ones, (64,), None, rstd, None, None, mask, None, z, **options)

    wide, arithmetic = exact(z[:-3]), statistics_dtype(dtype)
    with np.errstate(over="ignore", under="ignore"):
        p, q, terms = activate(wide, activation)
    smallest = torch.finfo(arithmetic).smallest_normal * (torch.finfo(arithmetic).eps if backend.name == "cpu" else 1)
    tiny = smallest * (1 + (np.abs(wide) if activation == "silu" else 1))
    for name, actual, value, size, roundings in (("output", y, p, np.abs(p), 8), ("grad_gate", dz, q, terms, 16)):
        error = roundings * unit(dtype) * size + tiny
        assert_within(actual[:-3], value, error + rounding(dtype, value, error, arithmetic), name)
    wide = special.double().requires_grad_()
    expected = ACTIVATIONS[activation](wide)
    (gradient,) = torch.autograd.grad(expected.sum(), wide)
    for actual, right in ((y, expected.detach()), (dz, gradient)):
        torch.testing.assert_close(actual[-3:, 0].double().cpu(), right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 12])
@pytest.mark.parametrize("parameter_shape", [(12,), (4, 1, 12)], ids=str)
def test_groups_have_the_bits_of_norms_apart(gate_first, num_groups, parameter_shape):
    x, gate, w, b = (torch.randn(shape) for shape in ((4, 9, 12), (4, 9, 12), parameter_shape, parameter_shape))

    def group(t, i):
        return None if t is None else t.unflatten(-1, (num_groups, -1))[..., i, :]

    for each in (gate, None):
        y = gated_layer_norm(x, each, (12,), w, b, gate_first=gate_first, num_groups=num_groups)
        for i in range(num_groups):
            of_group = [group(t, i) for t in (x, each, w, b)]
            shape = (12 // num_groups,)
            expected = gated_layer_norm(*of_group[:2], shape, *of_group[2:], gate_first=gate_first)
            assert_same_bits([group(y, i)], [expected])


# Sums of 36 float64 products in another order; aten's layer_norm also has another formula.
ANOTHER_ORDER = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("shapes", [((12,), (4, 1, 12)), ((1, 9, 12), (12,)), ((1, 1, 12), (4, 9, 12))], ids=str)
@pytest.mark.parametrize("mode", ["eager", "kernel", "aten"])
@pytest.mark.parametrize("has_gate", [False, True])
def test_one_parameter_of_groups_may_be_shared_by_all_rows(shapes, mode, has_gate):
    x, w, b = (torch.randn(shape, dtype=F64, requires_grad=True) for shape in ((4, 9, 12), *shapes))
    gate = torch.randn(4, 9, 12, dtype=F64) if has_gate else None

    def call(x, w, b):
        return gated_layer_norm(x, gate, (12,), w, b, num_groups=3)

    expected = call(x, w.expand(4, 9, 12), b.expand(4, 9, 12))
    with trace_as(None if mode == "eager" else mode):
        actual = (call if mode == "eager" else torch.compile(call, backend="aot_eager", fullgraph=True))(x, w, b)
    torch.testing.assert_close(actual, expected, **ANOTHER_ORDER)
    gradients = (torch.autograd.grad(y.sin().sum(), (x, w, b)) for y in (actual, expected))
    torch.testing.assert_close(next(gradients), next(gradients), **ANOTHER_ORDER)


def test_without_a_gate_it_is_the_plain_norm():
    """For modules as well; the residual of a first block is zero."""
    x, w, b = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    for options in ({}, {"activation": "sigmoid"}, {"gate_first": True}, {"zero_centered_weight": True}):
        plain = {name: value for name, value in options.items() if name == "zero_centered_weight"}
        pairs = [
            (gated_layer_norm(x, None, (8,), w, b, **options), layer_norm(x, (8,), w, b, **plain)),
            (gated_rms_norm(x, None, (8,), w, **options), rms_norm(x, (8,), w, **plain)),
            (layernorm_ext.GatedRMSNorm(8, **options)(x), layernorm_ext.RMSNorm(8, **plain)(x)),
        ]
        for actual, expected in pairs:
            assert_same_bits([actual], [expected])
    norm = layernorm_ext.AddLayerNorm(8)
    assert_same_bits(norm(x, gate=w), add_layer_norm(x, torch.zeros_like(x), (8,), norm.weight, norm.bias, gate=w))
