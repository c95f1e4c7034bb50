"""convert() replaces a layer of each class that docs/convert.md lists, if its package is installed.

The file test_convert_models.py has whole models and further classes.
"""

import importlib
import re
from pathlib import Path

import pytest
import torch
from support.models import randomize

from layernorm_ext import LayerNorm, LayerNorm2d, RMSNorm, RMSNorm2d, convert, revert

pytestmark = [pytest.mark.usefixtures("one_thread", "torchvision"), pytest.mark.integration]

ROWS, IMAGES, VIDEOS = (2, 3, 8), (2, 8, 3, 4), (2, 8, 3, 4, 5)
NORMALIZATION, AUTOENCODERS = "diffusers.models.normalization", "diffusers.models.autoencoders"
TRANSFORMERS, PIPELINES = "diffusers.models.transformers", "diffusers.pipelines"
# Package -> classes, by their modules, each with its replacement and further arguments than the width.
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
    "x-transformers": {"x_transformers.x_transformers.RMSNorm": (RMSNorm,)},
}
CLASSES = {path: case for classes in PACKAGES.values() for path, case in classes.items()}


@pytest.mark.parametrize("path", CLASSES)
def test_a_layer_of_each_class_is_replaced(path):
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except ImportError as error:
        pytest.skip(f"{module} cannot be imported: {error}")
    ours, *arguments = CLASSES[path]
    layer = cls(8, *arguments)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(1)  # one class leaves it undefined
    randomize(layer)
    sizes = {LayerNorm2d: IMAGES, RMSNorm2d: VIDEOS if len(arguments) == 2 else IMAGES}
    x, keys = torch.randn(sizes.get(ours, ROWS)), list(layer.state_dict())
    expected = layer(x)
    report = convert(layer)
    assert report.replaced and isinstance(layer, ours), report
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)  # ten roundings of 6e-8
    assert list(layer.state_dict()) == keys
    revert(layer)
    assert type(layer) is cls


def test_the_document_lists_these_classes():
    text = (Path(__file__).resolve().parents[2] / "docs/convert.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]*`) \|$", text, re.MULTILINE))
    for package, classes in PACKAGES.items():
        assert sorted({path.rpartition(".")[2] for path in classes}) == sorted(re.findall("`(\\w+)`", rows[package]))
