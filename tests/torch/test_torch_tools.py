"""torch's conventions and tools: types of eps, quantization, TorchScript, counted operations."""

import copy

import numpy as np
import pytest
import torch
from support.family import IMAGES, MODULES, ROWS, module_and_inputs
from support.models import save_and_load
from torch.ao import quantization
from torch.ao.quantization import quantize_fx
from torch.utils.flop_counter import FlopCounterMode

import layernorm_ext
from layernorm_ext import LayerNorm, LayerNorm2d, RMSNorm, RMSNorm2d

# torch.ao.quantization is deprecated and warns in every function.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

# Types of eps

# Values of every type that torch takes, and of some that it refuses.
EPS = [np.array([1e-5]), np.array(1e-5), np.array([1e-5, 1e-5]), torch.tensor([1e-5]), "1e-5", 1e-5j, [1e-5]]
EPS += [np.float64(1e-5), np.float32(1e-5), np.int64(1), torch.tensor(1e-5), torch.tensor(1), 1, True, 1e-5]
EPS += [torch.tensor(1e-5, requires_grad=True), 10**400]


@pytest.mark.parametrize("eps", EPS, ids=repr)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_eps_is_accepted_or_refused_like_torch(name, eps):
    ours, torchs = getattr(layernorm_ext, name), getattr(torch.nn.functional, name.removeprefix("add_"))
    x = torch.randn(2, 3)
    inputs = (x, x) if name.startswith("add") else (x,)
    try:
        torchs(x, (3,), eps=eps)
    except (TypeError, OverflowError) as error:
        with pytest.raises(type(error)):
            ours(*inputs, (3,), eps=eps)
    else:
        torch.testing.assert_close(ours(*inputs, (3,), eps=eps), ours(*inputs, (3,), eps=float(eps)), rtol=0, atol=0)


# Quantization


def between_linear_layers(norm):
    return torch.nn.Sequential(torch.nn.Linear(8, 8), norm, torch.nn.Linear(8, 8))


@pytest.mark.parametrize(
    "norm, function",
    [(LayerNorm(8), layernorm_ext.layer_norm), (RMSNorm(8), layernorm_ext.rms_norm)],
    ids=["layer", "rms"],
)
def test_fx_quantization_keeps_our_layers_in_float(monkeypatch, norm, function):
    monkeypatch.setattr(torch.backends.quantized, "engine", "x86")
    model, x = between_linear_layers(norm), torch.randn(50, 8)
    mapping = quantization.get_default_qconfig_mapping("x86")
    prepared = quantize_fx.prepare_fx(copy.deepcopy(model).eval(), mapping, (x,))
    prepared(x)
    quantized = quantize_fx.convert_fx(prepared)
    assert isinstance(getattr(quantized, "0"), torch.ao.nn.quantized.Linear)
    assert function in [node.target for node in quantized.graph.nodes]  # torch.fx records the function of our layer
    # The inputs and outputs of the two linear layers are quantized: numbers from about -4 to 4 in 128 steps of 2^-4,
    # each off by up to 2^-5.
    torch.testing.assert_close(quantized(x), model(x), rtol=0, atol=0.3)


# TorchScript: LayerNorm, RMSNorm and their 2d forms become calls of torch's functions; other layers, and our functions,
# raise torch's errors

ZERO_CENTERED, NO_PARAMETERS = {"zero_centered_weight": True}, {"elementwise_affine": False}
# Torch and the kernels round some ten operations in float32 by 6e-8.
ROUNDED = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("options", [{}, ZERO_CENTERED, NO_PARAMETERS, ZERO_CENTERED | NO_PARAMETERS], ids=str)
@pytest.mark.parametrize("cls", [LayerNorm, RMSNorm, LayerNorm2d, RMSNorm2d])
def test_scripted_layers_match_eager_calls(cls, options):
    module, (x,) = module_and_inputs(cls, options, [IMAGES if cls in (LayerNorm2d, RMSNorm2d) else ROWS])
    scripted = torch.jit.script(module)
    assert "layernorm::" not in str(scripted.inlined_graph) and type(module) is cls
    for each in (scripted, save_and_load(scripted)):
        torch.testing.assert_close(each(x), module(x), **ROUNDED)


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
def test_scripting_other_layers_and_functions_raises_an_error(function):
    with pytest.raises((RuntimeError, torch.jit.frontend.NotSupportedError)):
        torch.jit.script(function)


# Counted operations


@pytest.mark.parametrize("cls", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_flop_counter_counts_as_many_operations_as_for_the_original(cls):
    """Torch counts products of matrices, convolutions and attention alone, in forward and backward."""
    model, x = between_linear_layers(cls(8)), torch.randn(50, 8)

    def count():
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
        return counter.get_flop_counts()

    expected = count()
    assert layernorm_ext.convert(model).replaced
    assert count() == expected
    assert sum(expected["Global"].values()) == 5 * (2 * 50 * 8 * 8)  # x needs no gradient


# Modules in compiled functions


@pytest.mark.parametrize("module_class", MODULES, ids=lambda module_class: module_class.__name__)
def test_compiled_functions_may_create_modules(module_class):
    """Dynamo cannot trace a constructor that sets two attributes before it calls that of the base class."""

    def normalize(x):
        return module_class(4)(*([x, x] if "Add" in module_class.__name__ else [x]))

    x = torch.randn(2, 4, 4)
    torch.testing.assert_close(torch.compile(normalize, backend="eager")(x), normalize(x), rtol=0, atol=0)
