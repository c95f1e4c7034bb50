"""Six common ways to write layer normalization by hand, and the line that replaces each (docs/classical.md)."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from layernorm_ext import LayerNorm, LazyLayerNorm, layer_norm

PAGE = (Path(__file__).parent.parent / "docs" / "classical.md").read_text()


class ByHand(nn.Module):
    """Scales and shifts the normalized last dimensions by parameters of their shape."""

    def __init__(self, normalize, shape, eps=1e-5, names=("gamma", "beta")):
        super().__init__()
        self.normalize, self.dims, self.eps, self.names = normalize, tuple(range(-len(shape), 0)), eps, names
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        gain, bias = self.parameters()
        return gain * self.normalize(x, self.dims, self.eps) + bias


def last_dimension(x, dims, eps):
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps)


def squares_less_square(x, dims, eps):
    mean = x.mean(dims, keepdim=True)
    variance = (x**2).mean(dims, keepdim=True) - mean**2
    return (x - mean) / torch.sqrt(variance + eps)


def last_two_dimensions(x, dims, eps):
    variance = x.var((1, 2), unbiased=False, keepdim=True)
    return (x - x.mean((1, 2), keepdim=True)) / torch.sqrt(variance + eps)


def eps_beside_deviation(x, dims, eps):
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, unbiased=False, keepdim=True) + eps)


def trailing_dimensions(x, dims, eps):
    centered = x - x.mean(dims, keepdim=True)
    return centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + eps)


class PerPosition(ByHand):
    """Replaces last_dimension with parameters for each position; the input may have more dimensions than they have."""

    def forward(self, x):
        gamma, beta = (p.view((1,) * (x.dim() - p.dim()) + p.shape) for p in self.parameters())
        return layer_norm(x, x.shape[-1:], gamma, beta, self.eps)


TEXT, WORDS, IMAGES = (6, 20), (7, 6, 20), (4, 3, 5, 8)  # [B, C], [L, B, C], [N, C, H, W]
REPLACEMENTS = [
    *((ByHand(last_dimension, x[-1:], 1e-6, ("gain", "bias")), LayerNorm(x[-1], 1e-6), x) for x in (TEXT, IMAGES)),
    *((ByHand(squares_less_square, x[1:], 1e-3), LayerNorm(x[1:], 1e-3), x) for x in (TEXT, IMAGES)),
    (ByHand(last_two_dimensions, (6, 20)), LayerNorm((6, 20)), WORDS),
    *((ByHand(last_dimension, (6, 20)), PerPosition(None, (6, 20)), x) for x in (TEXT, WORDS)),
    (ByHand(eps_beside_deviation, (20,), 1e-6), LayerNorm(20, 2e-6), TEXT),
    *((ByHand(trailing_dimensions, x[-k:]), LazyLayerNorm(k), x) for k, x in ((1, TEXT), (3, IMAGES))),
]


@pytest.mark.parametrize(
    ("by_hand", "replacement", "shape"), REPLACEMENTS, ids=[f"{r[0].normalize.__name__}-{r[2]}" for r in REPLACEMENTS]
)
def test_replacement_has_the_same_output_and_gradients(by_hand, replacement, shape):
    """In float64. The replacement loads the state_dict with the other parameter names."""
    by_hand, replacement = by_hand.double(), replacement.double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    replacement.load_state_dict(by_hand.state_dict())
    results = []
    for module in (replacement, by_hand):
        y = module(x)
        assert (y.grad_fn.name() == "LayerNormBackward") == (module is replacement)
        results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])])
    # A row of deviation s, here 0.6 to 1.4, is divided by s + 1e-6 or by the root of s^2 + 2e-6: the outputs differ by
    # 1e-6 * (1 / s - 1 / s^2) of some units. All others differ by roundings of 1e-16 in sums of some hundred terms.
    tolerance = 1e-4 if by_hand.normalize is eps_beside_deviation else 1e-11
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("offset", "least_error"), [(1e3, 1e-2), (1e4, 1e-1)])
def test_difference_of_squares_loses_all_digits(offset, least_error):
    """In float32, E[x^2] and E[x]^2 differ only in the last digits if the mean is a thousand deviations."""
    x = torch.randn(16, 1024) + offset
    exact = nn.functional.layer_norm(x.double(), (1024,))
    by_hand, ours = ((y - exact).abs().max() for y in (squares_less_square(x, -1, 1e-5), layer_norm(x, (1024,))))
    assert not by_hand <= least_error  # NaN if the difference is negative
    assert ours <= 3e-6  # 5e-7 * (1 + |y|), with outputs up to 5


def test_page_quotes_the_effect_of_eps_beside_the_deviation():
    """With the same eps in both places."""
    x = torch.randn(4096, 20, dtype=torch.float64)
    difference = (eps_beside_deviation(x, -1, 1e-5) - layer_norm(x, (20,))).abs().max().item()
    quoted = float(re.search(r"differ by up to (\S+) at 20 features", PAGE)[1])
    assert difference == pytest.approx(quoted, rel=0.05)
