"""torch.jit.script: modules and functions give the bits of eager calls, also after saving and loading."""

import io
import subprocess
import sys

import pytest
import torch

import layernorm_ext
from layernorm_ext import AddRMSNorm, LayerNorm, LayerNorm2d, add_layer_norm, add_rms_norm, layer_norm

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

ROWS, IMAGES = (3, 5, 8), (2, 8, 5, 3)

# Module and shape of its input; a module with a residual takes two inputs.
MODULES = {
    "LayerNorm": (lambda: LayerNorm(8), ROWS),
    "LayerNorm of two dimensions": (lambda: LayerNorm((5, 8), eps=0.1), ROWS),
    "LayerNorm without parameters": (lambda: LayerNorm(8, elementwise_affine=False), ROWS),
    "zero-centered LayerNorm": (lambda: LayerNorm(8, zero_centered_weight=True), ROWS),
    "memory-efficient LayerNorm": (lambda: LayerNorm(8, memory_efficient=True), ROWS),
    "RMSNorm": (lambda: layernorm_ext.RMSNorm(8), ROWS),
    "float64 RMSNorm with another default eps": (lambda: layernorm_ext.RMSNorm(8, dtype=torch.float64), ROWS),
    "RMSNorm with eps": (lambda: layernorm_ext.RMSNorm(8, eps=0.1), ROWS),
    "RMSNorm without weight": (lambda: layernorm_ext.RMSNorm(8, elementwise_affine=False), ROWS),
    "zero-centered RMSNorm": (lambda: layernorm_ext.RMSNorm(8, zero_centered_weight=True), ROWS),
    "LayerNorm2d": (lambda: LayerNorm2d(8), IMAGES),
    "LayerNorm2d without parameters": (lambda: LayerNorm2d(8, elementwise_affine=False), IMAGES),
    "memory-efficient LayerNorm2d": (lambda: LayerNorm2d(8, memory_efficient=True), IMAGES),
    "RMSNorm2d": (lambda: layernorm_ext.RMSNorm2d(8, zero_centered_weight=True), IMAGES),
    "AddLayerNorm2d": (lambda: layernorm_ext.AddLayerNorm2d(8), IMAGES, IMAGES),
    "AddLayerNorm2d of the first block": (lambda: layernorm_ext.AddLayerNorm2d(8), IMAGES),
    "AddRMSNorm2d of the first block": (lambda: layernorm_ext.AddRMSNorm2d(8), IMAGES),
    "AddRMSNorm2d in place": (lambda: layernorm_ext.AddRMSNorm2d(8, inplace=True), IMAGES, IMAGES),
    "AdaLayerNorm2d": (lambda: layernorm_ext.AdaLayerNorm2d(8), IMAGES, (2, 8), (2, 8)),
    "AdaRMSNorm2d without shift": (lambda: layernorm_ext.AdaRMSNorm2d(8), IMAGES, (2, 8, 1, 1)),
    "AddLayerNorm": (lambda: layernorm_ext.AddLayerNorm(8), ROWS, ROWS),
    "AddLayerNorm of the first block": (lambda: layernorm_ext.AddLayerNorm(8), ROWS),
    "AddRMSNorm": (lambda: AddRMSNorm(8), ROWS, ROWS),
    "AddRMSNorm in place": (lambda: AddRMSNorm(8, zero_centered_weight=True, inplace=True), ROWS, ROWS),
    "AddRMSNorm of the first block": (lambda: AddRMSNorm(8), ROWS),
    "AdaLayerNorm": (lambda: layernorm_ext.AdaLayerNorm(8), ROWS, (3, 8), (3, 8)),
    "AdaRMSNorm": (lambda: layernorm_ext.AdaRMSNorm(8), ROWS, (8,), ROWS),
}


def save_and_load(scripted):
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def module_and_inputs(name):
    """Return a module with random parameters, and inputs of their dtype."""
    make, *shapes = MODULES[name]
    module = make()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    return module, [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("name", MODULES)
def test_scripted_modules_have_the_same_bits(name):
    module, inputs = module_and_inputs(name)

    def outputs_and_gradients(call):
        copies = [x * 1 for x in inputs]  # a leaf cannot change in place
        outputs = call(*copies)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if getattr(module, "inplace", False):
            assert outputs[1].data_ptr() == copies[1].data_ptr()
        loss = sum(output.float().sin().sum() for output in outputs)
        return *outputs, *torch.autograd.grad(loss, [*inputs, *call.parameters()])

    scripted = torch.jit.script(module)
    for each in (scripted, save_and_load(scripted)):
        for _ in range(3):  # TorchScript optimizes the later calls
            torch.testing.assert_close(outputs_and_gradients(each), outputs_and_gradients(module), rtol=0, atol=0)


def call_functions(x: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(8)
    y = layernorm_ext.rms_norm(x, [8], weight)
    x = layer_norm(x, [8], weight, eps=0.1, zero_centered_weight=True) + y
    x, residual = add_layer_norm(x, y, [8], weight, inplace=True)
    x, residual = add_rms_norm(x, residual, [8])
    return layernorm_ext.layer_norm_2d(x.transpose(1, 2).unsqueeze(-1), weight)


def test_scripted_functions_have_the_same_bits():
    x, scripted = torch.randn(ROWS), torch.jit.script(call_functions)
    for each in (scripted, save_and_load(scripted)):
        assert torch.equal(each(x), call_functions(x))


def test_scripted_converted_model_has_the_same_bits():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.RMSNorm(8)).eval()
    assert layernorm_ext.convert(model).replaced
    x, scripted = torch.randn(3, 8), torch.jit.script(model)
    for each in (scripted, torch.jit.freeze(scripted)):
        assert torch.equal(each(x), model(x))
    assert type(model[1]) is LayerNorm  # scripting leaves the model as it was


@pytest.mark.parametrize(
    ("module", "x", "message"),
    [
        (LayerNorm2d(8, elementwise_affine=False), torch.randn(2, 7, 3, 3), r"Expected input of shape \[N, 8, \*\]"),
        (LayerNorm2d(8), torch.randn(8), r"Expected input of shape \[N, C, \*\]"),
    ],
    ids=["channels", "dimensions"],
)
def test_scripted_modules_give_the_errors_of_eager_calls(module, x, message):
    for each in (module, torch.jit.script(module)):
        with pytest.raises((RuntimeError, NotImplementedError, torch.jit.Error), match=message):
            each(x)


def test_lazy_module_can_be_scripted_after_its_first_call():
    lazy = layernorm_ext.LazyLayerNorm()
    with pytest.raises(RuntimeError, match="uninitialized|Uninitialized|lazy|Lazy"):
        torch.jit.script(lazy)
    lazy(torch.randn(3, 8))
    assert torch.jit.script(lazy)(torch.randn(3, 8)).shape == (3, 8)


def test_saved_module_runs_only_with_this_package(tmp_path):
    torch.jit.script(LayerNorm(8)).save(tmp_path / "norm.pt")
    code = (
        "import torch\n"
        "try: torch.jit.load('norm.pt')\n"
        "except RuntimeError as error: assert 'layernorm::forward' in str(error)\n"
        "else: raise AssertionError('The module was loaded')\n"
        "import layernorm_ext\n"
        "torch.jit.load('norm.pt')(torch.randn(3, 8))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
