"""convert() replaces a model's normalization layers in place, skips what differs, and revert() restores the model."""

import copy
import dataclasses
import pickle
import re
import subprocess
import sys
import warnings
from collections import OrderedDict
from functools import partial

import pytest
import torch
from support.models import LikeLlama, MyNorm, build_ours, layer_with, randomize, snapshot
from support.reference import BF16, F64
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.utils import parametrize

import layernorm_ext
from layernorm_ext import LayerNorm, RMSNorm, convert, converted, register_conversion, revert
from layernorm_ext.conversion import _candidates

pytestmark = pytest.mark.usefixtures("one_thread", "restore_registry")


# Replacing and restoring


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 3), (3, 2), (2, 3, 4, 5), (5, 4, 3)], ids=str)
@pytest.mark.parametrize("options", [{}, {"eps": 0.5}, {"elementwise_affine": False}, {"bias": False}], ids=str)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_torch_layers_of_any_shape_are_replaced_and_restored(name, shape, options):
    """test_candidates.py compares results. convert() compares torch's layers in small shapes, subclasses in full."""
    if name == "RMSNorm":
        options = {key: value for key, value in options.items() if key != "bias"}
    theirs, ours = getattr(torch.nn, name), getattr(layernorm_ext, name)
    subclass = type("Subclass", (theirs,), {"forward": lambda self, x: theirs.forward(self, x)})
    register_conversion(subclass)
    layer, other = theirs(shape, **options), subclass(shape, **options)
    before, text = snapshot(layer), repr(layer)
    report = convert(layer)
    assert report.replaced == {"": f"torch.nn.modules.normalization.{name} by {text}"}
    assert type(layer) is ours
    assert repr(layer) == text and vars(layer)["_parameters"] == before[1]["_parameters"]
    assert str(convert(layer)) == "0 replaced, 0 skipped, 0 fast path off"
    assert convert(other).replaced and other.normalized_shape == shape
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(copied) is ours
        revert(copied)
        assert type(copied) is theirs and type(layer) is ours
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


@pytest.mark.parametrize(
    ("cls", "name"), [(torch.nn.LayerNorm, "layernorm_ext.modules.LayerNorm"), (LikeLlama, "support.models.LikeLlama")]
)
def test_revert_refuses_a_layer_whose_class_changed_again(cls, name):
    register_conversion(LikeLlama)
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), cls(5))
    assert len(convert(model).replaced) == 2
    parametrize.register_parametrization(model[1], "weight", torch.nn.Softplus())
    with pytest.raises(RuntimeError, match=f"Expected 1 to be a {re.escape(name)}, as .*Parametrized"):
        revert(model)
    assert type(model[0]) is LayerNorm  # nothing was reverted
    parametrize.remove_parametrizations(model[1], "weight")
    revert(model)
    assert [type(module) for module in model] == [torch.nn.LayerNorm, cls]


def test_revert_refuses_a_layer_whose_class_is_no_longer_derived_from_ours():
    model = torch.nn.Sequential(torch.nn.RMSNorm(5), torch.nn.LayerNorm(5))
    convert(model)
    model[1].__class__ = torch.nn.LayerNorm
    with pytest.raises(RuntimeError, match="Expected 1 to be a layernorm_ext.modules.LayerNorm, .* undo that change"):
        revert(model)
    assert type(model[0]) is RMSNorm  # nothing was reverted


def test_revert_refuses_a_layer_whose_forward_was_replaced():
    """Hooks of accelerate call the forward that they found, and put it on the object when they are removed."""
    model = torch.nn.Sequential(torch.nn.RMSNorm(5), torch.nn.LayerNorm(5))
    convert(model)
    found = model[1].forward
    model[1].forward = lambda *args: found(*args)
    with pytest.raises(RuntimeError, match="Expected 1 to have the forward of its class, .* undo that change first"):
        revert(model)
    assert type(model[0]) is RMSNorm  # nothing was reverted
    model[1].forward = found
    revert(model)
    assert type(model[1]) is torch.nn.LayerNorm and model[1].forward.__func__ is torch.nn.LayerNorm.forward


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


def test_unregistered_layers_are_skipped_and_reported():
    block = SomeLayerNorm()  # has children and no registered base class, so it is not reported itself
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
    monkeypatch.setattr(_candidates, "_DEVICES", {"meta"})
    model = torch.nn.Sequential(torch.nn.LayerNorm(5), torch.nn.LayerNorm(5, device="meta"))
    report = convert(model)
    assert list(report.replaced) == ["1"]
    assert "it is on the device cpu, for which layernorm_ext was built no kernels" in report.skipped["0"]


# Layers that users register


@pytest.mark.parametrize("key", [MyNorm, f"{MyNorm.__module__}.MyNorm", "*.MyN*"], ids=str)
def test_classes_are_registered_by_themselves_or_by_name(key):
    """The last matching name wins, and the class overrides names."""
    register_conversion(key, build_ours)
    layer = MyNorm(5)
    before = snapshot(layer)
    assert convert(layer).replaced and "converted to RMSNorm" in repr(layer)
    revert(layer)
    assert snapshot(layer) == before
    register_conversion("*.MyNor*", lambda module: LayerNorm(5, device="meta"))
    assert bool(convert(MyNorm(5)).skipped) == isinstance(key, str)


@pytest.mark.parametrize("cls", [MyNorm(5), 5, int, None, "MyNorm", ""], ids=repr)
def test_register_conversion_refuses_what_is_no_class_of_modules_and_no_full_name(cls):
    message = "Expected cls to be a subclass of torch.nn.Module or a name such as 'package.module.Class', but got cls="
    with pytest.raises(TypeError, match=re.escape(f"{message}{cls!r}")):
        register_conversion(cls)
    with pytest.raises(TypeError, match=r"Expected build to be a function or None, but got build=RMSNorm\(\(5,\)"):
        register_conversion(MyNorm, RMSNorm(5))


@pytest.mark.parametrize("base", [torch.nn.RMSNorm, RMSNorm], ids=["torch", "subclass"])
def test_build_must_return_a_layer_of_this_package(base):
    register_conversion(MyNorm, lambda module: type("RMSNorm", (base,), {})(5))
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
def test_type_checkers_accept_right_registrations_alone(checker, tmp_path):
    options = {"mypy": ["--strict"], "pyright": ["--pythonpath", sys.executable]}[checker]
    pytest.importorskip(checker)
    (tmp_path / "layernorm_ext").symlink_to(layernorm_ext.__path__[0])  # checkers cannot find an editable installation

    (tmp_path / "code.py").write_text(TYPED + "\n".join(WRONGLY_TYPED))
    command = [sys.executable, "-m", checker, *options, "code.py"]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    lines = {int(number) for number in re.findall(r"\bcode\.py:(\d+):.*\berror\b", output)}
    first = TYPED.count("\n") + 1
    assert lines == set(range(first, first + len(WRONGLY_TYPED))), output


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


def test_revert_keeps_a_fast_path_that_was_enabled_since():
    model = transformer_encoder()
    convert(model)
    model.layers[0].activation_relu_or_gelu = 2  # as torch sets it for gelu; convert() has set 0
    revert(model)
    assert [layer.activation_relu_or_gelu for layer in model.layers] == [2, 1] and model.use_nested_tensor


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


class WithSlots(torch.nn.LayerNorm):
    """Python changes the class of an instance only to one with the same slots, such as a subclass."""

    __slots__ = ("extra",)


class ChangesOnce(torch.nn.LayerNorm):
    """A layer whose class changes once; the second such layer refuses."""

    changes = 0

    def __setattr__(self, name, value):
        if name == "__class__":
            ChangesOnce.changes += 1
            if ChangesOnce.changes > 1:
                raise RuntimeError("refused")
        super().__setattr__(name, value)


def hostile(**attributes):
    return type("HostileNorm", (torch.nn.LayerNorm,), attributes)


def raise_hostile_error(self, x):
    raise HostileError


# Case -> the class of the layer, and a part of the reason for skipping it, or None if it is replaced.
HOSTILE = {
    "slots": (WithSlots, None),
    "frozen": (Frozen, "FrozenInstanceError: cannot assign to field '__class__'"),
    "class": (hostile(__class__=property(refuse)), "its class cannot change: AttributeError: "),
    "eps": (hostile(eps=property(refuse, lambda self, value: None)), "RuntimeError: refused"),
    "text of an error": (hostile(forward=raise_hostile_error), "HostileError: "),
    "output": (hostile(forward=lambda self, x: x.to("meta")), "meta"),
    "parameters": (hostile(named_parameters=refuse), "RuntimeError: refused"),
    "signature": (hostile(forward=property(refuse)), "TypeError: "),
    "attribute": (lambda *args: layer_with(torch.nn.LayerNorm.forward, attribute=Refuses()), None),
    "tuple": (lambda *args: layer_with(torch.nn.LayerNorm.forward, attribute=(1, Refuses())), None),
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


def test_an_encoder_whose_fast_path_cannot_be_disabled_is_reported():
    class Encoder(torch.nn.TransformerEncoderLayer):
        activation_relu_or_gelu = property(refuse, lambda self, value: None)

    model = torch.nn.Sequential(Encoder(8, 2, 8), torch.nn.LayerNorm(8))
    report = convert(model)
    assert list(report.replaced) == ["0.norm1", "0.norm2", "1"] and "RuntimeError: refused" in report.skipped["0"]


# Parameters as DeepSpeed's ZeRO-3 changes them, simulated for one process. test_distributed.py has FSDP.


class ParametersOfAModule(OrderedDict):
    """Like DeepSpeed's ZeROOrderedDict, it knows its module, and cannot be created or read without it."""

    def __init__(self, parent_module, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.parent_module = parent_module

    def __reduce__(self):
        cls, _, *others = super().__reduce__()
        return cls, (self.parent_module,), *others

    def __getitem__(self, name):
        assert self.parent_module._parameters is self
        return super().__getitem__(name)


def partition(model):
    """Empty all parameters, as zero.Init does."""
    for parameter in model.parameters():
        parameter.ds_shape, parameter.ds_tensor = parameter.shape, parameter.detach().flatten().clone()
        parameter.data = torch.empty(0, dtype=parameter.dtype)


def inject(model):
    """Exchange the dictionaries of parameters, as deepspeed.initialize does."""
    for module in model.modules():
        module._original_parameters = module._parameters
        module._parameters = ParametersOfAModule(module, module._parameters)


def gather(model):
    """Restore the parameters, as DeepSpeed does in a hook before forward."""
    for parameter in model.parameters():
        parameter.data = parameter.ds_tensor.view(parameter.ds_shape)


@pytest.mark.parametrize("initialized", [False, True], ids=["zero.Init", "initialize"])
def test_layers_with_empty_parameters_are_replaced_with_their_full_shape(initialized):
    register_conversion(LikeLlama)
    layers = [torch.nn.LayerNorm(5), torch.nn.LayerNorm((4, 5), bias=False), torch.nn.RMSNorm(5), LikeLlama(5)]
    model, x = randomize(torch.nn.Sequential(*layers)), torch.randn(3, 4, 5)
    expected = model(x)
    partition(model)
    if initialized:
        inject(model)
    before = [snapshot(module) for module in model.modules()]
    report = convert(model)
    assert len(report.replaced) == 4 and not report.skipped
    assert all(parameter.shape == (0,) for parameter in model.parameters())
    gather(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)  # four layers, ten roundings of 6e-8 in each
    model(x).sum().backward()
    assert all(parameter.grad.shape == parameter.ds_shape for parameter in model.parameters())
    revert(model)
    assert [snapshot(module) for module in model.modules()] == before


def test_differences_are_found_without_the_values():
    register_conversion(MyNorm, lambda norm: RMSNorm(norm.width, norm.small, device="meta"))
    model = MyNorm(5)  # with a zero-centered weight
    partition(model)
    inject(model)
    assert "output differs by" in convert(model).skipped[""]


def test_empty_parameters_of_unknown_shape_are_a_reason():
    register_conversion(LikeLlama)
    register_conversion(MyNorm, lambda norm: 1 / norm.weight.numel())
    for model in (LikeLlama(5), MyNorm(5)):
        model.weight.data = torch.empty(0)
        assert convert(model).skipped[""].endswith("a parameter has the shape [0]")
