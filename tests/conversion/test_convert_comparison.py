"""convert() compares layers in the dtypes that they accept, on rows and images, and equal layers once."""

import pytest
import torch
from support.models import LikeLlama, MyNorm, build_ours, randomize
from support.reference import BF16, F16, F32, F64
from torch.nn.functional import layer_norm, rms_norm

from layernorm_ext import LayerNorm, LayerNorm2d, RMSNorm, RMSNorm2d, convert, register_conversion, revert
from layernorm_ext.conversion import _comparison

pytestmark = pytest.mark.usefixtures("one_thread", "restore_registry")

# Layers that take some pairs of dtypes


class CastsTheInput(torch.nn.LayerNorm):
    """As the layers of Whisper and CLIP: the parameters are float32."""

    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class CastsTheParameters(torch.nn.LayerNorm):
    def forward(self, x):
        return layer_norm(x, self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class ReturnsFloat32(torch.nn.RMSNorm):
    def forward(self, x):
        return rms_norm(x.float(), self.normalized_shape, self.weight, self.eps)


class CastsAndAddsOne(CastsTheInput):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize("cls", [CastsTheInput, CastsTheParameters, ReturnsFloat32])
def test_layers_that_refuse_mixed_dtypes_are_replaced(cls):
    register_conversion(cls)
    for x_dtype in [F64, F32, F16, BF16] if cls is not CastsTheParameters else [F32]:
        layer = randomize(cls(50, 1e-3))
        x = torch.randn(3, 50).to(x_dtype)
        expected = layer(x)
        assert convert(layer).replaced and isinstance(layer, (LayerNorm, RMSNorm))
        actual = layer(x)
        # Both round the output once, and float32 arithmetic ten times by 6e-8.
        tolerance = torch.finfo(expected.dtype).eps + 1e-6
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_layers_that_refuse_mixed_dtypes_are_compared():
    register_conversion(CastsAndAddsOne)
    assert "output differs by 1" in convert(CastsAndAddsOne(50)).skipped[""]


class ComputesInFloat32(torch.nn.RMSNorm):
    """Its eps of None is that of float32 for float64 input, too."""

    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


class ComputesInFloat32WithGate(torch.nn.RMSNorm):
    def forward(self, x, gate):
        return (super().forward(x.float()) * torch.nn.functional.silu(gate.float())).to(x.dtype)


class ComputesInFloat32OfAnyWidth(torch.nn.Module):
    eps = None

    def forward(self, x):
        return rms_norm(x.float(), x.shape[-1:]).to(x.dtype)


@pytest.mark.parametrize("cls", [ComputesInFloat32, ComputesInFloat32WithGate, ComputesInFloat32OfAnyWidth])
def test_an_eps_of_none_may_be_that_of_float32(cls):
    register_conversion(cls)
    layer = cls(8) if issubclass(cls, torch.nn.RMSNorm) else cls()
    inputs = [1e-4 * torch.randn(3, 8, dtype=F64)]
    inputs += [torch.randn(3, 8, dtype=F64)] if cls is ComputesInFloat32WithGate else []
    expected = layer(*inputs)
    report = convert(layer)
    assert report.replaced and layer.eps == torch.finfo(F32).eps, report
    torch.testing.assert_close(layer(*inputs), expected, rtol=1e-6, atol=1e-6)  # ten roundings of 6e-8
    revert(layer)
    assert layer.eps is None


@pytest.mark.parametrize("limit", [4, 10, 100])
def test_layers_that_clamp_large_inputs_are_skipped(limit):
    class Clamps(torch.nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.clamp(-limit, limit))

    register_conversion(Clamps)
    assert "output" in convert(Clamps(8)).skipped[""]


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("differs_in_training", [True, False])
def test_layers_that_differ_in_one_mode_are_skipped(differs_in_training, is_training):
    class Doubles(torch.nn.LayerNorm):
        def forward(self, x):
            y = super().forward(x)
            return 2 * y if self.training == differs_in_training else y

    class Raises(torch.nn.LayerNorm):
        def forward(self, x):
            if self.training == differs_in_training:
                raise ValueError("another mode")
            return super().forward(x)

    mode = {True: "training", False: "eval"}[differs_in_training]
    for cls in (Doubles, Raises):
        register_conversion(cls)
        layer = cls(8).train(is_training)
        reason = convert(layer).skipped[""]
        assert (f"in {mode} mode" in reason) == (is_training != differs_in_training), reason
        assert type(layer) is cls and layer.training == is_training


def test_a_flag_called_bias_is_no_bias():
    class Flag(LikeLlama):
        bias = False

        def forward(self, x):
            return super().forward(x)

    register_conversion(Flag)
    layer = Flag(5)
    assert convert(layer).replaced and isinstance(layer, RMSNorm)


# Images


class Images(torch.nn.Module):
    """As in ConvNeXt and SAM; with ``rms``, without mean and bias."""

    def __init__(self, channels, rms):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(channels))
        self.bias = None if rms else torch.nn.Parameter(torch.zeros(channels))
        self.normalized_shape, self.eps, self.rms = (channels,), 1e-3, rms

    def forward(self, x):
        x = x if self.rms else x - x.mean(1, keepdim=True)
        x = x / torch.sqrt(x.square().mean(1, keepdim=True) + self.eps)
        x = x * self.weight[:, None, None]
        return x if self.bias is None else x + self.bias[:, None, None]


@pytest.mark.parametrize("channels", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("rms", [True, False])
def test_images_of_any_number_of_channels(rms, channels):
    register_conversion(Images)
    layer, x = randomize(Images(channels, rms)).double(), torch.randn(2, channels, 3, 4, dtype=F64)
    expected = layer(x)
    report = convert(layer)
    assert report.replaced and isinstance(layer, RMSNorm2d if rms else LayerNorm2d), report
    torch.testing.assert_close(layer(x), expected, rtol=1e-14, atol=1e-14)


def test_images_with_a_zero_centered_weight():
    class ZeroCentered(Images):
        def forward(self, x):
            return super().forward(x) + x / torch.sqrt(x.square().mean(1, keepdim=True) + self.eps)

    register_conversion(ZeroCentered)
    layer = ZeroCentered(6, rms=True)
    assert convert(layer).replaced and isinstance(layer, RMSNorm2d) and layer.zero_centered_weight


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 3), (3, 2), (2, 3, 4, 5), (5, 4, 3)], ids=str)
@pytest.mark.parametrize("cls", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_rows_of_any_shape(cls, shape):
    class Subclass(cls):  # its shape is not reduced for the comparison
        def forward(self, x):
            return super().forward(x)

    register_conversion(Subclass)
    for layer in (cls(shape), Subclass(shape)):
        assert convert(layer).replaced and layer.normalized_shape == shape


# Cost


@pytest.fixture
def comparisons(monkeypatch):
    """Return a list of the shapes of the input in every call of a layer during a comparison."""
    calls, forward = [], _comparison._forward

    def record(module, inputs, *others):
        calls.append(inputs[0].shape)
        return forward(module, inputs, *others)

    monkeypatch.setattr(_comparison, "_forward", record)
    return calls


def test_torchs_layers_are_compared_in_small_shapes(comparisons):
    model = torch.nn.Sequential(*(cls((64, 128, 128)) for cls in (torch.nn.LayerNorm, torch.nn.RMSNorm)))
    assert len(convert(model).replaced) == 2
    assert comparisons and all(shape.numel() <= 8**3 * 5**3 for shape in comparisons)


def test_equal_layers_are_compared_once(comparisons):
    register_conversion(LikeLlama)
    convert(LikeLlama(8))
    once = len(comparisons)
    comparisons.clear()
    model = torch.nn.ModuleList(LikeLlama(8) for _ in range(5))
    assert len(convert(model).replaced) == 5 and len(comparisons) == once
    assert len(set(map(type, model))) == 1 and len({id(layer.weight) for layer in model}) == 5


def test_layers_that_differ_are_compared_each():
    """They differ in the class, an attribute, the shape, the mode, a buffer, or an attribute that is a list."""
    register_conversion(LikeLlama)
    register_conversion(MyNorm, build_ours)

    class Lists(LikeLlama):
        def forward(self, x):
            return super().forward(x) * self.factor[0]

    register_conversion(Lists)
    layers = [LikeLlama(8), LikeLlama(8), LikeLlama(9), *(Lists(8) for _ in range(4)), MyNorm(8)]
    layers[1].eps = 0.5
    layers[3].factor, layers[4].factor, layers[5].factor = [1], [2], [1]
    layers[5].eval()
    layers[6].register_buffer("factor", torch.ones(1))
    report = convert(torch.nn.ModuleList(layers))
    assert sorted(report.replaced) == ["0", "1", "2", "3", "5", "6", "7"] and sorted(report.skipped) == ["4"]
    assert [layer.eps for layer in layers[:2]] == [1e-6, 0.5] and layers[2].normalized_shape == (9,)


def test_users_replacements_do_not_share_attributes():
    class Counts(LayerNorm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.calls = []

    register_conversion(CastsTheInput, lambda norm: Counts(8, device="meta"))
    model = torch.nn.Sequential(CastsTheInput(8), CastsTheInput(8))
    assert len(convert(model).replaced) == 2
    assert model[0].calls is not model[1].calls


def test_a_build_for_torchs_layers_is_compared_in_its_own_shape():
    register_conversion(torch.nn.LayerNorm, lambda norm: LayerNorm(32, norm.eps, device="meta"))
    model = torch.nn.ModuleList([torch.nn.LayerNorm(32), torch.nn.LayerNorm(64)])
    report = convert(model)
    assert list(report.replaced) == ["0"] and list(report.skipped) == ["1"]
