"""The readable specification: the norms in wider arithmetic, and the errors that the kernels may have.

float64 results are checked in numpy's long double (64-bit mantissa on x86, 113-bit on Arm). Its exponent range also
holds the square of every double. All other results are checked in float64. The arrays of the checks are [rows, cols].
"""

import functools
import math

import numpy as np
import torch

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
NAMES = {F64: "fp64", F32: "fp32", F16: "fp16", BF16: "bf16"}

# (data dtype, parameter dtype): all pairs that have kernels of their own.
DTYPES = [(F64, F64), (F32, F32), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32)]
DTYPES_16_BIT = DTYPES[2:]

# Input, parameters, residual. A residual of 16-bit input may be float32, as are then the sum and its gradient.
RESIDUALS = [(*dtypes, dtypes[0]) for dtypes in DTYPES] + [(*dtypes, F32) for dtypes in DTYPES_16_BIT]


def dtypes_id(value):
    """Return the id of a dtype or a tuple of dtypes, and of any other value its string."""
    if not isinstance(value, tuple):
        return NAMES.get(value, str(value))
    return "-".join(dict.fromkeys(NAMES[dtype] for dtype in value))


def statistics_dtype(dtype):
    return F64 if dtype == F64 else F32


def exact(tensor):
    """Return a tensor as a numpy array of the wider type."""
    array = tensor.detach().cpu().double().resolve_neg().numpy()
    return array.astype(np.longdouble) if tensor.dtype == F64 else array


class Forward:
    """Statistics and normalized values of the rows of x [*, cols], an array of numpy or a tensor.

    RMSNorm has no mean. Autograd differentiates the values of a tensor to any order.
    """

    def __init__(self, x, eps=1e-5, rms=False):
        self.mean, deviation = None, x
        if not rms:
            rounded_mean = x.mean(-1, keepdims=True)
            deviation = x - rounded_mean
            correction = deviation.mean(-1, keepdims=True)
            self.mean = rounded_mean + correction
            deviation = deviation - correction
        self.rstd = ((deviation**2).mean(-1, keepdims=True) + eps) ** -0.5
        self.xhat = deviation * self.rstd

    def output(self, weight, bias):
        y = self.xhat if weight is None else self.xhat * weight
        return y if bias is None else y + bias


class Backward:
    """The gradients, and the sum of the magnitudes of grad_input's terms, to which its error is proportional."""

    def __init__(self, dy, forward, weight, rms=False, grad_sum=0):
        self.g = dy if weight is None else dy * weight
        self.dy, self.xhat, self.rstd, self.rms, self.grad_sum = dy, forward.xhat, forward.rstd, rms, grad_sum

    @functools.cached_property
    def grad_input(self):
        g, xhat = self.g, self.xhat
        mean_g, mean_gx = 0 if self.rms else g.mean(-1, keepdims=True), (g * xhat).mean(-1, keepdims=True)
        return self.rstd * (g - mean_g - xhat * mean_gx) + self.grad_sum

    @property
    def grad_weight(self):
        return (self.dy * self.xhat).sum(0)

    @property
    def grad_bias(self):
        return self.dy.sum(0)

    @functools.cached_property
    def terms(self):
        abs_g, abs_xhat = abs(self.g), abs(self.xhat)
        mean_abs_g, mean_abs_gx = abs_g.mean(1, keepdims=True), (abs_g * abs_xhat).mean(1, keepdims=True)
        return self.rstd * (abs_g + mean_abs_g + (1 + abs_xhat) * mean_abs_gx) + abs(self.grad_sum)


def activate(gate, sigmoid=False):
    return torch.sigmoid(gate) * (1 if sigmoid else gate)


def norm(
    x,
    weight=None,
    bias=None,
    eps=1e-5,
    *,
    residual=None,
    input_scale=None,
    gate=None,
    rms=False,
    zero_centered_weight=False,
    num_groups=1,
    sigmoid=False,
    gate_first=False,
):
    """Return the output of the forward operator for float64 tensors [*, cols], its sum or None, and the statistics.

    Autograd differentiates the results to any order.
    """
    total = None if residual is None else (x if input_scale is None else input_scale * x) + residual
    x = x if total is None else total
    factor = None if gate is None else activate(gate, sigmoid)
    x = x * factor if gate_first and gate is not None else x
    forward = Forward(x.unflatten(-1, (num_groups, -1)) if num_groups > 1 else x, eps, rms)
    forward.xhat = forward.xhat.reshape(x.shape)
    y = forward.output(weight + 1 if zero_centered_weight and weight is not None else weight, bias)
    y = y if gate_first or gate is None else y * factor
    return y, total, forward


# Largest error of the output before it is rounded to its dtype, relative to the magnitudes of its terms.
# 5e-7 is the package's promise for float32 arithmetic at any number of columns and any mean. It equals 8 roundings of
# 2^-24. Random rows reach half of it, and rows with few outliers 0.9 of it, because adding equal values to a large one
# rounds in the same direction every time.
# float64 gets 24 roundings of 2^-53, of which the same rows reach 0.75. It needs more of them because a vector has half
# as many lanes, and because the sums of the chunks are not added in a wider type.
OUTPUT = {F64: 24 * 2.0**-53, F32: 5e-7, F16: 5e-7, BF16: 5e-7}

# Largest relative error of rstd. At |xhat| = 1 the output has two terms, so that it may be off by twice OUTPUT.
RSTD = {dtype: 2 * error for dtype, error in OUTPUT.items()}

# Largest error of the gradients relative to their terms: the error of rstd and that of the gradients' own sums.
# Random rows reach a third of it, and rows that hold few different values half.
GRADIENT = RSTD

# The same for the gradients of the parameters. Equal numbers round in the same direction each time, and the CPU kernels
# add up to 64 rows one by one, with an error of up to 1.01e-6. Doubles have as many roundings.
PARAMETER_GRADIENT = {dtype: 1.1 * error for dtype, error in GRADIENT.items()}


def rounding(dtype, value, error, arithmetic=F32):
    """Return the error that converting `value` from `arithmetic` to `dtype` adds.

    It is half a unit in the last place if `dtype` is narrower, and in any case the smallest subnormal number.
    """
    info = torch.finfo(dtype)
    half_unit = info.eps / 2 * (np.abs(value) + error) if info.eps > torch.finfo(arithmetic).eps else 0
    return half_unit + info.smallest_normal * info.eps


def output_bound(dtype, forward, weight, bias):
    """Return the largest error of the output: 5e-7 * (|weight| * (1 + |xhat|) + |bias|) and one rounding to `dtype`."""
    abs_weight, abs_bias = (default if p is None else np.abs(p) for p, default in ((weight, 1), (bias, 0)))
    error = OUTPUT[dtype] * (abs_weight * (1 + np.abs(forward.xhat)) + abs_bias)
    return error + rounding(dtype, forward.output(weight, bias), error)


def assert_within(actual, expected, bounds, *context):
    """Fail unless abs(actual - expected) <= bounds for all elements, and show the worst. NaN fails."""
    actual = exact(actual).reshape(expected.shape)
    bounds = np.broadcast_to(bounds, expected.shape)
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(actual - expected) <= bounds)
    if wrong.any():
        ratio = np.where(wrong, np.nan_to_num(np.abs(actual - expected) / bounds, nan=np.inf), 0)
        worst = np.unravel_index(ratio.argmax(), ratio.shape)
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} elements are wrong. The worst is {actual[worst]} at {list(map(int, worst))}"
            f", expected {expected[worst]}: {ratio[worst]:.3g} times the bound {bounds[worst]:.3g}. {context}"
        )


def factor(weight, zero_centered_weight):
    """Return the factor of xhat in the output."""
    return None if weight is None else exact(weight) + int(zero_centered_weight)


def check_forward(
    results, x, weight=None, bias=None, eps=1e-5, context=(), *, rms=False, zero_centered_weight=False, dtype=None
):
    """Check output, mean and rstd of the 2-d tensor x, and return the exact Forward.

    `dtype` is that of the output, by default that of x.
    """
    y, mean, rstd = results
    expected = Forward(exact(x), eps, rms)
    w, b = factor(weight, zero_centered_weight), None if bias is None else exact(bias)
    dtype = dtype or x.dtype
    assert y.dtype == dtype and y.is_contiguous(), context
    assert_within(y, expected.output(w, b), output_bound(dtype, expected, w, b), "output", *context)

    kind = statistics_dtype(x.dtype)
    assert rstd.dtype == kind, context
    smallest = rounding(kind, expected.rstd, 0)
    if rms:
        assert mean is None, context
    else:
        assert mean.dtype == kind, context
        # The mean is rounded once. The remaining error is relative to the standard deviation.
        mean_bound = torch.finfo(kind).eps / 2 * np.abs(expected.mean) + OUTPUT[x.dtype] / expected.rstd + smallest
        assert_within(mean, expected.mean, mean_bound, "mean", *context)
    assert_within(rstd, expected.rstd, RSTD[x.dtype] * expected.rstd + smallest, "rstd", *context)
    return expected


def xhat_error_from_output(x, weight, bias, rms=False, zero_centered_weight=False):
    """Return the largest error of the xhat that memory-efficient backward recovers, as LayerNorm's docstring states it.

    The output has the error of its arithmetic and of its rounding, and both are divided by the weight.
    """
    forward, w = Forward(exact(x), rms=rms), factor(weight, zero_centered_weight)
    divisor, shift = 1 if w is None else np.abs(w), 0 if bias is None else np.abs(exact(bias))
    abs_xhat, roundoff = np.abs(forward.xhat), torch.finfo(x.dtype).eps / 2
    error = roundoff * (abs_xhat + shift / divisor) + 2 * OUTPUT[x.dtype] * (1 + abs_xhat + shift / divisor)
    if x.dtype == F16:
        error = error + 2.0**-25 / divisor  # half of the smallest subnormal output
    return error if rms else error + error.mean(1, keepdims=True)  # backward subtracts the average of xhat


def broadcast_rows(t, batch):
    """Return a tensor as a matrix that has a row for each element of the batch."""
    return None if t is None else t.expand(*batch, t.shape[-1]).reshape(-1, t.shape[-1])


def check_backward(
    results,
    dy,
    x,
    weight=None,
    bias=None,
    eps=1e-5,
    context=(),
    *,
    rms=False,
    zero_centered_weight=False,
    grad_sum=None,
    xhat_error=0,
    sum_error=0,
):
    """Check grad_input, grad_weight and grad_bias, except those that are None, and return the exact Backward.

    Parameters with batch dimensions have a gradient for each group of rows. `xhat_error` is the error of the xhat that
    backward starts from, and `sum_error` a relative error of sums over rows in addition to PARAMETER_GRADIENT.
    """
    grad_input, grad_weight, grad_bias = results
    assert grad_input is None or grad_input.shape == x.shape, context
    batch, given = x.shape[:-1], [p for p in (weight, bias) if p is not None]
    dy, x, weights, grad_sum, grad_input = (broadcast_rows(t, batch) for t in (dy, x, weight, grad_sum, grad_input))
    forward, w = Forward(exact(x), eps, rms), factor(weights, zero_centered_weight)
    dy = exact(dy)
    expected = Backward(dy, forward, w, rms, 0 if grad_sum is None else exact(grad_sum))

    def check(name, actual, dtype, value, error):
        assert actual.dtype == dtype and actual.is_contiguous(), (name, *context)
        bounds = error + rounding(dtype, value, error, statistics_dtype(x.dtype))
        assert_within(actual, value, bounds, name, *context)

    abs_dy, abs_xhat = np.abs(dy), np.abs(forward.xhat)
    if grad_input is not None:
        abs_g = abs_dy if w is None else abs_dy * np.abs(w)
        mean_error, mean_abs_gx = (abs_g * xhat_error).mean(1, keepdims=True), (abs_g * abs_xhat).mean(1, keepdims=True)
        error = GRADIENT[x.dtype] * expected.terms + forward.rstd * (abs_xhat * mean_error + xhat_error * mean_abs_gx)
        check("grad_input", grad_input, x.dtype, expected.grad_input, error)
    for name, actual, parameter, products, terms, errors in (
        ("grad_weight", grad_weight, weight, dy * forward.xhat, abs_dy * (1 + abs_xhat), abs_dy * xhat_error),
        ("grad_bias", grad_bias, bias, dy, abs_dy, 0 * abs_dy),
    ):
        if actual is None:
            continue
        # The gradient of an absent parameter has the shape and dtype of the other one.
        like = parameter if parameter is not None else given[0] if given else x[0]
        assert actual.shape == like.shape, (name, *context)
        groups = range(math.prod(like.shape[:-1]))
        group = torch.arange(len(groups)).view(like.shape[:-1]).expand(batch).flatten().numpy()
        errors = (PARAMETER_GRADIENT[x.dtype] + sum_error) * terms + errors
        sums = (np.array([t[group == i].sum(0) for i in groups]).reshape(like.shape) for t in (products, errors))
        check(name, actual, like.dtype, *sums)
    return expected
