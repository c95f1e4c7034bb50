"""Every argument is refused by name and with both values, before any memory is touched, also where autograd is off."""

import contextlib
import re

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import layernorm_ext
from layernorm_ext import _build_info

X = torch.ones(2, 3)
STATISTICS = torch.ones(2, 1)
ALL = [True, True, True]


def fake_tensors():
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.fixture(params=[contextlib.nullcontext, torch.inference_mode, fake_tensors], ids=["eager", "inference", "fake"])
def context(request):
    """The checks stand in the kernels and shape functions, not in a front that some modes go around."""
    with request.param():
        yield request.param


def raises(message, error=RuntimeError):
    return pytest.raises(error, match=re.escape(message))


def on_device_of(backend, value):
    """Return a tensor on the device of the backend, with its strides; anything else as it is."""
    if not torch.is_tensor(value):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=backend.device).copy_(value)


# (input, normalized_shape, weight, bias), message. Where torch checks too, the sentence is torch's.
FORWARD = {
    "normalized_shape is empty": (
        (X, [], None, None),
        "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one element, but got "
        "normalized_shape = []",
    ),
    "input has another shape": (
        (X, [4], None, None),
        "Given normalized_shape=[4], expected input with shape [*, 4], but got input of size[2, 3]",
    ),
    "input has too few dimensions": (
        (X, [5, 2, 3], None, None),
        "Given normalized_shape=[5, 2, 3], expected input with shape [*, 5, 2, 3], but got input of size[2, 3]",
    ),
    "input has no dimension": (
        (torch.ones(()), [3], None, None),
        "Given normalized_shape=[3], expected input with shape [*, 3], but got input of size[]",
    ),
    "weight has another shape": (
        (X, [3], torch.ones(4), None),
        "Expected weight to be of same shape as normalized_shape, but got weight of shape [4] and "
        "normalized_shape = [3]",
    ),
    "bias has another shape": (
        (X, [3], None, torch.ones(1, 3)),
        "Expected bias to be of same shape as normalized_shape, but got bias of shape [1, 3] and "
        "normalized_shape = [3]",
    ),
    "weight is checked before bias and input": (
        (X, [4], torch.ones(5), torch.ones(6)),
        "Expected weight to be of same shape as normalized_shape, but got weight of shape [5] and "
        "normalized_shape = [4]",
    ),
    "weight is of integers": (
        (X, [3], torch.ones(3, dtype=torch.int64), None),
        "Expected weight of dtype Double, Float, Half or BFloat16, but got weight of dtype Long",
    ),
    "weight is of booleans": (
        (X, [3], torch.ones(3, dtype=torch.bool), torch.ones(3)),
        "Expected weight of dtype Double, Float, Half or BFloat16, but got weight of dtype Bool",
    ),
    "bias is complex": (
        (X, [3], torch.ones(3), torch.ones(3, dtype=torch.complex64)),
        "Expected bias of dtype Double, Float, Half or BFloat16, but got bias of dtype ComplexFloat",
    ),
    "bias has 8 bits": (
        (X.half(), [3], None, torch.ones(3).to(torch.float8_e5m2)),
        "Expected bias of dtype Double, Float, Half or BFloat16, but got bias of dtype Float8_e5m2",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), FORWARD.values(), ids=FORWARD.keys())
def test_forward(backend, context, arguments, message):
    with raises(message):
        backend.forward(*(on_device_of(backend, argument) for argument in arguments), 1e-5)


@pytest.mark.parametrize(("arguments", "message"), FORWARD.values(), ids=FORWARD.keys())
def test_torch_agrees(arguments, message):
    """Where torch refuses the same arguments, it does so with the same sentence and exception, or names no dtype."""
    with pytest.raises(RuntimeError) as refusal:
        torch.nn.functional.layer_norm(*arguments)
    assert message == str(refusal.value) or "dtype" in message


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn, torch.complex32],
    ids=str,
)
def test_unsupported_dtype(backend, context, dtype):
    name = {
        torch.int64: "Long",
        torch.bool: "Bool",
        torch.uint8: "Byte",
        torch.complex64: "ComplexFloat",
        torch.float8_e4m3fn: "Float8_e4m3fn",
        torch.complex32: "ComplexHalf",
    }[dtype]
    message = f"Expected input of dtype Double, Float, Half or BFloat16, but got input of dtype {name}"
    with raises(message) as refusal:
        backend.forward(torch.empty(2, 3, dtype=dtype, device=backend.device), [3], None, None, 1e-5)
    # torch's own exception; a shape function must not raise it, as it would mean that there is no shape function.
    assert context is fake_tensors or isinstance(refusal.value, NotImplementedError)


# What is changed in a right call of backward, message.
BACKWARD = {
    "input, as in forward": (
        {"normalized_shape": [4]},
        "Given normalized_shape=[4], expected input with shape [*, 4], but got input of size[2, 3]",
    ),
    "grad_output has another shape": (
        {"grad_output": torch.ones(3, 2)},
        "Expected grad_output to be of the shape of input, but got grad_output of shape [3, 2] and input of shape "
        "[2, 3]",
    ),
    "grad_output has another dtype": (
        {"grad_output": X.double()},
        "Expected grad_output to be of the dtype of input, but got grad_output of dtype Double and input of dtype "
        "Float",
    ),
    "mean has another shape": (
        {"mean": torch.ones(2)},
        "Expected mean of shape [2, 1], but got mean of shape [2]",
    ),
    "rstd has fewer rows": (
        {"rstd": torch.ones(1, 1)},
        "Expected rstd of shape [2, 1], but got rstd of shape [1, 1]",
    ),
    "rstd has another dtype": (
        {"rstd": STATISTICS.double()},
        "Expected rstd of dtype Float for input of dtype Float, but got rstd of dtype Double",
    ),
    "statistics of 16-bit input are float": (
        {"input": X.half(), "grad_output": X.half(), "mean": STATISTICS.half()},
        "Expected mean of dtype Float for input of dtype Half, but got mean of dtype Half",
    ),
    "weight has another shape": (
        {"weight": torch.ones(2)},
        "Expected weight to be of same shape as normalized_shape, but got weight of shape [2] and "
        "normalized_shape = [3]",
    ),
    "bias is of an unsupported dtype": (
        {"bias": torch.ones(3).int()},
        "Expected bias of dtype Double, Float, Half or BFloat16, but got bias of dtype Int",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BACKWARD.values(), ids=BACKWARD.keys())
def test_backward(backend, context, changes, message):
    arguments = {
        "grad_output": X,
        "input": X,
        "normalized_shape": [3],
        "mean": STATISTICS,
        "rstd": STATISTICS,
        "weight": None,
        "bias": None,
        "output_mask": ALL,
    }
    with raises(message):
        backend.backward(**{name: on_device_of(backend, value) for name, value in {**arguments, **changes}.items()})


META = torch.ones(3, device="meta")


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_parameter_on_another_device(backend, name):
    """The meta device stands for any other. Fake tensors have a check of their own."""
    with raises(f"Expected {name} to be on the device of input, but got {name} on meta and input on {backend.device}"):
        backend.forward(X.to(backend.device), [3], **{name: META})


@pytest.mark.parametrize("name", ["mean", "rstd", "grad_output"])
def test_gradient_or_statistic_on_another_device(backend, name):
    x, statistics = X.to(backend.device), STATISTICS.to(backend.device)
    arguments = {"grad_output": x, "mean": statistics, "rstd": statistics}
    arguments[name] = arguments[name].to("meta")
    with raises(f"Expected {name} to be on the device of input, but got {name} on meta and input on {backend.device}"):
        backend.backward(**arguments, input=x, normalized_shape=[3], weight=None, bias=None, output_mask=ALL)


# Values of normalized_shape that torch reads as [3], and values that it refuses.
SHAPES = {
    "numpy integers": [numpy.int64(3)],
    "tuple of numpy integers": (numpy.int32(3),),
    "0-d tensors": [torch.tensor(3)],
    "torch.Size": torch.Size([3]),
    "tensors of one element": [torch.tensor([3])],
    "int": 3,
    "numpy integer": numpy.int64(3),
    "0-d tensor": torch.tensor(3),
    "tensor": torch.tensor([3]),
    "array": numpy.array([3]),
    "range": range(3, 4),
    "None": None,
    "floats": [3.0],
    "numpy floats": [numpy.float32(3)],
    "0-d tensors of floats": [torch.tensor(3.0)],
    "strings": ["3"],
    "bools": [True],
    "empty": [],
}
W = torch.ones(3)
FUNCTIONS = {  # ours, torch's
    "layer_norm": (layernorm_ext.layer_norm, torch.nn.functional.layer_norm),
    "rms_norm": (layernorm_ext.rms_norm, torch.nn.functional.rms_norm),
}
MODULES = {
    "LayerNorm": (layernorm_ext.LayerNorm, torch.nn.LayerNorm),
    "RMSNorm": (layernorm_ext.RMSNorm, torch.nn.RMSNorm),
}


def outcome(function, *args):
    """Return the shape of the result, or the kind of error and the first line of its message."""
    try:
        return function(*args).shape
    except Exception as error:
        return type(error), str(error).splitlines()[0]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_normalized_shape_of_any_kind_that_torch_accepts(shape):
    """And what torch refuses gets torch's error."""
    for ours, theirs in FUNCTIONS.values():
        assert outcome(ours, X, shape) == outcome(theirs, X, shape)
    for ours, theirs in MODULES.values():
        assert outcome(lambda cls: cls(shape)(X), ours) == outcome(lambda cls: cls(shape)(X), theirs)


@pytest.mark.parametrize("shape", [[numpy.int64(3)], [torch.tensor(3)]], ids=["numpy integers", "0-d tensors"])
@pytest.mark.parametrize("which", [*FUNCTIONS, *MODULES])
def test_normalized_shape_of_other_integers_compiles(which, shape):
    x, w = (torch.randn(size, requires_grad=True) for size in ((2, 3), (3,)))
    if which in FUNCTIONS:
        function = FUNCTIONS[which][0]
        compiled = torch.compile(lambda x: function(x, shape, w), fullgraph=True, backend="aot_eager")
    else:
        compiled = torch.compile(MODULES[which][0](shape), fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize(
    "arguments",
    [
        ("x", [3]),
        (numpy.ones((2, 3)), [3]),
        (X, [3], "w"),
        (X, [3], [1.0] * 3),
        (X, [3], W, "eps"),
        (X, [3], W, numpy.array([1e-5])),
        (X, [3], W, torch.tensor([1e-5])),
        (X, [3], W, None),
        (X, [3], W, numpy.float32(1e-5)),
        (X, [3], W, torch.tensor(1e-5)),
        (X, [3], W, 1),
    ],
    ids=repr,
)
def test_other_arguments_of_the_kinds_that_torch_accepts(arguments):
    assert outcome(layernorm_ext.rms_norm, *arguments) == outcome(torch.nn.functional.rms_norm, *arguments)
    if len(arguments) == 4:
        arguments = (*arguments[:3], W, arguments[3])  # after a bias
    assert outcome(layernorm_ext.layer_norm, *arguments) == outcome(torch.nn.functional.layer_norm, *arguments)


def test_arguments_of_the_residual_forms():
    """Torch has no such functions; the errors are of the same kind."""
    with raises("add_layer_norm(): argument 'residual' (position 2) must be Tensor, not str", TypeError):
        layernorm_ext.add_layer_norm(X, "residual", [3])
    with raises("add_rms_norm(): argument 'normalized_shape' (position 3) must be tuple of ints, not int", TypeError):
        layernorm_ext.add_rms_norm(X, X, 3)


@pytest.mark.skipif(_build_info.with_cuda, reason="the package was built with CUDA")
def test_no_cuda_kernels():
    """What a CUDA tensor meets, called by the dispatch key because there may be no CUDA device."""
    with raises("layernorm_ext was built without CUDA kernels, for a reason that `python -m layernorm_ext` prints"):
        torch.ops.layernorm.forward.default.redispatch(
            torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), X, [3], None, None, 1e-5
        )
