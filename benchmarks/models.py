"""Whole models: time and peak memory of a step, with torch's normalization layers and with those of this package.

Two models are built here of torch's modules; those of transformers and timm join from their configurations where the
packages are installed. Nothing is downloaded: time does not depend on the values of parameters.
"""

import copy
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from torch import Tensor, nn

import layernorm_ext

from .cases import PAIRS
from .timing import Device, contest, figures, first_line
from .train_digits import Block

TORCH, OURS = "torch", "ours"
MODES = ("training", "inference")


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, then a two-layer perceptron on normalized channels (Liu et al. 2022, arXiv:2201.03545)."""

    def __init__(self, channels: int):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, kernel_size=7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to the same shape."""
        rows = self.norm(self.depthwise(x).permute(0, 2, 3, 1))  # (batch, height, width, channels)
        return x + self.mlp(rows).permute(0, 3, 1, 2)


def transformer(large: bool) -> tuple[nn.Module, Tensor]:
    width, depth, batch, tokens = (1024, 12, 16, 1024) if large else (256, 4, 8, 128)
    blocks = (Block(width, width // 64, nn.LayerNorm) for _ in range(depth))
    return nn.Sequential(*blocks, nn.LayerNorm(width)), torch.randn(batch, tokens, width)


def convnext(large: bool) -> tuple[nn.Module, Tensor]:
    channels, depth, batch, size = (384, 9, 64, 28) if large else (96, 3, 4, 28)
    return nn.Sequential(*(ConvNeXtBlock(channels) for _ in range(depth))), torch.randn(batch, channels, size, size)


def from_transformers(kind: str) -> Callable[[bool], tuple[nn.Module, Tensor]]:
    def build(large: bool) -> tuple[nn.Module, Tensor]:
        import transformers

        sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
        if not large:
            sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
        if kind == "gpt2":  # whose configuration has other names
            names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
            sizes = {name: sizes[value] for name, value in names.items()}
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **sizes))
        batch = 16 if large else 4
        if kind == "vit":
            return model, torch.randn(batch, 3, 224, 224)
        return model, torch.randint(1000, (batch, 512 if large else 128))

    return build


def from_timm(small: str, large: str) -> Callable[[bool], tuple[nn.Module, Tensor]]:
    def build(is_large: bool) -> tuple[nn.Module, Tensor]:
        import timm

        model = timm.create_model(large if is_large else small, pretrained=False)
        return model, torch.randn(32 if is_large else 2, 3, 224, 224)

    return build


# name -> the package it comes from, and a function of "for a GPU" that returns the model and its input
MODELS = {
    "transformer encoder": ("torch", transformer),
    "ConvNeXt blocks": ("torch", convnext),
    "transformers: BERT": ("transformers", from_transformers("bert")),
    "transformers: GPT-2": ("transformers", from_transformers("gpt2")),
    "transformers: ViT": ("transformers", from_transformers("vit")),
    "timm: ViT": ("timm", from_timm("vit_tiny_patch16_224", "vit_base_patch16_224")),
    "timm: ConvNeXt": ("timm", from_timm("convnext_atto", "convnext_base")),
}


def available() -> list[str]:
    """Return the models whose packages are installed."""
    return [name for name, (package, _) in MODELS.items() if find_spec(package)]


def output(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return what a model makes of its input: the first of its outputs where it has several."""
    result = model(inputs)
    return result if isinstance(result, Tensor) else result[0]


def training_step(model: nn.Module, inputs: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        output(model, inputs).float().square().mean().backward()
        optimizer.step()

    return step


def inference_step(model: nn.Module, inputs: Tensor) -> Callable[[], object]:
    return lambda: output(model, inputs)


def errors(models: dict[str, nn.Module], inputs: Tensor) -> dict[str, float]:
    """Return the error of the output in parts of its largest value, or of the gradients of parameters if that is more.

    Exact is torch's model in float64. Gradients are held against the largest of any parameter: some, such as those of
    the bias of attention's keys, are zero but for roundings.
    """

    def results(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
        y = output(model, inputs)
        loss = y.to(torch.promote_types(y.dtype, torch.float32)).square().mean()
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return y.detach().double(), torch.cat([g.double().flatten() for g in gradients if g is not None])

    wide = inputs.double() if inputs.is_floating_point() else inputs
    exact = results(copy.deepcopy(models[TORCH]).double(), wide)

    def error(model: nn.Module) -> float:
        pairs = zip(results(model, inputs), exact, strict=True)
        return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)

    return {name: error(model) for name, model in models.items()}


def measure(device: Device, name: str, dtypes: str, modes: list[str], budget: float) -> Iterator[dict]:
    """Yield a record for each mode, of the model as it is and converted."""
    cell = {"model": name, "dtypes": dtypes}
    try:
        model, inputs = MODELS[name][1](device.is_cuda)
        dtype = PAIRS[dtypes][0]
        model = model.to(device.name, dtype).eval()  # no dropout: both compute the same
        inputs = inputs.to(device.name, dtype if inputs.is_floating_point() else None)
        models = {TORCH: model, OURS: copy.deepcopy(model)}
        converted = len(layernorm_ext.convert(models[OURS]).replaced)
        if not converted:
            raise ValueError(f"Expected normalization layers to convert in {name}, but found none")
        error = errors(models, inputs)
    except Exception as problem:  # of any kind: it is others' code
        failed = {"layers": None, "status": "failed", "message": first_line(problem), "error": None}
        nothing = {"peak_bytes": None, "kept_bytes": None} | figures({}, OURS, (TORCH,))
        for mode in modes:
            for contender in (TORCH, OURS):
                yield cell | {"mode": mode, "contender": contender} | failed | nothing
        return
    # Two right models differ by roundings that the layers magnify: neither may be twice as far off as the other.
    bound = 2 * error[TORCH] + 4 * torch.finfo(dtype).eps
    wrong = (
        "" if error[OURS] <= bound else f"off by {error[OURS]:.1e} of the largest value, torch by {error[TORCH]:.1e}"
    )
    for mode in modes:
        step = training_step if mode == "training" else inference_step
        grad = mode == "training"
        steps = {contender: step(model, inputs) for contender, model in models.items()}
        times, failed = contest(device, {c: [s] for c, s in reversed(steps.items())}, grad, "eager", budget)
        for contender, run in steps.items():
            with torch.set_grad_enabled(grad):
                peak, kept = device.memory(run) if contender in times else (None, None)
            message = failed.get(contender, wrong if contender == OURS else "")
            status = "failed" if contender in failed else "wrong" if message else "ok"
            record = cell | {"mode": mode, "contender": contender, "layers": converted, "status": status}
            record |= {"message": message, "error": error[contender], "peak_bytes": peak, "kept_bytes": kept}
            yield record | figures(times, contender, (TORCH,))
