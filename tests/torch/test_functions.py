"""The public functions match their formulas: results, derivatives, transforms and compiled calls.

test_family.py tests the operators on every backend, and test_tracing.py tracers.
"""

import contextlib
import inspect
import itertools
from copy import deepcopy

import pytest
import torch
from support.backends import assert_same_bits
from support.family import MEMBERS, family, with_gradients
from support.inputs import randn
from support.reference import BF16, F16, F32, F64, dtypes_id
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from layernorm_ext import _C, _calls, add_layer_norm, rms_norm

FLOATS = [F64, F32, F16, BF16]
# Input, residual, weight, bias: 16 bits, wider parameters, narrower ones, two parameter dtypes, float32 residuals.
MIXED = [(F16, F16, F16, F16), (BF16, BF16, BF16, BF16), (F32, F32, F64, F64), (F32, F32, F16, F16)]
MIXED += [(F64, F64, F32, BF16), (F16, F32, F16, F32), (BF16, F32, F64, F16)]
mixed_dtypes = pytest.mark.parametrize("dtypes", MIXED, ids=lambda dtypes: "-".join(map(dtypes_id, dtypes)))


def channels_first(t):
    """Return rows [N, *, C] with the memory layout of contiguous images [N, C, *]."""
    return t.movedim(-1, 1).contiguous().movedim(1, -1)


def layouts(member):
    return (torch.Tensor.contiguous, channels_first) if member.takes_images else (torch.Tensor.contiguous,)


def parameter_shapes(member, shape):
    """Return the shapes of parameters: shared, per sample, per column of pixels, per position, and per row."""
    n, *inner, c = shape
    shapes = {(c,), (n, *[1] * len(inner), c), (n, *inner[:-1], *[1][: len(inner)], c), (1, *inner, c), tuple(shape)}
    if member.takes_images:
        return {(c,), (n, *[1] * len(inner), c), (1, *[1] * len(inner), c), (n, c)}
    return shapes | {(n, c)} if "ada" in member.name else shapes


def assert_near(actual, expected, tolerance, dtypes):
    """Compare results of the given dtypes with float64, relative to the largest value or 1."""
    for a, e, dtype in zip(actual, expected, dtypes, strict=True):
        assert a.dtype == dtype and a.shape == e.shape
        torch.testing.assert_close(a.double(), e.double(), rtol=0, atol=tolerance * max(1, e.abs().max().item()))


def leaves(tensors):
    """Return tensors that require gradients, and copies of them in float64."""
    return [t.requires_grad_() for t in tensors], [t.detach().double().requires_grad_() for t in tensors]


# Results and derivatives


@family
@pytest.mark.parametrize("shape", [(6, 10), (3, 20, 10), (2, 4, 5, 10), (2, 3, 2, 4, 10)], ids=str)
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_results_match_the_formula(member, shape, dtype):
    """Output and gradient keep the memory format of the input, for every shape of the parameters."""
    for layout, parameter_shape in itertools.product(layouts(member), parameter_shapes(member, shape)):
        x, r, *grad_outputs = (layout(randn(shape, dtype)) for _ in range(4))
        w, b = (randn(parameter_shape, dtype) for _ in range(2))
        tensors, wide = leaves([x, r, torch.where(w.abs() < 0.5, 0.5, w), b])  # memory_efficient divides by the weight
        outputs, gradients = with_gradients(member, tensors, grad_outputs)
        expected = with_gradients(member.formula, wide, [g.double() for g in grad_outputs])
        # Some ten roundings; the gradients of parameters sum up to 60 rows.
        tolerance = 32 * torch.finfo(dtype).eps
        assert_near(outputs, expected[0], tolerance, [dtype] * len(outputs))
        assert_near(gradients, expected[1], tolerance, [dtype] * 4)
        assert outputs[0].stride() == gradients[0].stride() == x.stride(), parameter_shape


def loss(outputs):
    """Return a scalar to which each element contributes with another weight."""
    return sum((y.double().flatten() * torch.linspace(-1, 1, y.numel(), dtype=F64)).sum() for y in outputs)


@family
@pytest.mark.parametrize("mask", list(itertools.product([False, True], repeat=4)), ids=str)
def test_outputs_require_gradients_if_the_formula_does(member, mask):
    """A sum does not depend on the weight and the bias, and is a constant if only these require gradients."""
    x, r, w, b = randn((2, 3, 40), F64), randn((2, 3, 40), F64), randn((40,), F64).abs() + 0.5, randn((40,), F64)
    tensors, wide = leaves([x, r, w, b])
    for t, copy, wanted in zip(tensors, wide, mask, strict=True):
        t.requires_grad_(wanted)
        copy.requires_grad_(wanted)
    outputs, expected = member(*tensors), member.formula(*wide)
    assert [y.requires_grad for y in outputs] == [y.requires_grad for y in expected]
    for first in range(len(outputs)):  # of all outputs, and of the sum alone
        some = [i for i in range(first, len(outputs)) if expected[i].requires_grad]
        if some:
            options = {"materialize_grads": True, "retain_graph": True}
            gradients, expected_gradients = (
                torch.autograd.grad(loss([results[i] for i in some]), [t for t in of if t.requires_grad], **options)
                for results, of in ((outputs, tensors), (expected, wide))
            )
            # Some ten roundings of sums of at most 240 products.
            assert_near(gradients, expected_gradients, 1e-13, [F64] * sum(mask))


@family
@mixed_dtypes
def test_derivatives_with_mixed_dtypes(member, dtypes):
    """First and second derivatives, torch.func's gradient, vmap and forward mode agree with float64.

    test_autograd.py compares with finite differences. With memory_efficient, there is no second derivative, which is
    that of a product of gradients. Images are contiguous. The gradient of a float32 residual is rounded once to that of
    the input.
    """

    def derivatives(function, tensors):
        outputs = function(*tensors)
        first = torch.autograd.grad(loss(outputs), tensors, create_graph=True, materialize_grads=True)
        if "memory_efficient" in member.options:
            return outputs, first, ()
        (x, r, w, _), (dx, dr, dw, _) = tensors, first
        product = loss((dx, dr)) * dw.double().sin().sum()
        return outputs, first, torch.autograd.grad(product, (x, r, w), materialize_grads=True)

    def transforms(function, tensors):
        many = [torch.stack([t, 2 * t]) for t in tensors[:2]]
        gradient = torch.func.grad(lambda *t: loss(function(*t)), argnums=(0, 2, 3))
        gradients = torch.vmap(gradient)(*many, *(torch.stack([t, 2 * t]) for t in tensors[2:]))
        batched = torch.vmap(function, (0, 0, None, None))(*many, *tensors[2:])
        directions = tuple(t.to(a.dtype) for t, a in zip(tangents, tensors, strict=True))
        return *gradients, *batched, *torch.func.jvp(function, tuple(tensors), directions)[1]

    of_inputs = [layouts(member)[-1](randn((2, 3, 40), dtype)) for dtype in dtypes[:2]]
    parameter_shape = (2, 40) if "ada" in member.name else (40,)
    of_parameters = [(randn(parameter_shape, F64).abs() + 0.1).to(dtype) for dtype in dtypes[2:]]
    tensors, wide = leaves([*of_inputs, *of_parameters])
    tangents = [torch.randn_like(t) for t in tensors]
    # Sums of some products of size 1, and 64 roundings to the narrowest dtype: a memory-efficient backward divides the
    # rounded output by weights as small as 0.1.
    tolerance = 64 * max(torch.finfo(dtype).eps for dtype in dtypes)
    actual = outputs, first, _ = derivatives(member, tensors)
    output_dtypes = dtypes[: len(outputs)]  # the sum has the dtype of the residual
    for results, expected in zip(actual, derivatives(member.formula, wide), strict=True):
        assert_near(results, expected, tolerance, output_dtypes if results is outputs else dtypes[: len(results)])
    if "memory_efficient" in member.options:
        with pytest.raises(NotImplementedError, match="memory_efficient=True does not keep"):
            first[0].sum().backward()
    if member.adds and "gate" not in member.options:
        (x, r, *_), (dx, dr, *_) = tensors, first
        assert torch.equal(outputs[1], x + r) and torch.equal(dx, dr.to(dx.dtype))
    with torch.inference_mode():
        assert_same_bits(member(*(t.detach().clone() for t in tensors)), outputs)
    if "inplace" not in member.options:  # r.clone() has no tangent within vmap
        result_dtypes = [dtypes[0], *dtypes[2:], *output_dtypes, *output_dtypes]
        assert_near(transforms(member, tensors), transforms(member.formula, wide), tolerance, result_dtypes)


def test_a_memory_efficient_backward_has_no_derivative_by_the_bias_either():
    x, b = randn((3, 8), F32), randn(8, F32).requires_grad_()
    forward, backward = torch.ops.layernorm.forward, torch.ops.layernorm.backward
    y, _, rstd = forward(x, (8,), None, b.detach(), memory_efficient=True)
    gradient = backward(x, y, (8,), None, rstd, None, b, [True] + [False] * 5, memory_efficient=True)[0]
    with pytest.raises(NotImplementedError, match="memory_efficient=True does not keep"):
        torch.autograd.grad(gradient.sum(), b)


def test_in_place_addition_is_tracked_or_refused_by_autograd():
    """A view of the residual may change only while autograd does not record."""

    def add(x, r, **options):
        return add_layer_norm(x, r, (8,), **options)

    x, r = torch.randn(2, 8, 3, 8), torch.randn(2, 8, 3, 8)
    expected, total = add(x, r)
    for recorded, view in ((False, False), (False, True), (True, False)):
        changed = r.clone()
        residual = changed[:] if view else changed
        output, returned = add(x.clone().requires_grad_(recorded), residual, inplace=True)
        assert returned is residual and returned.requires_grad == recorded
        assert_same_bits((output, changed), (expected, total))
    with pytest.raises(RuntimeError, match="Expected residual not to be a view"):
        add(x.requires_grad_(), r.clone()[:], inplace=True)
    before = r.clone()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
        add(x, r.requires_grad_(), inplace=True)
    assert torch.equal(r, before)
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        saved = r.exp()  # the backward of exp needs its output
        kept = saved.sum()
        with mode():
            add(x, saved, inplace=True)
        assert saved._version == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()
    output, total = add(x, r.detach().clone(), inplace=True)
    add(output, total, inplace=True)  # as the next block does
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@family
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 5, 4), (2, 1, 1, 4)], ids=str)
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=dtypes_id)
def test_batched_gradients(member, shape, dtype):
    """First and second derivatives of several upstream gradients at once, as in jacobian(vectorize=True)."""
    tolerance = max(1e-12, 32 * torch.finfo(dtype).eps)  # as in test_results_match_the_formula; sums have another order
    for layout, parameter_shape in itertools.product(layouts(member), parameter_shapes(member, shape)):
        x, r = (layout(randn(shape, dtype)) for _ in range(2))
        w, b = (randn(parameter_shape, dtype).abs() + 0.5 for _ in range(2))
        tensors, _ = leaves([x, r, w, b])
        outputs = member(*tensors)
        first = torch.autograd.grad(loss(outputs), tensors, create_graph=True, allow_unused=True)
        differentiable = [g for g in first if g is not None and g.requires_grad]
        for results in (outputs, [] if "memory_efficient" in member.options else differentiable):
            if not results:
                continue
            grad_outputs = [randn((2, *y.shape), y.dtype) for y in results]
            options = {"retain_graph": True, "allow_unused": True}
            actual = torch.autograd.grad(results, tensors, grad_outputs, is_grads_batched=True, **options)
            for i in range(2):
                expected = torch.autograd.grad(results, tensors, [g[i] for g in grad_outputs], **options)
                for a, e in zip(actual, expected, strict=True):
                    if e is not None:
                        assert_near([a[i]], [e], tolerance, [e.dtype])


def test_functionalized_calls_change_the_residual():
    x, r, w = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8, requires_grad=True)

    def function(x, r):
        output, total = add_layer_norm(x, r, (8,), w, inplace=True)
        return output * 2, total * 3, r

    expected, changed = function(x, expected_r := r.clone()), r.clone()
    assert_same_bits(torch.func.functionalize(function)(x, changed), expected)
    assert_same_bits([changed], [expected_r])


# Saved tensors


def tensors_to_save(member, x, r, w, b, output, total=None):
    """Return the tensors that the wanted gradients need, apart from the statistics."""
    wants_x, wants_w, wants_b = x.requires_grad, w.requires_grad, b.requires_grad and member.has_bias
    wants_r = r.requires_grad and member.takes_two
    gates, is_first = "gate" in member.options, "gate_first" in member.options
    wants_gate = b.requires_grad if gates else wants_r and member.is_gated_norm
    efficient = "memory_efficient" in member.options
    wants_rows = wants_x or wants_r or wants_gate
    saved = [w]
    if wants_rows or wants_w:
        saved.append(output if efficient else x if total is None else total)
    if gates and (wants_x or wants_gate):  # the factor of the input
        saved += [b, *[x] * wants_gate]
    if member.is_gated_norm and (wants_rows or wants_w or (wants_b and not is_first)):
        saved.append(r)
    # xhat is computed from the output, and the gradient of a gate from the norm's output, each with the bias. Its own
    # gradient needs its dtype if the weight has another one.
    needs_bias = wants_gate and member.is_gated_norm and not is_first or efficient and (wants_rows or wants_w)
    if member.has_bias and (needs_bias or (wants_b and b.dtype != w.dtype)):
        saved.append(b)
    return saved


@family
@pytest.mark.parametrize("bias_dtype", [F32, F64], ids=str)
def test_autograd_saves_what_the_wanted_gradients_need(member, bias_dtype):
    """And one or two numbers per row, for every choice of the tensors that want gradients."""
    parameter_shape = (4, 64) if "ada" in member.name else (64,)
    shapes, dtypes = ((4, 32, 64), (4, 32, 64), parameter_shape, parameter_shape), (F32, F32, F32, bias_dtype)
    for mask in itertools.product([False, True], repeat=4):
        tensors = [torch.randn(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
        for tensor, wanted in zip(tensors, mask, strict=True):
            tensor.requires_grad_(wanted)
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, found=found: found.append(t) or t, lambda t: t):
            outputs = member(*tensors)
        saved = {t.data_ptr(): t.nbytes for t in found if t is not None and t.numel()}
        if not outputs[0].requires_grad:
            assert not saved
            continue
        for tensor in {t.data_ptr(): t for t in tensors_to_save(member, *tensors, *outputs)}.values():
            assert saved.pop(tensor.data_ptr()) == tensor.nbytes, mask
        statistics = 1 if "rms" in member.name or "memory_efficient" in member.options else 2
        assert sum(saved.values()) == 4 * statistics * 4 * 32 * member.options.get("num_groups", 1), mask


# rms_norm and torch's


@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm_matches_torch(eps):
    """For every pair of dtypes. torch rounds several times, and the default eps matters for input of size 1e-3 or 0."""
    for dtype, weight_dtype, scale in itertools.product(FLOATS, FLOATS, (1, 1e-3, 0)):
        x, w = randn((4, 40), dtype) * scale, randn(40, weight_dtype)
        actual, expected = rms_norm(x, (40,), w, eps), F.rms_norm(x, (40,), w, eps)
        unit = max(torch.finfo(t).eps for t in (dtype, F32 if weight_dtype == F64 else weight_dtype))
        atol = 4 * (torch.finfo(dtype).tiny if dtype == weight_dtype else unit)
        torch.testing.assert_close(actual, expected, rtol=4 * unit, atol=atol)


# torch.compile


def call_all(members):
    """Return a function that calls each member with four tensors of its own, and returns all outputs."""

    def call(*tensors):
        of_members = zip(members, range(0, len(tensors), 4), strict=True)
        return [y for member, i in of_members for y in member(*tensors[i : i + 4])]

    return call


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, channels_first])
def test_compiled_calls_have_the_same_bits(layout):
    """Also the gradients, in the memory format of the input, and by the same graph when the batch sizes change.

    Symbolic columns take twice as long; test_inductor_fuses_neighbours_of_every_size has them.
    """
    members = [member for member in MEMBERS if layout in layouts(member)]
    recorder = AotEagerAndRecordGraphs()
    compiled = torch.compile(call_all(members), fullgraph=True, backend=recorder)
    for n, h in ((2, 3), (4, 5)):
        tensors = []
        for member in members:
            x, r = (layout(torch.randn(n, h, 4, 8)) for _ in range(2))
            w, b = (torch.randn(n, 8) if "ada" in member.name else torch.randn(8) for _ in range(2))
            tensors += [t.requires_grad_() for t in (x, r, w, b)]
            for t in (x, r, w, b):
                torch._dynamo.mark_dynamic(t, [*range(t.dim() // 2)])
        outputs, gradients = actual = with_gradients(compiled, tensors)
        for results, expected in zip(actual, with_gradients(call_all(members), tensors), strict=True):
            assert_same_bits(results, expected, [member.name for member in members])
        assert {t.stride() for t in (*outputs, *gradients[::4])} == {tensors[0].stride()}
    assert len(recorder.fw_graphs) == 1


@pytest.mark.inductor
def test_inductor_fuses_neighbours_of_every_size():
    """Inductor may copy a residual that changes in place. Residuals are float32 and parameters float64.

    The members call all operators; options that are numbers concern only test_compiled_calls_have_the_same_bits.
    """
    by_name = {member.name: member for member in MEMBERS}
    names = ["layer_norm, memory_efficient", "add_layer_norm, inplace", "add_rms_norm, gate, inplace"]
    names += ["add_ada_layer_norm, gate", "gated_rms_norm, gate_first, num_groups, zero_centered_weight"]
    members = [by_name[name] for name in names]

    def function(*tensors):
        return [2 * y for y in call_all(members)(*tensors)]

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    tolerance = 16 * torch.finfo(BF16).eps  # Inductor rounds fewer intermediate results
    for batch in ((2, 5), (3, 7)):
        shapes = [((*batch, 8), BF16), ((*batch, 8), F32), ((8,), F64), ((8,), F64)] * len(members)
        tensors, _ = leaves([randn(*shape) for shape in shapes])
        actual, expected = (with_gradients(f, tensors) for f in (compiled, function))
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*tensors), actual[0], rtol=tolerance, atol=tolerance)


def test_the_two_norms_have_the_same_signature(monkeypatch):
    """The C++ function takes the arguments of the one in Python, which it calls for unusual ones, in the same order."""
    python = _calls.norm
    parameters = inspect.signature(python).parameters
    given = {"name": "rms_norm", "input": randn((3, 8), F32), "normalized_shape": (8,), "weight": randn(8, F32)}
    given |= {"bias": None, "eps": 1e-5}
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert [*given, *defaults] == [*parameters]
    del defaults["residual"]  # functions that do not add one leave it out, because a given None is refused
    gate = {"gate": randn((3, 8), F32)}
    residual = {"residual": randn((3, 8), F32), "input_scale": randn(8, F32), "inplace": False}
    options = ({"rms": True}, {"zero_centered_weight": True}, {"memory_efficient": True}, {"num_groups": 2})
    changes = [*options, gate, gate | {"sigmoid": True}, gate | {"gate_first": True}]
    changes += [residual, residual | {"rms": True}, residual | {"inplace": True}]
    changes += [{"images": True, "normalized_shape": ()}]
    expected = [python(**deepcopy(given | change)) for change in changes]
    monkeypatch.delattr(_calls, "norm")  # so that a call that C++ passes on raises an error
    for change, results in zip(changes, expected, strict=True):
        by_name, by_position = (deepcopy(given | defaults | change) for _ in range(2))
        assert_same_bits(tree_leaves(results), tree_leaves(_C.norm(**by_name)), change)
        if "residual" in change:
            actual = _C.norm(*(by_position[name] for name in parameters))
            assert_same_bits(tree_leaves(results), tree_leaves(actual), change)


def test_missing_arguments_of_the_norm_raise_an_error():
    with pytest.raises(TypeError, match="missing 4 required positional arguments"):
        _C.norm("layer_norm", eps=1e-5)
