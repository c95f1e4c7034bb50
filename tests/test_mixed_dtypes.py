"""Input, weight and bias of any three floating dtypes: pairs without a kernel, and parameters of two dtypes."""

import itertools

import pytest
import torch
from reference import BF16, DTYPES, F16, F32, F64, NAMES, check_backward, check_forward, dtype_id
from shapes import bits, randn

import layernorm_ext

ALL = [True, True, True]
FLOATS = [F64, F32, F16, BF16]
# Input, weight, bias: every triple for which there is no kernel.
TRIPLES = [(x, w, b) for x, w, b in itertools.product(FLOATS, repeat=3) if w != b or (x, w) not in DTYPES]
triples = pytest.mark.parametrize("dtypes", TRIPLES, ids=lambda dtypes: "-".join(map(NAMES.get, dtypes)))
# One triple of each kind for the tests that take long: wider parameters, narrower ones, and two dtypes.
SOME = [(F32, F64, F64), (F32, F16, F16), (F64, F32, BF16), (F16, F16, F32), (BF16, F64, F16)]
some_triples = pytest.mark.parametrize("dtypes", SOME, ids=lambda dtypes: "-".join(map(NAMES.get, dtypes)))


def accumulate_dtype(dtype):
    return F64 if dtype == F64 else F32


def arguments(dtypes, device, rows=5, cols=40):
    """Return input, grad_output, weight and bias."""
    x, dy = (randn((rows, cols), dtypes[0], device) for _ in range(2))
    return x, dy, randn(cols, dtypes[1], device), randn(cols, dtypes[2], device)


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype and torch.equal(bits(actual), bits(expected))


@triples
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("centred", [False, True], ids=["", "centred"])
def test_numbers(backend, dtypes, rms, centred):
    """Output and gradients are within the bounds of the pairs that have kernels, each in its own dtype.

    Rounding a float64 parameter to float32 adds 2^-24 of a term; the bounds are 8 such roundings and more, of which
    random rows reach half. The results are bit by bit those of parameters converted beforehand.
    """
    x, dy, w, b = arguments(dtypes, backend.device)
    variant = {"rms": rms, "zero_centered_weight": centred}
    output, _, mean, rstd = backend.ops.norm_forward(x, None, (40,), w, b, **variant)
    check_forward((output, mean, rstd), x, w, b, **variant)
    dx, dw, db = backend.ops.norm_backward(dy, None, x, (40,), mean, rstd, w, b, ALL, **variant)
    check_backward((dx, dw, None), dy, x, w, dtypes[1], **variant)
    check_backward((None, None, db), dy, x, w, dtypes[2], **variant)

    converted = [parameter.to(accumulate_dtype(x.dtype)) for parameter in (w, b)]
    assert_same(output, backend.ops.norm_forward(x, None, (40,), *converted, **variant)[0])
    expected = backend.ops.norm_backward(dy, None, x, (40,), mean, rstd, *converted, ALL, **variant)
    for actual, wanted, dtype in zip((dx, dw, db), expected, dtypes, strict=True):
        assert_same(actual, wanted.to(dtype))


@pytest.mark.parametrize("x_dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_one_parameter(backend, x_dtype, dtype):
    """An absent parameter's gradient, if it is asked for, has the dtype of the other one."""
    for rows in (5, 0):
        x, dy, p, _ = arguments((x_dtype, dtype, dtype), backend.device, rows)
        for w, b in ((p, None), (None, p)):
            output, mean, rstd = backend.forward(x, (40,), w, b)
            gradients = backend.backward(dy, x, (40,), mean, rstd, w, b, ALL)
            assert output.dtype == x_dtype and [g.dtype for g in gradients] == [x_dtype, dtype, dtype]
            if rows:
                check_forward((output, mean, rstd), x, w, b)
                check_backward(gradients, dy, x, w, dtype)
            else:
                assert not gradients[1].any() and not gradients[2].any()


@some_triples
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
def test_images(backend, dtypes, memory_format):
    """As rows: the bounds are those of a row of channels, whose order of summation may differ."""
    x, dy = (randn((2, 6, 3, 4), dtypes[0], backend.device).to(memory_format=memory_format) for _ in range(2))
    w, b = (randn(6, dtype, backend.device) for dtype in dtypes[1:])
    output, mean, rstd = backend.ops.channels_first_forward(x, w, b, 1e-5)
    dx, dw, db = backend.ops.channels_first_backward(dy, x, mean, rstd, w, b, ALL)

    def rows(t):
        return t.movedim(1, -1).reshape(-1, t.shape[1])

    check_forward((rows(output), mean.reshape(-1, 1), rstd.reshape(-1, 1)), rows(x), w, b)
    check_backward((rows(dx), dw, None), rows(dy), rows(x), w, dtypes[1])
    check_backward((None, None, db), rows(dy), rows(x), w, dtypes[2])


@some_triples
def test_residual(backend, dtypes):
    """The parameters may be of any dtypes; the sum has the input's."""
    x, residual, w, b = arguments(dtypes, backend.device)
    output, total, *_ = backend.ops.norm_forward(x, residual, (40,), w, b)
    assert_same(total, x + residual)
    assert_same(output, backend.forward(total, (40,), w, b)[0])
    changed = residual.clone()
    assert_same(backend.ops.norm_forward_(x, changed, (40,), w, b)[0], output)
    assert_same(changed, total)


def test_rms_norm_has_the_dtype_of_torchs():
    """torch's accepts every pair; it rounds the output twice for 16-bit input."""
    for x_dtype, w_dtype in itertools.product(FLOATS, repeat=2):
        x, _, w, _ = arguments((x_dtype, w_dtype, w_dtype), "cpu")
        actual = layernorm_ext.rms_norm(x, (40,), w, 1e-6)
        expected = torch.nn.functional.rms_norm(x, (40,), w, 1e-6)
        eps = max(torch.finfo(dtype).eps for dtype in (x_dtype, F32 if w_dtype == F64 else w_dtype))
        torch.testing.assert_close(actual, expected, rtol=4 * eps, atol=4 * eps)


# ---- what calls the operators ---------------------------------------------------------------------------------------


def members(dtypes):
    """Return functions of (x, w, b), the same in terms of torch's operations, and an input of each."""
    images = randn((2, 40, 2, 3), dtypes[0])
    norm = torch.nn.functional.layer_norm
    x = arguments(dtypes, "cpu")[0]
    return {
        "layer_norm": (
            lambda x, w, b: layernorm_ext.layer_norm(x, (40,), w, b),
            lambda x, w, b: norm(x, (40,), w, b),
            x,
        ),
        "memory_efficient": (
            lambda x, w, b: layernorm_ext.layer_norm(x, (40,), w, b, memory_efficient=True),
            lambda x, w, b: norm(x, (40,), w, b),
            x,
        ),
        "rms_norm": (
            lambda x, w, b: layernorm_ext.rms_norm(x, (40,), w, 1e-5) + b.sum() * 0,
            lambda x, w, b: torch.nn.functional.rms_norm(x, (40,), w, 1e-5) + b.sum() * 0,
            x,
        ),
        "add_layer_norm": (
            lambda x, w, b: layernorm_ext.add_layer_norm(x, 2 * x, (40,), w, b)[0],
            lambda x, w, b: norm(x + 2 * x, (40,), w, b),
            x,
        ),
        "layer_norm_2d": (
            lambda x, w, b: layernorm_ext.layer_norm_2d(x, w, b, 1e-5),
            lambda x, w, b: norm(x.movedim(1, -1), (40,), w, b).movedim(-1, 1),
            images,
        ),
    }


MEMBERS = list(members(SOME[0]))
all_members = pytest.mark.parametrize("member", MEMBERS)


def tolerance(dtypes):
    """Return 64 roundings to the narrowest of the dtypes.

    The gradients are sums of 5 to 12 products of size 1. A memory-efficient backward divides the rounded output by
    weights that are as small as 2^-4.
    """
    return 64 * max(torch.finfo(dtype).eps for dtype in dtypes)


def leaves(x, dtypes):
    """Return x and two parameters, that are away from zero, as leaves; and the same in float64."""
    parameters = [(randn(40, F64).abs() + 0.1).to(dtype) for dtype in dtypes[1:]]
    tensors = [t.detach().clone().requires_grad_() for t in (x, *parameters)]
    return tensors, [t.detach().double().requires_grad_() for t in tensors]


def first_derivatives(function, tensors):
    """Return the output and the gradients of a loss in which each number counts differently."""
    y = function(*tensors)
    loss = (y.double().flatten() * torch.linspace(-1, 1, y.numel(), dtype=F64)).sum()
    return y, *torch.autograd.grad(loss, tensors)


def assert_near(actual, expected, dtypes):
    """Compare to `tolerance` times the largest number, and check the dtypes."""
    for a, e, dtype in zip(actual, expected, dtypes, strict=True):
        assert a.dtype == dtype
        atol = tolerance(dtypes) * max(1, e.abs().max().item())
        torch.testing.assert_close(a.double(), e, rtol=0, atol=atol)


@some_triples
@all_members
def test_autograd(dtypes, member):
    ours, torchs, x = members(dtypes)[member]
    tensors, exact = leaves(x, dtypes)
    assert_near(first_derivatives(ours, tensors), first_derivatives(torchs, exact), (dtypes[0], *dtypes))


@some_triples
@pytest.mark.parametrize("member", ["layer_norm", "rms_norm", "layer_norm_2d"])
def test_second_derivatives(dtypes, member):
    """A product of gradients is differentiated again."""
    ours, torchs, x = members(dtypes)[member]
    tensors, exact = leaves(x, dtypes)
    results = []
    for function, arguments in ((ours, tensors), (torchs, exact)):
        y = function(*arguments)
        weights = torch.linspace(-1, 1, y.numel(), dtype=F64)
        dx, dw, _ = torch.autograd.grad((y.double().flatten() * weights).sum(), arguments, create_graph=True)
        second = (dx.double().flatten() * weights).sum() * dw.double().sin().sum()
        results.append(torch.autograd.grad(second, arguments[:2]))
    assert_near(*results, dtypes[:2])


@some_triples
@all_members
def test_func(dtypes, member):
    """torch.func's gradient and vmap, and forward mode."""
    ours, torchs, x = members(dtypes)[member]
    tensors, exact = leaves(x, dtypes)
    weights = torch.linspace(-1, 1, x.numel(), dtype=F64)
    results = [
        torch.func.grad(lambda *a, f=f: (f(*a).double().flatten() * weights).sum(), argnums=(0, 1, 2))(*a)
        for f, a in ((ours, tensors), (torchs, exact))
    ]
    assert_near(*results, dtypes)
    batched, wanted = (
        torch.vmap(f, in_dims=(0, None, None))(torch.stack([a[0], 2 * a[0]]), *a[1:])
        for f, a in ((ours, tensors), (torchs, exact))
    )
    assert_near([batched], [wanted], dtypes[:1])
    tangents = [torch.randn_like(t, dtype=F64) for t in exact]
    tangents = [t.to(dtype).double() for t, dtype in zip(tangents, dtypes, strict=True)]
    _, actual = torch.func.jvp(ours, tuple(tensors), tuple(t.to(d) for t, d in zip(tangents, dtypes, strict=True)))
    _, expected = torch.func.jvp(torchs, tuple(exact), tuple(tangents))
    assert_near([actual], [expected], dtypes[:1])


@pytest.mark.parametrize(
    ("compiler", "dtypes"),
    [*(("aot_eager", dtypes) for dtypes in SOME), ("inductor", SOME[-1])],
    ids=lambda v: v if isinstance(v, str) else "-".join(map(NAMES.get, v)),
)
@all_members
def test_compile(compiler, dtypes, member):
    """Without a break of the graph; the operators see the parameters as they are, as in eager mode."""
    torch._dynamo.reset()
    ours, _, x = members(dtypes)[member]
    tensors, _ = leaves(x, dtypes)
    compiled = torch.compile(ours, fullgraph=True, backend=compiler)
    expected = first_derivatives(ours, tensors)
    actual = first_derivatives(compiled, tensors)
    # The same operators, with other operations around them fused by Inductor.
    assert_near(actual, [e.double() for e in expected], (dtypes[0], *dtypes))


@some_triples
@all_members
def test_inference(dtypes, member):
    ours, _, x = members(dtypes)[member]
    tensors, _ = leaves(x, dtypes)
    expected = ours(*tensors)
    with torch.inference_mode():
        assert_same(ours(*(t.detach().clone() for t in tensors)), expected)
        assert torch.compile(ours, fullgraph=True, backend="aot_eager")(*tensors).dtype == dtypes[0]


@some_triples
def test_operators_are_what_torch_expects(backend, dtypes):
    x, dy, w, b = (t.requires_grad_() for t in arguments(dtypes, backend.device, cols=6))
    mean, rstd = (torch.rand(5, 1, dtype=accumulate_dtype(x.dtype), device=x.device) for _ in range(2))
    torch.library.opcheck(backend.ops.forward.default, (x, (6,), w, b))
    torch.library.opcheck(backend.ops.backward.default, (dy, x, (6,), mean, rstd, w, b, ALL))
    torch.library.opcheck(backend.ops.norm_forward.default, (x, dy, (6,), w, b), {"rms": True})
    images, grads = (t.detach().t().reshape(1, 6, 5, 1).requires_grad_() for t in (x, dy))
    mean, rstd = (t.reshape(1, 1, 5, 1) for t in (mean, rstd))
    torch.library.opcheck(backend.ops.channels_first_forward.default, (images, w, b))
    torch.library.opcheck(backend.ops.channels_first_backward.default, (grads, images, mean, rstd, w, b, ALL))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "AddLayerNorm", "AddRMSNorm", "LayerNorm2d"])
def test_modules(name):
    """16-bit modules take float32 input, and return it; a step of training leaves the parameters' dtype."""
    norm = getattr(layernorm_ext, name)(8, dtype=F16)
    x = torch.randn(2, 8, 3, 8)
    y = norm(x, x)[0] if name.startswith("Add") else norm(x)
    y.square().mean().backward()
    assert y.dtype == F32 and all(p.grad.dtype == p.dtype == F16 for p in norm.parameters())


def test_bias_is_saved_only_for_its_dtype():
    """Where the weight has the bias's dtype, backward needs nothing of the bias."""
    for dtype, kept in ((F32, False), (F64, True)):
        saved = []
        b = torch.randn(8, dtype=dtype, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            layernorm_ext.layer_norm(torch.randn(3, 8), (8,), torch.ones(8), b)
        assert any(t.data_ptr() == b.data_ptr() for t in saved if t is not None) == kept
