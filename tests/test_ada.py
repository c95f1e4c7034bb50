"""Parameters per sample and per position, the adaptive norms, inputs with two row strides, and float32 residuals."""

import contextlib
import itertools
import math
import re

import numpy as np
import pytest
import torch
from reference import (
    BF16,
    DTYPES_16_BIT,
    F16,
    F32,
    F64,
    GRADIENT,
    Forward,
    assert_within,
    check_backward,
    check_forward,
    dtypes_id,
    exact,
    factor,
    output_bound,
    rounding,
    statistics_dtype,
    xhat_error_from_output,
)
from shapes import ALL, MASKS, all_dtypes, amid_nans, assert_same_bits, randn
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import layernorm_ext
from layernorm_ext import AdaLayerNorm, AdaRMSNorm, ada_layer_norm, ada_rms_norm, add_layer_norm, add_rms_norm, trace_as

VARIANTS = [
    dict(zip(("rms", "zero_centered_weight"), v, strict=True)) for v in itertools.product((False, True), repeat=2)
]
rms_or_not = pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])

# Batch sizes of the input, of the weight and of the bias. A parameter of batch sizes () has normalized_shape.
GROUPS = {
    "shared": ((3, 5), (), ()),
    "shared, all dimensions": ((3, 5), (1, 1), (1, 1)),
    "per sample": ((3, 5), (3, 1), (3, 1)),
    "per position": ((3, 5), (1, 5), (1, 5)),
    "per row": ((3, 5), (3, 5), (3, 5)),
    "rows of a matrix": ((7,), (7,), (7,)),
    "weight per sample, bias shared": ((3, 5), (3, 1), ()),
    "weight shared, bias per position": ((3, 5), (1, 1), (1, 5)),
    "bias alone": ((3, 5), None, (3, 1)),
    "outer and inner dimension": ((2, 3, 4), (2, 1, 4), (2, 1, 4)),
    "middle dimension": ((2, 3, 4), (1, 3, 1), (1, 3, 1)),
    "many rows": ((2, 70), (2, 1), (2, 1)),
}
groups = pytest.mark.parametrize("batches", GROUPS.values(), ids=GROUPS)


def arguments(batches, cols, dtypes, device="cpu", surround=lambda t: t):
    """Return input, grad_output, weight and bias."""
    x, dy = (surround(randn((*batches[0], cols), dtypes[0], device)) for _ in range(2))
    return x, dy, *(None if p is None else surround(randn((*p, cols), dtypes[1], device)) for p in batches[1:])


def run(backend, x, dy, weight, bias, mask=ALL, **options):
    """Return output, mean, rstd, grad_input, grad_weight and grad_bias."""
    shape = x.shape[-1:]
    output, mean, rstd = backend.forward(x, shape, weight, bias, **options)
    saved = output if options.get("memory_efficient") else x
    return output, mean, rstd, *backend.backward(dy, saved, shape, mean, rstd, weight, bias, mask, **options)


def as_rows(t, shape):
    """Return a tensor that broadcasts to `shape` as a matrix."""
    return None if t is None else t.expand(shape).reshape(-1, shape[-1])


def check(results, x, dy, weight, bias, context=(), xhat_error=0, **variant):
    """Check the results of `run` against float64: row by row, and the parameters' gradients group by group."""
    shape = x.shape
    output, mean, rstd, dx, dw, db = results
    assert output.shape == dx.shape == shape and rstd.shape == (*shape[:-1], 1)
    statistics = [None if t is None else t.reshape(-1, 1) for t in (mean, rstd)]
    rows = [as_rows(t, shape) for t in (x, dy, weight, bias)]
    outputs = (as_rows(output, shape), *statistics)
    xhat = check_forward(outputs, rows[0], *rows[2:], context=context, **variant).xhat
    check_backward(
        (as_rows(dx, shape), None, None), *rows[1::-1], rows[2], context=context, xhat_error=xhat_error, **variant
    )
    exact_dy = exact(rows[1])
    abs_dy = np.abs(exact_dy)
    for gradient, parameter, products, terms, errors in (
        (dw, weight, exact_dy * xhat, abs_dy * (1 + np.abs(xhat)), abs_dy * xhat_error),
        (db, bias, exact_dy, abs_dy, 0 * abs_dy),
    ):
        if parameter is None:
            continue
        assert gradient.shape == parameter.shape and gradient.dtype == parameter.dtype
        batch = parameter.shape[:-1]
        group = torch.arange(math.prod(batch)).view(batch).expand(shape[:-1]).flatten()
        sums = (torch.arange(math.prod(batch))[:, None] == group).double().numpy()  # [groups, rows]
        value, error = sums @ products, GRADIENT[x.dtype] * (sums @ terms) + sums @ errors
        bounds = error + rounding(parameter.dtype, value, error, statistics_dtype(x.dtype))
        assert_within(gradient.reshape(-1, shape[-1]), value, bounds, *context)


# Parameters with batch dimensions


@all_dtypes
@groups
def test_results_match_float64(backend, dtypes, batches):
    """The tensors are surrounded by NaN, which appears in the results if a kernel reads outside a row."""
    for cols, variant in [*itertools.product((3, 100), VARIANTS), (1025, VARIANTS[2]), (4100, VARIANTS[1])]:
        tensors = arguments(batches, cols, dtypes, backend.device, amid_nans)
        check(run(backend, *tensors, **variant), *tensors, context=(cols,), **variant)


@all_dtypes
@pytest.mark.parametrize(
    "name", ["per sample", "per row", "outer and inner dimension", "weight per sample, bias shared"]
)
def test_gradients_from_the_output_match_float64(backend, dtypes, name):
    """The bound is the one of LayerNorm's docstring, with each row's own weight and bias."""
    for cols, variant in [*itertools.product((5, 200), VARIANTS), (1100, VARIANTS[1])]:
        x, dy, w, b = arguments(GROUPS[name], cols, dtypes, backend.device)
        w = w.abs() + 0.5  # the error grows with 1 / weight
        results = run(backend, x, dy, w, b, memory_efficient=True, **variant)
        error = xhat_error_from_output(*(as_rows(t, x.shape) for t in (x, w, b)), **variant)
        mean = [None if variant["rms"] else results[1]]
        check((results[0], *mean, *results[2:]), x, dy, w, b, context=(cols,), xhat_error=error, **variant)


def test_two_parameter_dtypes_match_float64(backend):
    """Each gradient has its parameter's dtype."""
    for name in ("per sample", "outer and inner dimension"):
        x, dy, w, b = arguments(GROUPS[name], 40, (BF16, F64), backend.device)
        b = b.to(F16)
        results = run(backend, x, dy, w, b)
        assert [t.dtype for t in results[3:]] == [BF16, F64, F16]
        check(results, x, dy, w, b)


@all_dtypes
def test_other_groups_change_no_bit(backend, dtypes):
    """Neither the other groups nor their number change a bit of a group's results."""
    for cols, rows, efficient in itertools.product((40, 768, 5000), (1, 9, 70), (False, True)):
        tensors = arguments(((4, rows), (4, 1), (4, 1)), cols, dtypes, backend.device)
        together = run(backend, *tensors, memory_efficient=efficient)
        for groups in ([0], [3], [1, 3], [2, 0, 1]):
            some = run(backend, *(t[groups] for t in tensors), memory_efficient=efficient)
            # A GPU divides the rows of a single group among all multiprocessors, and so adds them in another order.
            count = 6 if backend.name == "cpu" or len(groups) > 1 else 4
            assert_same_bits(some[:count], [t[groups] for t in together[:count]], cols, rows, groups)


def test_the_number_of_threads_changes_no_bit(use_threads):
    for batches in (((8, 64), (8, 1), (8, 1)), ((64, 8), (1, 8), (1, 8)), ((500,), (500,), (500,))):
        tensors = arguments(batches, 768, (F32, F32))
        results = []
        for threads in (1, 2, 5):
            use_threads(threads)
            results.append(run(torch.ops.layernorm, *tensors))
        assert_same_bits(results[1], results[0], batches)
        assert_same_bits(results[2], results[0], batches)


@groups
def test_masks(backend, batches):
    """A gradient that is not requested is None. The others do not depend on the mask."""
    tensors = arguments(batches, 40, (BF16, F32), backend.device)
    expected = run(backend, *tensors)
    for mask in MASKS:
        actual = run(backend, *tensors, mask=mask)[3:]
        assert_same_bits(actual, [g if m else None for g, m in zip(expected[3:], mask, strict=True)], mask)


@groups
@rms_or_not
def test_derivatives(backend, batches, rms):
    """Finite differences agree in reverse and forward mode, batched, and in second order."""
    if batches[0] == (2, 70):
        batches = ((2, 3), *batches[1:])  # finite differences of many rows take seconds
    x, _, *parameters = arguments(batches, 3, (F64, F64))
    leaves = [t.to(backend.device).requires_grad_() for t in (x, *parameters) if t is not None]
    options = {"rms": rms, "zero_centered_weight": True}

    def function(x, *parameters):
        w = None if batches[1] is None else parameters[0]
        return backend.forward(x, (3,), w, parameters[-1], 1e-5, **options)[0]

    assert gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(function, leaves, check_batched_grad=True)


@groups
def test_opcheck(backend, batches):
    x, dy, w, b = (t if t is None else t.requires_grad_() for t in arguments(batches, 6, (F32, F32), backend.device))
    torch.library.opcheck(backend.forward.default, (x, (6,), w, b))
    _, mean, rstd = (t.detach() for t in backend.forward(x, (6,), w, b))
    torch.library.opcheck(backend.backward.default, (dy, x, (6,), mean, rstd, w, b, ALL))


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        ((2, 5, 8), None, "Expected weight to be of the shape of input, with each batch size equal to the input's or "
         "1, but got weight of shape [2, 5, 8], input of shape [3, 5, 8] and normalized_shape = [8]"),
        (None, (3, 5, 7), "Expected bias to be of the shape of input, with each batch size equal to the input's or "
         "1, but got bias of shape [3, 5, 7], input of shape [3, 5, 8] and normalized_shape = [8]"),
        ((5, 8), None, "Expected weight to be of same shape as normalized_shape, but got weight of shape [5, 8] and "
         "normalized_shape = [8]; or to have the dimensions of input of shape [3, 5, 8]"),
        ((3, 1, 8), (1, 5, 8), "Expected weight and bias to have the same batch sizes, but got weight of shape "
         "[3, 1, 8], bias of shape [1, 5, 8] and input of shape [3, 5, 8]"),
    ],
    ids=["batch", "columns", "dimensions", "groups"],
)  # fmt: skip
def test_operators_refuse_other_shapes(backend, weight, bias, message):
    x, w, b = (None if s is None else torch.zeros(s, device=backend.device) for s in ((3, 5, 8), weight, bias))
    statistic = torch.zeros(3, 5, 1, device=backend.device)
    for call in (
        lambda: backend.forward(x, (8,), w, b),
        lambda: backend.backward(x, x, (8,), statistic, statistic, w, b, ALL),
    ):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            call()


# ada_layer_norm and ada_rms_norm


def composition(x, normalized_shape, scale=None, shift=None, eps=1e-6, *, rms=False):
    """Return the output by torch's functions."""
    dims = len(normalized_shape)

    def insert(t):
        return t if t.dim() == dims else t.view(*t.shape[:-dims], *[1] * (x.dim() - t.dim()), *normalized_shape)

    y = F.rms_norm(x, normalized_shape, None, eps) if rms else F.layer_norm(x, normalized_shape, eps=eps)
    y = y if scale is None else y * (1 + insert(scale))
    return y if shift is None else y + insert(shift)


FUNCTIONS = {"layer": ada_layer_norm, "rms": ada_rms_norm}
functions = pytest.mark.parametrize("name", FUNCTIONS)

# Shapes of the input, of scale and of shift, and the number of normalized dimensions.
SHAPES = {
    "per sample": ((3, 5, 8), (3, 8), (3, 8), 1),
    "per sample, all dimensions": ((3, 5, 8), (3, 1, 8), (3, 1, 8), 1),
    "mixed": ((3, 5, 8), (3, 8), (3, 1, 8), 1),
    "per position": ((3, 5, 8), (1, 5, 8), (1, 5, 8), 1),
    "per row": ((3, 5, 8), (3, 5, 8), (3, 5, 8), 1),
    "shared": ((3, 5, 8), (8,), (8,), 1),
    "scale per sample, shift shared": ((3, 5, 8), (3, 8), (8,), 1),
    "scale alone": ((3, 5, 8), (3, 8), None, 1),
    "shift alone": ((3, 5, 8), None, (3, 8), 1),
    "neither": ((3, 5, 8), None, None, 1),
    "video": ((2, 3, 4, 8), (2, 3, 8), (2, 3, 8), 1),
    "frames": ((2, 3, 4, 8), (1, 3, 8), (1, 3, 8), 1),
    "two normalized dimensions": ((3, 5, 2, 4), (3, 2, 4), (3, 2, 4), 2),
    "no batch": ((8,), (8,), (8,), 1),
}
shapes = pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)


def ada_arguments(sizes, dtype=F64):
    """Return input, scale and shift, which require gradients, and normalized_shape."""
    tensors = [None if s is None else torch.randn(s).to(dtype).requires_grad_() for s in sizes[:3]]
    return tensors, sizes[0][-sizes[3] :]


def gradients(y, tensors):
    return torch.autograd.grad(y.sin().sum(), [t for t in tensors if t is not None])


@functions
@shapes
def test_ada_norm_is_the_composition(name, sizes):
    """Both add some hundred float64 numbers of size 1 in different orders."""
    (x, *parameters), shape = ada_arguments(sizes)
    y, expected = FUNCTIONS[name](x, shape, *parameters), composition(x, shape, *parameters, rms=name == "rms")
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    actual, expected = (gradients(t, (x, *parameters)) for t in (y, expected))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@functions
@pytest.mark.parametrize("dtypes", DTYPES_16_BIT, ids=dtypes_id)
def test_one_plus_scale_is_not_rounded_to_16_bits(name, dtypes):
    """The output is within half a unit in the last place of the exact value."""
    x, scale, shift = randn((4, 6, 64), dtypes[0]), randn((4, 64), dtypes[1]) * 1e-3, randn((4, 64), dtypes[1])
    y = FUNCTIONS[name](x, (64,), scale, shift)
    w, b = (as_rows(t[:, None], x.shape) for t in (scale, shift))
    forward, w = Forward(exact(as_rows(x, x.shape)), 1e-6, name == "rms"), factor(w, zero_centered_weight=True)
    bound = output_bound(dtypes[0], forward, w, exact(b))
    assert_within(as_rows(y, x.shape), forward.output(w, exact(b)), bound)


@functions
def test_autograd_saves_input_scale_and_statistics(name):
    """No other tensor of the input's size, and not the shift."""
    (x, scale, shift), _ = ada_arguments(((4, 32, 64), (4, 64), (4, 64), 1), F32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        FUNCTIONS[name](x, (64,), scale, shift)
    sizes = {t.data_ptr(): t.nbytes for t in saved if t is not None}
    assert {x.data_ptr(), scale.data_ptr()} < sizes.keys() and shift.data_ptr() not in sizes
    assert sum(sizes.values()) == x.nbytes + scale.nbytes + (1 if name == "rms" else 2) * 4 * 4 * 32


@functions
def test_transforms(name):
    """torch.func's gradient, forward mode and vmap agree with those of the composition, in float64."""
    (x, scale, shift), shape = ada_arguments(((2, 3, 5), (2, 5), (2, 5), 1))
    tangents = tuple(torch.randn_like(t) for t in (x, scale, shift))
    results = []
    for norm in (FUNCTIONS[name], lambda *t: composition(*t, rms=name == "rms")):
        call = lambda x, scale, shift, norm=norm: norm(x, shape, scale, shift)  # noqa: E731
        loss = lambda *t, call=call: call(*t).sin().sum()  # noqa: E731
        many = [torch.stack([t, 2 * t]) for t in (x, scale, shift)]
        results.append(
            [
                torch.func.grad(loss, (0, 1, 2))(x, scale, shift),
                torch.func.jvp(call, (x, scale, shift), tangents),
                torch.vmap(call)(*many),
                torch.vmap(call, (0, None, 0))(many[0], scale, many[2]),
                torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*many),
                torch.func.hessian(lambda s, loss=loss: loss(x, s, shift))(scale),
            ]
        )
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@functions
@pytest.mark.parametrize("operators", ["kernel", "aten"])
def test_compiles_to_one_graph_for_any_batch(name, operators):
    """The kernel's own results have the same bits; aten's and the sums around it round in another order."""
    torch._dynamo.reset()

    def call(x, scale, shift):
        return FUNCTIONS[name](x, x.shape[-1:], scale, shift)

    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    with trace_as(operators):
        compiled = torch.compile(call, fullgraph=True, dynamic=True)
        for batch in (3, 4, 7):
            tensors, _ = ada_arguments(((batch, 5, 8), (batch, 8), (batch, 8), 1), F32)
            actual, expected = ((y := f(*tensors), *gradients(y, tensors)) for f in (compiled, call))
            torch.testing.assert_close(actual, expected, **tolerance)


@functions
@shapes
def test_exported_programs_call_only_aten(name, sizes):
    """The results agree to some roundings of float64."""
    (x, *parameters), shape = ada_arguments(sizes)
    module = (AdaLayerNorm if name == "layer" else AdaRMSNorm)(shape)
    expected = module(x, *parameters)
    for strict in (False, True):
        program = torch.export.export(module, (x, *parameters), strict=strict)
        assert not any(getattr(node.target, "namespace", None) == "layernorm" for node in program.graph.nodes)
        torch.testing.assert_close(program.module()(x, *parameters), expected, rtol=1e-13, atol=1e-13)
    with trace_as("kernel"):
        program = torch.export.export(module, (x, *parameters))
    assert torch.equal(program.module()(x, *parameters), expected)


@functions
@pytest.mark.parametrize("dtypes", DTYPES_16_BIT, ids=dtypes_id)
def test_exported_output_is_rounded_once(name, dtypes):
    """aten's operators may round to the other neighbour, which is one eps away."""
    x, scale, shift = randn((4, 6, 64), dtypes[0]), randn((4, 64), dtypes[1]), randn((4, 64), dtypes[1])
    module = (AdaLayerNorm if name == "layer" else AdaRMSNorm)(64)
    actual, expected = torch.export.export(module, (x, scale, shift)).module()(x, scale, shift), module(x, scale, shift)
    eps = torch.finfo(dtypes[0]).eps
    torch.testing.assert_close(actual, expected, rtol=eps, atol=1e-6)
    assert (actual != expected).double().mean() < 0.02  # two roundings would differ in a tenth of the elements


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("cls", [AdaLayerNorm, AdaRMSNorm])
@shapes
def test_scripted_and_traced_modules_have_the_same_bits(cls, sizes):
    tensors, shape = ada_arguments(sizes, F32)
    module = cls(shape)
    given = [t for t in tensors if t is not None]
    for each in (torch.jit.script(module), *([torch.jit.trace(module, given)] if len(given) == 3 else [])):
        assert torch.equal(each(*tensors), module(*tensors))


@pytest.mark.parametrize(("cls", "function"), [(AdaLayerNorm, ada_layer_norm), (AdaRMSNorm, ada_rms_norm)])
def test_modules(cls, function):
    (x, scale, shift), shape = ada_arguments(SHAPES["per sample"], F32)
    module = cls(8)
    assert repr(module) == f"{cls.__name__}((8,), eps=1e-06)" and not module.state_dict()
    assert repr(cls([2, 4], eps=1e-5)) == f"{cls.__name__}((2, 4), eps=1e-05)"
    for arguments in ((x, scale, shift), (x, scale), (x, None, shift), (x,)):
        assert torch.equal(module(*arguments), function(x, shape, *arguments[1:]))
    graph = torch.fx.symbolic_trace(module)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [function]
    assert torch.equal(graph(x, scale, shift), module(x, scale, shift))
    with torch.autocast("cpu", BF16):
        assert torch.equal(module(x, scale.to(BF16), shift), module(x, scale.to(BF16).float(), shift))


@functions
def test_overrides(name):
    class Override(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return function, kwargs

    (x, scale, shift), shape = ada_arguments(SHAPES["per sample"], F32)
    for place in range(3):
        tensors = [t.detach().as_subclass(Override) if i == place else t for i, t in enumerate((x, scale, shift))]
        function, kwargs = FUNCTIONS[name](tensors[0], shape, *tensors[1:])
        assert function is FUNCTIONS[name] and kwargs["eps"] == 1e-6 and kwargs["scale"] is tensors[1]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
@functions
def test_nested_input_shares_scale_and_shift(name, layout):
    parts = [torch.randn(length, 8) for length in (2, 5)]
    x, scale, shift = torch.nested.nested_tensor(parts, layout=layout), torch.randn(8), torch.randn(8)
    y = FUNCTIONS[name](x, (8,), scale, shift)
    for actual, part in zip(y.unbind(), parts, strict=True):
        assert torch.equal(actual, FUNCTIONS[name](part, (8,), scale, shift))
    with pytest.raises(RuntimeError, match=r"Expected shift to be .* nested input, but got shift of shape \[2, 8\]"):
        FUNCTIONS[name](x, (8,), scale, torch.randn(2, 8))


WRONG = {  # scale, shift, message
    "batch": ((2, 8), None, "Expected scale of shape [*batch, 8], where batch are the input's first batch sizes or 1, "
              "but got scale of shape [2, 8] and input of shape [3, 5, 8]"),
    "position": (None, (5, 8), "Expected shift .*got shift of shape [5, 8] and input of shape [3, 5, 8]"),
    "columns": (None, (3, 7), "Expected shift .*got shift of shape [3, 7] and input of shape [3, 5, 8]"),
    "too few": ((), None, "Expected scale .*got scale of shape [] and input of shape [3, 5, 8]"),
    "too many": ((1, 3, 5, 8), None, "Expected scale .*got scale of shape [1, 3, 5, 8] and input of shape [3, 5, 8]"),
    "groups": ((3, 8), (1, 5, 8), "Expected scale and shift to have the same batch sizes, but got scale of shape [3, 8]"
               ", shift of shape [1, 5, 8] and input of shape [3, 5, 8]"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("mode", ["eager", "meta", "fake", "compile", "script"])
@pytest.mark.parametrize(("scale", "shift", "message"), WRONG.values(), ids=WRONG)
@functions
def test_errors_name_the_argument_and_both_shapes(name, scale, shift, message, mode):
    torch._dynamo.reset()
    function, context = FUNCTIONS[name], contextlib.nullcontext()
    if mode == "compile":
        function = torch.compile(function, backend="eager")
    elif mode == "script":
        function = torch.jit.script(function)
    elif mode == "fake":
        context = torch._subclasses.FakeTensorMode()
    with context:
        device = "meta" if mode == "meta" else "cpu"
        tensors = [None if s is None else torch.zeros(s, device=device) for s in ((3, 5, 8), scale, shift)]
        with pytest.raises((RuntimeError, torch.jit.Error), match=re.escape(message).replace(r"\.\*", ".*")):
            function(tensors[0], [8], *tensors[1:])


def test_errors_of_other_arguments():
    x, scale = torch.randn(3, 5, 8), torch.randn(3, 8)
    for arguments, error, message in [
        ((x, (8,), scale.int()), RuntimeError, "Expected scale of dtype .*, but got scale of dtype Int"),
        ((x, (8,), None, scale.to("meta")), RuntimeError, "Expected shift to be on the device of input"),
        ((x, (7,), scale), RuntimeError, r"Given normalized_shape=\[7\], expected input with shape \[\*, 7\]"),
        ((x, (), scale), RuntimeError, "Expected normalized_shape to be at least 1-dimensional"),
        ((x.int(), (8,), scale), NotImplementedError, "Expected input of dtype"),
    ]:
        with pytest.raises(error, match=message):
            ada_layer_norm(*arguments)


# Inputs with two row strides


def copies(function):
    """Return the copying operations that a call runs, including those inside this package's operators."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    called = {event.key for event in profile.key_averages()}
    assert any(name.startswith("layernorm") for name in called)
    return called & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy", "aten::empty_strided"}


SLICES = {
    "q of [tokens, 3, heads, d]": lambda: torch.randn(7, 3, 4, 16)[:, 0],
    "k of [batch, tokens, 3, heads, d]": lambda: torch.randn(2, 7, 3, 4, 16)[:, :, 1],
    "half of the tokens": lambda: torch.randn(2, 14, 16)[:, 7:],
    "some heads": lambda: torch.randn(7, 12, 16)[:, 2:5],
    "every second row": lambda: torch.randn(9, 16)[::2],
    "expanded": lambda: torch.randn(1, 16).expand(5, 16),
}


@rms_or_not
@pytest.mark.parametrize("make", SLICES.values(), ids=SLICES)
def test_slices_are_read_in_place(backend, make, rms):
    """Forward and backward copy nothing, and have the bits of calls on contiguous tensors."""
    x = make().to(backend.device)
    dy = make().to(backend.device)
    w, b = (torch.randn(16, device=backend.device) for _ in range(2))
    results = []
    assert not copies(lambda: results.extend(run(backend, x, dy, w, b, rms=rms)))
    assert_same_bits(results, run(backend, x.contiguous(), dy.contiguous(), w, b, rms=rms))


def test_slices_of_a_modulation_are_read_in_place():
    """A block of a diffusion transformer computes all its scales and shifts at once."""
    shift, scale, *_ = torch.randn(4, 6 * 16).chunk(6, dim=-1)
    x, scale, shift = (t.requires_grad_() for t in (torch.randn(4, 9, 16), scale.detach(), shift.detach()))
    dy = torch.randn_like(x)
    y = ada_layer_norm(x, (16,), scale, shift)
    assert not copies(lambda: ada_layer_norm(x, (16,), scale, shift))
    assert not copies(lambda: torch.autograd.grad(y, (x, scale, shift), dy, retain_graph=True))
    assert torch.equal(y, ada_layer_norm(x, (16,), scale.contiguous(), shift.contiguous()))


# float32 residuals of 16-bit inputs

ADD = {"layer": add_layer_norm, "rms": add_rms_norm}
pairs_16_bit = pytest.mark.parametrize("dtypes", DTYPES_16_BIT, ids=dtypes_id)


@pairs_16_bit
@pytest.mark.parametrize("name", ["shared", "per sample", "outer and inner dimension"])
@rms_or_not
def test_float32_residual_matches_float64(backend, dtypes, name, rms):
    """The output is rounded once, from the unrounded sum. The gradient of the sum is float32."""
    for cols in (5, 100, 1025, 4100):
        x, dy, w, b = arguments(GROUPS[name], cols, dtypes, backend.device, amid_nans)
        residual, grad_sum = (amid_nans(randn(x.shape, F32, backend.device) * 4) for _ in range(2))
        output, total, mean, rstd = backend.forward.residual(x, residual, (cols,), w, b, rms=rms)
        assert total.dtype == rstd.dtype == F32 and output.dtype == dtypes[0]
        assert torch.equal(total, x.float() + residual)
        rows = [as_rows(t, x.shape) for t in (total, dy, w, b, grad_sum)]
        forward, weight, bias = Forward(exact(rows[0]), rms=rms), exact(rows[2]), exact(rows[3])
        bound = output_bound(dtypes[0], forward, weight, bias)
        assert_within(as_rows(output, x.shape), forward.output(weight, bias), bound, cols)

        dx, dw, db = backend.backward(dy, total, (cols,), mean, rstd, w, b, ALL, grad_sum, rms=rms)
        check_backward((as_rows(dx, x.shape), None, None), *rows[1::-1], rows[2], grad_sum=rows[4], rms=rms)
        assert dw.shape == w.shape and db.shape == b.shape and dw.dtype == db.dtype == dtypes[1]
        if name == "shared":
            check_backward((None, dw, db), *rows[1::-1], w, dtypes[1], rms=rms)

        in_place = residual.clone()
        actual = backend.ops.forward_.residual(x, in_place, (cols,), w, b, rms=rms)
        assert_same_bits((actual[0], in_place, *actual[1:]), (output, total, mean, rstd))


@pairs_16_bit
@pytest.mark.parametrize("name", ADD)
def test_gradients_of_a_float32_residual(dtypes, name):
    """The residual's gradient is float32, and the input's is its rounded value. The output is off by one rounding."""
    x, residual, w = randn((6, 64), dtypes[0]), randn((6, 64), F32), randn(64, dtypes[1])
    x, residual, w = leaves = [t.requires_grad_() for t in (x, residual, w)]
    output, total = ADD[name](x, residual, (64,), w, eps=1e-5)
    assert (output.dtype, total.dtype) == (dtypes[0], F32)
    dy, dsum = torch.randn_like(output), torch.randn_like(total)
    dx, dresidual, dw = torch.autograd.grad((output, total), leaves, (dy, dsum))
    assert (dx.dtype, dresidual.dtype, dw.dtype) == (dtypes[0], F32, dtypes[1])
    assert torch.equal(dx, dresidual.to(dtypes[0]))

    wide = [t.detach().double().requires_grad_() for t in leaves]
    sum64 = wide[0] + wide[1]
    y64 = F.layer_norm(sum64, (64,), wide[2]) if name == "layer" else F.rms_norm(sum64, (64,), wide[2], 1e-5)
    expected = torch.autograd.grad((y64, sum64), wide, (dy.double(), dsum.double()))
    torch.testing.assert_close(
        total.double(), sum64, rtol=1e-6, atol=1e-6
    )  # one rounding of float32, of values below 8
    torch.testing.assert_close(output.double(), y64, rtol=torch.finfo(dtypes[0]).eps, atol=1e-5)
    # Sums of 64 products of size 1, in float32.
    torch.testing.assert_close(dresidual.double(), expected[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dw.double(), expected[2], rtol=2 * torch.finfo(dtypes[1]).eps, atol=1e-5)


@pytest.mark.parametrize("name", ADD)
def test_derivatives_of_a_float32_residual(name):
    """Second derivatives, forward mode and vmap work with two dtypes. The loss sums rounded bfloat16 numbers."""
    x, residual = randn((3, 8), BF16).requires_grad_(), randn((3, 8), F32).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, residual)]

    def call(x, residual):
        return ADD[name](x, residual, (8,), eps=1e-5)

    def second(x, residual):
        output, total = call(x, residual)
        loss = (output.double().sin() * total.double()).sum()
        first = torch.autograd.grad(loss, (x, residual), create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in first), (x, residual))

    actual, expected = second(x, residual), second(*wide)
    assert [t.dtype for t in actual] == [BF16, F32]
    for a, e in zip(actual, expected, strict=True):
        # Some roundings of 2^-8 of the output and of the first gradients, amplified by rstd, which is at most 2.
        assert (a.double() - e).abs().max() <= 16 * torch.finfo(BF16).eps * e.abs().max()
    batched = torch.vmap(call)(torch.stack([x, 2 * x]), torch.stack([residual, residual]))
    for i, scale in enumerate((1, 2)):
        # The composite may round to the other neighbour.
        torch.testing.assert_close([t[i] for t in batched], list(call(scale * x, residual)), rtol=2**-7, atol=1e-6)
    tangents = torch.func.jvp(call, (x.detach(), residual.detach()), (torch.ones_like(x), torch.zeros_like(residual)))[
        1
    ]
    assert [t.dtype for t in tangents] == [BF16, F32]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ADD)
@pytest.mark.parametrize("operators", ["kernel", "aten"])
def test_compiled_and_exported_float32_residual(name, operators, inplace):
    """The sum has the bits of an eager call. The output may round to the other neighbour, which is one eps away."""
    torch._dynamo.reset()

    class Model(nn.Module):
        def forward(self, x, residual, w):
            return ADD[name](x, residual * 2, (8,), w, inplace=inplace)

    x, residual, w = randn((4, 5, 8), BF16), randn((4, 5, 8), F32), randn(8, BF16)
    output, total = Model()(x, residual, w)
    with trace_as(operators):
        compiled = torch.compile(Model(), fullgraph=True, dynamic=True)(x, residual, w)
        exported = torch.export.export(Model(), (x, residual, w)).module()(x, residual, w)
    for actual in (compiled, exported):
        assert (actual[0].dtype, actual[1].dtype) == (BF16, F32)
        assert torch.equal(actual[1], total)
        torch.testing.assert_close(actual[0], output, rtol=torch.finfo(BF16).eps, atol=1e-6)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
@pytest.mark.parametrize("name", ADD)
def test_nested_float32_residual(name, layout):
    parts = [torch.randn(length, 8).to(BF16) for length in (2, 5)]
    x = torch.nested.nested_tensor(parts, layout=layout)
    residual = x * 0.5
    residual = residual.float() if layout == torch.strided else residual.to(F32)
    output, total = ADD[name](x, residual, (8,))
    assert (output.dtype, total.dtype) == (BF16, F32)
    for i, part in enumerate(parts):
        expected = ADD[name](part, (part * 0.5).float(), (8,))
        assert_same_bits((output.unbind()[i], total.unbind()[i]), expected)
    if layout == torch.jagged:  # over the ragged dimension
        call = lambda x, r: ADD[name](x, r, x.shape[1:])  # noqa: E731
        for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
            output, total = function(x, residual)
            for i, part in enumerate(parts):
                expected = ADD[name](part, (part * 0.5).float(), part.shape)
                assert torch.equal(total.unbind()[i], expected[1])
                # Compiled code may round to the other neighbour.
                torch.testing.assert_close(output.unbind()[i], expected[0], rtol=2**-7, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", ["AddLayerNorm", "AddRMSNorm"])
def test_modules_start_a_float32_residual(name):
    plain, norm = (getattr(layernorm_ext, name)(8, dtype=BF16, residual_in_fp32=flag) for flag in (False, True))
    x = torch.randn(3, 8).to(BF16)
    assert repr(norm) == repr(plain)[:-1] + ", residual_in_fp32=True)"
    assert plain(x)[1] is x
    for module in (norm, torch.jit.script(norm), torch.compile(norm, backend="aot_eager", fullgraph=True)):
        output, total = module(x)
        assert total.dtype == F32 and torch.equal(total, x.float()) and torch.equal(output, plain(x)[0])
        output, total = module(x, total)
        assert (output.dtype, total.dtype) == (BF16, F32) and torch.equal(total, 2 * x.float())
        wide = x.double()
        assert module(wide)[1] is wide if module is norm else module(wide)[1].dtype == F64


def test_other_residual_dtypes_are_refused(backend):
    for input, residual in ((F32, BF16), (F16, BF16), (F16, F64), (F64, F32)):
        x, r = (torch.zeros(2, 3, dtype=dtype, device=backend.device) for dtype in (input, residual))
        with pytest.raises(RuntimeError, match="Expected residual to be of the dtype of input, but got residual of"):
            backend.forward.residual(x, r, (3,))
