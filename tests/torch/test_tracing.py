"""torch.export, torch.compile, AOTInductor and torch.jit.trace; trace_as selects the operators that they record.

test_functions.py compiles the rest of the family.
"""

import subprocess
import sys

import pytest
import torch
from support.family import with_gradients
from support.inputs import randn
from support.models import FAMILY, Model, save_and_load
from support.reference import BF16, DTYPES_16_BIT, F16, F32, F64, dtypes_id
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounter
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import layernorm_ext
from layernorm_ext import (
    AdaLayerNorm,
    AdaRMSNorm,
    AddAdaLayerNorm,
    AddAdaRMSNorm,
    LayerNorm,
    LayerNorm2d,
    RMSNorm,
    RMSNorm2d,
    layer_norm,
    layer_norm_2d,
    rms_norm,
    rms_norm_2d,
    trace_as,
    tracing,
)
from layernorm_ext.fusion import fuse_neighbors

# torch's functions and the kernels add float64 numbers in different orders. Each of some hundred additions (8 columns,
# 35 rows) of values below 10 rounds by 1e-16.
ANOTHER_ORDER = {"rtol": 1e-12, "atol": 1e-12}
# The compiler may add float32 numbers around the operator in another order. The operator itself gives the same bits.
REORDERED_BY_INDUCTOR = {"rtol": 1e-5, "atol": 1e-5}
SAME_BITS = {"rtol": 0, "atol": 0}
GRADIENTS = [True, True, True, False, False, False]  # of input, weight and bias


@pytest.fixture(autouse=True)
def reset_trace_as():
    yield
    trace_as(None)


def calls_kernels(module):
    return any(getattr(node.target, "namespace", None) == "layernorm" for node in module.graph.nodes)


def export(model, strict=False):
    shapes = {"x": {0: torch.export.Dim("batch")}}
    return torch.export.export(model, (model.input(3),), dynamic_shapes=shapes, strict=strict)


# torch.export


@pytest.mark.parametrize(
    ("dtypes", "strict"),
    [((F64, F64, F64), True), ((F64, F64, F64), False), ((BF16, F32, BF16), False), ((F16, F16, F32), False)],
    ids=dtypes_id,
)
def test_exported_programs_call_only_aten(dtypes, strict):
    """The program takes any batch. Autocast changes no dtype. A sum in float32 has the bits of an eager call."""
    model = Model(dtypes=dtypes)
    with torch.autocast("cpu", BF16):
        program = export(model, strict)
    x, eps = model.input(7), torch.finfo(dtypes[0]).eps
    assert not calls_kernels(program)
    for actual, expected in zip(program.module()(x), model(x), strict=True):
        if dtypes[0] == F64:
            tolerance = ANOTHER_ORDER
        elif expected[-1].dtype == F32:
            assert torch.equal(actual[1], expected[1])
            tolerance = {"rtol": eps, "atol": 1e-6}  # the output may round to the other neighbor
        else:
            # aten's operators round xhat before the product with the weight, then the output: half an eps of values
            # below 10 each. A 16-bit sum with a residual may round to the other neighbor.
            tolerance = {"rtol": 40 * eps, "atol": 40 * eps}
        torch.testing.assert_close(actual, expected, **tolerance)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_can_keep_the_kernels(strict):
    """Decompositions keep the kernels too. The results have the bits of an eager call."""
    model = Model()
    with trace_as("kernel"):
        program = export(model, strict)
    x = model.input(7)
    for each in (program, program.run_decompositions()):
        assert str(each.graph).count("layernorm.") == len(FAMILY)
        torch.testing.assert_close(each.module()(x), model(x), **SAME_BITS)


# torch.compile


def test_training_compiled_as_aten_matches_the_kernels():
    """Forward and backward call none of the kernels."""
    model, recorder = Model(), AotEagerAndRecordGraphs()
    with trace_as("aten"):
        compiled = torch.compile(model, backend=recorder, fullgraph=True)
        for batch in (3, 7):
            x = model.input(batch).requires_grad_()
            torch._dynamo.mark_dynamic(x, 0)  # symbolic columns take twice as long; test_symbolic_groups has them
            results = [
                with_gradients(lambda x, *_, f=f: sum(f(x), ()), [x, model.w, model.b]) for f in (compiled, model)
            ]
            torch.testing.assert_close(*results, **ANOTHER_ORDER)
    assert not any(calls_kernels(module) for module in recorder.fw_graphs + recorder.bw_graphs)


@pytest.mark.inductor
def test_compiled_images_have_the_strides_of_the_kernels_output():
    formats, shapes = (torch.contiguous_format, torch.channels_last), ((2, 8, 4, 5), (2, 8, 1, 1), (2, 1, 4, 5))
    images = [torch.randn(shape).to(memory_format=each) for each in formats for shape in shapes]
    # Two dimensions have the stride 1, and the longer one is the outer one; a dimension of stride 0 is not compared.
    images += [torch.randn(9).as_strided(size, (3, 1, 0, 1)) for size in ((3, 1, 2, 3), (2, 3, 2, 1))]
    with trace_as("aten"):
        compiled = torch.compile(lambda *images: [layer_norm_2d(x) for x in images], fullgraph=True)(*images)
    for x, y in zip(images, compiled, strict=True):
        for size, actual, expected in zip(x.shape, y.stride(), layer_norm_2d(x).stride(), strict=True):
            assert size == 1 or actual == expected, x.shape  # the stride of a dimension of size 1 has no meaning


def test_changed_setting_recompiles_once():
    recorder, model = AotEagerAndRecordGraphs(), Model("layer_norm").requires_grad_(False)
    compiled, x = torch.compile(model, backend=recorder, fullgraph=True), model.input(3)
    for setting in (None, "aten", "kernel", "aten", None):
        trace_as(setting)
        compiled(x)
    calls = [calls_kernels(module) for module in recorder.fw_graphs]
    assert calls in ([True, False], [True, False, True])  # for "kernel", Dynamo may reuse the graph of None


@pytest.mark.inductor
def test_setting_within_compiled_code_lets_inductor_fuse_the_norm():
    """Inductor compiles one kernel for the first norm and its neighbors; the second norm runs this package's kernel."""

    def function(x):
        with trace_as("aten"):
            y = layer_norm((x * 2).sin(), (8,)).cos() + x
        return layer_norm(y, (8,))

    x = torch.randn(64, 8, dtype=F64)
    y, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), x)
    torch.testing.assert_close(y, function(x), **ANOTHER_ORDER)
    assert code.count("async_compile.cpp_pybinding(") == 1
    assert code.count("torch.ops.layernorm.forward.default(") == 1
    assert tracing._operators is None


# Inductor and AOTInductor with the kernels


def parameter_gradients(model, function):
    """Return the gradients of the model's parameters for the loss that the function computes."""
    return torch.autograd.grad(function().float().sin().sum(), list(model.parameters()))


@pytest.mark.parametrize(
    "options", [{"mode": "reduce-overhead"}, {"mode": "max-autotune-no-cudagraphs", "dynamic": True}], ids=str
)
@pytest.mark.inductor
def test_compiled_training_matches_eager(options):
    """The batch and normalized_shape=x.shape[-1:] change between calls."""

    def function(x, w, b):
        return [layer_norm(x, x.shape[-1:], w, b)]

    compiled = torch.compile(function, fullgraph=True, **options)
    for rows, cols in [(3, 8), (6, 16), (4, 8)]:
        tensors = [torch.randn(size, requires_grad=True) for size in ((rows, cols), (cols,), (cols,))]
        results = [with_gradients(f, tensors) for f in (compiled, function)]
        torch.testing.assert_close(*results, **REORDERED_BY_INDUCTOR)


def test_batch_size_changes_recompile_once():
    counter = CompileCounter()
    module = torch.compile(LayerNorm(8), backend=counter, fullgraph=True)
    for rows in (3, 4, 5, 6):
        module(torch.randn(rows, 8))
    assert counter.frame_count == 2  # first for a constant batch size, then for any


class RowsOfImages(LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("classes", [(RowsOfImages,), (LayerNorm2d, RMSNorm2d)], ids=["rows", "images"])
@pytest.mark.inductor
def test_compiled_training_between_convolutions(classes):
    """Inductor lays out tensors near a convolution, even statistics, as channels last, and then fails for other sizes.

    Other sizes are therefore tested without this layout. For other sizes, Inductor cannot order the symbolic strides of
    views of images, so autograd must not save such views.
    """
    blocks = [torch.nn.Sequential(cls(8), torch.nn.Conv2d(8, 8, 3)) for cls in classes]
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), *blocks)
    compiled, is_channels_last = torch.compile(model, fullgraph=True), classes == (RowsOfImages,)
    with torch._inductor.config.patch(layout_optimization=is_channels_last):
        for shape in ((2, 3, 8, 9), (2, 3, 12, 10), (3, 3, 7, 9))[: 1 if is_channels_last else None]:
            x = torch.randn(shape)
            gradients = [parameter_gradients(model, lambda f=f, x=x: f(x)) for f in (compiled, model)]
            torch.testing.assert_close(*gradients, **REORDERED_BY_INDUCTOR)


def test_symbolic_groups():
    """num_groups may depend on a symbolic size: one graph serves all sizes, with the kernels or aten's operators."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return layernorm_ext.gated_rms_norm(x, None, x.shape[-1:], num_groups=x.shape[-1] // 4)

    counter = CompileCounter()
    compiled, as_aten = (torch.compile(Model(), dynamic=True, fullgraph=True, backend=counter) for _ in range(2))
    dynamic = {"x": {1: 4 * torch.export.Dim("groups", min=2, max=100)}}
    with trace_as("kernel"):
        exported = torch.export.export(Model(), (torch.randn(2, 12),), dynamic_shapes=dynamic, strict=False).module()
    for groups in (2, 3, 5):
        x = torch.randn(2, 4 * groups)
        for traced in (compiled, exported):
            assert torch.equal(traced(x), Model()(x))
        with trace_as("aten"):
            torch.testing.assert_close(as_aten(x), Model()(x), **REORDERED_BY_INDUCTOR)
    assert counter.frame_count == 2


def test_compiled_training_under_autocast_matches_eager():
    """Autocast computes the products in bfloat16; the norm has float32 parameters."""
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 16), LayerNorm(16), torch.nn.Linear(16, 4)), torch.randn(8, 16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", BF16):
        assert compiled(x).dtype == BF16
        gradients = [parameter_gradients(model, lambda f=f: f(x)) for f in (compiled, model)]
    for actual, expected in zip(*gradients, strict=True):
        assert actual.dtype == F32
        # Compiled code may round to bfloat16, which has 8 bits, after other operations.
        torch.testing.assert_close(actual, expected, rtol=2**-5, atol=2**-5 * expected.abs().max().item())


def test_compiled_autograd_matches_eager():
    """First derivatives of two functions, and second ones of two others, whose graphs take seconds to compile."""
    once = Model("layer_norm, memory_efficient", "layer_norm without weight")
    twice = Model("add_rms_norm, zero_centered_weight", "layer_norm_2d")
    for batch in (3, 4):
        tensors = [twice.input(batch).requires_grad_(), *twice.parameters(), *once.parameters()]

        def loss(x=tensors[0], tensors=tensors):
            losses = [sum(y.sin().sum() for y in sum(model(x), ())) for model in (once, twice)]
            gradients = torch.autograd.grad(losses[1], tensors[:3], create_graph=True)
            return losses[0] + sum(g.square().sum() for g in gradients)

        expected = torch.autograd.grad(loss(), tensors)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            loss().backward()
        for tensor, gradient in zip(tensors, expected, strict=True):
            torch.testing.assert_close(tensor.grad, gradient, **ANOTHER_ORDER)
            tensor.grad = None


class LlamaBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.linear = RMSNorm(8), RMSNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x, residual):
        residual = residual + self.linear(self.first(x))
        return residual + self.linear(self.second(residual))


class MambaBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = layernorm_ext.GatedRMSNorm(8, num_groups=2), torch.nn.Linear(8, 8)

    def forward(self, x, gate):
        return x + self.linear(self.norm(self.linear(x), gate))


class DiTBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = layernorm_ext.LayerNorm(8, elementwise_affine=False), torch.nn.Linear(8, 8)
        self.modulation = torch.nn.Linear(8, 24)

    def forward(self, x, condition):
        scale, shift, gate = self.modulation(condition[:, :1]).chunk(3, dim=-1)
        x = x + gate * self.linear(self.norm(x) * (1 + scale) + shift)
        return layernorm_ext.add_ada_layer_norm(x, condition, (8,), scale, shift, gate=gate)[0]


def add_norm_and_backward(dy, x, residual, w, b):
    """Return the results of each operator of torch.ops.layernorm, called directly."""
    shape, operators = x.shape[-1:], torch.ops.layernorm
    first = operators.forward(x, shape, w, b)[0]
    output, total, mean, rstd = operators.forward.fused(first, shape, w, b, 1e-5, residual)
    return output, total, *operators.backward(dy, total, shape, mean, rstd, w, b, GRADIENTS)[:3]


class BlocksAndOperators(torch.nn.Module):
    """Blocks of models, and operators, in one program, because each ahead-of-time compilation takes seconds."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([LlamaBlock(), MambaBlock(), DiTBlock()])

    def forward(self, x, other, dy, w, b):
        return torch.stack([block(x, other) for block in self.blocks]), add_norm_and_backward(dy, x, other, w, b)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.inductor
def test_saved_programs_run_in_another_process(tmp_path):
    """Exported, traced and scripted programs do not need this package; those compiled ahead of time do.

    A program compiled ahead of time calls the kernels, also where a mean or sum is absent. Inductor compiles the rest
    of its blocks, which therefore round otherwise; the operators alone have the same bits.
    """
    norms, x = torch.nn.Sequential(LayerNorm(8), layernorm_ext.RMSNorm(8)), torch.randn(3, 8)
    torch.export.save(torch.export.export(norms, (x,)), tmp_path / "exported.pt2")
    torch.jit.trace(norms, x).save(tmp_path / "traced.pt")
    torch.jit.script(norms).save(tmp_path / "scripted.pt")
    torch.save((x, norms(x)), tmp_path / "expected.pt")
    model = BlocksAndOperators().requires_grad_(False)
    inputs = tuple(torch.randn(size) for size in ((2, 3, 8), (2, 3, 8), (2, 3, 8), (8,), (8,)))
    with trace_as("kernel"):
        program = torch.export.export(model, inputs)
    fuse_neighbors(program.graph)
    assert sum(getattr(node.target, "namespace", None) == "layernorm" for node in program.graph.nodes) == 8
    # Precompiled headers take longer than one program gains by them, and so do optimizations.
    options = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    path = str(tmp_path / "program.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=options)
    torch.save(inputs, tmp_path / "inputs.pt")
    code = (
        "import sys, torch; sys.modules['layernorm_ext'] = None\n"
        "x, expected = torch.load('expected.pt')\n"
        "programs = torch.export.load('exported.pt2').module(), *map(torch.jit.load, ('traced.pt', 'scripted.pt'))\n"
        "for program in programs: torch.testing.assert_close(program(x), expected)\n"
        "assert not hasattr(torch.ops.layernorm, 'forward')\n"
        "del sys.modules['layernorm_ext']; import layernorm_ext\n"
        "program = torch._inductor.aoti_load_package('program.pt2')\n"
        "torch.save(program(*torch.load('inputs.pt')), 'outputs.pt')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    blocks, operators = torch.load(tmp_path / "outputs.pt")
    expected = model(*inputs)
    torch.testing.assert_close(blocks, expected[0], rtol=1e-6, atol=1e-6)  # some ten roundings of 6e-8
    torch.testing.assert_close(operators, expected[1], **SAME_BITS)


# torch.jit.trace


@pytest.mark.parametrize("setting", ["kernel", None])
def test_jit_traces_match_eager_calls(setting):
    """Traces take any batch, can be saved, and call aten's operators with every setting."""
    model = Model().requires_grad_(False)
    with trace_as(setting):
        traced, x = torch.jit.trace(model, model.input(3)), model.input(7)
    assert "layernorm::" not in str(traced.graph)
    torch.testing.assert_close(save_and_load(traced)(x), model(x), **ANOTHER_ORDER)


@pytest.mark.parametrize("cls", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_jit_trace_of_a_converted_model_has_the_operators_of_the_original(cls):
    """OpenVINO, coremltools, pnnx and fvcore read traces, and must find the operators that they know."""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), cls(8)), torch.randn(3, 5, 8)
    original = torch.jit.trace(model, x)
    assert layernorm_ext.convert(model).replaced
    kinds = [[node.kind() for node in traced.inlined_graph.nodes()] for traced in (original, torch.jit.trace(model, x))]
    assert kinds[0] == kinds[1]


# Adaptive norms


# Shapes of the input, of scale and of shift, and the number of normalized dimensions.
MODULATIONS = {
    "per sample": ((3, 5, 8), (3, 8), (3, 8), 1),
    "mixed": ((3, 5, 8), (3, 8), (3, 1, 8), 1),
    "per position": ((3, 5, 8), (1, 5, 8), (1, 5, 8), 1),
    "per row": ((3, 5, 8), (3, 5, 8), (3, 5, 8), 1),
    "scale per sample, shift shared": ((3, 5, 8), (3, 8), (8,), 1),
    "scale alone": ((3, 5, 8), (3, 8), None, 1),
    "shift alone": ((3, 5, 8), None, (3, 8), 1),
    "neither": ((3, 5, 8), None, None, 1),
    "video": ((2, 3, 4, 8), (2, 3, 8), (2, 3, 8), 1),
    "frames": ((2, 3, 4, 8), (1, 3, 8), (1, 3, 8), 1),
    "two normalized dimensions": ((3, 5, 2, 4), (3, 2, 4), (3, 2, 4), 2),
    "no batch": ((8,), (8,), (8,), 1),
}


class Modulated(torch.nn.Module):
    """Norms whose scale and shift have every shape. They are in one program, because each export takes time."""

    def __init__(self, cls):
        super().__init__()
        self.norms = torch.nn.ModuleList(cls(shape[-dims:]) for shape, *_, dims in MODULATIONS.values())

    def forward(self, inputs):
        return [norm(*arguments) for norm, arguments in zip(self.norms, inputs, strict=True)]


@pytest.mark.parametrize("cls", [AdaLayerNorm, AdaRMSNorm, AddAdaLayerNorm, AddAdaRMSNorm])
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_every_shape_of_scale_and_shift(cls):
    """Eager calls insert the dimensions of scale and shift in C++, and exported programs in Python.

    A gate beside a residual has the shape of the scale or, without a scale, of the shift. Programs of aten's operators
    agree to some roundings of float64; that of the kernels has the same bits.
    """
    model, inputs = Modulated(cls), []
    for *shapes, _ in MODULATIONS.values():
        x, *parameters = (None if shape is None else torch.randn(shape, dtype=F64) for shape in shapes)
        if cls in (AddAdaLayerNorm, AddAdaRMSNorm):
            parameters = [x.cos(), *parameters, next((p.sin() for p in parameters if p is not None), None)]
        inputs.append((x, *parameters))
    expected = model(inputs)
    program = torch.export.export(model, (inputs,))
    assert not calls_kernels(program)
    torch.testing.assert_close(program.module()(inputs), expected, rtol=1e-13, atol=1e-13)
    for norm, arguments, results in zip(model.norms, inputs, expected, strict=True):
        if all(argument is not None for argument in arguments):  # torch.jit.trace takes tensors only
            traced = torch.jit.trace(norm, arguments)
            torch.testing.assert_close(traced(*arguments), results, rtol=1e-13, atol=1e-13)
    with trace_as("kernel"):
        program = torch.export.export(model, (inputs,))
    torch.testing.assert_close(program.module()(inputs), expected, **SAME_BITS)


@pytest.mark.parametrize("cls", [AdaLayerNorm, AdaRMSNorm])
@pytest.mark.parametrize("dtypes", DTYPES_16_BIT, ids=dtypes_id)
def test_adaptive_output_is_rounded_once(cls, dtypes):
    """aten's operators may round to the other neighbor, which is one eps away."""
    tensors = randn((4, 6, 64), dtypes[0]), randn((4, 64), dtypes[1]), randn((4, 64), dtypes[1])
    module = cls(64)
    actual, expected = torch.export.export(module, tensors).module()(*tensors), module(*tensors)
    eps = torch.finfo(dtypes[0]).eps
    torch.testing.assert_close(actual, expected, rtol=eps, atol=1e-6)
    assert (actual != expected).double().mean() < 0.02  # two roundings would differ in a tenth of the elements


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("shape", [(1, 6, 1, 1), (2, 6, 1, 1), (2, 6)], ids=str)
def test_jit_traces_of_parameters_of_images(shape):
    x, w = torch.randn(2, 6, 4, 5, dtype=F64), torch.randn(shape, dtype=F64)
    traced = torch.jit.trace(lambda x, w: rms_norm_2d(x, w), (x, w))
    torch.testing.assert_close(traced(x, w), rms_norm_2d(x, w), **ANOTHER_ORDER)


# Sizes and numbers that are known only at run time


def of_selected_rows(function):
    """Return function(x[rows], w[rows]) for a mask of rows; a parameter that all rows share stays whole."""
    return lambda x, w, rows: function(x[rows], w[rows] if len(w) == len(rows) else w)


def of_repeated_rows(function):
    """Return function(x, w) of the first rows of x and w, repeated as often as the mask `rows` is true."""

    def repeat(t, rows):
        return t[:1].expand(rows.sum().item(), *t.shape[1:])

    return lambda x, w, rows: function(repeat(x, rows), repeat(w, rows))


FUNCTIONS = {
    "layer_norm": lambda x, w: layer_norm(x, (8,), w, 2 * w),
    "weight alone": lambda x, w: layer_norm(x, (8,), w),
    "positions": lambda x, w: layer_norm(x.transpose(0, 1), (8,), w.transpose(0, 1), 2 * w.transpose(0, 1)),
    "shared bias": lambda x, w: layer_norm(x, (8,), w, torch.ones(8)),
    "bias of one sample": lambda x, w: layer_norm(x, (8,), w, torch.ones(1, 1, 8)),
    "add_layer_norm": lambda x, w: layernorm_ext.add_layer_norm(x, x, (8,), w)[0],
    "in place": lambda x, w: layernorm_ext.add_rms_norm(x, 2 * x, (8,), w, inplace=True)[0],
    "gate": lambda x, w: layernorm_ext.add_rms_norm(x, x, (8,), gate=w)[0],
    "gated norm": lambda x, w: layernorm_ext.gated_rms_norm(x, x, (8,), w[0, 0], num_groups=2),
    "ada_layer_norm": lambda x, w: layernorm_ext.ada_layer_norm(x, (8,), w, w),
    "ada_rms_norm": lambda x, w: layernorm_ext.ada_rms_norm(x, (8,), w),
    "images": lambda x, w: layer_norm_2d(x.movedim(-1, 1), w[:, 0], w[:, 0]),
}
DATA_DEPENDENT = {name: of_selected_rows(function) for name, function in FUNCTIONS.items()}
DATA_DEPENDENT["item"] = of_repeated_rows(FUNCTIONS["ada_rms_norm"])
PARAMETER_SHAPES = [(4, 1, 8), (4, 5, 8), (1, 5, 8), (1, 1, 8)]
NUMBERS_FROM_DATA = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


def call_data_dependent(*tensors):
    """Return the outputs of all functions, from one graph, because each compilation takes time."""
    return [call(*tensors) for call in DATA_DEPENDENT.values()]


@pytest.mark.parametrize("shape", PARAMETER_SHAPES, ids=str)
def test_numbers_of_samples_that_depend_on_data(shape):
    """Functions compile without a graph break, with parameters per sample, row or position, as torch's do."""
    rows = torch.tensor([True, False, True, True])
    leaves = [t.requires_grad_() for t in (torch.randn(4, 5, 8), torch.randn(shape))]
    with torch._dynamo.config.patch(NUMBERS_FROM_DATA):
        compiled = torch.compile(call_data_dependent, fullgraph=True, backend="aot_eager")
        for some in (rows, ~rows | rows):
            expected, actual = (
                with_gradients(lambda *t, f=f, some=some: f(*t, some), leaves) for f in (call_data_dependent, compiled)
            )
            for name, a, e in zip(DATA_DEPENDENT, actual[0], expected[0], strict=True):
                torch.testing.assert_close(a, e, **REORDERED_BY_INDUCTOR, msg=lambda text, name=name: name + text)
            torch.testing.assert_close(actual[1], expected[1], **REORDERED_BY_INDUCTOR)


@pytest.mark.inductor
def test_inductor_compiles_numbers_of_samples_that_depend_on_data():
    """One shape of the parameters is enough, because Inductor only passes them to an operator."""
    tensors = torch.randn(4, 5, 8), torch.randn(4, 1, 8), torch.tensor([True, False, True, True])
    with torch._dynamo.config.patch(NUMBERS_FROM_DATA):
        results = torch.compile(call_data_dependent, fullgraph=True)(*tensors)
    for name, actual, expected in zip(DATA_DEPENDENT, results, call_data_dependent(*tensors), strict=True):
        assert torch.equal(actual, expected), name


def test_sizes_that_differ_at_run_time_are_refused():
    """The compiled program checks sizes that the tracer could not compare."""

    def call(x, w, rows, others):
        return layer_norm(x[rows], (8,), w[others])

    x, w, rows = torch.randn(4, 5, 8), torch.randn(4, 1, 8), torch.tensor([True, False, True, True])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, w, rows, rows), call(x, w, rows, rows))
        with pytest.raises(RuntimeError):
            compiled(x, w, rows, torch.tensor([True, True, False, False]))
        # The weight of one sample fits three samples as well. Each gradient has the shape of its own parameter.
        leaves = [t.requires_grad_() for t in (x[:3].clone(), w)]
        one = torch.tensor([False, True, False, False])
        for some in (rows, one):
            gradients = []
            for norm in (layer_norm, torch.compile(layer_norm, fullgraph=True, backend="aot_eager")):
                function = lambda x, w, norm=norm, some=some: (norm(x, (8,), w[some], w[:3]),)  # noqa: E731
                gradients.append(with_gradients(function, leaves)[1])
            for actual, expected in zip(*gradients, strict=True):
                torch.testing.assert_close(actual, expected, **REORDERED_BY_INDUCTOR)


def norms_with(eps, x):
    """Return the outputs of every kind of function with this eps."""
    return [
        layer_norm(x, (8,), eps=eps),
        rms_norm(x, (8,), eps=eps),
        layernorm_ext.add_layer_norm(x, x, (8,), eps=eps)[0],
        layernorm_ext.ada_layer_norm(x, (8,), eps=eps),
        layer_norm_2d(x, eps=eps),
        rms_norm_2d(x, eps=eps),
    ]


@pytest.mark.parametrize("setting", ["kernel", "aten"])
def test_eps_from_a_tensor_breaks_the_graph(setting):
    """torch's functions break it, too: a recorded operator needs a constant eps. A Python number is constant."""
    x, eps = torch.randn(3, 8, 8), torch.tensor(0.5)
    with trace_as(setting), torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(lambda eps, x: norms_with(eps.item(), x), backend="aot_eager")
        torch.testing.assert_close(compiled(eps, x), norms_with(0.5, x), **REORDERED_BY_INDUCTOR)
        as_float = torch.compile(norms_with, backend="aot_eager", fullgraph=True)
        for number in (0.5, 0.25, 0.0, 1):
            torch.testing.assert_close(as_float(number, x), norms_with(number, x), **REORDERED_BY_INDUCTOR)


# trace_as


def test_unknown_operators_are_an_error():
    trace_as("aten")
    with pytest.raises(ValueError, match='Expected operators to be "kernel", "aten" or None, but got \'onnx\''):
        trace_as("onnx")
    assert tracing._operators == "aten"


def test_objects_are_entered_again_nested_and_in_any_order():
    """Each `with` of a trace_as object sets its choice and restores the one before the `with`."""

    def enter(setting, before):
        assert tracing._operators == before
        with setting:
            assert tracing._operators == "kernel"
            with trace_as("aten"):
                with setting, setting:
                    assert tracing._operators == "kernel"
                assert tracing._operators == "aten"
            assert tracing._operators == "kernel"
            trace_as(None)
        assert tracing._operators == before

    kernel = trace_as("kernel")
    with kernel:
        assert tracing._operators == "kernel"
    assert tracing._operators is None  # the first `with` restores the choice before trace_as("kernel") was called
    for before in (None, None, "aten"):
        trace_as(before)
        enter(kernel, before)
    kernel, aten = trace_as("kernel"), trace_as("aten")
    enter(kernel, "aten")
    with aten, pytest.raises(KeyError), kernel:
        raise KeyError
    assert tracing._operators == "aten"


def test_compiled_code_enters_an_object_again():
    def function(x):
        setting = trace_as("aten")
        with setting:
            y = layer_norm(x, (8,))
        with setting:
            return layer_norm(y, (8,))

    recorder = AotEagerAndRecordGraphs()
    torch.compile(function, backend=recorder, fullgraph=True)(torch.randn(3, 8))
    assert tracing._operators is None
    assert not any(calls_kernels(module) for module in recorder.fw_graphs)


def test_eager_calls_ignore_the_setting():
    x = torch.randn(64, 64)
    expected = layer_norm(x, (64,))
    with trace_as("aten"):
        assert torch.equal(layer_norm(x, (64,)), expected)


@pytest.mark.parametrize("tracing_mode", ["real", "symbolic"])
def test_make_fx_records_the_chosen_operators(tracing_mode):
    def gradients(x, r, w):
        output, total = layernorm_ext.add_layer_norm(x, r.clone(), (8,), w, inplace=True)
        return torch.autograd.grad((output * total).sum(), [x, w])

    tensors = [torch.randn(*size, 8, dtype=F64, requires_grad=True) for size in ((3,), (3,), ())]
    for operators in ("kernel", "aten"):
        trace_as(operators)
        graph = make_fx(gradients, tracing_mode=tracing_mode)(*tensors)
        assert calls_kernels(graph) == (operators == "kernel")
        torch.testing.assert_close(graph(*tensors), gradients(*tensors), **ANOTHER_ORDER)


@pytest.mark.parametrize("norm", [LayerNorm(64), layernorm_ext.RMSNorm(64, eps=1e-6)], ids=repr)
def test_aten_operators_have_the_range_of_torch(norm):
    """Squares of 1e30 overflow in aten's operators and not in the kernels, as the documents say."""
    x = 1e30 * randn((3, 64), F32)
    program = torch.export.export(norm, (x,)).module()
    torch.testing.assert_close(program(x), super(type(norm), norm).forward(x), equal_nan=True, **SAME_BITS)
    assert not torch.allclose(program(x), norm(x)) and norm(x).isfinite().all()
