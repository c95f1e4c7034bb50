"""The pass that joins norms with their neighbors in compiled graphs."""

import logging
import operator
import os
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import programs
from support.inputs import randn
from support.reference import BF16, F32, F64
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

import layernorm_ext
from layernorm_ext import fusion, trace_as
from layernorm_ext.fusion import fuse_neighbors

# A sum of 8 numbers below 100 in another order; everything else rounds alike in float64.
ANOTHER_ORDER = {"rtol": 1e-12, "atol": 1e-12}
norm, rms_norm = (
    partial(function, normalized_shape=(8,)) for function in (layernorm_ext.layer_norm, layernorm_ext.rms_norm)
)
needs_lists = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="this torch takes a single pass"
)


@pytest.fixture(autouse=True)
def forget_counts():
    fuse_neighbors.counts.clear()


def tensors(dtype=F64, shape=(2, 3, 8)):
    """Return x, residual, weight, bias, scale, shift and gate."""
    shapes = [shape, shape, (8,), (8,), *[(shape[0], *[1] * (len(shape) - 2), 8)] * 3]
    return [randn(size, dtype).requires_grad_() for size in shapes]


def outputs_and_gradients(function, arguments):
    """Return outputs, the arguments, which may have changed, and gradients; the function gets no leaves."""
    torch.manual_seed(0)
    copies = [t.clone() for t in arguments]
    outputs = function(*copies)
    results = [*(outputs if isinstance(outputs, tuple) else (outputs,)), *copies]
    roots = [t for t in results if t.requires_grad]
    weights = [torch.linspace(-1, 1, t.numel()).view(t.shape).to(t.dtype) for t in roots]
    return [*results, *torch.autograd.grad(roots, arguments, weights, materialize_grads=True)]


def assert_same(actual, expected, **tolerance):
    torch.testing.assert_close(actual, expected, check_stride=True, **(tolerance or ANOTHER_ORDER))


def compare(function, arguments=None, backend=fusion.eager, **options):
    """Compare a compiled function with the eager one and return what was joined."""
    arguments = tensors() if arguments is None else arguments
    compiled = torch.compile(function, backend=backend, **{"fullgraph": True} | options)
    assert_same(*(outputs_and_gradients(each, arguments) for each in (compiled, function)))
    return dict(fuse_neighbors.counts)


# Functions that are joined, of the arguments x, residual, weight, bias, scale, shift and gate.

ADD, GATE = {"add": 1}, {"gate and add": 1}
MODULATE, ADD_MODULATE, ALL = {"modulate": 1}, {"add and modulate": 1}, {"gate, add and modulate": 1}


def two(total, function=norm):
    return function(total), total


SUMS = {
    "x + r": lambda x, r, *_: two(x + r),
    "r + x": lambda x, r, *_: two(r + x),
    "torch.add": lambda x, r, *_: two(torch.add(x, other=r)),
    "Tensor.add": lambda x, r, *_: two(x.add(r, alpha=1)),
    "rms_norm": lambda x, r, *_: two(x + r, rms_norm),
    "parameters": lambda x, r, w, b, *_: two(x + r, partial(norm, weight=w, bias=b)),
    "parameters per sample": lambda x, r, w, b, s, h, g: two(x + r, partial(norm, weight=s, bias=b)),
    "the sum is not used again": lambda x, r, *_: norm(x + r),
    "many users of the sum": lambda x, r, *_: (*two(x + r), (x + r).sin(), x + r),
    "the sum of one tensor": lambda x, r, *_: two(x + x),
    "reshaped": lambda x, r, w, b, *_: two(x + r, lambda t: norm(t.view(3, 2, 8), weight=w)),
    "reshaped by sizes": lambda x, r, *_: two(x + r, lambda t: norm(t.reshape(t.size(0) * t.size(1), -1))),
    "the reshaped sum is used again": lambda x, r, *_: two((x + r).view(6, 8)),
    "conversions without effect": lambda x, r, *_: two((x.to(F64) + r.double()).contiguous().to(r.dtype).type_as(x)),
    "no_grad": lambda x, r, *_: within_no_grad(lambda: two(x + r)),
}
GATES = {
    "g * x + r": lambda x, r, w, b, s, h, g: two(g * x + r),
    "r + x * g": lambda x, r, w, b, s, h, g: two(r + x * g),
    "addcmul": lambda x, r, w, b, s, h, g: two(torch.addcmul(r, g, x)),
    "one gate for all rows": lambda x, r, w, *_: two(torch.mul(w, x).add(r)),
    "Tensor.multiply": lambda x, r, w, b, s, h, g: two(r + x.multiply(g)),
}
MODULATIONS = {
    "1 + s": lambda x, r, w, b, s, h, g: norm(x) * (1 + s) + h,
    "s + 1.0": lambda x, r, w, b, s, h, g: h + (s + 1.0) * norm(x),
    "Tensor.add and Tensor.mul": lambda x, r, w, b, s, h, g: norm(x).mul(s.add(1)).add(h),
    "addcmul": lambda x, r, w, b, s, h, g: torch.addcmul(h, norm(x), 1 + s),
    "unsqueeze": lambda x, r, w, b, s, h, g: norm(x) * (1 + s[:, 0]).unsqueeze(1) + h[:, 0].unsqueeze(1),
    "[:, None]": lambda x, r, w, b, s, h, g: norm(x) * (1 + s[:, 0])[:, None, :] + h[:, 0][:, None],
    "chunks": lambda x, r, w, b, s, h, g: norm(x) * (1 + torch.cat([s, h], 1).chunk(2, 1)[0]) + g,
    "without shift": lambda x, r, w, b, s, h, g: rms_norm(x) * (1 + s),
    "shared by all rows": lambda x, r, w, b, s, h, g: norm(x) * (1 + w) + b,
    "shift for all rows": lambda x, r, w, b, s, h, g: norm(x) * (1 + s) + b,
    "per position": lambda x, r, w, b, s, h, g: norm(x) * (1 + r[:1]) + r[1:],
    "per row": lambda x, r, w, b, s, h, g: norm(x) * (1 + r) + r,
    "the factor is used again": lambda x, r, w, b, s, h, g: (norm(x) * (f := 1 + s) + h, f),
}
BOTH = {
    "add": (lambda x, r, w, b, s, h, g: two(x + r, lambda t: norm(t) * (1 + s) + h), ADD_MODULATE),
    "gate": (lambda x, r, w, b, s, h, g: two(r + g * x, lambda t: norm(t) * (1 + s) + h), ALL),
    "one gate is also scale and shift": (
        lambda x, r, w, b, s, h, g: two(r + g * x, lambda t: norm(t) * (1 + g) + g),
        ALL,
    ),
    "the scale comes after a use of the sum": (
        lambda x, r, w, b, s, h, g: two(x + r, lambda t: norm(t) * (1 + t.mean(1, keepdim=True)) + h),
        ADD,
    ),
    "the sum is the scale": (lambda x, r, w, b, s, h, g: two(x + r, lambda t: norm(t) * (1 + t)), ADD),
    "a shift of other groups": (lambda x, r, w, b, s, h, g: norm(x) * (1 + s) + r[:1], MODULATE),
    "a residual behind the modulation": (lambda x, r, w, b, s, h, g: norm(x) * (1 + s) + r, MODULATE),
    "a gate of other groups": (
        lambda x, r, w, b, s, h, g: two(r[:1] * x + r, lambda t: norm(t) * (1 + s)),
        ADD_MODULATE,
    ),
    "reshaped, with a scale of all rows": (
        lambda x, r, w, b, s, h, g: two(x + r, lambda t: norm(t.view(3, 2, 8)) * (1 + w) + b),
        ADD_MODULATE,
    ),
    "reshaped, with a scale per sample": (
        lambda x, r, w, b, s, h, g: two(x + r, lambda t: norm(t.view(2, 1, 3, 8)) * (1 + s[:, None])),
        ADD,
    ),
    "two norms of a sum": (lambda x, r, w, b, s, h, g: (norm(t := x + r), rms_norm(t), t), ADD),
}
JOINED = {f"sum: {name}": (function, ADD) for name, function in SUMS.items()}
JOINED |= {f"gate: {name}": (function, GATE) for name, function in GATES.items()}
JOINED |= {f"modulation: {name}": (function, MODULATE) for name, function in MODULATIONS.items()} | BOTH


def within_no_grad(function):
    with torch.no_grad():
        return function()


@pytest.mark.parametrize("name", JOINED)
def test_neighbors_are_joined(name):
    function, expected = JOINED[name]
    assert compare(function) == expected


@pytest.mark.parametrize("name", ["sum: reshaped by sizes", "modulation: unsqueeze", *BOTH])
def test_any_batch_takes_one_graph_without_new_guards(name):
    function, expected = JOINED[name]
    assert compare(function, dynamic=True) == expected
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(fusion.eager)
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    unjoined = CompileCounterWithBackend("eager")
    original = torch.compile(lambda *arguments: function(*arguments), backend=unjoined, fullgraph=True, dynamic=True)
    for batch in (2, 3, 5, 4):
        arguments = tensors(shape=(batch, 3, 8))
        if name not in ("reshaped, with a scale per sample", "reshaped, with a scale of all rows"):
            assert_same(compiled(*arguments), original(*arguments))
    assert counter.frame_count == unjoined.frame_count


# Functions whose graph stays as it is, or is joined in part


def writes(change):
    """Return a function that changes the sum before the norm."""

    def function(x, r, *_):
        total = x + r
        change(total)
        return two(total)

    return function


def set_item(t):
    t[0] = 1


def behind(x, r, w, b, s, h, g):
    total = x + r
    y = norm(total.detach() + r)
    total.mul_(2)
    return y, total


def scale_changes(x, r, w, b, s, h, g):
    factor = 1 + s
    s.mul_(2)
    return norm(x) * factor + h


def factor_changes(x, r, w, b, s, h, g):
    factor = 1 + s
    factor.mul_(2)
    return norm(x) * factor + h


def saved_scale_changes(x, r, w, b, s, h, g):
    y = norm(x) * (1 + s) + h
    s.mul_(2)
    return y


def saved_scale_changes_by_numpy(x, r, w, b, s, h, g):
    y = norm(x) * (1 + s) + h
    array = s.detach().numpy()
    array += 1
    return y


def later_argument(x, r, w, b, s, h, g):
    """An early write must not get behind the call, whose last argument comes before it."""
    r = r.sin()
    x.mul_(2)
    return two(x + r)


def mode_changes(x, r, w, b, s, h, g):
    with torch.no_grad():
        total = x + r
    return norm(total) * (1 + s) + h, total


def autocast_changes(x, r, w, b, s, h, g):
    total = x + r
    with torch.autocast("cpu", BF16):
        return norm(total), total


def transposed_in_place(x, r, w, b, s, h, g):
    total = x + r
    total.transpose_(0, 1)
    return norm(total)


REFUSED = {
    "broadcast": lambda x, r, w, b, *_: two(x + w),
    "broadcast input": lambda x, r, w, b, s, *_: two(s + r),
    "scalar": lambda x, r, *_: two(x + 1.5),
    "alpha": lambda x, r, *_: two(torch.add(x, r, alpha=2)),
    "alpha of a method": lambda x, r, *_: two(x.add(r, alpha=2)),
    "value": lambda x, r, w, b, s, h, g: two(torch.addcmul(r, g, x, value=2)),
    "mixed dtypes": lambda x, r, *_: two(x + r.float()),
    "mixed dtypes of the input": lambda x, r, *_: two(x.float() + r),
    "strides of the sum": lambda x, r, *_: two(x.mT.contiguous().mT + r.mT.contiguous().mT),
    "write to the sum": writes(lambda t: t.mul_(2)),
    "write to a view of the sum": writes(lambda t: t[:, 0].zero_()),
    "item of the sum": writes(set_item),
    "dropout in place": writes(lambda t: F.dropout(t, 0.5, True, True)),
    "relu in place": writes(lambda t: F.relu(t, True)),
    "out=": writes(lambda t: torch.mul(t.detach(), 2, out=t.detach())),
    "iadd": writes(lambda t: operator.iadd(t, 1)),
    "bits as another dtype": lambda x, r, *_: norm((x.half() + r.half()).view(BF16)),
    "norm of another index": lambda x, r, *_: torch.ops.layernorm.forward.default(x + r, (8,))[2],
    "memory_efficient": lambda x, r, *_: two(x + r, partial(norm, memory_efficient=True)),
    "autocast": autocast_changes,
    "scale that changes": scale_changes,
    "factor that changes": factor_changes,
    "a scale that changes behind": saved_scale_changes,
    "a scale that an unknown function changes behind": saved_scale_changes_by_numpy,
    "norm with a weight": lambda x, r, w, b, s, h, g: norm(x, weight=w) * (1 + s) + h,
    "scale of another dtype": lambda x, r, w, b, s, h, g: norm(x) * (1 + s.float()) + h,
    "rounded factor": lambda x, r, w, b, s, h, g: norm(x) * (1 + s).float().double() + h,
    "[S, N]": lambda x, r, w, b, s, h, g: norm(x) * (1 + r[0]) + r[1],
    "another constant": lambda x, r, w, b, s, h, g: norm(x) * (2 + s) + h,
    "a scaled constant": lambda x, r, w, b, s, h, g: norm(x) * torch.add(1, s, alpha=2) + h,
    "output used twice": lambda x, r, w, b, s, h, g: ((y := norm(x)) * (1 + s) + h, y),
    "output times itself": lambda x, r, w, b, s, h, g: (y := norm(x)) * (1 + y),
    "transposed in place": transposed_in_place,
    "retain_grad": lambda x, r, *_: (norm(t := x + r), t.retain_grad(), t)[::2],
}
PARTS = {
    "two activations": (lambda x, r, w, b, s, h, g: two(x * r + x), ADD),
    "the product is used twice": (lambda x, r, w, b, s, h, g: (*two((p := g * x) + r), p), ADD),
    "the product is also the residual": (lambda x, r, w, b, s, h, g: two((p := g * x) + p), ADD),
    "integer gate": (lambda x, r, w, b, s, h, g: two((w > 0) * x + r), ADD),
    "the product of shift is used twice": (
        lambda x, r, w, b, s, h, g: ((p := norm(x) * (1 + s)) + h, p.sin()),
        MODULATE,
    ),
    "gradient mode": (mode_changes, MODULATE),
    "write behind": (behind, ADD),
    "write before": (later_argument, ADD),
}
LEFT = {name: (function, {}) for name, function in REFUSED.items()} | PARTS


@pytest.mark.parametrize("name", LEFT)
def test_others_stay_as_they_are(name):
    function, expected = LEFT[name]
    assert compare(function, fullgraph=name != "retain_grad") == expected


def waits(x, r):
    total = x + r
    torch.ops.streams.wait_stream(0, 1)
    return norm(total)


def on_another_stream(x, r):
    total = x + r
    with torch.fx.traceback.annotate({"stream": 1}):  # as Dynamo records torch.cuda.stream
        return norm(total)


@needs_lists
@pytest.mark.parametrize("function", [waits, on_another_stream])
def test_calls_stay_on_their_streams(function):
    """Without a GPU, the graphs are traced, but do not run."""
    pytest.importorskip("torch._dynamo.variables.streams")
    graphs = []

    def joined(module, example_inputs):
        graphs.append(module.graph)
        fuse_neighbors(module.graph)
        return lambda *inputs: inputs[:1]

    torch.compile(function, backend=joined, fullgraph=True)(*tensors()[:2])
    assert len(graphs) == 1 and not fuse_neighbors.counts


# Random programs. FUSION_PROGRAMS=20000 takes some minutes.

PROGRAMS = range(int(os.environ.get("FUSION_PROGRAMS", "300")))


def failure(seed):
    """Return how the results of a random program change where its norms are joined."""
    text = programs.source(seed)
    try:
        expected = programs.results_of(programs.build(text), seed)
    except RuntimeError:  # autograd refuses the program: it writes to what was saved
        return None
    try:
        actual = programs.results_of(fusion.eager(programs.graph_of(text, seed), ()), seed)
        for a, b in zip(actual, expected, strict=True):
            scale = max(1, b.abs().max().item()) if b.isfinite().all() else 1
            # Float32 conversions of numbers that differ by 1e-16 may round differently.
            tolerance = (1e-12 if b.dtype == F64 else 1e-6) * scale
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance, check_stride=True, equal_nan=True)
    except Exception as error:  # the message needs the program
        return f"{error}\nin program {seed}:\n{text}"
    return None


@pytest.mark.parametrize("first", range(0, len(PROGRAMS), 100))
def test_random_programs(first):
    failures = [failure(seed) for seed in PROGRAMS[first : first + 100]]
    assert not any(failures), "\n".join(filter(None, failures))
    assert fuse_neighbors.counts.total() >= min(30, len(PROGRAMS) / 4)  # 0.45 a program


# Where the pass is used


def block(x, r, w, b, s, h, g):
    return two(r + g * x, lambda t: norm(t) * (1 + s) + h)


@pytest.fixture
def log(caplog):
    """The lines of the pass at level INFO."""
    with caplog.at_level(logging.INFO, "layernorm_ext.fusion"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "layernorm_ext.fusion"]


@pytest.mark.parametrize("backward", [False, True], ids=["inference", "training"])
def test_an_option_of_inductor(backward, log):
    compiled = torch.compile(block, fullgraph=True, options={"pre_grad_custom_pass": fuse_neighbors})
    with torch._inductor.config.patch(force_disable_caches=True), torch.set_grad_enabled(backward):
        arguments = tensors()
        assert_same(compiled(*arguments), block(*arguments))
        if backward:
            assert_same(*(outputs_and_gradients(each, arguments) for each in (compiled, block)))
    assert log()[0] == "1 norms: gate, add and modulate 1"


@pytest.mark.parametrize(
    "passes", [fuse_neighbors, pytest.param([lambda graph: None, fuse_neighbors], marks=needs_lists)]
)
def test_the_configuration_of_inductor(passes):
    with torch._inductor.config.patch(pre_grad_custom_pass=passes, force_disable_caches=True):
        joined = compare(block, backend="inductor", mode="max-autotune-no-cudagraphs", dynamic=True)
    assert joined.keys() == ALL.keys()


def test_caches_know_the_pass(tmp_path, monkeypatch):
    """The same function is compiled with and without the pass, twice each."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = tensors()
    for passes in (None, fuse_neighbors, None, fuse_neighbors):
        torch._dynamo.reset()
        with torch._inductor.config.patch(pre_grad_custom_pass=passes), torch.no_grad():
            _, (code,) = run_and_get_code(torch.compile(block, fullgraph=True), *x)
        assert ("forward.fused(" in code) == (passes is not None)
    assert fuse_neighbors.uuid() == type(fuse_neighbors)().uuid() != None  # noqa: E711
    assert pickle.loads(pickle.dumps(fuse_neighbors)).uuid() == fuse_neighbors.uuid()


def test_checkpoints_and_regions_of_a_model():
    """The body of a checkpoint is a graph of its own; a submodule may be compiled alone."""

    def checkpointed(*arguments):
        y, total = checkpoint(block, *arguments, use_reentrant=False)
        return norm(y + total), total

    assert compare(checkpointed) == ALL | ADD
    fuse_neighbors.counts.clear()
    assert (
        compare(
            lambda x, *others: torch.compile(block, backend=fusion.eager)(x.sin(), *others),
            backend="eager",
            fullgraph=False,
        )
        == ALL
    )


class Program(torch.nn.Module):
    forward = staticmethod(block)


@pytest.mark.parametrize("decompose", [False, True])
def test_exported_programs_are_joined_by_hand(decompose, tmp_path):
    arguments = tuple(t.detach() for t in tensors())
    shapes = [{0: torch.export.Dim("batch")} if t.dim() > 1 else None for t in arguments]
    with trace_as("kernel"):
        program = torch.export.export(Program(), arguments, dynamic_shapes=shapes)
    program = program.run_decompositions() if decompose else program
    fuse_neighbors(program.graph)
    assert str(program.graph).count("layernorm.forward.fused") == 1 and dict(fuse_neighbors.counts) == ALL
    program.validate()
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    others = tuple(t.detach() for t in tensors(shape=(5, 3, 8)))
    for each in (program, loaded):
        assert_same(each.module()(*others), block(*others))


def test_graphs_of_other_operators_are_left(log):
    x = torch.randn(2, 3, 8)
    with trace_as("aten"):
        torch.compile(lambda x: norm(x + x), backend=fusion.eager, fullgraph=True)(x)
    traced = torch.fx.symbolic_trace(lambda x: torch.ops.layernorm.forward.default(x + x, (8,))[0])
    fuse_neighbors(traced.graph)  # without recorded values
    assert_same(traced(x), norm(x + x))
    assert log() == ["0 norms", "1 norms"]


# Numbers and memory


@pytest.mark.parametrize("name", ["sum: parameters", "gate: g * x + r", "modulation: 1 + s", "gate"])
def test_float32_and_bfloat16_are_as_exact_as_before(name):
    """Modulations are rounded once; with sums alone, no bit changes."""
    function = JOINED[name][0]
    compiled = torch.compile(function, backend=fusion.eager, fullgraph=True)
    for dtype in (F32, BF16):
        arguments = [t.detach() for t in tensors(dtype, (16, 32, 8))]
        exact = function(*(t.double() for t in arguments))
        results = [each(*arguments) for each in (compiled, function, lambda *_: exact)]  # noqa: B023
        ours, theirs, exact = (y[0] if isinstance(y, tuple) else y for y in results)
        if name.startswith("sum"):
            assert torch.equal(ours, theirs)
        errors = [(y.double() - exact).square().mean().sqrt().item() for y in (ours, theirs)]
        assert errors[0] <= 1.2 * errors[1]
        if dtype == F32:
            # Float32 rounds each of five operations by 6e-8 of numbers up to 8.
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * exact.abs().max().item())


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("sum: x + r", 1, 1), ("modulation: 1 + s", 2, 1), ("add", 2, 1), ("gate", 3, 2)],
)
def test_a_modulated_norm_keeps_one_activation_less(name, before, after):
    function, arguments = JOINED[name][0], tensors()

    def kept(function):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            outputs = function(*arguments)  # alive, because the sum is saved as an output
        del outputs
        return len({t.untyped_storage().data_ptr() for t in saved if t.shape == (2, 3, 8)})

    compiled = torch.compile(function, backend=fusion.eager, fullgraph=True)
    assert (kept(function), kept(compiled)) == (before, after)
