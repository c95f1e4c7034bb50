"""Random shapes, dtypes, layouts and options match float64.

By default 100 examples for each pair of dtypes, always the same. HYPOTHESIS_PROFILE=thorough draws 100,000 new ones.
"""

import math
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import F16, F64
from shapes import LAYOUTS, all_dtypes, bits, check, run

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@st.composite
def shapes(draw):
    """Return the batch and the normalized dimensions."""
    kind = draw(st.sampled_from(["small", "small", "long rows", "many rows"]))
    if kind == "long rows":
        return (draw(st.integers(1, 5)),), (draw(st.integers(1, 20000)),)
    if kind == "many rows":
        return (draw(st.integers(1, 1500)),), (draw(st.integers(1, 40)),)
    batch = draw(st.lists(st.integers(1, 9), max_size=3))
    return tuple(batch), tuple(draw(st.lists(st.integers(1, 17), min_size=1, max_size=3)))


def expanded(t):
    """Repeat the first entry of the first dimension."""
    return t[:1].expand(t.shape)


layouts = st.sampled_from([*LAYOUTS, expanded])


@settings(
    settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick")),
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # no example changes a fixture
)
@given(data=st.data())
@all_dtypes
def test_random_calls_match_float64(backend, dtypes, data):
    dtype, parameter_dtype = dtypes
    batch, normalized_shape = data.draw(shapes(), "batch and normalized dimensions")
    eps = data.draw(st.sampled_from([1e-5, 1e-6, 1e-3, 1.0]), "eps")
    scale = data.draw(st.sampled_from([1, 1e-2, 1e3]), "scale")
    offset = scale * data.draw(st.sampled_from([0, 1, 10] if dtype == F16 else [0, 1, 1e2, 1e4, 1e6]), "offset")
    few_values = data.draw(st.booleans(), "few values")
    has_weight, has_bias = data.draw(st.tuples(st.booleans(), st.booleans()), "weight and bias")
    mask = data.draw(st.lists(st.booleans(), min_size=3, max_size=3), "mask")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), "seed"))

    def draw(name, shape, dtype, transform=lambda values: values):
        values = transform(torch.randn(shape, dtype=F64, generator=generator))
        return data.draw(layouts, f"layout of {name}")(values.to(dtype).to(backend.device))

    def input_values(values):
        return ((values * 0.7).round() if few_values else values) * scale + offset

    x = draw("input", batch + normalized_shape, dtype, input_values)
    dy = draw("grad_output", batch + normalized_shape, dtype)
    w = draw("weight", normalized_shape, parameter_dtype) if has_weight else None
    b = draw("bias", normalized_shape, parameter_dtype) if has_bias else None
    before = [bits(t) for t in (x, dy)]

    results = run(backend, x, dy, w, b, eps, normalized_shape, mask)

    statistics = batch + (1,) * len(normalized_shape)
    assert [t.shape for t in results[:3]] == [x.shape, statistics, statistics]
    assert [g is not None for g in results[3:]] == mask
    assert all(torch.equal(bits(t), old) for t, old in zip((x, dy), before, strict=True)), "arguments have changed"
    rows, cols = math.prod(batch), math.prod(normalized_shape)
    sizes = [(rows, cols), (rows, 1), (rows, 1), (rows, cols), (cols,), (cols,)]
    results = [None if t is None else t.reshape(size) for t, size in zip(results, sizes, strict=True)]
    x, dy = (t.reshape(rows, cols) for t in (x, dy))
    check(results, x, dy, *(None if p is None else p.reshape(cols) for p in (w, b)), eps)
