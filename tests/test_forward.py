"""Forward against the formulas in float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    Forward,
    assert_within,
    check_forward,
    dtype_id,
    dtypes_id,
    exact,
    output_bound,
    statistics_dtype,
)
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

# Shapes, dtypes and parameters


@all_dtypes
@pytest.mark.parametrize("columns", COLUMNS)
def test_columns_and_rows(backend, dtypes, columns):
    """Rows and parameters lie amid NaN: a read outside of them shows."""
    dtype, parameter_dtype = dtypes
    for cols in COLUMNS[columns]:
        w, b = (amid_nans_1d(randn(cols, parameter_dtype, backend.device)) for _ in range(2))
        for rows in rows_for(cols):
            x = amid_nans(randn((rows, cols), dtype, backend.device))
            before = bits(x)
            y, mean, rstd = backend.forward(x, (cols,), w, b, 1e-5)
            expected = check_forward((y, mean, rstd), x, w, b, context=(rows, cols))
            assert mean.shape == rstd.shape == (rows, 1)
            assert torch.equal(bits(x), before), "input has changed"
        for weight, bias in ((w, None), (None, b), (None, None)):
            y, *statistics = backend.forward(x, (cols,), weight, bias, 1e-5)
            exact_weight, exact_bias = (None if p is None else exact(p) for p in (weight, bias))
            bounds = output_bound(dtype, expected, exact_weight, exact_bias)
            assert_within(y, expected.output(exact_weight, exact_bias), bounds, rows, cols, weight, bias)
            assert torch.equal(statistics[0], mean) and torch.equal(statistics[1], rstd)


@pytest.mark.large
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32)], ids=dtypes_id)
def test_rows_of_more_than_a_million(backend, dtypes):
    """Rows of so many columns get another level of sums: groups of chunks."""
    cols = (1 << 20) + 1
    x = randn((2, cols), dtypes[0], backend.device, offset=100)
    w, b = (randn(cols, dtypes[1], backend.device) for _ in range(2))
    check_forward(backend.forward(x, (cols,), w, b, 1e-5), x, w, b)


@all_dtypes
@pytest.mark.parametrize(
    "shape, normalized", [((2, 3, 4, 5), (4, 5)), ((2, 3, 4, 5), (2, 3, 4, 5)), ((7, 1, 1), (1, 1))]
)
def test_several_normalized_dimensions(backend, dtypes, shape, normalized):
    x = randn(shape, dtypes[0], backend.device)
    w, b = (randn(normalized, dtypes[1], backend.device) for _ in range(2))
    y, mean, rstd = backend.forward(x, normalized, w, b, 1e-5)
    batch = shape[: -len(normalized)]
    assert y.shape == shape
    assert mean.shape == rstd.shape == batch + (1,) * len(normalized)
    cols = w.numel()
    check_forward((y, mean, rstd), x.reshape(-1, cols), w.reshape(-1), b.reshape(-1))


@data_dtypes
def test_one_dimension(backend, dtype):
    x = randn(4, dtype, backend.device)
    results = backend.forward(x, [4], None, None, 1e-5)
    assert [r.shape for r in results] == [(4,), (1,), (1,)]
    check_forward(results, x[None])


@all_dtypes
@pytest.mark.parametrize(
    "shape, statistics", [((0, 4), (0, 1)), ((3, 0), (3, 1)), ((0, 0), (0, 1)), ((2, 0, 4), (2, 0, 1))]
)
def test_empty(backend, dtypes, shape, statistics):
    x = randn(shape, dtypes[0], backend.device)
    w = randn(shape[-1], dtypes[1], backend.device)
    y, mean, rstd = backend.forward(x, shape[-1:], w, w, 1e-5)
    assert y.shape == shape and y.dtype == x.dtype
    assert mean.shape == rstd.shape == statistics
    assert mean.dtype == rstd.dtype == statistics_dtype(dtypes[0])


@data_dtypes
@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-3, 1.0, 1e6])
def test_eps(backend, dtype, eps):
    x = randn((5, 100), dtype, backend.device)
    check_forward(backend.forward(x, (100,), None, None, eps), x, eps=eps)


def test_layer_norm_is_forward(backend):
    x, w, b = (randn(s, F32, backend.device) for s in ((3, 50), 50, 50))
    assert torch.equal(backend.layer_norm(x, (50,), w, b, 1e-3), backend.forward(x, (50,), w, b, 1e-3)[0])
    assert torch.equal(backend.layer_norm(x, (50,)), backend.forward(x, (50,), None, None, 1e-5)[0])
    assert torch.equal(backend.forward(x, (50,))[0], backend.forward(x, (50,), None, None, 1e-5)[0])


# Hard numbers


@dtypes_and_offsets
def test_offset(backend, dtypes, offset):
    """A variance computed as E[x^2] - E[x]^2 passes every test but this one and the next two."""
    dtype, parameter_dtype = dtypes
    for cols in (2, 3, 31, 64, 129, 257, 1024, 1100, 4097, 20000):
        x = randn((9, cols), dtype, backend.device, offset)
        w, b = (randn(cols, parameter_dtype, backend.device) for _ in range(2))
        check_forward(backend.forward(x, (cols,), w, b, 1e-5), x, w, b, context=(cols, offset))
        x = -x
        check_forward(backend.forward(x, (cols,), w, b, 1e-5), x, w, b, context=(cols, -offset))


@pytest.mark.parametrize("dtype", [F64, F32], ids=dtype_id)
def test_offset_beyond_the_differences(backend, dtype):
    """Numbers a few units in the last place apart: their mean cannot be represented any better than they are."""
    for exponent in (0, 10, 20):
        one = torch.tensor(2.0**exponent, dtype=dtype)
        unit = torch.finfo(dtype).eps * one
        for cols in (2, 3, 7, 100, 1000, 5000):
            x = (one + unit * torch.randint(0, 4, (5, cols))).to(backend.device)
            check_forward(backend.forward(x, (cols,), None, None, 1e-12), x, eps=1e-12, context=(exponent, cols))


@pytest.mark.parametrize("dtype", [F64, F32], ids=dtype_id)
@pytest.mark.parametrize("cols", [100, 256, 1024, 4096, 8192])
def test_rows_of_two_values(backend, dtype, cols):
    """Adding up equal squares errs in the same direction every time: the most that sums of so many terms can lose."""
    sign = 1 - 2 * (torch.arange(cols) % 2)
    x = (torch.logspace(0, 1, 200, dtype=F64)[:, None] * sign).to(dtype).to(backend.device)
    check_forward(backend.forward(x, (cols,), None, None, 1e-5), x)


@pytest.mark.parametrize("dtype", [F64, F32], ids=dtype_id)
@pytest.mark.parametrize("cols", [64, 256, 1024, 4098, 8192])
@pytest.mark.parametrize("outliers", [1, 2, 8])
def test_rows_of_few_outliers(backend, dtype, cols, outliers):
    """Added to an outlier's square, small equal ones all err in the same direction; and the output is large."""
    rows = 100
    x = torch.zeros(rows, cols, dtype=F64)
    x[:, torch.randperm(cols)[:outliers]] = torch.logspace(0, 2, rows, dtype=F64)[:, None]
    x = x.to(dtype).to(backend.device)
    check_forward(backend.forward(x, (cols,), None, None, 1e-5), x)


CONSTANTS = [0.0, -0.0, 1.0, 0.1, -0.7, 1 / 3, 3.14159265, 1e-3, 1234.567, -54321.0, 1e-5, 65504.0]
CONSTANT_COLUMNS = [1, 2, 3, 5, 10, 49, 100, 257, 768, 1000, 1537, 4999]


@all_dtypes
def test_constant_rows_are_exactly_the_bias(backend, dtypes):
    """Whose mean must come out exactly; sums of 0.1 do not, nor does a multiplication by 1 / cols."""
    for cols in CONSTANT_COLUMNS:
        w, b = (randn(cols, dtypes[1], backend.device) for _ in range(2))
        x = torch.tensor(CONSTANTS, dtype=dtypes[0], device=backend.device)[:, None].repeat(1, cols)
        y, mean, rstd = backend.forward(x, (cols,), w, b, 1e-5)
        assert torch.equal(y, b.to(dtypes[0]).expand_as(y)), cols
        assert torch.equal(mean, x[:, :1].to(mean.dtype)), cols
        exact_rstd = torch.full_like(rstd, 1 / 1e-5**0.5)
        torch.testing.assert_close(rstd, exact_rstd, rtol=torch.finfo(rstd.dtype).eps, atol=0)
        assert not backend.forward(x, (cols,), w, None, 1e-5)[0].any(), cols


@data_dtypes
def test_random_constants(backend, dtype):
    """A thousand constants for forty lengths each: what fails for one in a hundred thousand shows."""
    constants = torch.randn(1000, 1, dtype=F64) * torch.logspace(-3, 4, 1000, dtype=F64)[:, None]
    for cols in range(1, 1000, 25):
        x = constants.to(dtype).to(backend.device).expand(1000, cols)
        assert not backend.forward(x, (cols,), None, None, 1e-5)[0].any(), cols


@data_dtypes
def test_constant_row_with_eps_zero(backend, dtype):
    """As in torch: 0 * inf."""
    x = torch.full((2, 10), 3.0, dtype=dtype, device=backend.device)
    assert backend.forward(x, (10,), None, None, 0.0)[0].isnan().all()


@data_dtypes
def test_other_rows_with_eps_zero(backend, dtype):
    x = randn((5, 100), dtype, backend.device)
    check_forward(backend.forward(x, (100,), None, None, 0.0), x, eps=0.0)


@all_dtypes
def test_one_column_is_exactly_the_bias(backend, dtypes):
    largest = torch.finfo(dtypes[0]).max
    x = torch.tensor([[0.1], [-3e4], [65504.0], [largest], [-largest]], dtype=F64).to(dtypes[0]).to(backend.device)
    w, b = (torch.full((1,), value, dtype=dtypes[1], device=backend.device) for value in (2.0, 3.0))
    y, mean, _ = backend.forward(x, (1,), w, b, 1e-5)
    assert torch.equal(y, torch.full_like(x, 3))
    assert torch.equal(mean, x.to(mean.dtype))


@data_dtypes
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("cols", [1, 5, 64, 300, 1100])
def test_nan_and_inf_stay_in_their_row(backend, dtype, value, cols):
    clean = randn((9, cols), dtype, backend.device)
    expected = backend.forward(clean, (cols,), None, None, 1e-5)
    for row in (0, 3, 5, 8):  # of four swept together, and one alone
        x = clean.clone()
        x[row, (row * 17) % cols] = value
        results = backend.forward(x, (cols,), None, None, 1e-5)
        others = torch.arange(9) != row
        assert results[0][row].isnan().all() and results[2][row].isnan()
        for result, unspoilt in zip(results, expected, strict=True):
            assert torch.equal(result[others], unspoilt[others])


def test_nan_keeps_its_bits_from_becoming_a_number(backend):
    """Rounding a NaN of fp32 to bf16 by adding to its bits can carry into the sign and give a zero."""
    nan = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32).view(F32).to(backend.device)
    x = randn((2, 64), BF16, backend.device)
    assert backend.forward(x, (64,), nan, None, 1e-5)[0].isnan().all()
    assert backend.forward(x, (64,), None, -nan, 1e-5)[0].isnan().all()


@pytest.mark.parametrize("parameter_dtype", [F16, F32], ids=dtype_id)
@pytest.mark.parametrize("cols", [2, 64, 511, 1000, 5000])
def test_largest_numbers_of_fp16(backend, parameter_dtype, cols):
    x = randn((5, cols), F16, backend.device).sign() * 65504
    w, b = (randn(cols, parameter_dtype, backend.device) for _ in range(2))
    check_forward(backend.forward(x, (cols,), w, b, 1e-5), x, w, b)


@huge
@pytest.mark.parametrize("cols", [2, 7, 64, 300, 1100, 5000])
def test_huge_numbers(backend, dtype, magnitude, cols):
    """Sums and squares overflow; pytorch#162489. The ordinary row among them stays bitwise what it is alone."""
    x = huge_rows(dtype, magnitude, cols, backend.device)
    w, b = (randn(cols, dtype, backend.device) for _ in range(2))
    results = backend.forward(x, (cols,), w, b, 1e-5)
    check_forward(results, x, w, b)
    alone = backend.forward(x[3:4], (cols,), w, b, 1e-5)
    assert all(torch.equal(result[3:4], row) for result, row in zip(results, alone, strict=True))


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=dtype_id)
@pytest.mark.parametrize("cols", [1, 2, 3, 64, 1000, 5000])
def test_huge_constant_rows(backend, dtype, cols):
    largest = torch.finfo(dtype).max
    x = (torch.tensor([1, 0.9, -1, 0.3], dtype=F64) * largest).to(dtype)[:, None].repeat(1, cols).to(backend.device)
    b = randn(cols, dtype, backend.device)
    y, mean, rstd = backend.forward(x, (cols,), None, b, 1e-5)
    assert torch.equal(y, b.expand_as(y))
    assert torch.equal(mean, x[:, :1].to(mean.dtype))
    torch.testing.assert_close(rstd, torch.full_like(rstd, 1 / 1e-5**0.5), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtypes", [(F16, F16), (F16, F32), (BF16, BF16), (BF16, F32)], ids=dtypes_id)
@pytest.mark.parametrize("cols", [5, 64, 100, 1000])
def test_subnormal_numbers(backend, dtypes, cols):
    """In input, parameters and output they are kept; AVX-512's own conversion to bf16 flushes them."""
    dtype, parameter_dtype = dtypes
    smallest = torch.finfo(dtype).smallest_normal
    if dtype == F16:  # with eps = 0, a row of its subnormal numbers gives ordinary ones; squares of bf16's are zero
        x = (randn((3, cols), F64) * smallest / 4).to(dtype).to(backend.device)
        check_forward(backend.forward(x, (cols,), None, None, 0.0), x, eps=0.0)
    x = randn((3, cols), dtype, backend.device)
    parameter = (randn(cols, F64) * smallest / 8).to(parameter_dtype).to(backend.device)
    for weight, bias in ((parameter, None), (parameter, parameter), (None, parameter)):
        y, _, _ = backend.forward(x * 0 if weight is None else x, (cols,), weight, bias, 1e-5)
        expected = Forward(exact(x * 0 if weight is None else x))
        value = expected.output(*(None if p is None else exact(p) for p in (weight, bias)))
        # Half of the smallest subnormal number, and what the rounding of xhat, up to 5, brings to a number so small.
        step = smallest * torch.finfo(dtype).eps
        assert_within(y, value, step / 2 * (1 + 1e-3), weight is None, bias is None)
        assert ((y != 0) & (y.abs() < smallest)).sum() > y.numel() / 2


@all_dtypes
def test_parameters_that_differ_by_position(backend, dtypes):
    """Rows of alternating signs make the output a function of the parameters alone, so that no two can be swapped."""
    for cols in (2, 16, 30, 64, 66, 500, 1100, 5000):
        x = (1 - 2 * (torch.arange(cols) % 2)).to(dtypes[0]).to(backend.device).repeat(3, 1)
        w, b = (randn(cols, dtypes[1], backend.device) for _ in range(2))
        check_forward(backend.forward(x, (cols,), w, b, 1e-5), x, w, b, context=(cols,))


# Layouts


@data_dtypes
def test_layouts(backend, dtype):
    x = randn((2, 6, 4, 10), dtype, backend.device)
    w, b = (randn(10, dtype, backend.device) for _ in range(2))
    expected = backend.forward(x, (10,), w, b, 1e-5)
    check_forward(expected, x.reshape(-1, 10), w, b)
    for name, view in layouts(x):
        assert torch.equal(view, x), name
        results = backend.forward(view, (10,), w, b, 1e-5)
        assert all(torch.equal(result, right) for result, right in zip(results, expected, strict=True)), name
        assert results[0].is_contiguous() and not results[0].is_neg(), name


@data_dtypes
def test_layouts_of_several_normalized_dimensions(backend, dtype):
    x = randn((2, 6, 4, 10), dtype, backend.device)
    w, b = (randn((4, 10), dtype, backend.device) for _ in range(2))
    expected = backend.forward(x, (4, 10), w, b, 1e-5)
    for name, view in layouts(x):
        results = backend.forward(view, (4, 10), w, b, 1e-5)
        assert all(torch.equal(result, right) for result, right in zip(results, expected, strict=True)), name


@data_dtypes
@pytest.mark.parametrize("shape", [(1, 40), (6, 1), (1, 1)])
def test_expanded(backend, dtype, shape):
    """Strides of 0, over rows and over columns."""
    x = randn(shape, dtype, backend.device).expand(6, 40)
    w = randn(1, dtype, backend.device).expand(40)
    results = backend.forward(x, (40,), w, w, 1e-5)
    check_forward(results, x, w, w)


@all_dtypes
def test_layouts_of_parameters(backend, dtypes):
    x = randn((3, 40), dtypes[0], backend.device)
    w, b = (randn(40, dtypes[1], backend.device) for _ in range(2))
    expected = backend.forward(x, (40,), w, b, 1e-5)[0]
    spread = torch.full((40, 3), torch.nan, dtype=dtypes[1], device=backend.device)
    spread[:, 0], spread[:, 2] = w, b
    assert torch.equal(backend.forward(x, (40,), spread[:, 0], spread[:, 2], 1e-5)[0], expected)
    assert torch.equal(backend.forward(x, (40,), torch._neg_view(-w), torch._neg_view(-b), 1e-5)[0], expected)


def test_overlapping_rows(backend):
    """Rows that share memory, one element apart."""
    buffer = randn(60, F32, backend.device)
    x = buffer.as_strided((11, 50), (1, 1))
    check_forward(backend.forward(x, (50,), None, None, 1e-5), x)


# Memory


def test_writes_nothing_outside(backend):
    """Run every tail with glibc's checking allocator, which aborts where a byte behind an allocation has changed."""
    if backend.name != "cpu":
        pytest.skip("glibc allocates on the CPU alone, and the emulator looks at every access itself")
    libraries = [
        Path(folder) / "libc_malloc_debug.so.0"
        for folder in ("/lib/x86_64-linux-gnu", "/lib64", "/usr/lib", "/lib/aarch64-linux-gnu")
    ]
    library = next((str(path) for path in libraries if path.exists()), None)
    if library is None:
        pytest.skip("this system has no libc_malloc_debug.so.0")
    environment = {**os.environ, "LD_PRELOAD": library, "GLIBC_TUNABLES": "glibc.malloc.check=3"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    code = (
        "import test_forward; from conftest import BACKENDS\n"
        f"test_forward.touch_every_end(BACKENDS[{backend.name!r}]())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "done\n", (done.returncode, done.stdout, done.stderr[-2000:])


def touch_every_end(backend):
    for dtype, parameter_dtype in DTYPES:
        for cols in [*range(1, 131), 255, 257, 513, 1025, 1087, 1100, 1215, 4097, 5000]:
            for rows in (1, 2, 5):
                x = torch.randn(rows, cols).to(dtype).to(backend.device)
                w = torch.randn(cols).to(parameter_dtype).to(backend.device)
                _, mean, rstd = backend.forward(x, (cols,), w, w, 1e-5)
                backend.backward(x, x, (cols,), mean, rstd, w, w, [True, True, True])
    print("done")


@pytest.mark.large
def test_more_than_2_31_elements(backend):
    """Of input, which takes no memory where it is zero, and of output: 4.3 GB."""
    torch.use_deterministic_algorithms(False)  # poisoning would take as long as the test
    rows, cols = (1 << 19) + 1, 4096
    x = lazy_zeros((rows, cols), BF16, backend.device)
    some = [0, 1, rows // 3, rows // 2, rows - 2, rows - 1]
    x[some] = randn((len(some), cols), BF16, backend.device)
    b = randn(cols, BF16, backend.device)
    y, mean, rstd = backend.forward(x, (cols,), None, b, 1e-5)
    check_forward((y[some], mean[some], rstd[some]), x[some], None, b)
    zero = torch.ones(rows, dtype=torch.bool, device=backend.device)
    zero[some] = False
    assert not mean[zero].any()
    for row in zero.nonzero().flatten()[:: rows // 1000].tolist():
        assert torch.equal(y[row], b), row


@pytest.mark.parametrize("dtypes", [pair for pair in DTYPES if pair[0] in (F16, BF16)], ids=dtypes_id)
def test_halfway_outputs_round_to_even(backend, dtypes):
    """Each output is exact in float32 and most lie halfway between two numbers of the output's dtype."""
    dtype, parameter_dtype = dtypes
    step = torch.finfo(dtype).eps
    for cols in (*range(2, 68, 2), 256, 2048, 4096):
        x = torch.tensor([-1.0, 1.0], dtype=dtype, device=backend.device).repeat(3, cols // 2)
        w = (step / 2 * (2 * torch.randint(3, (cols,)) + 1)).to(parameter_dtype).to(backend.device)
        b = (1 + step * torch.randint(int(1 / step), (cols,))).to(parameter_dtype).to(backend.device)
        y, _, rstd = backend.forward(x, (cols,), w, b, 0.0)
        assert torch.equal(rstd, torch.ones_like(rstd)), "the expected values below need a deviation of exactly 1"
        assert torch.equal(y, (x.to(F64) * w + b.to(F64)).to(dtype)), cols


@pytest.mark.parametrize("dtype", [F16, BF16], ids=dtype_id)
def test_every_float32_rounds_as_torch_rounds_it(backend, dtype):
    """A weight of zero makes the output the bias: random bits, halfway cases, subnormal numbers and overflow."""
    halfway = torch.arange(-(2**15), 2**15, 61, dtype=torch.int32) * 2**16 + 2**15  # between two bfloat16 numbers
    around = torch.cat([halfway + more for more in (-1, 0, 1)] + [torch.randint(-(2**31), 2**31, (20_000,))])
    b = torch.cat([around.to(torch.int32).view(F32), torch.arange(-5000, 5000) * 2.0**-26])  # of fp16's smallest 2^-24
    b = b[b.isfinite()].to(backend.device)
    x = randn((2, len(b)), dtype, backend.device)
    y, _, _ = backend.forward(x, (len(b),), torch.zeros_like(b), b, 1e-5)
    assert torch.equal(y, b.to(dtype).expand_as(y))
