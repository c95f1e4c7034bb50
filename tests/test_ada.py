"""ada_layer_norm and ada_rms_norm: shapes of scale and shift, and precision.

test_family.py tests the kernels for parameters per sample and per position, test_functions.py the derivatives, and
test_errors.py the errors.
"""

import pytest
import torch
from reference import DTYPES_16_BIT, F64, dtypes_id
from shapes import randn

from layernorm_ext import AdaLayerNorm, AdaRMSNorm, ada_layer_norm, ada_rms_norm, trace_as

FUNCTIONS = {"layer": ada_layer_norm, "rms": ada_rms_norm}
MODULES = {"layer": AdaLayerNorm, "rms": AdaRMSNorm}
functions = pytest.mark.parametrize("name", FUNCTIONS)

# Shapes of the input, of scale and of shift, and the number of normalized dimensions.
SHAPES = {
    "per sample": ((3, 5, 8), (3, 8), (3, 8), 1),
    "per sample, all dimensions": ((3, 5, 8), (3, 1, 8), (3, 1, 8), 1),
    "mixed": ((3, 5, 8), (3, 8), (3, 1, 8), 1),
    "per position": ((3, 5, 8), (1, 5, 8), (1, 5, 8), 1),
    "per row": ((3, 5, 8), (3, 5, 8), (3, 5, 8), 1),
    "shared": ((3, 5, 8), (8,), (8,), 1),
    "scale per sample, shift shared": ((3, 5, 8), (3, 8), (8,), 1),
    "scale alone": ((3, 5, 8), (3, 8), None, 1),
    "shift alone": ((3, 5, 8), None, (3, 8), 1),
    "neither": ((3, 5, 8), None, None, 1),
    "video": ((2, 3, 4, 8), (2, 3, 8), (2, 3, 8), 1),
    "frames": ((2, 3, 4, 8), (1, 3, 8), (1, 3, 8), 1),
    "two normalized dimensions": ((3, 5, 2, 4), (3, 2, 4), (3, 2, 4), 2),
    "no batch": ((8,), (8,), (8,), 1),
}


@functions
@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_every_shape_is_accepted_by_eager_calls_and_tracers(name, sizes):
    """Eager calls insert the dimensions of scale and shift in C++, and exported programs in Python.

    Exported programs call only aten and agree to some roundings of float64; the others have the same bits.
    """
    x, *parameters = (None if s is None else torch.randn(s, dtype=F64) for s in sizes[:3])
    module = MODULES[name](sizes[0][-sizes[3] :])
    expected = module(x, *parameters)
    program = torch.export.export(module, (x, *parameters), strict=False)
    assert not any(getattr(node.target, "namespace", None) == "layernorm" for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x, *parameters), expected, rtol=1e-13, atol=1e-13)
    with trace_as("kernel"):
        program = torch.export.export(module, (x, *parameters))
    assert torch.equal(program.module()(x, *parameters), expected)
    assert torch.equal(torch.jit.script(module)(x, *parameters), expected)
    if None not in parameters:
        assert torch.equal(torch.jit.trace(module, (x, *parameters))(x, *parameters), expected)


@functions
@pytest.mark.parametrize("dtypes", DTYPES_16_BIT, ids=dtypes_id)
def test_output_is_rounded_once(name, dtypes):
    """Eager calls have the bits of the operator with a zero-centered weight, which test_family.py tests.

    aten's operators may round to the other neighbour, which is one eps away.
    """
    x, scale, shift = tensors = randn((4, 6, 64), dtypes[0]), randn((4, 64), dtypes[1]), randn((4, 64), dtypes[1])
    module = MODULES[name](64)
    actual, expected = torch.export.export(module, tensors).module()(*tensors), module(*tensors)
    options = {"rms": name == "rms", "zero_centered_weight": True}
    assert torch.equal(
        expected, torch.ops.layernorm.forward(x, (64,), scale[:, None], shift[:, None], 1e-6, **options)[0]
    )
    eps = torch.finfo(dtypes[0]).eps
    torch.testing.assert_close(actual, expected, rtol=eps, atol=1e-6)
    assert (actual != expected).double().mean() < 0.02  # two roundings would differ in a tenth of the elements
