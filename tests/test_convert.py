"""convert() replaces a model's normalization layers in place, skips what differs, and revert() restores the model."""

import copy
import dataclasses
import itertools
import pickle
import re
import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch
from support.models import LikeLlama, LikeT5, MyNorm, build_ours, layer_with, randomize, snapshot
from support.reference import BF16, F16, F32, F64
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.functional import layer_norm
from torch.nn.utils import parametrize

import layernorm_ext
from layernorm_ext import LayerNorm, RMSNorm, conversion, convert, converted, register_conversion, revert

pytestmark = pytest.mark.usefixtures("one_thread", "restore_registry")


# Replacing and restoring


@pytest.mark.parametrize("dtype", [F64, BF16], ids=str)
@pytest.mark.parametrize(
    "layer",
    [torch.nn.LayerNorm(5, bias=False)]
    + [cls(5) for cls in (torch.nn.LayerNorm, torch.nn.RMSNorm)]
    + [cls((4, 5), eps=0.5) for cls in (torch.nn.LayerNorm, torch.nn.RMSNorm)]
    + [cls(5, elementwise_affine=False) for cls in (torch.nn.LayerNorm, torch.nn.RMSNorm)],
    ids=str,
)
def test_torch_layers_are_replaced_and_restored(layer, dtype):
    layer = copy.deepcopy(layer).to(dtype)
    ours = LayerNorm if isinstance(layer, torch.nn.LayerNorm) else RMSNorm
    randomize(layer)
    x = torch.randn(3, 4, 5).to(dtype)
    before, expected, text, keys = snapshot(layer), layer(x), repr(layer), list(layer.state_dict())
    report = convert(layer)
    assert report.replaced == {"": f"torch.nn.modules.normalization.{ours.__name__} by {text}"}
    assert not report.skipped and not report.fast_paths
    assert type(layer) is ours and "_output_dtypes" not in vars(layer)  # not the subclass that converts dtypes
    assert repr(layer) == text and list(layer.state_dict()) == keys
    assert vars(layer)["_parameters"] == before[1]["_parameters"]
    # Outputs up to 4 differ by a few roundings in float64, and by at most one rounding, 2^-8 of the value, in bfloat16.
    tolerance = 1e-14 if dtype == F64 else 2**-7
    torch.testing.assert_close(layer(x), expected, rtol=tolerance, atol=tolerance)
    assert str(convert(layer)) == "0 replaced, 0 skipped, 0 fast path off"
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(copied) is ours
        revert(copied)
        assert type(copied) is before[0] and type(layer) is ours
    revert(layer)
    assert snapshot(layer) == before and list(vars(layer)) == list(before[1])


def test_references_hooks_and_modes_are_kept():
    shared, weight = torch.nn.LayerNorm(5), torch.nn.Parameter(torch.ones(5), requires_grad=False)
    model = torch.nn.ModuleDict(
        {"a": shared, "b": torch.nn.Sequential(torch.nn.Linear(5, 5), shared), "c": torch.nn.RMSNorm(5).eval()}
    )
    shared.weight = model["c"].weight = weight
    calls = []
    shared.register_forward_hook(lambda *_: calls.append("forward"))
    shared.register_forward_pre_hook(lambda *_: calls.append("pre"))
    shared.register_full_backward_hook(lambda *_: calls.append("backward"))
    before = [snapshot(module) for module in model.modules()]

    assert list(convert(model).replaced) == ["a", "c"]  # a shared layer has its first name
    assert type(shared) is LayerNorm and model["a"] is shared is model["b"][1]
    assert shared.weight is weight is model["c"].weight and not weight.requires_grad
    assert shared.training and not model["c"].training
    model["b"](torch.randn(3, 5, requires_grad=True)).sum().backward()
    assert calls == ["pre", "forward", "backward"]
    shared.bias.grad = None

    for _ in range(2):  # reverting twice changes nothing
        revert(model)
        assert [snapshot(module) for module in model.modules()] == before


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        FakeTensorMode,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", BF16),
    ],
    ids=["no_grad", "inference_mode", "fake", "device", "autocast"],
)
def test_convert_ignores_the_caller_modes_and_keeps_devices_and_random_state(mode):
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.LayerNorm(5, device="meta"))
    random_state = torch.get_rng_state()
    with mode():
        assert len(convert(model).replaced) == 2
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model[1].weight.is_meta and model[1](torch.empty(3, 5, device="meta")).is_meta


def test_fake_layers_are_replaced():
    with FakeTensorMode():
        model, x = torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.RMSNorm(5)), torch.randn(3, 5)
        assert len(convert(model).replaced) == 2
        assert isinstance(model(x), FakeTensor)


def test_converted_restores_the_model_after_an_error():
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.RMSNorm(5))
    convert(model[0])  # stays converted
    before = [snapshot(module) for module in model.modules()]
    with pytest.raises(ZeroDivisionError), converted(model) as report:
        assert list(report.replaced) == ["1"] and type(model[1]) is RMSNorm
        raise ZeroDivisionError
    assert [snapshot(module) for module in model.modules()] == before


def test_revert_refuses_a_layer_whose_class_changed_again():
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.LayerNorm(5))
    convert(model)
    parametrize.register_parametrization(model[1], "weight", torch.nn.Softplus())
    with pytest.raises(RuntimeError, match=r"Expected 1 to be a layernorm_ext\.modules\.LayerNorm, .*Parametrized"):
        revert(model)
    assert type(model[0]) is LayerNorm  # nothing was reverted
    parametrize.remove_parametrizations(model[1], "weight")
    revert(model)
    assert {type(module) for module in model} == {torch.nn.LayerNorm}


def test_conversion_recompiles_a_compiled_model():
    graphs = EagerAndRecordGraphs()
    model, x = torch.nn.Sequential(torch.nn.LayerNorm(5)), torch.randn(3, 5)
    compiled = torch.compile(model, backend=graphs)
    compiled(x)
    convert(model)
    compiled(x)
    assert ["layernorm.forward" in graph.code for graph in graphs.graphs] == [False, True]


# Layers that are skipped


class Subclass(torch.nn.LayerNorm):
    pass


class SomeLayerNorm(torch.nn.Module):
    pass


def rounded_for(*dtypes):
    """Return a forward that rounds its output to integers for one pair of input and weight dtypes."""

    def forward(self, x):
        return torch_forward(self, x).round() if (x.dtype, self.weight.dtype) == dtypes else torch_forward(self, x)

    return forward


def channels_first_for_images(self, x):
    return torch_forward(self, x.movedim(1, -1)).movedim(-1, 1) if x.dim() == 4 else torch_forward(self, x)


def eps_beside_deviation(self, x):
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, unbiased=False, keepdim=True) + self.eps)


def divide_by_zero(self, x):
    raise ZeroDivisionError("their message\nand more")


def long_error(self, x):
    raise ValueError("word " * 100)


torch_forward = torch.nn.LayerNorm.forward
NAME = f"not {torch.nn.LayerNorm(5)}: "  # torch 2.11 does not print the bias
OUTPUT = NAME + "output differs by "


# Case -> the layer or its forward, the reason, and the function that builds the replacement, if not the default.
def masked(self, x):
    """Leave zeros out, as torchao's MaskedLayerNorm does."""
    kept = (x != 0).to(x.dtype)
    count = kept.sum(-1, keepdim=True).clamp(min=1)
    d = (x - x.sum(-1, keepdim=True) / count) * kept
    y = d * torch.rsqrt((d * d).sum(-1, keepdim=True) / count + self.eps)
    return y * self.weight + self.bias


def eps_of_16_bits(self, x):
    return layer_norm(x, (5,), self.weight, self.bias, 1e-2 if x.dtype in (F16, BF16) else self.eps)


def overriding(name):
    """Return a layer whose class overrides a method of torch.nn.Module."""
    method = lambda self, *args, **kwargs: getattr(torch.nn.Module, name)(self, *args, **kwargs)  # noqa: E731
    return type("Overriding", (torch.nn.LayerNorm,), {name: method})(5)


SKIPPED = {
    "masked": (masked, OUTPUT),
    "other eps for 16 bits": (eps_of_16_bits, "output of torch.bfloat16 and torch.float32 differs by "),
    "own call": (overriding("__call__"), ": its class overrides __call__"),
    "own conversion": (overriding("_apply"), ": its class overrides _apply"),
    "own loading": (overriding("_load_from_state_dict"), ": its class overrides _load_from_state_dict"),
    "std plus eps": (eps_beside_deviation, OUTPUT),
    "other eps": (lambda self, x: layer_norm(x, (5,), self.weight, self.bias, 1e-6), OUTPUT),
    "other gradient": (lambda self, x: torch_forward(self, x) + x - x.detach(), NAME + "gradient of input differs by "),
    "channels first": (channels_first_for_images, NAME + "input of size[2, 3, 2, 5] raises RuntimeError: "),
    "error": (divide_by_zero, ": it refuses every input: ZeroDivisionError: their message"),
    "long error": (long_error, ": it refuses every input: ValueError: " + "word " * 23 + "..."),
    "bfloat16": (rounded_for(BF16, BF16), "output of torch.bfloat16 and torch.bfloat16 differs by "),
    "mixed dtypes": (rounded_for(F16, F32), "output of torch.float16 and torch.float32 differs by "),
    "forward of the instance": (layer_with(torch_forward, forward=abs), "its forward was replaced by another"),
    "two inputs": (lambda self, x, mask=None: x, "its forward has the parameters self, x, mask"),
    "other parameter": (layer_with(torch_forward, gamma=torch.nn.Parameter(torch.ones(5))), "it has a parameter gamma"),
    "no forward": (type("NoForward", (torch.nn.Module,), {})(), "it refuses every input: NotImplementedError: "),
    "eps is a tensor": (layer_with(torch_forward, eps=torch.tensor(1e-5)), "its eps is of type Tensor"),
    "other output dtype": (
        MyNorm(5),
        "output of torch.float32 and torch.float64 is torch.float64",
        lambda module: build_ours(module, type("Subclass", (RMSNorm,), {})),
    ),
    # Both layers raise: LayerNorm(4) refuses the weight of 5 elements.
    "no common input": (divide_by_zero, "it refuses every input", lambda module: LayerNorm(4, device="meta")),
}


@pytest.mark.parametrize("case", SKIPPED.values(), ids=SKIPPED)
def test_registered_layers_that_differ_are_skipped_with_a_reason(case):
    layer, reason, *build = case
    layer = layer if isinstance(layer, torch.nn.Module) else layer_with(layer)
    register_conversion(type(layer), *build)
    before = snapshot(layer)
    report = convert(layer)
    assert not report.replaced and snapshot(layer) == before
    assert report.skipped[""].startswith(f"{type(layer).__module__}.{type(layer).__name__}: ")
    assert reason in report.skipped[""]


def test_unregistered_layers_are_skipped_and_reported():
    block = SomeLayerNorm()  # a block with children: a layer only if its class derived from a registered class
    block.inner = Subclass(5)
    block.inner.dropout = torch.nn.Dropout()
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), SomeLayerNorm(), block)
    assert str(convert(model)).splitlines() == [
        f"replaced: 0: torch.nn.modules.normalization.LayerNorm by {model[0]}",
        f"skipped: 1: {__name__}.SomeLayerNorm: not registered by layernorm_ext.register_conversion",
        f"skipped: 2.inner: {__name__}.Subclass: not registered by layernorm_ext.register_conversion",
        "1 replaced, 2 skipped, 0 fast path off",
    ]


def test_patched_torch_layers_are_skipped(monkeypatch):
    monkeypatch.setattr(torch.nn.LayerNorm, "forward", lambda self, x: x)
    assert "output differs by" in convert(torch.nn.LayerNorm(5)).skipped[""]


def test_layers_on_devices_without_kernels_are_skipped(monkeypatch):
    monkeypatch.setattr(conversion, "_DEVICES", {"meta"})
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.LayerNorm(5, device="meta"))
    report = convert(model)
    assert list(report.replaced) == ["1"]
    assert "it is on the device cpu, for which layernorm_ext was built no kernels" in report.skipped["0"]


# Layers that users register


@pytest.mark.parametrize("key", [MyNorm, f"{MyNorm.__module__}.MyNorm", "*.MyN*"], ids=str)
def test_registered_layers_are_replaced_and_restored(key):
    register_conversion(key, build_ours)
    layer, x = MyNorm(5), torch.randn(3, 5)
    randomize(layer)
    before, expected = snapshot(layer), layer(x)
    convert(layer)
    assert isinstance(layer, RMSNorm) and layer.normalized_shape == (5,)
    torch.testing.assert_close(layer(x), expected)
    revert(layer)
    assert snapshot(layer) == before and list(vars(layer)) == list(before[1])


def test_last_matching_name_wins_and_the_class_overrides_names():
    register_conversion("*.MyNorm", build_ours)
    register_conversion("*.MyN*", lambda module: LayerNorm(5, device="meta"))
    assert convert(MyNorm(5)).skipped
    register_conversion(MyNorm, build_ours)
    assert convert(MyNorm(5)).replaced


@pytest.mark.parametrize("cls", [MyNorm(5), 5, int, None, "MyNorm", ""], ids=repr)
def test_register_conversion_refuses_what_is_no_class_of_modules_and_no_full_name(cls):
    message = "Expected cls to be a subclass of torch.nn.Module or a name such as 'package.module.Class', but got cls="
    with pytest.raises(TypeError, match=re.escape(f"{message}{cls!r}")):
        register_conversion(cls)


def test_register_conversion_refuses_a_build_that_is_no_function():
    with pytest.raises(TypeError, match=r"Expected build to be a function or None, but got build=RMSNorm\(\(5,\)"):
        register_conversion(MyNorm, RMSNorm(5))


def test_build_must_return_a_layer_of_this_package():
    register_conversion(MyNorm, lambda module: torch.nn.RMSNorm(5))
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), MyNorm(5))
    with pytest.raises(TypeError, match=r"Expected build to return a LayerNorm, .*MyNorm, but got RMSNorm\(\(5,\)"):
        convert(model)
    assert type(model[0]) is torch.nn.LayerNorm  # the model is unchanged


@pytest.mark.parametrize(
    "model", [None, [torch.nn.LayerNorm(5)], torch.nn.LayerNorm, {}], ids=["None", "list", "class", "dict"]
)
def test_functions_refuse_what_is_no_module(model):
    message = f"Expected model to be a torch.nn.Module, but got model of type {type(model).__name__}"
    for function in (convert, revert, lambda model: converted(model).__enter__()):
        with pytest.raises(TypeError, match=message):
            function(model)


TYPED = """
import torch
import layernorm_ext

class MyNorm(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.small = width, 1e-6

def build(norm: MyNorm) -> layernorm_ext.RMSNorm:
    return layernorm_ext.RMSNorm(norm.width, norm.small)

layernorm_ext.register_conversion(MyNorm)
layernorm_ext.register_conversion(MyNorm, build)
layernorm_ext.register_conversion("package.MyNorm", build)
layernorm_ext.register_conversion("package.module.*Norm", lambda norm: layernorm_ext.RMSNorm(norm.width, norm.small))
layernorm_ext.register_conversion(MyNorm, lambda norm: layernorm_ext.LayerNorm2d(norm.width, device="meta"))
report: layernorm_ext.ConversionReport = layernorm_ext.convert(MyNorm(3))
with layernorm_ext.converted(MyNorm(3)) as report:
    pass
"""
WRONGLY_TYPED = [
    "layernorm_ext.register_conversion(5)",
    "layernorm_ext.register_conversion(int)",
    "layernorm_ext.register_conversion(MyNorm, 5)",
    "layernorm_ext.register_conversion(MyNorm, lambda norm: torch.nn.RMSNorm(5))",
    "layernorm_ext.convert([])",
]


@pytest.mark.integration
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_registrations_pass_type_checkers(checker, tmp_path):
    options = {"mypy": ["--strict"], "pyright": ["--pythonpath", sys.executable]}[checker]
    pytest.importorskip(checker)
    (tmp_path / "layernorm_ext").symlink_to(layernorm_ext.__path__[0])  # checkers cannot find an editable installation

    def errors(code):
        """Return the numbers of the lines with errors."""
        (tmp_path / "code.py").write_text(code)
        command = [sys.executable, "-m", checker, *options, "code.py"]
        output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
        assert output  # the checker has run
        return {int(number) for number in re.findall(r"\bcode\.py:(\d+):.*\berror\b", output)}

    assert not errors(TYPED)
    first = TYPED.count("\n") + 1
    assert errors(TYPED + "\n".join(WRONGLY_TYPED)) == set(range(first, first + len(WRONGLY_TYPED)))


@pytest.mark.parametrize("cls", [LikeT5, LikeLlama])
def test_output_dtype_is_kept_for_every_pair_of_dtypes_and_by_copies(cls):
    register_conversion(cls)
    for x_dtype, dtype in itertools.product((F64, F32, F16, BF16), repeat=2):
        layer, x = cls(50).to(dtype), torch.randn(3, 50).to(x_dtype)
        randomize(layer)
        theirs = layer(x)
        assert convert(layer).replaced and isinstance(layer, RMSNorm)
        ours = layer(x)
        assert ours.dtype == theirs.dtype
        exact = torch.nn.functional.rms_norm(x.double(), (50,), layer.weight.double(), 1e-6)
        # float32 arithmetic loses less than 1e-6, and the output is rounded once.
        tolerance = 1e-15 if F64 == x_dtype == ours.dtype else 1e-6
        rtol = torch.finfo(ours.dtype).eps / 2 + tolerance
        torch.testing.assert_close(ours.double(), exact, rtol=rtol, atol=tolerance)
        ours.sum().backward()
        assert layer.weight.grad.dtype == dtype
        if {x_dtype, dtype} == {F32, BF16}:
            copied = pickle.loads(pickle.dumps(layer))
            compiled = torch.compile(copied, backend="aot_eager", fullgraph=True)
            for other in (copied, torch.fx.symbolic_trace(torch.nn.Sequential(copied)), compiled):
                torch.testing.assert_close(other(x), ours, rtol=0, atol=0)  # checks the dtype, too
        revert(layer)
        assert torch.equal(layer(x), theirs)


# The fast path of torch.nn.TransformerEncoder


def transformer_encoder(**options):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, **options)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options)
    randomize(model)
    return model.double().eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", [{}, {"norm_first": True}], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_converted_encoders_leave_the_fast_path_until_reverted(options, padded):
    model, x = transformer_encoder(**options), torch.randn(2, 5, 16, dtype=F64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    compared = slice(None) if padding is None else ~padding  # only the fast path returns zeros at padding

    def run():
        with torch.no_grad(), torch.profiler.profile() as profiler:
            y = model(x, src_key_padding_mask=padding)[compared]
        operators = {event.name for event in profiler.events()}
        return y, "aten::_transformer_encoder_layer_fwd" in operators, "layernorm::forward" in operators

    expected, fast_path, calls_ours = run()
    assert fast_path and not calls_ours
    before = [snapshot(module) for module in model.modules()]
    report = convert(model)
    assert sorted(report.fast_paths) == (["layers.0", "layers.1"] if options else ["", "layers.0", "layers.1"])
    name = "torch.nn.modules.transformer.TransformerEncoderLayer"
    assert report.fast_paths["layers.0"] == f"{name}.activation_relu_or_gelu = 0"
    actual, fast_path, calls_ours = run()
    assert calls_ours and not fast_path
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)  # float64 sums in another order
    revert(model)
    assert [snapshot(module) for module in model.modules()] == before
    assert run()[1]


def test_fast_path_is_switched_off_if_any_layer_is_replaced():
    model = transformer_encoder()
    convert(model.layers[0].norm1)
    assert sorted(convert(model.layers[0]).fast_paths) == [""]
    assert sorted(convert(model).fast_paths) == ["", "layers.1"]
    model = transformer_encoder()
    for layer in model.layers:
        layer.norm1, layer.norm2 = Subclass(16).double(), Subclass(16).double()
    report = convert(model)
    assert len(report.skipped) == 4 and not report.fast_paths


# Layers that cannot be replaced leave the rest of the model as it is


class WithSlots(torch.nn.Module):
    """Has __slots__, so that Python refuses to change the class of an instance."""

    __slots__ = ("extra",)

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


def test_layers_that_cannot_be_replaced_are_reported(restore_registry):
    layernorm_ext.register_conversion(WithSlots)
    without_eps = torch.nn.LayerNorm(8)
    without_eps.eps = None
    negative_eps = torch.nn.LayerNorm(8, eps=-1e-3)
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), WithSlots(), without_eps, negative_eps)
    x = torch.randn(64, 8)
    expected = model[0](x), model[3](x)
    report = layernorm_ext.convert(model)
    assert "its class cannot change" in report.skipped["1"] and type(model[1]) is WithSlots
    assert "its eps is None" in report.skipped["2"]
    for actual, right in zip((model[0](x), model[3](x)), expected, strict=True):
        torch.testing.assert_close(actual, right)
    layernorm_ext.revert(model)
    assert type(model[0]) is torch.nn.LayerNorm


# Models with foreign layers that may do anything


@pytest.mark.parametrize("is_traced", [True, False])
def test_models_with_script_modules_are_converted(is_traced):
    """The scripted modules stay."""
    function = partial(torch.jit.trace, example_inputs=torch.ones(2, 5)) if is_traced else torch.jit.script
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        scripted = function(torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.LayerNorm(5)))
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), scripted, torch.nn.RMSNorm(5))
    x = torch.randn(3, 5)
    expected = model(x)
    with converted(model) as report:
        assert list(report.replaced) == ["0", "2"] and not report.skipped
        torch.testing.assert_close(model(x), expected)
    assert list(convert(model).replaced) == ["0", "2"]
    revert(model)
    assert type(model[0]) is torch.nn.LayerNorm


class HostileError(RuntimeError):
    def __str__(self):
        raise RuntimeError


def refuse(*args, **kwargs):
    raise RuntimeError("refused")


class Refuses:
    """An attribute that cannot be compared."""

    __hash__ = __eq__ = __bool__ = __len__ = refuse


class Frozen(torch.nn.LayerNorm):
    def __init__(self, *args):
        super().__init__(*args)
        vars(self)["is_frozen"] = True

    def __setattr__(self, name, value):
        if "is_frozen" in vars(self):
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)


class ChangesOnce(torch.nn.LayerNorm):
    """Its class changes only in the first of equal layers."""

    changes = 0

    def __setattr__(self, name, value):
        if name == "__class__":
            ChangesOnce.changes += 1
            if ChangesOnce.changes > 1:
                raise RuntimeError("refused")
        super().__setattr__(name, value)


def refuse_others(self, name):
    if name in ("weight", "bias"):
        return torch.nn.Module.__getattr__(self, name)
    raise RuntimeError("refused")


def without_eps(self, width):
    torch.nn.LayerNorm.__init__(self, width)
    del self.eps


def hostile(**attributes):
    return type("HostileNorm", (torch.nn.LayerNorm,), attributes)


def raise_hostile_error(self, x):
    raise HostileError


# Class -> a part of the reason; None if the layer is replaced.
HOSTILE = {
    "frozen": (Frozen, "FrozenInstanceError: cannot assign to field '__class__'"),
    "class": (hostile(__class__=property(refuse)), "RuntimeError: refused"),
    "class cannot be set": (hostile(__class__=property(lambda self: torch.nn.LayerNorm)), "AttributeError: "),
    "eps": (hostile(eps=property(refuse, lambda self, value: None)), "RuntimeError: refused"),
    "missing attributes": (hostile(__getattr__=refuse_others, __init__=without_eps), "RuntimeError: refused"),
    "text of an error": (hostile(forward=raise_hostile_error), "HostileError: "),
    "output": (hostile(forward=lambda self, x: x.to("meta")), "meta"),
    "parameters": (hostile(named_parameters=refuse), "RuntimeError: refused"),
    "signature": (hostile(forward=property(refuse)), "TypeError: "),
    "attribute": (lambda *args: layer_with(torch_forward, attribute=Refuses()), None),
    "tuple": (lambda *args: layer_with(torch_forward, attribute=(1, Refuses())), None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_layer_is_reported_and_the_others_are_converted(case):
    make, reason = HOSTILE[case]
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), make(5), torch.nn.RMSNorm(5), make(5), torch.nn.LayerNorm(5))
    for layer in (model[1], model[3]):
        register_conversion(type(layer))
    before = [(type(layer), dict(vars(layer))) for layer in model]
    report = convert(model)
    assert list(report.replaced) == ["0", "2", "4"] if reason else list("01234"), report
    assert all(reason in report.skipped[name] for name in ("1", "3")) if reason else not report.skipped, report
    if reason:
        for number in (1, 3):
            assert type(model[number]) is before[number][0] and vars(model[number]).keys() == before[number][1].keys()
    assert str(report)
    revert(model)
    assert [type(layer) for layer in model] == [cls for cls, _ in before]


def test_a_layer_whose_class_does_not_change_is_not_half_converted():
    register_conversion(ChangesOnce)
    model = torch.nn.Sequential(ChangesOnce(5), torch.nn.LayerNorm(5), ChangesOnce(5))
    before = snapshot(model[2])
    report = convert(model)
    assert list(report.replaced) == ["0", "1"] and "its class cannot change: RuntimeError" in report.skipped["2"]
    assert snapshot(model[2]) == before


def test_a_build_that_raises_is_reported():
    register_conversion(MyNorm, lambda norm: refuse())
    model = torch.nn.Sequential(MyNorm(5), torch.nn.LayerNorm(5))
    report = convert(model)
    assert list(report.replaced) == ["1"] and "RuntimeError: refused" in report.skipped["0"]


def test_an_encoder_whose_fast_path_cannot_be_disabled_is_reported():
    class Encoder(torch.nn.TransformerEncoderLayer):
        activation_relu_or_gelu = property(refuse, lambda self, value: None)

    model = torch.nn.Sequential(Encoder(8, 2, 8), torch.nn.LayerNorm(8))
    report = convert(model)
    assert list(report.replaced) == ["0.norm1", "0.norm2", "1"] and "RuntimeError: refused" in report.skipped["0"]
