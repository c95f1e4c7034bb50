"""Train a small diffusion transformer twice, with torch's gated residuals and adaptive norms and with layernorm_ext's.

    python benchmarks/train_dit.py

takes about a minute on two CPU cores. The model (Peebles and Xie, arXiv:2212.09748) learns to turn noise into the
handwritten digits of train_digits.py, given the class. It predicts the velocity from noise to image at a random point
between both (rectified flow; Liu et al., arXiv:2209.03003). Both models start from the same parameters and train in
turn on the same batches.

The script fails if the losses of the models differ by more than 0.00001 at any step of the first epoch, or if the loss
does not fall below half of that of the untrained model.
"""

import math
import sys
from argparse import Namespace
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_digits import MAX_FIRST_EPOCH_DIFFERENCE, Block, Run, load, parse_args, print_comparison, train_in_turn

import layernorm_ext


class TorchAddAdaLayerNorm(nn.LayerNorm):
    """The composition of torch's functions that layernorm_ext.AddAdaLayerNorm replaces."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6, elementwise_affine=False)

    def forward(self, x: Tensor, residual: Tensor, *modulation: Tensor | None) -> tuple[Tensor, Tensor]:
        scale, shift, gate = (None if tensor is None else tensor.unsqueeze(1) for tensor in modulation)
        total = residual + (x if gate is None else gate * x)
        return super().forward(total) * (1 + scale) + shift, total


class DiTBlock(Block):
    """Transformer block whose norms are scaled and shifted, and whose branches are gated, by the condition.

    Each norm first adds the gated branch before it to the residual.
    """

    def __init__(self, width: int, heads: int, norm: type[nn.Module]) -> None:
        super().__init__(width, heads, norm)
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(
        self, x: Tensor, residual: Tensor, gate: Tensor | None, condition: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Map a branch and the residual, (batch, tokens, width), and its gate, (batch, width), to the next ones."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        x, residual = self.norm1(x, residual, scale1, shift1, gate)
        x, residual = self.norm2(self.attend(x), residual, scale2, shift2, gate1)
        return self.mlp(x), residual, gate2


class DiffusionTransformer(nn.Module):
    """Predicts the velocity at noisy images, (batch, 8, 8), of 16 patches of 2x2 pixels each."""

    def __init__(self, norm: type[nn.Module], width: int = 64, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(4, width), nn.Parameter(0.5 * torch.randn(16, width))
        self.label, self.time = nn.Embedding(10, width), nn.Linear(width, width)
        self.register_buffer("frequencies", torch.exp(torch.linspace(0, math.log(100), width // 2)))
        self.blocks = nn.ModuleList(DiTBlock(width, heads, norm) for _ in range(depth))
        self.norm, self.modulation, self.head = norm(width), nn.Linear(width, 2 * width), nn.Linear(width, 4)

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Map (batch, 8, 8), (batch,) and (batch,) to (batch, 8, 8)."""
        patches = F.pixel_unshuffle(images.unsqueeze(1), 2).flatten(2).transpose(1, 2)  # (batch, 16, 4)
        angles = times.unsqueeze(1) * self.frequencies
        condition = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], dim=1)) + self.label(labels))
        x, gate = self.embed(patches), None
        residual = self.position.expand_as(x)
        for block in self.blocks:
            x, residual, gate = block(x, residual, gate, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=-1)
        x, _ = self.norm(x, residual, scale, shift, gate)
        velocity = self.head(x).transpose(1, 2).unflatten(2, (4, 4))
        return F.pixel_shuffle(velocity, 2).squeeze(1)

    def loss(self, images: Tensor, labels: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        at = times.view(-1, 1, 1)
        return F.mse_loss(self(noise + at * (images - noise), times, labels), images - noise)


def noise_and_times(count: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 8, 8).to(device), torch.rand(count).to(device)


def random_batches(images: Tensor, labels: Tensor, steps: int, args: Namespace) -> Iterator[tuple[Tensor, ...]]:
    for _ in range(steps):
        chosen = torch.randint(len(images), (args.batch_size,))
        yield images[chosen], labels[chosen], *noise_and_times(args.batch_size, args.device)


def kept_bytes(model: DiffusionTransformer, batch: tuple[Tensor, ...]) -> int:
    """Return the size of the tensors that forward keeps for backward."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({t.data_ptr(): t.nbytes}) or t, lambda t: t):
        loss = model.loss(*batch)  # alive, so that no address is used twice
    del loss
    return sum(kept.values())


def main() -> None:
    args = parse_args(__doc__)
    train, test = load(args.device)
    steps_per_epoch = len(train[0]) // args.batch_size
    steps = args.epochs * steps_per_epoch
    runs = []
    for norm in (TorchAddAdaLayerNorm, layernorm_ext.AddAdaLayerNorm):
        torch.manual_seed(args.seed)  # the same initial parameters
        model = DiffusionTransformer(norm).to(args.device)
        runs.append(Run(model, torch.optim.AdamW(model.parameters(), 1e-3)))
    train_in_turn(*runs, random_batches(*train, steps, args), steps)

    with torch.no_grad():
        all_test = *test, *noise_and_times(len(test[0]), args.device)
        test_losses = [run.model.loss(*all_test).item() for run in runs]
    (batch,) = random_batches(*train, 1, args)
    rows = {
        "loss, first step": [f"{run.losses[0]:.4f}" for run in runs],
        "loss, last epoch": [f"{np.mean(run.losses[-steps_per_epoch:]):.4f}" for run in runs],
        "test loss": [f"{loss:.4f}" for loss in test_losses],
        "kept for backward": [f"{kept_bytes(run.model, batch) / 2**20:.2f} MiB" for run in runs],
    }
    if not print_comparison(*runs, steps_per_epoch, rows) <= MAX_FIRST_EPOCH_DIFFERENCE:  # NaN fails too
        sys.exit(f"FAILED: the losses differ by more than {MAX_FIRST_EPOCH_DIFFERENCE:.0e} within the first epoch")
    if not max(test_losses) < runs[0].losses[0] / 2:
        sys.exit("FAILED: a model has not learned to predict the velocity")


if __name__ == "__main__":
    main()
