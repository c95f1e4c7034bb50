"""The CPU kernels of gates: the activations over the whole range, and bits that depend on nothing but a row."""

import itertools

import numpy as np
import pytest
import torch
from support.reference import BF16, F16, F32, F64, dtypes_id, exact

ops = torch.ops.layernorm
ACTIVATIONS = ["silu", "sigmoid"]


def whole_range(dtype):
    """Return all numbers of a 16-bit dtype, or numbers of all exponents and signs, and many near the limits of exp."""
    if dtype in (F16, BF16):
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        integers = torch.int32 if dtype == F32 else torch.int64
        info = torch.iinfo(integers)
        bits = np.linspace(info.min, info.max, 200_001, dtype=np.float64).clip(info.min, info.max * (1 - 2.0**-50))
        limit = 110 if dtype == F32 else 750
        numbers = torch.cat(
            [torch.from_numpy(bits).to(integers).view(dtype), torch.linspace(-limit, limit, 200_001).to(dtype)]
        )
    return numbers[numbers.isfinite()]


def evaluate(activation, z):
    """Return f(z) and f'(z) of a gated norm. Its input is 0 and its bias is 1, so that it multiplies 1 by f(z)."""
    z = z[None]
    x, bias, ones = torch.zeros_like(z), torch.ones(z.shape[1]), torch.ones_like(z)
    options = {"rms": True, "activation": activation}
    y, _, _, rstd = ops.forward.fused(x, bias.shape, None, bias.to(rstd_dtype(z)), 1.0, None, z, **options)
    wanted = [False, False, False, True, False, False]
    gradients = ops.backward.fused(
        ones, x, bias.shape, None, rstd, None, bias.to(rstd_dtype(z)), wanted, None, z, **options
    )
    return y[0], gradients[3][0]


def rstd_dtype(z):
    return F64 if z.dtype == F64 else F32


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=dtypes_id)
def test_activations(activation, dtype):
    """f(z) is within 8 roundings (4 ulp) of float or double arithmetic, and one rounding to a 16-bit dtype.

    exp has up to 4 roundings, or 2 with fused multiply-adds; 1 + e, its reciprocal, and the products with e and z have
    one each. A subnormal exp(-|z|) is off by half of the smallest number, by which silu multiplies z. f'(z) is a
    product of two such results, relative to the magnitudes of its terms, because it has a zero.
    """
    z = whole_range(dtype)
    values, derivatives = evaluate(activation, z)
    arithmetic = torch.finfo(rstd_dtype(z))
    result, x = torch.finfo(dtype), exact(z)
    with np.errstate(over="ignore", under="ignore"):
        e = np.exp(-abs(x))
        s, complement = np.where(x < 0, e, 1) / (1 + e), np.where(x < 0, 1, e) / (1 + e)
    factor, terms = (abs(x), s * (1 + abs(x) * complement)) if activation == "silu" else (1, s * complement)
    f, slope = (x * s, s * (1 + x * complement)) if activation == "silu" else (s, s * complement)
    tiny = arithmetic.smallest_normal * arithmetic.eps * (1 + factor) + result.smallest_normal * result.eps
    narrow = result.eps / 2 if result.bits == 16 else 0
    for actual, expected, scale, roundings in ((values, f, abs(f), 8), (derivatives, slope, terms, 16)):
        bound = roundings * arithmetic.eps / 2 * scale + narrow * abs(expected) + tiny
        error = abs(exact(actual) - expected)
        assert (error <= bound).all(), (z[(error / bound).argmax()], (error / bound).max())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=dtypes_id)
def test_infinities_and_nan(activation, dtype):
    z = torch.tensor([float("inf"), -float("inf"), float("nan")], dtype=dtype, requires_grad=True)
    expected = (torch.nn.functional.silu if activation == "silu" else torch.sigmoid)(z)
    (slope,) = torch.autograd.grad(expected.sum(), z)
    values, derivatives = evaluate(activation, z.detach())
    torch.testing.assert_close(values, expected.detach(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(derivatives, slope, rtol=0, atol=0, equal_nan=True)


def gated_norm(x, z, dy, w, b, activation, gate_first, rms):
    """Return what has one row for each row of x, and the gradients of weight and bias."""
    options = {"rms": rms, "activation": activation, "gate_first": gate_first}
    y, _, mean, rstd = ops.forward.fused(x, w.shape, w, b, 1e-5, None, z, **options)
    wanted = [True, True, True, True, False, False]
    dx, dw, db, dz, *_ = ops.backward.fused(
        dy, x, w.shape, None if rms else mean, rstd, w, b, wanted, None, z, **options
    )
    return [y, rstd, dx, dz], [dw, db]


def gated_residual(x, residual, dy, w, b, gate, wanted):
    y, total, mean, rstd = ops.forward.fused(x, w.shape, w, b, 1e-5, residual, None, gate)
    return [y, total], ops.backward.fused(dy, total, w.shape, mean, rstd, w, b, wanted, None, None, gate, x)


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


CASES = [(F32, 96, 384), (BF16, 96, 384), (F16, 300, 70), (F64, 40, 1000), (F32, 3, 20001), (BF16, 70, 2048)]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("gate_first", [False, True], ids=["after", "first"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_gated_norm(case, gate_first, threads):
    """They depend on neither the threads nor the strides, and those of a row not on the other rows."""
    dtype, rows, cols = case
    x, z, dy = torch.randn(3, rows, cols, dtype=F64).to(dtype)
    w, b = torch.randn(2, cols, dtype=F64).to(rstd_dtype(x))
    for activation, rms in itertools.product(ACTIVATIONS, (False, True)):
        options = activation, gate_first, rms
        threads(1)
        by_row, by_column = gated_norm(x, z, dy, w, b, *options)
        single, _ = gated_norm(x[-1:], z[-1:], dy[-1:], w, b, *options)
        assert_same(single, [t[-1:] for t in by_row])
        threads(4)
        fused = torch.cat([x, z, dy, z], 1)  # a fused projection
        views = [fused[:, i * cols : (i + 1) * cols] for i in range(3)]
        for arguments in ((x, z, dy), views):
            strided = gated_norm(*arguments, w, b, *options)
            assert_same(strided[0] + strided[1], by_row + by_column)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_gated_residual(case, threads):
    """They depend on neither the threads nor on which gradients are wanted."""
    dtype, rows, cols = case
    x, residual, dy = torch.randn(3, rows, cols, dtype=F64).to(dtype)
    w, b, gate = torch.randn(3, cols, dtype=F64).to(dtype)
    threads(1)
    outputs, gradients = gated_residual(x, residual, dy, w, b, gate, [True, True, True, False, True, True])
    threads(4)
    for wanted in itertools.product([False, True], [False, True], [False, True], [False], [False, True], [False, True]):
        same_outputs, some = gated_residual(x, residual, dy, w, b, gate, list(wanted))
        assert_same(same_outputs, outputs)
        for gradient, expected, is_wanted in zip(some, gradients, wanted, strict=True):
            assert torch.equal(gradient, expected) if is_wanted else gradient is None
