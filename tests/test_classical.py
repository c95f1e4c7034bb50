"""Five ways in which people write this layer, each replaced by ours in one line (docs/classical.md).

Every class is written out from the description of its kind, as tutorials and papers have it.
"""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from layernorm_ext import LayerNorm, LazyLayerNorm

PAGE = (Path(__file__).parent.parent / "docs" / "classical.md").read_text()


class LastDimension(nn.Module):
    """(n_features, eps): the last dimension alone, in elementary operations."""

    def __init__(self, n_features, eps=1e-5):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(n_features)), nn.Parameter(torch.zeros(n_features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().mean(-1, keepdim=True)
        return self.gain * (x - mean) / torch.sqrt(variance + self.eps) + self.bias


class SquaresLessSquare(nn.Module):
    """(normalized_shape, eps, elementwise_affine), with the variance as E[x^2] - E[x]^2."""

    def __init__(self, normalized_shape, *, eps=1e-5, elementwise_affine=True):
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.shape, self.eps = torch.Size(shape), eps
        self.gain = nn.Parameter(torch.ones(shape)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(shape)) if elementwise_affine else None

    def forward(self, x):
        dims = tuple(range(-len(self.shape), 0))
        mean = x.mean(dims, keepdim=True)
        variance = (x**2).mean(dims, keepdim=True) - mean**2
        y = (x - mean) / torch.sqrt(variance + self.eps)
        return y if self.gain is None else self.gain * y + self.bias


class LastTwoDimensions(nn.Module):
    """(batch, features): parameters of the shape of the last two dimensions of (sequence, batch, features)."""

    def __init__(self, batch, features, eps=1e-5):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(batch, features)), nn.Parameter(torch.zeros(batch, features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean((1, 2), keepdim=True)
        variance = x.var((1, 2), unbiased=False, keepdim=True)
        return (x - mean) / torch.sqrt(variance + self.eps) * self.gamma + self.beta


class EpsBesideDeviation(nn.Module):
    """(features, eps): eps is added to the standard deviation, not to the variance."""

    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean, deviation = x.mean(-1, keepdim=True), x.std(-1, unbiased=False, keepdim=True)
        return self.gamma * (x - mean) / (deviation + self.eps) + self.beta


class TrailingDimensions(nn.Module):
    """(dim, eps): given only the number of trailing dimensions, the parameters are made at the first call."""

    def __init__(self, dim=1, eps=1e-5):
        super().__init__()
        self.dim, self.eps, self.weight, self.bias = dim, eps, None, None

    def forward(self, x):
        if self.weight is None:
            self.weight = nn.Parameter(x.new_ones(x.shape[-self.dim :]))
            self.bias = nn.Parameter(x.new_zeros(x.shape[-self.dim :]))
        dims = tuple(range(-self.dim, 0))
        centred = x - x.mean(dims, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + self.eps) * self.weight + self.bias


def randomize(module):
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def replaced(classical, ours):
    """Ours, with the parameters of the classical one, whatever it calls them."""
    ours.load_state_dict(classical.state_dict())
    return ours


TEXT, WORDS, IMAGES = (6, 20), (7, 6, 20), (4, 3, 5, 8)  # (B, C), (L, B, C), (N, C, H, W)
CASES = {
    "last dimension": [(LastDimension(x[-1], 1e-6), LayerNorm(x[-1], 1e-6), x) for x in (TEXT, WORDS, IMAGES)],
    "E[x^2] - E[x]^2": [
        (SquaresLessSquare(shape, eps=1e-3, elementwise_affine=affine), LayerNorm(shape, 1e-3, affine), x)
        for shape, x in ((20, TEXT), ([6, 20], WORDS), (torch.Size([3, 5, 8]), IMAGES))
        for affine in (True, False)
    ],
    "[batch, features]": [(LastTwoDimensions(6, 20), LayerNorm((6, 20)), WORDS)],
    "eps beside the deviation": [(EpsBesideDeviation(x[-1], 1e-6), LayerNorm(x[-1], 2e-6), x) for x in (TEXT, WORDS)],
    "trailing dimensions": [
        (TrailingDimensions(k), LazyLayerNorm(k), x) for k, x in ((1, TEXT), (2, WORDS), (3, IMAGES), (1, IMAGES))
    ],
}


@pytest.mark.parametrize("kind", CASES)
def test_one_line_replaces_it(kind):
    """Output and gradients, of float64, in which neither rounds where it can be seen."""
    for classical, ours, shape in CASES[kind]:
        classical, x = classical.double(), torch.randn(shape, dtype=torch.float64)
        if kind == "trailing dimensions":
            classical(x)
        ours = replaced(randomize(classical), ours.double())
        # Where the deviation is not 1 but s, 1e-6 beside it and 2e-6 under the root differ by 1e-6 * (1 / s - 1 / s^2)
        # of the output; s is 0.6 to 1.4, and parameters and outputs are a few times 1.
        tolerance = 1e-4 if kind == "eps beside the deviation" else 1e-11
        results = []
        for module in (classical, ours):
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            results.append([y, *torch.autograd.grad(y.sin().sum(), [leaf, *module.parameters()])])
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def error(module, x):
    """The largest error of a module's output against float64."""
    exact = torch.nn.functional.layer_norm(x.double(), x.shape[-1:], eps=module.eps)
    return (module(x).double() - exact).abs().max().item()


@pytest.mark.parametrize(("offset", "least"), [(1e3, 1e-2), (1e4, 1e-1)])
def test_where_the_difference_of_squares_breaks(offset, least):
    """In float32, E[x^2] and E[x]^2 agree in all digits but the last few once the mean is a thousand deviations."""
    torch.manual_seed(0)
    x = torch.randn(16, 1024) + offset
    wrong, ours = error(SquaresLessSquare(1024), x), error(LayerNorm(1024), x)
    assert not wrong <= least and ours <= 3e-6  # NaN where the difference is negative


def largest_difference(features):
    torch.manual_seed(0)
    x = torch.randn(4096, features, dtype=torch.float64)
    beside, below = EpsBesideDeviation(features).double(), LayerNorm(features).double()
    return (beside(x) - below(x)).abs().max().item()


def test_eps_beside_the_deviation():
    """What remains of the difference when eps is the same number in both places; the page quotes it."""
    quoted = float(re.search(r"differ by up to (\S+) at 20 features", PAGE)[1])
    assert largest_difference(20) == pytest.approx(quoted, rel=0.05)


def test_the_page_shows_every_replacement():
    for name in ("LastDimension", "SquaresLessSquare", "LastTwoDimensions", "EpsBesideDeviation", "TrailingDimensions"):
        assert f"`{name}" in PAGE
