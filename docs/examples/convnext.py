"""Use LayerNorm2d in a ConvNeXt block, which then needs no permutation around its first norm."""

import torch
from torch import nn

from layernorm_ext import LayerNorm2d

CHANNELS = 16


class Block(nn.Module):
    """A depthwise convolution and a perceptron of 1 x 1 convolutions (Liu et al. 2022, arXiv:2201.03545)."""

    def __init__(self):
        super().__init__()
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 7, padding=3, groups=CHANNELS)
        self.norm = LayerNorm2d(CHANNELS, eps=1e-6)
        self.mlp = nn.Sequential(nn.Conv2d(CHANNELS, 4 * CHANNELS, 1), nn.GELU(), nn.Conv2d(4 * CHANNELS, CHANNELS, 1))

    def forward(self, x):
        """Map images [N, C, H, W] to images of the same shape and memory format."""
        return x + self.mlp(self.norm(self.depthwise(x)))


torch.manual_seed(0)
block, images = Block(), torch.randn(2, CHANNELS, 14, 14)
permuted = nn.LayerNorm(CHANNELS, eps=1e-6)
permuted.load_state_dict(block.norm.state_dict())

difference = block.norm(images) - permuted(images.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
print(f"difference from the permuted LayerNorm: {difference.abs().max().item():.0e}")
for memory_format in torch.contiguous_format, torch.channels_last:
    output = block(images.to(memory_format=memory_format))
    print(f"{memory_format} is preserved: {output.is_contiguous(memory_format=memory_format)}")
