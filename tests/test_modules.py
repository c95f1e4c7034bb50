"""The module and the function drop in for torch's."""

import copy
import doctest
import inspect
import io
import pickle

import pytest
import torch
from torch.nn import functional as F

import layernorm_ext
from layernorm_ext import LayerNorm, layer_norm

SIGNATURES = [
    {"elementwise_affine": True, "bias": True},
    {"elementwise_affine": True, "bias": False},
    {"elementwise_affine": False},
]


def assert_like_torch(actual, expected):
    """Within the rounding of torch's own float32 result."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(LayerNorm.__init__, torch.nn.LayerNorm.__init__), (layer_norm, F.layer_norm)]
)
def test_signature(ours, theirs):
    ours, theirs = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]


@pytest.mark.parametrize("options", SIGNATURES, ids=str)
@pytest.mark.parametrize("shape", [5, (4, 5), [5], torch.Size([3, 4, 5])], ids=str)
def test_like_torch(options, shape):
    torch.manual_seed(1)
    ours, theirs = LayerNorm(shape, eps=1e-3, **options), torch.nn.LayerNorm(shape, eps=1e-3, **options)
    assert isinstance(ours, torch.nn.LayerNorm)
    assert repr(ours) == repr(theirs)
    assert ours.normalized_shape == theirs.normalized_shape
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 4, 5)
    assert_like_torch(ours(x), theirs(x))


def test_repr():
    assert repr(LayerNorm(4)) == "LayerNorm((4,), eps=1e-05, elementwise_affine=True, bias=True)"


@pytest.mark.parametrize("assign", [True, False])
def test_load_state_dict(assign):
    source, target = torch.nn.LayerNorm(4), LayerNorm(4)
    torch.nn.init.normal_(source.weight)
    target.load_state_dict(source.state_dict(), assign=assign)
    assert torch.equal(target.weight, source.weight)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        LayerNorm(5).load_state_dict(source.state_dict())


def save_and_load(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), save_and_load])
def test_copies(copied):
    module, x = LayerNorm(8), torch.randn(3, 8)
    torch.nn.init.normal_(module.weight)
    other = copied(module)
    assert type(other) is LayerNorm
    assert torch.equal(other(x), module(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_conversions(dtype):
    module = LayerNorm(8).to(dtype)
    y = module(torch.randn(3, 8).to(dtype))
    assert y.dtype == module.weight.dtype == dtype
    assert LayerNorm(8, dtype=dtype)(torch.randn(3, 8).to(dtype)).dtype == dtype


def test_meta_device():
    module = LayerNorm(8, device="meta")
    assert module(torch.empty(2, 8, device="meta")).device.type == "meta"
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert_like_torch(module(torch.ones(2, 8)), torch.zeros(2, 8))


def test_skip_init():
    module = torch.nn.utils.skip_init(LayerNorm, 8)
    assert module.weight.shape == (8,)


def test_autocast_keeps_the_dtype_of_the_input():
    """With float32 parameters; torch's gives bfloat16 on a CPU and float32 on CUDA."""
    module = LayerNorm(8)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(3, 8).bfloat16()).dtype == torch.bfloat16
        assert module(torch.randn(3, 8)).dtype == torch.float32
    assert module(torch.randn(3, 8).half()).dtype == torch.float16


def test_inference_mode_and_no_grad():
    module, x = LayerNorm(8), torch.randn(3, 8)
    expected = module(x)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert torch.equal(module(x), expected)


class Subclass(torch.Tensor):
    """Inherits torch's default __torch_function__."""


class Recorder(torch.Tensor):
    """Takes over every function it is given to."""

    calls: list = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.calls.append((function, kwargs))
        return "taken over"


def test_tensor_subclass_is_kept():
    x = torch.randn(3, 8)
    y = LayerNorm(8)(x.as_subclass(Subclass))
    assert type(y) is Subclass
    assert torch.equal(y.as_subclass(torch.Tensor), LayerNorm(8)(x))


@pytest.mark.parametrize("position", ["input", "weight", "bias"])
def test_torch_function_sees_the_function(position):
    Recorder.calls.clear()
    tensors = {"input": torch.randn(3, 8), "weight": torch.ones(8), "bias": torch.zeros(8)}
    tensors[position] = tensors[position].as_subclass(Recorder)
    assert layer_norm(normalized_shape=[8], **tensors, eps=0.5) == "taken over"
    assert Recorder.calls[0][0] is layer_norm
    assert Recorder.calls[0][1]["eps"] == 0.5


def test_torch_function_mode():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen = []
    with Mode():
        layer_norm(torch.randn(3, 8), [8])
    assert layer_norm in seen


def jagged(*lengths, features=8):
    rows = [torch.randn(length, features) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_jagged_tensor(compiled):
    module, x = LayerNorm(8), jagged(2, 5, 1)
    y = (torch.compile(module, fullgraph=True) if compiled else module)(x)
    assert y.is_nested and y.shape == x.shape
    assert torch.equal(y.values(), module(x.values()))
    (y + x).values().sum().backward()  # of the same ragged shape, so that they add
    assert x.grad.values().isfinite().all() and module.bias.grad.eq(8).all()


def test_jagged_tensor_over_the_ragged_dimension_is_an_error():
    x = jagged(2, 2)
    with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[2, 8\], expected a jagged input with only reg"):
        layer_norm(x, [2, 8])
    with pytest.raises(RuntimeError, match="expected a jagged input with only regular dimensions among the last 1"):
        layer_norm(x.transpose(1, 2), [2])


def test_strided_nested_tensor_is_an_error():
    x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    with pytest.raises(NotImplementedError, match="layernorm::forward"):
        layer_norm(x, [8])


def test_trains_a_model():
    """Gradients flow through stacked layers, and the loss falls."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    x = torch.randn(64, 8)
    y = x.sum(-1, keepdim=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        losses.append(F.mse_loss(model(x), y))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("module", [layernorm_ext.functional, layernorm_ext.modules])
def test_examples_in_the_documentation(module):
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0 and result.failed == 0
