"""Output, mean and rstd match float64 for inputs that are hard for forward.

Inputs that are hard for both passes are in test_backward.py.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.backends import assert_same_bits, installed, rows_and_images, run, run_images
from support.inputs import all_dtypes, data_dtypes, output_dtypes, randn, random_args, rms_or_not
from support.reference import (
    BF16,
    DTYPES,
    DTYPES_16_BIT,
    F16,
    F32,
    F64,
    Forward,
    assert_within,
    check_forward,
    dtypes_id,
    exact,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@rows_and_images
@all_dtypes
@rms_or_not
@pytest.mark.parametrize("offset", [0, 1000])
def test_weights_of_any_size(backend, run, dtypes, rms, offset):
    """The error of an output is relative to its own weight and bias, which are 1e-4 to 1e4 in the same row."""
    for rows, cols in ((500, 64), (200, 768), (20, 5000)):
        x = randn((rows, cols), dtypes[0], backend.device, offset)
        largest = 3 if dtypes[0] == F16 else 4  # output of fp16 stays below 65504
        magnitudes = 10.0 ** torch.randint(-4, largest + 1, (2, cols))
        w, b = (magnitudes * (torch.rand(2, cols) + 0.1)).to(dtypes[1]).to(backend.device)
        for bias in (None, b):
            results = run(backend, x, x, w, bias, mask=[False] * 3, rms=rms)
            check_forward(results.forward, x, w, bias, context=(rows, cols), rms=rms)


@pytest.mark.parametrize("dtypes", DTYPES[1:], ids=dtypes_id)  # in float64, rounding 1 / cols may change rstd
@pytest.mark.parametrize("cols", [2, 16, 30, 64, 98, 500, 1100, 5000])
def test_ties_round_to_even(backend, dtypes, cols):
    """A row of 1 and -1 is its own xhat, so that the output is +-weight + bias, here halfway between two numbers.

    Weight and bias differ in each column, so that parameters of other columns would show.
    """
    dtype, parameter_dtype = dtypes
    unit = torch.finfo(dtype).eps  # the distance between the numbers from 1 to 2
    sign = 1.0 - 2 * ((torch.arange(5)[:, None] + torch.arange(cols)) % 2).double()
    w, b = 1 + unit * torch.randint(0, 64, (cols,)).double(), unit * (torch.randint(0, 64, (cols,)) + 0.5).double()
    x, *parameters = (t.to(backend.device) for t in (sign.to(dtype), w.to(parameter_dtype), b.to(parameter_dtype)))
    y, _, rstd = backend.forward(x, (cols,), *parameters, 0.0)
    assert (rstd == 1).all()
    assert torch.equal(y.cpu(), (sign * w + b).to(dtype))  # torch rounds ties to even


@pytest.mark.parametrize("dtype", [F64, F32], ids=dtypes_id)
def test_values_a_few_units_apart(backend, dtype):
    """If values differ only in their last bits, rounding their mean errs by as much as they deviate from it."""
    for exponent in (0, 10, 20):
        one = torch.tensor(2.0**exponent, dtype=dtype)
        unit = torch.finfo(dtype).eps * one
        for cols in (2, 3, 7, 100, 1000, 5000):
            x = (one + unit * torch.randint(0, 4, (5, cols))).to(backend.device)
            check_forward(backend.forward(x, (cols,), None, None, 1e-12), x, eps=1e-12, context=(exponent, cols))


@pytest.mark.parametrize("dtype", [F64, F32], ids=dtypes_id)
@pytest.mark.parametrize("cols", [64, 100, 1024, 4098, 8192])
@pytest.mark.parametrize("outliers", [0, 1, 2, 8])
def test_sums_that_round_in_one_direction(backend, dtype, cols, outliers):
    """Adding equal squares to each other, or to that of an outlier, is the worst case of a sum."""
    x = torch.zeros(100, cols, dtype=F64)
    x[:, torch.randperm(cols)[:outliers]] = torch.logspace(0, 2, 100, dtype=F64)[:, None]
    if outliers == 0:
        x += torch.logspace(0, 1, 100, dtype=F64)[:, None] * (1 - 2 * (torch.arange(cols) % 2))
    x = x.to(dtype).to(backend.device)
    check_forward(backend.forward(x, (cols,), None, None, 1e-5), x)


@data_dtypes
@pytest.mark.parametrize("first", [1, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("noise", [0, 1e-3, 1], ids="noise={}".format)
def test_rows_that_begin_with_other_values(backend, dtype, first, noise):
    """The CPU kernels estimate a row's mean from its first values, and try again if (mean - estimate)^2 > variance.

    The ratio of (mean - estimate)^2 and the variance is about cols / first - 1 without noise: 1 for the numbers of
    columns near 2 * first.
    """
    for cols in (first + 1, 2 * first - 1, 2 * first, 2 * first + 1, 3 * first, 100, 1000, 5000):
        x = noise * torch.randn(20, cols, dtype=F64) + torch.logspace(-2, 1, 20, dtype=F64)[:, None]
        x[:, :first] += torch.logspace(-1, 4, 20, dtype=F64)[:, None]
        x = x.to(dtype).to(backend.device)
        check_forward(backend.forward(x, (cols,), None, None, 1e-5), x, context=(cols,))


@data_dtypes
def test_random_constant_rows_give_zero(backend, dtype):
    """The mean of a constant row must be exact. An inexact one is rare, hence a thousand constants and 21 widths."""
    constants = torch.randn(1000, 1, dtype=F64) * torch.logspace(-3, 4, 1000, dtype=F64)[:, None]
    for cols in range(1, 500, 24):
        x = constants.to(dtype).to(backend.device).expand(1000, cols)
        assert not backend.forward(x, (cols,), None, None, 1e-5)[0].any(), cols


def test_nan_parameters_give_nan(backend):
    """Adding half a unit to the bits of this float32 NaN, as conversions to bf16 round, would carry and give -0."""
    nan = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32).view(F32).to(backend.device)
    x = randn((2, 64), BF16, backend.device)
    assert backend.forward(x, (64,), nan, None, 1e-5)[0].isnan().all()
    assert backend.forward(x, (64,), None, -nan, 1e-5)[0].isnan().all()


@rows_and_images
def test_flushing_subnormal_numbers_keeps_those_of_float16(backend, run):
    """Subnormal numbers of float16 are normal in float32, and torch's own conversions keep them."""
    if backend.name != "cpu":
        pytest.skip("torch.set_flush_denormal concerns the CPU's arithmetic")
    x, w, b = (randn(shape, F64) * 2.0**-16 for shape in ((3, 100), 100, 100))
    x, w, b = (t.to(F16) for t in (x, w, b))
    expected = run(backend, x, x, w, b, 0.0)
    try:
        assert torch.set_flush_denormal(True)
        results = run(backend, x, x, w, b, 0.0)
    finally:
        torch.set_flush_denormal(False)
    assert ((x != 0) & (x.abs() < torch.finfo(F16).smallest_normal)).any()
    assert_same_bits(results, expected)


@pytest.mark.parametrize("dtypes", DTYPES_16_BIT, ids=dtypes_id)
@pytest.mark.parametrize("cols", [5, 64, 100, 1000])
@rows_and_images
def test_subnormal_numbers_are_kept(backend, run, dtypes, cols):
    """Input, parameters and output have such numbers. The conversion to bf16 that AVX-512 has flushes them to zero."""
    dtype, parameter_dtype = dtypes
    smallest = torch.finfo(dtype).smallest_normal
    if dtype == F16:  # the reciprocal of bf16's subnormal numbers is infinite in float32
        x = (randn((3, cols), F64) * smallest / 4).to(dtype).to(backend.device)
        check_forward(run(backend, x, x, eps=0.0).forward, x, eps=0.0)
    parameter = (randn(cols, F64) * smallest / 8).to(parameter_dtype).to(backend.device)
    for weight, bias in ((parameter, None), (parameter, parameter), (None, parameter)):
        x = randn((3, cols), dtype, backend.device) * (weight is not None)
        y = run(backend, x, x, weight, bias).output
        value = Forward(exact(x)).output(*(None if p is None else exact(p) for p in (weight, bias)))
        # Half of the smallest subnormal number, and the error of xhat (at most 5), which is tiny after the weight.
        step = smallest * torch.finfo(dtype).eps
        assert_within(y, value, step / 2 * (1 + 1e-3), weight is None, bias is None)
        assert ((y != 0) & (y.abs() < smallest)).sum() > y.numel() / 2


@output_dtypes
@pytest.mark.parametrize("megabytes, cols", [(8, 64), (8, 513), (17, 4112), (17, 8224), (17, 16385)])
def test_large_arrays(backend, dtypes, megabytes, cols):
    """A large array has the bits of its sixteenths, for which CPU loops take more rows at a time and write to caches.

    4112 columns are a multiple of 64 bytes, but not of two packs; rows of 16385 are not aligned.
    """
    if backend.name not in ("cpu", "cuda"):
        pytest.skip("the CUDA kernels write outputs of all sizes alike")
    x, dy, w, b = random_args(backend, dtypes, (megabytes << 20) // (cols * dtypes[0].itemsize) + 1, cols)
    results = run(backend, x, dy, w, b)
    for rows in torch.arange(len(x)).chunk(16):
        assert_same_bits(run(backend, x[rows], dy[rows], w, b).rows(), results.rows(rows))


def test_nothing_is_written_outside_the_results(backend):
    """glibc's checking allocator aborts if a byte behind an allocation has changed."""
    if backend.name != "cpu":
        pytest.skip("glibc allocates only CPU memory, and the emulator checks every access")
    environment = {**os.environ, "LD_PRELOAD": "libc_malloc_debug.so.0", "GLIBC_TUNABLES": "glibc.malloc.check=3"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    code = "import test_forward; test_forward.run_all_tails()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if "cannot be preloaded" in done.stderr:
        pytest.skip("this system has no libc_malloc_debug.so.0")
    assert done.returncode == 0 and done.stdout == "done\n", (done.returncode, done.stdout, done.stderr[-2000:])


def run_all_tails():
    """Write results of every number of columns and pixels at the end of a pack."""
    cpu = installed("cpu")
    for dtypes in DTYPES:
        for cols in [*range(1, 131), 255, 257, 513, 1025, 1087, 1100, 1215, 4097, 5000]:
            run(cpu, *random_args(cpu, dtypes, 5, cols))
        for pixels, channels in itertools.product([*range(2, 70), 256, 257], (1, 17)):
            x, w = randn((2, channels, pixels), dtypes[0]), randn(channels, dtypes[1])
            run_images(cpu, x, x, w, w)
    print("done")


@pytest.mark.parametrize("dtype", [F16, BF16], ids=dtypes_id)
def test_every_float32_rounds_as_torch_rounds_it(backend, dtype):
    """A weight of zero makes the output the bias: random bits, halfway cases, subnormal numbers and overflow."""
    halfway = torch.arange(-(2**15), 2**15, 61, dtype=torch.int32) * 2**16 + 2**15  # bits between two bfloat16 numbers
    bits = torch.cat([halfway + more for more in (-1, 0, 1)] + [torch.randint(-(2**31), 2**31, (20_000,))])
    b = torch.cat([bits.to(torch.int32).view(F32), torch.arange(-5000, 5000) * 2.0**-26])  # fp16's smallest is 2^-24
    b = b[b.isfinite()].to(backend.device)
    x = randn((2, len(b)), dtype, backend.device)
    y, _, _ = backend.forward(x, (len(b),), torch.zeros_like(b), b, 1e-5)
    assert torch.equal(y, b.to(dtype).expand_as(y))
