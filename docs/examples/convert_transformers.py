"""Convert a model of transformers, train a step, and compare the loss with the original's."""

import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import layernorm_ext


def training_step(model, ids):
    """Take a step and return the loss after it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    return model(ids, labels=ids).loss.item()


torch.manual_seed(0)
config = GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
original, ids = GPT2LMHeadModel(config).eval(), torch.randint(100, (2, 16))  # eval: no dropout
converted = copy.deepcopy(original)
print(layernorm_ext.convert(converted))
losses = [training_step(model, ids) for model in (original, converted)]
print(f"loss {losses[1]:.6f}, relative difference from the original {abs(losses[1] / losses[0] - 1):.0e}")
