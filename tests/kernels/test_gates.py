"""Gates: beside a residual, where the operators call them input_scale, and in gated norms.

test_functions.py and the other tests of the family (support/family.py) test derivatives, transforms and tracers.
"""

import itertools

import numpy as np
import pytest
import torch
from support.backends import assert_same_bits, check, run
from support.family import EPS
from support.inputs import all_dtypes, amid_nans, data_dtypes, randn, rms_or_not
from support.reference import (
    ACTIVATION,
    BF16,
    F16,
    F32,
    F64,
    RESIDUALS,
    activate,
    assert_within,
    dtypes_id,
    exact,
    rounding,
    statistics_dtype,
    unit,
)
from torch.nn import functional as F

import layernorm_ext
from layernorm_ext import add_layer_norm, gated_layer_norm, gated_rms_norm, layer_norm, rms_norm, trace_as

ALL = [True] * 6  # output_mask of backward, with the gradients of gates


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


def check_gated_residual(backend, x, residual, weight, bias, gate, dy, grad_sum, **variant):
    """Check both operators for the norm of gate * x + residual.

    `gate` is the operators' input_scale, and `grad_sum` the upstream gradient of the sum.
    """
    inputs = {"residual": residual, "input_scale": gate, "grad_sum": grad_sum, **variant}
    results = run(backend, x, dy, weight, bias, EPS, mask=ALL, **inputs)
    assert results.grad_gate is None and None not in (results.grad_scaled_input, results.grad_input_scale)
    check(results, x, dy, weight, bias, EPS, **inputs)


def gated_residual_arguments(backend, batches, cols, dtypes, gate_dtype=None):
    """Return input, residual, weight, bias, gate, grad_output and grad_sum, surrounded by NaN."""
    dtype, parameter_dtype, residual_dtype = dtypes
    batch, weight_batch, gate_batch = batches

    def draw(batch, dtype):
        return amid_nans(randn((*batch, cols), dtype, backend.device))

    w, b = (None if weight_batch is None else draw(weight_batch, parameter_dtype) for _ in range(2))
    gate = draw(gate_batch, gate_dtype or parameter_dtype)
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
    """A float64 gate may be rounded to float32: check_sum() allows for it in its bound."""
    for name in ("shared", "per sample"):
        check_gated_residual(backend, *gated_residual_arguments(backend, GATES[name], 40, dtypes, gate_dtype))


@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (BF16, F32, F32)], ids=dtypes_id)
@pytest.mark.parametrize("rows", [5, 700])
def test_expanded_parameters_have_a_gradient_for_each_sample(backend, dtypes, rows):
    x, residual, *parameters, dy, grad_sum = gated_residual_arguments(backend, ((3, rows), (), ()), 40, dtypes)
    for expanded in ({0, 1}, {2}, {0, 1, 2}):  # weight and bias; the gate; all three. Their clones are aligned.
        views = [p.clone().expand(3, 1, 40) if i in expanded else p for i, p in enumerate(parameters)]
        check_gated_residual(backend, x, residual, *views, dy, grad_sum)


def test_a_gate_of_ones_changes_no_bit(backend):
    x, residual, w, b, _, dy, grad_sum = gated_residual_arguments(backend, GATES["shared"], 100, (F32, F32, F32))
    ones, forward = torch.ones(100, device=backend.device), backend.ops.forward.fused
    expected, results = (forward(x, (100,), w, b, EPS, residual, None, input_scale) for input_scale in (None, ones))
    assert_same_bits(results, expected)
    arguments = (dy, expected[1], (100,), *expected[2:], w, b)
    plain = backend.backward(*arguments, [True] * 3, grad_sum)
    gradients = backend.ops.backward(*arguments, ALL, grad_sum, None, ones, x)
    assert_same_bits(gradients[:5], [*plain, None, plain[0]])  # scaled_input has the gradient of the sum
    for index in range(6):  # each gradient alone
        mask = [i == index for i in range(6)]
        some = backend.ops.backward(*arguments, mask, grad_sum, None, ones, x)
        assert_same_bits(some, [g if m else None for g, m in zip(gradients, mask, strict=True)], mask)


# Gated norms

ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}


def check_gated_norm(backend, x, gate, weight, bias, dy, *, activation, gate_first, rms, zero_centered_weight=False):
    options = {"rms": rms, "zero_centered_weight": zero_centered_weight}
    options |= {"gate": gate, "sigmoid": activation == "sigmoid", "gate_first": gate_first}
    results = run(backend, x, dy, weight, bias, EPS, mask=ALL, **options)
    assert results.grad_gate is not None
    assert results.total is results.grad_scaled_input is results.grad_input_scale is None
    check(results, x, dy, weight, bias, EPS, **options)


gated_norms = pytest.mark.parametrize(
    "options",
    [{"activation": f, "gate_first": first} for f in ACTIVATIONS for first in (False, True)],
    ids=lambda options: f"{options['activation']}-{'first' if options['gate_first'] else 'last'}",
)


@all_dtypes
@gated_norms
@rms_or_not
def test_gated_norm_matches_float64(backend, dtypes, options, rms):
    """NaN around the rows appears in the results if a kernel reads it. The row stride of the gate differs from x's."""
    for rows, cols in ((7, 3), (6, 64), (9, 100), (300, 40), (5, 1025), (3, 4100), (1, 20001)):
        x, dy = (amid_nans(randn((rows, cols), dtypes[0], backend.device)) for _ in range(2))
        gate = amid_nans(2 * randn((rows, cols), dtypes[0], backend.device), gap=cols)
        w, b = (amid_nans(randn((cols,), dtypes[1], backend.device)) for _ in range(2))
        check_gated_norm(backend, x, gate, w, b, dy, rms=rms, zero_centered_weight=rms, **options)


@pytest.mark.parametrize("gate_dtype", [F64, F32, F16, BF16], ids=dtypes_id)
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=dtypes_id)
@gated_norms
def test_gates_of_gated_norms_may_have_other_dtypes(backend, dtype, gate_dtype, options):
    x, dy, w, b = (randn(shape, dtype, backend.device) for shape in ((9, 40), (9, 40), (40,), (40,)))
    gate = randn((9, 40), F32, backend.device).to(gate_dtype)  # kernels round a float64 gate beside a narrower input
    check_gated_norm(backend, x, gate, w, b, dy, rms=False, **options)


def whole_range(dtype):
    """Return all numbers of a 16-bit dtype, or some of all exponents and signs, and many for which exp is finite."""
    if dtype in (F16, BF16):
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    integers = torch.int32 if dtype == F32 else torch.int64
    info = torch.iinfo(integers)
    # Integers at equal distances, whose bits are read as numbers. The largest integer is not a double.
    bits = np.linspace(info.min, info.max, 200_001, dtype=np.float64).clip(info.min, info.max * (1 - 2.0**-50))
    limit = 110 if dtype == F32 else 750  # exp(limit) is infinite, and exp(-limit) zero
    return torch.cat(
        [torch.from_numpy(bits).to(integers).view(dtype), torch.linspace(-limit, limit, 200_001).to(dtype)]
    )


@data_dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_over_the_whole_range(backend, dtype, activation):
    """The errors of f(z) and f'(z) for the gate z, without those of the norm: xhat, its weight and dy are 1.

    A subnormal exp(-|z|), by which silu multiplies z, is off by half of the smallest number on a CPU, and may be zero
    on a GPU. The error of f'(z) is relative to the magnitudes of its terms, because f' is zero for some z. NaN and
    infinities give torch's results.
    """
    z = whole_range(dtype)
    z, special = z[z.isfinite()], torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype)
    z = torch.cat([z[len(z) % 64 :].view(-1, 64), special[:, None].expand(-1, 64)]).to(backend.device)
    ones, options = torch.ones_like(z), {"rms": True, "sigmoid": activation == "sigmoid"}  # xhat is 1
    y, _, _, rstd = backend.ops.forward.fused(ones, (64,), None, None, 0.0, None, z, **options)
    mask = [False, False, False, True, False, False]
    *_, dz, _, _ = backend.ops.backward(ones, ones, (64,), None, rstd, None, None, mask, None, z, **options)

    finite, arithmetic = exact(z[:-3]), statistics_dtype(dtype)
    with np.errstate(over="ignore", under="ignore"):
        f, derivative, abs_terms = activate(finite, activation == "sigmoid")
    smallest = torch.finfo(arithmetic).smallest_normal * (torch.finfo(arithmetic).eps if backend.name == "cpu" else 1)
    underflow = smallest * (1 + (np.abs(finite) if activation == "silu" else 1))
    roundings = (4, 6) if backend.name == "cpu" else ACTIVATION["cuda"]  # the CPU kernels reach 3.8 and 5.2
    results = ("output", y, f, np.abs(f)), ("grad_gate", dz, derivative, abs_terms)
    for (name, actual, value, magnitude), count in zip(results, roundings, strict=True):
        error = count * unit(dtype) * magnitude + underflow
        assert_within(actual[:-3], value, error + rounding(dtype, value, error, arithmetic), name)
    leaf = special.double().requires_grad_()
    expected = ACTIVATIONS[activation](leaf)
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    for actual, exact_value in ((y, expected.detach()), (dz, gradient)):
        torch.testing.assert_close(actual[-3:, 0].double().cpu(), exact_value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 12])
@pytest.mark.parametrize("parameter_shape", [(12,), (4, 1, 12)], ids=str)
def test_groups_have_the_bits_of_separate_norms(gate_first, num_groups, parameter_shape):
    x, gate, w, b = (torch.randn(shape) for shape in ((4, 9, 12), (4, 9, 12), parameter_shape, parameter_shape))

    def group(t, i):
        """Return the columns of a group."""
        return None if t is None else t.unflatten(-1, (num_groups, -1))[..., i, :]

    for z in (gate, None):
        y = gated_layer_norm(x, z, (12,), w, b, gate_first=gate_first, num_groups=num_groups)
        for i in range(num_groups):
            x_i, z_i, w_i, b_i = (group(t, i) for t in (x, z, w, b))
            expected = gated_layer_norm(x_i, z_i, (12 // num_groups,), w_i, b_i, gate_first=gate_first)
            assert_same_bits([group(y, i)], [expected])


# Sums of 36 float64 products in another order; aten's layer_norm also has another formula.
ANOTHER_ORDER = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("shapes", [((12,), (4, 1, 12)), ((1, 9, 12), (12,)), ((1, 1, 12), (4, 9, 12))], ids=str)
@pytest.mark.parametrize("mode", ["eager", "kernel", "aten"])
@pytest.mark.parametrize("has_gate", [False, True])
def test_one_parameter_of_groups_may_be_shared_by_all_rows(shapes, mode, has_gate):
    """Either the weight or the bias is shared; the other one is per sample, per position or per row."""
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


def test_without_a_gate_gated_norms_are_plain_norms():
    """A module with a residual, which the first block of a model does not have, takes it as zero."""
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
