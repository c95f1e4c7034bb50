"""convert() on norms with a gate, whose forms are those of transformers' classes."""

import copy
import inspect
import itertools
import pickle

import pytest
import torch
from support.models import randomize, snapshot
from support.reference import BF16, F16, F32, F64
from torch.nn.functional import gelu, layer_norm, silu

from layernorm_ext import GatedLayerNorm, GatedRMSNorm, RMSNorm, convert, register_conversion, revert

pytestmark = pytest.mark.usefixtures("one_thread", "restore_registry")


class GateFirst(torch.nn.Module):
    """Multiplies the input by the gate, and returns the wider dtype of input and weight, as Mamba-2's norm does."""

    groups, activation = 1, staticmethod(silu)

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
    """Has the width of a group as an attribute, as Zamba2's and Nemotron-H's norms have."""

    groups = property(lambda self: self.weight.shape[0] // self.group_size)

    def __init__(self, width):
        super().__init__(width)
        self.group_size = width // 4


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
        return y if gate is None else (y * silu(gate)).to(x.dtype)


class DtypeOfGate(LayerNormWithGate):
    def forward(self, x, gate=None):
        y = torch.nn.LayerNorm.forward(self, x)
        return y if gate is None else (y * silu(gate)).to(gate.dtype)


class WithoutConversions(GateFirst):
    """Returns the widest of the three dtypes."""

    def forward(self, hidden_states, gate):
        return self.weight * self.norm(hidden_states) * silu(gate)


# Class -> the replacement's class and options.
CASES = {
    GateFirst: (GatedRMSNorm, {"activation": "silu", "gate_first": True, "num_groups": 1}),
    GateFirstInGroups: (GatedRMSNorm, {"activation": "silu", "gate_first": True, "num_groups": 4}),
    GateFirstInNumberedGroups: (GatedRMSNorm, {"activation": "silu", "gate_first": True, "num_groups": 2}),
    GateAfter: (GatedRMSNorm, {"activation": "silu", "gate_first": False, "num_groups": 1}),
    SigmoidGate: (GatedRMSNorm, {"activation": "sigmoid", "gate_first": False, "num_groups": 1}),
    LayerNormWithGate: (GatedLayerNorm, {"activation": "silu", "gate_first": False, "num_groups": 1}),
    DtypeOfGate: (GatedLayerNorm, {"activation": "silu", "gate_first": False, "num_groups": 1}),
    WithoutConversions: (GatedRMSNorm, {"activation": "silu", "gate_first": False, "num_groups": 1}),
}
cases = pytest.mark.parametrize("cls", CASES)


def converted_layer(cls):
    """Return a layer and its converted copy."""
    register_conversion(cls)
    original = randomize(cls(8).double())
    layer = copy.deepcopy(original)
    assert convert(layer).replaced
    return original, layer


def output_and_gradients(layer, x, gate):
    inputs = [tensor.clone().requires_grad_() for tensor in (x, gate)]
    y = layer(*inputs)
    dy = torch.linspace(-1, 1, y.numel(), dtype=F64).view_as(y)
    return y, *torch.autograd.grad(y, [*inputs, *layer.parameters()], dy)


@cases
def test_order_activation_and_groups_are_found(cls):
    original, layer = converted_layer(cls)
    ours, options = CASES[cls]
    assert isinstance(layer, ours) and {name: getattr(layer, name) for name in options} == options
    assert list(layer.state_dict()) == list(original.state_dict())
    x, gate = torch.randn(2, 3, 16, dtype=F64).chunk(2, dim=-1)
    expected = output_and_gradients(original, x, gate)
    for actual, value in zip(output_and_gradients(layer, x, gate), expected, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-13, atol=1e-13)  # some fifty roundings of 1e-16
    if inspect.signature(cls.forward).parameters["gate"].default is None:
        torch.testing.assert_close(layer(x), original(x), rtol=1e-13, atol=1e-13)


@cases
def test_output_dtypes_are_kept_for_all_dtypes_of_the_gate(cls):
    original, layer = converted_layer(cls)
    for x_dtype, dtype, gate_dtype in itertools.product((F64, F32, F16, BF16), repeat=3):
        x, gate = torch.randn(3, 8).to(x_dtype), torch.randn(3, 8).to(gate_dtype)
        if issubclass(cls, LayerNormWithGate) and dtype != x_dtype:  # which torch refuses
            continue
        expected = original.to(dtype)(x, gate)
        actual = layer.to(dtype)(x, gate)
        assert actual.dtype == expected.dtype
        # Each rounds up to four times to the narrowest dtype.
        tolerance = 4 * max(torch.finfo(each).eps for each in (x_dtype, dtype, gate_dtype)) + 1e-6
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@cases
def test_arguments_keep_their_names_in_copies_and_tools_until_reverted(cls):
    original, layer = converted_layer(cls)
    names = list(inspect.signature(cls.forward).parameters)[1:]
    assert list(inspect.signature(layer.forward).parameters) == names
    inputs = dict(zip(names, torch.randn(2, 3, 5, 8, dtype=F64).unbind(), strict=True))
    expected = layer(**inputs)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    exported = torch.export.export(layer, (), inputs).module()
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), compiled, exported):
        torch.testing.assert_close(copied(**inputs), expected, rtol=1e-13, atol=1e-13)
    for copied in (copy.deepcopy(layer), layer):
        revert(copied)
        assert type(copied) is cls
        torch.testing.assert_close(copied(**inputs), original(**inputs), rtol=0, atol=0)


def test_an_attribute_called_activation_is_restored():
    register_conversion(GateFirst)
    layer = GateFirst(8)
    layer.activation = silu
    before = snapshot(layer)
    assert convert(layer).replaced and layer.activation == "silu"
    revert(layer)
    assert snapshot(layer) == before


def gelu_gate(self, x, gate=None):
    return layer_norm(x, (8,), self.weight, self.bias, self.eps) * (1 if gate is None else gelu(gate))


def ignores_gate(self, x, gate=None):
    return layer_norm(x, (8,), self.weight, self.bias, self.eps)


def other_without_gate(self, x, gate=None):
    y = layer_norm(x, (8,), self.weight, self.bias, self.eps)
    return 2 * y if gate is None else y * silu(gate)


def large_gates_are_clamped(self, x, gate=None):
    y = layer_norm(x, (8,), self.weight, self.bias, self.eps)
    return y if gate is None else y * silu(gate.clamp(-7, 7))


def other_gradient_of_gate(self, x, gate=None):
    y = layer_norm(x, (8,), self.weight, self.bias, self.eps)
    return y if gate is None else y * silu(gate.detach())


def gate_of_one_column(self, x, gate=None):
    return layer_norm(x, (8,), self.weight, self.bias, self.eps) * (1 if gate is None else silu(gate[..., :1]))


SKIPPED = {
    gelu_gate: "output differs by",
    ignores_gate: "output differs by",
    other_without_gate: "output differs by",
    large_gates_are_clamped: "output for large gates differs by",
    other_gradient_of_gate: "gradient of gate differs by",
    gate_of_one_column: "output differs by",
}


@pytest.mark.parametrize("forward", SKIPPED)
def test_other_formulas_are_skipped(forward):
    cls = type("Lookalike", (torch.nn.LayerNorm,), {"forward": forward})
    register_conversion(cls)
    report = convert(cls(8))
    assert not report.replaced and SKIPPED[forward] in report.skipped[""]


def test_a_build_of_a_plain_norm_is_refused():
    register_conversion(GateFirst, lambda norm: RMSNorm(8, 1e-3, device="meta"))
    assert "it takes input of size" in convert(GateFirst(8)).skipped[""]


class WithoutWeight(torch.nn.Module):
    def forward(self, x, gate=None):
        return x


def test_gated_norms_without_a_width_or_with_children_are_skipped():
    register_conversion(WithoutWeight)
    register_conversion(GateFirst)
    layer = GateFirst(8)
    layer.act = torch.nn.ReLU()
    assert "neither a weight nor a normalized_shape" in convert(WithoutWeight()).skipped[""]
    assert "it takes a gate and has a child act" in convert(layer).skipped[""]
