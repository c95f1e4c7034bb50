"""Train a character model of pre-norm GPT blocks whose residual additions and norms are one kernel."""

import torch
import torch.nn.functional as F
from torch import nn

from layernorm_ext import AddRMSNorm

WIDTH, HEADS, CONTEXT = 32, 4, 32
TEXT = "the quick brown fox jumps over the lazy dog. " * 40


class Block(nn.Module):
    """Attention and a perceptron. The residual is added by the next norm, not by the block."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = AddRMSNorm(WIDTH), AddRMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, residual):
        """Map the last block's output [B, S, N] and the residual to this block's."""
        x, residual = self.norm1(x, residual)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x, residual = self.norm2(self.out(attention.transpose(1, 2).flatten(2)), residual)
        return self.mlp(x), residual


class GPT(nn.Module):
    """Embeddings, blocks, a last norm and a linear layer."""

    def __init__(self, vocabulary):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = AddRMSNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, ids):
        """Return the logits of the next characters."""
        x, residual = self.tokens(ids) + self.positions.weight, None  # the first norm starts the residual stream
        for block in self.blocks:
            x, residual = block(x, residual)
        return self.head(self.norm(x, residual)[0])


torch.manual_seed(0)
characters = sorted(set(TEXT))
data = torch.tensor([characters.index(c) for c in TEXT])
model = GPT(len(characters))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(101):
    starts = torch.randint(len(data) - CONTEXT - 1, (16,))
    batch = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
