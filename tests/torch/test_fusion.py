"""The pass that fuses norms with their neighbors in compiled graphs."""

import logging
import os
import pickle
import sys
import textwrap
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
TAKES_LISTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)  # pre_grad_custom_pass takes lists


@pytest.fixture(autouse=True)
def count_anew_and_raise_errors(monkeypatch):
    fuse_neighbors.counts.clear()
    monkeypatch.setattr(fuse_neighbors, "raises", True)  # users get a warning, and the graph as it was


def tensors(dtype=F64, shape=(2, 3, 8)):
    """Return x, residual, weight, bias, scale, shift and gate."""
    shapes = [shape, shape, (8,), (8,), *[(shape[0], *[1] * (len(shape) - 2), 8)] * 3]
    return [randn(size, dtype).requires_grad_() for size in shapes]


def outputs_and_gradients(function, arguments):
    """Return outputs, copies of the arguments, and the gradients of all these with respect to the arguments.

    The function gets the copies and may change them.
    """
    torch.default_generator.manual_seed(0)
    copies = [t.clone() for t in arguments]
    outputs = function(*copies)
    results = [*(outputs if isinstance(outputs, tuple) else (outputs,)), *copies]
    differentiable = [t for t in results if t.requires_grad]
    grad_outputs = [torch.linspace(-1, 1, t.numel()).view(t.shape).to(t.dtype) for t in differentiable]
    return [*results, *torch.autograd.grad(differentiable, arguments, grad_outputs, materialize_grads=True)]


def assert_same(actual, expected, **tolerance):
    torch.testing.assert_close(actual, expected, check_stride=True, **(tolerance or ANOTHER_ORDER))


def compare(function, arguments=None, backend=fusion.eager, **options):
    """Compare a compiled function with the eager one; return how many calls of each kind the pass has inserted."""
    arguments = tensors() if arguments is None else arguments
    compiled = torch.compile(function, backend=backend, **{"fullgraph": True} | options)
    assert_same(*(outputs_and_gradients(each, arguments) for each in (compiled, function)))
    return dict(fuse_neighbors.counts)


# Functions of x, residual r, weight w, bias b, scale s, shift h and gate g are written as an expression, or as
# statements.


def norm_and_sum(total, function=norm, **options):
    return function(total, **options), total


NAMES = {
    "torch": torch,
    "layernorm_ext": layernorm_ext,
    "F": F,
    "F64": F64,
    "BF16": BF16,
    "norm": norm,
    "rms_norm": rms_norm,
    "norm_and_sum": norm_and_sum,
}


def function_of(text):
    """Return the function x, r, w, b, s, h, g -> the expression, or what the statements return."""
    body = textwrap.indent(text if "return " in text else f"return {text}", "    ")
    namespace = dict(NAMES)
    exec(f"def function(x, r, w, b, s, h, g):\n{body}", namespace)
    return namespace["function"]


# The kinds of fused calls, and their numbers.
ADD, GATE = {"add": 1}, {"gate and add": 1}
MODULATE, ADD_MODULATE, ALL = {"modulate": 1}, {"add and modulate": 1}, {"gate, add and modulate": 1}

SUMS = [
    "norm_and_sum(x + r)",
    "norm_and_sum(r + x)",
    "norm_and_sum(torch.add(x, other=r))",
    "norm_and_sum(x.add(r, alpha=1))",
    "norm_and_sum(x + r, rms_norm)",
    "norm_and_sum(x + r, weight=w, bias=b)",
    "norm_and_sum(x + r, weight=s, bias=b)",
    "norm(x + r)",
    "(*norm_and_sum(x + r), (x + r).sin(), x + r)",
    "norm_and_sum(x + x)",
    "(norm(t := x + r), rms_norm(t), t)",
    "(norm((t := x + r).view(3, 2, 8), weight=w), t)",
    "(norm((t := x + r).reshape(t.size(0) * t.size(1), -1)), t)",
    "norm_and_sum((x + r).view(6, 8))",
    "norm_and_sum((x.to(F64) + r.double()).contiguous().to(r.dtype).type_as(x))",  # conversions without effect
    "with torch.no_grad(): return norm_and_sum(x + r)",
    "t = x.sin(); t += r; return norm_and_sum(t)",
    "t = x.sin(); v = t.view(2, 3, 8); v += r; return norm_and_sum(v)",
    "with torch.no_grad(): t = x.sin(); t = t.add_(r); return norm_and_sum(t)",
    "t = x.clone(); t.add_(r); return norm_and_sum(t)",  # a statement, whose result is not used
    "t = x.sin(); t.add_(r); t += x; return norm_and_sum(t)",
    "t = x.sin(); t += r; y = norm(t); states = x.new_zeros(2, 2, 3, 8); states[1] = t; return y, states",
    "t = x + r; y = norm(t); buf = torch.zeros_like(t); buf.copy_(t); return y, buf",
    "(norm((t := x + r)[None]), t)",
    "(norm((t := x + r).unsqueeze(0).flatten(1, 2)), t)",
    "(norm(F.dropout(t := x + r, 0.5, training=False)), t)",
]
GATES = [
    "norm_and_sum(g * x + r)",
    "norm_and_sum(r + x * g)",
    "norm_and_sum(torch.addcmul(r, g, x))",
    "norm_and_sum(torch.mul(w, x).add(r))",
    "norm_and_sum(r + x.multiply(g))",
]
MODULATIONS = [
    "norm(x) * (1 + s) + h",
    "h + (s + 1.0) * norm(x)",
    "norm(x).mul(s.add(1)).add(h)",
    "torch.addcmul(h, norm(x), 1 + s)",
    "norm(x) * (1 + s[:, 0]).unsqueeze(1) + h[:, 0].unsqueeze(1)",
    "norm(x) * (1 + s[:, 0])[:, None, :] + h[:, 0][:, None]",
    "norm(x) * (1 + torch.cat([s, h], 1).chunk(2, 1)[0]) + g",
    "rms_norm(x) * (1 + s)",
    "norm(x) * (1 + w) + b",
    "norm(x) * (1 + s) + b",
    "norm(x) * (1 + r[:1]) + r[1:]",
    "norm(x) * (1 + r) + r",
    "(norm(x) * (f := 1 + s) + h, f)",
    "f = 1 + s; s.mul_(2); return norm(x) * f + h",
    "f = 1 + s; f.mul_(2); return norm(x) * f + h",
    "y = norm(x) * (1 + s) + h; s.mul_(2); return y",
    "norm(x, weight=w) * (1 + s) + h",
    "norm(x) * (1 + s.float()) + h",
    "norm(x) * (1 + s).float().double() + h",
    "norm(x) * (2 + s) + h",
    "norm(x) * torch.add(1, s, alpha=2) + h",
    "norm(x, weight=w, bias=b) * (1 + s) + h",
    "norm(x, bias=b) * (1 + s)",
    "rms_norm(x, weight=w) * (1 + s)",
    "rms_norm(x, weight=w) * s.tanh() + h",
    "norm(x, weight=w) * b",
    "norm(x) * (1 + s).view(2, 1, 8)",
    "(y := norm(x)) + y * s",
    "(y := norm(x)) * s + y + h",
    "h + torch.addcmul(y := norm(x), y, s)",
]
# A sum before a modulation, and what is fused.
BOTH = {
    "(y, t) = layernorm_ext.add_layer_norm(x, r, (8,)); return y * (1 + s) + h, t": MODULATE,
    "(y, t) = layernorm_ext.add_layer_norm(x, r, (8,), w, b, gate=g); return y * (1 + s), t": MODULATE,
    "(norm(t := x + r) * (1 + s) + h, t)": ADD_MODULATE,
    "(norm(t := r + g * x) * (1 + s) + h, t)": ALL,
    "(norm(t := r + g * x) * (1 + g) + g, t)": ALL,
    "(norm(t := x + r) * (1 + t.mean(1, keepdim=True)) + h, t)": ADD,  # the scale comes after a use of the sum
    "(norm(t := x + r) * (1 + t), t)": ADD,
    "norm(x) * (1 + s) + r[:1]": MODULATE,  # the shift has other batch sizes
    "norm(x) * (1 + s) + r": MODULATE,  # a residual behind the modulation
    "(norm(t := r[:1] * x + r) * (1 + s), t)": ADD_MODULATE,  # the gate has other batch sizes
    "(norm((t := x + r).view(3, 2, 8)) * (1 + w) + b, t)": ADD_MODULATE,
    "(norm((t := x + r).view(2, 1, 3, 8)) * (1 + s[:, None]), t)": ADD,
}
FUSED = dict.fromkeys(SUMS, ADD) | dict.fromkeys(GATES, GATE) | dict.fromkeys(MODULATIONS, MODULATE) | BOTH


@pytest.mark.parametrize("text", FUSED)
def test_neighbors_are_fused(text):
    assert compare(function_of(text)) == FUSED[text]


@pytest.mark.parametrize("text", [text for text in FUSED if "reshape" in text or "unsqueeze" in text or text in BOTH])
def test_any_batch_takes_one_graph_without_new_guards(text):
    function, counters = function_of(text), [CompileCounterWithBackend(each) for each in (fusion.eager, "eager")]
    fused, original = (torch.compile(function, fullgraph=True, dynamic=True, backend=each) for each in counters)
    for batch in (2, 3, 5, 4)[: 1 if "view" in text else None]:
        arguments = tensors(shape=(batch, 3, 8))
        assert_same(*(outputs_and_gradients(each, arguments) for each in (fused, original)))
    assert dict(fuse_neighbors.counts) == FUSED[text]
    assert counters[0].frame_count == counters[1].frame_count


# Functions whose graph stays as it is (REFUSED), or is fused in part (PARTS)

REFUSED = [
    "norm_and_sum(x + w)",
    "norm_and_sum(s + r)",
    "norm_and_sum(x + 1.5)",
    "norm_and_sum(torch.add(x, r, alpha=2))",
    "norm_and_sum(x.add(r, alpha=2))",
    "norm_and_sum(torch.addcmul(r, g, x, value=2))",
    "norm_and_sum(x + r.float())",
    "norm_and_sum(x.float() + r)",
    "norm_and_sum(x.mT.contiguous().mT + r.mT.contiguous().mT)",  # the sum has other strides
    "t = x + r; t.mul_(2); return norm_and_sum(t)",
    "t = x + r; t[:, 0].zero_(); return norm_and_sum(t)",
    "t = x + r; t[0] = 1; return norm_and_sum(t)",
    "t = x + r; F.dropout(t, 0.5, True, True); return norm_and_sum(t)",
    "t = x + r; F.relu(t, True); return norm_and_sum(t)",
    "t = x + r; torch.mul(t.detach(), 2, out=t.detach()); return norm_and_sum(t)",
    "t = x + r; t += 1; return norm_and_sum(t)",
    "t = x + r; t.transpose_(0, 1); return norm(t)",
    "norm((x.half() + r.half()).view(BF16))",  # bits as another dtype
    "torch.ops.layernorm.forward.default(x + r, (8,))[2]",
    "norm_and_sum(x + r, memory_efficient=True)",
    "t = x + r\nwith torch.autocast('cpu', BF16): return norm(t), t",
    "norm(x) * (1 + r[0]) + r[1]",
    "((y := norm(x)) * (1 + s) + h, y)",
    "norm(x) * r.sin() + h",  # a gate of the output's shape
    "norm(x, weight=s) * (1 + s) + h",
    "norm(x, weight=w, zero_centered_weight=True) * (1 + s) + h",
    "(y := norm(x, weight=w)) + y * s",
    "t = x.sin(); v = t[0]; t += r; return norm(t), v",
    "with torch.no_grad(): t = x.sin(); c = t.chunk(2, -1); t += r; return norm(t), c[0] * 1",
    "t = x.sin(); v = t.view(6, 8); t += r; return norm(t), v * 1",
    "x += r; return norm_and_sum(x)",
    "t = x.sin(); t.add_(r, alpha=2); return norm_and_sum(t)",
    "t = x.sin()\nwith torch.no_grad(): t += r\nreturn norm_and_sum(t)",  # t keeps the grad_fn of x.sin()
    "norm_and_sum((x + r)[:, :2])",
    "norm_and_sum((x + r)[:, torch.tensor([1, 0, 2])])",
    "norm_and_sum(F.dropout(x + r, 0.5, True))",
    "(y := norm(x)) * (1 + y)",
    "(norm(t := x + r), t.retain_grad(), t)[::2]",
]
PARTS = {
    "norm_and_sum(x * r + x)": ADD,
    "(*norm_and_sum((p := g * x) + r), p)": ADD,
    "norm_and_sum((p := g * x) + p)": ADD,
    "norm_and_sum((w > 0) * x + r)": ADD,
    "((p := norm(x) * (1 + s)) + h, p.sin())": MODULATE,
    "with torch.no_grad(): t = x + r\nreturn norm(t) * (1 + s) + h, t": MODULATE,
    "t = x + r; y = norm(t.detach() + r); t.mul_(2); return y, t": ADD,
    # Backward of the fused call would need a tensor that the function changes later, which the original does not save.
    "y = norm(x, weight=w, bias=b) * (1 + s) + h; b.mul_(2); return y": {},
    "t = r + g * x.detach(); y = norm(t); g.mul_(2); return y, t": ADD,
    "t = (x + r).detach(); y = norm(t) * (1 + s); t.mul_(2); return y": {},
    # Norms of groups have no residual.
    "t = x + r; return layernorm_ext.gated_rms_norm(t, None, (8,), num_groups=2), t": {},
    "t = x + r; return layernorm_ext.gated_layer_norm(t, None, (8,), num_groups=2) * (1 + s) + h, t": MODULATE,
    # The call must not be inserted before the write to x, although all nodes that it reads come before that.
    "r = r.sin(); x.mul_(2); return norm_and_sum(x + r)": ADD,
    # Here too, the write to k or v would make backward of the fused call raise an error.
    "k = g.sin(); y = norm(r + k * x.detach()); k.mul_(2); return y": ADD,
    "v = b.sin(); y = norm(x, weight=w, bias=v) * (1 + s.detach()); v.mul_(2); return y": {},
    # The hook must see the gradient that comes from the norm, too.
    "t = x + r; y = norm(t); t.register_hook(lambda g: g * 3); return y, t": {},
    # For the addition too, Dynamo has recorded the shape that v has after both unsqueeze_().
    "v = w.sin(); t = x[:1, :1] + v; y = norm(t); v.unsqueeze_(0).unsqueeze_(0); return y, t": {},
    # Both sums in place become sums in new tensors; the second one would write to what the first norm saves.
    "with torch.no_grad(): t = x.sin(); t += r; y = norm(t); t += y; return norm(t), t": {"add": 2},
}
LEFT = dict.fromkeys(REFUSED, {}) | PARTS


@pytest.mark.parametrize("text", LEFT)
def test_what_cannot_be_fused_stays_as_it_is(text):
    assert compare(function_of(text), fullgraph="retain_grad" not in text) == LEFT[text]


def test_the_log_names_sums_that_stay_in_place(caplog):
    with caplog.at_level(logging.DEBUG, "layernorm_ext.fusion"):
        compare(function_of("t = x.sin(); v = t[0]; t.add_(r); return norm(t), v"))
    assert "add_ stays in place" in caplog.text


OFFSETS = torch.tensor([0, 2, 6])
jagged = torch.nested.nested_tensor_from_jagged


def sum_in_place_of_values(x, r):
    """The sum is in the memory of an input, a nested tensor."""
    values = x.values()
    values += r
    return norm(values)


def nested_tensor_of_a_sum(x, r):
    """A nested tensor reads the sum."""
    total = x * 2
    nested = jagged(total, OFFSETS)
    total += r
    return norm(total), (nested * 1).values()


def vmap_over_a_sum(x, r):
    """The batched tensor in vmap reads the sum."""

    def add_and_double(row):
        total.add_(r)
        return row * 2

    total = x * 2
    return norm(total), torch.vmap(add_and_double)(total)


@pytest.mark.parametrize("function", [sum_in_place_of_values, nested_tensor_of_a_sum, vmap_over_a_sum])
def test_sums_whose_memory_a_tensor_of_another_class_reads_stay_in_place(function):
    results = []
    for compiled in (function, torch.compile(function, backend=fusion.eager)):
        values = torch.zeros(6, 8)
        x = jagged(values, OFFSETS) if function is sum_in_place_of_values else values
        results.append((compiled(x, torch.ones(6, 8)), values))
    assert_same(*results)
    assert not fuse_neighbors.counts


def wait_for_another_stream(x, r):
    total = x + r
    torch.ops.streams.wait_stream(0, 1)
    return norm(total)


def on_another_stream(x, r):
    total = x + r
    with torch.fx.traceback.annotate({"stream": 1}):  # as Dynamo records torch.cuda.stream
        return norm(total)


@pytest.mark.skipif(not TAKES_LISTS, reason="needs torch 2.13")
@pytest.mark.parametrize("function", [wait_for_another_stream, on_another_stream])
def test_calls_stay_on_their_streams(function):
    """Without a GPU, the graphs are traced, but do not run."""
    pytest.importorskip("torch._dynamo.variables.streams")
    graphs = []

    def fused(module, example_inputs):
        graphs.append(module.graph)
        fuse_neighbors(module.graph)
        return lambda *inputs: inputs[:1]

    torch.compile(function, backend=fused, fullgraph=True)(*tensors()[:2])
    assert len(graphs) == 1 and not fuse_neighbors.counts


# Random programs (support/programs.py). FUSION_PROGRAMS=20000 takes some minutes.

PROGRAMS = range(int(os.environ.get("FUSION_PROGRAMS", "300")))


def assert_close_to(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        scale = max(1, b.abs().max().item()) if b.isfinite().all() else 1
        # Float32 conversions of numbers that differ by 1e-16 may round differently.
        tolerance = (1e-12 if b.dtype == F64 else 1e-6) * scale
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, check_stride=True, equal_nan=True)


def failure(seed):
    """Return how the results of a random program change where its norms are fused."""
    text = programs.source(seed)
    try:
        expected = programs.results_of(programs.build(text), seed)
    except RuntimeError:  # autograd refuses the program: it writes to what was saved
        return None
    try:
        assert_close_to(programs.results_of(fusion.eager(programs.graph_of(text, seed), ()), seed), expected)
    except Exception as error:  # every error is reported with the program
        return f"{error}\nin program {seed}:\n{text}"
    return None


@pytest.mark.parametrize("first", range(0, len(PROGRAMS), 100))
def test_random_programs(first):
    failures = [failure(seed) for seed in PROGRAMS[first : first + 100]]
    assert not any(failures), "\n".join(filter(None, failures))
    assert fuse_neighbors.counts.total() >= min(30, len(PROGRAMS) / 4)  # programs have 0.45 fused calls on average


class Child(torch.nn.Module):
    """Calls a function, whose operations become those of a submodule in an exported program."""

    def forward(self, function):
        return function()


class Parent(torch.nn.Module):
    """Calls a function with a Child, through which it may call other functions, and with the inputs."""

    def __init__(self, function):
        super().__init__()
        self.child, self.function = Child(), function

    def forward(self, *inputs):
        return self.function(self.child, *inputs)


def checkpointed(seed):
    """Return a random program with a checkpoint: its text, itself, and a function that compiles it with a backend."""

    def hook(t):
        if t.requires_grad:
            t.register_hook(lambda g: g * 3)

    text = programs.source_with_child(seed, programs.REPEATABLE)
    run = partial(checkpoint, use_reentrant=False)
    function = programs.build(text, programs.NAMES | {"run": run, "hook": hook})
    return text, function, lambda backend: [torch.compile(function, backend=backend)]


def exported_twice(seed):
    """Return a random program with a submodule: its text, itself, and a function that exports it for a backend.

    The second exported module is unflattened: it has the submodule.
    """
    text = programs.source_with_child(seed, programs.REPEATABLE | programs.STATISTICS)

    def program_with(run, *inputs):
        return programs.build(text, programs.NAMES | {"run": run, "hook": lambda t: None})(*inputs)

    module = Parent(program_with)

    def modules(backend):
        with trace_as("kernel"):
            program = torch.export.export(module, tuple(t.detach() for t in programs.inputs(seed)))
        if backend is fusion.eager:
            fuse_neighbors(program.graph)
        return [program.module(), torch.export.unflatten(program)]

    return text, module, modules


def difference(function, run, expected):
    """Return the exception of a comparison of a program's results with the expected ones, or None."""
    try:
        assert_close_to(run(function), expected)
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("kind", [checkpointed, exported_twice])
@pytest.mark.parametrize("first", range(0, max(20, len(PROGRAMS) // 15), 20))
def test_random_programs_with_a_child(first, kind):
    """A compiled or exported program has the eager results with the pass, unless it lacks them without the pass, too.

    An exported one may lack them: unflatten() drops writes to statistics whose result is not used.
    """
    failures, ran = [], 0
    for seed in range(first, first + 20):
        torch._dynamo.reset()
        text, function, compile_with = kind(seed)

        def run(function, seed=seed, kind=kind):
            with torch.set_grad_enabled(kind is checkpointed):
                return programs.results_of(function, seed)

        try:
            expected = run(function)
        except RuntimeError:  # autograd refuses the program: it writes to what was saved
            continue
        errors = [difference(each, run, expected) for each in compile_with(fusion.eager)]
        ran += errors.count(None)
        if any(errors):
            originals = [difference(each, run, expected) for each in compile_with("eager")]
            new_errors = [error for error, original in zip(errors, originals, strict=True) if error and not original]
            failures += [f"{error}\nin program {seed}:\n{text}" for error in new_errors]
    assert not failures, "\n".join(failures)
    assert ran >= 15
    assert fuse_neighbors.counts.total() >= 1  # an average program has 0.3 (checkpointed) or 0.5 (exported)


# Where the pass is used


block = function_of("(norm(t := r + g * x) * (1 + s) + h, t)")


@pytest.fixture
def log(caplog):
    """The lines of the pass at level INFO."""
    with caplog.at_level(logging.INFO, "layernorm_ext.fusion"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "layernorm_ext.fusion"]


@pytest.mark.inductor
def test_an_option_of_inductor(log):
    """The function is compiled for training; test_caches_know_the_pass compiles it for inference."""
    compiled = torch.compile(block, fullgraph=True, options={"pre_grad_custom_pass": fuse_neighbors})
    arguments = tensors()
    with torch._inductor.config.patch(force_disable_caches=True):
        assert_same(*(outputs_and_gradients(each, arguments) for each in (compiled, block)))
    assert log()[0] == "1 norms: gate, add and modulate 1"


@pytest.mark.inductor
def test_the_configuration_of_inductor():
    """torch 2.13 and newer also take a list of passes."""
    passes = [lambda graph: None, fuse_neighbors] if TAKES_LISTS else fuse_neighbors
    with torch._inductor.config.patch(pre_grad_custom_pass=passes, force_disable_caches=True):
        fused = compare(block, backend="inductor", mode="max-autotune-no-cudagraphs", dynamic=True)
    assert fused.keys() == ALL.keys()


@pytest.mark.inductor
def test_caches_know_the_pass(tmp_path, monkeypatch):
    """The same function is compiled with and without the pass, twice each."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = tensors()
    for passes in (None, fuse_neighbors, None, fuse_neighbors):
        torch._dynamo.reset()
        with torch._inductor.config.patch(pre_grad_custom_pass=passes), torch.no_grad():
            results, (code,) = run_and_get_code(torch.compile(block, fullgraph=True), *x)
            assert_same(results, block(*x))
        assert ("forward.fused(" in code) == (passes is not None)
    assert fuse_neighbors.uuid() == type(fuse_neighbors)().uuid() != None  # noqa: E711
    assert pickle.loads(pickle.dumps(fuse_neighbors)).uuid() == fuse_neighbors.uuid()


def test_checkpoints_and_regions_of_a_model():
    """The body of a checkpoint is a graph of its own; a submodule may be compiled alone."""

    def checkpointed(*arguments):
        y = checkpoint(lambda *each: block(*each)[0], *arguments, use_reentrant=False)
        return norm(t := y + arguments[0]), t

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
def test_exported_programs_are_fused_by_hand(decompose, tmp_path):
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


def test_exported_programs_keep_the_names_of_their_outputs(tmp_path):
    """The pass could remove a dropout without effect, although the program's signature names it."""

    def dropout_at_the_end(run, x, r):
        total = x + r
        return F.dropout(norm(total), training=False), F.dropout(total, training=False), r.to(r.dtype)

    arguments, module = (randn((2, 3, 8), F64), randn((2, 3, 8), F64)), Parent(dropout_at_the_end)
    program = exported(module, *arguments)
    assert dict(fuse_neighbors.counts) == ADD
    program.validate()
    torch.export.save(program, tmp_path / "program.pt2")
    for each in (program, torch.export.load(tmp_path / "program.pt2")):
        assert_same(each.module()(*arguments), module(*arguments))


def test_graphs_of_other_operators_are_left(log):
    x = torch.randn(2, 3, 8)
    with trace_as("aten"):
        torch.compile(lambda x: norm(x + x), backend=fusion.eager, fullgraph=True)(x)
    traced = torch.fx.symbolic_trace(lambda x: torch.ops.layernorm.forward.default(x + x, (8,))[0])
    fuse_neighbors(traced.graph)  # its nodes have no recorded values
    assert_same(traced(x), norm(x + x))
    assert log() == ["0 norms", "1 norms"]


@pytest.mark.parametrize("compiler", [fusion.eager, pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_hook_on_a_sum_that_leaves_a_checkpoint(compiler):
    """The caller of the checkpoint may observe the gradient of such a sum; the pass sees only the graph of the body."""

    def hooked(x, r, *_):
        def body(x, r):
            first, second = x + r, (x - r.sin()) + r
            view = second.view_as(x)
            return norm(first).sin(), first, norm(view).sin(), view

        y, first, z, view = checkpoint(body, x, r, use_reentrant=False)
        first.register_hook(lambda g: g * 3)
        view.register_hook(lambda g: g * 5)
        return y, first, z, view

    with torch._inductor.config.patch(pre_grad_custom_pass=fuse_neighbors):
        assert compare(hooked, backend=compiler) == {}


def test_a_gradient_with_respect_to_a_sum_inside_the_graph():
    """A fused call would not read the sum t, by which torch.autograd.grad() in the graph differentiates its output."""

    def function(x, r, *_):
        t = x + r
        y = norm(t).sin()
        return torch.autograd.grad(y.sum(), t)[0], y.detach()

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        assert compare(function) == {}


def norm_in_child(run, x, r):
    t = x + r
    return run(lambda: norm(t) * 2), t


def sum_and_norm_in_child(run, x, r):
    t = x + r
    return run(lambda: norm(t.sin() * 0 + t) * 2 + t.cos()), t


def factor_in_child(run, x, r):
    """The fused call reads the factor 1 + r, so it would be inserted after it, in the middle of the child."""
    y = norm(x)
    return run(lambda: (y * (1 + r[:, :1])).sin())


def exported(module, *arguments):
    with trace_as("kernel"):
        program = torch.export.export(module, arguments)
    fuse_neighbors(program.graph)
    program.graph.lint()
    return program


@pytest.mark.parametrize(
    "write",
    [partial(F.batch_norm, training=True), partial(F.instance_norm, use_input_stats=True)],
    ids=["batch", "instance"],
)
def test_statistics_are_written_before_they_are_read(write):
    """The schemas of batch_norm and instance_norm do not say that they write, so the pass must know it."""

    def function(run, x, z, scale, shift):
        y = norm(x)
        write(z, scale, shift)
        return y * scale + shift

    arguments = [randn((2, 3, 8), F64), randn((4, 8, 5), F64), torch.zeros(8, dtype=F64), torch.ones(8, dtype=F64)]
    copies = [[t.clone() for t in arguments] for _ in range(2)]
    program = exported(Parent(function), *arguments)
    assert_same(program.module()(*copies[0]), Parent(function)(*copies[1]))


@pytest.mark.parametrize(
    ("function", "fused"), [(norm_in_child, ADD), (sum_and_norm_in_child, ADD), (factor_in_child, {})]
)
def test_unflatten_after_the_pass(function, fused):
    module, arguments = Parent(function), (randn((2, 3, 8), F64), randn((2, 3, 8), F64))
    program = exported(module, *arguments)
    assert fuse_neighbors.counts == fused
    assert_same(torch.export.unflatten(program)(*arguments), module(*arguments))


@pytest.mark.parametrize(
    ("text", "fused"),
    [
        ("norm_and_sum(x + r, normalized_shape=x.shape[-1:])", ADD),
        ("norm_and_sum(x, normalized_shape=x.shape[-1:])", {}),
        ("t = x + r; u = t.sin(); return norm(t, normalized_shape=t.shape[-1:]), u", ADD),
        ("t = x + r; u = t.sin(); return norm(t, normalized_shape=(x.size(-1),)), u", ADD),
        ("t = x.sin(); t += r; return norm_and_sum(t, normalized_shape=x.shape[-1:])", ADD),
        ("t = x + r; u = t.sin(); return norm(t), u", ADD),  # eps is a number of the graph if sizes are dynamic
        ("norm(x, normalized_shape=x.size()[2:]) * torch.unsqueeze(input=1 + s[:, 0], dim=1)", MODULATE),
        ("norm(x, normalized_shape=x.size()[2:]) * (1 + s[:, 0]).unsqueeze(dim=1)", MODULATE),
        ("norm(x, normalized_shape=(8,)) * (1 + s[:, 0]).view(-1, 1, 8)", MODULATE),
        ("(norm((t := x + r).flatten(0, 1)), t)", ADD),
        ("(norm(torch.reshape(t := x + r, (-1, 8))), t)", ADD),
        ("(norm((t := x + r).unsqueeze(0)), t)", ADD),
        ("norm_and_sum(x + r)[0] + F.embedding(torch.zeros(2, 3, dtype=torch.long), w[None])", ADD),
        (
            "t = x + r; y = norm(t); states = torch.zeros(2, *t.shape, dtype=t.dtype); states[0] = t; return y, states",
            ADD,
        ),
        ("norm(x, weight=w, bias=b) * s + h", MODULATE),
        ("y = norm(x); n = y.shape[1]; return y * (1 + x.detach())[:, :n]", {}),
    ],
)
def test_symbolic_sizes_and_keywords_of_views(text, fused):
    assert compare(function_of(text), dynamic=True) == fused


def test_a_number_is_read_after_the_write_to_its_tensor():
    """The pass moves only the reads of numbers that nothing changes before the first call of the graph."""

    def function(x, r, factor):
        factor.mul_(2)
        t = x + r
        u = t.sin()
        return norm(t) * factor.item(), u

    arguments = [torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.tensor(3.0)]
    compiled = torch.compile(function, backend=fusion.eager, fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        actual = compiled(*map(torch.clone, arguments))
    assert_same(actual, function(*map(torch.clone, arguments)))


def test_an_unsorted_graph():
    """Inductor sorts the nodes after custom passes, so another pass may leave a node before one that it reads."""
    with trace_as("kernel"):
        program = torch.export.export(Parent(norm_in_child), (randn((2, 3, 8), F64), randn((2, 3, 8), F64)))
    total = next(node for node in program.graph.nodes if node.target is torch.ops.aten.add.Tensor)
    program.graph.output_node().prepend(total)
    fuse_neighbors(program.graph)
    program.graph.lint()
    assert dict(fuse_neighbors.counts) == ADD


def test_a_graph_of_make_fx_in_real_mode_is_left():
    arguments = [t.detach() for t in tensors()[:2]]
    with trace_as("kernel"):
        traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x, r: norm(x + r))(*arguments)
    fuse_neighbors(traced.graph)
    assert_same(traced(*arguments), norm(sum(arguments)))
    assert not fuse_neighbors.counts


class Region(torch.nn.Module):
    """torch.export makes a graph of the no_grad block. In eval mode, dropout returns the sum itself."""

    def forward(self, x, r):
        with torch.no_grad():
            y = norm(F.dropout(x + r, 0.5, self.training))
        return y + x


def test_regions_of_exported_programs():
    arguments = [randn((2, 3, 8), F64) for _ in range(2)]
    program = exported(Region().eval(), *arguments)
    assert dict(fuse_neighbors.counts) == ADD
    assert_same(program.module()(*arguments), Region().eval()(*arguments))


def test_higher_order_operators_that_read_a_sum():
    def function(x, r, *_):
        t = x + r
        y = norm(t)
        return y, checkpoint(lambda t: t.sin(), t, use_reentrant=False)

    assert compare(function) == ADD


def test_an_exception_leaves_the_graph(monkeypatch, caplog):
    """An exception leaves one norm unfused, and compilation goes on; the log has the exception once."""

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(fuse_neighbors, "raises", False)
    monkeypatch.setattr(fuse_neighbors, "_has_warned", False)
    monkeypatch.setattr(fusion.order, "are_interchangeable", fail)
    with caplog.at_level(logging.WARNING, "layernorm_ext.fusion"):
        assert compare(function_of("norm_and_sum(norm(x + r) + r)")) == {}
    assert len([each for each in caplog.records if each.name == "layernorm_ext.fusion"]) == 1


def test_the_pass_takes_linear_time():
    """The calls of functions are counted, because seconds depend on the machine."""

    def steps(norms):
        line = "    t = r * g + x; y = layer_norm(t, (8,)) * (1 + s) + h; r = r.sin(); x = t + y.sin()\n"
        graph = programs.graph_of("def program(x, r, q, w, b, s, h, g, p):\n" + line * norms + "    return x,", 0).graph
        events = []
        sys.setprofile(lambda *_: events.append(None))
        fuse_neighbors(graph)
        sys.setprofile(None)
        return len(events)

    steps(2)  # fills the caches of fake tensors
    assert steps(80) < 4.4 * steps(20)  # four times, and a tenth for tables that grow
    assert fuse_neighbors.counts == {"gate, add and modulate": 2 + 80 + 20}


# Numbers and memory


@pytest.mark.parametrize(
    "text",
    [
        SUMS[5],
        GATES[0],
        MODULATIONS[0],
        "norm(x, weight=w, bias=b) * (1 + s) + h",
        "(norm(t := r + g * x) * (1 + s) + h, t)",
    ],
)
def test_float32_and_bfloat16_are_as_exact_as_before(text):
    """Modulations are rounded once; with sums alone, no bit changes."""
    function = function_of(text)
    compiled = torch.compile(function, backend=fusion.eager, fullgraph=True)
    for dtype in (F32, BF16):
        arguments = [t.detach() for t in tensors(dtype, (16, 32, 8))]
        exact = function(*(t.double() for t in arguments))
        results = [each(*arguments) for each in (compiled, function, lambda *_: exact)]  # noqa: B023
        fused, original, exact = (y[0] if isinstance(y, tuple) else y for y in results)
        if text in SUMS:
            assert torch.equal(fused, original)
        errors = [(y.double() - exact).square().mean().sqrt().item() for y in (fused, original)]
        assert errors[0] <= 1.2 * errors[1]  # means over 4096 elements
        if dtype == F32:
            # Float32 rounds each of five operations by 6e-8 of numbers up to 8.
            torch.testing.assert_close(fused, original, rtol=0, atol=1e-6 * exact.abs().max().item())


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        (SUMS[0], 1, 1),
        (MODULATIONS[0], 2, 1),
        ("(norm(t := x + r) * (1 + s) + h, t)", 2, 1),
        ("(norm(t := r + g * x) * (1 + s) + h, t)", 3, 2),
    ],
)
def test_a_modulated_norm_keeps_one_activation_less(text, before, after):
    function, arguments = function_of(text), tensors()

    def saved_activations(function):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            outputs = function(*arguments)  # alive until the count, because autograd saves the sum as an output
        del outputs
        return len({t.untyped_storage().data_ptr() for t in saved if t.shape == (2, 3, 8)})

    compiled = torch.compile(function, backend=fusion.eager, fullgraph=True)
    assert (saved_activations(function), saved_activations(compiled)) == (before, after)
