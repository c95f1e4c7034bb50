"""convert() finds a replacement by a layer's attributes. Names and output dtypes stay; copies and tools still work.

Each layer of the table LAYERS passes the same tests.
"""

import contextlib
import copy
import inspect
import io
import itertools
import pickle

import pytest
import torch
from support.models import LikeLlama, LikeT5, randomize, save_and_load, snapshot
from support.packages import Float64Throughout
from support.reference import BF16, F16, F32, F64
from torch.nn import functional as F

import layernorm_ext
from layernorm_ext import LayerNorm, convert, converted, register_conversion, revert
from layernorm_ext.conversion import _converted

pytestmark = [
    pytest.mark.usefixtures("one_thread", "restore_registry"),
    pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:Mismatch dtype"),
]

ROWS, IMAGES, VIDEOS = (3, 4, 8), (3, 8, 4, 5), (2, 8, 3, 4, 5)
SAME_BITS = {"rtol": 0, "atol": 0}


class WithParameters(torch.nn.Module):
    """A layer with these names and shapes of parameters."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.ones(shape)))


# Names of the argument


class Features(torch.nn.LayerNorm):
    def forward(self, features):
        return super().forward(features)


class Images(torch.nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Wide(torch.nn.RMSNorm):
    """Returns float32 for float64 input. In this package, `output` and `num_groups` mean something else."""

    num_groups = 2

    def forward(self, output):
        return super().forward(output).float()


# Names and shapes of the parameters


class Scale(WithParameters):
    """Like torchtune's and k-diffusion's RMSNorm."""

    eps = 1e-3

    def __init__(self, width):
        super().__init__(scale=width)

    def forward(self, x):
        return F.rms_norm(x, self.scale.shape, self.scale, self.eps)


class ZeroCentered(Scale):
    def forward(self, x):
        return F.rms_norm(x, self.scale.shape, 1 + self.scale, self.eps)


class GammaBeta(WithParameters):
    """Like Kokoro's LayerNorm."""

    eps = 1e-3

    def __init__(self, width):
        super().__init__(gamma=width, beta=width)

    def forward(self, x):
        return F.layer_norm(x.transpose(1, -1), self.gamma.shape, self.gamma, self.beta, self.eps).transpose(1, -1)


class GB(WithParameters):
    """Like vit-pytorch's LayerNorm."""

    eps = 1e-3

    def __init__(self, width):
        super().__init__(g=(1, width, 1, 1), b=(1, width, 1, 1))

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=1, unbiased=False, keepdim=True)
        return (x - mean) / (var + self.eps).sqrt() * self.g + self.b


class Gamma(WithParameters):
    """Like the RMSNorm of diffusers' Wan and Qwen-Image; ``bias`` is a number."""

    def __init__(self, width, dims=2):
        super().__init__(gamma=(width, *[1] * dims))
        self.bias = 0.0

    def forward(self, x):
        return F.normalize(x, dim=1) * x.shape[1] ** 0.5 * self.gamma + self.bias


class GammaOfVideos(Gamma):
    def __init__(self, width):
        super().__init__(width, dims=3)


class TorchsEps(WithParameters):
    """Like NaViT's LayerNorm: the eps is the default of F.layer_norm, and the bias is a buffer."""

    def __init__(self, width):
        super().__init__(gamma=width)
        self.register_buffer("beta", torch.zeros(width))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.gamma, self.beta)


class Channels(WithParameters):
    """Normalizes the channels of [N, C, L]; a flag is called bias."""

    eps = 1e-3

    def __init__(self, width):
        super().__init__(weight=width)
        self.bias = False

    def forward(self, x):
        return F.layer_norm(x.permute(0, 2, 1), self.weight.shape, self.weight, None, self.eps).permute(0, 2, 1)


class ZeroCenteredImages(WithParameters):
    """Like the norms of ConvNeXt and SAM, with a zero-centered weight."""

    eps = 1e-3

    def __init__(self, width):
        super().__init__(weight=width)

    def forward(self, x):
        return x / torch.sqrt(x.square().mean(1, keepdim=True) + self.eps) * (1 + self.weight[:, None, None])


class EpsIsAProperty(torch.nn.LayerNorm):
    eps = property(lambda self: 1e-3, lambda self, value: None)  # torch's constructor sets it
    extra_repr = torch.nn.Module.extra_repr


# Layers of any width


class AnyWidth(torch.nn.Module):
    """Like NanoChat's RMSNorm."""

    eps, dim = 0.5, -1

    def __init__(self, width):
        super().__init__()

    def forward(self, hidden_states):
        y = hidden_states.to(F32)
        return y * torch.rsqrt(y.square().mean(self.dim, keepdim=True) + self.eps)


class AnyWidthOfImages(AnyWidth):
    eps, dim = 1e-3, 1


class IgnoresItsWeight(AnyWidth):
    """Like FalconMambaWeightlessRMSNorm."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("weight", torch.full((width,), 2.0))


class AnyWidthInFloat32(AnyWidth):
    eps = None

    def forward(self, x):
        return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype)


# Layers that refuse some pairs of dtypes


class CastsTheInput(torch.nn.LayerNorm):
    """Like the layers of Whisper and CLIP: the parameters are float32."""

    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class CastsTheParameters(torch.nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class ComputesInFloat32(torch.nn.RMSNorm):
    """With eps=None, it has the machine epsilon of float32 for float64 input, too."""

    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


# Norm and activation


class Activated(torch.nn.LayerNorm):
    """Like timm's LayerNormAct2d."""

    def __init__(self, width, act=None, drop=None):
        super().__init__(width)
        self.drop, self.act = drop or torch.nn.Identity(), act or torch.nn.SiLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)))


class ActivatedWithParameter(Activated):
    def __init__(self, width):
        super().__init__(width, torch.nn.PReLU())


# Norms with a gate


class GateFirst(torch.nn.Module):
    """Multiplies the input by the gate, and returns the wider dtype of input and weight, as Mamba-2's norm does."""

    groups, activation = 1, staticmethod(F.silu)

    def __init__(self, width):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(width)), 1e-3

    def norm(self, x):
        groups = x.unflatten(-1, (self.groups, -1))
        return (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.variance_epsilon)).flatten(-2)

    def forward(self, hidden_states, gate=None):
        x = hidden_states.to(torch.promote_types(hidden_states.dtype, F32))
        if gate is not None:
            x = x * self.activation(gate.to(x.dtype))
        return self.weight * self.norm(x).to(hidden_states.dtype)


class GateFirstInGroups(GateFirst):
    """Has the width of a group and the activation as attributes, as Zamba2's and Nemotron-H's norms."""

    groups = property(lambda self: self.weight.shape[0] // self.group_size)

    def __init__(self, width):
        super().__init__(width)
        self.group_size, self.activation = width // 4, F.silu


class GateFirstInNumberedGroups(GateFirst):
    groups = property(lambda self: self.n_groups)

    def __init__(self, width):
        super().__init__(width)
        self.n_groups = 2


class GateAfter(GateFirst):
    """Multiplies the output by the gate, which it needs, and returns the input's dtype, as Qwen3-Next's norm does."""

    def forward(self, hidden_states, gate):
        x = hidden_states.to(torch.promote_types(hidden_states.dtype, F32))
        y = self.weight * self.norm(x).to(hidden_states.dtype)
        return (y * self.activation(gate.to(x.dtype))).to(hidden_states.dtype)


class SigmoidGate(GateAfter):
    activation = staticmethod(torch.sigmoid)


class LayerNormWithGate(torch.nn.LayerNorm):
    def forward(self, x, gate=None):
        y = super().forward(x)
        return y if gate is None else (y * F.silu(gate)).to(x.dtype)


class DtypeOfGate(LayerNormWithGate):
    def forward(self, x, gate=None):
        y = torch.nn.LayerNorm.forward(self, x)
        return y if gate is None else (y * F.silu(gate)).to(gate.dtype)


LAYER = repr(LayerNorm(8)).replace("1e-05", "{}")  # torch 2.11 does not print the bias
LAYER_2D = LAYER.replace("(", "2d(", 1)
RMS, RMS_2D = (f"RMSNorm{kind}((8,), eps={{}}, elementwise_affine=True)" for kind in ("", "2d"))
GATED_RMS = "GatedRMSNorm((8,), eps=0.001, elementwise_affine=True{})"
EPS_OF_FLOAT32 = torch.finfo(F32).eps
# Class -> the repr of the replacement, and the shape of the input and of the gate, if there is one.
LAYERS = {
    torch.nn.LayerNorm: (LAYER.format(1e-5), ROWS),
    torch.nn.RMSNorm: (RMS.format(None), ROWS),
    Features: (LAYER.format(1e-5), ROWS),
    Images: (LAYER_2D.format(1e-5), IMAGES),
    Wide: (RMS.format(None), ROWS),
    Scale: (RMS.format(0.001), ROWS),
    ZeroCentered: (RMS.format(0.001)[:-1] + ", zero_centered_weight=True)", ROWS),
    GammaBeta: (LAYER_2D.format(0.001), IMAGES),
    GB: (LAYER_2D.format(0.001), IMAGES),
    Gamma: (RMS_2D.format(1.25e-25), IMAGES),
    GammaOfVideos: (RMS_2D.format(1.25e-25), VIDEOS),
    TorchsEps: (LAYER.format(1e-5), ROWS),
    Channels: (LAYER_2D.format(0.001).replace("bias=True", "bias=False"), (2, 8, 3)),
    ZeroCenteredImages: (RMS_2D.format(0.001)[:-1] + ", zero_centered_weight=True)", IMAGES),
    EpsIsAProperty: (LAYER.format(0.001), ROWS),
    AnyWidth: ("RMSNorm((), eps=0.5, elementwise_affine=False)", ROWS),
    AnyWidthOfImages: ("RMSNorm2d((), eps=0.001, elementwise_affine=False)", IMAGES),
    IgnoresItsWeight: ("RMSNorm((), eps=0.5, elementwise_affine=False)", ROWS),
    AnyWidthInFloat32: (f"RMSNorm((), eps={EPS_OF_FLOAT32}, elementwise_affine=False)", ROWS),
    LikeT5: (RMS.format(1e-6), ROWS),
    LikeLlama: (RMS.format(1e-6), ROWS),
    CastsTheInput: (LAYER.format(1e-5), ROWS),
    CastsTheParameters: (LAYER.format(1e-5), ROWS),
    ComputesInFloat32: (RMS.format(EPS_OF_FLOAT32), ROWS),
    Activated: (LAYER_2D.format(1e-5), IMAGES),
    ActivatedWithParameter: (LAYER_2D.format(1e-5), IMAGES),
    GateFirst: (GATED_RMS.format(", gate_first=True"), ROWS),
    GateFirstInGroups: (GATED_RMS.format(", gate_first=True, num_groups=4"), ROWS),
    GateFirstInNumberedGroups: (GATED_RMS.format(", gate_first=True, num_groups=2"), ROWS),
    GateAfter: (GATED_RMS.format(""), ROWS),
    SigmoidGate: (GATED_RMS.format(", activation='sigmoid'"), ROWS),
    LayerNormWithGate: ("Gated" + LAYER.format(1e-5), ROWS),
    DtypeOfGate: ("Gated" + LAYER.format(1e-5), ROWS),
}
layers = pytest.mark.parametrize("cls", LAYERS, ids=lambda cls: cls.__name__)


def layer_and_inputs(cls):
    """Return a registered layer and its inputs by their names, in float64."""
    register_conversion(cls)
    names = list(inspect.signature(cls.forward).parameters)[1:]
    return randomize(cls(8)).double(), {name: torch.randn(LAYERS[cls][1], dtype=F64) for name in names}


def converted_layer(cls):
    """Return a float32 layer, its converted copy and its inputs."""
    layer, inputs = layer_and_inputs(cls)
    ours = copy.deepcopy(layer.float())
    report = convert(ours)
    assert report.replaced, report
    return layer, ours, {name: x.float() for name, x in inputs.items()}


def output_and_gradients(layer, inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    y = layer(*inputs)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return y, *torch.autograd.grad(y, [*inputs, *layer.parameters()], dy)


@layers
def test_layers_are_replaced_and_restored(cls):
    """Outputs and gradients are those of the original in float64, with a gate and, if it may be absent, without."""
    layer, inputs = layer_and_inputs(cls)
    x, *gates = inputs.values()
    is_optional = gates and inspect.signature(cls.forward).parameters["gate"].default is None
    calls = [[x, *gates]] + [[x]] * bool(is_optional)
    before, keys, text = snapshot(layer), list(layer.state_dict()), LAYERS[cls][0]
    with Float64Throughout():
        expected = [output_and_gradients(layer, inputs) for inputs in calls]
    report = convert(layer)
    assert report.replaced and report.replaced[""].endswith(f" by {text}"), report
    assert isinstance(layer, cls) and list(layer.state_dict()) == keys
    for inputs, results in zip(calls, expected, strict=True):
        actual = output_and_gradients(layer, inputs)
        # Sums of 60 terms rounded by 1e-16 or 6e-8. An eps of None is 2e-16 or, for layers in float32, 1e-7.
        tolerance = 1e-13 if actual[0].dtype == F64 and str(EPS_OF_FLOAT32) not in text else 1e-5
        for value, exact in zip(actual, results, strict=True):
            torch.testing.assert_close(value.double(), exact.double(), rtol=tolerance, atol=tolerance)
    revert(layer)
    assert snapshot(layer) == before and list(vars(layer)) == list(before[1])


def test_equal_gated_layers_are_distinguished_by_the_hook_of_a_parallel_style():
    """The hook may leave out the gate. A copy without it is converted, whichever of them comes first."""

    def hook(module, inputs):
        return inputs

    hook.__module__ = "torch.distributed.tensor.parallel.style"
    register_conversion(GateFirst)
    for parallelized in (0, 1):
        model = torch.nn.ModuleList(GateFirst(16) for _ in range(2))
        model[parallelized].register_forward_pre_hook(hook)
        report = convert(model)
        assert list(report.replaced) == [str(1 - parallelized)] and list(report.skipped) == [str(parallelized)]


@layers
def test_output_dtypes_are_kept(cls):
    """The test tries all dtypes of parameters and inputs that the layer takes. The output is rounded once."""
    original, ours, inputs = converted_layer(cls)
    compared = 0
    for dtype, *dtypes in itertools.product((F64, F32, F16, BF16), repeat=1 + len(inputs)):
        tensors = [x.to(d) for x, d in zip(inputs.values(), dtypes, strict=True)]
        try:
            theirs = original.to(dtype)(*tensors)
        except RuntimeError:
            continue
        compared += 1
        actual = ours.to(dtype)(*tensors)
        with Float64Throughout():
            exact = copy.deepcopy(original).double()(*(x.double() for x in tensors))
        assert actual.dtype == theirs.dtype, (dtype, dtypes)
        # An activation behind the norm rounds again. Arithmetic in float32 loses less than 1e-6.
        rtol = torch.finfo(actual.dtype).eps + 1e-6
        torch.testing.assert_close(actual.double(), exact.double(), rtol=rtol, atol=2e-6)
    assert compared >= 4 or cls is CastsTheParameters  # takes fewer dtypes


def converted_layer_of_narrow_inputs(cls):
    """Return a converted float32 layer, its inputs and the dtype of the original's output.

    The inputs are bfloat16 if the layer takes that beside float32 parameters, so that a wrong output dtype shows.
    """
    original, layer, inputs = converted_layer(cls)
    narrow = {name: x.to(BF16) for name, x in inputs.items()}
    try:
        return layer, narrow, original(*narrow.values()).dtype
    except RuntimeError:
        return layer, inputs, F32


@layers
def test_arguments_keep_their_names_in_copies_and_tools(cls):
    layer, inputs, dtype = converted_layer_of_narrow_inputs(cls)
    expected = layer(**inputs)
    assert list(inspect.signature(layer.forward).parameters) == list(inputs) and expected.dtype == dtype
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        layer(other=expected)
    graph = torch.fx.symbolic_trace(layer)
    assert [node.target for node in graph.graph.find_nodes(op="placeholder")] == list(inputs)
    pickled, file = pickle.dumps(layer), io.BytesIO()
    torch.save(layer, file)
    copies = [copy.deepcopy(layer), pickle.loads(pickled)]
    _converted.converted_class.cache_clear()  # another process starts with an empty cache
    copies += [pickle.loads(pickled), torch.load(io.BytesIO(file.getvalue()), weights_only=False)]
    for other in (*copies, graph):
        torch.testing.assert_close(other(**inputs), expected, **SAME_BITS)
    for copied in copies:
        revert(copied)
        assert type(copied) is cls and type(layer) is not cls
    larger = {name: torch.cat([x, x]) for name, x in inputs.items()}
    shapes = {name: {0: torch.export.Dim("batch")} for name in inputs}
    program = torch.export.export(layer, (), inputs, dynamic_shapes=shapes).module()
    traced = torch.jit.trace(layer, example_kwarg_inputs=inputs, check_trace=False)
    tolerance = 4 * torch.finfo(dtype).eps + 1e-5  # both record aten's operators
    for other in (program, traced):
        torch.testing.assert_close(other(**larger), layer(**larger), rtol=tolerance, atol=tolerance)


def test_converted_layers_are_compiled():
    """All layers are in one graph, because each compilation takes time."""
    converted_layers, inputs, _ = zip(*map(converted_layer_of_narrow_inputs, LAYERS), strict=True)

    def call(inputs):
        return [layer(**each) for layer, each in zip(converted_layers, inputs, strict=True)]

    results = torch.compile(call, backend="aot_eager", fullgraph=True)(inputs)
    for cls, actual, expected in zip(LAYERS, results, call(inputs), strict=True):
        torch.testing.assert_close(actual, expected, **SAME_BITS, msg=lambda text, cls=cls: f"{cls.__name__}: {text}")


@pytest.mark.parametrize("cls", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_layers_of_torch_are_scripted(cls):
    _, layer, inputs = converted_layer(cls)
    actual = save_and_load(torch.jit.script(layer))(*inputs.values())
    torch.testing.assert_close(actual, layer(*inputs.values()), rtol=1e-5, atol=1e-5)  # ten roundings of 6e-8


@pytest.mark.parametrize("cls", [Scale, GB, Gamma, TorchsEps])
def test_parameters_of_other_names_are_loaded(cls):
    _, layer, inputs = converted_layer(cls)
    loaded = cls(8)
    convert(loaded)
    loaded.load_state_dict(layer.state_dict())
    torch.testing.assert_close(loaded(**inputs), layer(**inputs), **SAME_BITS)


@pytest.mark.parametrize("cls", [AnyWidth, AnyWidthOfImages])
def test_layers_without_a_weight_take_any_width(cls):
    original, layer, _ = converted_layer(cls)
    for width in (5, 8, 33):
        x = torch.randn(2, 3, width).transpose(cls.dim, -1)
        torch.testing.assert_close(layer(x), original(x), rtol=1e-6, atol=1e-6)  # float32 roundings of 6e-8
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x), layer(x), **SAME_BITS)


def test_random_drops_stay_between_norm_and_activation():
    register_conversion(Activated)
    layer, x = Activated(8, torch.nn.ReLU(), torch.nn.Dropout(0.5)).double(), torch.randn(IMAGES, dtype=F64)
    x = x.contiguous(memory_format=torch.channels_last)  # as the original's output, so that the dropped elements agree
    torch.manual_seed(1)
    expected = layer(x)
    assert convert(layer).replaced
    torch.manual_seed(1)
    torch.testing.assert_close(layer(x), expected, rtol=1e-14, atol=1e-14)  # some ten roundings of 1e-16


def test_equal_layers_share_a_class():
    """Their activations may differ. torch.compile would compile a graph for each class."""
    register_conversion(Activated)
    model = torch.nn.Sequential(Activated(8, torch.nn.ReLU()), Activated(8, torch.nn.SiLU()))
    assert len(convert(model).replaced) == 2 and type(model[0]) is type(model[1])
    assert isinstance(model[0].act, torch.nn.ReLU) and isinstance(model[1].act, torch.nn.SiLU)
    first, second = converted_layer(Images)[1], converted_layer(Images)[1]
    assert type(first) is type(second)


def test_positional_only_and_starred_arguments():
    class Starred(torch.nn.LayerNorm):
        def forward(self, *inputs):
            return super().forward(*inputs)

    class Positional(torch.nn.LayerNorm):
        def forward(self, x, /):
            return super().forward(x)

    for cls in (Starred, Positional):
        register_conversion(cls)
        layer, x = cls(8), torch.randn(3, 8)
        signature = inspect.signature(layer.forward)
        assert convert(layer).replaced and inspect.signature(layer.forward) == signature
        torch.testing.assert_close(layer(x), LayerNorm(8)(x), **SAME_BITS)


def test_overridden_methods_stay():
    class Overriding(torch.nn.LayerNorm):
        """Doubles its output in __call__, outside of forward, keeps its dtype, and takes any state."""

        def __call__(self, x):
            return 2 * super().__call__(x)

        def _apply(self, function, recurse=True):
            return self

        def _load_from_state_dict(self, *args):
            pass

    register_conversion(Overriding)
    layer, x = Overriding(8), torch.randn(3, 8)
    assert convert(layer).replaced
    layer.half().load_state_dict({})
    torch.testing.assert_close(layer(x), 2 * LayerNorm(8)(x), **SAME_BITS)


# Changes after the conversion


def change_eps_and_width(layer):
    """Set eps, and keep half of the channels, as users and tools for pruning do."""
    for name in ("eps", "variance_epsilon"):
        if hasattr(layer, name):
            setattr(layer, name, 0.3)
    if hasattr(layer, "normalized_shape"):
        layer.normalized_shape = (4,)
    for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
        half = tensor.detach().narrow(tensor.shape.index(8), 0, 4).clone()
        setattr(layer, name, torch.nn.Parameter(half) if name in layer._parameters else half)


@layers
@pytest.mark.parametrize("is_temporary", [False, True], ids=["convert", "converted"])
def test_changes_of_a_converted_layer_take_effect_and_stay(cls, is_temporary):
    """A converted layer computes with its present attributes, as the original does, and revert() keeps them."""
    layer, inputs = layer_and_inputs(cls)
    original = copy.deepcopy(layer)
    inputs = [x.narrow(x.shape.index(8), 0, 4) for x in inputs.values()]
    with converted(layer) if is_temporary else contextlib.nullcontext(convert(layer)) as report:
        assert report.replaced
        change_eps_and_width(original)
        change_eps_and_width(layer)
        changed = {name: copy.copy(value) for name, value in vars(layer).items() if name != "_converted_from"}
        actual = output_and_gradients(layer, inputs)
    if not is_temporary:
        revert(layer)
    assert snapshot(layer) == (cls, changed)
    with Float64Throughout():
        expected = output_and_gradients(original, inputs)
    tolerance = 1e-13 if actual[0].dtype == F64 else 1e-5  # sums of 60 terms rounded by 1e-16 or 6e-8
    for value, exact in zip(actual, expected, strict=True):
        torch.testing.assert_close(value.double(), exact.double(), rtol=tolerance, atol=tolerance)


@layers
def test_converted_layers_are_instances_of_their_class_and_say_what_they_are(cls):
    """Tools find layers by isinstance, or by the name of the class."""
    layer = layer_and_inputs(cls)[0]
    text = repr(layer)
    kind = convert(layer).replaced[""].rpartition(" by ")[2].partition("(")[0]
    assert isinstance(layer, cls) and type(layer).__name__ == cls.__name__
    if cls in (torch.nn.LayerNorm, torch.nn.RMSNorm):
        assert type(layer) is getattr(layernorm_ext, kind) and repr(layer) == text
    else:
        assert f"converted to {kind}" in repr(layer)
        assert repr(layer).replace(f", converted to {kind}", "").replace(f"converted to {kind}", "").split() == (
            text.split()
        )


# Sizes


@pytest.mark.parametrize("channels", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("cls", [Images, ZeroCenteredImages])
def test_images_of_any_number_of_channels(cls, channels):
    register_conversion(cls)
    layer, x = randomize(cls(channels)).double(), torch.randn(2, channels, 3, 4, dtype=F64)
    expected = layer(x)
    report = convert(layer)
    assert "2d(" in report.replaced[""], report
    torch.testing.assert_close(layer(x), expected, rtol=1e-14, atol=1e-14)  # some ten roundings of 1e-16


# Names of packages


@pytest.mark.parametrize(
    ("name", "is_candidate"),
    [
        ("transformers_modules.org.model.hash.modeling.MyRMSNorm", True),  # remote code
        ("transformers_modules.modeling.MyLayerNorm2d", True),
        ("timm.layers.RmsNorm", True),
        ("diffusers.models.RMS_norm", True),
        ("timm_forks.layers.RmsNorm", False),
        ("transformers_modules.modeling.BatchNorm2d", False),
    ],
)
def test_classes_of_known_packages_are_candidates_by_their_names(name, is_candidate):
    """The packages need not be imported."""
    module, _, cls = name.rpartition(".")
    layer = type(cls, (Scale,), {"__module__": module})(8)
    assert list(convert(torch.nn.Sequential(layer)).replaced) == ["0"] * is_candidate
    assert type(layer).__module__ == module and ("converted to RMSNorm" in repr(layer)) == is_candidate
