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
from layernorm_ext import LayerNorm, LazyLayerNorm, RMSNorm, layer_norm, rms_norm

SIGNATURES = [
    {"elementwise_affine": True, "bias": True},
    {"elementwise_affine": True, "bias": False},
    {"elementwise_affine": False},
]


def assert_like_torch(actual, expected):
    """Within the rounding of torch's own float32 result."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (LayerNorm.__init__, torch.nn.LayerNorm.__init__),
        (RMSNorm.__init__, torch.nn.RMSNorm.__init__),
        (layer_norm, F.layer_norm),
        (rms_norm, F.rms_norm),
    ],
)
def test_signature(ours, theirs):
    """Torch's, and what torch has not by name only."""
    ours, theirs = ([*inspect.signature(f).parameters.values()] for f in (ours, theirs))
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.default, p.kind) for p in theirs]
    assert all(p.kind == p.KEYWORD_ONLY and p.default is False for p in ours[len(theirs) :])


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


# LazyLayerNorm


@pytest.mark.parametrize("options", SIGNATURES, ids=str)
@pytest.mark.parametrize("dimensions", [1, 2])
def test_lazy(options, dimensions):
    """After the first call it is a LayerNorm in every respect."""
    lazy, x = LazyLayerNorm(dimensions, eps=1e-3, **options), torch.randn(2, 3, 5)
    assert repr(lazy).startswith(f"LazyLayerNorm(dimensions={dimensions}, eps=0.001")
    norm = LayerNorm(x.shape[-dimensions:], eps=1e-3, **options)
    assert torch.equal(lazy(x), norm(x))
    assert type(lazy) is LayerNorm and repr(lazy) == repr(norm)
    assert vars(lazy).keys() == vars(norm).keys()
    assert [(name, p.shape) for name, p in lazy.named_parameters()] == [
        (name, p.shape) for name, p in norm.named_parameters()
    ]
    with pytest.raises(RuntimeError, match="expected input with shape"):
        lazy(torch.randn(2, 3, 6))


def test_lazy_in_a_model():
    """The sizes come from the data; dtype and device as told; gradients reach what was made."""
    model = torch.nn.Sequential(torch.nn.LazyLinear(7), LazyLayerNorm(dtype=torch.float64)).double()
    model(torch.randn(4, 3, dtype=torch.float64)).sum().backward()
    assert model[1].weight.dtype == torch.float64 and model[1].bias.grad.shape == (7,)


def test_lazy_loads_and_saves():
    x, norm = torch.randn(2, 5), LayerNorm(5)
    torch.nn.init.normal_(norm.weight)
    lazy = LazyLayerNorm()
    lazy.load_state_dict(norm.state_dict())
    assert torch.equal(lazy(x), norm(x)) and lazy.normalized_shape == (5,)
    again = LazyLayerNorm()
    again.load_state_dict(LazyLayerNorm().state_dict())
    assert again(x).shape == x.shape
    loaded = LazyLayerNorm()
    loaded.load_state_dict(norm.state_dict())
    with pytest.raises(RuntimeError, match="Expected weight to be of same shape"):
        loaded(torch.randn(2, 6))


def test_lazy_errors():
    with pytest.raises(ValueError, match="Expected dimensions to be at least 1, but got dimensions=0"):
        LazyLayerNorm(0)
    with pytest.raises(RuntimeError, match=r"at least dimensions=3 dimensions, but got input of size\[2, 5\]"):
        LazyLayerNorm(3)(torch.randn(2, 5))


# Checkpoints from elsewhere


@pytest.mark.parametrize("names", [("gamma", "beta"), ("gain", "bias"), ("weight", "beta")])
def test_other_names_of_the_parameters(names):
    w, b = torch.randn(5), torch.randn(5)
    for model, prefix in ((LayerNorm(5), ""), (torch.nn.Sequential(LayerNorm(5)), "0.")):
        state = {prefix + names[0]: w, prefix + names[1]: b}
        before = dict(state)
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
        assert state.keys() == before.keys()
        assert [torch.equal(p, t) for p, t in zip(model.parameters(), (w, b), strict=True)] == [True, True]


def test_other_names_are_as_strict():
    """Nothing is guessed: a parameter under two names, or one that the module does not have, is unexpected."""
    w = torch.randn(5)
    for module, state, words in [
        (LayerNorm(5), {"weight": w, "gamma": w, "bias": w}, 'Unexpected key.* "gamma"'),
        (LayerNorm(5), {"gamma": w, "gain": w, "bias": w}, 'Unexpected key.* "gain"'),
        (LayerNorm(5), {"gamma": w}, 'Missing key.* "bias"'),
        (LayerNorm(5, bias=False), {"gamma": w, "beta": w}, 'Unexpected key.* "beta"'),
        (LayerNorm(5), {"gamma": torch.randn(6), "beta": w}, "size mismatch for weight"),
        (torch.nn.Sequential(LayerNorm(5)), {"0.gamma": w, "0.delta": w, "0.beta": w}, 'Unexpected key.* "0.delta"'),
    ]:
        with pytest.raises(RuntimeError, match=f"(?s){words}"):
            module.load_state_dict(state)
