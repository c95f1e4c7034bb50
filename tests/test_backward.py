"""Backward against the formulas in float64."""

import itertools

import pytest
import torch
from reference import BF16, DTYPES, F16, F32, F64, Backward, Forward, check_backward, dtype_id, dtypes_id, exact
from shapes import (
    COLUMNS,
    all_dtypes,
    amid_nans,
    amid_nans_1d,
    bits,
    data_dtypes,
    dtypes_and_offsets,
    huge,
    huge_rows,
    layouts,
    lazy_zeros,
    randn,
    rows_for,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ALL = [True, True, True]
MASKS = [list(mask) for mask in itertools.product([False, True], repeat=3)]

# Weight gradients are summed over slots of rows, from 16 or 32 to 256 of them: around one, two and many slots.
SLOT_ROWS = [15, 16, 17, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097]
SLOT_ROWS += [16383, 16384, 16385, 65537]


def gradients(backend, dy, x, weight=None, bias=None, eps=1e-5, mask=ALL, normalized=None):
    normalized = normalized or x.shape[-1:]
    _, mean, rstd = backend.forward(x, normalized, weight, bias, eps)
    return backend.backward(dy, x, normalized, mean, rstd, weight, bias, mask)


# Shapes, dtypes and parameters


@all_dtypes
@pytest.mark.parametrize("columns", COLUMNS)
def test_columns_and_rows(backend, dtypes, columns):
    """Everything lies amid NaN: a read outside of a row shows."""
    dtype, parameter_dtype = dtypes
    for cols in COLUMNS[columns]:
        w = amid_nans_1d(randn(cols, parameter_dtype, backend.device))
        for rows in rows_for(cols):
            x, dy = (amid_nans(randn((rows, cols), dtype, backend.device), gap) for gap in (3, 5))
            before = bits(x), bits(dy)
            results = gradients(backend, dy, x, w, w)
            check_backward(results, dy, x, w, context=(rows, cols))
            assert torch.equal(bits(x), before[0]) and torch.equal(bits(dy), before[1]), "arguments have changed"
        check_backward(gradients(backend, dy, x), dy, x, context=(rows, cols, "no parameters"))


@all_dtypes
@pytest.mark.parametrize("rows", SLOT_ROWS)
def test_slots(backend, dtypes, rows):
    dtype, parameter_dtype = dtypes
    for cols in (1, 3, 40) if rows < 5000 else (5,):
        x, dy = (randn((rows, cols), dtype, backend.device) for _ in range(2))
        w = randn(cols, parameter_dtype, backend.device)
        check_backward(gradients(backend, dy, x, w, w), dy, x, w, context=(rows, cols))


@pytest.mark.large
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32)], ids=dtypes_id)
def test_rows_of_more_than_a_million(backend, dtypes):
    """Rows of so many columns get another level of sums: groups of chunks."""
    cols = (1 << 20) + 1
    x, dy = (randn((2, cols), dtypes[0], backend.device) for _ in range(2))
    w = randn(cols, dtypes[1], backend.device)
    check_backward(gradients(backend, dy, x, w, w), dy, x, w)


@all_dtypes
@pytest.mark.parametrize(
    "shape, normalized", [((2, 3, 4, 5), (4, 5)), ((2, 3, 4, 5), (2, 3, 4, 5)), ((7, 1, 1), (1, 1))]
)
def test_several_normalized_dimensions(backend, dtypes, shape, normalized):
    x, dy = (randn(shape, dtypes[0], backend.device) for _ in range(2))
    w = randn(normalized, dtypes[1], backend.device)
    results = gradients(backend, dy, x, w, w, normalized=normalized)
    assert [r.shape for r in results] == [shape, normalized, normalized]
    cols = w.numel()
    check_backward(results, dy.reshape(-1, cols), x.reshape(-1, cols), w.reshape(-1))


@all_dtypes
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 0, 4)])
def test_empty(backend, dtypes, shape):
    x = randn(shape, dtypes[0], backend.device)
    w = randn(shape[-1], dtypes[1], backend.device)
    results = gradients(backend, x, x, w, w)
    assert [r.shape for r in results] == [shape, shape[-1:], shape[-1:]]
    assert [r.dtype for r in results] == [dtypes[0], dtypes[1], dtypes[1]]
    assert not any(r.any() for r in results)


@all_dtypes
@pytest.mark.parametrize("rows, cols", [(1, 3), (5, 64), (40, 65), (3, 1100), (20, 1030)])
def test_masks(backend, dtypes, rows, cols):
    """What is asked for is bitwise what the full call gives; what is not is None."""
    x, dy = (randn((rows, cols), dtypes[0], backend.device) for _ in range(2))
    w, b = (randn(cols, dtypes[1], backend.device) for _ in range(2))
    for weight, bias in ((w, b), (w, None), (None, b), (None, None)):
        full = gradients(backend, dy, x, weight, bias)
        present = (w if weight is not None else b if bias is not None else x).dtype
        check_backward(full, dy, x, weight, present, context=(rows, cols))
        for mask in MASKS:
            results = gradients(backend, dy, x, weight, bias, mask=mask)
            for asked, result, right in zip(mask, results, full, strict=True):
                assert torch.equal(result, right) if asked else result is None, mask


@all_dtypes
def test_requires_grad(backend, dtypes):
    """Of layer_norm: exactly the gradients asked for, which are those of the operator."""
    shapes = (7, 30), (30,), (30,)
    arguments = [
        randn(shape, dtype, backend.device)
        for shape, dtype in zip(shapes, (dtypes[0], dtypes[1], dtypes[1]), strict=True)
    ]
    dy = randn((7, 30), dtypes[0], backend.device)
    right = gradients(backend, dy, *arguments)
    for mask in MASKS:
        x, w, b = (t.detach().requires_grad_(wanted) for t, wanted in zip(arguments, mask, strict=True))
        y = backend.layer_norm(x, (30,), w, b)
        assert y.requires_grad == any(mask)
        if any(mask):
            y.backward(dy)
        for wanted, tensor, gradient in zip(mask, (x, w, b), right, strict=True):
            assert torch.equal(tensor.grad, gradient) if wanted else tensor.grad is None, mask


@all_dtypes
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_one_parameter_alone(backend, dtypes, which):
    x, dy = (randn((7, 30), dtypes[0], backend.device).requires_grad_(requires) for requires in (True, False))
    p = randn(30, dtypes[1], backend.device).requires_grad_()
    weight, bias = (p, None) if which == "weight" else (None, p)
    backend.layer_norm(x, (30,), weight, bias).backward(dy)
    results = (x.grad, p.grad, None) if which == "weight" else (x.grad, None, p.grad)
    check_backward(results, dy, x, weight, dtypes[1])


@data_dtypes
@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-3, 1.0, 1e6])
def test_eps(backend, dtype, eps):
    x, dy = (randn((5, 100), dtype, backend.device) for _ in range(2))
    check_backward(gradients(backend, dy, x, eps=eps), dy, x, eps=eps)


# Hard numbers


@dtypes_and_offsets
def test_offset(backend, dtypes, offset):
    """The saved mean, rounded to fp32, is off by so much that without correction no digit is right at 1e6."""
    dtype, parameter_dtype = dtypes
    for rows, cols in ((9, 2), (9, 31), (40, 64), (9, 257), (5, 1024), (5, 1100), (3, 4097), (3, 20000)):
        x = randn((rows, cols), dtype, backend.device, offset)
        dy = randn((rows, cols), dtype, backend.device, offset=1)
        w = randn(cols, parameter_dtype, backend.device)
        check_backward(gradients(backend, dy, x, w, w), dy, x, w, context=(rows, cols, offset))


@pytest.mark.parametrize("cols", [64, 768, 1024, 5000])
def test_error_at_offset_1e4(backend, cols):
    """At most 5e-7 of the largest gradient; torch loses 1.7e-4 of grad_input and 5.3e-4 of grad_weight."""
    x, dy = randn((64, cols), F32, backend.device, offset=1e4), randn((64, cols), F32, backend.device)
    w = randn(cols, F32, backend.device)
    results = gradients(backend, dy, x, w, w)
    expected = Backward(exact(dy), Forward(exact(x)), exact(w))
    for name, result in zip(("grad_input", "grad_weight", "grad_bias"), results, strict=True):
        right = getattr(expected, name)
        assert abs(exact(result) - right).max() <= 5e-7 * abs(right).max(), name


@pytest.mark.parametrize("dtypes", [(F16, F16), (BF16, BF16), (BF16, F32)], ids=dtypes_id)
@pytest.mark.parametrize("rows, cols", [(4096, 300), (65536, 64)])
def test_parameter_gradients_of_many_rows(backend, dtypes, rows, cols):
    """At most 3e-3 off: half a unit in the last place of bf16, and next to nothing; torch is 5.6e-2 to 4.2e-1 off."""
    x, dy = (randn((rows, cols), dtypes[0], backend.device) for _ in range(2))
    w = randn(cols, dtypes[1], backend.device)
    _, *results = gradients(backend, dy, x, w, w)
    expected = Backward(exact(dy), Forward(exact(x)), exact(w))
    for result, right in zip(results, (expected.grad_weight, expected.grad_bias), strict=True):
        assert abs(exact(result) - right).max() <= 3e-3 * abs(right).max()
    check_backward((None, *results), dy, x, w)


@all_dtypes
def test_bias_gradient_of_a_sum(backend, dtypes):
    """4096 ones add up to 4096, in bf16 and fp16 too; torch gives 512."""
    x = randn((4096, 16), dtypes[0], backend.device)
    w, b = (randn(16, dtypes[1], backend.device).requires_grad_() for _ in range(2))
    backend.layer_norm(x, (16,), w, b).sum().backward()
    assert (b.grad == 4096).all()


@data_dtypes
def test_one_column(backend, dtype):
    """Xhat is 0 exactly, and so are the gradients but for the bias."""
    x = (randn((50, 1), F64) * 1e3).to(dtype).to(backend.device)
    x[:2, 0] = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max], dtype=dtype)
    dy, w = randn((50, 1), dtype, backend.device), randn(1, dtype, backend.device)
    results = gradients(backend, dy, x, w, w)
    assert not results[1].any()
    check_backward(results, dy, x, w)


@all_dtypes
def test_constant_rows(backend, dtypes):
    """Xhat is 0 exactly, and so is the gradient of the weight."""
    for cols in (2, 3, 10, 49, 100, 257, 768, 1537):
        x = torch.tensor([0.1, -0.7, 1 / 3, 1234.567, 0.0], dtype=dtypes[0], device=backend.device)
        x, dy = x[:, None].repeat(1, cols), randn((5, cols), dtypes[0], backend.device)
        w = randn(cols, dtypes[1], backend.device)
        results = gradients(backend, dy, x, w, w)
        assert not results[1].any(), cols
        check_backward(results, dy, x, w, context=(cols,))


@data_dtypes
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("where", ["input", "grad_output"])
@pytest.mark.parametrize("cols", [5, 64, 300, 1100])
def test_nan_and_inf_stay_in_their_row(backend, dtype, value, where, cols):
    clean_x, clean_dy = (randn((9, cols), dtype, backend.device) for _ in range(2))
    expected = gradients(backend, clean_dy, clean_x)[0]
    for row in (0, 1, 4, 8):  # the first and second of two swept together, and one alone
        x, dy = clean_x.clone(), clean_dy.clone()
        (x if where == "input" else dy)[row, (row * 17) % cols] = value
        grad_input, grad_weight, grad_bias = gradients(backend, dy, x)
        others = torch.arange(9) != row
        assert not grad_input[row].isfinite().any()
        assert torch.equal(grad_input[others], expected[others])
        at = (row * 17) % cols
        columns = torch.arange(cols) != at
        if where == "input":
            assert grad_weight.isnan().all() and grad_bias.isfinite().all()
        else:
            assert not grad_weight[at].isfinite() and not grad_bias[at].isfinite()
            assert grad_weight[columns].isfinite().all() and grad_bias[columns].isfinite().all()


@huge
@pytest.mark.parametrize("cols", [2, 7, 64, 300, 1100])
def test_huge_numbers(backend, dtype, magnitude, cols):
    """Their gradients are tiny, down to subnormal; the ordinary row stays bitwise what it is alone."""
    x = huge_rows(dtype, magnitude, cols, backend.device)
    dy, w = randn((9, cols), dtype, backend.device), randn(cols, dtype, backend.device)
    results = gradients(backend, dy, x, w, w)
    check_backward(results, dy, x, w)
    assert torch.equal(gradients(backend, dy[3:4], x[3:4], w, w)[0], results[0][3:4])


@pytest.mark.parametrize("parameter_dtype", [F16, F32], ids=dtype_id)
@pytest.mark.parametrize("cols", [2, 64, 1000])
def test_largest_numbers_of_fp16(backend, parameter_dtype, cols):
    x = randn((5, cols), F16, backend.device).sign() * 65504
    dy, w = randn((5, cols), F16, backend.device), randn(cols, parameter_dtype, backend.device)
    check_backward(gradients(backend, dy, x, w, w), dy, x, w)


@pytest.mark.parametrize("dtypes", [d for d in DTYPES if d[0] in (F16, BF16)], ids=dtypes_id)
@pytest.mark.parametrize("cols", [5, 64, 1000])
def test_subnormal_numbers(backend, dtypes, cols):
    dtype, parameter_dtype = dtypes
    smallest = torch.finfo(dtype).smallest_normal
    x, dy = randn((9, cols), dtype, backend.device), (randn((9, cols), F64) * smallest / 4).to(dtype).to(backend.device)
    w = torch.ones(cols, dtype=parameter_dtype, device=backend.device)
    results = gradients(backend, dy, x, w, w)
    check_backward(results, dy, x, w)
    assert ((results[0] != 0) & (results[0].abs() < smallest)).sum() > results[0].numel() / 2


# Layouts


@data_dtypes
@pytest.mark.parametrize("normalized", [(10,), (4, 10)], ids=str)
def test_layouts(backend, dtype, normalized):
    """Of input and of grad_output."""
    x, dy = (randn((2, 6, 4, 10), dtype, backend.device) for _ in range(2))
    w = randn(normalized, dtype, backend.device)
    _, mean, rstd = backend.forward(x, normalized, w, w, 1e-5)
    expected = backend.backward(dy, x, normalized, mean, rstd, w, w, ALL)
    for (name, x_view), (_, dy_view) in zip(layouts(x), layouts(dy), strict=True):
        for views in ((dy_view, x), (dy, x_view), (dy_view, x_view)):
            results = backend.backward(*views, normalized, mean, rstd, w, w, ALL)
            assert all(torch.equal(result, right) for result, right in zip(results, expected, strict=True)), name
            assert results[0].is_contiguous() and not results[0].is_neg(), name


def test_layouts_of_statistics(backend):
    """Which torch's compiler chooses for them if they lie between convolutions."""
    x, dy = (randn((2, 3, 5, 10), F32, backend.device) for _ in range(2))
    _, mean, rstd = backend.forward(x, (10,), None, None, 1e-5)
    expected = backend.backward(dy, x, (10,), mean, rstd, None, None, ALL)
    mean, rstd = (t.to(memory_format=torch.channels_last) for t in (mean, rstd))
    assert not mean.is_contiguous()
    results = backend.backward(dy, x, (10,), mean, rstd, None, None, ALL)
    assert all(torch.equal(result, right) for result, right in zip(results, expected, strict=True))


@all_dtypes
@pytest.mark.parametrize("shape", [(1, 40), (6, 1), (1, 1)])
def test_expanded(backend, dtypes, shape):
    """Strides of 0 in grad_output, as `sum()` gives, over rows and over columns; and in weight."""
    x, dy = randn((6, 40), dtypes[0], backend.device), randn(shape, dtypes[0], backend.device).expand(6, 40)
    w = randn(1, dtypes[1], backend.device).expand(40)
    check_backward(gradients(backend, dy, x, w, w), dy, x, w)
    check_backward(gradients(backend, x, dy, w, w), x, dy, w)


# Memory


@pytest.mark.large
def test_more_than_2_31_elements(backend):
    """Of input and grad_output, which take no memory where they are zero, and of grad_input: 4.3 GB."""
    torch.use_deterministic_algorithms(False)  # poisoning would take as long as the test
    rows, cols = (1 << 19) + 1, 4096
    x, dy = (lazy_zeros((rows, cols), BF16, backend.device) for _ in range(2))
    some = [0, 1, rows // 3, rows // 2, rows - 2, rows - 1]
    for tensor in (x, dy):
        tensor[some] = randn((len(some), cols), BF16, backend.device)
    w = randn(cols, BF16, backend.device)
    mean = torch.zeros(rows, 1, device=backend.device)
    rstd = torch.full((rows, 1), 1e-5**-0.5, device=backend.device)
    _, mean[some], rstd[some] = backend.forward(x[some], (cols,), w, None, 1e-5)
    grad_input, *parameter_gradients = backend.backward(dy, x, (cols,), mean, rstd, w, None, ALL)
    check_backward((grad_input[some], *parameter_gradients), dy[some], x[some], w)  # zeros add nothing
    zero = torch.ones(rows, dtype=torch.bool, device=backend.device)
    zero[some] = False
    for row in zero.nonzero().flatten()[:: rows // 1000].tolist():
        assert not grad_input[row].any(), row


@pytest.mark.parametrize("dtypes", [pair for pair in DTYPES if pair[1] in (F16, BF16)], ids=dtypes_id)
def test_halfway_sums_round_to_even(backend, dtypes):
    """A bias gradient of two rows is an exact sum, halfway between two numbers of the parameter's dtype."""
    dtype, parameter_dtype = dtypes
    step = torch.finfo(parameter_dtype).eps
    for cols in (*range(1, 68), 256, 4096):
        dy = torch.stack([1 + step * torch.randint(int(1 / step), (cols,)), torch.full((cols,), step / 2)])
        dy = dy.to(dtype).to(backend.device)
        x, w = randn((2, cols), dtype, backend.device), randn(cols, parameter_dtype, backend.device)
        grad_bias = gradients(backend, dy, x, w, w, mask=[False, False, True])[2]
        assert torch.equal(grad_bias, dy.to(F64).sum(0).to(parameter_dtype)), cols
