"""convert() on Mamba and on diffusers' DiT: the same results, gradients and training step, and compilation."""

import copy

import pytest
import torch
from packages import import_torchvision
from test_convert_models import (
    F64,
    MAMBA,
    Float64Throughout,
    assert_close,
    build_model,
    logits_and_gradients,
    randomize,
)

from layernorm_ext import convert

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.integration]

DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 2}
DIT |= {"sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10}


@pytest.fixture(autouse=True)
def torchvision():
    """Import torchvision, which transformers and diffusers import."""
    import_torchvision()


class DiT(torch.nn.Module):
    """DiTTransformer2DModel with its image as the result."""

    def __init__(self):
        super().__init__()
        self.model = pytest.importorskip("diffusers").DiTTransformer2DModel(**DIT)

    def forward(self, **inputs):
        return self.model(**inputs).sample


def dit(dtype):
    """Return the model, its inputs, and the number of its norms, of which none has parameters."""
    inputs = {"hidden_states": torch.randn(2, 4, 8, 8, dtype=dtype)}
    return DiT(), inputs | {"timestep": torch.tensor([1, 2]), "class_labels": torch.tensor([3, 4])}, 5


def mamba(dtype):
    return build_model("MambaForCausalLM", MAMBA), {"input_ids": torch.randint(3, 50, (2, 7))}, 3


@pytest.mark.parametrize("build", [dit, mamba])
def test_float64_training_step_matches_the_original(build):
    model, inputs, layers = build(F64)
    model = randomize(model).to(F64).eval()
    original = copy.deepcopy(model)
    report = convert(model)
    assert len(report.replaced) == layers and not report.skipped
    results, losses = [], []
    with Float64Throughout():
        for each in (original, model):
            results.append(logits_and_gradients(each, inputs))
            for name, parameter in each.named_parameters():
                parameter.grad = results[-1][name]
            torch.optim.SGD(each.parameters(), 1e-3).step()
            losses.append(logits_and_gradients(each, inputs))
    # Some ten layers each round some ten times by 1e-16. The gradients of the keys' biases, which are zero, add larger
    # terms.
    assert_close(results[1], results[0], 1e-13)
    assert_close(losses[1], losses[0], 1e-13)


@pytest.mark.parametrize("build", [dit, mamba])
def test_converted_models_compile(build):
    torch._dynamo.reset()
    model, inputs, _ = build(torch.float32)
    expected = logits_and_gradients(randomize(model).eval(), inputs)
    convert(model)
    compiled = torch.compile(model, backend="aot_eager")
    assert_close(logits_and_gradients(compiled, inputs), expected, 1e-5)  # some ten layers with ten roundings of 6e-8
