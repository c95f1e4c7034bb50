"""The modules and functions drop in for torch's."""

import copy
import doctest
import inspect
import io
import itertools
import pickle
import re

import numpy
import pytest
import torch
from support.backends import assert_same_bits
from support.family import MODULES, family, flags
from support.reference import BF16, F16, F32, F64
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import layernorm_ext
from layernorm_ext import LayerNorm, LazyLayerNorm, RMSNorm, layer_norm, rms_norm

AFFINE_OPTIONS = [
    {"elementwise_affine": True, "bias": True},
    {"elementwise_affine": True, "bias": False},
    {"elementwise_affine": False},
]


def test_public_names():
    modules = [*itertools.product(("", "Add", "Ada", "AddAda", "Gated"), ("LayerNorm", "RMSNorm"))]
    functions = [*itertools.product(("", "add_", "ada_", "add_ada_", "gated_"), ("layer_norm", "rms_norm"))]
    modules += ("LayerNorm", "2d"), ("RMSNorm", "2d")
    functions += ("layer_norm", "_2d"), ("rms_norm", "_2d")
    others = ["LazyLayerNorm", "convert", "converted", "register_conversion", "revert", "ConversionReport", "trace_as"]
    assert set(layernorm_ext.__all__) == {*map("".join, modules), *map("".join, functions), *others}


def parameters_of(function):
    return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(LayerNorm, torch.nn.LayerNorm), (RMSNorm, torch.nn.RMSNorm), (layer_norm, F.layer_norm), (rms_norm, F.rms_norm)],
)
def test_signature_extends_torchs_by_keyword_only_flags(ours, theirs):
    ours, theirs = parameters_of(ours), parameters_of(theirs)
    assert ours[: len(theirs)] == theirs
    assert all(more[1:] == (False, inspect.Parameter.KEYWORD_ONLY) for more in ours[len(theirs) :])


@pytest.mark.parametrize("shape", [5, (4, 5), [5], torch.Size([3, 4, 5])], ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [*(("LayerNorm", options) for options in AFFINE_OPTIONS), ("RMSNorm", {}), ("RMSNorm", AFFINE_OPTIONS[2])],
    ids=str,
)
def test_module_behaves_like_torchs(name, options, shape):
    ours, theirs = (getattr(package, name)(shape, eps=1e-3, **options) for package in (layernorm_ext, torch.nn))
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    assert ours.normalized_shape == theirs.normalized_shape
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)  # some ten roundings of 6e-8


def save_and_load(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), save_and_load])
@pytest.mark.parametrize("options", [{}, {"zero_centered_weight": True}], ids=str)
def test_copies_compute_the_same(make_copy, options):
    module, x = LayerNorm(8, **options), torch.randn(3, 8)
    torch.nn.init.normal_(module.weight)
    duplicate = make_copy(module)
    assert type(duplicate) is LayerNorm and repr(duplicate) == repr(module)
    assert torch.equal(duplicate(x), module(x))


def test_meta_device():
    module = LayerNorm(8, device="meta")
    assert module(torch.empty(2, 8, device="meta")).device.type == "meta"
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert not module(torch.ones(2, 8)).any()
    assert torch.nn.utils.skip_init(LayerNorm, 8).weight.shape == (8,)


@family
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_autocast_changes_no_bit(member, dtype):
    """Parameters are float32. Torch's module returns bfloat16 on a CPU and float32 on CUDA."""
    x, r, w, b = torch.randn(2, 4, 8).to(dtype), torch.randn(2, 4, 8).to(dtype), *torch.randn(2, 8)
    with torch.autocast("cpu", BF16):
        outputs = member(x, r, w, b)
    assert outputs[0].dtype == dtype
    assert_same_bits(outputs, member(x, r, w, b))


def test_norm_of_images_is_one_autograd_node_under_autocast():
    """The same holds without autocast. Views that move the channels would slow a small call down several times."""
    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    with torch.autocast("cpu", BF16):
        assert layernorm_ext.layer_norm_2d(x, torch.ones(8)).grad_fn.name() == "LayerNormBackward"


DOCUMENTED = ["functional", "modules", "modules_fused", "conversion", "tracing"]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_examples_run(name):
    result = doctest.testmod(getattr(layernorm_ext, name), extraglobs={"torch": torch, "layernorm_ext": layernorm_ext})
    assert result.attempted >= 2 and result.failed == 0


# Tensor subclasses


class ReturnsTheCall(torch.Tensor):
    """Overrides every function, which then returns the function called and its arguments by name."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return function, inspect.signature(function).bind(*args, **kwargs).arguments


TENSORS = {"input": (3, 8, 1, 8), "residual": (3, 8, 1, 8)}
TENSORS |= dict.fromkeys(("weight", "bias", "scale", "shift", "gate"), (8,))
OTHERS = {"normalized_shape": (8,), "eps": 0.1, "zero_centered_weight": True, "inplace": True}
FUNCTIONS = [getattr(layernorm_ext, name) for name in layernorm_ext.__all__ if "_norm" in name]


@pytest.mark.parametrize(
    ("function", "name"),
    [(f, name) for f in FUNCTIONS for name in inspect.signature(f).parameters if name in TENSORS],
    ids=lambda v: v if isinstance(v, str) else v.__name__,
)
def test_torch_function_receives_our_function(function, name):
    """A subclass in any argument sees all arguments of the call."""
    values = {n: torch.randn(shape) for n, shape in TENSORS.items()} | OTHERS
    arguments = {n: values[n] for n in inspect.signature(function).parameters if n in values}
    arguments[name] = arguments[name].as_subclass(ReturnsTheCall)
    called, received = function(**arguments)
    assert called is function and all(received[n] is value for n, value in arguments.items())


def test_torch_function_mode_receives_our_function():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function

    with Mode():
        assert layer_norm(torch.randn(3, 8), [8]) is layer_norm


def test_subclass_without_override_is_kept():
    class Subclass(torch.Tensor):
        pass

    x = torch.randn(3, 8)
    y = LayerNorm(8)(x.as_subclass(Subclass))
    assert type(y) is Subclass
    assert torch.equal(y.as_subclass(torch.Tensor), LayerNorm(8)(x))


# Options


@pytest.mark.parametrize("cls", MODULES, ids=lambda cls: cls.__name__)
def test_flags(cls):
    """The repr names a flag that is set. The weight is initially zero if it is zero-centered, otherwise one."""
    for flag in flags(cls):
        plain, module = cls(8), cls(8, **{flag: True})
        assert repr(module) == repr(plain)[:-1] + f", {flag}=True)"
        if hasattr(plain, "weight"):
            assert plain.weight.eq(1).all() and module.weight.eq(flag != "zero_centered_weight").all()


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_module_for_images_is_that_for_rows_with_another_eps(name):
    """test_fx.py tests which function a module calls, and with which arguments."""
    rows, images = (getattr(layernorm_ext, n) for n in (name, name + "2d"))
    default = {"eps": None if "RMS" in name else 1e-6}  # as in ConvNeXt
    (channels, *_), eps, *others = parameters_of(images)
    assert channels == "num_channels" and eps[:2] == ("eps", default["eps"]) and others == parameters_of(rows)[2:]
    for options in ({}, {"elementwise_affine": False}, {"eps": 1e-3, "dtype": F64, "device": "meta"}):
        norm, rows_norm = images(6, **options), rows(6, **default | options)
        assert isinstance(norm, rows) and repr(norm) == repr(rows_norm).replace(name, name + "2d", 1)
        states = ({key: (t.shape, t.dtype, t.device) for key, t in m.state_dict().items()} for m in (norm, rows_norm))
        assert next(states) == next(states)


@pytest.mark.parametrize("channels", [(8,), (8, 3), [8], 8.0, None], ids=repr)
@pytest.mark.parametrize("name", [name for name in layernorm_ext.__all__ if name.endswith("Norm2d")])
def test_modules_for_images_refuse_other_shapes_than_a_number_of_channels(name, channels):
    message = f"Expected num_channels to be an int, but got num_channels={channels!r}"
    with pytest.raises(TypeError, match=re.escape(message)):
        getattr(layernorm_ext, name)(channels)


@pytest.mark.parametrize("cls", [LayerNorm, layernorm_ext.LayerNorm2d, layernorm_ext.AdaLayerNorm])
def test_sizes_may_be_integers_of_numpy(cls):
    """The C++ function of eager calls takes them, and so do the operators that a mode such as FlopCounterMode gets."""
    module, x = cls(numpy.int64(8)), torch.ones(2, 8, 8)
    with FlopCounterMode(display=False):
        counted = module(x)
    torch.testing.assert_close((module(x), counted), (torch.zeros_like(x),) * 2, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["AdaLayerNorm", "AdaRMSNorm", "AddAdaLayerNorm", "AddAdaRMSNorm"])
def test_adaptive_modules_have_no_parameters(name):
    cls = getattr(layernorm_ext, name)
    assert repr(cls(8)) == f"{name}((8,), eps=1e-06)" and repr(cls([2, 4], eps=1e-5)) == f"{name}((2, 4), eps=1e-05)"
    assert not cls(8).state_dict()


@pytest.mark.parametrize("name", ["GatedLayerNorm", "GatedRMSNorm"])
def test_modules_of_gated_norms_have_the_parameters_of_their_base(name):
    cls, base = (getattr(layernorm_ext, n) for n in (name, name.removeprefix("Gated")))
    assert issubclass(cls, base) and parameters_of(cls)[:-3] == [p for p in parameters_of(base) if "memory" not in p[0]]
    gated, plain = cls((8,), activation="sigmoid", num_groups=2), base((8,))
    assert repr(gated) == f"Gated{repr(plain)[:-1]}, activation='sigmoid', num_groups=2)"
    gated.load_state_dict(plain.state_dict())


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", ["AddLayerNorm", "AddRMSNorm"])
def test_modules_start_a_float32_residual(name):
    plain, norm = (
        getattr(layernorm_ext, name)(8, dtype=torch.bfloat16, residual_in_fp32=flag) for flag in (False, True)
    )
    x = torch.randn(3, 8).to(torch.bfloat16)
    assert plain(x)[1] is x
    for module in (norm, torch.compile(norm, backend="aot_eager", fullgraph=True)):
        output, total = module(x)
        assert total.dtype == torch.float32 and torch.equal(total, x.float()) and torch.equal(output, plain(x)[0])
        output, total = module(x, total)
        assert (output.dtype, total.dtype) == (torch.bfloat16, torch.float32) and torch.equal(total, 2 * x.float())
        gate = torch.randn(8)
        output, total = module(x, None, gate)
        assert output.dtype == torch.bfloat16 and torch.equal(total, x.float() * gate)
        double = x.double()  # the residual stays float64; a compiled module returns a copy
        assert module(double)[1] is double if module is norm else module(double)[1].dtype == torch.float64


# LazyLayerNorm


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("options", AFFINE_OPTIONS, ids=str)
@pytest.mark.parametrize("dimensions", [1, 2])
def test_lazy_module_becomes_a_layer_norm(options, dimensions):
    options = options | {"eps": 1e-3, "dtype": torch.float64}
    lazy, x = LazyLayerNorm(dimensions, **options), torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert repr(lazy).startswith(f"LazyLayerNorm(dimensions={dimensions}, eps=0.001")
    norm, y = LayerNorm(x.shape[-dimensions:], **options), lazy(x)
    assert torch.equal(y, norm(x))
    y.sum().backward()
    assert all(parameter.grad.shape == x.shape[-dimensions:] for parameter in lazy.parameters())
    assert type(lazy) is LayerNorm and repr(lazy) == repr(norm)
    assert vars(lazy).keys() == vars(norm).keys()
    torch.testing.assert_close(torch.jit.script(lazy)(x), y)
    assert {k: v.shape for k, v in lazy.state_dict().items()} == {k: v.shape for k, v in norm.state_dict().items()}
    with pytest.raises(RuntimeError, match="expected input with shape"):
        lazy(torch.randn(2, 3, 6))


def test_lazy_module_loads_and_saves_its_state():
    x, norm = torch.randn(2, 5), LayerNorm(5)
    torch.nn.init.normal_(norm.weight)
    loaded, uninitialized = LazyLayerNorm(), LazyLayerNorm()
    loaded.load_state_dict(norm.state_dict())
    with pytest.raises(RuntimeError, match="Expected weight to be of same shape"):
        loaded(torch.randn(2, 6))
    assert torch.equal(loaded(x), norm(x)) and loaded.normalized_shape == (5,)
    uninitialized.load_state_dict(LazyLayerNorm().state_dict())
    assert uninitialized(x).shape == x.shape


@pytest.mark.parametrize("zero_centered", [False, True])
def test_lazy_module_keeps_a_parameter_that_was_loaded_alone(zero_centered):
    norm, x = LayerNorm(5, zero_centered_weight=zero_centered), torch.randn(2, 5)
    for name, loaded in (("weight", torch.randn(5)), ("bias", torch.randn(5))):
        lazy = LazyLayerNorm(zero_centered_weight=zero_centered)
        lazy.load_state_dict({name: loaded}, strict=False)
        lazy(x)
        for other, parameter in lazy.named_parameters():
            assert torch.equal(parameter, loaded if other == name else norm.get_parameter(other))


def test_lazy_module_calls_the_reset_parameters_of_a_subclass():
    class StartsAtTwo(LazyLayerNorm):
        def reset_parameters(self):
            super().reset_parameters()
            if self.weight is not None and not self.has_uninitialized_params():
                torch.nn.init.constant_(self.weight, 2)

    lazy = StartsAtTwo()
    lazy(torch.randn(2, 5))
    assert torch.equal(lazy.weight, torch.full((5,), 2.0))


def test_lazy_module_checks_dimensions():
    with pytest.raises(ValueError, match="Expected dimensions to be at least 1, but got dimensions=0"):
        LazyLayerNorm(0)
    with pytest.raises(RuntimeError, match=r"at least dimensions=3 dimensions, but got input of size\[2, 5\]"):
        LazyLayerNorm(3)(torch.randn(2, 5))


# Checkpoints, also with other parameter names


@pytest.mark.parametrize("names", [("weight", "bias"), ("gamma", "beta"), ("gain", "bias"), ("weight", "beta")])
@pytest.mark.parametrize("prefix", ["", "0."])
@pytest.mark.parametrize("assign", [True, False])
def test_loads_parameters(names, prefix, assign):
    model = torch.nn.Sequential(LayerNorm(5)) if prefix else LayerNorm(5)
    state = {prefix + name: torch.randn(5) for name in names}
    original = dict(state)
    assert str(model.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
    assert state.keys() == original.keys()
    for parameter, tensor in zip(model.parameters(), state.values(), strict=True):
        assert torch.equal(parameter, tensor)


def test_parameter_names_and_sizes_are_checked_strictly():
    """A second name of the same parameter, or the name of an absent parameter, is an unexpected key."""
    w = torch.randn(5)
    for module, state, message in [
        (LayerNorm(5), {"weight": w, "gamma": w, "bias": w}, 'Unexpected key.* "gamma"'),
        (LayerNorm(5), {"gamma": w, "gain": w, "bias": w}, 'Unexpected key.* "gain"'),
        (LayerNorm(5), {"gamma": w}, 'Missing key.* "bias"'),
        (LayerNorm(5, bias=False), {"gamma": w, "beta": w}, 'Unexpected key.* "beta"'),
        (LayerNorm(5), {"gamma": torch.randn(6), "beta": w}, "size mismatch for weight"),
        (LayerNorm(5), {"weight": torch.randn(6), "bias": w}, "size mismatch for weight"),
        (torch.nn.Sequential(LayerNorm(5)), {"0.gamma": w, "0.delta": w, "0.beta": w}, 'Unexpected key.* "0.delta"'),
    ]:
        with pytest.raises(RuntimeError, match=f"(?s){message}"):
            module.load_state_dict(state)


@pytest.mark.parametrize("name", ["gamma", "gain", "beta"])
@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_name_that_a_subclass_uses_itself_is_no_alias(name, is_parameter):
    class Scaled(LayerNorm):
        def __init__(self):
            super().__init__(5)
            if is_parameter:
                self.register_parameter(name, torch.nn.Parameter(torch.ones(5)))
            else:
                self.register_buffer(name, torch.ones(5))

    module, tensor = Scaled(), torch.randn(5)
    expected = {"weight": module.weight.clone(), "bias": module.bias.clone(), name: tensor}
    keys = module.load_state_dict({name: tensor}, strict=False)
    assert keys.missing_keys == ["weight", "bias"] and not keys.unexpected_keys
    for key, value in module.state_dict().items():
        assert torch.equal(value, expected[key]), key
