"""integrations.huggingface registers layers with the library `kernels`, which compute what the originals compute."""

import copy
import importlib
import inspect
import itertools
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.models import randomize
from support.packages import Float64Throughout, assert_close, logits_and_gradients, model_and_inputs
from support.reference import BF16, F16, F32, F64

from layernorm_ext import _build_info

HOOK = "layernorm_ext.integrations.huggingface"
pytestmark = [pytest.mark.usefixtures("one_thread", "torchvision"), pytest.mark.integration]


@pytest.fixture(scope="module")
def kernels(torchvision):
    """Return the package kernels, to which this package is registered."""
    package = pytest.importorskip("kernels")
    importlib.import_module(HOOK).register()
    return package


def modes(kernels):
    either = (kernels.Mode.INFERENCE, kernels.Mode.TRAINING)
    return [*either, *(mode | kernels.Mode.TORCH_COMPILE for mode in either)]


def is_ours(module):
    return module.forward.__func__.__module__ == HOOK


def norms(model):
    """Return the layers that this package replaces."""
    names = ("RMSNorm", "RMSNormZeroCentered", "RMSNormGated", "RMSNormGateFirst")
    return [module for module in model.modules() if getattr(module, "kernel_layer_name", None) in names]


# Models

# Name of the model -> the number of kernelized layers.
KERNELIZED = {"LlamaForCausalLM": 5, "Qwen3ForCausalLM": 9, "GemmaForCausalLM": 5, "Qwen3NextForCausalLM": 8}
KERNELIZED["Mamba2ForCausalLM"] = 2  # the other norms are not decorated


@pytest.mark.parametrize("name", KERNELIZED)
def test_kernelized_models_match_float64_logits_and_gradients_in_every_mode(name, kernels):
    model, inputs = model_and_inputs(name, F64)
    with Float64Throughout():
        expected = logits_and_gradients(model, inputs)
        for mode in modes(kernels):
            kernelized = kernels.kernelize(copy.deepcopy(model), mode=mode, device="cpu")
            assert sum(map(is_ours, norms(kernelized))) == KERNELIZED[name]
            # Some ten layers each round some ten times by 1e-16.
            assert_close(logits_and_gradients(kernelized, inputs), expected, 1e-13)


@pytest.mark.parametrize("name", KERNELIZED)
def test_kernelized_models_compile_without_graph_breaks(name, kernels):
    torch._dynamo.reset()
    model, inputs = model_and_inputs(name, F32)
    expected = logits_and_gradients(model, inputs)
    kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu")
    # aot_eager cannot run the backward of the original Qwen3-Next either: it lacks Inductor's decompositions.
    backend = "aot_eager_decomp_partition" if "Next" in name else "aot_eager"
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert_close(logits_and_gradients(compiled, inputs), expected, 1e-5)  # some ten layers with ten roundings of 6e-8


def test_transformers_own_switch_uses_the_mapping(kernels, tmp_path):
    model, inputs = model_and_inputs("LlamaForCausalLM", F32)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, use_kernels=True)
    assert all(map(is_ours, norms(loaded))) and len(norms(loaded)) == 5
    # Some ten layers each round some ten times by 6e-8.
    assert_close({"logits": loaded(**inputs).logits}, {"logits": model(**inputs).logits}, 1e-5)


def test_transformers_own_mapping_has_this_package_only_where_it_has_kernels(kernels):
    """`use_kernels=True` replaces this package's mapping by transformers' own, so register() changes that one, too."""
    from transformers.integrations.hub_kernels import get_kernel_mapping_transformers

    mapping = get_kernel_mapping_transformers()
    ours = {device for device, repository in mapping["RMSNorm"].items() if HOOK in repr(repository)}
    assert ours == ({"cpu", "cuda"} if _build_info.with_cuda else {"cpu"})
    assert set(mapping["RMSNorm"]) > ours and len(mapping) > 3


# Layers


def decorated_classes():
    """Yield the classes of transformers that this package's layers replace, and their names for ``kernels``.

    The classes must take a width, and those with groups the width of a group.
    """
    import transformers

    for path in sorted(Path(transformers.__path__[0]).glob("models/*/modeling_*.py")):
        if re.search("class .*RMSNorm", path.read_text()):
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            for cls in vars(module).values():
                name = getattr(cls, "kernel_layer_name", "")
                if name.startswith("RMSNorm") and cls.__module__ == module.__name__:
                    yield cls, name


def build_layer(cls):
    return randomize(cls(8, 4) if "group_size" in inspect.signature(cls).parameters else cls(8))


ACTIVATIONS = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}


def exact_norm(layer, name, x, *gate):
    """Return the result of a decorated class in float64."""
    eps = getattr(layer, "variance_epsilon", None) or layer.eps
    weight = layer.weight.double() + (name == "RMSNormZeroCentered")
    factor = ACTIVATIONS[getattr(layer, "activation", "silu")](gate[0].double()) if gate else 1
    if name == "RMSNormGateFirst":
        x, factor = x.double() * factor, 1
    groups = x.double().unflatten(-1, (-1, getattr(layer, "group_size", 8)))
    return torch.nn.functional.rms_norm(groups, groups.shape[-1:], None, eps).flatten(-2) * weight * factor


def test_every_decorated_class_of_transformers_gets_its_output_and_dtype(kernels):
    classes = dict(decorated_classes())
    count = Counter(classes.values())
    assert len(classes) > 100 and count["RMSNormZeroCentered"] >= 12
    assert count["RMSNormGated"] >= 8 and count["RMSNormGateFirst"] >= 5
    for cls, name in classes.items():
        gate_dtypes = [F32, BF16] * ("Gate" in name) + [None] * (name != "RMSNormGated")  # RMSNormGated needs a gate
        for x_dtype, dtype, gate_dtype in itertools.product((F64, F32, F16, BF16), (F64, F32, F16, BF16), gate_dtypes):
            layer, x = build_layer(cls).to(dtype), torch.randn(3, 8).to(x_dtype)
            gate = (torch.randn(3, 8).to(gate_dtype),) if gate_dtype else ()
            theirs = layer(x, *gate)
            kernels.kernelize(layer, mode=kernels.Mode.TRAINING, device="cpu")
            ours = layer(x, *gate)
            assert is_ours(layer) and ours.dtype == theirs.dtype
            # float32 arithmetic loses less than 1e-6, and the output is rounded once.
            rtol = torch.finfo(ours.dtype).eps / 2 + 1e-6
            torch.testing.assert_close(ours.double(), exact_norm(layer, name, x, *gate), rtol=rtol, atol=1e-6)


def test_calls_that_the_original_refuses_are_refused(kernels):
    """The gate is missing for a class that needs one, or groups do not divide the width."""
    x = torch.randn(3, 8)
    for cls, name in decorated_classes():
        has_groups = "group_size" in inspect.signature(cls).parameters
        if name == "RMSNormGated" or has_groups:
            layer = cls(8, 3) if has_groups else cls(8)
            inputs, match = ((x, x), r"group_size=3 .*\[8\]") if has_groups else ((x, None), f"gate.*{cls.__name__}")
            with pytest.raises((AttributeError, RuntimeError)):
                layer(*inputs)
            kernels.kernelize(layer, mode=kernels.Mode.INFERENCE, device="cpu")
            with pytest.raises((TypeError, ValueError), match=match):
                layer(*inputs)


def test_output_dtypes_of_mixed_dtypes_are_compiled(kernels):
    """The original is asked for the dtype, with an empty input."""
    dtypes = {"LlamaRMSNorm": F32, "GptOssRMSNorm": BF16, "MambaRMSNormGated": F32, "Qwen3_5RMSNormGated": BF16}
    classes = {cls.__name__: cls for cls, _ in decorated_classes()}
    for name, dtype in dtypes.items():
        layer = randomize(classes[name](8))
        inputs = torch.randn(1 + ("Gated" in name), 3, 8, dtype=BF16).unbind()
        kernels.kernelize(layer, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu")
        torch._dynamo.reset()
        y = torch.compile(layer, backend="aot_eager", fullgraph=True)(*inputs)
        assert y.dtype == dtype
        torch.testing.assert_close(y, layer(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("cls", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_torchs_layers_are_replaced_where_users_decorate_them(cls, kernels, monkeypatch):
    class Subclass(cls):
        def forward(self, x):
            return super().forward(x) + 1

    for attribute in ("kernel_layer_name", "kernel_condition"):  # undone after the test
        monkeypatch.setattr(cls, attribute, None, raising=False)
    kernels.replace_kernel_forward_from_hub(cls, cls.__name__, condition=lambda norm: type(norm) is cls)
    model = torch.nn.Sequential(cls(8, eps=1e-3), cls((3, 8)), cls(8, elementwise_affine=False), Subclass(8)).double()
    randomize(model)
    x = torch.randn(2, 3, 8, dtype=F64)
    expected = model(x)
    kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    assert [is_ours(layer) for layer in model] == [True, True, True, False]
    torch.testing.assert_close(model(x), expected, rtol=1e-13, atol=1e-13)  # four layers of ten roundings by 1e-16


def test_subclasses_of_classes_that_this_package_decorates_keep_their_formula(kernels):
    modeling = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    subclass = type(
        "Doubled", (modeling.GemmaRMSNorm,), {"forward": lambda self, x: 2 * super(subclass, self).forward(x)}
    )
    layer, x = subclass(8), torch.randn(3, 8)
    expected = layer(x)
    kernelized = kernels.kernelize(layer, mode=kernels.Mode.TRAINING, device="cpu")
    assert torch.equal(kernelized(x), expected)


def test_users_mappings_of_other_layers_stay_in_force(kernels):
    class Doubles(torch.nn.Module):
        def forward(self, x):
            return 2 * x

    class Other(torch.nn.Module):
        kernel_layer_name = "Other"

        def forward(self, x):
            return x

    class Repository:
        def load(self):
            return Doubles

    kernels.register_kernel_mapping({"Other": {"cpu": Repository()}})
    importlib.import_module(HOOK).register()
    assert kernels.kernelize(Other(), mode=kernels.Mode.INFERENCE, device="cpu")(3) == 6


# Versions


def test_a_transformers_for_other_kernels_is_an_import_error(kernels, monkeypatch):
    from transformers.utils import import_utils

    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: False)
    with pytest.raises(ImportError, match=r"transformers needs kernels [\d.]+ or newer, before [\d.]+, but kernels "):
        importlib.import_module(HOOK).register()
