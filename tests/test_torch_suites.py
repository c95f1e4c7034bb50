"""The cases that torch ships for its own layer norm, put to ours."""

import itertools
import math

import pytest
import torch
from reference import BF16, F16, F32, F64, check_backward, dtype_id
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

import layernorm_ext

OPERATORS = {op.name: op for op in op_db}
FUNCTION = OPERATORS["nn.functional.layer_norm"]
OPERATOR = OPERATORS["native_layer_norm"]
(MODULE,) = (info for info in module_db if info.module_cls is torch.nn.LayerNorm)

data_dtypes = pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=dtype_id)

# Torch's results in float64 are the reference. What is left is a rounding to the dtype of the result, and what float32
# loses in between, relative to the largest value.
TOLERANCE = {F64: 1e-12, F32: 1e-6, F16: 2**-10, BF16: 2**-7}


def assert_near(actual, expected, dtype):
    finite = expected[expected.isfinite()]
    atol = TOLERANCE[dtype] * (finite.abs().max().item() if finite.numel() else 1)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol, equal_nan=True)


def wide(arguments):
    return [a.detach().double().requires_grad_(a.requires_grad) if torch.is_tensor(a) else a for a in arguments]


@data_dtypes
def test_samples(backend, dtype):
    """Forward and backward of the functional form; the samples hold a negative eps, for which the root is NaN."""
    count = 0
    for sample in FUNCTION.sample_inputs(backend.device, dtype, requires_grad=True):
        arguments = [sample.input, *sample.args]
        actual = backend.layer_norm(*arguments, **sample.kwargs)
        exact_arguments = wide(arguments)
        expected = torch.nn.functional.layer_norm(*exact_arguments, **sample.kwargs)
        assert actual.dtype == dtype
        assert_near(actual, expected, dtype)
        count += 1
        if expected.isnan().any():
            continue
        x, sizes, *parameters = arguments
        dy = torch.randn_like(actual)
        gradients = torch.autograd.grad(actual, (x, *parameters), dy)
        assert [g.shape for g in gradients] == [t.shape for t in (x, *parameters)]
        if actual.numel() > 0:  # by the formulas: torch's own gradients of few columns are off by more than is promised
            cols = math.prod(sizes)
            rows = [t.detach().reshape(-1, cols) for t in (dy, x)]
            weight = parameters[0].detach().reshape(cols) if parameters else None
            results = [gradients[0].reshape(-1, cols), *(g.reshape(cols) for g in gradients[1:]), None, None][:3]
            check_backward(results, *rows, weight, eps=sample.kwargs.get("eps", 1e-5))
    assert count >= 6


@data_dtypes
def test_operator_samples(backend, dtype):
    """Output, mean and rstd of the operator; each combination of absent parameters is among the samples."""
    count = 0
    for sample in OPERATOR.sample_inputs(backend.device, dtype):
        arguments = [sample.input, *sample.args]
        actual = backend.forward(*arguments)
        expected = torch.native_layer_norm(*wide(arguments))
        statistics_dtype = F64 if dtype == F64 else F32
        for a, e, result_dtype in zip(actual, expected, (dtype, statistics_dtype, statistics_dtype), strict=True):
            assert a.dtype == result_dtype
            assert_near(a, e, result_dtype)
        count += 1
    assert count >= 16


def test_reference_inputs(backend):
    """Against the formula in numpy that torch keeps for its own tests."""
    for sample in FUNCTION.reference_inputs(backend.device, F64):
        arguments = [sample.input, *sample.args]
        expected = FUNCTION.ref(*(a.cpu().numpy() if torch.is_tensor(a) else a for a in arguments), **sample.kwargs)
        actual = backend.layer_norm(*arguments, **sample.kwargs)
        torch.testing.assert_close(actual.cpu(), torch.from_numpy(expected), rtol=1e-12, atol=1e-12, equal_nan=True)


def test_errors(backend):
    """The same exceptions with the same words."""
    errors = list(OPERATOR.error_inputs(backend.device))
    assert len(errors) >= 4
    for error in errors:
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            backend.forward(sample.input, *sample.args, **sample.kwargs)


def test_gradcheck(backend):
    """In reverse and forward mode, and batched; the second derivative too."""
    for sample in itertools.islice(FUNCTION.sample_inputs(backend.device, F64, requires_grad=True), 12):
        arguments = [sample.input, *sample.args]
        if sample.kwargs.get("eps", 1) < 0 or sample.input.numel() == 0:
            continue
        sizes, leaves, options = arguments[1], [a for a in arguments if torch.is_tensor(a)], sample.kwargs

        def function(input, *parameters, sizes=sizes, options=options):
            return backend.layer_norm(input, sizes, *parameters, **options)

        assert torch.autograd.gradcheck(
            function, leaves, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
        )
        assert torch.autograd.gradgradcheck(
            function, leaves, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
        )


@pytest.mark.parametrize("dtype", [F64, F32], ids=dtype_id)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_modules(dtype, training):
    inputs = MODULE.module_inputs_func(MODULE, device="cpu", dtype=dtype, requires_grad=True, training=training)
    assert len(inputs) >= 6
    for case in inputs:
        constructor, forward = case.constructor_input, case.forward_input
        module = layernorm_ext.LayerNorm(*constructor.args, **constructor.kwargs).to(dtype).train(training)
        theirs = torch.nn.LayerNorm(*constructor.args, **constructor.kwargs).to(dtype).train(training)
        actual = module(*forward.args, **forward.kwargs)
        expected = theirs.double()(*(a.double() for a in forward.args), **forward.kwargs)
        assert_near(actual, expected, dtype)
        if case.reference_fn is not None:
            reference = case.reference_fn(module, list(module.parameters()), *forward.args, **forward.kwargs)
            torch.testing.assert_close(actual, reference)
