"""Tests of the operators that torch's tracers record: this package's or aten's."""

import doctest
import io
import itertools
import re
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.utils.flop_counter import FlopCounterMode

import layernorm_ext
from layernorm_ext import add_layer_norm, add_rms_norm, layer_norm, layer_norm_2d, rms_norm, trace_as, tracing

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
aten, ours = torch.ops.aten, torch.ops.layernorm

# torch's functions and the kernels order their float64 operations differently: a few roundings of 1e-16, times at most
# 10 for the sizes of the values, times 8 columns and 35 rows in the sums of the gradients.
ROUNDINGS = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    trace_as(None)


def images(x, memory_format=torch.contiguous_format):
    """Return rows of eight columns as images of eight channels."""
    return x.mT[..., None].repeat(1, 1, 1, 3).contiguous(memory_format=memory_format)


# Calls of each member of the family, with input x, residual r, weight w and bias b.
FAMILY = {
    "layer_norm": lambda x, r, w, b: layer_norm(x, (8,), w, b, 0.1),
    "no parameters": lambda x, r, w, b: layer_norm(x, (8,)),
    "bias alone": lambda x, r, w, b: layer_norm(x, (8,), None, b),
    "zero-centred": lambda x, r, w, b: layer_norm(x, (8,), w, b, zero_centered_weight=True),
    "memory-efficient": lambda x, r, w, b: layer_norm(x, (8,), w, b, memory_efficient=True),
    "rms_norm": lambda x, r, w, b: rms_norm(x, (8,), w, 0.1),
    "rms_norm of default eps": lambda x, r, w, b: rms_norm(x * 1e-5, (8,)),
    "zero-centred rms_norm": lambda x, r, w, b: rms_norm(x, (8,), w, zero_centered_weight=True),
    "add_layer_norm": lambda x, r, w, b: add_layer_norm(x, r, (8,), w, b),
    "add_layer_norm in place": lambda x, r, w, b: add_layer_norm(x, r * 2, (8,), w, b, inplace=True),
    "add_rms_norm": lambda x, r, w, b: add_rms_norm(x, r, (8,), w),
    "layer_norm_2d": lambda x, r, w, b: layer_norm_2d(images(x), w, b),
    "layer_norm_2d, channels last": lambda x, r, w, b: layer_norm_2d(images(x, torch.channels_last), w, b),
}
family = pytest.mark.parametrize("member", FAMILY)


class Model(torch.nn.Module):
    """Calls a member of the family. The parameters may have another dtype than input and residual."""

    def __init__(self, member, dtype=F64, parameter_dtype=None):
        super().__init__()
        self.call, self.dtype = FAMILY[member], dtype
        self.w = torch.nn.Parameter(torch.randn(8).to(parameter_dtype or dtype))
        self.b = torch.nn.Parameter(torch.randn(8).to(parameter_dtype or dtype))

    def forward(self, x):
        return self.call(x, x.sin(), self.w, self.b)

    def input(self, batch):
        return torch.randn(batch, 5, 8).to(self.dtype)


def targets(graph):
    """Return the operators that a graph calls."""
    return [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def of_package(operators):
    return [operator for operator in operators if operator.namespace == "layernorm"]


def export(model, strict=False):
    batch = torch.export.Dim("batch")
    return torch.export.export(model, (model.input(3),), dynamic_shapes={"x": {0: batch}}, strict=strict)


# torch.export


@family
@pytest.mark.parametrize("strict", [False, True])
def test_export(member, strict):
    """The program calls aten's operators only, takes any batch, and decomposes into core operators."""
    model = Model(member)
    program = export(model, strict)
    assert not of_package(targets(program.graph))
    decomposed = program.run_decompositions()
    assert all(torch.Tag.core in operator.tags for operator in targets(decomposed.graph))
    x = model.input(7)
    for each in (program, decomposed):
        torch.testing.assert_close(each.module()(x), model(x), **ROUNDINGS)


def test_plain_calls_are_torchs_functions():
    for member, expected in {"layer_norm": aten.layer_norm.default, "rms_norm": aten.rms_norm.default}.items():
        graph = export(Model(member)).graph
        assert [operator for operator in targets(graph) if operator is not aten.sin.default] == [expected]


@family
def test_export_keeps_the_kernels(member):
    """With "kernel", the program calls the kernels and gives the bits of an eager call."""
    model = Model(member)
    with trace_as("kernel"):
        program = export(model)
    x = model.input(7)
    for each in (program, program.run_decompositions()):
        assert len(re.findall(r"\blayernorm\.\w+", str(each.graph))) == 1
        torch.testing.assert_close(each.module()(x), model(x), rtol=0, atol=0)


def test_exported_program_runs_without_the_package(tmp_path):
    model = torch.nn.Sequential(*(getattr(layernorm_ext, name)(8) for name in ("LayerNorm", "RMSNorm")))
    x, path = torch.randn(3, 8), tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (x,)), path)
    torch.save((x, model(x)), tmp_path / "expected.pt")
    code = (
        "import sys, torch; sys.modules['layernorm_ext'] = None\n"
        f"x, expected = torch.load({str(tmp_path / 'expected.pt')!r})\n"
        f"torch.testing.assert_close(torch.export.load({str(path)!r}).module()(x), expected)\n"
        "assert not hasattr(torch.ops.layernorm, 'forward')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


MIXED = [(F16, F16), (BF16, BF16), (F16, F32), (BF16, F32)]


@family
@pytest.mark.parametrize(("dtype", "parameter_dtype"), MIXED)
def test_sixteen_bits(member, dtype, parameter_dtype):
    """The outputs have the dtype of the input, under autocast too."""
    model = Model(member, dtype, parameter_dtype)
    x = model.input(3)
    with torch.autocast("cpu", torch.bfloat16):
        program = export(model)
    # torch's rms_norm rounds the product with the weight, and layer_norm the output: at most two roundings of half an
    # eps each, of values below 10, and the sum with a residual may round to the other neighbour.
    tolerance = 40 * torch.finfo(dtype).eps
    torch.testing.assert_close(program.module()(x), model(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced", "one pixel", "one channel", "expanded"])
def test_strides_of_images(layout):
    """The output has the strides of the kernel's output: channels last if the input is channels last."""
    x = {
        "contiguous": torch.randn(2, 8, 4, 5),
        "channels_last": torch.randn(2, 8, 4, 5).to(memory_format=torch.channels_last),
        "sliced": torch.randn(4, 8, 8, 5).to(memory_format=torch.channels_last)[::2, :, ::2],
        "one pixel": torch.randn(2, 8, 1, 1).to(memory_format=torch.channels_last),
        "one channel": torch.randn(2, 1, 4, 5),
        "expanded": torch.randn(1, 8, 4, 5).expand(2, 8, 4, 5),
    }[layout]
    with trace_as("aten"):
        compiled = torch.compile(layer_norm_2d, backend="aot_eager", fullgraph=True)(x)
    assert significant_strides(compiled) == significant_strides(layer_norm_2d(x))


def significant_strides(tensor):
    """Return the strides of the dimensions with more than one element; a compiler may choose the others."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


# torch.compile


class Recorder(CompileCounterWithBackend):
    """A compiler backend that remembers the operators of each graph, forward and backward."""

    def __init__(self):
        super().__init__("aot_eager")
        self.operators = []

    def __call__(self, graph, inputs):
        def remember(graph, _):
            self.operators.append(targets(graph.graph))
            return graph

        self.frame_count += 1
        compiler = torch._dynamo.backends.common.aot_autograd(fw_compiler=remember, bw_compiler=remember)
        return compiler(graph, inputs)


def gradients(function, model, x):
    outputs = function(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum(output.sin().sum() for output in outputs)
    return *outputs, *torch.autograd.grad(loss, (x, model.w, model.b), materialize_grads=True)


@family
@pytest.mark.parametrize(("compiler", "dynamic"), [("recorder", None), ("recorder", True), ("inductor", True)])
def test_compile(member, compiler, dynamic):
    """Training works with a batch that changes, and the graphs call no operator of this package."""
    model = Model(member)
    recorder = Recorder()
    with trace_as("aten"):
        backend = recorder if compiler == "recorder" else compiler
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
        for batch in (3, 4, 7):
            x = model.input(batch).requires_grad_()
            torch.testing.assert_close(gradients(compiled, model, x), gradients(model, model, x), **ROUNDINGS)
    assert not of_package(itertools.chain(*recorder.operators))


def test_compile_keeps_the_kernels():
    model, recorder = Model("layer_norm"), Recorder()
    torch.compile(model, backend=recorder, fullgraph=True)(model.input(3))
    assert of_package(recorder.operators[0]) == [ours.forward.default]


def test_a_change_recompiles():
    """A change of the setting compiles again; a return to an earlier setting does not."""
    recorder, model = Recorder(), Model("layer_norm").requires_grad_(False)
    compiled, x = torch.compile(model, backend=recorder, fullgraph=True), model.input(3)

    def count():
        compiled(x)
        return recorder.frame_count

    assert count() == 1
    with trace_as("aten"):
        assert count() == 2
        with trace_as("kernel"):
            assert count() <= 3
    assert count() == recorder.frame_count <= 3
    trace_as("aten")
    before = recorder.frame_count
    assert count() == before
    kinds = [bool(of_package(operators)) for operators in recorder.operators]
    assert kinds[:2] == [True, False] and all(kinds[2:])


def test_set_in_compiled_code():
    recorder = Recorder()

    def function(x):
        with trace_as("aten"):
            y = layer_norm(x, (8,))
        return layer_norm(y, (8,))

    torch.compile(function, backend=recorder, fullgraph=True)(torch.randn(3, 8))
    assert recorder.operators == [[aten.native_layer_norm.default, ours.forward.default]]
    assert tracing._operators is None


def test_inductor_fuses_the_neighbours():
    def function(x):
        return layer_norm((x * 2).sin(), (8,)).cos() + x

    kernels = {}
    for operators in ("kernel", "aten"):
        torch._dynamo.reset()
        with trace_as(operators):
            _, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), torch.randn(64, 8))
        kernels[operators] = code.count("async_compile.cpp_pybinding(")
    assert kernels == {"kernel": 2, "aten": 1}


def test_the_compilers_cache_is_used():
    """The checks of the arguments do not keep torch from storing compiled code."""
    counters = torch._dynamo.utils.counters["aot_autograd"]
    counters.clear()
    with trace_as("aten"):
        torch.compile(lambda x: layer_norm(x, (8,)), fullgraph=True)(torch.randn(3, 8))
    assert not counters["autograd_cache_bypass"]


x, w = torch.randn(3, 8), torch.ones(8)
ERRORS = {
    "no shape": lambda: layer_norm(x, []),
    "another shape": lambda: layer_norm(x, (7,)),
    "weight": lambda: layer_norm(x, (8,), torch.ones(7)),
    "bias": lambda: rms_norm(x, (8,), torch.ones(7)),
    "integers": lambda: layer_norm(x.long(), (8,)),
    "complex": lambda: rms_norm(x + 0j, (8,)),
    "dtype of the weight": lambda: layer_norm(x, (8,), w.long()),
    "dtypes of the parameters": lambda: layer_norm(x, (8,), w, w.long()),
    "device of the weight": lambda: layer_norm(x, (8,), torch.ones(8, device="meta")),
    "shape of the residual": lambda: add_layer_norm(x, x[:1], (8,)),
    "dtype of the residual": lambda: add_rms_norm(x, x.double(), (8,)),
    "dimensions of images": lambda: layer_norm_2d(x),
    "channels": lambda: layer_norm_2d(x[..., None, None], torch.ones(7)),
    "dtype of images": lambda: layer_norm_2d(x[..., None, None].long()),
}


@pytest.mark.parametrize("call", ERRORS.values(), ids=ERRORS.keys())
@pytest.mark.parametrize("tool", ["compile", "export", "jit.trace"])
def test_errors(call, tool):
    """Each tool gives the message of an eager call."""
    with pytest.raises((RuntimeError, NotImplementedError)) as eager:
        call()
    message = str(eager.value).partition("\n")[0]

    class Call(torch.nn.Module):
        def forward(self, y):
            return y, call()

    tools = {
        "compile": lambda: torch.compile(Call(), backend="aot_eager", fullgraph=True)(x),
        "export": lambda: torch.export.export(Call(), (x,), strict=False),
        "jit.trace": lambda: torch.jit.trace(Call(), x),
    }
    with trace_as("aten"), pytest.raises((RuntimeError, NotImplementedError)) as traced:
        tools[tool]()
    # TorchScript's tracer gives sizes as tensors.
    assert message in re.sub(r"tensor\((\d+)\)", r"\1", str(traced.value))


# TorchScript's tracer


@family
def test_jit_trace(member):
    """A trace calls the kernels and gives their bits; with "aten" it calls aten's operators."""
    model = Model(member).requires_grad_(False)
    x = model.input(3)
    traced = torch.jit.trace(model, x)
    assert "layernorm::" in str(traced.graph)
    torch.testing.assert_close(traced(x), model(x), rtol=0, atol=0)
    with trace_as("aten"):
        traced = torch.jit.trace(model, x)
    assert "layernorm::" not in str(traced.graph)
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    x = model.input(7)
    torch.testing.assert_close(torch.jit.load(buffer)(x), model(x), **ROUNDINGS)


def test_sizes_taken_from_the_input():
    """torch.jit.trace gives sizes as tensors, which the operators do not take."""
    for operators in ("kernel", "aten"):
        with trace_as(operators):
            traced = torch.jit.trace(lambda x: layer_norm(x, x.shape[-1:]), torch.randn(3, 8, dtype=F64))
        x = torch.randn(5, 8, dtype=F64)
        torch.testing.assert_close(traced(x), layer_norm(x, (8,)), **ROUNDINGS)


# The setting


def test_the_setting():
    """A call sets it for the process, a ``with`` statement until its end; eager calls ignore it."""
    x = torch.randn(64, 64)
    expected = layer_norm(x, (64,))
    trace_as("aten")
    assert tracing._operators == "aten" and torch.equal(layer_norm(x, (64,)), expected)
    with FlopCounterMode(display=False):  # a dispatch mode that does not trace
        assert torch.equal(layer_norm(x, (64,)), expected)
    with pytest.raises(KeyError), trace_as("kernel"):
        assert tracing._operators == "kernel"
        raise KeyError
    assert tracing._operators == "aten"
    with pytest.raises(ValueError, match='Expected operators to be "kernel", "aten" or None, but got \'onnx\''):
        trace_as("onnx")
    assert tracing._operators == "aten"


def test_examples_in_the_documentation():
    result = doctest.testmod(tracing, extraglobs={"layernorm_ext": layernorm_ext})
    assert result.attempted > 0 and result.failed == 0
