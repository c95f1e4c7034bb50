"""Input, weight and bias of any floating dtypes, including the combinations that have no kernel of their own.

test_functions.py tests derivatives, images and residuals with such dtypes.
"""

import itertools

import pytest
from reference import BF16, DTYPES, F16, F32, F64, dtype_id, statistics_dtype
from shapes import assert_same_bits, check, randn, run

FLOATS = [F64, F32, F16, BF16]
# (input, weight, bias): every combination without a kernel.
TRIPLES = [(x, w, b) for x, w, b in itertools.product(FLOATS, repeat=3) if w != b or (x, w) not in DTYPES]


def triple_id(dtypes):
    return "-".join(map(dtype_id, dtypes))


def arguments(dtypes, device, batch=(6,), groups=(), cols=40):
    """Return input, grad_output, weight and bias."""
    x, dy = (randn((*batch, cols), dtypes[0], device) for _ in range(2))
    return x, dy, *(randn((*groups, cols), dtype, device) for dtype in dtypes[1:])


@pytest.mark.parametrize("dtypes", TRIPLES, ids=triple_id)
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms, zero_centered"])
def test_results_match_float64(backend, dtypes, rms):
    """The results also have the bits that they have for parameters converted to the accumulation type beforehand.

    Rounding a float64 parameter to float32 adds 2^-24 of a term to bounds of 8 such roundings, of which random rows
    reach half.
    """
    options = {"rms": rms, "zero_centered_weight": rms}
    for batch, groups in (((5,), ()), ((3, 5), (3, 1)), ((2, 3, 4), (2, 1, 4))):
        x, dy, w, b = arguments(dtypes, backend.device, batch, groups)
        output, mean, rstd, *gradients = results = run(backend, x, dy, w, b, **options)
        check(results, x, dy, w, b, context=(batch, groups), **options)
        converted = [parameter.to(statistics_dtype(x.dtype)) for parameter in (w, b)]
        expected = run(backend, x, dy, *converted, **options)
        assert_same_bits(results[:3], expected[:3])
        assert_same_bits(gradients, [g.to(dtype) for g, dtype in zip(expected[3:], dtypes, strict=True)])


@pytest.mark.parametrize("x_dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_one_parameter(backend, x_dtype, dtype):
    """The gradient of an absent parameter, if requested, has the dtype of the other one."""
    for rows in (5, 0):
        x, dy, p, _ = arguments((x_dtype, dtype, dtype), backend.device, (rows,))
        for w, b in ((p, None), (None, p)):
            check(run(backend, x, dy, w, b), x, dy, w, b)
