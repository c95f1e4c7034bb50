"""Tests of both ONNX exporters of torch, with their default options; onnxruntime computes the results."""

import io
import warnings

import pytest
import torch

import layernorm_ext
from layernorm_ext import LayerNorm, LayerNorm2d, RMSNorm, convert, layer_norm, rms_norm, trace_as

pytestmark = pytest.mark.integration
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

# Values are about 1. onnxruntime adds in another order, which in float32 is some roundings of 6e-8, and may round the
# result to the other neighbour in float16 and bfloat16. In float64 its eps is the float32 nearest to 1e-5, whose
# error of 3e-13 counts more than the arithmetic.
TOLERANCE = {F64: 1e-11, F32: 2e-6, F16: torch.finfo(F16).eps, BF16: torch.finfo(BF16).eps}

exporters = pytest.mark.parametrize("dynamo", [True, False], ids=["torch.export", "TorchScript"])


class Norm(torch.nn.Module):
    """With any combination of parameters, which torch.nn.LayerNorm has not."""

    def __init__(self, normalized_shape, dtype, weight, bias, eps):
        super().__init__()
        self.normalized_shape, self.eps = normalized_shape, eps
        self.weight = torch.nn.Parameter(torch.randn(normalized_shape).to(dtype)) if weight else None
        self.bias = torch.nn.Parameter(torch.randn(normalized_shape).to(dtype)) if bias else None

    def forward(self, x):
        return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def export(model, x, dynamo, **options):
    """Export a model that takes any batch."""
    if dynamo:
        shapes = ({0: torch.export.Dim("batch")},)
        options |= {"dynamic_shapes": shapes, "verbose": False}
        program = torch.onnx.export(model.eval(), (x,), dynamo=True, **options).model_proto
    else:
        buffer = io.BytesIO()
        options |= {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}
        with warnings.catch_warnings(action="ignore"):  # the exporter warns that it is the older one
            torch.onnx.export(model.eval(), (x,), buffer, dynamo=False, **options)
        program = onnx.load_from_string(buffer.getvalue())
    onnx.checker.check_model(program, full_check=True)
    return program


def run(program, x):
    """The outputs of the program; numpy has no bfloat16, so that it travels as its bits."""
    session = onnxruntime.InferenceSession(program.SerializeToString(), providers=["CPUExecutionProvider"])
    if x.dtype == BF16:
        bits = x.view(torch.uint16).numpy()
        value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.BFLOAT16)
    else:
        value = onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy())
    (name,) = (value.name for value in session.get_inputs())
    return [torch.from_dlpack(output._ortvalue) for output in session.run_with_ort_values(None, {name: value})]


def nodes(program):
    return [node.op_type for node in program.graph.node]


def attributes(program):
    (node,) = (node for node in program.graph.node if node.op_type == "LayerNormalization")
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


@exporters
@pytest.mark.parametrize("normalized_shape", [(8,), (5, 8)], ids=str)
@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True), (False, False)])
def test_parameters_and_dimensions(dynamo, normalized_shape, weight, bias):
    """The batch is another than the exported one; the axis counts from the end."""
    model = Norm(normalized_shape, F32, weight, bias, eps=0.5)
    program = export(model, torch.randn(3, 5, 8), dynamo)
    assert set(nodes(program)) <= {"LayerNormalization", "Constant", "Identity"}
    assert attributes(program)["axis"] == -len(normalized_shape)
    assert attributes(program)["epsilon"] == 0.5
    x = torch.randn(7, 5, 8)
    torch.testing.assert_close(run(program, x)[0], model(x), rtol=TOLERANCE[F32], atol=TOLERANCE[F32])


PAIRS = [(F64, F64), (F32, F32), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32)]


@exporters
@pytest.mark.parametrize(("dtype", "param_dtype"), PAIRS)
@pytest.mark.parametrize("weight", [True, False])
def test_dtypes(dynamo, dtype, param_dtype, weight):
    """Input and output keep their dtype; float32 parameters are not rounded to it."""
    model = Norm((8,), param_dtype, weight, bias=True, eps=1e-5)
    program = export(model, torch.randn(3, 8).to(dtype), dynamo)
    expected = ["LayerNormalization"] if dtype == param_dtype else ["Cast", "LayerNormalization", "Cast"]
    assert [node for node in nodes(program) if node not in ("Constant", "Identity")] == expected
    x = torch.randn(64, 8).to(dtype)
    # assert_close compares the dtypes too
    torch.testing.assert_close(run(program, x)[0], model(x), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@exporters
def test_model(dynamo):
    """One node for each normalization, between operators of torch's."""
    model = torch.nn.Sequential(LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.ReLU(), LayerNorm(16, bias=False))
    program = export(model, torch.randn(3, 8), dynamo)
    assert nodes(program).count("LayerNormalization") == 2
    x = torch.randn(7, 8)
    torch.testing.assert_close(run(program, x)[0], model(x), rtol=1e-5, atol=1e-5)  # a matrix product between


@exporters
@pytest.mark.parametrize("cls", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_converted_layers(dynamo, cls):
    """A converted layer gives the nodes of the original, if torch can export the original."""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), cls(8)), torch.randn(3, 8)
    exportable = dynamo or cls is torch.nn.LayerNorm
    expected = nodes(export(model, x, dynamo)) if exportable else None
    convert(model)
    program = export(model, x, dynamo)
    assert expected in (None, nodes(program))
    torch.testing.assert_close(run(program, x)[0], model(x), rtol=1e-5, atol=1e-5)  # a matrix product before


def test_rms_norm_is_a_standard_operator():
    """The standard has RMSNormalization from opset 23 on."""
    program = export(RMSNorm(8), torch.randn(3, 8), dynamo=True, opset_version=23)
    assert nodes(program) == ["RMSNormalization"]


@exporters
@pytest.mark.parametrize(("dtype", "param_dtype"), PAIRS)
@pytest.mark.parametrize("member", ["centred", "rms", "rms centred", "add", "images"])
def test_family(dynamo, member, dtype, param_dtype):
    """The other members of the family use several nodes, and keep the dtypes of input and parameters."""

    class Member(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = (torch.nn.Parameter(torch.randn(8).to(param_dtype)) for _ in range(2))

        def forward(self, x):
            w, b = self.w, self.b
            if member == "images":
                return layernorm_ext.layer_norm_2d(x, w, b)
            if member == "add":
                return layernorm_ext.add_layer_norm(x, x, (8,), w, b)
            centred = "centred" in member
            if "rms" in member:
                return rms_norm(x, (8,), w, zero_centered_weight=centred)
            return layer_norm(x, (8,), w, b, zero_centered_weight=centred)

    shape = (8, 2, 3) if member == "images" else (5, 8)
    model = Member()
    program = export(model, torch.randn(3, *shape).to(dtype), dynamo)
    x = torch.randn(7, *shape).to(dtype)
    expected = model(x)
    expected = expected if isinstance(expected, tuple) else (expected,)
    tolerance = TOLERANCE[dtype]
    for actual, e in zip(run(program, x), expected, strict=True):
        torch.testing.assert_close(actual, e, rtol=tolerance, atol=tolerance)


@exporters
def test_images(dynamo):
    """Images become the standard operator between two transpositions."""
    model = LayerNorm2d(8)
    program = export(model, torch.randn(2, 8, 4, 4), dynamo)
    assert [node for node in nodes(program) if node != "Constant"] == ["Transpose", "LayerNormalization", "Transpose"]
    x = torch.randn(5, 8, 4, 4)
    torch.testing.assert_close(run(program, x)[0], model(x), rtol=TOLERANCE[F32], atol=TOLERANCE[F32])


@exporters
def test_kernels_have_no_translation(dynamo):
    """With "kernel", the exporters refuse the operator by name; a caller may pass a translation for it."""
    with trace_as("kernel"), pytest.raises(Exception, match=r"layernorm(::|\.)forward"):
        export(LayerNorm(8), torch.randn(3, 8), dynamo)
