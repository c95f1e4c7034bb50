"""convert() finds layers by other names of parameters, with parameters of other shapes, of any width, or activated."""

import copy
import pickle
import sys
import types

import pytest
import torch
from support.models import randomize, snapshot
from support.reference import BF16, F32, F64
from torch.nn.functional import layer_norm, normalize, rms_norm

from layernorm_ext import LayerNorm, LayerNorm2d, RMSNorm, RMSNorm2d, convert, register_conversion, revert

pytestmark = pytest.mark.usefixtures("one_thread", "restore_registry")

SAME_BITS = {"rtol": 0, "atol": 0}
ROUNDED = {"rtol": 1e-14, "atol": 1e-14}  # some ten roundings of 1e-16


class WithParameters(torch.nn.Module):
    """A layer with these names and shapes of parameters."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.ones(shape)))


class Scale(WithParameters):
    """As torchtune's and k-diffusion's RMSNorm."""

    eps = 1e-3

    def __init__(self, width):
        super().__init__(scale=width)

    def forward(self, x):
        return rms_norm(x, self.scale.shape, self.scale, self.eps)


class GammaBeta(WithParameters):
    """As Kokoro's LayerNorm."""

    eps = 1e-3

    def __init__(self, width):
        super().__init__(gamma=width, beta=width)

    def forward(self, x):
        return layer_norm(x.transpose(1, -1), self.gamma.shape, self.gamma, self.beta, self.eps).transpose(1, -1)


class GB(WithParameters):
    """As vit-pytorch's LayerNorm."""

    eps = 1e-3

    def __init__(self, width):
        super().__init__(g=(1, width, 1, 1), b=(1, width, 1, 1))

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=1, unbiased=False, keepdim=True)
        return (x - mean) / (var + self.eps).sqrt() * self.g + self.b


class Gamma(WithParameters):
    """As the RMSNorm of diffusers' Wan and Qwen-Image; ``bias`` is a number."""

    bias = 0.0

    def __init__(self, width, dims=2):
        super().__init__(gamma=(width, *[1] * dims))
        self.bias = 0.0

    def forward(self, x):
        return normalize(x, dim=1) * x.shape[1] ** 0.5 * self.gamma + self.bias


class ZeroCentered(WithParameters):
    eps = 1e-3

    def __init__(self, width):
        super().__init__(scale=width)

    def forward(self, x):
        return rms_norm(x, self.scale.shape, 1 + self.scale, self.eps)


class TorchsEps(WithParameters):
    """As NaViT's LayerNorm: the eps is torch's, and the bias is a buffer."""

    def __init__(self, width):
        super().__init__(gamma=width)
        self.register_buffer("beta", torch.zeros(width))

    def forward(self, x):
        return layer_norm(x, x.shape[-1:], self.gamma, self.beta)


ROWS, IMAGES = (3, 4, 8), (3, 8, 4, 5)
# Class -> the replacement, a size of its input, and the start of the replacement's repr.
RENAMED = {
    Scale: (RMSNorm, ROWS, "RMSNorm((8,), eps=0.001, elementwise_affine=True)"),
    GammaBeta: (LayerNorm2d, IMAGES, repr(LayerNorm2d(8, eps=1e-3))),
    GB: (LayerNorm2d, IMAGES, repr(LayerNorm2d(8, eps=1e-3))),
    Gamma: (RMSNorm2d, IMAGES, "RMSNorm2d((8,), eps=1.25e-25, elementwise_affine=True)"),
    ZeroCentered: (RMSNorm, ROWS, "RMSNorm((8,), eps=0.001, elementwise_affine=True, zero_centered_weight=True)"),
    TorchsEps: (LayerNorm, ROWS, repr(LayerNorm(8))),
}
renamed = pytest.mark.parametrize("cls", RENAMED, ids=lambda cls: cls.__name__)


def output_and_gradients(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


@renamed
def test_parameters_keep_their_names_and_shapes(cls):
    register_conversion(cls)
    ours, size, text = RENAMED[cls]
    layer, x = randomize(cls(8)).double(), torch.randn(size, dtype=F64)
    before, expected, keys = snapshot(layer), output_and_gradients(layer, x), list(layer.state_dict())
    report = convert(layer)
    assert report.replaced and isinstance(layer, ours) and repr(layer) == text
    assert list(layer.state_dict()) == keys
    for actual, other in zip(output_and_gradients(layer, x), expected, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-13, atol=1e-13)  # sums of 60 terms rounded by 1e-16
    revert(layer)
    assert snapshot(layer) == before


@renamed
def test_renamed_parameters_in_tools_of_torch(cls):
    register_conversion(cls)
    layer, x = randomize(cls(8)), torch.randn(RENAMED[cls][1])
    convert(layer)
    y = layer(x)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.fx.symbolic_trace(layer), compiled):
        torch.testing.assert_close(other(x), y, **SAME_BITS)
    loaded = cls(8)
    convert(loaded)
    loaded.load_state_dict(layer.state_dict())
    torch.testing.assert_close(loaded(x), y, **SAME_BITS)
    torch.nn.utils.vector_to_parameters(torch.ones(sum(p.numel() for p in layer.parameters())), layer.parameters())
    layer.reset_parameters()
    assert all((p == (0 if cls is ZeroCentered or name in ("b", "beta") else 1)).all() for name, p in parameters(layer))


def parameters(layer):
    return list(layer.named_parameters())


def test_videos_are_compared_in_five_dimensions():
    register_conversion(Gamma)
    layer, x = randomize(Gamma(8, dims=3)).double(), torch.randn(2, 8, 3, 4, 5, dtype=F64)
    expected = layer(x)
    assert convert(layer).replaced and isinstance(layer, RMSNorm2d)
    torch.testing.assert_close(layer(x), expected, **ROUNDED)


def test_rows_of_channels_first_in_one_dimension():
    class Channels(WithParameters):
        eps = 1e-3

        def forward(self, x):
            return layer_norm(x.permute(0, 2, 1), (8,), self.weight, None, self.eps).permute(0, 2, 1)

    register_conversion(Channels)
    layer, x = randomize(Channels(weight=8)).double(), torch.randn(2, 8, 3, dtype=F64)
    expected = layer(x)
    assert convert(layer).replaced and isinstance(layer, LayerNorm2d)
    torch.testing.assert_close(layer(x), expected, **ROUNDED)


def test_a_number_called_bias_is_no_bias_of_a_layer_norm():
    class Flag(WithParameters):
        eps = 1e-3

        def __init__(self):
            super().__init__(weight=8)
            self.bias = False

        def forward(self, x):
            return layer_norm(x, (8,), self.weight, None, self.eps)

    register_conversion(Flag)
    layer, x = randomize(Flag()).double(), torch.randn(3, 8, dtype=F64)
    before, expected = snapshot(layer), layer(x)
    assert convert(layer).replaced and isinstance(layer, LayerNorm)
    torch.testing.assert_close(layer(x), expected, **ROUNDED)
    revert(layer)
    assert snapshot(layer) == before


def test_parameters_of_other_shapes_are_skipped():
    """NaViT has a gain for each head."""

    class Heads(WithParameters):
        def forward(self, x):
            return normalize(x, dim=-1) * x.shape[-1] ** 0.5 * self.gamma

    register_conversion(Heads)
    assert "it refuses every input: RuntimeError: " in convert(Heads(gamma=(2, 1, 8))).skipped[""]


# Layers of any width


class AnyWidth(torch.nn.Module):
    """As NanoChat's RMSNorm."""

    def __init__(self, eps, dim=-1):
        super().__init__()
        self.eps, self.dim = eps, dim

    def forward(self, hidden_states):
        y = hidden_states.to(F32)
        return y * torch.rsqrt(y.square().mean(self.dim, keepdim=True) + self.eps)


@pytest.mark.parametrize("eps", [1e-3, 0.5])
@pytest.mark.parametrize("dim", [-1, 1])
def test_layers_without_a_weight_take_any_width(dim, eps):
    register_conversion(AnyWidth)
    layer = AnyWidth(eps, dim)
    expected = [layer(torch.arange(1.0, 1 + 2 * width).view(2, width, 1).transpose(1, dim)) for width in (5, 8, 33)]
    report = convert(layer)
    assert report.replaced and isinstance(layer, RMSNorm if dim == -1 else RMSNorm2d), report
    for width, y in zip((5, 8, 33), expected, strict=True):
        x = torch.arange(1.0, 1 + 2 * width).view(2, width, 1).transpose(1, dim)
        torch.testing.assert_close(layer(hidden_states=x), y, rtol=1e-6, atol=1e-6)  # float32 roundings of 6e-8
    assert layer(x.to(BF16)).dtype == F32  # as the original's
    copied = pickle.loads(pickle.dumps(layer))
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for other in (copied, compiled, torch.fx.symbolic_trace(layer)):
        torch.testing.assert_close(other(x), layer(x), **SAME_BITS)
    revert(layer)
    assert type(layer) is AnyWidth


def test_a_weight_that_is_never_used_is_ignored():
    """As FalconMambaWeightlessRMSNorm has it."""

    class Ignores(AnyWidth):
        def __init__(self):
            super().__init__(1e-3)
            self.register_buffer("weight", torch.full((8,), 2.0))

        def forward(self, hidden_states):
            return super().forward(hidden_states)

    register_conversion(Ignores)
    layer, x = Ignores(), torch.randn(3, 8)
    expected = layer(x)
    assert convert(layer).replaced and isinstance(layer, RMSNorm)
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)  # float32 roundings of 6e-8


def test_layers_that_scale_by_one_width_are_skipped():
    class OneWidth(torch.nn.Module):
        def forward(self, x):
            return normalize(x, dim=-1) * 8**0.5

    register_conversion(OneWidth)
    assert "not RMSNorm((), eps=None, elementwise_affine=False): output differs by" in convert(OneWidth()).skipped[""]


# Norm and activation


class Activated(torch.nn.LayerNorm):
    """As timm's LayerNormAct2d."""

    def __init__(self, width, act, drop=None):
        super().__init__(width)
        self.drop, self.act = drop or torch.nn.Identity(), act

    def forward(self, x):
        return self.act(self.drop(super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)))


ACTIVATIONS = [torch.nn.ReLU(inplace=True), torch.nn.PReLU(), torch.nn.Identity(), torch.nn.SiLU()]


@pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda act: type(act).__name__)
def test_activations_stay_behind_the_norm(act):
    register_conversion(Activated)
    layer, x = randomize(Activated(8, act)).double(), torch.randn(IMAGES, dtype=F64)
    before, expected = snapshot(layer), output_and_gradients(layer, x)
    report = convert(layer)
    assert report.replaced[""].endswith(f"by {LayerNorm2d(8, eps=1e-5)}")
    assert isinstance(layer, LayerNorm2d) and layer.act is act
    for actual, other in zip(output_and_gradients(layer, x), expected, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-13, atol=1e-13)  # sums of 60 terms rounded by 1e-16
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    for other in (pickle.loads(pickle.dumps(layer)), torch.fx.symbolic_trace(layer), compiled):
        torch.testing.assert_close(other(x), layer(x), **SAME_BITS)
    revert(layer)
    assert snapshot(layer) == before


def test_random_drops_stay_between_norm_and_activation():
    register_conversion(Activated)
    layer, x = Activated(8, torch.nn.ReLU(), torch.nn.Dropout(0.5)).double(), torch.randn(IMAGES, dtype=F64)
    x = x.contiguous(memory_format=torch.channels_last)  # as the original's output, so that the dropped elements agree
    torch.manual_seed(1)
    expected = layer(x)
    assert convert(layer).replaced
    torch.manual_seed(1)
    torch.testing.assert_close(layer(x), expected, **ROUNDED)


def test_equal_layers_share_a_class_though_their_activations_differ():
    register_conversion(Activated)
    model = torch.nn.Sequential(Activated(8, torch.nn.ReLU()), Activated(8, torch.nn.SiLU()))
    assert len(convert(model).replaced) == 2 and type(model[0]) is type(model[1])
    assert isinstance(model[0].act, torch.nn.ReLU) and isinstance(model[1].act, torch.nn.SiLU)


class CountsCalls(torch.nn.LayerNorm):
    """A layer whose forward changes a buffer and a list."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))
        self.shapes = []

    def forward(self, x):
        self.calls += 1
        self.shapes.append(x.shape)
        return super().forward(x)


def test_the_comparison_leaves_the_state_of_the_layer_as_it_was():
    layer = CountsCalls(5)
    register_conversion(CountsCalls, lambda module: LayerNorm(5, device="meta"))
    assert convert(layer).replaced
    assert layer.calls == 0 and layer.shapes == []


class EpsIsAProperty(torch.nn.LayerNorm):
    eps = property(lambda self: 1e-3, lambda self, value: None)


def test_attributes_that_are_properties_are_restored():
    layer = EpsIsAProperty(5)
    before, x = snapshot(layer), torch.randn(3, 5)
    expected = layer(x)
    register_conversion(EpsIsAProperty, lambda module: LayerNorm(5, module.eps, device="meta"))
    assert convert(layer).replaced
    torch.testing.assert_close(layer(x), expected)
    revert(layer)
    assert snapshot(layer) == before


def test_an_absent_activation_is_no_activation():
    layer, x = type("Plain", (torch.nn.LayerNorm,), {})(5), torch.randn(3, 5)
    layer.register_module("act", None)
    register_conversion(type(layer))
    expected = layer(x)
    convert(layer)
    torch.testing.assert_close(layer(x), expected)


def test_parameters_of_other_children_are_refused():
    """They may be zeros that training changes."""

    class Adapted(Activated):
        def __init__(self):
            super().__init__(8, torch.nn.PReLU())
            self.adapter = torch.nn.Identity()

    register_conversion(Adapted)
    assert "it has a parameter act.weight" in convert(Adapted()).skipped[""]


def test_an_activation_before_the_norm_is_skipped():
    class Before(Activated):
        def forward(self, x):
            return torch.nn.LayerNorm.forward(self, self.act(x))

    register_conversion(Before)
    assert "output differs by" in convert(Before(8, torch.nn.Identity())).skipped[""]


# Names of packages


@pytest.mark.parametrize(
    ("name", "is_candidate"),
    [
        ("transformers_modules.org.model.hash.modeling.MyRMSNorm", True),
        ("transformers_modules.modeling.MyLayerNorm2d", True),
        ("timm.layers.RmsNorm", True),
        ("diffusers.models.RMS_norm", True),
        ("timm_forks.layers.RmsNorm", False),
        ("transformers_modules.modeling.BatchNorm2d", False),
    ],
)
def test_classes_of_known_packages_are_candidates_by_their_names(name, is_candidate):
    module, _, cls = name.rpartition(".")
    layer = type(cls, (Scale,), {"__module__": module})(8)
    report = convert(layer)
    assert bool(report.replaced) == is_candidate
    assert not is_candidate or isinstance(layer, RMSNorm)


def test_remote_code_is_converted_in_a_model():
    """transformers imports it into modules of the package transformers_modules."""
    module = types.ModuleType("transformers_modules.org.modeling")
    exec(
        "class RemoteRMSNorm(Base):\n    pass", vars(module) | {"Base": Scale}, remote := {"__name__": module.__name__}
    )
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), remote["RemoteRMSNorm"](8))
    assert module.__name__ not in sys.modules
    assert list(convert(model).replaced) == ["1"]
