"""Forward and backward for random shapes, dtypes, layouts and options, against the formulas in float64.

100 examples by default, always the same; HYPOTHESIS_PROFILE=thorough runs 100,000 new ones.
"""

import math
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import DTYPES, F16, F64, check_backward, check_forward, dtypes_id
from shapes import bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@st.composite
def shapes(draw):
    """Return the batch and the normalized dimensions: small ones, or long rows, or many rows."""
    kind = draw(st.sampled_from(["small", "small", "long", "many"]))
    if kind == "long":
        return (draw(st.integers(1, 5)),), (draw(st.integers(1, 20000)),)
    if kind == "many":
        return (draw(st.integers(1, 1500)),), (draw(st.integers(1, 40)),)
    batch = draw(st.lists(st.integers(1, 9), max_size=3))
    return tuple(batch), tuple(draw(st.lists(st.integers(1, 17), min_size=1, max_size=3)))


# Each makes a tensor of the same numbers in another layout; NaN is everywhere around them.
def contiguous(t):
    return t


def transposed(t):
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def sliced(t):
    """Every second number of the last dimension."""
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype, device=t.device)
    wide[..., ::2] = t
    return wide[..., ::2]


def gapped(t):
    """Something between the entries of every dimension but the last, and before and after all."""
    wide = torch.full([n + 3 for n in t.shape], torch.nan, dtype=t.dtype, device=t.device)
    view = wide[tuple(slice(1, n + 1) for n in t.shape)]
    return view.copy_(t)


def misaligned(t):
    buffer = torch.full((t.numel() + 6,), torch.nan, dtype=t.dtype, device=t.device)
    return buffer[3:-3].view(t.shape).copy_(t)


def expanded(t):
    """The first entry of the first dimension instead of all."""
    return t[:1].expand(t.shape)


def negative(t):
    return torch._neg_view(-t)


layouts = st.sampled_from([contiguous, transposed, sliced, gapped, misaligned, expanded, negative])


@settings(
    settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick")),
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # they hold nothing that an example changes
)
@given(data=st.data())
@pytest.mark.parametrize("dtypes", DTYPES, ids=dtypes_id)
def test_everything(backend, dtypes, data):
    dtype, parameter_dtype = dtypes
    batch, normalized = data.draw(shapes(), "batch and normalized dimensions")
    eps = data.draw(st.sampled_from([1e-5, 1e-6, 1e-3, 1.0]), "eps")
    scale = data.draw(st.sampled_from([1, 1e-2, 1e3]), "scale")
    offset = scale * data.draw(st.sampled_from([0, 1, 10] if dtype == F16 else [0, 1, 1e2, 1e4, 1e6]), "offset")
    few_values = data.draw(st.booleans(), "few values")
    with_weight, with_bias = data.draw(st.tuples(st.booleans(), st.booleans()), "weight and bias")
    mask = data.draw(st.lists(st.booleans(), min_size=3, max_size=3), "mask")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), "seed"))

    def random(shape):
        return torch.randn(shape, dtype=F64, generator=generator)

    def place(tensor, dtype, name):
        return data.draw(layouts, name)(tensor.to(dtype).to(backend.device))

    numbers = random(batch + normalized)
    if few_values:
        numbers = (numbers * 0.7).round()
    x = place(numbers * scale + offset, dtype, "layout of input")
    dy = place(random(batch + normalized), dtype, "layout of grad_output")
    w = place(random(normalized), parameter_dtype, "layout of weight") if with_weight else None
    b = place(random(normalized), parameter_dtype, "layout of bias") if with_bias else None
    before = [bits(t) for t in (x, dy)]

    output, mean, rstd = backend.forward(x, normalized, w, b, eps)
    gradients = backend.backward(dy, x, normalized, mean, rstd, w, b, mask)

    assert output.shape == x.shape
    assert mean.shape == rstd.shape == batch + (1,) * len(normalized)
    assert [g is not None for g in gradients] == mask
    assert all(torch.equal(bits(t), old) for t, old in zip((x, dy), before, strict=True))
    cols = math.prod(normalized)
    x, dy = (t.reshape(-1, cols) for t in (x, dy))
    w, b = (None if p is None else p.reshape(-1) for p in (w, b))
    check_forward((output, mean, rstd), x, w, b, eps)
    check_backward(gradients, dy, x, w, parameter_dtype if with_weight or with_bias else dtype, eps)
