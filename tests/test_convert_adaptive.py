"""convert() on blocks that scale and shift the result of a norm, whose forms are those of diffusers' classes."""

import copy
import importlib
import inspect
import itertools
import pickle
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.models import Continuous, randomize, snapshot
from support.packages import assert_close
from support.reference import BF16, F16, F32, F64
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from layernorm_ext import LayerNorm, RMSNorm, _adaptive, convert, converted, register_conversion, revert, trace_as
from layernorm_ext import conversion as conversion_module

pytestmark = pytest.mark.usefixtures("one_thread", "restore_registry")

WIDTH = Continuous.width


class Fused(TorchDispatchMode):
    """Counts the calls of the operator, and those whose weight or bias has batch dimensions, and names all others."""

    def __init__(self):
        super().__init__()
        self.calls = self.modulated = 0
        self.others = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "layernorm":
            parameters = [*args[2:4], (kwargs or {}).get("weight"), (kwargs or {}).get("bias")]
            self.calls += 1
            self.modulated += any(isinstance(p, torch.Tensor) and p.dim() > 1 for p in parameters)
        elif not (function.is_view or function is torch.ops.aten.promote_types.default):
            self.others.append(str(function))
        return function(*args, **(kwargs or {}))


# Blocks, and their inputs: rows and an embedding


class Block(torch.nn.Module):
    chunks, norm_options = 6, {"elementwise_affine": False}

    def __init__(self):
        super().__init__()
        self.emb, self.silu = None, torch.nn.SiLU()
        self.linear = torch.nn.Linear(4, self.chunks * WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH, 1e-6, **self.norm_options)


class Zero(Block):
    def forward(self, x, timestep=None, class_labels=None, hidden_dtype=None, emb=None):
        if self.emb is not None:
            emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.linear(self.silu(emb)).chunk(6, dim=1)
        x = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        return x, gate, mlp_shift, mlp_scale, mlp_gate


class Single(Block):
    chunks = 3

    def forward(self, x, emb=None):
        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None], gate


class TwoNorms(Block):
    chunks = 9

    def forward(self, hidden_states, emb=None):
        chunks = self.linear(self.silu(emb)).chunk(9, dim=1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate, shift2, scale2, gate2 = chunks
        y = self.norm(hidden_states)
        first, second = y * (1 + scale[:, None]) + shift[:, None], y * (1 + scale2[:, None]) + shift2[:, None]
        return first, gate, mlp_shift, mlp_scale, mlp_gate, second, gate2


class WithEncoder(Block):
    norm_options = {}

    def forward(self, hidden_states, encoder_hidden_states, temb):
        shift, scale, gate, shift2, scale2, gate2 = self.linear(self.silu(temb)).chunk(6, dim=1)
        hidden_states = self.norm(hidden_states) * (1 + scale[:, None]) + shift[:, None]
        encoder_hidden_states = self.norm(encoder_hidden_states) * (1 + scale2[:, None]) + shift2[:, None]
        return hidden_states, encoder_hidden_states, gate[:, None], gate2[:, None]


class WithoutShift(Block):
    chunks = 4

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(WIDTH, 1e-5)

    def forward(self, x, emb=None):
        scale, gate, mlp_scale, mlp_gate = self.linear(self.silu(emb)).chunk(4, dim=1)
        return self.norm(x) * (1 + scale[:, None]), gate, mlp_scale, mlp_gate


class RMSContinuous(Continuous):
    def __init__(self):
        super().__init__(torch.nn.RMSNorm)


class Shared(Block):
    """Has one scale and shift for all rows."""

    chunks = 2

    def __init__(self):
        super().__init__()
        self.chunk_dim = 0

    def forward(self, x, timestep=None, temb=None):
        scale, shift = self.linear(self.silu(temb)).chunk(2, dim=0)
        return self.norm(x) * (1 + scale) + shift


# Class -> its form, and the calls of the operator.
CASES = {
    Zero: ("AdaLayerNormZero", 1),
    Single: ("AdaLayerNormZeroSingle", 1),
    TwoNorms: ("SD35AdaLayerNormZeroX", 2),
    Continuous: ("AdaLayerNormContinuous", 1),
    WithEncoder: ("CogVideoXLayerNormZero", 2),
    WithoutShift: ("LuminaRMSNormZero", 1),
    RMSContinuous: ("AdaLayerNormContinuous", 1),
    Shared: ("AdaLayerNorm", 1),
}
cases = pytest.mark.parametrize("cls", CASES)


def make_inputs(cls, dtype=F64, embedding_dtype=None, batch=2, rows=5):
    """Return an input for each parameter of forward that has no None as default, or is an embedding."""
    names = [name for name in inspect.signature(cls.forward).parameters if name not in ("self", "timestep")]
    names = [name for name in names if name not in ("class_labels", "hidden_dtype")]
    inputs = {name: torch.randn(batch, rows, WIDTH).to(dtype) for name in names[:-1]}
    return inputs | {names[-1]: torch.randn(*([] if cls is Shared else [batch]), 4).to(embedding_dtype or dtype)}


def converted_block(cls):
    register_conversion(cls)
    original = randomize(cls().double())
    block = copy.deepcopy(original)
    report = convert(block)
    assert sorted(report.replaced) == ["", "norm"] and not report.skipped
    return original, block


def results(block, inputs):
    """Return the outputs and the gradients of inputs and parameters."""
    inputs = {name: tensor.detach().clone().requires_grad_() for name, tensor in inputs.items()}
    outputs = block(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    dys = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y) for y in outputs]
    return outputs + torch.autograd.grad(outputs, [*inputs.values(), *block.parameters()], dys, materialize_grads=True)


def assert_equal(block, original, inputs):
    for actual, expected in zip(results(block, inputs), results(original, inputs), strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)  # some fifty roundings of 1e-16


@cases
def test_outputs_and_gradients_match_in_one_call_for_each_modulation(cls):
    original, block = converted_block(cls)
    form, calls = CASES[cls]
    assert type(block) is getattr(_adaptive, form) and isinstance(block.norm, (LayerNorm, RMSNorm))
    assert list(block.state_dict()) == list(original.state_dict())
    inputs = make_inputs(cls)
    assert_equal(block, original, inputs)
    with Fused() as fused:
        block(**inputs)
    assert fused.calls == calls and (cls is Shared or fused.modulated == calls)


def test_a_norm_without_parameters_takes_no_other_operator():
    _, block = converted_block(Single)
    block.linear = block.silu = torch.nn.Identity()
    x, chunks = torch.randn(2, 5, WIDTH), torch.randn(2, 3 * WIDTH)
    with Fused() as fused:
        block(x, chunks)
    assert fused.calls == 1 and not fused.others


@cases
def test_output_dtypes_are_kept_for_all_dtypes(cls):
    original, block = converted_block(cls)
    accepted = 0
    for x_dtype, dtype in itertools.product((F64, F32, F16, BF16), repeat=2):
        inputs = make_inputs(cls, x_dtype, dtype)
        try:
            expected = copy.deepcopy(original).to(dtype)(**inputs)
        except RuntimeError:  # torch's LayerNorm and Linear refuse mixed dtypes
            continue
        accepted += 1
        actual = copy.deepcopy(block).to(dtype)(**inputs)
        # Each rounds some five times to the narrowest dtype.
        tolerance = 5 * max(torch.finfo(each).eps for each in (x_dtype, dtype)) + 1e-6
        for mine, theirs in zip(*((y if isinstance(y, tuple) else (y,)) for y in (actual, expected)), strict=True):
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    assert accepted >= 4


@cases
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_the_result_is_as_exact_as_the_original(cls, dtype):
    """Also where the parameters of the norm are multiplied by the scale."""
    blocks = [block.to(dtype) for block in converted_block(cls)]
    *rows, embedding = make_inputs(cls, dtype)
    inputs = {name: torch.randn(2, 500, WIDTH).to(dtype) for name in rows}
    size = (blocks[0].linear.out_features,) if cls is Shared else (2, blocks[0].linear.out_features)
    inputs[embedding] = torch.randn(size).to(dtype)
    for block in blocks:
        block.linear = torch.nn.Identity()  # whose roundings are no part of the comparison
        block.silu = torch.nn.Identity()
    exact = copy.deepcopy(blocks[0]).double()(**{name: tensor.double() for name, tensor in inputs.items()})
    first = [y[0] if isinstance(y, tuple) else y for y in (exact, *(block(**inputs) for block in blocks))]
    original, ours = ((y.double() - first[0]).square().mean().sqrt() for y in first[1:])
    assert ours <= 1.05 * original  # the mean of 8000 errors varies by about 1 %


@cases
def test_arguments_keep_their_names_in_copies_and_tools_until_reverted(cls):
    original, block = converted_block(cls)
    assert [(p.name, p.default) for p in inspect.signature(block.forward).parameters.values()] == [
        (p.name, p.default) for p in inspect.signature(original.forward).parameters.values()
    ]
    inputs = make_inputs(cls)
    compiled = torch.compile(copy.deepcopy(block), backend="aot_eager", fullgraph=True)
    for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), compiled):
        assert_equal(copied, original, inputs)
    exported = torch.export.export(block, (), inputs).module()
    torch.testing.assert_close(exported(**inputs), block(**inputs), rtol=1e-13, atol=1e-13)
    for copied in (copy.deepcopy(block), block):
        revert(copied)
        assert type(copied) is cls and type(copied.norm) is type(original.norm)
        torch.testing.assert_close(copied(**inputs), original(**inputs), rtol=0, atol=0)


@cases
def test_graphs_of_fx(cls):
    original, block = converted_block(cls)
    inputs = make_inputs(cls)
    graph = torch.fx.symbolic_trace(block)
    for traced in (graph, pickle.loads(pickle.dumps(graph))):
        torch.testing.assert_close(traced(**inputs), original(**inputs), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("operators", ["kernel", "aten"])
@cases
def test_exported_programs_take_any_batch_and_number_of_rows(cls, operators):
    original, block = converted_block(cls)
    inputs, others = make_inputs(cls), make_inputs(cls, batch=WIDTH, rows=WIDTH)
    *names, embedding = inputs
    batch = torch.export.Dim("batch")
    sizes = {name: {0: batch, 1: torch.export.Dim(f"rows_of_{name}")} for name in names}
    sizes[embedding] = {} if cls is Shared else {0: batch}
    with trace_as(operators):
        program = torch.export.export(block, (), inputs, dynamic_shapes=sizes).module()
    torch.testing.assert_close(program(**others), original(**others), rtol=1e-13, atol=1e-13)


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.parametrize("operators", ["kernel", "aten"])
@cases
def test_traced_blocks_take_other_sizes(cls, operators):
    original, block = converted_block(cls)
    with trace_as(operators):
        traced = torch.jit.trace(block, example_kwarg_inputs=make_inputs(cls))
    others = make_inputs(cls, batch=3, rows=7)
    torch.testing.assert_close(traced(**others), original(**others), rtol=1e-13, atol=1e-13)


def test_compiled_graphs_of_dynamic_shapes():
    original, block = converted_block(Continuous)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for size in (2, 3, 5):
        x, condition = torch.randn(size, 7, WIDTH, dtype=F64), torch.randn(size, 4, dtype=F64)
        torch.testing.assert_close(compiled(x, condition), original(x, condition), rtol=1e-13, atol=1e-13)


class Embedding(torch.nn.Module):
    def forward(self, timestep, class_labels, hidden_dtype=None):
        return (timestep[:, None] + 2 * class_labels[:, None] * torch.ones(4)).to(hidden_dtype)


def test_a_block_may_embed_the_condition_itself():
    register_conversion(Zero)
    original = randomize(Zero())
    original.emb = Embedding()
    block = copy.deepcopy(original)
    assert len(convert(block).replaced) == 2
    inputs = torch.randn(2, 5, WIDTH), torch.tensor([1, 2]), torch.tensor([3, 4])
    for actual, expected in zip(block(*inputs, F32), original(*inputs, F32), strict=True):
        torch.testing.assert_close(actual, expected)  # torch's tolerances for float32


@pytest.mark.parametrize("cls", [Zero, Continuous])
@pytest.mark.parametrize("shape", [(1, 5, WIDTH), (3, 2, 5, WIDTH), (3, 1, 5, WIDTH), (5, WIDTH), (2, 0, WIDTH)])
def test_sizes_broadcast_as_in_the_original(cls, shape):
    """The scale is [2, 1, WIDTH]: it belongs to the last dimensions, and may have a batch that the input lacks."""
    original, block = converted_block(cls)
    x, *others = make_inputs(cls)
    inputs = {x: torch.randn(shape, dtype=F64), others[-1]: torch.randn(2, 4, dtype=F64)}
    assert_equal(block, original, inputs)


def test_nested_tensors():
    original, block = converted_block(Continuous)
    x = torch.nested.nested_tensor([torch.randn(n, WIDTH, dtype=F64) for n in (3, 5)], layout=torch.jagged)
    condition = torch.randn(2, 4, dtype=F64)
    actual, expected = block(x, condition), original(x, condition)
    torch.testing.assert_close(actual.values(), expected.values(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("cls", [Zero, Continuous])
def test_sizes_that_do_not_fit_are_refused(cls):
    _, block = converted_block(cls)
    x, *others = make_inputs(cls)
    with pytest.raises(RuntimeError, match="broadcast"):
        block(**{x: torch.randn(3, 5, WIDTH, dtype=F64), others[-1]: torch.randn(2, 4, dtype=F64)})
    with pytest.raises(RuntimeError, match="normalized_shape"):
        block(**{x: torch.randn(2, 5, 2 * WIDTH, dtype=F64), others[-1]: torch.randn(2, 4, dtype=F64)})


# Tools that observe or replace parts of a block


def observe(kind, module, calls):
    if kind == "forward":
        module.register_forward_hook(lambda *_: calls.append(kind))
    elif kind == "forward_pre":
        module.register_forward_pre_hook(lambda *_: calls.append(kind))
    elif kind == "backward":
        module.register_full_backward_hook(lambda *_: calls.append(kind))
    elif kind == "backward_pre":
        module.register_full_backward_pre_hook(lambda *_: calls.append(kind))
    else:
        forward = module.forward
        module.forward = lambda *args, **kwargs: calls.append(kind) or forward(*args, **kwargs)


@pytest.mark.parametrize("part", ["block", "norm"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "backward", "backward_pre", "replaced forward"])
def test_hooks_are_called_and_may_come_later(part, kind):
    original, block = converted_block(Single)
    calls = []
    observe(kind, block if part == "block" else block.norm, calls)
    assert_equal(block, original, make_inputs(Single))
    assert calls == [kind]


@pytest.mark.parametrize("cls", [TwoNorms, WithEncoder])
@pytest.mark.parametrize("compiles", [False, True])
def test_hooks_of_all_modules_see_each_call_of_the_norm(cls, compiles):
    """The hook changes the result, so that compiled code cannot leave it out."""
    original, block = converted_block(cls)
    calls, inputs = [], make_inputs(cls)

    def hook(module, args, output):
        if module in (original.norm, block.norm):
            calls.append(module)
            return 2 * output

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        expected = original(**inputs)
        count = len(calls)
        calls.clear()
        actual = (torch.compile(block, backend="eager") if compiles else block)(**inputs)
    finally:
        handle.remove()
    assert len(calls) == count
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


def test_hooks_are_kept_but_not_called_by_the_comparison():
    register_conversion(Single)
    block, calls = Single(), []
    for module in (block, block.norm, block.linear, block.silu):
        observe("forward", module, calls)
        observe("forward_pre", module, calls)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: calls.append("global"))
    before = [snapshot(module) for module in block.modules()]
    assert len(convert(block).replaced) == 2 and not calls
    handle.remove()
    revert(block)
    assert [snapshot(module) for module in block.modules()] == before


class Double(torch.nn.Module):
    def forward(self, x):
        return 2 * x


def replace(block):
    block.norm = Double()


def parametrize(block):
    torch.nn.utils.parametrize.register_parametrization(block.norm, "weight", Double())


@pytest.mark.parametrize("change", [replace, parametrize, lambda block: revert(block.norm)])
def test_a_norm_that_changes_later_is_called(change):
    original, block = converted_block(Continuous)
    for each in (original, block):
        change(each)
    assert_equal(block, original, make_inputs(Continuous))


def test_linear_layers_may_be_replaced_later():
    original, block = converted_block(Single)
    for each in (original, block):
        each.linear = torch.nn.Sequential(each.linear, Double())
    assert_equal(block, original, make_inputs(Single))


class Checkpointed(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, **inputs):
        return checkpoint(self.block, **inputs, use_reentrant=False)


@cases
def test_checkpoints(cls):
    original, block = converted_block(cls)
    assert_equal(Checkpointed(block), Checkpointed(original), make_inputs(cls))


@cases
def test_autocast(cls):
    original, block = converted_block(cls)
    inputs = make_inputs(cls, F32)
    with torch.autocast("cpu", BF16):
        actual, expected = block.float()(**inputs), original.float()(**inputs)
    for mine, theirs in zip(*((y if isinstance(y, tuple) else (y,)) for y in (actual, expected)), strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)  # five roundings of 2^-8


def test_the_meta_device():
    register_conversion(Continuous)
    original, inputs = Continuous(), make_inputs(Continuous, F32).values()
    with torch.device("meta"):
        block = Continuous()
        assert len(convert(block).replaced) == 2
        assert block(torch.randn(2, 5, WIDTH), torch.randn(2, 4)).is_meta
    block.to_empty(device="cpu").load_state_dict(original.state_dict())
    torch.testing.assert_close(block(*inputs), original(*inputs))  # torch's tolerances for float32


def test_shared_blocks_and_tied_parameters():
    register_conversion(Single)
    first, second = Single(), Single()
    second.linear.weight = first.linear.weight
    model = torch.nn.ModuleList([first, second, first])
    assert list(convert(model).replaced) == ["0", "0.norm", "1", "1.norm"]
    assert model[0] is model[2] is first and second.linear.weight is first.linear.weight


def test_a_norm_that_is_shared_by_blocks_and_the_model():
    register_conversion(Single)
    model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(WIDTH), "first": Single(), "second": Single()})
    model["first"].norm = model["second"].norm = model["norm"]
    report = convert(model)
    assert list(report.replaced) == ["norm", "first", "second"] and not report.skipped


def test_a_context_converts_blocks_for_a_time():
    register_conversion(Single)
    block = Single()
    with converted(block) as report:
        assert list(report.replaced) == ["", "norm"] and type(block) is _adaptive.AdaLayerNormZeroSingle
    assert type(block) is Single and type(block.norm) is torch.nn.LayerNorm


def test_norms_of_this_package_suffice():
    register_conversion(Single)
    block, calls = Single(), []
    convert(block.norm)
    observe("forward", block.norm, calls)
    assert list(convert(block).replaced) == [""] and not convert(block).replaced and not calls


# Blocks that compute something else


def swaps_scale_and_shift(self, x, emb=None):
    scale, shift, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
    return self.norm(x) * (1 + scale[:, None]) + shift[:, None], gate


def swaps_outputs(self, x, emb=None):
    return Single.forward(self, x, emb)[::-1]


def adds_another_constant(self, x, emb=None):
    shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
    return self.norm(x) * (1.001 + scale[:, None]) + shift[:, None], gate


def projects_without_silu(self, x, emb=None):
    shift, scale, gate = self.linear(emb).chunk(3, dim=1)
    return self.norm(x) * (1 + scale[:, None]) + shift[:, None], gate


def projects_before_silu(self, x, emb=None):
    shift, scale, gate = self.silu(self.linear(emb)).chunk(3, dim=1)
    return self.norm(x) * (1 + scale[:, None]) + shift[:, None], gate


def normalizes_twice(self, x, emb=None):
    return Single.forward(self, self.norm(x + 1e-2 * x.sin()), emb)


def detaches_the_scale(self, x, emb=None):
    shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
    return self.norm(x) * (1 + scale[:, None]).detach() + shift[:, None], gate


def returns_the_dtype_of_the_input(self, x, emb=None):
    y, gate = Single.forward(self, x, emb)
    return y.to(x.dtype), gate


def returns_one_tensor(self, x, emb=None):
    return Single.forward(self, x, emb)[0]


def reads_a_weight(self, x, emb=None):
    return Single.forward(self, x, emb.to(self.linear.weight.dtype))


def takes_other_arguments(self, x, emb):
    return Single.forward(self, x, emb)


SKIPPED = {
    swaps_scale_and_shift: "output 0 differs by",
    swaps_outputs: "output 0 is torch.float64 of size",
    adds_another_constant: "output 0 differs by",
    projects_without_silu: "output 0 differs by",
    projects_before_silu: "output 0 differs by",
    normalizes_twice: "output 0 differs by",
    detaches_the_scale: "gradient of emb differs by",
    returns_the_dtype_of_the_input: "output 0 is torch.float32 of size",
    returns_one_tensor: "it returns",
    reads_a_weight: "it refuses every input: AttributeError",
    takes_other_arguments: "not AdaLayerNormShift",
}


@pytest.mark.parametrize("forward", SKIPPED)
def test_other_formulas_are_skipped_and_their_norms_are_replaced(forward):
    cls = type("Lookalike", (Single,), {"forward": forward})
    register_conversion(cls)
    block = cls()
    report = convert(block)
    assert list(report.replaced) == ["norm"] and SKIPPED[forward] in report.skipped[""]
    assert type(block) is cls


def test_blocks_are_skipped_whose_norm_or_class_cannot_be_replaced():
    register_conversion(Single)
    block = Single()
    block.norm = torch.nn.LayerNorm((5, WIDTH))
    assert "its norm normalizes over 2 dimensions" in convert(block).skipped[""]
    block = Single()
    block.norm = torch.nn.Identity()
    assert "its norm is not replaced" in convert(block).skipped[""]
    block = Single()
    block.norm.forward = lambda x: x
    assert sorted(convert(block).skipped) == ["", "norm"]
    block = Single()
    block.forward = lambda x, emb: (x, emb)
    assert "its forward was replaced" in convert(block).skipped[""]
    del block.norm
    del block.forward
    assert "its norm is not replaced" in convert(block).skipped[""]
    with_slots = type("WithSlots", (Single,), {"__slots__": ("extra",)})
    register_conversion(with_slots)
    assert "its class cannot change" in convert(with_slots()).skipped[""]


def test_subclasses_are_reported_and_other_modules_are_not():
    register_conversion(Single)

    class Subclass(Single):
        pass

    class Other(Single):
        def forward(self, x, y, z):
            return x

    model = torch.nn.ModuleList([Subclass(), Other(), torch.nn.Sequential(torch.nn.Linear(2, 2))])
    report = convert(model)
    assert list(report.skipped) == ["0", "1"] and list(report.replaced) == ["0.norm", "1.norm"]
    assert all("not registered" in reason for reason in report.skipped.values())
    register_conversion(Other)
    assert "its forward has other parameters" in convert(Other()).skipped[""]


def test_equal_blocks_are_compared_once(monkeypatch):
    register_conversion(Single)
    calls, difference = [], conversion_module.block_difference
    monkeypatch.setattr(conversion_module, "block_difference", lambda *args: calls.append(args) or difference(*args))
    blocks = [Single() for _ in range(4)]
    blocks[3].norm.eps = 0.1
    assert len(convert(torch.nn.ModuleList(blocks)).replaced) == 8
    assert len(calls) == 2


# Classes and models of packages

NORMALIZATION, TRANSFORMERS = "diffusers.models.normalization", "diffusers.models.transformers"
OMNI = "transformers.models.qwen2_5_omni.modeling_qwen2_5_omni"
TIMES = torch.tensor([1, 2])
LABELED = {"timestep": TIMES, "class_labels": TIMES, "hidden_dtype": F64}
# Class -> the arguments of some blocks, each with its inputs that are no rows, or their shapes.
BLOCKS = {
    f"{NORMALIZATION}.AdaLayerNorm": [
        ((8, 10), {"timestep": torch.tensor(1)}),
        ((8, None, 16, False, 1e-5, 1), {"temb": (2, 8)}),
        ((8, None, 16, True, 1e-5, 1), {"temb": (2, 8)}),
    ],
    f"{NORMALIZATION}.AdaLayerNormContinuous": [
        ((8, 6, *options), {"conditioning_embedding": (2, 6)})
        for options in ((), (False,), (True, 1e-5, False), (True, 1e-5, True, "rms_norm"))
    ],
    f"{NORMALIZATION}.AdaLayerNormZero": [
        ((8,), {"emb": (2, 8)}),
        ((8, 10), LABELED),
        ((8, None, "fp32_layer_norm", False), {"emb": (2, 8)}),
    ],
    f"{NORMALIZATION}.AdaLayerNormZeroSingle": [((8,), {"emb": (2, 8)})],
    f"{NORMALIZATION}.CogVideoXLayerNormZero": [((6, 8), {"temb": (2, 6)}), ((6, 8, False), {"temb": (2, 6)})],
    f"{NORMALIZATION}.CogView3PlusAdaLayerNormZeroTextImage": [((6, 8), {"emb": (2, 6)})],
    f"{NORMALIZATION}.LuminaLayerNormContinuous": [
        ((8, 6, *options), {"conditioning_embedding": (2, 6)})
        for options in ((), (False, 1e-6, True, "rms_norm", 4), (True, 1e-6, True, "rms_norm"))
    ],
    f"{NORMALIZATION}.LuminaRMSNormZero": [((8, 1e-5, True), {"emb": (2, 8)})],
    f"{NORMALIZATION}.SD35AdaLayerNormZeroX": [((8,), {"emb": (2, 8)})],
    f"{TRANSFORMERS}.hunyuan_transformer_2d.AdaLayerNormShift": [
        ((8,), {"emb": (2, 8)}),
        ((8, False), {"emb": (2, 8)}),
    ],
    f"{TRANSFORMERS}.transformer_chroma.ChromaAdaLayerNormContinuousPruned": [((8, 8, False), {"emb": (2, 2, 8)})],
    f"{TRANSFORMERS}.transformer_chroma.ChromaAdaLayerNormZeroPruned": [((8,), {"emb": (2, 6, 8)})],
    f"{TRANSFORMERS}.transformer_chroma.ChromaAdaLayerNormZeroSinglePruned": [((8,), {"emb": (2, 3, 8)})],
    f"{TRANSFORMERS}.transformer_cogview4.CogView4AdaLayerNormContinuous": [
        ((8, 6, False), {"conditioning_embedding": (2, 6)})
    ],
    f"{TRANSFORMERS}.transformer_cogview4.CogView4AdaLayerNormZero": [((6, 8), {"temb": (2, 6)})],
    f"{TRANSFORMERS}.transformer_cosmos.CosmosAdaLayerNorm": [
        ((8, 4), {"embedded_timestep": (2, 8)}),
        ((8, 4), {"embedded_timestep": (2, 5, 8), "temb": (2, 5, 24)}),
    ],
    f"{TRANSFORMERS}.transformer_cosmos.CosmosAdaLayerNormZero": [
        ((8, 4), {"embedded_timestep": (2, 8)}),
        ((8, 4), {"embedded_timestep": (2, 5, 8), "temb": (2, 5, 24)}),
    ],
    f"{TRANSFORMERS}.transformer_easyanimate.EasyAnimateLayerNormZero": [((6, 8), {"temb": (2, 6)})],
    f"{TRANSFORMERS}.transformer_flux3.Flux3AdaLayerNorm": [((8,), {"temb": (2, 5, 8)})],
    f"{TRANSFORMERS}.transformer_glm_image.GlmImageAdaLayerNormContinuous": [
        ((8, 6, False), {"conditioning_embedding": (2, 6)})
    ],
    f"{TRANSFORMERS}.transformer_glm_image.GlmImageAdaLayerNormZero": [((6, 8), {"temb": (2, 6)})],
    f"{TRANSFORMERS}.transformer_longcat_audio_dit.AudioDiTAdaLayerNormZeroFinal": [
        ((8,), {"embedding": (2, 8)}),
        ((8,), {"embedding": (2, 5, 8)}),
    ],
    f"{TRANSFORMERS}.transformer_mochi.MochiRMSNormZero": [((6, 32), {"emb": (2, 6)})],
    f"{OMNI}.Qwen2_5_OmniAdaLayerNormZero": [((8,), {"emb": (2, 8)})],
    f"{OMNI}.Qwen2_5_OmniAdaLayerNormZero_Final": [((8,), {"emb": (2, 8)})],
}
ROWS = ("x", "hidden_states", "encoder_hidden_states", "context")


def make_block(path, arguments):
    module, _, name = path.rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    return getattr(importlib.import_module(module), name)(*arguments)


def is_traceable(block):
    """Return whether torch.fx can trace a block, which it cannot if the number of dimensions matters."""
    try:
        torch.fx.symbolic_trace(block)
    except (torch.fx.proxy.TraceError, RuntimeError):
        return False
    return True


@pytest.mark.integration
@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("path", BLOCKS)
def test_blocks_of_packages_are_replaced_and_restored(path):
    for arguments, others in BLOCKS[path]:
        block = randomize(make_block(path, arguments).double()).eval()  # without dropped labels
        traceable = is_traceable(block)
        names = [name for name in inspect.signature(block.forward).parameters if name in ROWS]
        inputs = {name: torch.randn(2, 5, 8, dtype=F64) for name in names}
        inputs |= {k: torch.randn(v, dtype=F64) if isinstance(v, tuple) else v for k, v in others.items()}
        before, expected = [snapshot(module) for module in block.modules()], block(**inputs)
        report = convert(block)
        assert not report.skipped and isinstance(block, _adaptive.Block), report
        assert is_traceable(block) or not traceable
        with Fused() as fused:
            actual = block(**inputs)
        assert fused.calls in (1, 2)
        # Some blocks convert to float32, and round numbers of size 4 some ten times by 6e-8.
        torch.testing.assert_close(actual, expected, rtol=0, atol=4e-6)
        revert(block)
        assert [snapshot(module) for module in block.modules()] == before


@pytest.mark.integration
@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("path", BLOCKS)
def test_blocks_of_packages_with_all_dtypes_of_rows(path, hooked):
    """Both rows of a block may have dtypes of their own. A hook makes the block call its norm."""
    arguments, others = BLOCKS[path][-1]
    original = randomize(make_block(path, arguments)).eval()
    block, accepted = copy.deepcopy(original), 0
    assert not convert(block).skipped
    for norm in [module for module in block.modules() if hooked and isinstance(module, (LayerNorm, RMSNorm))]:
        observe("forward", norm, [])
    names = [name for name in inspect.signature(block.forward).parameters if name in ROWS]
    for dtype, *dtypes in itertools.product((F32, BF16), *([(F32, BF16)] * len(names))):
        inputs = {name: torch.randn(2, 5, 8).to(each) for name, each in zip(names, dtypes, strict=True)}
        inputs |= {k: torch.randn(v).to(dtype) if isinstance(v, tuple) else v for k, v in others.items()}
        try:
            expected = copy.deepcopy(original).to(dtype)(**inputs)
        except RuntimeError:  # torch's LayerNorm and Linear refuse mixed dtypes
            continue
        accepted += 1
        actual = copy.deepcopy(block).to(dtype)(**inputs)
        for mine, theirs in zip(*((y if isinstance(y, tuple) else (y,)) for y in (actual, expected)), strict=True):
            # The original rounds norm, 1 + scale, product and sum to bfloat16, by 2^-9 of numbers up to 4. Mochi's
            # rounds only the result, to one of two neighbors.
            narrowest = BF16 if BF16 in (dtype, *dtypes) and "Mochi" not in path else mine.dtype
            tolerance = {F32: 1e-6, BF16: 2**-6}[narrowest]
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    assert accepted >= 2


@pytest.mark.integration
@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize(
    ("path", "arguments"),
    [
        (f"{NORMALIZATION}.AdaGroupNorm", (8, 8, 2)),
        (f"{NORMALIZATION}.AdaLayerNormSingle", (12,)),
        (f"{TRANSFORMERS}.transformer_hunyuan_video.HunyuanVideoAdaNorm", (8,)),
    ],
)
def test_blocks_without_a_norm_of_rows_are_not_reported(path, arguments):
    report = convert(make_block(path, arguments))
    assert not report.replaced and not report.skipped


def test_the_document_lists_these_classes():
    text = (Path(__file__).resolve().parents[1] / "docs/convert.md").read_text()
    (table,) = re.findall(r"\| adaptive blocks .*\n\|.*\n((?:\|.*\n)+)", text)
    names = re.findall(r"`(\w+Norm\w*)`", table)
    assert sorted(names) == sorted(path.rpartition(".")[2] for path in BLOCKS)


def latents(*shape):
    return torch.randn(2, *shape, dtype=F64)


SIZES = {name: torch.tensor([[8, 8], [8, 8]]) for name in ("original_size", "target_size", "crop_coords")}
TWO_LAYERS = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "patch_size": 2}
IMAGES = TWO_LAYERS | {"sample_size": 8, "out_channels": 4}
FLUX = TWO_LAYERS | {"patch_size": 1, "num_single_layers": 2, "joint_attention_dim": 12}
COGVIEW = IMAGES | {"text_embed_dim": 12, "time_embed_dim": 6, "condition_dim": 2, "pos_embed_max_size": 8}
LUMINA = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 2}
LUMINA |= {"num_attention_heads": 3, "num_kv_heads": 1}
TEXT = ("encoder_hidden_states", (5, 12))
ROWS_AND_TEXT = {"hidden_states": (6, 4), "encoder_hidden_states": (5, 12)}
IMAGE_AND_TEXT = {"hidden_states": (4, 8, 8), "encoder_hidden_states": (5, 12)}
IDS = {"img_ids": torch.zeros(6, 3), "txt_ids": torch.zeros(5, 3)}

# Model -> its options, the shapes of its inputs, other inputs, its blocks, and the calls that modulate.
MODELS = {
    "DiTTransformer2DModel": (
        IMAGES | {"num_embeds_ada_norm": 10},
        {"hidden_states": (4, 8, 8)},
        {"timestep": TIMES, "class_labels": TIMES},
        {"AdaLayerNormZero": 2},
        2,
    ),
    "PixArtTransformer2DModel": (  # modulates in its blocks, not in a module
        IMAGES | {"cross_attention_dim": 16, "caption_channels": 12, "use_additional_conditions": False},
        IMAGE_AND_TEXT,
        {"timestep": TIMES, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
        {},
        0,
    ),
    "SD3Transformer2DModel": (
        IMAGES
        | {"joint_attention_dim": 12, "caption_projection_dim": 16, "pooled_projection_dim": 6}
        | {"pos_embed_max_size": 8, "dual_attention_layers": (0,), "qk_norm": "rms_norm"},
        IMAGE_AND_TEXT | {"pooled_projections": (6,)},
        {"timestep": TIMES},
        {"SD35AdaLayerNormZeroX": 1, "AdaLayerNormZero": 2, "AdaLayerNormContinuous": 2},
        6,
    ),
    "FluxTransformer2DModel": (
        FLUX | {"pooled_projection_dim": 6, "axes_dims_rope": (2, 2, 4)},
        ROWS_AND_TEXT | {"pooled_projections": (6,)},
        {"timestep": TIMES, **IDS},
        {"AdaLayerNormZero": 4, "AdaLayerNormZeroSingle": 2, "AdaLayerNormContinuous": 1},
        7,
    ),
    "ChromaTransformer2DModel": (
        FLUX
        | {"attention_head_dim": 16, "axes_dims_rope": (4, 4, 8)}
        | {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        ROWS_AND_TEXT,
        {"timestep": TIMES, **IDS},
        {"ChromaAdaLayerNormZeroPruned": 4, "ChromaAdaLayerNormZeroSinglePruned": 2}
        | {"ChromaAdaLayerNormContinuousPruned": 1},
        7,
    ),
    "CogVideoXTransformer3DModel": (
        TWO_LAYERS
        | {"out_channels": 4, "time_embed_dim": 6, "text_embed_dim": 12, "max_text_seq_length": 5}
        | {"sample_width": 8, "sample_height": 8, "sample_frames": 5},
        {"hidden_states": (2, 4, 8, 8), "encoder_hidden_states": (5, 12)},
        {"timestep": TIMES},
        {"CogVideoXLayerNormZero": 4, "AdaLayerNorm": 1},
        9,
    ),
    "CogView3PlusTransformer2DModel": (
        COGVIEW,
        IMAGE_AND_TEXT,
        {"timestep": TIMES, **SIZES},
        {"CogView3PlusAdaLayerNormZeroTextImage": 2, "AdaLayerNormContinuous": 1},
        5,
    ),
    "CogView4Transformer2DModel": (
        COGVIEW | {"rope_axes_dim": (8, 8)},
        IMAGE_AND_TEXT,
        {"timestep": TIMES, **SIZES},
        {"CogView4AdaLayerNormZero": 2, "CogView4AdaLayerNormContinuous": 1},
        5,
    ),
    "Lumina2Transformer2DModel": (
        LUMINA
        | {"num_refiner_layers": 1, "multiple_of": 2, "scaling_factor": 1.0, "cap_feat_dim": 12}
        | {"axes_dim_rope": (4, 2, 2), "axes_lens": (16, 16, 16)},
        IMAGE_AND_TEXT,
        {"timestep": TIMES, "encoder_attention_mask": torch.ones(2, 5, dtype=torch.bool)},
        {"LuminaRMSNormZero": 3, "LuminaLayerNormContinuous": 1},
        4,
    ),
    "LuminaNextDiT2DModel": (
        LUMINA | {"multiple_of": 16, "cross_attention_dim": 12, "learn_sigma": False, "qk_norm": True},
        IMAGE_AND_TEXT,
        {"timestep": TIMES, "encoder_mask": torch.ones(2, 5), "cross_attention_kwargs": {}}
        | {"image_rotary_emb": torch.polar(torch.ones(8, 8, 4), torch.linspace(0, 3, 256).view(8, 8, 4))},
        {"LuminaRMSNormZero": 2, "LuminaLayerNormContinuous": 1},
        3,
    ),
}


def output_and_gradients(model, inputs, dtype):
    inputs = {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.dtype == F64 else v for k, v in inputs.items()}
    torch.manual_seed(1)  # for the labels that DiT drops
    output = model.to(dtype)(**inputs, return_dict=False)[0]
    loss = output.flatten() @ torch.linspace(-1, 1, output.numel(), dtype=dtype)
    gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    names = (name for name, _ in model.named_parameters())
    return {"output": output.detach(), **dict(zip(names, gradients, strict=True))}


@pytest.mark.integration
@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_diffusers(name):
    diffusers = pytest.importorskip("diffusers")
    options, shapes, others, blocks, calls = MODELS[name]
    model = randomize(getattr(diffusers, name)(**options).double())
    inputs = {key: latents(*shape) for key, shape in shapes.items()} | others
    original = copy.deepcopy(model)
    report = convert(model)
    found = Counter(type(module).__name__ for module in model.modules() if isinstance(module, _adaptive.Block))
    assert not report.skipped and found == blocks
    assert model.state_dict().keys() == original.state_dict().keys()
    with Fused() as fused:
        model(**inputs)
    assert fused.modulated == calls

    # Some models convert to float32 within; the largest observed errors are 4e-7, and 9e-15 in the others. Float32
    # rounds each of some hundred operations by 6e-8; the largest observed error is 6e-6.
    for dtype, tolerance in ((F64, 2e-6), (F32, 2e-5)):
        actual, expected = (output_and_gradients(each, inputs, dtype) for each in (model, original))
        assert_close(actual, expected, tolerance)
    revert(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]
