"""A model's normalization layers are replaced in place, and put back; what is not the same is left alone."""

import copy
import doctest
import itertools
import pickle

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from layernorm_ext import LayerNorm, RMSNorm, conversion, convert, converted, register_conversion, revert

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
FLOATS = [F64, F32, F16, BF16]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(conversion, "_REGISTRY", dict(conversion._REGISTRY))


def state(module):
    """The class of a module, its attributes, and the objects in them, to be compared by identity first."""
    return type(module), {name: copy.copy(value) for name, value in vars(module).items()}


def randomize(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn_like(parameter)


TORCHS = [
    (torch.nn.LayerNorm(5), LayerNorm),
    (torch.nn.LayerNorm((4, 5), eps=0.5), LayerNorm),
    (torch.nn.LayerNorm(5, bias=False), LayerNorm),
    (torch.nn.LayerNorm(5, elementwise_affine=False), LayerNorm),
    (torch.nn.RMSNorm(5), RMSNorm),
    (torch.nn.RMSNorm((4, 5), eps=0.5), RMSNorm),
    (torch.nn.RMSNorm(5, elementwise_affine=False), RMSNorm),
]


@pytest.mark.parametrize("dtype", [F64, BF16], ids=str)
@pytest.mark.parametrize(("module", "ours"), TORCHS, ids=str)
def test_torchs_layers(module, ours, dtype):
    """Replaced even where the layer is the whole model; the same object, parameters and results; undone exactly."""
    module = copy.deepcopy(module).to(dtype)
    randomize(module)
    x = torch.randn(3, 4, 5).to(dtype)
    before, expected, text, saved = state(module), module(x), repr(module), module.state_dict()
    report = convert(module)
    assert type(module) is ours and repr(module) == text
    assert report.replaced == {"": f"torch.nn.modules.normalization.{type(module).__name__} by {text}"}
    assert not report.skipped and not report.fast_paths
    assert vars(module)["_parameters"] == before[1]["_parameters"]
    assert module.state_dict().keys() == saved.keys()
    # Of values up to 4: some roundings in float64; in bfloat16 the neighbour of torch's, 2^-8 of it away or less.
    tolerance = 1e-14 if dtype == F64 else 2**-7
    torch.testing.assert_close(module(x), expected, rtol=tolerance, atol=tolerance)
    assert str(convert(module)) == "0 replaced, 0 skipped, 0 fast path off"  # there is nothing left to do
    revert(module)
    assert state(module) == before and list(vars(module)) == list(before[1])


def test_model():
    """Everything that is attached to the layers stays, and so do all references to them."""
    shared, weight = torch.nn.LayerNorm(5), torch.nn.Parameter(torch.ones(5))
    model = torch.nn.ModuleDict(
        {"a": shared, "b": torch.nn.Sequential(torch.nn.Linear(5, 5), shared), "c": torch.nn.RMSNorm(5)}
    )
    shared.weight = model["c"].weight = weight
    model["c"].eval()
    model["c"].weight.requires_grad_(False)
    calls = []
    shared.register_forward_hook(lambda *_: calls.append("forward"))
    shared.register_forward_pre_hook(lambda *_: calls.append("pre"))
    shared.register_full_backward_hook(lambda *_: calls.append("backward"))
    states = [state(module) for module in model.modules()]
    keys = list(model.state_dict())

    assert list(convert(model).replaced) == ["a", "c"]  # the shared one by its first name
    assert type(shared) is LayerNorm and model["a"] is shared is model["b"][1]
    assert shared.weight is weight is model["c"].weight and not weight.requires_grad
    assert shared.training and not model["c"].training
    assert list(model.state_dict()) == keys
    model["b"](torch.randn(3, 5, requires_grad=True)).sum().backward()
    assert calls == ["pre", "forward", "backward"]
    shared.bias.grad = None

    revert(model)
    assert [state(module) for module in model.modules()] == states
    revert(model)  # what is as it was stays so


def test_meta_device():
    """The comparison needs no data of the model's."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(5, device="meta"), torch.nn.RMSNorm(5, device="meta"))
    assert len(convert(model).replaced) == 2
    assert model[0].weight.is_meta and model(torch.empty(3, 5, device="meta")).is_meta


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", BF16),
    ],
    ids=["no_grad", "inference_mode", "device", "autocast"],
)
def test_in_any_mode(mode):
    """Of the caller's, whose random numbers stay the same."""
    module, numbers = torch.nn.LayerNorm(5), torch.get_rng_state()
    with mode():
        assert convert(module).replaced
    assert torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_can_be_reverted(copied):
    model = torch.nn.Sequential(torch.nn.LayerNorm(5))
    convert(model)
    other = copied(model)
    assert type(other[0]) is LayerNorm
    revert(other)
    assert type(other[0]) is torch.nn.LayerNorm and type(model[0]) is LayerNorm


def test_converted():
    """For a trial, which ends by an error or not; what had been converted before stays so."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.RMSNorm(5))
    convert(model[0])
    before = [state(module) for module in model.modules()]
    with pytest.raises(ZeroDivisionError), converted(model) as report:
        assert list(report.replaced) == ["1"] and type(model[1]) is RMSNorm
        raise ZeroDivisionError
    assert [state(module) for module in model.modules()] == before
    assert type(model[0]) is LayerNorm


def test_revert_refuses_what_was_changed_since():
    """And undoes nothing then."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.LayerNorm(5))
    convert(model)
    parametrize.register_parametrization(model[1], "weight", torch.nn.Softplus())
    with pytest.raises(RuntimeError, match=r"Expected 1 to be a layernorm_ext\.modules\.LayerNorm, .*Parametrized"):
        revert(model)
    assert type(model[0]) is LayerNorm
    parametrize.remove_parametrizations(model[1], "weight")
    revert(model)
    assert {type(module) for module in model} == {torch.nn.LayerNorm}


def test_compiled_before():
    """The compiler notices that the class is another one."""
    torch._dynamo.reset()
    graphs = EagerAndRecordGraphs()
    model, x = torch.nn.Sequential(torch.nn.LayerNorm(5)), torch.randn(3, 5)
    compiled = torch.compile(model, backend=graphs)
    compiled(x)
    convert(model)
    compiled(x)
    assert ["layernorm.forward" in graph.code for graph in graphs.graphs] == [False, True]


def test_report():
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), Subclass(5))
    name = f"{__name__}.Subclass"
    assert str(convert(model)).splitlines() == [
        f"replaced: 0: torch.nn.modules.normalization.LayerNorm by {model[0]}",
        f"skipped: 1: {name}: not registered by layernorm_ext.register_conversion",
        "1 replaced, 1 skipped, 0 fast path off",
    ]


def test_examples_in_the_documentation():
    result = doctest.testmod(conversion)
    assert result.attempted > 0 and result.failed == 0


# What is left alone


class Subclass(torch.nn.LayerNorm):
    """Of a class that is known; computes the same, as it happens."""


class SomeLayerNorm(torch.nn.Module):
    """Called so, and of no known class."""


class WithGate(torch.nn.LayerNorm):
    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * gate)


class Gamma(torch.nn.LayerNorm):
    def __init__(self, width):
        super().__init__(width, elementwise_affine=False)
        self.gamma = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        return super().forward(x) * self.gamma


class NoEps(torch.nn.Module):
    normalized_shape = (5,)


class NoShape(torch.nn.Module):
    eps = 1e-5


def lookalike(name, forward):
    """A subclass of torch.nn.LayerNorm that computes something else."""
    return type(name, (torch.nn.LayerNorm,), {"forward": forward})


def mean(x):
    return x.mean(-1, keepdim=True)


def detached(self, x):
    return torch.nn.LayerNorm.forward(self, x) + (x - x.detach())


def for_images(self, x):
    """Takes the last but two of four dimensions for channels."""
    forward = torch.nn.LayerNorm.forward
    return forward(self, x.movedim(1, -1)).movedim(-1, 1) if x.dim() == 4 else forward(self, x)


LOOKALIKES = [
    lookalike("EpsBesideDeviation", lambda self, x: (x - mean(x)) / (x.std(-1, correction=0, keepdim=True) + self.eps)),
    lookalike("OtherEps", lambda self, x: torch.nn.functional.layer_norm(x, (5,), self.weight, self.bias, 1e-6)),
    lookalike("Unbiased", lambda self, x: (x - mean(x)) / (x.var(-1, keepdim=True) + self.eps).sqrt()),
    lookalike("WeightFirst", lambda self, x: torch.nn.functional.layer_norm(x * self.weight, (5,), None, self.bias)),
    lookalike("NoBias", lambda self, x: torch.nn.functional.layer_norm(x, (5,), self.weight)),
    lookalike("OtherGradient", detached),
    lookalike("ForImages", for_images),
]


@pytest.mark.parametrize("cls", LOOKALIKES)
def test_what_differs_is_skipped(cls):
    """Though it is registered: what a name promises, the comparison has to confirm."""
    register_conversion(cls)
    module = cls(5)
    before = state(module)
    report = convert(module)
    assert not report.replaced and state(module) == before
    assert report.skipped[""].startswith(f"{__name__}.{cls.__name__}: not LayerNorm((5,), eps=1e-05")


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F16, F32)], ids=str)
def test_what_differs_in_some_dtypes_is_skipped(dtypes):
    """Every pair of dtypes is compared, not float64 alone."""

    def forward(self, x):
        y = torch.nn.LayerNorm.forward(self, x)
        return y.round() if (x.dtype, self.weight.dtype) == dtypes else y

    cls = lookalike("RoundsSome", forward)
    register_conversion(cls)
    reason = convert(cls(5)).skipped[""]
    assert f"output of {dtypes[0]} and {dtypes[1]} differs by " in reason


def test_what_returns_another_dtype_is_skipped():
    """If the user's replacement does not return it."""

    class Ours(RMSNorm):
        pass

    register_conversion(MyNorm, lambda module: Ours(5, module.small, zero_centered_weight=True, device="meta"))
    assert "output of torch.float32 and torch.float64 is torch.float64" in convert(MyNorm(5)).skipped[""]


def test_what_refuses_everything_is_skipped():
    def forward(self, x):
        raise ZeroDivisionError

    cls = lookalike("Refuses", forward)
    register_conversion(cls, lambda module: LayerNorm(4, device="meta"))  # which refuses the weight of 5
    assert "it refuses every input" in convert(cls(5)).skipped[""]


def test_a_block_is_no_layer():
    """Though called after one; unless it is derived from one."""
    block = SomeLayerNorm()
    block.inner = Subclass(5)
    block.inner.dropout = torch.nn.Dropout()
    assert list(convert(block).skipped) == ["inner"]


def test_reasons():
    """Why each is skipped."""
    other_forward = torch.nn.LayerNorm(5)
    other_forward.forward = other_forward.forward
    for cls in (WithGate, Gamma, NoEps, NoShape, LOOKALIKES[1]):
        register_conversion(cls)
    model = torch.nn.Sequential(
        Subclass(5), SomeLayerNorm(), other_forward, WithGate(5), Gamma(5), NoEps(), NoShape(), LOOKALIKES[1](5)
    )
    words = [
        "Subclass: not registered by layernorm_ext.register_conversion",
        "SomeLayerNorm: not registered by layernorm_ext.register_conversion",
        "normalization.LayerNorm: its forward was replaced by another",
        "WithGate: its forward has the parameters self, x, gate",
        "Gamma: not RMSNorm((5,), eps=1e-05, elementwise_affine=False): it has a parameter gamma",
        "NoEps: it has neither eps nor variance_epsilon",
        "NoShape: it has neither normalized_shape nor weight",
        "OtherEps: not LayerNorm((5,), eps=1e-05, elementwise_affine=True, bias=True): output differs by ",
    ]
    report = convert(model)
    assert not report.replaced
    for reason, expected in zip(report.skipped.values(), words, strict=True):
        assert expected in reason


def test_a_class_that_was_patched_is_skipped(monkeypatch):
    """Of torch's own, too."""
    monkeypatch.setattr(torch.nn.LayerNorm, "forward", lambda self, x: x)
    assert "output differs by" in convert(torch.nn.LayerNorm(5)).skipped[""]


def test_other_devices_are_a_reason(monkeypatch):
    monkeypatch.setattr(conversion, "_DEVICES", {"meta"})
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.LayerNorm(5, device="meta"))
    assert list(convert(model).replaced) == ["1"]
    assert "it is on the device cpu, for which layernorm_ext was built no kernels" in convert(model).skipped["0"]


def test_a_foreign_error_is_a_reason():
    def forward(self, x):
        raise ZeroDivisionError("of theirs\nand more")

    cls = lookalike("Broken", forward)
    register_conversion(cls)
    assert "ZeroDivisionError for input of size[3, 5]: of theirs; not" in convert(cls(5)).skipped[""]


# What users register


class MyNorm(torch.nn.Module):
    """With names and a weight of its own way."""

    def __init__(self, width):
        super().__init__()
        self.width, self.normalized_shape, self.small = width, "unused", 1e-3
        self.weight = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + self.small).sqrt() * (1 + self.weight)


def my_norm(module):
    return RMSNorm(module.width, module.small, zero_centered_weight=True, device="meta")


@pytest.mark.parametrize("cls", [MyNorm, f"{__name__}.MyNorm", "*.MyN*"], ids=str)
def test_register(cls):
    """By the class or its name; attributes that the replacement needs are there, and are as they were afterwards."""
    register_conversion(cls, my_norm)
    module, x = MyNorm(5), torch.randn(3, 5)
    randomize(module)
    before, expected = state(module), module(x)
    convert(module)
    assert isinstance(module, RMSNorm) and module.normalized_shape == (5,)
    torch.testing.assert_close(module(x), expected)
    revert(module)
    assert state(module) == before and list(vars(module)) == list(before[1])


class LikeT5(torch.nn.Module):
    """Returns the weight's dtype, if that has 16 bits."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        x = x * torch.rsqrt(x.to(F32).square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.to(self.weight.dtype) if self.weight.dtype in (F16, BF16) else x)


class LikeLlama(LikeT5):
    """Returns float32 where the input or the weight has it."""

    def forward(self, x):
        y = x.to(F32)
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@pytest.mark.parametrize("cls", [LikeT5, LikeLlama])
def test_the_dtype_of_the_output_is_kept(cls):
    """For every pair of dtypes; a wider output is computed from the input in that dtype and rounded once."""
    register_conversion(cls)
    for x_dtype, dtype in itertools.product(FLOATS, repeat=2):
        module, x = cls(50).to(dtype), torch.randn(3, 50).to(x_dtype)
        randomize(module)
        theirs = module(x)
        assert convert(module).replaced and isinstance(module, RMSNorm)
        ours = module(x)
        assert ours.dtype == theirs.dtype
        exact = torch.nn.functional.rms_norm(x.double(), (50,), module.weight.double(), 1e-6)
        # The promise for sums in float32, and one rounding to the output's dtype.
        roundoff = torch.finfo(ours.dtype).eps / 2
        tolerance = 1e-15 if F64 == x_dtype == ours.dtype else 1e-6
        torch.testing.assert_close(ours.double(), exact, rtol=roundoff + tolerance, atol=tolerance)
        ours.sum().backward()
        assert module.weight.grad.dtype == dtype
        torch._dynamo.reset()
        copied = pickle.loads(pickle.dumps(module))
        assert torch.equal(copied(x), ours)
        compiled = torch.compile(copied, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(compiled, ours)
        assert torch.equal(torch.fx.symbolic_trace(torch.nn.Sequential(copied))(x), ours)
        revert(module)
        assert torch.equal(module(x), theirs)


def test_layers_of_one_dtype_become_ours_exactly():
    """A layer that returns the dtype of its input becomes exactly ours, without a private subclass."""
    module = torch.nn.RMSNorm(5)
    convert(module)
    assert type(module) is RMSNorm and "_output_dtypes" not in vars(module)


def test_register_by_the_last_name():
    """Of several that fit; the class itself comes before them all."""
    register_conversion("*.MyNorm", my_norm)
    register_conversion("*.MyN*", lambda module: LayerNorm(5, device="meta"))
    assert convert(MyNorm(5)).skipped
    register_conversion(MyNorm, my_norm)
    assert convert(MyNorm(5)).replaced


def test_register_refuses_what_is_no_class():
    with pytest.raises(TypeError, match=r"Expected cls to be a class or the name of one, but got MyNorm\(\)"):
        register_conversion(MyNorm(5))


def test_register_refuses_what_is_not_ours():
    """And the model is as it was."""
    register_conversion(MyNorm, lambda module: torch.nn.RMSNorm(5))
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), MyNorm(5))
    with pytest.raises(TypeError, match=r"Expected build to return a LayerNorm, .*MyNorm, but got RMSNorm\(\(5,\)"):
        convert(model)
    assert type(model[0]) is torch.nn.LayerNorm


# torch.nn.TransformerEncoder, and its fast path


class Operators(TorchDispatchMode):
    """Records what is called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function.overloadpacket))
        return function(*args, **(kwargs or {}))


FAST, OURS = "aten._transformer_encoder_layer_fwd", "layernorm.forward"


def encoder(**options):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, **options)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options)
    randomize(model)
    return model.double().eval()


@pytest.mark.parametrize("options", [{}, {"norm_first": True}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_fast_path(options, padded):
    """Switched off, so that ours are called; the results are those of the fast path, but at padding; and on again."""
    model, x = encoder(**options), torch.randn(2, 5, 16, dtype=F64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    kept = slice(None) if padding is None else ~padding

    def run():
        with torch.no_grad(), Operators() as operators:
            return model(x, src_key_padding_mask=padding)[kept], operators.names

    expected, operators = run()
    assert FAST in operators and OURS not in operators
    before = [state(module) for module in model.modules()]
    report = convert(model)
    names = ["", "layers.0", "layers.1"] if not options else ["layers.0", "layers.1"]
    assert sorted(report.fast_paths) == names
    assert report.fast_paths["layers.0"] == (
        "torch.nn.modules.transformer.TransformerEncoderLayer.activation_relu_or_gelu = 0"
    )
    actual, operators = run()
    assert FAST not in operators and OURS in operators
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)  # float64, in another order
    revert(model)
    assert [state(module) for module in model.modules()] == before
    assert FAST in run()[1]


def test_fast_path_of_a_model_converted_in_parts():
    """The encoder learns of its layers' conversion whenever it is told."""
    model = encoder()
    convert(model.layers[0].norm1)
    assert sorted(convert(model.layers[0]).fast_paths) == [""]
    assert sorted(convert(model).fast_paths) == ["", "layers.1"]


def test_fast_path_without_ours_stays():
    model = encoder()
    for layer in model.layers:
        layer.norm1, layer.norm2 = Subclass(16).double(), Subclass(16).double()
    report = convert(model)
    assert len(report.skipped) == 4 and not report.fast_paths
