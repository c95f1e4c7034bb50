"""Real architectures and other packages' layers, converted: made from configurations, tiny, with random weights."""

import copy
import importlib

import pytest
import torch
from packages import import_torchvision

import layernorm_ext
from layernorm_ext import convert, revert

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.integration]


@pytest.fixture(scope="module", autouse=True)
def torchvision():
    """The other packages import it."""
    import_torchvision()


def hugging_face(name, **options):
    """A model of transformers with a vocabulary of 50."""
    transformers = pytest.importorskip("transformers")
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
    timm = pytest.importorskip("timm")
    model = timm.create_model("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=5)
    return model, {"x": torch.randn(2, 3, 32, 32)}


def timm_vit():
    timm = pytest.importorskip("timm")
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


# 16-bit models, whose layers meet float32

T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
T5["decoder_start_token_id"] = 0
MAMBA = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "residual_in_fp32": True}
MAMBA2 = {**MAMBA, "num_heads": 4, "head_dim": 8, "n_groups": 1, "expand": 2, "chunk_size": 4}
# The options and the number of layers that are replaced.
REDUCED = {
    "T5ForConditionalGeneration": (T5, 12),
    "MT5ForConditionalGeneration": (T5, 12),
    "UMT5ForConditionalGeneration": (T5, 12),
    "Pop2PianoForConditionalGeneration": (T5, 12),
    "UdopForConditionalGeneration": ({**T5, "image_size": 16, "patch_size": 8, "num_channels": 3}, 12),
    "MambaForCausalLM": (MAMBA, 3),
    "Mamba2ForCausalLM": (MAMBA2, 3),
    "FalconMambaForCausalLM": (MAMBA, 3),
}


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", REDUCED)
def test_16_bit_models(name, dtype, tmp_path):
    """As `from_pretrained` loads them: T5's kin keep some float16 layers in float32, Mamba's the residual."""
    transformers = pytest.importorskip("transformers")
    options, layers = REDUCED[name]
    hugging_face(name, **options).save_pretrained(tmp_path)
    model = getattr(transformers, name).from_pretrained(tmp_path, dtype=dtype).eval()
    inputs = {"input_ids": tokens()}
    if options is not MAMBA and options is not MAMBA2:
        inputs["decoder_input_ids"] = tokens()
    if name.startswith("Udop"):
        inputs["bbox"] = torch.rand(2, 7, 4)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    exact = copy.deepcopy(model).double()(**wide).logits.double()  # Mamba's are float32
    expected = model(**inputs).logits
    assert len(convert(model).replaced) == layers
    actual = model(**inputs).logits
    assert actual.dtype == expected.dtype
    # Some ten operations in turn round to 16 bits, on the way to logits of the size of the largest.
    tolerance = 16 * torch.finfo(dtype).eps * exact.abs().max().item()
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_float32_embeddings_of_a_16_bit_model(dtype):
    """The norms see float32 input with a 16-bit weight; autocast has the linear layers take their output."""
    model = hugging_face("LlamaForCausalLM", **DECODER).to(dtype).eval()
    embeddings = torch.randn(2, 7, 16)
    exact = copy.deepcopy(model).double()(inputs_embeds=embeddings.double()).logits.double()
    with torch.autocast("cpu", dtype):
        expected = model(inputs_embeds=embeddings).logits
        assert len(convert(model).replaced) == 5
        actual = model(inputs_embeds=embeddings).logits
    assert actual.dtype == expected.dtype
    tolerance = 16 * torch.finfo(dtype).eps * max(1, exact.abs().max().item())  # as above
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=tolerance)


# Single layers


def hugging_faces(name, *arguments):
    """A layer of transformers, told by the module's name and the class's."""
    module, _, name = name.rpartition(".")
    pytest.importorskip("transformers")
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
    "nemotron.NemotronLayerNorm1P": (
        "LayerNorm((8,), eps=1e-05, elementwise_affine=True, bias=True, zero_centered_weight=True)"
    ),
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
    layers = pytest.importorskip("timm.layers")
    layer = getattr(layers, theirs)(8, affine=affine)
    assert convert(layer).replaced and type(layer) is getattr(layernorm_ext, ours)


def test_torchvisions():
    layer = pytest.importorskip("torchvision.models.convnext").LayerNorm2d(8)
    assert convert(layer).replaced and type(layer) is layernorm_ext.LayerNorm2d


@pytest.mark.parametrize(
    ("theirs", "ours"), {"LayerNormNoBias": "LayerNorm", "LayerNorm2dNoBias": "LayerNorm2d"}.items()
)
def test_timms_metaformer(theirs, ours):
    metaformer = pytest.importorskip("timm.models.metaformer")
    layer = getattr(metaformer, theirs)(8)
    assert convert(layer).replaced and type(layer) is getattr(layernorm_ext, ours) and layer.bias is None


def random_parameters(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def reference(module, x, eps):
    """Compute an RMSNorm or a LayerNorm in float64."""
    weight, bias, x = (t if t is None else t.detach().double() for t in (*weight_and_bias(module), x))
    if isinstance(module, layernorm_ext.LayerNorm):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def weight_and_bias(module):
    weight = module.weight
    if module.zero_centered_weight:
        weight = weight.double() + 1
    return weight, getattr(module, "bias", None)


def diffusers_layers():
    normalization = pytest.importorskip("diffusers.models.normalization")
    yield normalization.RMSNorm(64, 1e-6), "RMSNorm", 1e-6
    yield normalization.FP32LayerNorm(64), "LayerNorm", 1e-5
    yield normalization.FP32LayerNorm(64, elementwise_affine=False), "LayerNorm", 1e-5


def x_transformers_layers():
    x_transformers = pytest.importorskip("x_transformers.x_transformers")
    yield x_transformers.RMSNorm(64), "RMSNorm", 0
    yield x_transformers.RMSNorm(64, unit_offset=True), "RMSNorm", 0


@pytest.mark.parametrize("layers", [diffusers_layers, x_transformers_layers])
@pytest.mark.parametrize("dtypes", [(F32, F32), (F16, F16), (BF16, F32), (F32, BF16)], ids=str)
def test_other_packages(layers, dtypes):
    """Within the promise of float32 sums and a rounding to the output's dtype, which is that of the original."""
    for layer, ours, eps in layers():
        random_parameters(layer.to(dtypes[1]))
        x = torch.randn(10, 64).to(dtypes[0])
        expected, keys, theirs = layer(x), list(layer.state_dict()), type(layer)
        assert convert(layer).replaced
        assert isinstance(layer, getattr(layernorm_ext, ours)) and repr(layer).startswith(ours)
        assert list(layer.state_dict()) == keys
        actual = layer(x)
        assert actual.dtype == expected.dtype
        roundoff = torch.finfo(actual.dtype).eps / 2
        torch.testing.assert_close(actual.double(), reference(layer, x, eps), rtol=roundoff + 1e-6, atol=2e-6)
        revert(layer)
        assert type(layer) is theirs and torch.equal(layer(x), expected)


def test_x_transformers_clamps():
    """It divides by at least 1e-12. Zero rows are the same, and gradients of them; so are rows of norm 1e-9."""
    module = pytest.importorskip("x_transformers.x_transformers").RMSNorm(8)
    random_parameters(module.double())
    x = torch.zeros(2, 8, dtype=F64)
    x[1, 3] = 1e-9
    x.requires_grad_()
    dy = torch.randn(2, 8, dtype=F64)
    results = []
    for _ in range(2):
        y = module(x)
        results.append((y.detach(), *torch.autograd.grad(y, (x, module.g), dy)))
        convert(module)
    assert type(module) is not type(module).__bases__[0] and not results[0][0][0].any()
    for actual, expected in zip(*results, strict=True):
        # Adding 1e-24 to a square of 1e-18 changes the norm by 5e-7; gradients are as large as 1e12.
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("build", [lambda n: n.RMSNorm(8, 1e-6, bias=True), lambda n: n.RMSNorm((2, 8), 1e-6)])
def test_diffusers_false_kin(build):
    """With a bias, or a weight of two dimensions of which one is normalized."""
    layer = build(pytest.importorskip("diffusers.models.normalization"))
    assert convert(layer).skipped


def test_x_transformers_model():
    """Its own norms, in an encoder and decoder: logits and gradients in float64."""
    x_transformers = pytest.importorskip("x_transformers")
    decoder = x_transformers.Decoder(dim=16, depth=2, heads=2, use_rmsnorm=True, attn_dim_head=8)
    model = x_transformers.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=decoder).double()
    random_parameters(model)
    inputs = {"x": tokens()}
    expected = call(model.eval(), inputs)
    report = convert(model)
    assert len(report.replaced) == 5 and not report.skipped
    # Some twenty operations of float64; parameters of size 1 make logits of size 1e3.
    assert_near(call(model, inputs), expected, 1e-11)
