"""The sample and error inputs that torch's own tests use for layer norm."""

import pytest
import torch
from reference import BF16, F16, F32, F64, check_backward, dtype_id
from torch.testing._internal.common_methods_invocations import op_db

(FUNCTION,) = (op for op in op_db if op.name == "nn.functional.layer_norm")
(OPERATOR,) = (op for op in op_db if op.name == "native_layer_norm")

data_dtypes = pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=dtype_id)

# The reference is torch in float64. Each result is rounded to its dtype, and sums lose some roundings of float32;
# both are relative to the largest value.
TOLERANCE = {F64: 1e-12, F32: 1e-6, F16: 2**-10, BF16: 2**-7}


def assert_near(actual, expected, dtype):
    assert actual.dtype == dtype
    finite = expected[expected.isfinite()]
    atol = TOLERANCE[dtype] * (finite.abs().max().item() if finite.numel() else 1)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol, equal_nan=True)


def as_float64(arguments):
    return [a.detach().double() if torch.is_tensor(a) else a for a in arguments]


@data_dtypes
def test_function_matches_torch_in_float64(backend, dtype):
    """Some samples have a negative eps, which makes all results NaN."""
    samples = list(FUNCTION.sample_inputs(backend.device, dtype, requires_grad=True))
    assert len(samples) >= 6
    for sample in samples:
        arguments = [sample.input, *sample.args]
        actual = backend.layer_norm(*arguments, **sample.kwargs)
        expected = torch.nn.functional.layer_norm(*as_float64(arguments), **sample.kwargs)
        assert_near(actual, expected, dtype)
        if expected.isnan().any():
            continue
        x, sizes, *parameters = arguments
        dy = torch.randn_like(actual)
        gradients = torch.autograd.grad(actual, (x, *parameters), dy)
        assert [g.shape for g in gradients] == [t.shape for t in (x, *parameters)]
        if actual.numel() > 0:  # torch's own gradients are not exact enough for rows of few columns
            rows = (-1, torch.Size(sizes).numel())
            weight = parameters[0].detach().flatten() if parameters else None
            results = [gradients[0].reshape(rows), *(g.flatten() for g in gradients[1:]), None, None][:3]
            eps = sample.kwargs.get("eps", 1e-5)
            check_backward(results, dy.reshape(rows), x.detach().reshape(rows), weight, eps=eps)


@data_dtypes
def test_operator_matches_torch_in_float64(backend, dtype):
    """The samples contain all combinations of missing parameters."""
    samples = list(OPERATOR.sample_inputs(backend.device, dtype))
    assert len(samples) >= 16
    statistics_dtype = F64 if dtype == F64 else F32
    for sample in samples:
        arguments = [sample.input, *sample.args]
        results = zip(backend.forward(*arguments), torch.native_layer_norm(*as_float64(arguments)), strict=True)
        for (actual, expected), result_dtype in zip(results, (dtype, statistics_dtype, statistics_dtype), strict=True):
            assert_near(actual, expected, result_dtype)


def test_errors_are_those_of_torch(backend):
    errors = list(OPERATOR.error_inputs(backend.device))
    assert len(errors) >= 4
    for error in errors:
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            backend.forward(sample.input, *sample.args, **sample.kwargs)
