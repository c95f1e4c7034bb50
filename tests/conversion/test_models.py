"""convert() on the models and layers of other packages: tiny models with random weights, made from configurations."""

import copy
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.models import randomize
from support.packages import (
    MAMBA,
    MAMBA2,
    MODELS,
    T5,
    Float64Throughout,
    assert_close,
    build_inputs,
    build_model,
    logits_and_gradients,
    model_and_inputs,
)
from support.reference import BF16, F16, F32, F64

from layernorm_ext import LayerNorm, LayerNorm2d, RMSNorm, RMSNorm2d, convert, revert

pytestmark = [pytest.mark.usefixtures("one_thread", "torchvision"), pytest.mark.integration]

# Whole models


@pytest.mark.parametrize("name", MODELS)
def test_float64_logits_and_gradients_match_the_original(name):
    model, inputs = model_and_inputs(name, F64)
    original = copy.deepcopy(model)
    report = convert(model)
    assert not report.skipped
    assert Counter(re.search(r"\w+ by \w+", text)[0] for text in report.replaced.values()) == MODELS[name][1]
    assert model.state_dict().keys() == original.state_dict().keys()

    with Float64Throughout():
        actual, expected = (logits_and_gradients(each, inputs) for each in (model, original))
    # Some ten layers each round some ten times by 1e-16; the largest observed error is 2e-15. The biases of
    # DiT's keys have gradients that are zero: sums of larger terms, which cancel.
    assert_close(actual, expected, 1e-13 if "DiT" in name else 2e-14)

    revert(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]


def test_inductor_compiles_a_converted_model():
    """test_fusion_models.py compiles all models by Dynamo, and test_tracing.py norms near convolutions by Inductor."""
    model, inputs = model_and_inputs("Qwen3NextForCausalLM", F32)
    expected = logits_and_gradients(model.eval(), inputs)
    convert(model)
    compiled = torch.compile(model, fullgraph=True)
    assert_close(logits_and_gradients(compiled, inputs), expected, 1e-5)  # some ten layers with ten roundings of 6e-8


# 16-bit models with float32 parts

# Name of the model -> its options and the number of layers.
MIXED_MODELS = {f"{name}ForConditionalGeneration": (T5, 12) for name in ("T5", "MT5", "UMT5", "Pop2Piano")}
MIXED_MODELS |= {"MambaForCausalLM": (MAMBA, 3), "FalconMambaForCausalLM": (MAMBA, 9)}
MIXED_MODELS |= {"Mamba2ForCausalLM": (MAMBA | MAMBA2, 5)}


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", MIXED_MODELS)
def test_16_bit_models_with_float32_parts_match_float64(name, dtype, tmp_path):
    """`from_pretrained` keeps some layers of float16 T5 models, and the residual of Mamba, in float32."""
    options, layers = MIXED_MODELS[name]
    model = build_model(name, options)
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path, dtype=dtype).eval()
    inputs = build_inputs(model, dtype)
    exact = copy.deepcopy(model).double()(**inputs).logits
    original = model(**inputs).logits
    assert len(convert(model).replaced) == layers
    actual = model(**inputs).logits
    assert actual.dtype == original.dtype
    # Some ten operations round to 16 bits in turn.
    tolerance = 16 * torch.finfo(dtype).eps * max(1, exact.abs().max().item())
    torch.testing.assert_close(actual.double(), exact.double(), rtol=0, atol=tolerance)


# Single layers

ROWS, IMAGES, VIDEOS = (2, 3, 8), (2, 8, 3, 4), (2, 8, 3, 4, 5)
NORMALIZATION, AUTOENCODERS = "diffusers.models.normalization", "diffusers.models.autoencoders"
TRANSFORMERS, PIPELINES = "diffusers.models.transformers", "diffusers.pipelines"
X_TRANSFORMERS = "x_transformers.x_transformers.RMSNorm"
# Each package that docs/convert.md lists -> classes, with their replacements and the arguments after the width.
PACKAGES = {
    "chronos": {"chronos.chronos2.layers.Chronos2LayerNorm": (RMSNorm,)},
    "clip": {"clip.model.LayerNorm": (LayerNorm,)},
    "diffusers": {
        f"{NORMALIZATION}.FP32LayerNorm": (LayerNorm,),
        f"{NORMALIZATION}.RMSNorm": (RMSNorm, 1e-6),
        f"{NORMALIZATION}.MochiRMSNorm": (RMSNorm, 1e-6),
        f"{PIPELINES}.kolors.text_encoder.RMSNorm": (RMSNorm,),
        f"{PIPELINES}.deprecated.wuerstchen.modeling_wuerstchen_common.WuerstchenLayerNorm": (LayerNorm2d,),
        f"{TRANSFORMERS}.t5_film_transformer.T5LayerNorm": (RMSNorm,),
        f"{TRANSFORMERS}.transformer_cosmos3.Cosmos3NemotronRMSNorm": (RMSNorm, 1e-6),
        f"{TRANSFORMERS}.transformer_krea2.Krea2RMSNorm": (RMSNorm,),
        f"{TRANSFORMERS}.transformer_qwenimage21.QwenImage21ZeroCenterRMSNorm": (RMSNorm,),
        f"{TRANSFORMERS}.transformer_stable_audio3.StableAudio3RMSNorm": (RMSNorm,),
        "diffusers.models.unets.unet_stable_cascade.SDCascadeLayerNorm": (LayerNorm2d,),
        f"{AUTOENCODERS}.autoencoder_kl_hunyuanimage_refiner.HunyuanImageRefinerRMS_norm": (RMSNorm2d,),
        f"{AUTOENCODERS}.autoencoder_kl_hunyuanvideo15.HunyuanVideo15RMS_norm": (RMSNorm2d, True, False),
        f"{AUTOENCODERS}.autoencoder_kl_qwenimage.QwenImageRMS_norm": (RMSNorm2d,),
        f"{AUTOENCODERS}.autoencoder_kl_qwenimage21.QwenImage21RMS_norm": (RMSNorm2d, True, False),
        f"{AUTOENCODERS}.autoencoder_kl_wan.WanRMS_norm": (RMSNorm2d, True, False),
    },
    "fair-esm": {"esm.modules.ESM1LayerNorm": (LayerNorm,)},
    "k-diffusion": {"k_diffusion.models.image_transformer_v1.RMSNorm": (RMSNorm,)},
    "kokoro": {"kokoro.modules.LayerNorm": (LayerNorm2d,)},
    "kornia": {
        "kornia.models.common.LayerNorm2d": (LayerNorm2d,),
        "kornia.models.efficient_vit.nn.norm.LayerNorm2d": (LayerNorm2d,),
        "kornia.models.paligemma.modeling_paligemma.GemmaRMSNorm": (RMSNorm,),
        "kornia.models.qwen25.vision.Qwen25RMSNorm": (RMSNorm,),
        "kornia.models.sam.architecture.common.LayerNorm": (LayerNorm,),
    },
    "lavis (BLIP-2)": {
        "lavis.models.blip2_models.blip2.LayerNorm": (LayerNorm,),
        "lavis.models.blip2_models.modeling_t5.T5LayerNorm": (RMSNorm,),
        "lavis.models.clip_vit.LayerNorm": (LayerNorm,),
    },
    "litgpt": {"litgpt.model.RMSNorm": (RMSNorm,)},
    "open_clip": {
        "open_clip.transformer.LayerNorm": (LayerNorm,),
        "open_clip.transformer.LayerNormFp32": (LayerNorm,),
    },
    "rfdetr": {"rfdetr.models.backbone.projector.LayerNorm": (LayerNorm2d,)},
    "sam2": {"sam2.modeling.sam2_utils.LayerNorm2d": (LayerNorm2d,)},
    "segment_anything": {"segment_anything.modeling.common.LayerNorm2d": (LayerNorm2d,)},
    "segmentation_models_pytorch": {"segmentation_models_pytorch.decoders.upernet.decoder.LayerNorm2d": (LayerNorm2d,)},
    "tabpfn": {
        "tabpfn.architectures.tabpfn_v2_5.LowerPrecisionLayerNorm": (LayerNorm,),
        "tabpfn.architectures.tabpfn_v2_6.LowerPrecisionRMSNorm": (RMSNorm,),
        "tabpfn.architectures.tabpfn_v3._DtypeMatchingRMSNorm": (RMSNorm,),
    },
    "timm": {
        "timm.layers.norm.LayerNorm": (LayerNorm,),
        "timm.layers.norm.LayerNormFp32": (LayerNorm,),
        "timm.layers.norm.LayerNorm2d": (LayerNorm2d,),
        "timm.layers.norm.LayerNorm2dFp32": (LayerNorm2d,),
        "timm.layers.norm.LayerNormExp2d": (LayerNorm2d,),
        "timm.layers.norm.RmsNorm": (RMSNorm,),
        "timm.layers.norm.RmsNormFp32": (RMSNorm,),
        "timm.layers.norm.RmsNorm2d": (RMSNorm2d,),
        "timm.layers.norm.RmsNorm2dFp32": (RMSNorm2d,),
        "timm.layers.norm_act.LayerNormAct": (LayerNorm,),
        "timm.layers.norm_act.LayerNormActFp32": (LayerNorm,),
        "timm.layers.norm_act.LayerNormAct2d": (LayerNorm2d,),
        "timm.layers.norm_act.LayerNormAct2dFp32": (LayerNorm2d,),
        "timm.layers.norm_act.RmsNormAct": (RMSNorm,),
        "timm.layers.norm_act.RmsNormActFp32": (RMSNorm,),
        "timm.layers.norm_act.RmsNormAct2d": (RMSNorm2d,),
        "timm.layers.norm_act.RmsNormAct2dFp32": (RMSNorm2d,),
        "timm.models.metaformer.LayerNormNoBias": (LayerNorm,),
        "timm.models.metaformer.LayerNorm2dNoBias": (LayerNorm2d,),
    },
    "torchao": {
        "torchao._models.sam2.modeling.sam2_utils.LayerNorm2d": (LayerNorm2d,),
        "torchao.testing.model_architectures.RMSNorm": (RMSNorm,),
    },
    "torchtune": {
        "torchtune.modules.layer_norm.Fp32LayerNorm": (LayerNorm,),
        "torchtune.modules.rms_norm.RMSNorm": (RMSNorm,),
        "torchtune.models.gemma.rms_norm.GemmaRMSNorm": (RMSNorm,),
    },
    "torchvision": {"torchvision.models.convnext.LayerNorm2d": (LayerNorm2d,)},
    "ultralytics": {"ultralytics.nn.modules.transformer.LayerNorm2d": (LayerNorm2d,)},
    "vit-pytorch": {
        "vit_pytorch.cvt.LayerNorm": (LayerNorm2d,),
        "vit_pytorch.na_vit.LayerNorm": (LayerNorm,),
        "vit_pytorch.sep_vit.ChanLayerNorm": (LayerNorm2d,),
        "vit_pytorch.vit_5.RMSNorm": (RMSNorm,),
        "vit_pytorch.vivit_with_moss.ChanLayerNorm": (LayerNorm2d,),
    },
    "whisper": {"whisper.model.LayerNorm": (LayerNorm,)},
    "x-transformers": {X_TRANSFORMERS: (RMSNorm,)},
}
HF = "transformers.models"
RMS = "RMSNorm((8,), eps=1e-06, elementwise_affine=True"
NORM = "LayerNorm((8,), eps={}, elementwise_affine=True, bias={}"
# Class -> the start of the replacement's repr.
REPLACED = {
    f"{HF}.gemma3.modeling_gemma3.Gemma3RMSNorm": f"{RMS}, zero_centered_weight=True)",
    f"{HF}.olmo2.modeling_olmo2.Olmo2RMSNorm": f"{RMS})",
    f"{HF}.cohere.modeling_cohere.CohereLayerNorm": NORM.format(1e-5, False) + ")",
    f"{HF}.deberta.modeling_deberta.DebertaLayerNorm": NORM.format(1e-12, True) + ")",
    f"{HF}.nemotron.modeling_nemotron.NemotronLayerNorm1P": NORM.format(1e-5, True) + ", zero_centered_weight=True)",
    f"{HF}.esmfold2.modeling_esmfold2.EsmFold2LayerNorm": NORM.format(1e-5, True),
    f"{HF}.nanochat.modeling_nanochat.NanoChatRMSNorm": "RMSNorm((), eps=8, elementwise_affine=False)",  # of any width
    f"{HF}.squeezebert.modeling_squeezebert.SqueezeBertLayerNorm": "LayerNorm2d(",  # of [N, C, L]
    f"{HF}.bamba.modeling_bamba.BambaRMSNormGated": f"Gated{RMS}, gate_first=True)",
    f"{HF}.granitemoehybrid.modeling_granitemoehybrid.GraniteMoeHybridRMSNormGated": f"Gated{RMS}, gate_first=True)",
    f"{HF}.kimi_linear.modeling_kimi_linear.KimiLinearRMSNormGated": f"Gated{RMS}, activation='sigmoid')",
    f"{HF}.mamba2.modeling_mamba2.MambaRMSNormGated": f"Gated{RMS}, gate_first=True)",
    f"{HF}.qwen3_5.modeling_qwen3_5.Qwen3_5RMSNormGated": f"Gated{RMS})",
    f"{HF}.qwen3_next.modeling_qwen3_next.Qwen3NextRMSNormGated": f"Gated{RMS})",
}
GROUPED = [f"{HF}.zamba2.modeling_zamba2.Zamba2RMSNormGated"]
GROUPED += [f"{HF}.nemotron_h.modeling_nemotron_h.NemotronHRMSNormGated"]
# The class, the arguments after the width, options, and the start of the replacement's repr.
LAYERS = [
    (path, arguments, {}, f"{cls.__name__}(")
    for classes in PACKAGES.values()
    for path, (cls, *arguments) in classes.items()
]
LAYERS += [(path, [], {}, text) for path, text in REPLACED.items()]
LAYERS += [(path, [], {"group_size": 4}, f"Gated{RMS}, gate_first=True, num_groups=2)") for path in GROUPED]
LAYERS += [
    (path, [], {"affine": False}, f"{cls.__name__}(")
    for path, (cls,) in PACKAGES["timm"].items()
    if "layers.norm." in path and "Exp" not in path
]
LAYERS += [(f"{NORMALIZATION}.FP32LayerNorm", [], {"elementwise_affine": False}, "LayerNorm(")]
LAYERS += [(X_TRANSFORMERS, [], {"unit_offset": True}, "RMSNorm(")]


def make_layer(path, *arguments, **options):
    module, _, cls = path.rpartition(".")
    return getattr(pytest.importorskip(module, exc_type=ImportError), cls)(*arguments, **options)


@pytest.mark.parametrize(("path", "arguments", "options", "text"), LAYERS, ids=str)
def test_a_layer_of_each_class_is_replaced_and_restored(path, arguments, options, text):
    layer = make_layer(path, 8, *arguments, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(1)  # one class leaves its weight uninitialized
    randomize(layer)
    # Classes with two arguments after the width are for videos.
    images = VIDEOS if len(arguments) == 2 else (2, 8, 5) if "Squeeze" in path else IMAGES
    names, cls, keys = list(inspect.signature(layer.forward).parameters), type(layer), list(layer.state_dict())
    inputs = torch.randn(len(names), *(images if "2d(" in text else ROWS)).unbind()
    expected = layer(*inputs)
    report = convert(layer)
    assert report.replaced and f" by {text}" in report.replaced[""] and isinstance(layer, cls), report
    torch.testing.assert_close(layer(*inputs), expected, rtol=1e-5, atol=1e-5)  # ten roundings of 6e-8
    assert list(layer.state_dict()) == keys and list(inspect.signature(layer.forward).parameters) == names
    revert(layer)
    assert type(layer) is cls


def test_the_document_lists_these_packages():
    text = (Path(__file__).resolve().parents[2] / "docs/convert.md").read_text()
    (listed,) = re.findall("The packages are\n(.*?);", text, re.DOTALL)
    assert re.split(",\\s|\\sand\\s", listed) == list(PACKAGES)


@pytest.mark.parametrize(
    ("path", "arguments", "reason"),
    [
        # The weight has two dimensions, and only the last is normalized.
        (f"{HF}.chameleon.modeling_chameleon.ChameleonLayerNorm", [(2, 8)], "not LayerNorm"),
        (f"{HF}.cohere.modeling_cohere.CohereLayerNorm", [(2, 8)], "not LayerNorm"),
        (f"{NORMALIZATION}.RMSNorm", [(2, 8), 1e-6], "not RMSNorm"),
        (f"{NORMALIZATION}.RMSNorm", [8, 1e-6, True, True], "not LayerNorm"),
        # The class refuses input of four dimensions, and removes a dimension of size 1.
        (f"{HF}.falcon_h1.modeling_falcon_h1.FalconH1RMSNormGated", [8], "not GatedRMSNorm"),
    ],
)
def test_layers_with_another_formula_are_skipped(path, arguments, reason):
    report = convert(make_layer(path, *arguments))
    assert not report.replaced and reason in report.skipped[""]


def test_x_transformers_rows_of_zero_or_tiny_norm_match():
    """The original divides by a norm of at least 1e-12. The replacement has an eps of the same effect on these rows."""
    layer = randomize(make_layer(X_TRANSFORMERS, 8).double())
    x, dy = torch.zeros(2, 8, dtype=F64), torch.randn(2, 8, dtype=F64)
    x[1, 3] = 1e-9
    x.requires_grad_()
    theirs = layer(x)
    expected = theirs, *torch.autograd.grad(theirs, (x, layer.g), dy)
    assert convert(layer).replaced and not theirs[0].any()
    ours = layer(x)
    for actual, value in zip((ours, *torch.autograd.grad(ours, (x, layer.g), dy)), expected, strict=True):
        # Adding 1e-24 to a squared norm of 1e-18 changes the norm by 5e-7; gradients are as large as 1e12.
        torch.testing.assert_close(actual, value, rtol=1e-6, atol=1e-6 * value.abs().max().item())
