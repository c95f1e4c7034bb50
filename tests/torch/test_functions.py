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

from layernorm_ext import _C, _calls, add_layer_norm, gated_layer_norm, layer_norm, layer_norm_2d, rms_norm

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
    """Return all kinds of shapes that parameters may have beside input [n, *inner, c].

    They broadcast to the input. In one of them, the last inner dimension is 1.
    """
    n, *inner, c = shape
    per_sample, ones = (n, *[1] * len(inner), c), (1, *[1] * len(inner), c)
    if member.takes_images:
        return {(c,), per_sample, ones, (n, c)}
    shapes = {(c,), per_sample, (n, *inner[:-1], *[1][: len(inner)], c), (1, *inner, c), tuple(shape)}
    return shapes | {(n, c)} if "ada" in member.name else shapes


def assert_near(actual, expected, tolerance, dtypes):
    """Check the dtypes of results, and compare their values with the expected ones in float64.

    `tolerance` is relative to the largest expected value or, if all of them are less than 1, absolute.
    """
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
    """The second output, a sum, does not depend on weight and bias: it requires no gradient if only these do."""
    x, r, w, b = randn((2, 3, 40), F64), randn((2, 3, 40), F64), randn((40,), F64).abs() + 0.5, randn((40,), F64)
    tensors, wide = leaves([x, r, w, b])
    for t, copy, requires in zip(tensors, wide, mask, strict=True):
        t.requires_grad_(requires)
        copy.requires_grad_(requires)
    outputs, expected = member(*tensors), member.formula(*wide)
    assert [y.requires_grad for y in outputs] == [y.requires_grad for y in expected]
    for first in range(len(outputs)):  # the gradients of all outputs, then those of the sum alone
        some = [i for i in range(first, len(outputs)) if expected[i].requires_grad]
        if some:
            options = {"materialize_grads": True, "retain_graph": True}
            gradients, expected_gradients = (
                torch.autograd.grad(loss([results[i] for i in some]), [t for t in args if t.requires_grad], **options)
                for results, args in ((outputs, tensors), (expected, wide))
            )
            # Some ten roundings of sums of at most 240 products.
            assert_near(gradients, expected_gradients, 1e-13, [F64] * sum(mask))


@family
@mixed_dtypes
def test_derivatives_with_mixed_dtypes(member, dtypes):
    """First and second derivatives, torch.func's gradient, vmap and forward mode agree with float64.

    The second derivative is that of a product of gradients; memory_efficient norms have none. test_autograd.py compares
    with finite differences.
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

    activations = [layouts(member)[-1](randn((2, 3, 40), dtype)) for dtype in dtypes[:2]]  # images are contiguous
    parameter_shape = (2, 40) if "ada" in member.name else (40,)
    parameters = [(randn(parameter_shape, F64).abs() + 0.1).to(dtype) for dtype in dtypes[2:]]
    tensors, wide = leaves([*activations, *parameters])
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
    if member.adds_residual and "gate" not in member.options:
        (x, r, *_), (dx, dr, *_) = tensors, first
        assert torch.equal(outputs[1], x + r)
        assert torch.equal(dx, dr.to(dx.dtype))  # both are the gradient of the sum
    with torch.inference_mode():
        assert_same_bits(member(*(t.detach().clone() for t in tensors)), outputs)
    if "inplace" not in member.options:  # r.clone() has no tangent within vmap
        result_dtypes = [dtypes[0], *dtypes[2:], *output_dtypes, *output_dtypes]
        assert_near(transforms(member, tensors), transforms(member.formula, wide), tolerance, result_dtypes)


SHAPES = [(3, 70, 33), (3, 70, 33), (33,), (3, 33)]  # of input, residual, and two parameters, one per sample
WITH_MIXED_PARAMETERS = {  # named by the parameter that is per sample, except the last one
    "bias": lambda x, r, shared, own: layer_norm(x, (33,), shared, own),
    "weight": lambda x, r, shared, own: layer_norm(x, (33,), own, shared),
    "gate": lambda x, r, shared, own: add_layer_norm(x, r, (33,), shared, gate=own),
    "gate of a bias": lambda x, r, shared, own: add_layer_norm(x, r, (33,), None, shared, gate=own),
    "shared gate": lambda x, r, shared, own: add_layer_norm(x, r, (33,), None, own, gate=shared),
}


@pytest.mark.parametrize("function", WITH_MIXED_PARAMETERS.values(), ids=list(WITH_MIXED_PARAMETERS))
def test_a_gradient_has_the_same_bits_whichever_others_are_computed(function):
    """The shared parameter's gradient is summed within each sample first, because the other parameter is per sample."""
    values = [randn(shape, F32) for shape in SHAPES]

    def gradients(mask):
        tensors = [t.clone().requires_grad_(is_needed) for t, is_needed in zip(values, mask, strict=True)]
        needed = [t for t in tensors if t.requires_grad]
        results = iter(torch.autograd.grad(loss(tree_leaves(function(*tensors))), needed, materialize_grads=True))
        return [next(results) if is_needed else None for is_needed in mask]

    expected = gradients([True] * 4)
    for mask in itertools.product([False, True], repeat=4):
        if any(mask[0:1] + mask[2:]):  # some functions have no residual
            for actual, right in zip(gradients(mask), expected, strict=True):
                assert actual is None or torch.equal(actual, right)


@pytest.mark.parametrize("gate_first", [False, True])
def test_the_gradient_of_the_bias_of_a_gated_norm_has_the_same_bits_alone(gate_first):
    """A gate that multiplies the input does not change it, but kernels of gated norms sum other numbers of rows."""
    x, gate, dy = (randn((100, 100), BF16) for _ in range(3))
    dy = dy * 2.0 ** -torch.randint(13, dy.shape).to(BF16)  # float32 would add numbers of one size without rounding
    w, b = (randn(100, F32).requires_grad_() for _ in range(2))
    alone, together = (
        gated_layer_norm(x, gate, (100,), weight, b, gate_first=gate_first) for weight in (w.detach(), w)
    )
    assert_same_bits(torch.autograd.grad(alone, b, dy), torch.autograd.grad(together, b, dy))


def test_a_memory_efficient_backward_has_no_derivative_by_the_bias_either():
    x, b = randn((3, 8), F32), randn(8, F32).requires_grad_()
    forward, backward = torch.ops.layernorm.forward, torch.ops.layernorm.backward
    y, _, rstd = forward(x, (8,), None, b.detach(), memory_efficient=True)
    gradient = backward(x, y, (8,), None, rstd, None, b, [True] + [False] * 5, memory_efficient=True)[0]
    with pytest.raises(NotImplementedError, match="memory_efficient=True does not keep"):
        torch.autograd.grad(gradient.sum(), b)


def test_in_place_addition_is_tracked_or_refused_by_autograd():
    """While autograd records, the residual must be neither a view nor a leaf, nor saved by another function."""

    def add(x, r, **options):
        return add_layer_norm(x, r, (8,), **options)

    x, r = torch.randn(2, 8, 3, 8), torch.randn(2, 8, 3, 8)
    expected, total = add(x, r)
    for requires_grad, is_view in ((False, False), (False, True), (True, False)):
        changed = r.clone()
        residual = changed[:] if is_view else changed
        output, returned = add(x.clone().requires_grad_(requires_grad), residual, inplace=True)
        assert returned is residual and returned.requires_grad == requires_grad
        assert_same_bits((output, changed), (expected, total))
    with pytest.raises(RuntimeError, match="Expected residual not to be a view"):
        add(x.requires_grad_(), r.clone()[:], inplace=True)
    before = r.clone()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
        add(x, r.requires_grad_(), inplace=True)
    assert torch.equal(r, before)
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        residual = r.exp()  # the backward of exp needs its output
        loss = residual.sum()
        with mode():
            add(x, residual, inplace=True)
        assert residual._version == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
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


BATCHED = {
    "is_grads_batched": lambda y, x, dy, **options: torch.autograd.grad(y, x, dy, is_grads_batched=True, **options),
    "vmap": lambda y, x, dy, **options: torch.vmap(lambda g: torch.autograd.grad(y, x, g, **options))(dy),
}


@pytest.mark.parametrize("batched", BATCHED.values(), ids=list(BATCHED))
@pytest.mark.parametrize("function", [layer_norm, layer_norm_2d])
def test_batched_gradients_with_memory_efficient(function, batched):
    """A second derivative must be refused: it depends on rstd, which is a constant in a backward from the output."""
    x, w, b = leaves([randn((2, 8, 3), F64), randn(8, F64).abs() + 0.5, randn(8, F64)])[0]
    input = x.movedim(1, -1) if function is layer_norm else x
    shape = [(8,)] if function is layer_norm else []
    y = function(input, *shape, w, b, memory_efficient=True)
    dy = randn((4, *y.shape), F64)
    actual = batched(y, (x, w, b), dy, retain_graph=True)
    for i, g in enumerate(dy):
        expected = torch.autograd.grad(y, (x, w, b), g, retain_graph=True)
        assert_near([a[i] for a in actual], expected, 1e-13, [F64] * 3)  # sums of six products in another order
    with pytest.raises(NotImplementedError, match="memory_efficient=True does not keep"):
        batched(y, (x, w, b), dy, create_graph=True)


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
    """Return the tensors, apart from the statistics, that autograd must save for the required gradients.

    The parameters' shapes determine the order in which rows are summed. So if such a sum is needed, the factor of x is
    saved, and so is a bias, unless it has the shape and dtype of the weight.
    """
    needs_dx, needs_dw, needs_db = x.requires_grad, w.requires_grad, b.requires_grad and member.has_bias
    needs_dr = r.requires_grad and member.takes_r
    scales_input, gate_first = "gate" in member.options, "gate_first" in member.options
    needs_dgate = b.requires_grad if scales_input else needs_dr and member.is_gated_norm
    memory_efficient = "memory_efficient" in member.options
    needs_gradient_of_rows = needs_dx or needs_dr or needs_dgate
    saved = [w]
    if needs_gradient_of_rows or needs_dw:
        saved.append(output if memory_efficient else x if total is None else total)
    sums_rows = needs_dw or needs_db or (scales_input and needs_dgate)
    if scales_input and (sums_rows or needs_dx):  # b is the factor of x
        saved += [b, *[x] * needs_dgate]
    if member.is_gated_norm:
        saved.append(r)
    # Backward from the output subtracts the bias to find xhat, and a gate behind the norm multiplies the norm's output,
    # which has the bias.
    computes_with_bias = needs_dgate and member.is_gated_norm and not gate_first
    computes_with_bias |= memory_efficient and (needs_gradient_of_rows or needs_dw)
    if member.has_bias and (computes_with_bias or (sums_rows and b.dtype != w.dtype)):
        saved.append(b)
    return saved


@family
@pytest.mark.parametrize("bias_dtype", [F32, F64], ids=str)
def test_autograd_saves_only_what_the_gradients_need(member, bias_dtype):
    """Mean and rstd of each row are saved, too. The test tries every choice of the tensors that require gradients."""
    parameter_shape = (4, 64) if "ada" in member.name else (64,)
    shapes, dtypes = ((4, 32, 64), (4, 32, 64), parameter_shape, parameter_shape), (F32, F32, F32, bias_dtype)
    for mask in itertools.product([False, True], repeat=4):
        tensors = [torch.randn(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
        for tensor, requires in zip(tensors, mask, strict=True):
            tensor.requires_grad_(requires)
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
    """The test tries every pair of dtypes. The default eps is that of the dtype, and matters for input of 1e-3 or 0."""
    for dtype, weight_dtype, scale in itertools.product(FLOATS, FLOATS, (1, 1e-3, 0)):
        x, w = randn((4, 40), dtype) * scale, randn(40, weight_dtype)
        actual, expected = rms_norm(x, (40,), w, eps), F.rms_norm(x, (40,), w, eps)
        # torch rounds several times, to the dtype of input and weight, or to float32 beside a float64 weight.
        unit = max(torch.finfo(t).eps for t in (dtype, F32 if weight_dtype == F64 else weight_dtype))
        atol = 4 * (torch.finfo(dtype).tiny if dtype == weight_dtype else unit)
        torch.testing.assert_close(actual, expected, rtol=4 * unit, atol=atol)


# torch.compile


def call_all(members):
    """Return a function that calls each member with the next four of its tensors, and returns all outputs."""

    def call(*tensors):
        return [y for i, member in enumerate(members) for y in member(*tensors[4 * i : 4 * i + 4])]

    return call


@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, channels_first])
def test_compiled_calls_have_the_same_bits(layout):
    """Gradients have the same bits, too, and the memory format of the input. Other batch sizes take the same graph.

    The number of columns is constant, because a symbolic one takes twice as long. The next test has it.
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
def test_inductor_fuses_neighbors_of_every_size():
    """The residual is float32, because Inductor may copy a residual that changes in place, and round it again.

    These members call all operators but forward, which test_tracing.py gives to Inductor. The other options are only
    numbers to Inductor; the test above has them.
    """
    names = ["add_rms_norm, gate, inplace", "add_ada_layer_norm, gate"]
    names += ["gated_rms_norm, gate_first, num_groups, zero_centered_weight"]
    members = [member for member in MEMBERS if member.name in names]

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


def test_norm_in_cpp_and_in_python_have_the_same_signature(monkeypatch):
    """_C.norm takes the arguments of _calls.norm in the same order, and passes unusual ones to it."""
    python = _calls.norm
    parameters = inspect.signature(python).parameters
    given = {"name": "rms_norm", "input": randn((3, 8), F32), "normalized_shape": (8,), "weight": randn(8, F32)}
    given |= {"bias": None, "eps": 1e-5}
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert [*given, *defaults] == [*parameters]
    del defaults["residual"]  # C++ passes None on: functions that add no residual leave it out
    gate = {"gate": randn((3, 8), F32)}
    residual = {"residual": randn((3, 8), F32), "input_scale": randn(8, F32), "inplace": False}
    plain = ({"rms": True}, {"zero_centered_weight": True}, {"memory_efficient": True}, {"num_groups": 2})
    changes = [*plain, gate, gate | {"sigmoid": True}, gate | {"gate_first": True}]
    changes += [residual, residual | {"rms": True}, residual | {"inplace": True}]
    changes += [{"images": True, "normalized_shape": ()}]
    options = {a.name for a in torch.ops.layernorm.forward.fused._schema.arguments if a.kwarg_only}
    assert options <= {name for change in changes for name in change}
    expected = [python(**deepcopy(given | change)) for change in changes]
    monkeypatch.delattr(_calls, "norm")  # so that _C.norm must take these calls itself
    for change, results in zip(changes, expected, strict=True):
        by_name, by_position = (deepcopy(given | defaults | change) for _ in range(2))
        assert_same_bits(tree_leaves(results), tree_leaves(_C.norm(**by_name)), change)
        if "residual" in change:
            actual = _C.norm(*(by_position[name] for name in parameters))
            assert_same_bits(tree_leaves(results), tree_leaves(actual), change)


def test_missing_arguments_of_the_norm_raise_an_error():
    with pytest.raises(TypeError, match="missing 4 required positional arguments"):
        _C.norm("layer_norm", eps=1e-5)
