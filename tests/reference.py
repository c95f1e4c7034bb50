"""Layer normalization with its formulas written out, in numbers wide enough to be called exact; what may be lost.

Rows and columns stand for the batch and the normalized dimensions. fp64 is checked in numpy's long double: 64 bits of
mantissa on x86, 113 on Arm, and an exponent in which no square of a double overflows. All else is checked in float64.
"""

from dataclasses import dataclass

import numpy as np
import torch

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
NAMES = {F64: "fp64", F32: "fp32", F16: "fp16", BF16: "bf16"}

# Dtypes of the data and of the parameters: all pairs that have kernels.
DTYPES = [(F64, F64), (F32, F32), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32)]


def dtype_id(dtype):
    return NAMES[dtype]


def dtypes_id(dtypes):
    return NAMES[dtypes[0]] if dtypes[0] == dtypes[1] else f"{NAMES[dtypes[0]]}-{NAMES[dtypes[1]]}"


def statistics_dtype(dtype):
    return F64 if dtype == F64 else F32


def exact(tensor):
    """Return a tensor as a numpy array of wide numbers."""
    array = tensor.detach().cpu().double().resolve_neg().numpy()
    return array.astype(np.longdouble) if tensor.dtype == F64 else array


@dataclass
class Forward:
    """Of rows x [rows, cols]: everything but the parameters. RMSNorm has a mean of 0."""

    mean: np.ndarray  # [rows, 1]
    rstd: np.ndarray  # [rows, 1]
    xhat: np.ndarray  # [rows, cols]

    def __init__(self, x, eps=1e-5, rms=False):
        if rms:
            self.mean = np.zeros_like(x[:, :1])
            self.rstd = 1 / np.sqrt((x**2).mean(1, keepdims=True) + eps)
            self.xhat = x * self.rstd
            return
        first = x.mean(1, keepdims=True)
        deviation = x - first
        correction = deviation.mean(1, keepdims=True)  # what the first mean is off by, for it is rounded too
        self.mean = first + correction
        deviation = deviation - correction
        variance = (deviation**2).mean(1, keepdims=True)
        self.rstd = (variance + eps) ** -0.5
        self.xhat = deviation * self.rstd

    def output(self, weight, bias):
        y = self.xhat if weight is None else self.xhat * weight
        return y if bias is None else y + bias


class Backward:
    """The gradients, and for each the magnitude of what it is a sum of: no sum can be better than its terms."""

    def __init__(self, dy, forward, weight, rms=False, grad_sum=0):
        xhat, rstd = forward.xhat, forward.rstd
        g = dy if weight is None else dy * weight
        mean_g, mean_gx = 0 if rms else g.mean(1, keepdims=True), (g * xhat).mean(1, keepdims=True)
        self.grad_input = rstd * (g - mean_g - xhat * mean_gx) + grad_sum
        self.grad_weight = (dy * xhat).sum(0)
        self.grad_bias = dy.sum(0)

        abs_g, abs_dy, abs_xhat = abs(g), abs(dy), abs(xhat)
        mean_abs_g, mean_abs_gx = abs_g.mean(1, keepdims=True), (abs_g * abs_xhat).mean(1, keepdims=True)
        self.grad_input_terms = rstd * (abs_g + mean_abs_g + (1 + abs_xhat) * mean_abs_gx) + abs(grad_sum)
        self.grad_weight_terms = (abs_dy * (1 + abs_xhat)).sum(0)
        self.grad_bias_terms = abs_dy.sum(0)


# What the arithmetic of the output may lose, in parts of its terms. 5e-7 is the package's promise for sums in fp32,
# whatever the number of columns and the mean of the row: 8 roundings of 2^-24. Random rows reach half of it, rows of a
# few outliers 0.9: adding equal numbers to a large one errs in the same direction every time. For fp64 the bound is
# three times as many roundings, 24 of 2^-53, of which the same rows reach 0.75: half as many lanes, and no wider type
# for the sums of the chunks.
OUTPUT = {F64: 24 * 2.0**-53, F32: 5e-7, F16: 5e-7, BF16: 5e-7}

# Of rstd itself: the output, at |xhat| = 1, has two parts of the above for one of rstd.
RSTD = {dtype: 2 * part for dtype, part in OUTPUT.items()}

# Of the gradients: rstd's error, and that of their own sums. Random rows reach a third of it, rows of few values half.
GRADIENT = RSTD


def rounding(dtype, value, error, arithmetic=F32):
    """Return what the conversion from the dtype of the arithmetic to `dtype` may add to an error.

    That is half a unit in the last place if it rounds, and one subnormal number, the least by which any result can be
    off.
    """
    info = torch.finfo(dtype)
    half_unit = info.eps / 2 * (np.abs(value) + error) if info.eps > torch.finfo(arithmetic).eps else 0
    return half_unit + info.smallest_normal * info.eps


def output_bound(dtype, forward, weight, bias):
    product = forward.xhat if weight is None else forward.xhat * weight
    terms = 1 + np.abs(product) + (0 if bias is None else np.abs(bias))
    error = OUTPUT[dtype] * terms
    return error + rounding(dtype, forward.output(weight, bias), error)


def assert_within(actual, expected, bounds, *context):
    """Fail with the worst element unless abs(actual - expected) <= bounds; NaN fails."""
    actual = exact(actual).reshape(expected.shape)
    bounds = np.broadcast_to(bounds, expected.shape)
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(actual - expected) <= bounds)
    if wrong.any():
        ratio = np.where(wrong, np.nan_to_num(np.abs(actual - expected) / bounds, nan=np.inf), 0)
        worst = np.unravel_index(ratio.argmax(), ratio.shape)
        place = ", ".join(map(str, worst))
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} wrong; at [{place}] {actual[worst]} instead of {expected[worst]}, off by "
            f"{ratio[worst]:.3g} times the {bounds[worst]:.3g} allowed; {', '.join(map(str, context))}"
        )


def factor(weight, zero_centered_weight):
    """Return what xhat is multiplied by."""
    return None if weight is None else exact(weight) + int(zero_centered_weight)


def check_forward(results, x, weight=None, bias=None, eps=1e-5, context=(), *, rms=False, zero_centered_weight=False):
    """Check output, mean and rstd of rows `x`, all of them 2-d tensors; return the exact result."""
    y, mean, rstd = results
    expected = Forward(exact(x), eps, rms)
    w, b = factor(weight, zero_centered_weight), None if bias is None else exact(bias)
    assert y.dtype == x.dtype and y.is_contiguous(), context
    assert_within(y, expected.output(w, b), output_bound(x.dtype, expected, w, b), "output", *context)
    if rms:
        assert mean is None, context
        mean = torch.zeros_like(rstd)
    check_statistics(mean, rstd, x.dtype, expected, context)
    return expected


def check_statistics(mean, rstd, dtype, expected, context=()):
    """Check that both are rounded once, the mean beside what the arithmetic loses relative to the deviations."""
    kind = statistics_dtype(dtype)
    assert mean.dtype == rstd.dtype == kind, context
    least = rounding(kind, expected.mean, 0)
    mean_bound = torch.finfo(kind).eps / 2 * np.abs(expected.mean) + OUTPUT[dtype] / expected.rstd + least
    assert_within(mean, expected.mean, mean_bound, "mean", *context)
    assert_within(rstd, expected.rstd, RSTD[dtype] * expected.rstd + least, "rstd", *context)


# Half a unit in the last place of 1.
ROUNDOFF = {dtype: torch.finfo(dtype).eps / 2 for dtype in (F64, F32, F16, BF16)}


def xhat_error_from_output(x, weight, bias, rms=False, zero_centered_weight=False):
    """Return how far from xhat what backward recovers from the output may be, as LayerNorm's docstring has it.

    The output is off by what its arithmetic loses, is rounded, and divided by the weight; fp16 has subnormal numbers.
    """
    forward, w = Forward(exact(x), rms=rms), factor(weight, zero_centered_weight)
    divisor, shift = 1 if w is None else np.abs(w), 0 if bias is None else np.abs(exact(bias))
    abs_xhat = np.abs(forward.xhat)
    error = ROUNDOFF[x.dtype] * (abs_xhat + shift / divisor) + 2 * OUTPUT[x.dtype] * (abs_xhat + (1 + shift) / divisor)
    if x.dtype == F16:
        error = error + 2.0**-25 / divisor
    return error if rms else error + error.mean(1, keepdims=True)  # the average of xhat is taken off


def check_backward(
    results,
    dy,
    x,
    weight=None,
    parameter_dtype=None,
    eps=1e-5,
    context=(),
    *,
    rms=False,
    zero_centered_weight=False,
    grad_sum=None,
    xhat_error=0,
):
    """Check those of grad_input, grad_weight and grad_bias that are not None.

    `xhat_error` is that of what backward takes for xhat, beside that of the arithmetic.
    """
    forward, w = Forward(exact(x), eps, rms), factor(weight, zero_centered_weight)
    expected = Backward(exact(dy), forward, w, rms, 0 if grad_sum is None else exact(grad_sum))
    parameter_dtype = parameter_dtype or (x if weight is None else weight).dtype

    abs_dy, abs_xhat = np.abs(exact(dy)), np.abs(forward.xhat)
    abs_g = abs_dy if w is None else abs_dy * np.abs(w)
    mean_error, mean_abs_gx = (abs_g * xhat_error).mean(1, keepdims=True), (abs_g * abs_xhat).mean(1, keepdims=True)
    more = {
        "grad_input": forward.rstd * (abs_xhat * mean_error + xhat_error * mean_abs_gx),
        "grad_weight": (abs_dy * xhat_error).sum(0),
        "grad_bias": 0,
    }
    for name, dtype, actual in zip(more, (x.dtype, parameter_dtype, parameter_dtype), results, strict=True):
        if actual is None:
            continue
        assert actual.dtype == dtype and actual.is_contiguous(), (name, *context)
        value, error = getattr(expected, name), GRADIENT[x.dtype] * getattr(expected, f"{name}_terms") + more[name]
        bounds = error + rounding(dtype, value, error, statistics_dtype(x.dtype))
        assert_within(actual, value, bounds, name, *context)
    return expected
