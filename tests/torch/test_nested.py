"""Nested tensors of both layouts: each component has the bits that it has alone."""

import pytest
import torch
from support.family import MEMBERS, with_gradients

from layernorm_ext import ada_rms_norm, add_layer_norm, add_rms_norm, gated_rms_norm, layer_norm, rms_norm

LENGTHS = (2, 5, 1)
# The functions of rows. In place, autograd would refuse the components that the tests compare with, which are views.
ROWS = [member for member in MEMBERS if not member.takes_images and "inplace" not in member.options]
layouts = pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])

# Compiled code composes norms over the ragged dimension from other operations: some ten on float64 values of size 1,
# and each rounds by 1e-16.
ANOTHER_FORMULA = {"rtol": 0, "atol": 1e-14}


def nested(layout, *lengths, dtype=torch.float32):
    rows = [torch.randn(length, 8).to(dtype) for length in lengths or LENGTHS]
    return torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)


def with_ragged_dimension_inside():
    """Return a jagged tensor of shape [3, 4, ragged, 8]."""
    rows = [torch.randn(length, 4, 8, dtype=torch.float64) for length in LENGTHS]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


def assert_same_components(actual, expected):
    assert actual.is_nested
    for a, e in zip(actual.unbind(), expected, strict=True):
        assert a.dtype == e.dtype and torch.equal(a, e)


@layouts
@pytest.mark.parametrize("member", ROWS, ids=lambda member: member.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_components_have_the_same_bits(layout, member, dtype):
    """The residual is float32. Parameter gradients are sums over the components."""
    x = nested(layout, dtype=dtype)
    r = (x.detach().to(torch.float32) * 0.5 + 1).requires_grad_()
    w, b = (torch.randn(8).to(dtype).requires_grad_() for _ in range(2))
    results, (dx, dr, *gradients) = with_gradients(member, [x, r, w, b])
    components = zip(x.detach().unbind(), r.detach().unbind(), strict=True)
    parts = [with_gradients(member, [t.requires_grad_() for t in (*pair, w, b)]) for pair in components]
    assert results[0].layout == layout
    for result, expected in zip(results, zip(*(outputs for outputs, _ in parts), strict=True), strict=True):
        assert_same_components(result, expected)
    *expected, dw, db = zip(*(gradients for _, gradients in parts), strict=True)
    assert_same_components(dx, expected[0])
    assert_same_components(dr, expected[1])
    # The sums over eight rows are rounded once per component and added in another order.
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(gradients, [sum(dw), sum(db)], rtol=tolerance, atol=tolerance)


@layouts
def test_in_place_addition_returns_the_nested_residual(layout):
    x = nested(layout).detach()
    residual = x * 0.5 + 1
    expected = add_layer_norm(x, residual, (8,))
    output, total = add_layer_norm(x, residual, (8,), inplace=True)
    assert total is residual
    assert_same_components(output, expected[0].unbind())
    assert_same_components(residual, expected[1].unbind())


def test_an_empty_batch_keeps_its_dtypes():
    x = torch.nested.nested_tensor([], dtype=torch.bfloat16)
    residual = torch.nested.nested_tensor([], dtype=torch.float32)
    assert [t.dtype for t in (layer_norm(x, (8,)), *add_layer_norm(x, residual, (8,)))] == [
        x.dtype,
        x.dtype,
        residual.dtype,
    ]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_jagged_results_keep_the_lengths_that_attention_needs(compiled):
    x = torch.nested.nested_tensor_from_jagged(torch.randn(8, 4), torch.tensor([0, 2, 8]), min_seqlen=2, max_seqlen=6)
    norm = torch.compile(layer_norm, backend="eager") if compiled else layer_norm
    output = norm(x, (4,))
    assert (output._maybe_min_seqlen, output._maybe_max_seqlen) == (2, 6)


def test_residuals_with_other_offsets_are_refused():
    """Jagged tensors of the same lengths have equal shapes, although their components begin at different offsets."""
    values, lengths = torch.randn(6, 4), torch.tensor([2, 2])
    x, residual = (
        torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets), lengths)
        for offsets in ([0, 2, 6], [0, 4, 6])
    )
    with pytest.raises(RuntimeError, match=r"offsets .*\[0, 4, 6\].*\[0, 2, 6\]"):
        add_layer_norm(x, residual, (4,))


@layouts
def test_errors_name_the_argument(layout):
    x = nested(layout)
    for other in (nested(layout, 1, 2, 3), torch.randn(3, 5, 8)):
        with pytest.raises(RuntimeError, match="Expected residual to be nested as input is, with components of the sa"):
            add_layer_norm(x, other, (8,))
        with pytest.raises(RuntimeError, match="Expected gate to be nested as input is, with components of the same s"):
            gated_rms_norm(x, other, (8,))
    with pytest.raises(
        RuntimeError, match=r"Expected input_scale \(gate\) to be .* nested input, but got .* of shape \[2, 8\]"
    ):
        add_rms_norm(x, x, (8,), gate=torch.randn(2, 8))
    with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[7\], expected .*input with shape \[.*\*, 7\]"):
        layer_norm(x, (7,))
    with pytest.raises(RuntimeError, match="Expected weight to be of same shape as normalized_shape"):
        rms_norm(x, (8,), torch.ones(7))
    with pytest.raises(
        RuntimeError, match=r"Expected bias \(shift\) to be .* nested input, but got .* of shape \[2, 8\]"
    ):
        ada_rms_norm(x, (8,), torch.ones(8), torch.randn(2, 8))


# Normalization over the ragged dimension of a jagged tensor


@pytest.mark.parametrize("function", [layer_norm, rms_norm])
@pytest.mark.parametrize("over_ragged", [False, True])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_ragged_dimension_is_normalized_in_each_component(function, over_ragged, compiled):
    """The output has the ragged shape of the input."""
    x = nested(torch.jagged, dtype=torch.float64)
    tolerance = ANOTHER_FORMULA if compiled else {"rtol": 0, "atol": 0}

    def call(x):
        if not over_ragged:
            return function(x, (8,))
        return function(x, x.shape[1:] if x.is_nested else x.shape)

    y = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(x)
    torch.testing.assert_close(y.values(), torch.cat([call(c) for c in x.unbind()]), **tolerance)
    (y + x).values().sin().sum().backward()  # the addition fails unless both have the same ragged shape
    components = [component.detach().requires_grad_() for component in x.unbind()]
    sum((call(c) + c).sin().sum() for c in components).backward()
    torch.testing.assert_close(x.grad.values(), torch.cat([c.grad for c in components]), **tolerance)


@pytest.mark.parametrize(("function", "inplace"), [(add_layer_norm, True), (add_rms_norm, False)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_compiled_norm_over_an_inner_ragged_dimension_matches_eager(function, inplace, dtype):
    """With 16-bit input, the residual is float32, and the output may round to the other neighbor."""
    x = with_ragged_dimension_inside().to(dtype)
    residual_dtype = torch.promote_types(dtype, torch.float32)

    def call(x, residual):
        return function(x, residual, x.shape[2:], inplace=inplace)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    results = [f(x, x.to(residual_dtype) * 0.5) for f in (compiled, call)]
    one_eps = {"rtol": torch.finfo(torch.bfloat16).eps, "atol": 1e-6}  # the distance of the other neighbor
    tolerance = ANOTHER_FORMULA if dtype == torch.float64 else one_eps
    torch.testing.assert_close(results[0][0].values(), results[1][0].values(), **tolerance)
    assert torch.equal(results[0][1].values(), results[1][1].values()) and results[0][1].dtype == residual_dtype


def test_any_dimension_may_be_ragged():
    last = nested(torch.jagged).transpose(1, 2)
    assert_same_components(layer_norm(last, last.shape[1:]), [layer_norm(c, c.shape) for c in last.unbind()])
    assert_same_components(layer_norm(last, last.shape[2:]), [layer_norm(c, c.shape[1:]) for c in last.unbind()])
    inside = with_ragged_dimension_inside()
    assert_same_components(layer_norm(inside, (8,)), [layer_norm(c, (8,)) for c in inside.unbind()])


@pytest.mark.parametrize("inplace", [False, True])
def test_batch_without_components_has_empty_results_and_gradients(inplace):
    values = torch.randn(0, 4, requires_grad=True)
    x = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0]))
    output, total = add_layer_norm(x, x.detach().clone(), x.shape[1:], inplace=inplace)
    for result in (layer_norm(x, x.shape[1:]), output, total):
        assert result.shape == x.shape and result.dtype == x.dtype
    layer_norm(x, x.shape[1:]).values().sum().backward()
    assert values.grad.shape == values.shape


def test_normalized_shape_has_the_symbolic_size_of_the_ragged_dimension():
    """The number 2 is refused even if all components have this size. The batch cannot be normalized."""
    x = nested(torch.jagged, 2, 2)
    for tensor, shape in ((x, [2, 8]), (x.transpose(1, 2), [2]), (x, x.shape)):
        with pytest.raises(RuntimeError, match=r"expected a jagged input with shape \[B"):
            layer_norm(tensor, shape)


def test_ragged_dimension_has_neither_weight_nor_holes():
    x = nested(torch.jagged)
    with pytest.raises(RuntimeError, match="Expected weight to be of same shape as normalized_shape"):
        rms_norm(x, x.shape[1:], torch.ones(8))
    with pytest.raises(RuntimeError, match=r"Expected input_scale \(gate\) to be of same shape as normalized_shape"):
        add_rms_norm(x, x, x.shape[1:], gate=torch.ones(5, 8))
    with pytest.raises(RuntimeError, match="Expected gate to be None for normalized_shape = .*, which includes the ra"):
        gated_rms_norm(x, x, x.shape[1:])
    for gate in (None, x):
        for ragged in (x, torch.nested.nested_tensor([torch.randn(3), torch.randn(5)], layout=torch.jagged)):
            with pytest.raises(RuntimeError, match="Expected num_groups to be 1 .*, but got num_groups = 2, normal"):
                gated_rms_norm(ragged, None if gate is None else ragged, ragged.shape[1:], num_groups=2)
    offsets, lengths = torch.tensor([0, 3, 6, 9]), torch.tensor([2, 1, 3])
    holes = torch.nested.nested_tensor_from_jagged(torch.randn(9, 8), offsets, lengths)
    with pytest.raises(RuntimeError, match="expected a jagged input without holes"):
        layer_norm(holes, holes.shape[1:])
    assert_same_components(layer_norm(holes, (8,)), [layer_norm(c, (8,)) for c in holes.unbind()])
