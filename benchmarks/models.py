"""Measure time and peak memory of steps of whole models with random parameters, before and after conversion."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import layernorm_ext

from .cases import PAIRS
from .timing import Device, first_line, measure_times, summarize
from .train_digits import Block

TORCH, OURS = "torch", "ours"
MODES = ("training", "inference")
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


def errors(models: dict[str, nn.Module], inputs: Tensor) -> dict[str, float]:
    """Return each model's largest error of output or gradients against torch's model in float64.

    Errors are relative to the largest output and the largest gradient of any parameter, because some gradients are zero
    except for rounding errors.
    """

    def results(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
        y = model(inputs)
        loss = y.to(torch.promote_types(y.dtype, torch.float32)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return y.detach().double(), torch.cat([g.double().flatten() for g in gradients])

    exact = results(copy.deepcopy(models[TORCH]).double(), inputs.double())

    def error(model: nn.Module) -> float:
        pairs = zip(results(model, inputs), exact, strict=True)
        return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)

    return {name: error(model) for name, model in models.items()}


def measure(device: Device, name: str, dtypes: str, modes: list[str], budget: float) -> Iterator[dict]:
    """Yield records of the original and the converted model for each mode."""
    models, converted, error, problem = {}, None, {}, ""
    dtype = PAIRS[dtypes][0]
    try:
        model, inputs = MODELS[name](device.is_cuda)
        model = model.to(device.name, dtype).eval()  # eval disables dropout, so that both compute the same
        inputs = inputs.to(device.name, dtype)
        replaced = copy.deepcopy(model)
        converted = len(layernorm_ext.convert(replaced).replaced)
        models = {OURS: replaced, TORCH: model}
        error = errors(models, inputs)
    except Exception as exception:  # other packages may raise anything
        models, problem = {}, first_line(exception)
    # The layers magnify rounding errors, so the converted model may have twice the error of the original.
    is_wrong = error and not error[OURS] <= 2 * error[TORCH] + 4 * torch.finfo(dtype).eps  # NaN is wrong
    wrong = f"the error is {error[OURS]:.1e} of the largest value, torch's {error[TORCH]:.1e}" if is_wrong else ""
    for mode in modes:
        grad = mode == "training"
        steps = {c: training_step(m, inputs) if grad else lambda m=m: m(inputs) for c, m in models.items()}
        times, failed = measure_times(device, {c: [step] for c, step in steps.items()}, grad, "eager", budget)
        for contender in (TORCH, OURS):
            with torch.set_grad_enabled(grad):
                peak, kept = device.memory(steps[contender]) if contender in times else (None, None)
            message = problem or failed.get(contender) or (wrong if contender == OURS else "")
            status = "ok" if not message else "wrong" if contender in times else "failed"
            record = {"model": name, "dtypes": dtypes, "mode": mode, "contender": contender, "layers": converted}
            record |= {"status": status, "message": message, "error": error.get(contender)}
            yield record | {"peak_bytes": peak, "kept_bytes": kept} | summarize(times, contender, (TORCH,))
