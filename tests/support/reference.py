"""The readable specification: the norms in wider arithmetic, and the errors that the kernels may have.

float64 results are checked in numpy's long double (64-bit mantissa on x86, 113-bit on Arm). Its exponent range also
holds the square of every double. All other results are checked in float64. The arrays of the checks are [rows, cols].
Names that begin with abs_ are magnitudes, to which error bounds are proportional.
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

# (input, parameters, residual): a residual beside 16-bit input may be float32, and so are then the sum and its
# gradient.
RESIDUALS = [(*dtypes, dtypes[0]) for dtypes in DTYPES] + [(*dtypes, F32) for dtypes in DTYPES_16_BIT]


def dtypes_id(value):
    """Return the test id of a dtype, a tuple of dtypes, or any other value."""
    if not isinstance(value, tuple):
        return NAMES.get(value, str(value))
    return "-".join(dict.fromkeys(NAMES[dtype] for dtype in value))


def statistics_dtype(dtype):
    """Return the dtype of mean, rstd and the arithmetic for input of this dtype."""
    return F64 if dtype == F64 else F32


def exact(tensor):
    """Return a tensor as a numpy array of float64 or, if it is float64 itself, of long double."""
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
            mean_error = deviation.mean(-1, keepdims=True)  # the rounding error of the mean, negated
            self.mean = rounded_mean + mean_error
            deviation = deviation - mean_error
        self.rstd = ((deviation**2).mean(-1, keepdims=True) + eps) ** -0.5
        self.xhat = deviation * self.rstd

    def output(self, weight, bias):
        y = self.xhat if weight is None else self.xhat * weight
        return y if bias is None else y + bias


class Backward:
    """The gradients of a norm, whose Forward is `forward`.

    The upstream gradients are `dy`, that of the output, and `grad_sum`, that of the sum with a residual.
    """

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
    def abs_terms(self):
        """The sum of the magnitudes of grad_input's terms, to which its error is proportional.

        The error of xhat is relative to 1 + abs(xhat), as in output_error(), so this factor multiplies mean_abs_gx. For
        RMSNorm, which has no mean, the bound is wider than necessary, because it includes mean_abs_g.
        """
        abs_g, abs_xhat = abs(self.g), abs(self.xhat)
        mean_abs_g, mean_abs_gx = abs_g.mean(1, keepdims=True), (abs_g * abs_xhat).mean(1, keepdims=True)
        return self.rstd * (abs_g + mean_abs_g + (1 + abs_xhat) * mean_abs_gx) + abs(self.grad_sum)


def logistic(z):
    """Return the sigmoid of a tensor or, without overflow, of an array."""
    if isinstance(z, torch.Tensor):
        return z.sigmoid()
    e = np.exp(-np.abs(z))
    return np.where(z > 0, 1, e) / (1 + e)


def activate(z, sigmoid=False):
    """Return silu or sigmoid of a gate, its derivative, and the sum of the magnitudes of the derivative's terms."""
    s, complement = logistic(z), logistic(-z)  # 1 - s would lose digits
    if sigmoid:
        return s, s * complement, s * complement
    return z * s, s * (1 + z * complement), s * (1 + abs(z) * complement)


def norm(
    x, weight=None, bias=None, eps=1e-5, *, residual=None, input_scale=None, gate=None, rms=False,
    zero_centered_weight=False, num_groups=1, sigmoid=False, gate_first=False,
):  # fmt: skip
    """Return output, sum or None, and the Forward of a norm of tensors [*, cols], with the operator's arguments.

    Autograd differentiates the results to any order.
    """
    total = None if residual is None else (x if input_scale is None else input_scale * x) + residual
    x = x if total is None else total
    factor = None if gate is None else activate(gate, sigmoid)[0]
    x = x * factor if gate_first and gate is not None else x
    forward = Forward(x.unflatten(-1, (num_groups, -1)) if num_groups > 1 else x, eps, rms)
    forward.xhat = forward.xhat.reshape(x.shape)
    y = forward.output(weight + 1 if zero_centered_weight and weight is not None else weight, bias)
    y = y if gate_first or gate is None else y * factor
    return y, total, forward


# Largest error of the output before it is rounded to its dtype, relative to the magnitudes of its terms. 5e-7 is the
# package's promise for float32 arithmetic at any number of columns and any mean. It equals 8 roundings of 2^-24. Random
# rows reach half of it, and rows with few outliers 0.9 of it, because adding equal values to a large one rounds in the
# same direction every time. float64 gets 24 roundings of 2^-53; rows with few outliers reach 0.75 of them. It needs
# more roundings because a vector has half as many lanes, so that each adds more numbers, and because the sums of the
# chunks are not added in a wider type.
OUTPUT = {F64: 24 * 2.0**-53, F32: 5e-7, F16: 5e-7, BF16: 5e-7}

# Largest relative error of rstd: that of the output where |xhat| is 1, because its bound is OUTPUT * (1 + |xhat|).
RSTD = {dtype: 2 * error for dtype, error in OUTPUT.items()}

# Largest error of the gradients relative to their terms: the error of rstd and that of the gradients' own sums.
# Random rows reach a third of it, and rows that hold few different values half.
GRADIENT = RSTD

# Largest error of the gradients of the parameters relative to their terms. The CPU kernels add up to 64 rows one by
# one. Equal numbers then round in the same direction each time, and float32 sums are off by up to 1.01e-6, which is 8.5
# roundings of 2^-23; float64 sums are off by as many roundings of 2^-52.
PARAMETER_GRADIENT = {dtype: 1.1 * error for dtype, error in GRADIENT.items()}

# Largest relative errors of an activation and, relative to the magnitudes of its terms, of its derivative, in roundings
# of the arithmetic. The CPU kernels reach 3.8 and 5.2 for a third of all floats and five million doubles. On a GPU, an
# exponential that is off by two units in the last place and a reciprocal that is off by one give up to 7.5 and 9.6.
ACTIVATION = {"cpu": (6, 6), "cuda": (8, 10)}


def rounding(dtype, value, error, arithmetic=F32):
    """Return the error that converting `value` from `arithmetic` to `dtype` adds.

    It is half a unit in the last place if `dtype` is narrower, and in any case the smallest subnormal number.
    """
    info = torch.finfo(dtype)
    half_unit = info.eps / 2 * (np.abs(value) + error) if info.eps > torch.finfo(arithmetic).eps else 0
    return half_unit + info.smallest_normal * info.eps


def unit(dtype):
    """Return the unit roundoff of the arithmetic for a dtype of the data."""
    return torch.finfo(statistics_dtype(dtype)).eps / 2


class GateFactors:
    """The factors by which a gated norm multiplies its input and its output, and their relative errors.

    One factor is the activation of the gate: that of the input with gate_first, otherwise that of the output. The other
    factor is 1. Without a gate, both are 1.
    """

    def __init__(self, dtype, gate=None, sigmoid=False, gate_first=False):
        activation, self.slope, self.abs_slope = (1, 0, 0) if gate is None else activate(exact(gate), sigmoid)
        self.is_first = gate is not None and gate_first
        self.of_input, self.of_output = (activation, 1) if self.is_first else (1, activation)
        # The error of the activation, and the rounding of the product with it.
        error = 0 if gate is None else (ACTIVATION[gate.device.type][0] + 1) * unit(dtype)
        self.input_error, self.output_error = (error, 0) if self.is_first else (0, error)


class CheckedForward(Forward):
    """Forward of x times its gate factor, with bounds of the errors that an error of this factor causes.

    An error of the elements changes xhat by rstd * (error - mean(error) - xhat * mean(xhat * error)). Without a gate
    before the norm, the bounds are zero.
    """

    def __init__(self, x, factors, eps, rms):
        super().__init__(x * factors.of_input, eps, rms)
        self.mean_error = self.rstd_error = self.xhat_error = 0  # rstd_error is relative to rstd
        if factors.is_first:
            # error and mean_error are multiplied by rstd, like xhat: they are in standard deviations.
            error, abs_xhat = factors.input_error * self.rstd * abs(x * factors.of_input), abs(self.xhat)
            mean_error, self.rstd_error = (t.mean(-1, keepdims=True) for t in (error, abs_xhat * error))
            self.mean_error = mean_error / self.rstd
            # The terms of the docstring; RMSNorm subtracts no mean.
            self.xhat_error = error + (0 if rms else mean_error) + abs_xhat * self.rstd_error

    def output_error(self, dtype, weight, bias):
        """Return the largest error before the output is rounded, from the arithmetic and from the error of xhat."""
        abs_weight, abs_bias = (default if p is None else np.abs(p) for p, default in ((weight, 1), (bias, 0)))
        return OUTPUT[dtype] * (abs_weight * (1 + np.abs(self.xhat)) + abs_bias) + abs_weight * self.xhat_error


def assert_within(actual, expected, bounds, *context):
    """Fail unless abs(actual - expected) <= bounds for all elements, and show the worst and `context`. NaN fails."""
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


def effective_weight(weight, zero_centered_weight):
    """Return the factor of xhat, which is weight or 1 + weight, as an array."""
    return None if weight is None else exact(weight) + int(zero_centered_weight)


def check_forward(
    results, x, weight=None, bias=None, eps=1e-5, context=(), *, rms=False, zero_centered_weight=False, dtype=None,
    **gate,
):  # fmt: skip
    """Check output, mean and rstd of the 2-d tensor x, and return the exact Forward.

    `results` are output, mean and rstd. `dtype` is that of the output, by default that of x. `gate` has the arguments
    of GateFactors. `context` is shown if a check fails.
    """
    y, mean, rstd = results
    factors = GateFactors(x.dtype, **gate)
    expected = CheckedForward(exact(x), factors, eps, rms)
    w, b = effective_weight(weight, zero_centered_weight), None if bias is None else exact(bias)
    dtype = dtype or x.dtype
    assert y.dtype == dtype and y.is_contiguous(), context
    value, error = expected.output(w, b), expected.output_error(dtype, w, b)
    error = abs(factors.of_output) * (error + factors.output_error * abs(value))
    value = factors.of_output * value
    assert_within(y, value, error + rounding(dtype, value, error), "output", *context)

    arithmetic = statistics_dtype(x.dtype)
    assert rstd.dtype == arithmetic, context
    smallest = rounding(arithmetic, expected.rstd, 0)  # the smallest subnormal number
    if rms:
        assert mean is None, context
    else:
        assert mean.dtype == arithmetic, context
        # The mean is rounded once. The remaining error is relative to the standard deviation, 1 / rstd.
        mean_bound = unit(x.dtype) * np.abs(expected.mean) + OUTPUT[x.dtype] / expected.rstd + smallest
        assert_within(mean, expected.mean, mean_bound + expected.mean_error, "mean", *context)
    rstd_bound = (RSTD[x.dtype] + expected.rstd_error) * expected.rstd + smallest
    assert_within(rstd, expected.rstd, rstd_bound, "rstd", *context)
    return expected


def check_sum(total, x, residual, input_scale, context=()):
    """Check total = input_scale * x + residual.

    The product and the sum are rounded in the arithmetic, after an input_scale of a wider dtype.
    """
    x, residual, scale = (exact(t) for t in (x, residual, input_scale))
    product = scale * x
    error = (2 * unit(total.dtype) + scale_error(input_scale, total.dtype)) * np.abs(product)
    error = error + unit(total.dtype) * np.abs(residual)
    expected = product + residual
    bound = error + rounding(total.dtype, expected, error, statistics_dtype(total.dtype))
    assert_within(total, expected, bound, "sum", *context)


def scale_error(input_scale, dtype):
    """Return the relative error of converting input_scale to the arithmetic for input of this dtype."""
    return unit(dtype) if input_scale.dtype.itemsize > statistics_dtype(dtype).itemsize else 0


def xhat_error_from_output(x, weight, bias, rms=False, zero_centered_weight=False):
    """Return the largest error of the xhat that memory-efficient backward recovers, as LayerNorm's docstring states it.

    The output has the error of its arithmetic and of its rounding, and both are divided by the weight.
    """
    forward, w = Forward(exact(x), rms=rms), effective_weight(weight, zero_centered_weight)
    abs_weight, abs_bias = 1 if w is None else np.abs(w), 0 if bias is None else np.abs(exact(bias))
    abs_output = np.abs(forward.xhat) + abs_bias / abs_weight  # an upper bound, divided by the weight
    roundoff = torch.finfo(x.dtype).eps / 2
    error = roundoff * abs_output + 2 * OUTPUT[x.dtype] * (1 + abs_output)
    if x.dtype == F16:
        error = error + 2.0**-25 / abs_weight  # half of the smallest subnormal output
    return error if rms else error + error.mean(1, keepdims=True)  # backward subtracts the average of xhat


def broadcast_rows(t, batch):
    """Return a tensor [..., cols] as a matrix with a row for each element of a batch of this shape."""
    return None if t is None else t.expand(*batch, t.shape[-1]).reshape(-1, t.shape[-1])


class Gradients:
    """The gradients of a call by name. check() and check_sum_of_rows() compare one of them, unless it is None."""

    NAMES = ("grad_input", "grad_weight", "grad_bias", "grad_gate", "grad_scaled_input", "grad_input_scale")

    def __init__(self, results, x, context):
        self.by_name = dict(zip(self.NAMES, results, strict=False))
        self.batch, self.arithmetic, self.context = x.shape[:-1], statistics_dtype(x.dtype), context

    def has_any(self, *names):
        return any(self.by_name.get(name) is not None for name in names)

    def check(self, name, like, value, error):
        """Check that a gradient has the shape and dtype of `like`, and that it is this value within the error."""
        if self.has_any(name):
            actual, context = self.by_name[name], (name, *self.context)
            assert actual.shape == like.shape and actual.dtype == like.dtype and actual.is_contiguous(), context
            assert_within(actual, value, error + rounding(like.dtype, value, error, self.arithmetic), *context)

    def check_sum_of_rows(self, name, like, products, errors):
        """Check the gradient of a parameter: the sums of products over the rows that share its values.

        `like` is the parameter. Its batch sizes broadcast to those of the input, and the rows that share its values are
        a sample. `errors` are the largest errors of the products.
        """
        if self.has_any(name):
            samples = math.prod(like.shape[:-1])
            sample_of_row = torch.arange(samples).view(like.shape[:-1]).expand(self.batch).flatten().numpy()
            sums = ([t[sample_of_row == i].sum(0) for i in range(samples)] for t in (products, errors))
            value, error = (np.array(sum_of_rows).reshape(like.shape) for sum_of_rows in sums)
            self.check(name, like, value, error)


def check_backward(
    results, dy, x, weight=None, bias=None, eps=1e-5, context=(), *, rms=False, zero_centered_weight=False,
    grad_sum=None, xhat_error=0, sum_error=0, scaled_input=None, input_scale=None, gate=None, **activation,
):  # fmt: skip
    """Check the gradients of the norm's input x, of weight, bias and, if given, gate, scaled_input and input_scale.

    `results` has the gradients in the order of Gradients.NAMES; those that are None are not checked. Return the exact
    Backward. With an input_scale, x is the sum input_scale * scaled_input + residual, and `grad_sum` is the upstream
    gradient of the sum with a residual. `activation` has arguments of GateFactors. `xhat_error` is an error of the xhat
    from which backward computes the gradients, and `sum_error` a relative error of sums over rows, in addition to
    PARAMETER_GRADIENT. `context` is shown if a check fails.
    """
    gradients, batch = Gradients(results, x, context), x.shape[:-1]

    def rows(tensor):
        return None if tensor is None else exact(broadcast_rows(tensor, batch))

    b, w = rows(bias), None if weight is None else rows(weight) + int(zero_centered_weight)
    factors = GateFactors(x.dtype, None if gate is None else broadcast_rows(gate, batch), **activation)
    forward = CheckedForward(rows(x), factors, eps, rms)
    xhat_error, sum_error = xhat_error + forward.xhat_error, PARAMETER_GRADIENT[x.dtype] + sum_error
    grad_norm = rows(dy) * factors.of_output
    expected = Backward(grad_norm, forward, w, rms, 0 if grad_sum is None else rows(grad_sum))

    abs_grad, abs_xhat = np.abs(grad_norm), np.abs(forward.xhat)
    # The gradient of an absent parameter has the shape and dtype of the other one or, if both are absent, of a row.
    present = [*(p for p in (weight, bias) if p is not None), x.new_empty(x.shape[-1:])]
    like_weight, like_bias = (present[0] if p is None else p for p in (weight, bias))
    error = (sum_error + factors.output_error) * abs_grad
    gradients.check_sum_of_rows(
        "grad_weight", like_weight, grad_norm * forward.xhat, error * (1 + abs_xhat) + abs_grad * xhat_error
    )
    gradients.check_sum_of_rows("grad_bias", like_bias, grad_norm, error)
    if not gradients.has_any("grad_input", "grad_gate", "grad_scaled_input", "grad_input_scale"):
        return expected

    abs_g, value = abs_grad if w is None else abs_grad * np.abs(w), expected.grad_input
    mean_gx_error, mean_abs_gx = ((abs_g * t).mean(1, keepdims=True) for t in (xhat_error, abs_xhat))
    error = (GRADIENT[x.dtype] + factors.output_error) * expected.abs_terms
    # The error of xhat in rstd * xhat * mean(g * xhat).
    error = error + forward.rstd * (abs_xhat * mean_gx_error + xhat_error * mean_abs_gx)
    if gate is None:
        gradients.check("grad_input", x, value, error)
    else:
        f = factors.of_input
        gradients.check("grad_input", x, f * value, abs(f) * (error + factors.input_error * np.abs(value)))
        # grad_gate is a product: x * (gradient of the gated input) * slope, or grad_output * (output of the norm) *
        # slope.
        if factors.is_first:
            given, computed, computed_error = rows(x), value, error
        else:
            given, computed, computed_error = rows(dy), forward.output(w, b), forward.output_error(x.dtype, w, b)
        # The error of the derivative, and those of two products.
        computed_error = computed_error + (ACTIVATION[gate.device.type][1] + 2) * unit(x.dtype) * np.abs(computed)
        bound = np.abs(given) * factors.abs_slope * computed_error
        gradients.check("grad_gate", gate, given * computed * factors.slope, bound)
    if input_scale is not None:
        # The gradient of the sum may be rounded to the sum's dtype before scaled_input and input_scale multiply it.
        error = error + rounding(x.dtype, value, error, gradients.arithmetic)
        scale, scaled = rows(input_scale), rows(scaled_input)
        bound = np.abs(scale) * (error + (unit(x.dtype) + scale_error(input_scale, x.dtype)) * np.abs(value))
        gradients.check("grad_scaled_input", scaled_input, value * scale, bound)
        bound = np.abs(scaled) * error + sum_error * np.abs(value * scaled)
        gradients.check_sum_of_rows("grad_input_scale", input_scale, value * scaled, bound)
    return expected
