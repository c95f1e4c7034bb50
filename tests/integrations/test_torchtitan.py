"""integrations.torchtitan overrides the norms in torchtitan's configs."""

import copy
import importlib
from dataclasses import dataclass

import pytest
import torch
from support.models import randomize

import layernorm_ext

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.integration]

TARGETS = ["layernorm_ext.integrations.torchtitan.rms_norm", "layernorm_ext.integrations.torchtitan.layer_norm"]


@pytest.fixture(scope="module")
def hook():
    """Return layernorm_ext.integrations.torchtitan; torchtitan imports triton."""
    pytest.importorskip("torchtitan.models.common.nn_modules", exc_type=ImportError)
    return importlib.import_module("layernorm_ext.integrations.torchtitan")


@pytest.fixture
def common(hook):
    """Return torchtitan's common modules."""
    return importlib.import_module("torchtitan.models.common")


def apply(root, *targets):
    """Apply overrides as torchtitan's trainer does."""
    from torchtitan.config import OverrideConfig, apply_overrides

    return apply_overrides(OverrideConfig(imports=list(targets)), root)


def logits_and_gradients(model, tokens):
    logits = model(tokens)
    loss = logits.flatten() @ torch.linspace(-1, 1, logits.numel())
    return [logits, *torch.autograd.grad(loss, list(model.parameters()))]


def test_llama_computes_what_it_computes_with_torchs_norms(hook, common):
    models = pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)
    config = models.llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    for layer in config.layers:  # torchtitan's FlexAttention compiles itself
        layer.attention.inner_attention = common.attention.ScaledDotProductAttention.Config()
    theirs = config.build()
    theirs.init_states()
    randomize(theirs)

    overridden = copy.deepcopy(config)
    assert len(apply(overridden, TARGETS[0])) == 5
    ours = overridden.build()
    norms = [module for module in ours.modules() if isinstance(module, torch.nn.RMSNorm)]
    assert len(norms) == 5 and {type(norm) for norm in norms} == {hook.RMSNorm}
    ours.init_states()
    assert all((norm.weight == 1).all() for norm in norms)  # as the config's param_init sets them
    ours.load_state_dict(theirs.state_dict())

    tokens = torch.randint(2048, (2, 8))
    for actual, expected in zip(logits_and_gradients(ours, tokens), logits_and_gradients(theirs, tokens), strict=True):
        # Some fifty operations round by 6e-8.
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * max(1, expected.abs().max().item()))


@dataclass
class ConfigOfNorms:
    """Some configs of norms, with the method by which torchtitan finds them in the config of a model."""

    norms: list

    def traverse(self, cls):
        yield from ((f"norms.{i}", norm, self.norms, i) for i, norm in enumerate(self.norms) if isinstance(norm, cls))


def test_overrides_keep_the_values_and_take_options(hook, common):
    init = {"weight": torch.nn.init.ones_}
    root = ConfigOfNorms(
        [
            common.LayerNorm.Config(normalized_shape=8, eps=1e-3, elementwise_affine=False),
            common.LayerNorm.Config(normalized_shape=8, param_init=init),
            common.RMSNorm.Config(normalized_shape=8, eps=1e-3),
        ]
    )
    apply(root, TARGETS[0], (TARGETS[1], {"memory_efficient": True}))
    assert [type(norm) for norm in root.norms] == [hook.LayerNorm.Config] * 2 + [hook.RMSNorm.Config]
    plain, memory_efficient, rms = (config.build() for config in root.norms)
    assert plain.eps == rms.eps == 1e-3 and plain.weight is None and rms.weight.shape == (8,)
    assert memory_efficient.memory_efficient and memory_efficient._param_init is init
    assert isinstance(plain, layernorm_ext.LayerNorm) and isinstance(rms, layernorm_ext.RMSNorm)
    x = torch.randn(3, 8, dtype=torch.float64)
    # Some ten roundings of 1e-16.
    torch.testing.assert_close(plain(x), torch.nn.functional.layer_norm(x, (8,), eps=1e-3), rtol=1e-14, atol=1e-14)


def test_norms_with_another_formula_stay(hook, common):
    """Like Muse Glimmer's RMSNorm: its config derives from RMSNorm's, and its forward adds to the weight."""

    class Centered(common.RMSNorm):
        @dataclass(kw_only=True, slots=True)
        class Config(common.RMSNorm.Config):
            gain_center: float = 1.0

    root = ConfigOfNorms([Centered.Config(normalized_shape=8), common.RMSNorm.Config(normalized_shape=8)])
    assert len(apply(root, TARGETS[0])) == 1
    assert [type(norm) for norm in root.norms] == [Centered.Config, hook.RMSNorm.Config]


def test_unknown_options_are_refused(hook, common):
    root = ConfigOfNorms([common.RMSNorm.Config(normalized_shape=8)])
    with pytest.raises(ValueError, match="memory_efficient"):
        apply(root, (TARGETS[0], {"memory_efficient": True}))
