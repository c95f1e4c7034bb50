"""Converted models of other packages, whose norms are fused with their neighbors."""

import copy

import pytest
import torch
from support.models import randomize
from support.packages import MODELS, assert_close, logits_and_gradients, model_and_inputs
from support.reference import F64
from torch._dynamo.testing import CompileCounterWithBackend

from layernorm_ext import convert, fusion
from layernorm_ext.fusion import _graph_order as order

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("torchvision", "one_thread")]

# Name of the model -> the fused calls. Most models have two layers with two norms, and a norm behind the last layer.
# All norms but the first one read a sum.
FUSED = dict.fromkeys(MODELS, {"add": 4})
FUSED |= dict.fromkeys(("ConvNextForImageClassification", "timm convnext_tiny"), {})
FUSED |= dict.fromkeys(("MambaForCausalLM", "Mamba2ForCausalLM"), {})  # residuals of float32 beside float64
FUSED |= {
    "T5ForConditionalGeneration": {"add": 10},
    "diffusers DiTTransformer2DModel": {"gate, add and modulate": 4, "modulate": 1},
    "timm vit_tiny_patch16_224 with LayerScale": {"gate and add": 4},
    "timm swin_tiny_patch4_window7_224": {"add": 7},
}


TIMES = torch.tensor([1, 2])
LAYERS = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "patch_size": 2}
IMAGES = LAYERS | {"sample_size": 8, "out_channels": 4}
IMAGE, TEXT, POOLED = {"hidden_states": (4, 8, 8)}, {"encoder_hidden_states": (5, 12)}, {"pooled_projections": (6,)}
ROWS = {"hidden_states": (6, 4)}

# Model of diffusers -> its options, the shapes of its inputs without the batch, other inputs, norms, and fused calls.
DIFFUSERS = {
    "PixArtTransformer2DModel": (
        IMAGES | {"cross_attention_dim": 16, "caption_channels": 12, "use_additional_conditions": False},
        IMAGE | TEXT,
        {"timestep": TIMES, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
        5,
        {"gate, add and modulate": 2, "add and modulate": 2, "modulate": 1},
    ),
    "SanaTransformer2DModel": (
        IMAGES
        | {"num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16}
        | {"caption_channels": 12},
        IMAGE | TEXT,
        {"timestep": TIMES},
        6,
        {"gate, add and modulate": 2, "add and modulate": 2, "modulate": 1},
    ),
    "SD3Transformer2DModel": (
        IMAGES
        | {"joint_attention_dim": 12, "caption_projection_dim": 16, "pooled_projection_dim": 6}
        | {"pos_embed_max_size": 8, "dual_attention_layers": (0,), "qk_norm": "rms_norm"},
        IMAGE | TEXT | POOLED,
        {"timestep": TIMES},
        18,
        {"gate, add and modulate": 6, "modulate": 1},
    ),
    "FluxTransformer2DModel": (
        LAYERS
        | {"patch_size": 1, "num_single_layers": 2, "joint_attention_dim": 12}
        | {"pooled_projection_dim": 6, "axes_dims_rope": (2, 2, 4)},
        ROWS | TEXT | POOLED,
        {"timestep": TIMES, "img_ids": torch.zeros(6, 3), "txt_ids": torch.zeros(5, 3)},
        23,
        {"gate, add and modulate": 6, "modulate": 5},
    ),
    "CogVideoXTransformer3DModel": (
        LAYERS
        | {"out_channels": 4, "time_embed_dim": 6, "text_embed_dim": 12, "max_text_seq_length": 5}
        | {"sample_width": 8, "sample_height": 8, "sample_frames": 5},
        {"hidden_states": (2, 4, 8, 8)} | TEXT,
        {"timestep": TIMES},
        10,
        {"gate, add and modulate": 6, "gate and add": 1, "modulate": 3},
    ),
    "LTXVideoTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2}
        | {"cross_attention_dim": 16, "caption_channels": 12},
        ROWS | TEXT,
        {"timestep": TIMES, "encoder_attention_mask": torch.ones(2, 5), "num_frames": 1, "height": 2, "width": 3},
        13,
        {"gate, add and modulate": 2, "add and modulate": 2, "modulate": 1},
    ),
}


# Name of the model -> the number of its fusible norms that are not fused.
CHANNELS_FIRST = dict.fromkeys(("ConvNextForImageClassification", "timm convnext_tiny"), 3)
MISSED = CHANNELS_FIRST | {"WhisperForConditionalGeneration": 3}  # its encoder's sums have the strides of a convolution


def is_fusible(norm):
    """Return whether a norm reads a sum of two tensors of its shape, or its only use is a product with smaller tensors.

    Views between the sum and the norm do not count, and neither does an operation that returns its input.
    """
    total = norm.args[0]
    while total.all_input_nodes and shares_storage(total, total.all_input_nodes[0]):
        total = total.all_input_nodes[0]
    terms = [order.fake_tensor(node) for node in total.all_input_nodes]
    value = order.fake_tensor(total)
    is_sum = order.operation(total) in ("add", "iadd", "add_", "addcmul") and len(terms) > 1
    if is_sum and all(term is not None and (term.shape, term.dtype) == (value.shape, value.dtype) for term in terms):
        return True
    products = [user for output in norm.users if output.args[1] == 0 for user in output.users]  # of getitem(norm, 0)
    products = [product for product in products if order.operation(product) in ("mul", "addcmul")]
    factors = [each for product in products for each in product.all_input_nodes if each.args[:1] != (norm,)]
    sizes = [order.fake_tensor(factor).numel() for factor in factors]
    return len(products) == 1 and all(size < order.fake_tensor(products[0]).numel() for size in sizes)


def shares_storage(first, second):
    a, b = order.fake_tensor(first), order.fake_tensor(second)
    return a is not None and b is not None and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def compare(model, inputs, norms, fused, missed):
    """Compare logits and gradients of the converted model, compiled with the pass, with those of its eager calls.

    `norms` is the number of norms, `fused` has the calls that the pass inserts, and `missed` is the number of fusible
    norms beside them.
    """
    fusible = []

    def backend(module, example_inputs):
        norms = [node for node in module.graph.nodes if node.target is torch.ops.layernorm.forward.default]
        fusible.extend(filter(is_fusible, norms))
        return fusion.eager(module, example_inputs)

    report = convert(model)
    assert not report.skipped and len(report.replaced) == norms
    fusion.fuse_neighbors.counts.clear()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    # Some models convert to float32 between layers, which round some ten times by 6e-8.
    assert_close(*(logits_and_gradients(each, inputs) for each in (compiled, model)), 2e-6)
    assert dict(fusion.fuse_neighbors.counts) == fused and counter.frame_count == 1
    assert len(fusible) == sum(fused.values()) + missed


@pytest.mark.parametrize("name", FUSED)
def test_norms_of_models_are_fused(name):
    model, inputs = model_and_inputs(name, F64)
    compare(model.eval(), inputs, sum(MODELS[name][1].values()), FUSED[name], MISSED.get(name, 0))


@pytest.mark.parametrize("name", DIFFUSERS)
def test_norms_of_diffusion_transformers_are_fused(name):
    options, shapes, others, norms, fused = DIFFUSERS[name]
    diffusers = pytest.importorskip("diffusers")
    model = randomize(getattr(diffusers, name)(**copy.deepcopy(options))).double().eval()
    inputs = {key: torch.randn(2, *shape, dtype=F64) for key, shape in shapes.items()} | others
    compare(model, inputs, norms, fused, MISSED.get(name, 0))


def test_nineteen_of_twenty_fusible_norms_are_fused():
    """The numbers are those of the tables, which the tests above compare with the graphs."""
    tables = FUSED | {name: fused for name, (*_, fused) in DIFFUSERS.items()}
    fused = {name: sum(table.values()) for name, table in tables.items() if name not in CHANNELS_FIRST}
    missed = sum(MISSED.get(name, 0) for name in fused)
    assert sum(fused.values()) >= 0.95 * (sum(fused.values()) + missed)


@pytest.mark.parametrize("is_contiguous", [False, True])
def test_a_contiguous_patch_embedding_joins_an_encoder(is_contiguous):
    """Sums inherit the strides of a convolution, which the fused call cannot write."""
    siglip = pytest.importorskip("transformers.models.siglip.modeling_siglip")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    options = siglip.SiglipVisionConfig(**sizes, num_hidden_layers=2)
    model = randomize(siglip.SiglipVisionModel(options)).double().eval()
    if is_contiguous:
        (embeddings,) = [module for module in model.modules() if type(module).__name__ == "SiglipVisionEmbeddings"]
        embeddings.register_forward_hook(lambda module, inputs, output: output.contiguous())
    convert(model)
    fusion.fuse_neighbors.counts.clear()
    pixels = torch.randn(2, 3, 16, 16, dtype=F64)
    compiled = torch.compile(model, backend=fusion.eager, fullgraph=True)
    torch.testing.assert_close(compiled(pixels).last_hidden_state, model(pixels).last_hidden_state)
    assert dict(fusion.fuse_neighbors.counts) == ({"add": 4} if is_contiguous else {})
