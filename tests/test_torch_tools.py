"""Torch's own tools accept our layers: strides, kinds of eps, quantization, per-sample gradients."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from reference import F16, F64
from torch.ao.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    get_default_qconfig,
    get_default_qconfig_mapping,
    prepare,
    quantize_fx,
)
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

import layernorm_ext

# ---- strides --------------------------------------------------------------------------------------------------------

IMAGES = {
    "contiguous": lambda: torch.randn(2, 3, 4, 5),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "sliced channels_last": lambda: torch.randn(2, 8, 4, 5).to(memory_format=torch.channels_last)[:, 2:5],
    "one channel": lambda: torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "one pixel": lambda: torch.randn(2, 3, 1, 1).to(memory_format=torch.channels_last),
    "transposed batch": lambda: torch.randn(3, 2, 4, 5).transpose(0, 1),
    "transposed rows": lambda: torch.randn(2, 3, 5, 4).transpose(2, 3),
    "empty": lambda: torch.randn(0, 3, 4, 5).to(memory_format=torch.channels_last),
}


def strides(x):
    """Return the strides that decide where elements are."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1 and x.numel()]


def rms_norm(x, dims, function=layernorm_ext.rms_norm, weight=None):
    return function(x, x.shape[-dims:], weight, 1e-5)


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_rms_norm_keeps_channels_last(image, dims, compiled):
    """The strides are those of torch's: forward, compiled and on the meta device."""
    torch._dynamo.reset()
    x = IMAGES[image]().double().requires_grad_()
    weight = torch.randn(x.shape[-dims:], dtype=F64)
    ours = torch.compile(rms_norm, backend="aot_eager", fullgraph=True) if compiled else rms_norm
    actual, expected = ours(x, dims, weight=weight), rms_norm(x, dims, torch.nn.functional.rms_norm, weight)
    assert strides(actual) == strides(expected)
    # Some roundings of float64.
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)
    dy = torch.randn_like(expected)
    gradients = [torch.autograd.grad(y, x, dy)[0] for y in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)  # of sums of up to 60 products
    assert rms_norm(x.detach().to("meta"), dims).stride() == actual.stride()


def test_channels_last_operators_are_what_torch_expects(backend):
    x = torch.randn(2, 3, 4, 5, device=backend.device).to(memory_format=torch.channels_last).requires_grad_()
    torch.library.opcheck(backend.ops.norm_forward.default, (x, None, (5,), None), {"rms": True})


# ---- eps ------------------------------------------------------------------------------------------------------------

FUNCTIONS = {
    "layer_norm": (layernorm_ext.layer_norm, torch.nn.functional.layer_norm),
    "rms_norm": (layernorm_ext.rms_norm, torch.nn.functional.rms_norm),
    "add_rms_norm": (lambda x, *args, eps: layernorm_ext.add_rms_norm(x, x, *args, eps=eps), torch.rms_norm),
    "layer_norm, zero-centred": (
        lambda *args, eps: layernorm_ext.layer_norm(*args, eps=eps, zero_centered_weight=True),
        torch.nn.functional.layer_norm,
    ),
}
EPS = [np.array([1e-5]), np.array(1e-5), np.array([1e-5, 1e-5]), torch.tensor([1e-5]), "1e-5", 1e-5j, [1e-5]]
EPS += [np.float64(1e-5), np.float32(1e-5), np.int64(1), torch.tensor(1e-5), torch.tensor(1), 1, True, 1e-5]
EPS += [torch.tensor(1e-5, requires_grad=True)]


@pytest.mark.parametrize("eps", EPS, ids=repr)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_eps_as_torch_takes_it(name, eps):
    """ours raises the exception that torch's raises, and computes with the number that torch's takes."""
    ours, torchs = FUNCTIONS[name]
    x = torch.randn(2, 3)
    try:
        torchs(x, (3,), eps=eps)
    except TypeError:
        with pytest.raises(TypeError, match="norm"):
            ours(x, (3,), eps=eps)
    else:
        actual, expected = ours(x, (3,), eps=eps), ours(x, (3,), eps=float(eps))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_eps_out_of_range():
    with pytest.raises(OverflowError):
        layernorm_ext.layer_norm(torch.randn(2, 3), (3,), eps=10**400)


# ---- quantization ---------------------------------------------------------------------------------------------------


class Quantizable(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.quantize, self.dequantize = QuantStub(), DeQuantStub()
        self.before, self.norm, self.after = torch.nn.Linear(8, 8), norm, torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.dequantize(self.after(self.norm(self.before(self.quantize(x)))))


def quantized_eagerly(model, x):
    model = copy.deepcopy(model).eval()
    model.qconfig = get_default_qconfig("x86")
    model = prepare(model)
    model(x)
    return convert(model)


def quantized_by_fx(model, x):
    model = quantize_fx.prepare_fx(copy.deepcopy(model).eval(), get_default_qconfig_mapping("x86"), (x,))
    model(x)
    return quantize_fx.convert_fx(model)


@pytest.fixture
def quantized_kernels(monkeypatch):
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "x86"
    yield
    torch.backends.quantized.engine = engine


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("centred", [False, True], ids=["", "centred"])
def test_eager_quantization(quantized_kernels, bias, centred):
    """torch's quantized layer replaces ours as it replaces torch's."""
    ours = Quantizable(layernorm_ext.LayerNorm(8, bias=bias, zero_centered_weight=centred))
    ours.norm.weight.data.normal_()
    theirs = copy.deepcopy(ours)
    theirs.norm = torch.nn.LayerNorm(8, bias=bias)
    theirs.norm.load_state_dict(ours.norm.state_dict())
    theirs.norm.weight.data += centred
    x = torch.randn(50, 8)
    quantized = quantized_eagerly(ours, x)
    assert type(quantized.norm) is torch.ao.nn.quantized.LayerNorm
    # The observers of the two models see outputs that differ by roundings, which may change the result by a step.
    step = (quantized(x).max() - quantized(x).min()) / 127
    torch.testing.assert_close(quantized(x), quantized_eagerly(theirs, x)(x), rtol=0, atol=step.item())


@pytest.mark.parametrize("norm", [layernorm_ext.LayerNorm(8), layernorm_ext.RMSNorm(8)], ids=["layer", "rms"])
def test_fx_quantization(quantized_kernels, norm):
    """The layers around ours are quantized, and ours computes in float."""
    model, x = Quantizable(norm), torch.randn(50, 8)
    quantized = quantized_by_fx(model, x)
    assert isinstance(quantized.before, torch.ao.nn.quantized.Linear)
    # Three layers quantize numbers up to 4 in steps of 2^-5.
    torch.testing.assert_close(quantized(x), model(x), rtol=0, atol=0.3)


@pytest.mark.parametrize("quantize", [quantized_eagerly, quantized_by_fx])
def test_quantization_after_revert(quantized_kernels, quantize):
    """A converted model that is reverted first is quantized to the same bits as the original."""
    model, x = Quantizable(torch.nn.LayerNorm(8)), torch.randn(50, 8)
    expected = quantize(model, x)(x)
    layernorm_ext.convert(model)
    layernorm_ext.revert(model)
    assert torch.equal(quantize(model, x)(x), expected)


# ---- per-sample gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_per_sample_gradients(bias):
    """Each sample's gradients are those of the sample alone."""
    norm = layernorm_ext.LayerNorm((3, 8), bias=bias, dtype=F64)
    norm.weight.data.normal_()
    x, dy = torch.randn(4, 5, 3, 8, dtype=F64, requires_grad=True), torch.randn(4, 5, 3, 8, dtype=F64)
    call_for_per_sample_grads(norm, loss_reduction="sum")(x).backward(dy)
    (dx,) = torch.autograd.grad(norm(x), x, dy)
    # Some roundings of float64.
    torch.testing.assert_close(x.grad, dx, rtol=1e-12, atol=1e-12)
    for sample in range(4):
        expected = torch.autograd.grad(norm(x[sample]), list(norm.parameters()), dy[sample])
        for parameter, gradient in zip(norm.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad_sample[sample], gradient, rtol=1e-12, atol=1e-12)


def test_per_sample_gradients_in_a_model():
    """Either of the two packages may be imported first."""
    program = """
    import torch
    {}
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), layernorm_ext.LayerNorm(8))
    call_for_per_sample_grads(model)(torch.randn(4, 8)).sum().backward()
    assert model[1].weight.grad_sample.shape == (4, 8)
    """
    imports = ["import layernorm_ext", "from torch.nn.utils._per_sample_grad import call_for_per_sample_grads"]
    for order in (imports, imports[::-1]):
        code = "\n".join(line.strip() for line in program.format("\n".join(order)).splitlines())
        subprocess.run([sys.executable, "-c", code], check=True)


def test_per_sample_gradients_of_zero_centred_weights_are_refused():
    norm = layernorm_ext.LayerNorm(8, zero_centered_weight=True)
    with pytest.raises(RuntimeError, match="zero_centered_weight"):
        call_for_per_sample_grads(norm)(torch.randn(4, 8))


def test_half_modules_in_quantizable_models_stay_float():
    """The table that is extended names exact classes: others keep their own way."""
    mapping = torch.ao.quantization.get_default_static_quant_module_mappings()
    assert layernorm_ext.LayerNorm in mapping and layernorm_ext.AddLayerNorm not in mapping
    assert layernorm_ext.LayerNorm(8, dtype=F16)(torch.randn(2, 8)).dtype == torch.float32
