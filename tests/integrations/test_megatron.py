"""integrations.megatron builds norms for Megatron-Core's layer specs, with the options that its torch norms refuse."""

import contextlib
import copy
import importlib
import types
import warnings

import pytest
import torch
from support.models import randomize
from support.reference import BF16, F64

from layernorm_ext import LayerNorm, RMSNorm

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.integration]

WIDTH = 16
NORMS = 2 * 4 + 1  # two layers with norms of input, queries, keys and MLP input, and the final norm


@pytest.fixture(scope="module")
def hook():
    """Return layernorm_ext.integrations.megatron, with one process in each of Megatron's process groups."""
    # Megatron warns that Apex is missing.
    with warnings.catch_warnings(action="ignore"), pytest.MonkeyPatch.context() as patch:
        pytest.importorskip("megatron.core")
        from megatron.core import parallel_state, tensor_parallel

        module = importlib.import_module("layernorm_ext.integrations.megatron")
        # Megatron allocates buffers and draws random numbers on the current GPU.
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        tracker = types.SimpleNamespace(fork=contextlib.nullcontext)
        patch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield module
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def config(**options):
    from megatron.core.transformer import TransformerConfig

    options |= {"num_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 2, "use_cpu_initialization": True}
    return TransformerConfig(**options, attention_dropout=0.0, hidden_dropout=0.0, layernorm_epsilon=1e-4)


def gpt_model(norm, configuration):
    """Return a GPT whose norms are all built by `norm`."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    spec = get_gpt_layer_local_spec(normalization=configuration.normalization, qk_layernorm=True)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    attention = spec.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = norm
    block = TransformerBlockSubmodules([spec] * configuration.num_layers, layer_norm=norm)
    return GPTModel(configuration, block, vocab_size=32, max_sequence_length=8)


def logits_and_gradients(model):
    torch.manual_seed(1)
    tokens, mask = torch.randint(32, (2, 8)), torch.ones(1, 1, 8, 8).tril() < 0.5
    logits = model(tokens, torch.arange(8).expand(2, 8), mask)
    loss = logits.flatten() @ torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype)
    return [logits, *torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)]


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_gpt_computes_what_it_computes_with_torchs_norms(normalization, hook):
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    configuration = config(normalization=normalization, params_dtype=torch.float32)
    theirs = randomize(gpt_model(WrappedTorchNorm, configuration))
    ours = gpt_model(hook.Norm, configuration)
    ours.load_state_dict(theirs.state_dict())
    cls = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[normalization]
    norms = [module for module in ours.modules() if isinstance(module, cls)]
    assert len(norms) == NORMS and {norm.eps for norm in norms} == {1e-4}
    for actual, expected in zip(logits_and_gradients(ours), logits_and_gradients(theirs), strict=True):
        # Some fifty operations round by 6e-8.
        atol = 1e-5 * max(1, expected.abs().max().item())
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_zero_centered_weights_give_the_same_model(normalization, hook):
    plain = randomize(gpt_model(hook.Norm, config(normalization=normalization)))
    zero_centered = gpt_model(hook.Norm, config(normalization=normalization, layernorm_zero_centered_gamma=True))
    norms = [name for name, module in plain.named_modules() if isinstance(module, (LayerNorm, RMSNorm))]
    for name in norms:
        assert not zero_centered.get_submodule(name).weight.any()  # the identity transform
    state = copy.deepcopy(plain.state_dict())
    for name in norms:
        state[f"{name}.weight"] -= 1
    zero_centered.load_state_dict(state)
    for actual, expected in zip(logits_and_gradients(zero_centered), logits_and_gradients(plain), strict=True):
        atol = 1e-5 * max(1, expected.abs().max().item())  # some fifty operations round by 6e-8
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_are_marked_for_sequence_parallelism(sequence_parallel, normalization, hook):
    configuration = config(normalization=normalization)
    configuration.sequence_parallel = sequence_parallel  # Megatron refuses it with one process
    parameters = list(hook.Norm(configuration, WIDTH).parameters())
    assert len(parameters) == (2 if normalization == "LayerNorm" else 1)
    assert [parameter.sequence_parallel for parameter in parameters] == [sequence_parallel] * len(parameters)


def test_memory_efficient_norms_save_their_output(hook):
    norm = hook.Norm(config(memory_efficient_layer_norm=True), WIDTH, eps=1e-3).to(BF16)
    x, saved = torch.randn(8, 2, WIDTH, dtype=BF16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        y = norm(x)
    assert y.data_ptr() in saved and x.data_ptr() not in saved
    exact = torch.nn.functional.layer_norm(x.double(), (WIDTH,), eps=1e-3)
    # The output, up to 4, is rounded once.
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(BF16).eps, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"persist_layer_norm": True}, {"normalization": "RMSNorm"}], ids=str)
def test_arguments_of_other_megatron_versions_are_ignored_and_outputs_are_no_views(options, hook):
    """Megatron frees the memory of outputs, which it cannot do if they are views."""
    older = {"persist_layer_norm": True, "zero_centered_gamma": True, "normalization": "RMSNorm"}  # the config decides
    newer = {"has_residual": True}
    norms = [hook.Norm(config=config(**options), hidden_size=WIDTH, eps=1e-3, **each) for each in (older, newer)]
    assert {(type(norm), norm.zero_centered_weight, norm.eps) for norm in norms} == {(type(norms[0]), False, 1e-3)}
    norm, x = hook.Norm(config(**options), WIDTH).double(), torch.randn(8, 2, WIDTH, dtype=F64, requires_grad=True)
    function = getattr(torch.nn.functional, "rms_norm" if "normalization" in options else "layer_norm")
    y = norm(x)
    assert y._base is None
    torch.testing.assert_close(y, function(x, (WIDTH,), eps=1e-5), rtol=1e-14, atol=1e-14)  # ten roundings of 1e-16


def test_other_normalizations_are_refused(hook):
    configuration = config()
    configuration.normalization = "L2Norm"
    with pytest.raises(ValueError, match="Expected config.normalization to be 'LayerNorm' or 'RMSNorm', but got 'L2"):
        hook.Norm(configuration, WIDTH)
