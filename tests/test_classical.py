"""Six common ways to write layer normalization by hand, and the line that replaces each (docs/classical.md)."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from layernorm_ext import LayerNorm, LazyLayerNorm, layer_norm

PAGE = (Path(__file__).parent.parent / "docs" / "classical.md").read_text()


class ByHand(nn.Module):
    """Scales and shifts the result of `normalize` by parameters with the given names."""

    names = ("gamma", "beta")

    def __init__(self, *shape, eps=1e-5, elementwise_affine=True):
        super().__init__()
        self.dims, self.eps = tuple(range(-len(shape), 0)), eps
        for name, value in zip(self.names, (torch.ones(shape), torch.zeros(shape)), strict=True):
            self.register_parameter(name, nn.Parameter(value) if elementwise_affine else None)

    def forward(self, x):
        gain, bias = (getattr(self, name) for name in self.names)
        return self.normalize(x) if gain is None else gain * self.normalize(x) + bias


class LastDimension(ByHand):
    """Normalizes the last dimension."""

    names = ("gain", "bias")

    def normalize(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + self.eps)


class SquaresLessSquare(ByHand):
    """Computes the variance as E[x^2] - E[x]^2."""

    names = ("gain", "bias")

    def normalize(self, x):
        mean = x.mean(self.dims, keepdim=True)
        variance = (x**2).mean(self.dims, keepdim=True) - mean**2
        return (x - mean) / torch.sqrt(variance + self.eps)


class LastTwoDimensions(ByHand):
    """Normalizes batch and features of [sequence, batch, features] together."""

    def normalize(self, x):
        variance = x.var((1, 2), unbiased=False, keepdim=True)
        return (x - x.mean((1, 2), keepdim=True)) / torch.sqrt(variance + self.eps)


class ParametersPerPosition(LastDimension):
    """Normalizes the last dimension of [batch, features] or [*, batch, features], with parameters [batch, features]."""

    names = ("gamma", "beta")


class ParametersPerPositionReplaced(ParametersPerPosition):
    """The same layer with one line of forward."""

    def forward(self, x):
        gamma, beta = (p.view((1,) * (x.dim() - 2) + p.shape) for p in (self.gamma, self.beta))
        return layer_norm(x, x.shape[-1:], gamma, beta, self.eps)


class EpsBesideDeviation(ByHand):
    """Adds eps to the standard deviation instead of the variance."""

    def normalize(self, x):
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, unbiased=False, keepdim=True) + self.eps)


class TrailingDimensions(nn.Module):
    """Takes the number of dimensions, and makes the parameters in the first call."""

    def __init__(self, dim=1, eps=1e-5):
        super().__init__()
        self.dim, self.eps, self.weight, self.bias = dim, eps, None, None

    def forward(self, x):
        if self.weight is None:
            self.weight = nn.Parameter(x.new_ones(x.shape[-self.dim :]))
            self.bias = nn.Parameter(x.new_zeros(x.shape[-self.dim :]))
        dims = tuple(range(-self.dim, 0))
        centered = x - x.mean(dims, keepdim=True)
        return centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + self.eps) * self.weight + self.bias


TEXT, WORDS, IMAGES = (6, 20), (7, 6, 20), (4, 3, 5, 8)  # [B, C], [L, B, C], [N, C, H, W]
REPLACEMENTS = [
    *((LastDimension(x[-1], eps=1e-6), LayerNorm(x[-1], 1e-6), x) for x in (TEXT, WORDS, IMAGES)),
    *(
        (SquaresLessSquare(*shape, eps=1e-3, elementwise_affine=affine), LayerNorm(shape, 1e-3, affine), x)
        for shape, x in (((20,), TEXT), ([6, 20], WORDS), (torch.Size([3, 5, 8]), IMAGES))
        for affine in (True, False)
    ),
    (LastTwoDimensions(6, 20), LayerNorm((6, 20)), WORDS),
    *((ParametersPerPosition(6, 20), ParametersPerPositionReplaced(6, 20), x) for x in (TEXT, WORDS)),
    *((EpsBesideDeviation(x[-1], eps=1e-6), LayerNorm(x[-1], 2e-6), x) for x in (TEXT, WORDS)),
    *((TrailingDimensions(k), LazyLayerNorm(k), x) for k, x in ((1, TEXT), (2, WORDS), (3, IMAGES), (1, IMAGES))),
]


@pytest.mark.parametrize(
    ("by_hand", "replacement", "shape"), REPLACEMENTS, ids=[f"{type(r[0]).__name__}-{r[2]}" for r in REPLACEMENTS]
)
def test_replacement_has_the_same_output_and_gradients(by_hand, replacement, shape):
    """In float64. The replacement loads the state_dict with the other parameter names."""
    by_hand, replacement = by_hand.double(), replacement.double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    by_hand(x)  # makes the parameters of TrailingDimensions
    for parameter in by_hand.parameters():
        nn.init.normal_(parameter)
    replacement.load_state_dict(by_hand.state_dict())
    results = []
    for module in (replacement, by_hand):
        y = module(x)
        assert (y.grad_fn.name() == "LayerNormBackward") == (module is replacement)
        results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])])
    # A row of deviation s, here 0.6 to 1.4, is divided by s + 1e-6 or by the root of s^2 + 2e-6: the outputs differ by
    # 1e-6 * (1 / s - 1 / s^2) of some units. All others differ by roundings of 1e-16 in sums of some hundred terms.
    tolerance = 1e-4 if isinstance(by_hand, EpsBesideDeviation) else 1e-11
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("offset", "least_error"), [(1e3, 1e-2), (1e4, 1e-1)])
def test_difference_of_squares_loses_all_digits(offset, least_error):
    """In float32, E[x^2] and E[x]^2 differ only in the last digits if the mean is a thousand deviations."""
    x = torch.randn(16, 1024) + offset
    exact = nn.functional.layer_norm(x.double(), (1024,))
    by_hand, ours = ((module(x) - exact).abs().max() for module in (SquaresLessSquare(1024), LayerNorm(1024)))
    assert not by_hand <= least_error  # NaN if the difference is negative
    assert ours <= 3e-6  # 5e-7 * (1 + |y|), with outputs up to 5


def test_page_quotes_the_effect_of_eps_beside_the_deviation():
    """With the same eps in both places."""
    x = torch.randn(4096, 20, dtype=torch.float64)
    difference = (EpsBesideDeviation(20).double()(x) - LayerNorm(20).double()(x)).abs().max().item()
    quoted = float(re.search(r"differ by up to (\S+) at 20 features", PAGE)[1])
    assert difference == pytest.approx(quoted, rel=0.05)


def test_page_shows_every_replacement():
    for cls in {type(by_hand) for by_hand, _, _ in REPLACEMENTS}:
        assert f"`{cls.__name__}" in PAGE
