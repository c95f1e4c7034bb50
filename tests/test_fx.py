"""Tests of torch.fx with the modules, and of feature extraction from converted models."""

import copy

import pytest
import torch
from packages import import_torchvision

import layernorm_ext
from layernorm_ext import AddLayerNorm, AddRMSNorm, LayerNorm, LayerNorm2d, RMSNorm, convert

MODULES = {
    "LayerNorm": LayerNorm(8),
    "zero-centred LayerNorm": LayerNorm(8, zero_centered_weight=True),
    "RMSNorm": RMSNorm(8),
    "LayerNorm2d": LayerNorm2d(8),
    "LayerNorm2d without parameters": LayerNorm2d(8, elementwise_affine=False),
    "AddLayerNorm": AddLayerNorm(8),
    "AddRMSNorm": AddRMSNorm(8),
}
FUNCTIONS = {
    LayerNorm: layernorm_ext.layer_norm,
    LayerNorm2d: layernorm_ext.layer_norm_2d,
    RMSNorm: layernorm_ext.rms_norm,
    AddLayerNorm: layernorm_ext.add_layer_norm,
    AddRMSNorm: layernorm_ext.add_rms_norm,
}


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES.keys())
def test_symbolic_trace(module):
    """The graph calls the function of the module and gives its bits."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    graph = torch.fx.symbolic_trace(module)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [FUNCTIONS[type(module)]]
    x = torch.randn(2, 8, 3, 4) if isinstance(module, LayerNorm2d) else torch.randn(3, 8)
    arguments = (x, x) if isinstance(module, (AddLayerNorm, AddRMSNorm)) else (x,)
    torch.testing.assert_close(graph(*arguments), module(*arguments), rtol=0, atol=0)


def test_symbolic_trace_of_a_model():
    """Outputs and residuals go from block to block."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.norm = torch.nn.Conv2d(3, 8, 3), LayerNorm2d(8)
            self.blocks = torch.nn.ModuleList([AddLayerNorm(8), AddLayerNorm(8)])

        def forward(self, x):
            x, residual = self.norm(self.convolution(x)).permute(0, 2, 3, 1), None
            for block in self.blocks:
                x, residual = block(x, residual)
            return x + residual

    model, x = Model(), torch.randn(2, 3, 6, 6)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


# Features


@pytest.fixture
def torchvision(one_thread):
    package = import_torchvision()
    if package is None:
        pytest.skip("torchvision is not installed")
    from torchvision.models import feature_extraction  # noqa: F401

    return package


def convnext(torchvision):
    blocks = torchvision.models.convnext.CNBlockConfig
    return torchvision.models.ConvNeXt([blocks(8, 16, 1), blocks(16, None, 1)], num_classes=5)


def vit(torchvision):
    return torchvision.models.VisionTransformer(16, 8, 1, 2, 16, 24)


def swin(torchvision):
    return torchvision.models.SwinTransformer([4, 4], 16, [1, 1], [2, 2], [2, 2])


LEAVES = {"leaf_modules": [LayerNorm, LayerNorm2d, RMSNorm]}


@pytest.mark.integration
@pytest.mark.parametrize("architecture", [convnext, vit, swin])
@pytest.mark.parametrize("way", ["convert the extractor", "leaf modules"])
def test_torchvisions_features(torchvision, architecture, way):
    """Both ways of docs/convert.md give every feature under its name before the conversion."""
    features = torchvision.models.feature_extraction
    model, x = architecture(torchvision).eval(), torch.randn(1, 3, 16, 16)
    nodes = features.get_graph_node_names(model)[1]
    names = [name for name, _ in model.named_modules() if any(f"{node}.".startswith(f"{name}.") for node in nodes)]
    extractor = features.create_feature_extractor(model, names)
    expected = extractor(x)
    assert len(expected) >= 9
    if way == "convert the extractor":
        assert convert(extractor).replaced
    else:
        convert(model)
        extractor = features.create_feature_extractor(model, names, tracer_kwargs=LEAVES)
    actual = extractor(x)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        # The model has some ten layers, each with some ten roundings of 6e-8 in float32.
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)


@pytest.mark.integration
def test_names_of_torchvisions_nodes_change(torchvision):
    """docs/convert.md warns of this: before the conversion the node ``ln_1`` is the layer ``ln_2``."""
    features = torchvision.models.feature_extraction
    model, x, name = vit(torchvision).eval(), torch.randn(1, 3, 16, 16), "encoder.layers.encoder_layer_0.ln_1"
    outputs, hooks = {}, []
    for layer in ("ln_1", "ln_2"):
        module = model.encoder.layers.encoder_layer_0.get_submodule(layer)
        torch.nn.init.normal_(module.bias)
        hooks.append(module.register_forward_hook(lambda *call, layer=layer: outputs.__setitem__(layer, call[2])))
    model(x)
    for hook in hooks:
        hook.remove()
    before = features.create_feature_extractor(model, [name])(x)[name]
    convert(model)
    after = features.create_feature_extractor(model, [name])(x)[name]
    for actual, layer in ((before, "ln_2"), (after, "ln_1")):
        torch.testing.assert_close(actual, outputs[layer], rtol=1e-4, atol=1e-5)  # some roundings of 6e-8 in each layer


@pytest.mark.integration
@pytest.mark.parametrize("cls", [None, "fx"], ids=["hooks", "fx"])
@pytest.mark.parametrize("architecture", ["convnext_tiny", "swin_tiny_patch4_window7_224"])
def test_timms_features(torchvision, architecture, cls):
    timm = pytest.importorskip("timm")
    options = {"depths": (1, 1, 1, 1)}
    options |= {"dims": (8, 8, 16, 16)} if "conv" in architecture else {"embed_dim": 8, "num_heads": (1,) * 4}
    options |= {"img_size": 56} if "swin" in architecture else {}
    options |= {"feature_cls": cls} if cls else {}
    model = timm.create_model(architecture, features_only=True, **options).eval()
    x = torch.randn(1, 3, 56, 56)
    original = copy.deepcopy(model)
    replaced = convert(model).replaced
    assert replaced or (cls == "fx" and "conv" in architecture)  # its graph has the operations of its layers
    assert len(model(x)) == len(original(x)) == 4
    for actual, expected in zip(model(x), original(x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)  # some roundings of 6e-8 in each layer


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("architecture", [convnext, swin])
def test_torchvisions_models_can_be_scripted(torchvision, architecture):
    model, x = architecture(torchvision).eval(), torch.randn(1, 3, 16, 16)
    assert convert(model).replaced
    assert torch.equal(torch.jit.script(model)(x), model(x))


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_timms_models_can_be_scripted(torchvision):
    timm = pytest.importorskip("timm")
    options = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16), "num_classes": 5, "scriptable": True}
    model, x = timm.create_model("convnext_tiny", **options).eval(), torch.randn(1, 3, 32, 32)
    assert convert(model).replaced
    torch.testing.assert_close(
        torch.jit.script(model)(x), model(x), rtol=1e-5, atol=1e-6
    )  # TorchScript fuses neighbours
