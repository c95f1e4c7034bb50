"""torch.fx with this package's modules; feature extraction from torchvision's and timm's models."""

import copy
import inspect
import pickle
import re

import pytest
import torch
from support.family import channels_second, family, module_and_inputs, module_cases

import layernorm_ext
from layernorm_ext import convert

# A model has some ten layers, and float32 rounds each of some ten operations per layer by 6e-8.
ROUNDED_TEN_LAYERS = {"rtol": 1e-4, "atol": 1e-5}


@module_cases
def test_graph_of_a_module_calls_its_function(cls, options, shapes):
    """The arguments of the call are the module's inputs, parameters and options of the same names."""
    module, inputs = module_and_inputs(cls, options, shapes)
    has_one_input = len(inputs) == 1
    name = re.sub("(?<=[a-z])(?=[A-Z2])", "_", cls.__name__.replace("RMS", "Rms"))  # AddRMSNorm -> Add_Rms_Norm
    name = name.removeprefix("Add_") if has_one_input else name  # without a residual, nothing is added
    # Sequential passes one input, so that the tracer does not see the others.
    graph = torch.fx.symbolic_trace(torch.nn.Sequential(module) if has_one_input else module)
    # With residual_in_fp32, a module without a residual also calls to_fp32().
    calls = [node for node in graph.graph.nodes if node.op == "call_function" and "to_fp32" not in node.name]
    (call,) = calls
    assert call.target is getattr(layernorm_ext, name.lower())
    signature = inspect.signature(call.target)
    arguments = signature.bind(*call.args, **call.kwargs).arguments
    for node in graph.graph.find_nodes(op="placeholder"):
        assert arguments["input" if node.target == "x" else node.target] is node  # torch's RMSNorm calls it x
    for argument, parameter in signature.parameters.items():
        if hasattr(module, argument):
            value, expected = arguments.get(argument, parameter.default), getattr(module, argument)
            is_parameter = isinstance(expected, torch.nn.Parameter)
            assert value.target.endswith(argument) if is_parameter else value == expected
    saved = pickle.loads(pickle.dumps(graph))
    results = [call(*(x * 1 for x in inputs)) for call in (module, graph, saved)]  # a leaf cannot change in place
    for actual in results[1:]:
        torch.testing.assert_close(actual, results[0], rtol=0, atol=0)


@family
def test_any_argument_may_be_a_proxy(member):
    """torch.fx traces with proxies, even of numbers, which public functions must find before they check types."""
    tensors = [channels_second(t) if member.takes_images else t for t in (*torch.randn(2, 2, 3, 8), *torch.randn(2, 8))]
    arguments, options = member.arguments(*tensors)
    given = inspect.signature(member.function).bind(*arguments, eps=0.5, **options).arguments
    for name in {"input", "normalized_shape", "eps"} & given.keys():
        expected = member.function(**copy.deepcopy(given))
        graph = torch.fx.symbolic_trace(lambda value: member.function(**given | {name: value}))  # noqa: B023
        torch.testing.assert_close(graph(given[name]), expected, rtol=0, atol=0)


# Other packages


def convnext(models):
    blocks = models.convnext.CNBlockConfig
    return models.ConvNeXt([blocks(8, 16, 1), blocks(16, None, 1)], num_classes=5)


ARCHITECTURES = {
    "convnext": convnext,
    "vit": lambda models: models.VisionTransformer(16, 8, 1, 2, 16, 24),
    "swin": lambda models: models.SwinTransformer([4, 4], 16, [1, 1], [2, 2], [2, 2]),
}


@pytest.mark.integration
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("way", ["convert the extractor", "leaf modules"])
def test_torchvision_extracts_all_features_of_a_converted_model(one_thread, torchvision, architecture, way):
    """docs/convert.md describes both ways. The features keep the names that they have before the conversion."""
    features = pytest.importorskip("torchvision.models.feature_extraction")
    model, x = ARCHITECTURES[architecture](torchvision.models).eval(), torch.randn(1, 3, 16, 16)
    nodes = features.get_graph_node_names(model)[1]
    names = [name for name, _ in model.named_modules() if any(f"{node}.".startswith(f"{name}.") for node in nodes)]
    extractor = features.create_feature_extractor(model, names)
    expected = extractor(x)
    assert len(expected) >= 9
    if way == "convert the extractor":
        assert convert(extractor).replaced
    else:
        convert(model)
        leaves = {"leaf_modules": [torch.nn.LayerNorm, torch.nn.RMSNorm]}
        extractor = features.create_feature_extractor(model, names, tracer_kwargs=leaves)
    torch.testing.assert_close(dict(extractor(x)), dict(expected), **ROUNDED_TEN_LAYERS)


@pytest.mark.integration
@pytest.mark.parametrize("feature_cls", [None, "fx"], ids=["hooks", "fx"])
@pytest.mark.parametrize("architecture", ["convnext_tiny", "swin_tiny_patch4_window7_224"])
def test_timm_extracts_features_of_a_converted_model(one_thread, torchvision, architecture, feature_cls):
    timm = pytest.importorskip("timm")
    sizes = {"dims": (8, 8, 16, 16)}
    if "swin" in architecture:
        sizes = {"embed_dim": 8, "num_heads": (1,) * 4, "img_size": 56}
    options = {"feature_cls": feature_cls} if feature_cls else {}
    model = timm.create_model(architecture, features_only=True, depths=(1,) * 4, **sizes, **options).eval()
    x, original = torch.randn(1, 3, 56, 56), copy.deepcopy(model)
    # The fx graph of ConvNeXt has the operations of its norms instead of the modules.
    assert bool(convert(model).replaced) == (feature_cls is None or "swin" in architecture)
    assert len(model(x)) == 4
    torch.testing.assert_close(model(x), original(x), **ROUNDED_TEN_LAYERS)
