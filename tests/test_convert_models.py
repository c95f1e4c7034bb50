"""Real architectures, converted: made from their configurations, tiny, with random weights."""

import copy
import importlib

import pytest
import torch

import layernorm_ext
from layernorm_ext import convert, revert

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def torchvision():
    """Which timm imports.

    PyPI has it for GPUs alone. Next to a torch for the CPU it lacks its operators, which nothing here calls, and its
    import fails over describing them.
    """
    register_fake = torch.library.register_fake

    def register_others(name, *args, **kwargs):
        if torch.version.cuda is None and str(name).startswith("torchvision::"):
            return lambda function: function
        return register_fake(name, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.library, "register_fake", register_others)
        yield importlib.import_module("torchvision")


def hugging_face(name, **options):
    """A model of transformers with a vocabulary of 50."""
    import transformers

    config_name = name.partition("For")[0].removesuffix("LMHeadModel") + "Config"
    return getattr(transformers, name)(getattr(transformers, config_name)(**options))


def tokens():
    return torch.randint(3, 50, (2, 7))


DECODER = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def bert():
    return hugging_face("BertForMaskedLM", vocab_size=50, **VIT), {"input_ids": tokens()}


def gpt2():
    options = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return hugging_face("GPT2LMHeadModel", **options, bos_token_id=1, eos_token_id=2), {"input_ids": tokens()}


def vit():
    model = hugging_face("ViTForImageClassification", image_size=16, patch_size=8, **VIT)
    return model, {"pixel_values": torch.randn(2, 3, 16, 16)}


def whisper():
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 4, "vocab_size": 50}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    limits = {"max_source_positions": 10, "max_target_positions": 16}
    model = hugging_face("WhisperForConditionalGeneration", **heads, **sizes, **ids, **limits)
    return model, {"input_features": torch.randn(2, 4, 20), "decoder_input_ids": tokens()}


def llama():
    return hugging_face("LlamaForCausalLM", **DECODER), {"input_ids": tokens()}


def gemma():
    return hugging_face("GemmaForCausalLM", **DECODER), {"input_ids": tokens()}


def qwen3():
    """Which normalizes queries and keys, too."""
    return hugging_face("Qwen3ForCausalLM", **DECODER), {"input_ids": tokens()}


def t5():
    options = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return hugging_face("T5ForConditionalGeneration", **options), {"input_ids": tokens(), "decoder_input_ids": tokens()}


def convnext():
    model = hugging_face("ConvNextForImageClassification", hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1])
    return model, {"pixel_values": torch.randn(2, 3, 32, 32)}


def timm_convnext():
    import timm

    model = timm.create_model("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=5)
    return model, {"x": torch.randn(2, 3, 32, 32)}


def timm_vit():
    import timm

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "num_heads": 2, "depth": 2, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **sizes), {"x": torch.randn(2, 3, 16, 16)}


def torch_transformer():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(16)), {"src": torch.randn(2, 5, 16)}


# How many layers of each class there are, and what replaces them.
ARCHITECTURES = {
    bert: {("LayerNorm", "LayerNorm"): 6},
    gpt2: {("LayerNorm", "LayerNorm"): 5},
    vit: {("LayerNorm", "LayerNorm"): 5},
    whisper: {("LayerNorm", "LayerNorm"): 7},
    llama: {("LlamaRMSNorm", "RMSNorm"): 5},
    gemma: {("GemmaRMSNorm", "RMSNorm"): 5},
    qwen3: {("Qwen3RMSNorm", "RMSNorm"): 9},
    t5: {("T5LayerNorm", "RMSNorm"): 7},
    convnext: {("ConvNextLayerNorm", "LayerNorm"): 4, ("ConvNextLayerNorm", "LayerNorm2d"): 4, ("LayerNorm",) * 2: 1},
    timm_convnext: {("LayerNorm", "LayerNorm"): 4, ("LayerNorm2d", "LayerNorm2d"): 5},
    timm_vit: {("LayerNorm", "LayerNorm"): 5},
    torch_transformer: {("LayerNorm", "LayerNorm"): 5},
}
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda function: function.__name__)


def make(architecture, dtype):
    model, inputs = architecture()
    with torch.no_grad():
        for parameter in model.parameters():  # weights of one and biases of zero would hide much
            parameter += 0.2 * torch.randn_like(parameter)
    return model.to(dtype), {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


class Float64Throughout(torch.overrides.TorchFunctionMode):
    """What asks for float32 gets float64, as Hugging Face's layers do even of float64 input, to lose half of it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args = [F64 if value is F32 else value for value in args]
        return function(*args, **{name: F64 if value is F32 else value for name, value in (kwargs or {}).items()})


def call(model, inputs):
    """The logits and the gradients of a loss in which each counts differently."""
    torch.manual_seed(1)  # of dropout
    outputs = model(**inputs)
    logits = getattr(outputs, "logits", outputs)
    loss = (logits.flatten() * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype)).sum()
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {"logits": logits.detach(), **dict(zip(parameters, gradients, strict=True))}


def assert_near(actual, expected, tolerance):
    """To `tolerance` times the largest number of each tensor, or 1."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None
        else:
            atol = tolerance * max(1, value.abs().max().item())
            torch.testing.assert_close(actual[name], value, rtol=0, atol=atol, msg=lambda text, name=name: name + text)


@architectures
def test_logits_gradients_and_a_step_of_training(architecture):
    """In float64, with dropout; and undone again."""
    model, inputs = make(architecture, F64)
    original = copy.deepcopy(model)
    report = convert(model)
    assert not report.skipped
    found = [tuple(how.partition("(")[0].split(" by ")) for how in report.replaced.values()]
    found = [(theirs.rpartition(".")[2], ours) for theirs, ours in found]
    assert {pair: found.count(pair) for pair in found} == ARCHITECTURES[architecture]
    assert model.state_dict().keys() == original.state_dict().keys()

    trained = []
    with Float64Throughout():
        for each in (original, model):
            results = call(each, inputs)
            parameters = dict(each.named_parameters())
            for name in results.keys() & parameters.keys():
                parameters[name].grad = results[name]
            torch.optim.AdamW(parameters.values(), 1e-2).step()
            trained.append((results, parameters))
    (expected, expected_parameters), (actual, parameters) = trained
    # Some ten layers, each of some ten roundings of 1e-16; 2e-15 is the most that was seen.
    assert_near(actual, expected, 2e-14)
    # AdamW divides by the gradient plus 1e-8, also where it is zero but for rounding, as that of a key's bias is.
    assert_near(parameters, expected_parameters, 1e-2 * 2e-14 / 1e-8)

    revert(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]


@pytest.mark.parametrize("architecture", [llama, gemma, t5], ids=lambda function: function.__name__)
def test_float64_as_it_is(architecture):
    """Hugging Face's RMSNorm rounds to float32 within: by 6e-8, some times in turn."""
    model, inputs = make(architecture, F64)
    expected = call(model, inputs)
    convert(model)
    assert_near(call(model, inputs), expected, 3e-6)


@pytest.mark.parametrize(
    ("architecture", "compiler"), [*((each, "aot_eager") for each in ARCHITECTURES), (timm_convnext, "inductor")]
)
def test_compiled(architecture, compiler):
    """Without a break of the graph."""
    torch._dynamo.reset()
    model, inputs = make(architecture, F32)
    expected = call(model.eval(), inputs)
    convert(model)
    results = call(torch.compile(model, backend=compiler, fullgraph=True), inputs)
    # Some ten layers, each of some ten roundings of 6e-8.
    assert_near({name.removeprefix("_orig_mod."): value for name, value in results.items()}, expected, 1e-5)


# Single layers


def hugging_faces(name, *arguments):
    """A layer of transformers, told by the module's name and the class's."""
    module, _, name = name.rpartition(".")
    module = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    return getattr(module, name)(*arguments)


LAYERS = {
    "mistral.MistralRMSNorm": "RMSNorm((8,), eps=1e-06, elementwise_affine=True)",
    "qwen2.Qwen2RMSNorm": "RMSNorm((8,), eps=1e-06, elementwise_affine=True)",
    "gemma2.Gemma2RMSNorm": "RMSNorm((8,), eps=1e-06, elementwise_affine=True, zero_centered_weight=True)",
    "gemma3.Gemma3RMSNorm": "RMSNorm((8,), eps=1e-06, elementwise_affine=True, zero_centered_weight=True)",
    "olmo2.Olmo2RMSNorm": "RMSNorm((8,), eps=1e-06, elementwise_affine=True)",
    "mamba.MambaRMSNorm": "RMSNorm((8,), eps=1e-06, elementwise_affine=True)",
    "cohere.CohereLayerNorm": "LayerNorm((8,), eps=1e-05, elementwise_affine=True, bias=False)",
    "deberta.DebertaLayerNorm": "LayerNorm((8,), eps=1e-12, elementwise_affine=True, bias=True)",
}


@pytest.mark.parametrize(("name", "ours"), LAYERS.items())
def test_kin(name, ours):
    layer = hugging_faces(name, 8)
    keys = list(layer.state_dict())
    assert convert(layer).replaced and repr(layer) == ours
    assert list(layer.state_dict()) == keys
    revert(layer)
    assert type(layer).__name__ == name.partition(".")[2]


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (("squeezebert.SqueezeBertLayerNorm", 8), "not LayerNorm"),  # of the dimension before the last
        (("chameleon.ChameleonLayerNorm", (2, 8)), "not LayerNorm"),  # with a weight for each head
        (("cohere.CohereLayerNorm", (2, 8)), "not LayerNorm"),  # likewise
        (("mamba2.MambaRMSNormGated", 8, 8), "not registered"),
        (("nanochat.NanoChatRMSNorm",), "it has neither normalized_shape nor weight"),
    ],
)
def test_false_kin(layer, reason):
    """Called like the others, and left alone."""
    layer = hugging_faces(*layer)
    report = convert(layer)
    assert not report.replaced and reason in report.skipped[""]


def test_bfloat16():
    """Hugging Face's rounds the normalized row, and its product with the weight; ours the product alone."""
    layer, x = hugging_faces("llama.LlamaRMSNorm", 64), torch.randn(100, 64).to(BF16)
    with torch.no_grad():
        layer.to(BF16).weight.normal_()
        theirs = layer(x)
        convert(layer)
        ours = layer(x)
        exact = torch.nn.functional.rms_norm(x.double(), (64,), layer.weight.double(), 1e-6)
    assert ours.dtype == theirs.dtype == BF16
    # Half a unit in the last place is at most 2^-8 of the value, at 1, 2, 4 and so on.
    unit = exact.abs() * 2**-8
    assert ((ours - exact).abs() <= unit * (1 + 1e-4)).all()
    assert ((theirs - exact).abs() > 1.5 * unit).any()


TIMMS = {
    "LayerNorm": "LayerNorm",
    "LayerNormFp32": "LayerNorm",
    "LayerNorm2d": "LayerNorm2d",
    "LayerNorm2dFp32": "LayerNorm2d",
    "RmsNorm": "RMSNorm",
    "RmsNormFp32": "RMSNorm",
}


@pytest.mark.parametrize(("theirs", "ours"), TIMMS.items())
@pytest.mark.parametrize("affine", [True, False])
def test_timms(theirs, ours, affine):
    import timm.layers

    layer = getattr(timm.layers, theirs)(8, affine=affine)
    assert convert(layer).replaced and type(layer) is getattr(layernorm_ext, ours)


def test_torchvisions():
    from torchvision.models.convnext import LayerNorm2d

    layer = LayerNorm2d(8)
    assert convert(layer).replaced and type(layer) is layernorm_ext.LayerNorm2d
