"""torch.jit.script: the layers that replace torch's compile to torch's functions; the others raise torch's errors."""

import subprocess
import sys

import pytest
import torch
from support.family import IMAGES, ROWS, module_and_inputs
from support.models import save_and_load

import layernorm_ext
from layernorm_ext import LayerNorm, LayerNorm2d, RMSNorm, RMSNorm2d

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

ZERO_CENTERED, NO_PARAMETERS = {"zero_centered_weight": True}, {"elementwise_affine": False}
# Torch and the kernels round some ten operations in float32 by 6e-8.
ROUNDED = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("options", [{}, ZERO_CENTERED, NO_PARAMETERS, ZERO_CENTERED | NO_PARAMETERS], ids=str)
@pytest.mark.parametrize("cls", [LayerNorm, RMSNorm, LayerNorm2d, RMSNorm2d])
def test_scripted_layers_match_eager_calls(cls, options):
    module, (x,) = module_and_inputs(cls, options, [IMAGES if cls in (LayerNorm2d, RMSNorm2d) else ROWS])
    scripted = torch.jit.script(module)
    assert "layernorm::" not in str(scripted.inlined_graph)
    for each in (scripted, save_and_load(scripted)):
        torch.testing.assert_close(each(x), module(x), **ROUNDED)


def test_scripted_converted_model_runs_without_this_package(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.RMSNorm(8)).eval()
    assert layernorm_ext.convert(model).replaced
    x, scripted = torch.randn(3, 8), torch.jit.script(model)
    assert type(model[1]) is LayerNorm  # scripting leaves the model as it was
    scripted.save(tmp_path / "model.pt")
    torch.save((x, model(x)), tmp_path / "results.pt")
    code = (
        "import sys, torch\n"
        "x, y = torch.load('results.pt')\n"
        f"torch.testing.assert_close(torch.jit.load('model.pt')(x), y, **{ROUNDED})\n"
        "assert 'layernorm_ext' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.parametrize(
    "function",
    [
        layernorm_ext.layer_norm,
        layernorm_ext.AddLayerNorm(8),
        layernorm_ext.AdaRMSNorm(8),
        layernorm_ext.GatedRMSNorm(8),
    ],
    ids=["function", "AddLayerNorm", "AdaRMSNorm", "GatedRMSNorm"],
)
def test_others_raise_an_error_of_torch(function):
    with pytest.raises((RuntimeError, torch.jit.frontend.NotSupportedError)):
        torch.jit.script(function)
