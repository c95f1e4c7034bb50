"""Tests of torch.jit.script: modules and functions give the bits of eager calls, saved and loaded too."""

import io
import subprocess
import sys

import pytest
import torch

from layernorm_ext import (
    AddLayerNorm,
    AddRMSNorm,
    LayerNorm,
    LayerNorm2d,
    LazyLayerNorm,
    RMSNorm,
    add_layer_norm,
    add_rms_norm,
    convert,
    layer_norm,
    layer_norm_2d,
    rms_norm,
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

MODULES = {
    "LayerNorm": lambda: LayerNorm(8),
    "LayerNorm of two dimensions": lambda: LayerNorm((5, 8), eps=0.1),
    "LayerNorm without bias": lambda: LayerNorm(8, bias=False),
    "LayerNorm without parameters": lambda: LayerNorm(8, elementwise_affine=False),
    "zero-centred LayerNorm": lambda: LayerNorm(8, zero_centered_weight=True),
    "memory-efficient LayerNorm": lambda: LayerNorm(8, memory_efficient=True),
    "RMSNorm": lambda: RMSNorm(8),
    "RMSNorm with eps": lambda: RMSNorm(8, eps=0.1),
    "RMSNorm without weight": lambda: RMSNorm(8, elementwise_affine=False),
    "zero-centred RMSNorm": lambda: RMSNorm(8, zero_centered_weight=True),
    "LayerNorm2d": lambda: LayerNorm2d(8),
    "LayerNorm2d without parameters": lambda: LayerNorm2d(8, elementwise_affine=False),
    "AddLayerNorm": lambda: AddLayerNorm(8),
    "AddLayerNorm in place": lambda: AddLayerNorm(8, inplace=True),
    "AddRMSNorm": lambda: AddRMSNorm(8),
    "AddRMSNorm in place": lambda: AddRMSNorm(8, zero_centered_weight=True, inplace=True),
}
modules = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())


def save_and_load(scripted):
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def randomized(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def call(module, dtype=torch.float32):
    """Return the outputs and the gradients of inputs and parameters."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, 8, 5, 3) if getattr(module, "original_name", type(module).__name__) == "LayerNorm2d" else (3, 5, 8)
    x, residual = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    takes_residual = getattr(module, "original_name", type(module).__name__).startswith("Add")
    outputs = module(x, residual * 1) if takes_residual else (module(x),)
    loss = sum(output.float().sin().sum() for output in outputs)
    inputs = [x, *([residual] if takes_residual else []), *module.parameters()]
    return *outputs, *torch.autograd.grad(loss, inputs)


@modules
def test_modules(make):
    module = randomized(make())
    scripted = torch.jit.script(module)
    for each in (scripted, save_and_load(scripted)):
        for _ in range(3):  # TorchScript optimizes the later calls
            torch.testing.assert_close(call(each), call(module), rtol=0, atol=0)


@pytest.mark.parametrize("make", [MODULES["LayerNorm"], MODULES["RMSNorm"], MODULES["LayerNorm2d"]])
def test_sixteen_bits(make):
    module = randomized(make()).bfloat16()
    torch.testing.assert_close(
        call(torch.jit.script(module), torch.bfloat16), call(module, torch.bfloat16), rtol=0, atol=0
    )


def test_default_eps_of_float64():
    x = torch.randn(3, 8, dtype=torch.float64) * 1e-8
    module = RMSNorm(8, dtype=torch.float64)
    assert torch.equal(torch.jit.script(module)(x), module(x))


@pytest.mark.parametrize("cls", [AddLayerNorm, AddRMSNorm])
def test_the_first_block_has_no_residual(cls):
    module, x = randomized(cls(8)), torch.randn(3, 8)
    for actual, expected in zip(torch.jit.script(module)(x), module(x), strict=True):
        assert torch.equal(actual, expected)


class Model(torch.nn.Module):
    """Holds this package's modules and calls its functions."""

    def __init__(self):
        super().__init__()
        self.convolution, self.images = torch.nn.Conv2d(3, 8, 3), LayerNorm2d(8)
        self.first, self.blocks = LayerNorm(8), torch.nn.ModuleList([AddRMSNorm(8), AddRMSNorm(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.images(self.convolution(x)).flatten(2).transpose(1, 2)
        x, residual = torch.relu(self.first(x)), x
        for block in self.blocks:
            x, residual = block(x, residual)
        weight = torch.ones(8)
        x = layer_norm(x, [8], weight, eps=0.1, zero_centered_weight=True) + rms_norm(x, [8], weight)
        x, residual = add_layer_norm(x, residual, [8], weight, inplace=True)
        x, residual = add_rms_norm(x, residual, [8])
        return layer_norm_2d(x.transpose(1, 2).unsqueeze(-1), weight)


def test_model():
    model, x = Model().eval(), torch.randn(2, 3, 6, 6)
    scripted = torch.jit.script(model)
    expected = model(x)
    for each in (scripted, save_and_load(scripted), torch.jit.freeze(scripted)):
        assert torch.equal(each(x), expected)
    assert [type(module) for module in model.blocks] == [AddRMSNorm] * 2  # the model itself does not change


@pytest.mark.parametrize("function", [layer_norm, rms_norm, add_layer_norm, add_rms_norm, layer_norm_2d])
def test_functions(function):
    scripted = torch.jit.script(function)
    images = function is layer_norm_2d
    x = torch.randn(2, 8, 3, 3) if images else torch.randn(3, 8)
    arguments = [x, *([x] if "add" in function.__name__ else []), *([] if images else [[8]]), torch.randn(8)]
    torch.testing.assert_close(scripted(*arguments), function(*arguments), rtol=0, atol=0)


def test_converted_model():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.RMSNorm(8))
    convert(model)
    x = torch.randn(3, 8)
    assert torch.equal(torch.jit.script(model)(x), model(x))


def test_errors():
    for module, x, message in [
        (LayerNorm(8), torch.randn(3, 7), r"Given normalized_shape=\[8\], expected input with shape \[\*, 8\]"),
        (RMSNorm(8), torch.ones(3, 8).long(), "Expected input of dtype Double, Float, Half or BFloat16"),
        (LayerNorm2d(8, elementwise_affine=False), torch.randn(2, 7, 3, 3), r"Expected input of shape \[N, 8, H, W\]"),
        (LayerNorm2d(8), torch.randn(2, 8, 3), r"Expected input of shape \[N, C, H, W\]"),
    ]:
        scripted = torch.jit.script(module)
        with pytest.raises((RuntimeError, NotImplementedError, torch.jit.Error), match=message):
            scripted(x)


def test_lazy_modules_are_refused_before_their_first_call():
    lazy = LazyLayerNorm()
    with pytest.raises(RuntimeError, match="uninitialized|Uninitialized|lazy|Lazy"):
        torch.jit.script(lazy)
    lazy(torch.randn(3, 8))
    assert torch.jit.script(lazy)(torch.randn(3, 8)).shape == (3, 8)


def test_a_saved_module_needs_the_package(tmp_path):
    """docs/pytorch.md says so."""
    path = tmp_path / "norm.pt"
    torch.jit.script(LayerNorm(8)).save(path)
    for line, expected in (("import layernorm_ext", 0), ("", 1)):
        code = f"import torch\n{line}\ntorch.jit.load({str(path)!r})(torch.randn(3, 8))"
        finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
        assert finished.returncode == expected, finished.stderr
        assert bool(expected) == ("layernorm::norm_forward" in finished.stderr)
