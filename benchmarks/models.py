"""Compiled training steps of small models of transformers, timm and diffusers."""

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

import layernorm_ext
from layernorm_ext.fusion import fuse_neighbors

from .contenders import Calls, Contender, time_pass
from .timing import Device

BATCH, WIDTH, LAYERS = 4, 256, 4


def llama() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
    )
    tokens = torch.randint(1000, (BATCH, 128))
    return transformers.LlamaForCausalLM(config), lambda model: model(tokens).logits


def vit() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    import timm

    images = torch.randn(BATCH, 3, 128, 128)
    options = {"img_size": 128, "patch_size": 8, "embed_dim": WIDTH, "depth": LAYERS, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", **options), lambda model: model(images)


def dit() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    import diffusers

    options = {"num_attention_heads": 4, "attention_head_dim": WIDTH // 4, "in_channels": 4, "out_channels": 4}
    model = diffusers.DiTTransformer2DModel(
        **options, num_layers=LAYERS, sample_size=32, patch_size=2, num_embeds_ada_norm=10
    )
    latents, times = torch.randn(BATCH, 4, 32, 32), torch.arange(BATCH)
    return model.eval(), lambda model: model(latents, timestep=times, class_labels=times).sample


MODELS = {"Llama": llama, "ViT": vit, "DiT": dit}


def bind_step(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> list[Calls]:
    """Return a training step without an optimizer: the gradients of all parameters that matter."""

    def loss() -> Tensor:
        return call(model).square().mean()

    loss().backward()
    used = [parameter for parameter in model.parameters() if parameter.grad is not None]
    return [Calls(loss, used, torch.tensor(1.0))]


def measure(device: Device, model: str, seconds: float) -> Iterator[dict]:
    """Time compiled training steps of small models: with torch's norms, converted, and converted and fused.

    The models are those of transformers, timm and diffusers, of 4 layers with 256 features, in float32.
    """
    torch.compiler.reset()
    theirs, call = MODELS[model]()
    converted = copy.deepcopy(theirs)
    layernorm_ext.convert(converted)
    choices = {"converted": (converted, None), "fused": (copy.deepcopy(converted), fuse_neighbors)}
    entries = []
    for name, (module, joins) in (choices | {"torch": (theirs, None)}).items():
        options = {"pre_grad_custom_pass": joins} if joins else None
        compiled = torch.compile(module, options=options)
        entries.append(Contender(name, torch.float32, partial(bind_step, compiled, call), {}))
    yield from time_pass(device, entries, {"model": model}, "both", seconds)
