"""convert() skips layers that compute something else, with a reason, and compares equal layers once."""

import pytest
import torch
from support.models import LikeLlama, MyNorm, build_ours, layer_with, snapshot
from support.reference import BF16, F16, F32
from torch.nn.functional import gelu, layer_norm, normalize, silu

from layernorm_ext import LayerNorm, convert, register_conversion
from layernorm_ext.conversion._comparison import Comparison

pytestmark = pytest.mark.usefixtures("one_thread", "restore_registry")

torch_forward = torch.nn.LayerNorm.forward


def changed(change):
    """Return a forward whose output is a function of the layer, the input and torch's output."""
    return lambda self, x: change(self, x, torch_forward(self, x))


def rounded_for(*dtypes):
    """Return a forward that rounds its output to integers for one pair of input and weight dtypes."""
    return changed(lambda self, x, y: y.round() if (x.dtype, self.weight.dtype) == dtypes else y)


def with_gate(change):
    """Return a forward whose output is a function of torch's output and a gate, or torch's output without a gate."""

    def forward(self, x, gate=None):
        y = torch_forward(self, x)
        return y if gate is None else change(y, gate)

    return forward


def channels_first_for_images(self, x):
    return torch_forward(self, x.movedim(1, -1)).movedim(-1, 1) if x.dim() == 4 else torch_forward(self, x)


def eps_beside_deviation(self, x):
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, unbiased=False, keepdim=True) + self.eps)


def masked(self, x):
    """Leave zeros out, as torchao's MaskedLayerNorm does."""
    kept = (x != 0).to(x.dtype)
    count = kept.sum(-1, keepdim=True).clamp(min=1)
    d = (x - x.sum(-1, keepdim=True) / count) * kept
    y = d * torch.rsqrt((d * d).sum(-1, keepdim=True) / count + self.eps)
    return y * self.weight + self.bias


def other_eps_for_16_bits(self, x):
    return layer_norm(x, (5,), self.weight, self.bias, 1e-2 if x.dtype in (F16, BF16) else self.eps)


def casts_and_adds_one(self, x):
    """Refuses mixed dtypes."""
    return layer_norm(x.float(), (5,), self.weight, self.bias).type(x.dtype) + 1


def divide_by_zero(self, x):
    raise ZeroDivisionError("their message\nand more")


def long_error(self, x):
    raise ValueError("word " * 100)


def module(forward, **parameters):
    """Return an instance of a new class of modules with this forward and these shapes of parameters."""
    layer = type("Lookalike", (torch.nn.Module,), {"forward": forward})()
    for name, shape in parameters.items():
        setattr(layer, name, torch.nn.Parameter(torch.ones(shape)))
    return layer


def with_children(forward, **children):
    """Return a layer with this forward and these children."""
    layer = layer_with(forward)
    for name, child in children.items():
        layer.register_module(name, child)
    return layer


NAME = f"not {torch.nn.LayerNorm(5)}: "  # torch 2.11 does not print the bias
OUTPUT = NAME + "output differs by "
# Case -> the layer or its forward, a part of the reason in the report, and the function that builds the replacement, if
# not the default one.
SKIPPED = {
    "masked": (masked, OUTPUT),
    "std plus eps": (eps_beside_deviation, OUTPUT),
    "other eps": (lambda self, x: layer_norm(x, (5,), self.weight, self.bias, 1e-6), OUTPUT),
    "other eps for 16 bits": (other_eps_for_16_bits, "output of torch.bfloat16 and torch.float32 differs by "),
    "other gradient": (changed(lambda self, x, y: y + x - x.detach()), NAME + "gradient of input differs by "),
    "channels first": (channels_first_for_images, NAME + "input of size[2, 3, 2, 5] raises RuntimeError: "),
    "bfloat16": (rounded_for(BF16, BF16), "output of torch.bfloat16 and torch.bfloat16 differs by "),
    "mixed dtypes": (rounded_for(F16, F32), "output of torch.float16 and torch.float32 differs by "),
    "refused dtypes": (casts_and_adds_one, "output differs by 1"),
    "clamped to 4": (lambda self, x: torch_forward(self, x.clamp(-4, 4)), "output"),
    "clamped to 10": (lambda self, x: torch_forward(self, x.clamp(-10, 10)), "output"),
    "clamped to 100": (lambda self, x: torch_forward(self, x.clamp(-100, 100)), "output for large inputs differs by "),
    "error": (divide_by_zero, ": it refuses every input: ZeroDivisionError: their message"),
    "long error": (long_error, ": it refuses every input: ValueError: " + "word " * 23 + "..."),
    "forward of the instance": (layer_with(torch_forward, forward=abs), "its forward was replaced by another"),
    "two inputs": (lambda self, x, mask=None: x, "its forward has the parameters self, x, mask"),
    "no forward": (type("NoForward", (torch.nn.Module,), {})(), "it refuses every input: NotImplementedError: "),
    "negative eps": (layer_with(torch_forward, eps=-1e-3), "differs by nan"),
    "no eps": (layer_with(torch_forward, eps=None), "its eps is None"),
    "eps is a tensor": (layer_with(torch_forward, eps=torch.tensor(1e-5)), "its eps is of type Tensor"),
    "other parameter": (layer_with(torch_forward, gamma=torch.nn.Parameter(torch.ones(5))), "it has a parameter gamma"),
    "a gain for each head": (  # as NaViT's
        module(lambda self, x: normalize(x, dim=-1) * x.shape[-1] ** 0.5 * self.gamma, gamma=(2, 1, 8)),
        "it refuses every input: RuntimeError: ",
    ),
    "scaled by one width": (
        module(lambda self, x: normalize(x, dim=-1) * 8**0.5),
        "not RMSNorm((), eps=None, elementwise_affine=False): output differs by",
    ),
    "activation before the norm": (
        with_children(lambda self, x: torch_forward(self, self.act(x)), act=torch.nn.Tanh(), drop=torch.nn.Identity()),
        "output differs by",
    ),
    "absent activation": (with_children(torch_forward, act=None), "it takes input of size"),
    "children beside the activation": (  # their parameters may be zeros that training changes
        with_children(lambda self, x: self.act(torch_forward(self, x)), act=torch.nn.PReLU(), a=torch.nn.Identity()),
        "it has a parameter act.weight",
    ),
    "build that raises": (MyNorm(5), "ZeroDivisionError: ", lambda norm: 1 / 0),
    # Both layers raise: LayerNorm(4) refuses the weight of 5 elements.
    "no common input": (divide_by_zero, "it refuses every input", lambda norm: LayerNorm(4, device="meta")),
    "gate by gelu": (with_gate(lambda y, gate: y * gelu(gate)), "output differs by"),
    "ignored gate": (with_gate(lambda y, gate: y), "output differs by"),
    "other norm without a gate": (
        lambda self, x, gate=None: torch_forward(self, x) * (2 if gate is None else silu(gate)),
        "output differs by",
    ),
    "clamped gate": (with_gate(lambda y, gate: y * silu(gate.clamp(-7, 7))), "output for large gates differs by"),
    "other gradient of the gate": (with_gate(lambda y, gate: y * silu(gate.detach())), "gradient of gate differs by"),
    "gate of one column": (with_gate(lambda y, gate: y * silu(gate[..., :1])), "output differs by"),
    "plain norm for a gated one": (
        with_gate(lambda y, gate: y * silu(gate)),
        "it takes input of size",
        lambda norm: LayerNorm(5, device="meta"),
    ),
    "gated without a width": (module(lambda self, x, gate=None: x), "neither a weight nor a normalized_shape"),
    "gated with a child": (
        with_children(with_gate(lambda y, gate: y * silu(gate)), act=torch.nn.ReLU()),
        "it takes a gate and has a child act",
    ),
}


@pytest.mark.parametrize("case", SKIPPED.values(), ids=SKIPPED)
def test_layers_that_differ_are_skipped_with_a_reason(case):
    layer, reason, *build = case
    layer = layer if isinstance(layer, torch.nn.Module) else layer_with(layer)
    register_conversion(type(layer), *build)
    before = snapshot(layer)
    report = convert(layer)
    assert not report.replaced and snapshot(layer) == before
    assert report.skipped[""].startswith(f"{type(layer).__module__}.{type(layer).__name__}: ")
    assert reason in report.skipped[""]


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


class CountsCalls(torch.nn.LayerNorm):
    """A layer whose forward changes a buffer, a list and torch's random state."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))
        self.shapes = []

    def forward(self, x):
        self.calls += torch.rand(()) + 1
        self.shapes.append(x.shape)
        return super().forward(x)


def test_the_comparison_leaves_the_state_of_the_layer_as_it_was():
    layer, random_state = CountsCalls(5), torch.get_rng_state()
    register_conversion(CountsCalls, lambda module: LayerNorm(5, device="meta"))
    assert convert(layer).replaced
    assert layer.calls == 0 and layer.shapes == []
    assert torch.equal(torch.get_rng_state(), random_state)


class HasFactor(LikeLlama):
    """A layer with a buffer that changes nothing before a state_dict is loaded."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("factor", torch.ones(width))

    def forward(self, x):
        return super().forward(x) * self.factor


def test_a_layer_whose_output_depends_on_a_buffer_is_skipped():
    register_conversion(HasFactor)
    layer = HasFactor(8)
    assert "output differs" in convert(layer).skipped[""]
    assert torch.equal(layer.factor, torch.ones(8))


# Cost


@pytest.fixture
def comparisons(monkeypatch):
    """Return a list of the shapes of the input in every call of a layer during a comparison."""
    calls, results = [], Comparison._results

    def record(self, forward, dtypes, x, *others, **options):
        calls.append(x.shape)
        return results(self, forward, dtypes, x, *others, **options)

    monkeypatch.setattr(Comparison, "_results", record)
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


def test_layers_that_differ_are_compared_separately():
    """The layers differ in class, eps, shape, training mode, a buffer, or an attribute that is a list."""
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
    assert sorted(report.replaced) == ["0", "1", "2", "3", "5", "7"] and sorted(report.skipped) == ["4", "6"]
    assert "eps=0.5" in report.replaced["1"] and "(9,)" in report.replaced["2"]


def test_a_build_for_torchs_layers_is_compared_in_its_own_shape():
    register_conversion(torch.nn.LayerNorm, lambda norm: LayerNorm(32, norm.eps, device="meta"))
    model = torch.nn.ModuleList([torch.nn.LayerNorm(32), torch.nn.LayerNorm(64)])
    report = convert(model)
    assert list(report.replaced) == ["0"] and list(report.skipped) == ["1"]
