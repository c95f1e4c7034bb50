"""Tiny models of other packages with random weights, made from configurations, and their results."""

import inspect

import pytest
import torch

from support.reference import F32, F64

# Options of all models of transformers, which map them to their own names and ignore others.
CONFIG = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
CONFIG |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 16, "image_size": 32, "patch_size": 8}
CONFIG |= {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}

MAMBA2 = {"state_size": 4, "num_heads": 4, "n_groups": 1, "expand": 2, "chunk_size": 4}
# Layers without experts, whose operators take no float64.
QWEN3_NEXT = {"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]}
QWEN3_NEXT |= {"linear_num_value_heads": 2, "linear_num_key_heads": 1}
QWEN3_NEXT |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}


def build_model(name, options):
    package, _, model = name.rpartition(" ")
    if package == "timm":
        return pytest.importorskip("timm").create_model(model, **options)
    if package == "diffusers":
        return pytest.importorskip("diffusers").DiTTransformer2DModel(**options)
    if package == "torch":
        layer = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        return torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(16))
    transformers = pytest.importorskip("transformers")
    config = name.partition("For")[0].removesuffix("LMHeadModel") + "Config"
    return getattr(transformers, name)(getattr(transformers, config)(**CONFIG | options))


def build_inputs(model, dtype):
    """Return the first argument of the model and, if it has them, those of the decoder or of the condition."""
    shapes = {"pixel_values": (2, 3, 32, 32), "x": (2, 3, 32, 32), "input_features": (2, 4, 20), "src": (2, 5, 16)}
    shapes["hidden_states"] = (2, 4, 8, 8)
    first, *others = inspect.signature(model.forward).parameters
    inputs = {first: torch.randn(shapes[first], dtype=dtype) if first in shapes else torch.randint(3, 50, (2, 7))}
    if "timestep" in others:
        inputs |= {"timestep": torch.tensor([1, 2]), "class_labels": torch.tensor([3, 4])}
    if "decoder_input_ids" in others:
        inputs["decoder_input_ids"] = torch.randint(3, 50, (2, 7))
    return inputs


def logits_and_gradients(model, inputs):
    """Return the logits and the parameters' gradients of a loss that weights each logit differently."""
    torch.manual_seed(1)  # for dropout
    outputs = model(**inputs)
    logits = getattr(outputs, "logits", getattr(outputs, "sample", outputs))
    loss = logits.flatten() @ torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype)
    parameters = {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    return {"logits": logits.detach(), **dict(zip(parameters, gradients, strict=True))}


def assert_close(actual, expected, tolerance):
    """Compare two dicts of tensors; errors are relative to the largest element of each tensor, or to 1."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        atol = tolerance * max(1, value.abs().max().item())
        torch.testing.assert_close(actual[name], value, rtol=0, atol=atol, msg=lambda text, name=name: name + text)


class Float64Throughout(torch.overrides.TorchFunctionMode):
    """Replaces conversions to float32 by float64; Hugging Face's layers would round float64 input to float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args = [F64 if value is F32 else value for value in args]
        return function(*args, **{name: F64 if value is F32 else value for name, value in (kwargs or {}).items()})
