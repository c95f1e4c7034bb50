"""Modulate a DiT block with AdaLayerNorm, and compare its bfloat16 error with that of torch's composition."""

import copy

import torch
from torch import nn

from layernorm_ext import AdaLayerNorm

WIDTH, HEADS = 64, 4


class ComposedNorm(nn.LayerNorm):
    """The composition that AdaLayerNorm replaces."""

    def __init__(self, width):
        super().__init__(width, eps=1e-6, elementwise_affine=False)

    def forward(self, x, scale, shift):
        """Normalize, scale and shift in three operations, each rounded."""
        return super().forward(x) * (1 + scale) + shift


class Block(nn.Module):
    """Attention and a perceptron, conditioned on a vector per sample (Peebles and Xie 2022, arXiv:2212.09748)."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = AdaLayerNorm(WIDTH), AdaLayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x, condition):
        """Map [B, S, N] and a condition [B, N] to [B, S, N]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        h = self.norm1(x, scale1, shift1)
        x = x + gate1 * self.attention(h, h, h, need_weights=False)[0]
        return x + gate2 * self.mlp(self.norm2(x, scale2, shift2))


torch.manual_seed(0)
ours, x, condition = Block(), torch.randn(8, 16, WIDTH), torch.randn(8, WIDTH)
torchs = copy.deepcopy(ours)
torchs.norm1, torchs.norm2 = ComposedNorm(WIDTH), ComposedNorm(WIDTH)  # no parameters: checkpoints stay the same

print(f"float32 difference: {(ours(x, condition) - torchs(x, condition)).abs().max().item():.0e}")

scale, shift = torch.randn(2, 8, 1, WIDTH)
exact = ComposedNorm(WIDTH)(x.double(), scale.double(), shift.double())
for name, norm in ("AdaLayerNorm", ours.norm1), ("composition", torchs.norm1):
    error = norm(*(t.bfloat16() for t in (x, scale, shift))) - norm(*(t.bfloat16().double() for t in (x, scale, shift)))
    print(f"bfloat16 error of {name}: {error.abs().max().item() / exact.abs().max().item():.4f}")
