"""Measure time and peak memory of steps of whole models with random parameters, before and after conversion."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import layernorm_ext

from .cases import PAIRS
from .timing import Device, measure_times, summarize
from .train_digits import Block

TORCH, OURS = "torch", "ours"
Model = tuple[nn.Module, Tensor]


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution and a two-layer perceptron on normalized channels (Liu et al. 2022, arXiv:2201.03545)."""

    def __init__(self, channels: int):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, kernel_size=7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, channels, height, width] to the same shape."""
        rows = self.norm(self.depthwise(x).permute(0, 2, 3, 1))  # [batch, height, width, channels]
        return x + self.mlp(rows).permute(0, 3, 1, 2)


def transformer(large: bool) -> Model:
    width, depth, batch, tokens = (1024, 12, 16, 1024) if large else (256, 4, 8, 128)
    blocks = (Block(width, width // 64, nn.LayerNorm) for _ in range(depth))
    return nn.Sequential(*blocks, nn.LayerNorm(width)), torch.randn(batch, tokens, width)


def convnext(large: bool) -> Model:
    channels, depth, batch, size = (384, 9, 64, 28) if large else (96, 3, 4, 28)
    return nn.Sequential(*(ConvNeXtBlock(channels) for _ in range(depth))), torch.randn(batch, channels, size, size)


# name -> a function that builds a large (for a GPU) or a small model and its input
MODELS = {"transformer encoder": transformer, "ConvNeXt blocks": convnext}


def training_step(model: nn.Module, inputs: Tensor) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).float().square().mean().backward()
        optimizer.step()

    return step


def measure(device: Device, name: str, dtypes: str, seconds: float) -> Iterator[dict]:
    """Yield records of the original and the converted model for training and inference."""
    dtype = PAIRS[dtypes][0]
    model, inputs = MODELS[name](device.is_cuda)
    model, inputs = model.to(device.name, dtype), inputs.to(device.name, dtype)
    converted = copy.deepcopy(model)
    layers = len(layernorm_ext.convert(converted).replaced)  # convert() checks the results of each layer
    models = {OURS: converted, TORCH: model}
    for mode in ("training", "inference"):
        grad = mode == "training"
        steps = {c: training_step(m, inputs) if grad else lambda m=m: m(inputs) for c, m in models.items()}
        times, failed = measure_times(device, {c: [step] for c, step in steps.items()}, grad, "eager", seconds / 3)
        for contender in (TORCH, OURS):
            with torch.set_grad_enabled(grad):
                peak, kept = device.memory(steps[contender]) if contender in times else (None, None)
            message = failed.get(contender, "")
            record = {"model": name, "dtypes": dtypes, "mode": mode, "contender": contender, "layers": layers}
            record |= {"status": "failed" if message else "ok", "message": message}
            yield record | {"peak_bytes": peak, "kept_bytes": kept} | summarize(times, contender, (TORCH,))
