"""Six common ways to write layer normalization by hand, and the line that replaces each (docs/classical.md)."""

import pytest
import torch
from support.family import with_gradients
from torch import nn

from layernorm_ext import LayerNorm, LazyLayerNorm, layer_norm


def last_dimension(x, gamma, beta, eps=1e-5):
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return gamma * (x - mean) / torch.sqrt(variance + eps) + beta


def mean_square_less_squared_mean(x, gamma=1, beta=0, eps=1e-5):
    dims = tuple(range(1, x.dim()))
    mean = x.mean(dims, keepdim=True)
    variance = (x**2).mean(dims, keepdim=True) - mean**2
    return gamma * (x - mean) / torch.sqrt(variance + eps) + beta


def last_two_dimensions(x, gamma, beta, eps=1e-5):
    variance = x.var((1, 2), unbiased=False, keepdim=True)
    return gamma * (x - x.mean((1, 2), keepdim=True)) / torch.sqrt(variance + eps) + beta


def eps_beside_deviation(x, gamma=1, beta=0, eps=1e-6):
    return gamma * (x - x.mean(-1, keepdim=True)) / (x.std(-1, unbiased=False, keepdim=True) + eps) + beta


def trailing_dimensions(x, gamma, beta, eps=1e-5):
    dims = tuple(range(-gamma.dim(), 0))
    centered = x - x.mean(dims, keepdim=True)
    return gamma * centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + eps) + beta


class PerPosition(nn.Module):
    """Has its own parameters for each position. The input may have batch dimensions in front of the positions."""

    def __init__(self, shape):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))

    def forward(self, x):
        gamma, beta = (p.view((1,) * (x.dim() - p.dim()) + p.shape) for p in (self.gamma, self.beta))
        return layer_norm(x, x.shape[-1:], gamma, beta)


TEXT, WORDS, IMAGES = (6, 20), (7, 6, 20), (4, 3, 5, 8)  # [B, C], [L, B, C], [N, C, H, W]
# The layer by hand, its replacement, and the shapes of input and parameters.
REPLACEMENTS = [
    *((last_dimension, LayerNorm(x[-1]), x, x[-1:]) for x in (TEXT, IMAGES)),
    *((mean_square_less_squared_mean, LayerNorm(x[1:]), x, x[1:]) for x in (TEXT, IMAGES)),
    (last_two_dimensions, LayerNorm((6, 20)), WORDS, (6, 20)),
    *((last_dimension, PerPosition((6, 20)), x, (6, 20)) for x in (TEXT, WORDS)),
    (eps_beside_deviation, LayerNorm(20, 2e-6), TEXT, (20,)),
    *((trailing_dimensions, LazyLayerNorm(k), x, x[-k:]) for k, x in ((1, TEXT), (3, IMAGES))),
]


@pytest.mark.parametrize(("by_hand", "replacement", "shape", "parameter_shape"), REPLACEMENTS)
def test_replacement_has_the_same_output_and_gradients(by_hand, replacement, shape, parameter_shape):
    """Both layers compute in float64. The replacement loads the state_dict with the other parameter names."""
    x, *parameters = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, *[parameter_shape] * 2))
    replacement = replacement.double()
    replacement.load_state_dict(dict(zip(("gamma", "beta"), parameters, strict=True)))
    actual = with_gradients(lambda *_: [replacement(x)], [x, *replacement.parameters()])
    expected = with_gradients(lambda *_: [by_hand(x, *parameters)], [x, *parameters])
    assert actual[0][0].grad_fn.name() == "LayerNormBackward"
    # A row of deviation s, here 0.6 to 1.4, is divided by s + 1e-6 or by the root of s^2 + 2e-6: the outputs differ by
    # 1e-6 * (1 / s - 1 / s^2) of some units. All others differ by roundings of 1e-16 in sums of some hundred terms.
    tolerance = 1e-5 if by_hand is eps_beside_deviation else 1e-11
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("offset", "least_error"), [(1e3, 1e-2), (1e4, 1e-1)])
def test_a_difference_of_squares_loses_all_digits(offset, least_error):
    """In float32, E[x^2] and E[x]^2 differ only in the last digits if the mean is a thousand deviations."""
    x = torch.randn(16, 1024) + offset
    exact = nn.functional.layer_norm(x.double(), (1024,))
    by_hand, ours = ((y - exact).abs().max() for y in (mean_square_less_squared_mean(x), layer_norm(x, (1024,))))
    assert not by_hand <= least_error  # NaN if the difference is negative
    assert ours <= 3e-6  # 5e-7 * (1 + |y|), with outputs up to 5


def test_effect_of_eps_beside_the_deviation():
    """The outputs of x / (std + eps) and x / sqrt(std^2 + eps) differ as docs/classical.md states."""
    x = torch.randn(4096, 20, dtype=torch.float64)
    difference = (eps_beside_deviation(x, eps=1e-5) - layer_norm(x, (20,))).abs().max().item()
    assert difference == pytest.approx(1.7e-5, rel=0.05)
