"""Layers and models for the tests of convert(), and of the tracers of torch."""

import copy
import io

import torch

import layernorm_ext
from layernorm_ext import RMSNorm, layer_norm, layer_norm_2d, rms_norm
from support.family import MEMBERS
from support.reference import BF16, F16, F32, F64


def snapshot(module):
    """Return a module's class and attributes. Snapshots are equal if tensors and hooks are the same objects."""
    return type(module), {name: copy.copy(value) for name, value in vars(module).items()}


def randomize(module):
    """Change all parameters: weights of one and biases of zero would hide errors."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return module


def save_and_load(scripted):
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


class ViewOfNorm(torch.nn.Module):
    """A norm of a convolution's transposed output. view() fails unless the output of the norm is contiguous."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = torch.nn.Conv1d(8, 8, 1), layernorm_ext.GatedRMSNorm(8, num_groups=2)

    def forward(self, x):
        return self.norm(self.convolution(x).transpose(1, 2)).view(-1, 4)


# Layers for convert()


class MyNorm(torch.nn.Module):
    """RMSNorm with a zero-centered weight and an eps called `small`: convert() needs build_ours() for it."""

    def __init__(self, width):
        super().__init__()
        self.width, self.normalized_shape, self.small = width, "no shape", 1e-3
        self.weight = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + self.small).sqrt() * (1 + self.weight)


def build_ours(module):
    """Return this package's layer for a MyNorm, as a user registers it."""
    return RMSNorm(module.width, module.small, zero_centered_weight=True, device="meta")


def layer_with(forward, /, **attributes):
    """Return an instance of a new subclass of torch.nn.LayerNorm(5) with this forward and further attributes."""
    layer = type("Lookalike", (torch.nn.LayerNorm,), {"forward": forward})(5)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


class LikeT5(torch.nn.Module):
    """An RMSNorm like T5's. Its output has the weight's dtype if that has 16 bits."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        x = x * torch.rsqrt(x.to(F32).square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.to(self.weight.dtype) if self.weight.dtype in (F16, BF16) else x)


class LikeLlama(LikeT5):
    """An RMSNorm like Llama's. Its output has the wider dtype of input and weight."""

    def forward(self, x):
        y = x.to(F32)
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


# Models for tracers

# Calls with input x [batch, 5, 8], residual r, weight w and bias b.
FAMILY = {member.name: member for member in MEMBERS} | {
    "layer_norm without parameters": lambda x, r, w, b: (layer_norm(x, (8,)),),
    "layer_norm without weight": lambda x, r, w, b: (layer_norm(x, (8,), None, b),),
    "rms_norm with default eps": lambda x, r, w, b: (rms_norm(x * 1e-5, (8,)),),
    "parameters per sample": lambda x, r, w, b: (layer_norm(x, (8,), x[:, :1], x[:, 1:2]),),
    "weight per position, shared bias": lambda x, r, w, b: (layer_norm(x, (8,), x[:1], b),),
    "scale per sample, shared shift": lambda x, r, w, b: (layernorm_ext.ada_layer_norm(x, (8,), x[:, 0], b),),
    "contiguous images": lambda x, r, w, b: (layer_norm_2d(x.transpose(1, 2).contiguous(), x[:, 0], b),),
}


class Model(torch.nn.Module):
    """Calls functions of FAMILY by their names, by default all, and returns a tuple of the outputs of each.

    `dtypes` are those of input, residual and parameters.
    """

    def __init__(self, *members, dtypes=(F64, F64, F64)):
        super().__init__()
        self.calls = [FAMILY[member] for member in members or FAMILY]
        self.dtype, self.residual_dtype, parameter_dtype = dtypes
        self.w, self.b = (torch.nn.Parameter(torch.randn(8).to(parameter_dtype)) for _ in range(2))

    def forward(self, x):
        residual = x.flip(1).to(self.residual_dtype)
        return tuple(call(x, residual, self.w, self.b) for call in self.calls)

    def input(self, batch):
        return torch.randn(batch, 5, 8).to(self.dtype)
