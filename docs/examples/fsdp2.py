"""Shard a model of this package's layers with FSDP2 over two processes, and compare the training with one process."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from layernorm_ext import LayerNorm

PROCESSES, WIDTH = 2, 32


def train(model, x):
    """Take three steps and return the loss after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model(x).square().mean().detach()


def build():
    """Return the same model and batch in every process."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
    return nn.Sequential(*blocks, LayerNorm(WIDTH), nn.Linear(WIDTH, 1)), torch.randn(8, WIDTH)


def run(rank, folder):
    """Train on this process's half of the batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    model, x = build()
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for block in model[:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = train(model, x.chunk(PROCESSES)[rank])
    dist.all_reduce(loss, dist.ReduceOp.SUM)
    if rank == 0:
        weight = model[0][0].weight
        print(f"process 0 holds {weight.to_local().numel()} of the {weight.numel()} weights of a LayerNorm")
        expected = train(*build())
        print(f"loss {loss / PROCESSES:.6f}, relative difference from one process {abs(loss / 2 / expected - 1):.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (folder,), PROCESSES)
