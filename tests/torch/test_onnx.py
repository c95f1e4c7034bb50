"""Both ONNX exporters of torch, with their default options; onnxruntime runs the exported programs."""

import io
import warnings

import pytest
import torch
from support.models import FAMILY, Model, ViewOfNorm, randomize
from support.reference import BF16, DTYPES, F16, F32, F64, dtypes_id

from layernorm_ext import LayerNorm, LayerNorm2d, RMSNorm, RMSNorm2d, convert, trace_as

pytestmark = pytest.mark.integration
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

# Values are about 1. onnxruntime adds in another order: some roundings of 6e-8 in float32, by which a 16-bit result may
# round to the other neighbor. In float64, the eps of a program is the float32 nearest to 1e-5, which is off by 3e-13.
TOLERANCE = {F64: 1e-11, F32: 2e-6, F16: torch.finfo(F16).eps, BF16: torch.finfo(BF16).eps}

exporters = pytest.mark.parametrize("dynamo", [True, False], ids=["torch.export", "TorchScript"])


def export(model, x, dynamo, **options):
    """Export a model for any batch size by the exporter of torch.export (`dynamo`) or of TorchScript."""
    if dynamo:
        shapes = ({0: torch.export.Dim("batch")},)
        options |= {"dynamic_shapes": shapes, "verbose": False}
        program = torch.onnx.export(model.eval(), (x,), dynamo=True, **options).model_proto
    else:
        buffer = io.BytesIO()
        options |= {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}
        with warnings.catch_warnings(action="ignore"):  # the exporter is deprecated
            warnings.simplefilter("error", torch.jit.TracerWarning)
            torch.onnx.export(model.eval(), (x,), buffer, dynamo=False, **options)
        program = onnx.load_from_string(buffer.getvalue())
    onnx.checker.check_model(program, full_check=True)
    return program


def run(program, x):
    session = onnxruntime.InferenceSession(program.SerializeToString(), providers=["CPUExecutionProvider"])
    if x.dtype == BF16:  # numpy has no bfloat16
        bits = x.view(torch.uint16).numpy()
        value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx.TensorProto.BFLOAT16)
    else:
        value = onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy())
    (name,) = (value.name for value in session.get_inputs())
    return tuple(torch.from_dlpack(o._ortvalue) for o in session.run_with_ort_values(None, {name: value}))


def assert_exports(model, x, dynamo, tolerance):
    """Compare the exported program, for a batch of another size, with the model, and return its operators.

    `dynamo` chooses the exporter.
    """
    program = export(model, torch.cat([x, x]), dynamo)
    assert all(output.type.tensor_type.shape.dim[0].dim_param for output in program.graph.output), "a fixed batch size"
    expected = torch.utils._pytree.tree_leaves(model(x))
    torch.testing.assert_close(run(program, x), tuple(expected), rtol=tolerance, atol=tolerance)  # compares dtypes too
    return [node for node in program.graph.node if node.op_type not in ("Constant", "Identity")]


def types(nodes):
    return [node.op_type for node in nodes]


@exporters
@pytest.mark.parametrize("normalized_shape", [(8,), (5, 8)], ids=str)
@pytest.mark.parametrize("absent", [(), ("bias",), ("weight",), ("weight", "bias")], ids=str)
def test_layer_norm_is_one_operator(dynamo, normalized_shape, absent):
    model = randomize(LayerNorm(normalized_shape, eps=0.5))
    for name in absent:
        setattr(model, name, None)
    (node,) = assert_exports(model, torch.randn(3, 5, 8), dynamo, TOLERANCE[F32])
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert node.op_type == "LayerNormalization"
    assert attributes["axis"] == -len(normalized_shape)  # so that the program takes any number of dimensions
    assert attributes["epsilon"] == 0.5


@exporters
@pytest.mark.parametrize("dtypes", DTYPES, ids=dtypes_id)
def test_family_keeps_dtypes(dynamo, dtypes):
    """The output has the dtype of the input, and float32 parameters are not rounded to it."""
    dtype, parameter_dtype = dtypes
    # torch's exporter drops an eps of 2e-16, and onnxruntime cannot expand bfloat16.
    members = [name for name in FAMILY if "default eps" not in name and (dtype != BF16 or "inplace" not in name)]
    model = Model(*members, dtypes=(dtype, parameter_dtype, parameter_dtype))
    assert_exports(model, model.input(16), dynamo, TOLERANCE[dtype])
    casts = [] if dtype == parameter_dtype else ["Cast"]
    nodes = assert_exports(randomize(LayerNorm(8, dtype=parameter_dtype)), model.input(16), dynamo, TOLERANCE[dtype])
    assert types(nodes) == [*casts, "LayerNormalization", *casts]


@exporters
def test_images_take_two_transpositions(dynamo):
    for pixels in ((), (4,), (4, 4)):
        x = torch.randn(5, 8, *pixels)
        nodes = assert_exports(randomize(LayerNorm2d(8)), x, dynamo, TOLERANCE[F32])
        transposition = ["Transpose"] if pixels else []
        assert types(nodes) == [*transposition, "LayerNormalization", *transposition]
        assert_exports(randomize(RMSNorm2d(8)), x, dynamo, TOLERANCE[F32])


@exporters
def test_views_of_the_norm_of_a_transposed_tensor(dynamo):
    assert_exports(ViewOfNorm(), torch.randn(2, 8, 5), dynamo, 1e-5)  # with some roundings of 6e-8 in the convolution


@exporters
@pytest.mark.parametrize("cls", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_converted_layers_give_the_operators_of_the_original(dynamo, cls):
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), cls(8)), torch.randn(3, 8)
    is_exportable = dynamo or cls is torch.nn.LayerNorm  # torch's older exporter cannot export torch's RMSNorm
    expected = assert_exports(model, x, dynamo, 1e-5) if is_exportable else None
    convert(model)
    actual = assert_exports(model, x, dynamo, 1e-5)  # with some roundings of 6e-8 in the matrix product
    assert expected is None or types(actual) == types(expected)


def test_rms_norm_is_one_operator_from_opset_23_on():
    program = export(RMSNorm(8), torch.randn(3, 8), dynamo=True, opset_version=23)
    assert types(program.graph.node) == ["RMSNormalization"]


def test_the_operator_of_the_kernels_is_not_exported():
    """The exporter refuses to export the operator that trace_as("kernel") records, and names it."""
    with trace_as("kernel"), pytest.raises(Exception, match=r"layernorm(::|\.)forward"):
        export(LayerNorm(8), torch.randn(3, 8), dynamo=True)
