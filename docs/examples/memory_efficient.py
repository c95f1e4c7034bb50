"""Measure what memory_efficient=True saves in blocks of a norm and a linear layer.

A linear layer keeps its input for backward, which is the norm's output. A norm with memory_efficient keeps the same
tensor instead of its own input.
"""

import torch
from torch import nn

from layernorm_ext import LayerNorm

WIDTH, ROWS = 256, 1024


def kept_bytes(model, x):
    """Return the bytes that autograd keeps for backward, without the parameters; shared memory counts once."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def record(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        y = model(x)
    y.sum().backward()
    return sum(size for pointer, size in kept.items() if pointer not in parameters)


torch.manual_seed(0)
x, sizes, gradients = torch.randn(ROWS, WIDTH, requires_grad=True), {}, {}
for memory_efficient in False, True:
    torch.manual_seed(1)
    blocks = ((nn.Linear(WIDTH, WIDTH), LayerNorm(WIDTH, memory_efficient=memory_efficient)) for _ in range(4))
    model = nn.Sequential(*(layer for block in blocks for layer in block), nn.Linear(WIDTH, WIDTH))
    sizes[memory_efficient] = kept_bytes(model, x)
    gradients[memory_efficient], x.grad = x.grad, None
    print(f"memory_efficient={memory_efficient}: autograd keeps {sizes[memory_efficient] / 2**20:.2f} MiB")
difference = (gradients[True] - gradients[False]).abs().max() / gradients[False].abs().max()
print(f"saved {1 - sizes[True] / sizes[False]:.0%}, relative difference of the gradients {difference:.0e}")
