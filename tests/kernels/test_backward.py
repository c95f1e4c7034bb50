"""Gradients match float64. For inputs that are hard for both passes, so do output, mean and rstd."""

import pytest
import torch
from support.backends import ALL, Results, assert_same_bits, check, every_path, rows_and_images, run, run_pixels
from support.inputs import (
    all_dtypes,
    data_dtypes,
    dtypes_and_offsets,
    hard_rows,
    lazy_zeros,
    randn,
    random_args,
    rms_or_not,
    tiny_rows,
)
from support.reference import (
    BF16,
    DTYPES_16_BIT,
    F16,
    F32,
    F64,
    Backward,
    Forward,
    check_backward,
    check_forward,
    dtypes_id,
    exact,
    statistics_dtype,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Parameter gradients are sums over segments of rows, which are added at the end. Around these numbers of rows, the
# number of segments or their length changes.
SEGMENT_LIMITS = [15, 17, 31, 33, 47, 49, 63, 65, 96, 97, 255, 257, 511, 513, 1025, 2049, 4097, 16384, 16385, 65537]


@all_dtypes
@pytest.mark.parametrize("rows", SEGMENT_LIMITS)
def test_numbers_of_rows(backend, dtypes, rows):
    for cols in (1, 40, 1000) if rows < 300 else (5,):
        x, dy, w, b = random_args(backend, dtypes, rows, cols)
        check(run(backend, x, dy, w, b), x, dy, w, b, context=(rows, cols))


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32)], ids=dtypes_id)
def test_rows_of_more_than_a_million_elements(backend, dtypes):
    """The chunks of such rows are added in runs, and then the runs, so that errors do not grow with their number."""
    x, dy, w, b = random_args(backend, dtypes, 2, (1 << 20) + 1, offset=100)
    check(run(backend, x, dy, w, b), x, dy, w, b)


@all_dtypes
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 0, 4), (0, 0, 4)], ids=str)
@pytest.mark.parametrize(
    ("run", "adds"), [(run, False), (run, True), (run_pixels, False)], ids=["rows", "residual", "images"]
)
def test_empty_tensors(backend, run, dtypes, shape, adds):
    x, w = randn(shape, dtypes[0], backend.device), randn(shape[-1], dtypes[1], backend.device)
    options = {"residual": x.clone(), "grad_sum": x} if adds else {}
    results = run(backend, x, x, w, w, **options)
    row, parameter = (shape, dtypes[0]), (shape[-1:], dtypes[1])
    statistic = (*shape[:-1], 1), statistics_dtype(dtypes[0])
    expected = Results(row, row if adds else None, statistic, statistic, row, parameter, parameter)
    assert results.map(lambda t: (t.shape, t.dtype)) == expected
    assert not any(gradient.any() for gradient in results.gradients)


@data_dtypes
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-3, 1.0, 1e6])
def test_eps(backend, dtype, eps):
    x, dy, _, _ = random_args(backend, (dtype, dtype), 5, 100)
    check(run(backend, x, dy, eps=eps), x, dy, eps=eps)
    assert backend.forward(x, (100,), eps=-1e6)[0].isnan().all()
    if eps == 0:  # a constant row gives 0 * inf, as in torch
        assert run(backend, torch.ones_like(x), dy, eps=eps).output.isnan().all()


# Large means and many rows, where rounding errors would accumulate


@rows_and_images
@dtypes_and_offsets
def test_large_means_lose_no_precision(backend, run, dtypes, offset):
    """The saved mean is rounded. With a mean of 1e6, no digit of the gradients is right unless backward corrects it."""
    for rows, cols in ((9, 2), (9, 31), (40, 64), (9, 257), (5, 1024), (5, 1100), (7, 4097), (3, 20000)):
        x, dy, w, b = random_args(backend, dtypes, rows, cols, offset=offset)
        x[::2] *= -1
        check(run(backend, x, dy, w, b), x, dy, w, b, context=(rows, cols, offset))


@pytest.mark.parametrize("cols", [64, 768, 5000])
def test_error_at_a_mean_of_10_000(backend, cols):
    """Errors are at most 5e-7 of the largest gradient. torch's are 1.7e-4 in grad_input and 5.3e-4 in grad_weight."""
    x, _, w, b = random_args(backend, (F32, F32), 64, cols, offset=1e4)
    dy = randn((64, cols), F32, backend.device)
    results = run(backend, x, dy, w, b)
    expected = Backward(exact(dy), Forward(exact(x)), exact(w))
    for name in ("grad_input", "grad_weight", "grad_bias"):
        gradient = getattr(expected, name)
        assert abs(exact(getattr(results, name)) - gradient).max() <= 5e-7 * abs(gradient).max(), name


@rows_and_images
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32)], ids=dtypes_id)
@pytest.mark.parametrize("cols", [5, 24, 400, 1100])
def test_parameter_gradients_of_equal_terms(backend, run, dtypes, cols):
    """Equal numbers round in the same direction each time, as in the gradient of a sum or a mean of the output."""
    sum_error = 0 if backend.name == "cpu" else 3e-6  # a GPU adds up to 256 rows one by one
    for rows in (31, 256, 4100) if cols > 24 else (256, 8200, 20000):
        x = randn((1, cols), dtypes[0], backend.device).expand(rows, cols)
        w = randn(cols, dtypes[1], backend.device)
        for value in (1 / 3, 0.7, 1.2345678, 1.1):
            dy = torch.full((rows, cols), value, dtype=dtypes[0], device=backend.device)
            gradients = run(backend, x, dy, w, w, mask=[False, True, True]).gradients
            total = rows * dy[:1].double()  # as one float64 row, it has the gradients of all rows
            check_backward(gradients, total, x[:1], w, w, context=(rows, value), sum_error=sum_error)


@pytest.mark.parametrize("dtypes", [(F16, F16), (BF16, BF16), (BF16, F32)], ids=dtypes_id)
def test_parameter_gradients_of_many_rows(backend, dtypes):
    """The error is at most 0.3 %, which leaves room for one rounding to bf16 (0.2 %). torch is off by up to 42 %."""
    x, dy = (randn((65536, 16), dtypes[0], backend.device) for _ in range(2))
    w = randn(16, dtypes[1], backend.device)
    results = run(backend, x, dy, w, w, mask=[False, True, True])
    expected = check_backward(results.gradients, dy, x, w)
    for name in ("grad_weight", "grad_bias"):
        gradient = getattr(expected, name)
        assert abs(exact(getattr(results, name)) - gradient).max() <= 3e-3 * abs(gradient).max(), name


# Extreme values


def smallest_eps(backend, dtype):
    """Return the least eps with which tiny rows are exact. In the CUDA kernels, their squares underflow."""
    return 0.0 if backend.name == "cpu" else 1e-280 if dtype == F64 else 1e-30


@every_path
@rows_and_images
@all_dtypes
@pytest.mark.parametrize("cols", [2, 7, 64, 300, 1100, 5000])
@rms_or_not
@pytest.mark.parametrize(
    ("rows", "eps"), [(hard_rows, 1e-5), (tiny_rows, 0.0), (tiny_rows, 1e-44)], ids=["hard", "tiny", "tiny-eps"]
)
def test_hard_values(backend, run, dtypes, cols, rms, rows, eps):
    """Sums and squares overflow (pytorch#162489), add rounding errors that all have the same sign, or underflow.

    An ordinary row keeps the bits that it has beside another one.
    """
    eps = max(eps, smallest_eps(backend, dtypes[0]))
    x = torch.cat([rows(dtypes[0], cols), randn((1, cols), dtypes[0])]).to(backend.device)
    _, dy, w, b = random_args(backend, dtypes, *x.shape)
    dy = dy / 256 if rows is tiny_rows else dy  # else float16 gradients overflow
    results = run(backend, x, dy, w, b, eps, rms=rms)
    check(results, x, dy, w, b, eps, rms=rms)
    weight_alone = [False, True, False]  # other loops compute the parameters' gradients alone
    assert_same_bits(run(backend, x, dy, w, b, eps, mask=weight_alone, rms=rms), results.requested(weight_alone))
    ordinary = run(backend, x[[-1, -1]], dy[[-1, -1]], w, b, eps, rms=rms)
    assert_same_bits(results.rows(-1), ordinary.rows(0))


CONSTANTS = [0.0, -0.0, 1.0, 0.1, -0.7, 1 / 3, 3.14159265, 1e-3, 1234.567, -54321.0, 1e-5, 65504.0]


@every_path
@rows_and_images
@all_dtypes
@pytest.mark.parametrize("eps", [1e-5, 1e-20, 1e-45, 1e-300])
def test_constant_rows_give_exactly_the_bias(backend, run, dtypes, eps):
    """An error of the mean would be divided by sqrt(eps) and added to the bias.

    A mean is not exact if it multiplies a sum by 1 / cols, adds many numbers such as 0.1, or overflows. With an exact
    mean, the gradient of the weight is zero, and that of the input finite if 1 / sqrt(eps) is.
    """
    eps = max(eps, smallest_eps(backend, dtypes[0]))
    limits = torch.finfo(dtypes[0])
    # The sums of 3 to 37 of the numbers between 0 and 1 round.
    values = [limits.max, -limits.max / 4, 1e4, -3, 0, limits.tiny, 0.7, -0.1, 1 / 3, 0.9999999]
    is_default_eps = eps == 1e-5
    values = torch.tensor([*values, *CONSTANTS] if is_default_eps else values, dtype=F64).to(dtypes[0])
    all_columns = (1, 2, 3, 5, 7, 10, 37, 49, 64, 100, 257, 768, 1000, 1024, 1537, 4999)
    for cols in all_columns if is_default_eps else (1, 3, 37, 1024):
        x = values[:, None].repeat(1, cols).to(backend.device)
        dy, w, b = (
            randn(*each, backend.device) for each in ((x.shape, dtypes[0]), (cols, dtypes[1]), (cols, dtypes[1]))
        )
        results = run(backend, x, dy, w, b, eps)
        mean, rstd = results.mean, results.rstd
        assert torch.equal(results.output, b.to(x.dtype).expand_as(x)) and torch.equal(mean, x[:, :1].to(mean.dtype))
        assert not run(backend, x, dy, w, eps=eps).output.any(), cols
        for gate_first in (False, True):
            gate, options = torch.zeros_like(x), {"sigmoid": True, "gate_first": gate_first}
            assert not backend.ops.forward.fused(x, [cols], None, None, eps, None, gate, **options)[0].any()
        expected = torch.tensor(eps**-0.5, dtype=rstd.dtype, device=backend.device)  # infinity in float32 for 1e-300
        torch.testing.assert_close(rstd, expected.expand_as(rstd), rtol=torch.finfo(rstd.dtype).eps, atol=0)
        if expected.isfinite():
            assert not results.grad_weight.any()
            if eps**-0.5 < limits.max / 1000:  # else gradients of the input overflow
                check_backward(results.gradients, dy, x, w, b, eps, context=(cols,))


@every_path
@rows_and_images
def test_variance_of_constant_rows_is_not_negative(backend, run):
    """The variance is mean(d^2) - mean(d)^2 for the differences d from a mean that may be rounded.

    For constants near 2^-52, d^2 is so small that it underflows in the sum, which is then less than mean(d)^2.
    """
    exponents = torch.tensor([*range(-10, 27), *[-52] * 20])
    constants = torch.linspace(1, 1.99, len(exponents)) * 2.0**exponents
    for step, cols in ((1, 7), (3, 300), (13, 5000)):
        x = constants[::step, None].repeat(1, cols).to(backend.device)
        small_eps, no_eps = (run(backend, x, x, eps=eps, mask=[False] * 3) for eps in (1e-30, 0.0))
        assert not small_eps.output.any() and no_eps.rstd.gt(10).all(), cols


@rows_and_images
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=dtypes_id)
def test_infinite_eps_gives_the_bias_and_zero_gradients(backend, run, dtype):
    """In some rows, the differences from the mean overflow: 0 * infinity would be NaN."""
    x = hard_rows(dtype, 64).to(backend.device)
    dy, w, b = (randn(shape, dtype, backend.device) for shape in (x.shape, 64, 64))
    results = run(backend, x, dy, w, b, torch.inf)
    assert torch.equal(results.output, b.expand_as(x))
    assert not (results.rstd.any() or results.grad_input.any() or results.grad_weight.any())


@rows_and_images
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=dtypes_id)
def test_flushing_subnormal_numbers_keeps_gradients_of_huge_rows(backend, run, dtype):
    """The rstd of huge rows is subnormal, and torch.set_flush_denormal(True) would make it zero."""
    if backend.name != "cpu":
        pytest.skip("torch.set_flush_denormal concerns the CPU's arithmetic")
    x = hard_rows(dtype, 64)[7:10]  # the largest numbers
    dy, w, b = (randn(shape, dtype) for shape in (x.shape, 64, 64))
    dy = dy * 2.0**60  # makes grad_input a normal number
    expected = run(backend, x, dy, w, b)
    try:
        assert torch.set_flush_denormal(True)
        results = run(backend, x, dy, w, b)
    finally:
        torch.set_flush_denormal(False)
    assert (expected.rstd < torch.finfo(expected.rstd.dtype).tiny).any()
    assert_same_bits(results, expected)


@every_path
@rows_and_images
@data_dtypes
@pytest.mark.parametrize("value", [torch.nan, -torch.inf], ids=str)
@pytest.mark.parametrize("cols", [5, 300, 1100])
def test_nan_and_inf_stay_in_their_row(backend, run, dtype, value, cols):
    """Other rows keep their bits, also those that are read again because their sums overflow.

    Parameter gradients, which add up all rows, become NaN in the columns of the bad element, or in all if xhat does.
    """
    x, dy, _, _ = random_args(backend, (dtype, dtype), 41, cols)
    x[2::4] *= torch.finfo(dtype).max / 100
    expected = run(backend, x, dy)
    for row in (0, 1, 3, 5, 40):  # loops take four or two rows at a time; the last row is alone
        others, col = torch.arange(41) != row, (row * 17) % cols

        bad_x = x.clone()
        bad_x[row, col] = value
        results = run(backend, bad_x, dy)
        bad = results.rows(row)
        assert bad.output.isnan().all() and bad.rstd.isnan() and not bad.grad_input.isfinite().any()
        assert_same_bits(results.rows(others), expected.rows(others), row)
        assert results.grad_weight.isnan().all() and results.grad_bias.isfinite().all()

        bad_dy = dy.clone()
        bad_dy[row, col] = value
        grad_input, *parameter_gradients = run(backend, x, bad_dy).gradients
        assert not grad_input[row].isfinite().any()
        assert_same_bits([grad_input[others]], [expected.grad_input[others]], row)
        for gradient in parameter_gradients:
            assert gradient.isfinite().tolist() == [c != col for c in range(cols)]


@pytest.mark.parametrize("exponents", [(-60, -80), (-21, -100), (-19, -100), (19, 100), (21, 100), (60, 80)], ids=str)
@rows_and_images
def test_products_outside_the_range(backend, run, exponents):
    """dy * (x - mean) overflows or underflows for x and dy of these powers of 2, but dy * xhat does not."""
    for cols in (3, 64, 700):
        x, dy = (randn((5, cols), F32, backend.device) * 2.0**exponent for exponent in exponents)
        w, b = (randn(cols, F32, backend.device) for _ in range(2))
        check_backward(run(backend, x, dy, w, b, eps=0.0).gradients, dy, x, w, eps=0.0, context=(cols,))


@pytest.mark.parametrize("dtypes", DTYPES_16_BIT, ids=dtypes_id)
@pytest.mark.parametrize("cols", [5, 64, 1000])
@rows_and_images
def test_subnormal_gradients_are_kept(backend, run, dtypes, cols):
    smallest = torch.finfo(dtypes[0]).smallest_normal
    x, dy = randn((9, cols), dtypes[0]), (randn((9, cols), F64) * smallest / 4).to(dtypes[0])
    x, dy, w = (t.to(backend.device) for t in (x, dy, torch.ones(cols, dtype=dtypes[1])))
    results = run(backend, x, dy, w, w)
    check_backward(results.gradients, dy, x, w)
    grad_input = results.grad_input
    assert ((grad_input != 0) & (grad_input.abs() < smallest)).sum() > grad_input.numel() / 2


@pytest.mark.large
@pytest.mark.parametrize("images", [False, True], ids=["rows", "images"])
def test_more_than_2_to_the_31_elements(backend, images):
    """All rows but six are zero: on a CPU they take no memory in the input, and 4.3 GB in each result."""
    torch.use_deterministic_algorithms(False)  # filling results with NaN would take as long as the test
    samples, rows, cols = (3, (1 << 23) - 5, 86) if images else (1, (1 << 19) + 1, 4096)
    shape = (samples, cols, rows) if images else (samples, rows, cols)
    x, dy = (lazy_zeros(shape, backend.device) for _ in range(2))

    def as_rows(tensor):
        return tensor.mT if images else tensor

    nonzero = [0, 1, rows // 3, rows // 2, rows - 2, rows - 1]
    zeros = [row for row in range(0, rows, rows // 1000) if row not in nonzero]  # they are checked, too
    for tensor in (as_rows(x), as_rows(dy)):
        tensor[:, nonzero] = randn((samples, len(nonzero), cols), BF16, backend.device)
    w, b = (randn(cols, BF16, backend.device) for _ in range(2))

    def nonzero_rows(*tensors):
        return [as_rows(t)[:, nonzero].flatten(0, 1) for t in tensors]

    y, mean, rstd = backend.forward(x, (cols,), w, b, 1e-5, images=images)
    check_forward(nonzero_rows(y, mean, rstd), *nonzero_rows(x), w, b)
    assert torch.equal(as_rows(y)[-1, zeros], b.expand(len(zeros), cols)) and not as_rows(mean)[-1, zeros].any()
    del y

    arguments = (dy, x, (cols,), mean, rstd, w, b, ALL)
    grad_input, *parameter_gradients = backend.backward(*arguments, images=images)
    # Rows of zeros add nothing to the gradients of the parameters.
    check_backward((*nonzero_rows(grad_input), *parameter_gradients), *nonzero_rows(dy, x), w)
    assert not as_rows(grad_input)[-1, zeros].any()


@pytest.mark.parametrize("dtype", [F16, BF16], ids=dtypes_id)
def test_halfway_sums_round_to_even(backend, dtype):
    """The bias gradient of two rows is an exact sum, halfway between two numbers of the dtype."""
    step = torch.finfo(dtype).eps
    for cols in (*range(1, 68), 256, 4096):
        dy = torch.stack([1 + step * torch.randint(int(1 / step), (cols,)), torch.full((cols,), step / 2)])
        dy = dy.to(dtype).to(backend.device)
        x, _, w, b = random_args(backend, (dtype, dtype), 2, cols)
        assert torch.equal(run(backend, x, dy, w, b).grad_bias, dy.to(F64).sum(0).to(dtype)), cols
