"""Tiny models of other packages with random weights, made from configurations, and their results."""

import inspect

import pytest
import torch

from support.models import randomize
from support.reference import F32, F64

# Options for every model of transformers: each maps these names to its own and ignores those that it lacks.
CONFIG = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
CONFIG |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 16, "image_size": 32, "patch_size": 8}
CONFIG |= {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}

MAMBA = {"state_size": 4, "residual_in_fp32": True}
MAMBA2 = {"state_size": 4, "num_heads": 4, "n_groups": 1, "expand": 2, "chunk_size": 4}
T5 = {"d_ff": 24, "num_decoder_layers": 2, "use_cache": False}  # torch 2.11 cannot trace the creation of the cache
WHISPER = {"num_key_value_heads": 2, "decoder_attention_heads": 2, "decoder_layers": 1, "encoder_ffn_dim": 24}
WHISPER |= {"decoder_ffn_dim": 24, "num_mel_bins": 4, "max_source_positions": 10, "max_target_positions": 16}
CONVNEXT = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_hidden_layers": 4, "patch_size": 4}
# "mlp_only_layers" replaces the experts, whose operators take no float64, by an MLP.
QWEN3_NEXT = {"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]}
QWEN3_NEXT |= {"linear_num_value_heads": 2, "linear_num_key_heads": 1}
QWEN3_NEXT |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 2}
DIT |= {"sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10}
TIMM_CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16), "num_classes": 5}
TIMM_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_heads": 2, "depth": 2, "num_classes": 5}
SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)}

# Name of the model -> its options, and the number of layers of each kind that convert() replaces.
MODELS = {
    "BertForMaskedLM": ({}, {"LayerNorm by LayerNorm": 6}),
    "GPT2LMHeadModel": ({}, {"LayerNorm by LayerNorm": 5}),
    "ViTForImageClassification": ({}, {"LayerNorm by LayerNorm": 5}),
    "WhisperForConditionalGeneration": (WHISPER, {"LayerNorm by LayerNorm": 9}),
    "LlamaForCausalLM": ({}, {"LlamaRMSNorm by RMSNorm": 5}),
    "GemmaForCausalLM": ({}, {"GemmaRMSNorm by RMSNorm": 5}),
    "Qwen3ForCausalLM": ({}, {"Qwen3RMSNorm by RMSNorm": 9}),  # also normalizes queries and keys
    "T5ForConditionalGeneration": (T5, {"T5LayerNorm by RMSNorm": 12}),
    "ConvNextForImageClassification": (
        CONVNEXT,
        {"ConvNextLayerNorm by LayerNorm": 4, "ConvNextLayerNorm by LayerNorm2d": 4, "LayerNorm by LayerNorm": 1},
    ),
    "MambaForCausalLM": (MAMBA, {"MambaRMSNorm by RMSNorm": 3}),
    "Mamba2ForCausalLM": (MAMBA2, {"Mamba2RMSNorm by RMSNorm": 3, "MambaRMSNormGated by GatedRMSNorm": 2}),
    "Qwen3NextForCausalLM": (
        QWEN3_NEXT,
        {"Qwen3NextRMSNorm by RMSNorm": 7, "Qwen3NextRMSNormGated by GatedRMSNorm": 1},
    ),
    "diffusers DiTTransformer2DModel": (DIT, {"LayerNorm by LayerNorm": 5}),  # without parameters, in adaptive blocks
    "timm convnext_tiny": (TIMM_CONVNEXT, {"LayerNorm by LayerNorm": 4, "LayerNorm2d by LayerNorm2d": 5}),
    "timm vit_tiny_patch16_224": (TIMM_VIT, {"LayerNorm by LayerNorm": 5}),
    "timm vit_tiny_patch16_224 with LayerScale": (TIMM_VIT | {"init_values": 0.1}, {"LayerNorm by LayerNorm": 5}),
    "timm swin_tiny_patch4_window7_224": (SWIN, {"LayerNorm by LayerNorm": 11}),
    "torch TransformerEncoder": ({}, {"LayerNorm by LayerNorm": 5}),
}


def model_and_inputs(name, dtype):
    """Return a model of MODELS with random parameters, and its inputs by name."""
    model = randomize(build_model(name, MODELS[name][0])).to(dtype)
    return model, build_inputs(model, dtype)


def build_model(name, options):
    """Return a model of torch, timm, diffusers or, if the name has no prefix, transformers."""
    package, _, model = name.removesuffix(" with LayerScale").rpartition(" ")
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
    """Return a model's first argument and, if it has them, the decoder's or those that condition its diffusion."""
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
    torch.manual_seed(1)  # so that dropout is the same in each call
    outputs = model(**inputs)
    logits = getattr(outputs, "logits", getattr(outputs, "sample", outputs))
    loss = logits.flatten() @ torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype)
    # torch.compile adds a prefix to the names.
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
    """Replaces conversions to float32, with which layers of transformers would round, by conversions to float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args = [F64 if value is F32 else value for value in args]
        return function(*args, **{name: F64 if value is F32 else value for name, value in (kwargs or {}).items()})
