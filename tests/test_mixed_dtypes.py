"""Input, weight and bias of any floating dtypes, including the combinations that have no kernel of their own.

test_functions.py tests derivatives and compiled calls with such dtypes.
"""

import itertools

import pytest
import torch
from reference import BF16, DTYPES, F16, F32, F64, dtype_id, dtypes_id, statistics_dtype
from shapes import assert_same_bits, check, randn, run, run_pixels

import layernorm_ext

FLOATS = [F64, F32, F16, BF16]
# (input, weight, bias): every combination without a kernel.
TRIPLES = [(x, w, b) for x, w, b in itertools.product(FLOATS, repeat=3) if w != b or (x, w) not in DTYPES]
# One of each kind for slow tests: wider parameters, narrower ones, and two parameter dtypes.
SOME = [(F32, F64, F64), (F32, F16, F16), (F64, F32, BF16), (F16, F16, F32), (BF16, F64, F16)]
some_triples = pytest.mark.parametrize("dtypes", SOME, ids=dtypes_id)


def triple_id(dtypes):
    return "-".join(map(dtype_id, dtypes))


def arguments(dtypes, device, batch=(6,), groups=(), cols=40):
    """Return input, grad_output, weight and bias."""
    x, dy = (randn((*batch, cols), dtypes[0], device) for _ in range(2))
    return x, dy, *(randn((*groups, cols), dtype, device) for dtype in dtypes[1:])


@pytest.mark.parametrize("dtypes", TRIPLES, ids=triple_id)
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero_centered"])
def test_results_match_float64(backend, dtypes, rms, zero_centered):
    """The results also have the bits that they have for parameters converted to the accumulation type beforehand.

    Rounding a float64 parameter to float32 adds 2^-24 of a term to bounds of 8 such roundings, of which random rows
    reach half.
    """
    options = {"rms": rms, "zero_centered_weight": zero_centered}
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


@some_triples
@pytest.mark.parametrize("channels_last", [False, True])
def test_images_match_float64(backend, dtypes, channels_last):
    x, dy, w, b = arguments(dtypes, backend.device, (24,))
    call = run if channels_last else run_pixels
    options = {"preserve_layout": True} if channels_last else {"images": 2}
    check(call(backend, x, dy, w, b, **options), x, dy, w, b)


@some_triples
def test_residual(backend, dtypes):
    """The sum has the dtype of the input, whatever those of the parameters."""
    x, residual, w, b = arguments(dtypes, backend.device)
    output, total, *_ = backend.ops.forward.residual(x, residual, (40,), w, b)
    assert_same_bits([total, output], [x + residual, backend.forward(x + residual, (40,), w, b)[0]])
    in_place = residual.clone()
    assert_same_bits([backend.ops.forward_(x, in_place, (40,), w, b)[0], in_place], [output, total])


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "AddLayerNorm", "AddRMSNorm", "LayerNorm2d"])
def test_fp16_modules_train_on_float32_input(name):
    norm = getattr(layernorm_ext, name)(8, dtype=F16)
    x = torch.randn(2, 8, 3, 8)
    y = norm(x, x)[0] if name.startswith("Add") else norm(x)
    y.square().mean().backward()
    assert y.dtype == F32 and all(p.grad.dtype == p.dtype == F16 for p in norm.parameters())
