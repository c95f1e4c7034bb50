"""The variants of LayerNorm: RMSNorm, fused residual addition, zero-centred weights and memory-efficient backward."""

import itertools
import re

import pytest
import torch
from reference import (
    BF16,
    F32,
    F64,
    Forward,
    assert_within,
    check_backward,
    check_forward,
    dtypes_id,
    exact,
    output_bound,
    statistics_dtype,
    xhat_error_from_output,
)
from shapes import (
    ALL,
    MASKS,
    all_dtypes,
    amid_nans,
    assert_same_bits,
    data_dtypes,
    forward,
    huge,
    huge_rows,
    randn,
    transposed,
)
from torch.autograd import gradcheck, gradgradcheck

import layernorm_ext

VARIANTS = {
    "layer": {"rms": False, "zero_centered_weight": False},
    "layer-centred": {"rms": False, "zero_centered_weight": True},
    "rms": {"rms": True, "zero_centered_weight": False},
    "rms-centred": {"rms": True, "zero_centered_weight": True},
}
variants = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
rms_or_not = pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])

# Numbers of columns on both sides of the limits between kernels: packs, several rows at a time, tiles, chunks, parts.
COLUMNS = [1, 3, 31, 32, 33, 64, 100, 257, 768, 1023, 1025, 2048, 2049, 4100, 9000, 20001]


def run(backend, x, residual, dy, grad_sum, w, b, mask=ALL, **options):
    """Return output, sum, mean, rstd, grad_input, grad_weight and grad_bias."""
    output, total, mean, rstd = forward(backend, x, residual, w, b, **options)
    saved = output if options.get("memory_efficient") else x if residual is None else total
    gradients = backend.backward(dy, saved, x.shape[-1:], mean, rstd, w, b, mask, grad_sum, **options)
    return output, total, mean, rstd, *gradients


# Results


@all_dtypes
@variants
def test_results_match_float64(backend, dtypes, variant):
    """With a residual, all results except grad_input have the bits of the call on the sum.

    The tensors are surrounded by NaN, which appears in the results if a kernel reads outside a row.
    """
    for cols in COLUMNS:
        shape = (6 if cols < 2000 else 1, cols)
        x, residual, dy, grad_sum = (amid_nans(randn(shape, dtypes[0], backend.device)) for _ in range(4))
        w, b = (amid_nans(randn(cols, dtypes[1], backend.device)) for _ in range(2))
        total = amid_nans(x + residual)
        plain = run(backend, total, None, dy, None, w, b, **variant)
        assert plain[1] is None
        check_forward((plain[0], *plain[2:4]), total, w, b, context=(cols,), **variant)
        check_backward(plain[4:], dy, total, w, context=(cols,), **variant)
        fused = run(backend, x, residual, dy, grad_sum, w, b, **variant)
        assert fused[1].is_contiguous()
        assert_same_bits(fused[:4], (plain[0], total, *plain[2:4]), cols)
        assert_same_bits(fused[5:], plain[5:], cols)
        check_backward(fused[4:], dy, total, w, context=(cols,), grad_sum=grad_sum, **variant)


@data_dtypes
@variants
def test_absent_parameters_and_masks(backend, dtype, variant):
    """A gradient that is not requested is None. The others do not depend on the mask."""
    for cols in (40, 1100, 5000):
        x, residual, dy, grad_sum, w, b = (randn((3, cols), dtype, backend.device) for _ in range(6))
        for weight, bias in ((w[0], b[0]), (w[0], None), (None, b[0]), (None, None)):
            output, total, mean, rstd, *gradients = run(backend, x, residual, dy, grad_sum, weight, bias, **variant)
            check_forward((output, mean, rstd), total, weight, bias, context=(cols,), **variant)
            check_backward(gradients, dy, total, weight, context=(cols,), grad_sum=grad_sum, **variant)
            arguments = (dy, total, (cols,), mean, rstd, weight, bias)
            for mask in MASKS:
                actual = backend.backward(*arguments, mask, grad_sum, **variant)
                assert_same_bits(actual, [g if m else None for g, m in zip(gradients, mask, strict=True)], cols, mask)


@data_dtypes
@rms_or_not
def test_in_place_addition_replaces_the_residual_by_the_sum(backend, dtype, rms):
    """The layout of the residual changes no bit, nor do rows that are read twice because they overflow."""
    for cols in (40, 1100, 5000):
        x, residual, w, b = (randn((4, cols), dtype, backend.device) for _ in range(4))
        if dtype == F32:
            x[1] *= 1e37  # squares overflow
        expected = backend.ops.forward.residual(x, residual, (cols,), w[0], b[0], rms=rms)
        for r in (residual.clone(), amid_nans(residual), transposed(residual)):
            version = r._version
            output, mean, rstd = backend.ops.forward_(x, r, (cols,), w[0], b[0], rms=rms)
            assert r._version > version
            assert_same_bits((output, r, mean, rstd), expected, cols)


@huge
def test_rms_norm_of_huge_numbers_matches_float64(backend, dtype, magnitude):
    """The squares overflow, the sum with a residual does not."""
    for cols in (7, 300, 5000):
        x = huge_rows(dtype, magnitude, cols, backend.device)
        dy, w = randn(x.shape, dtype, backend.device), randn(cols, dtype, backend.device)
        output, _, mean, rstd, *gradients = run(backend, x, torch.zeros_like(x), dy, None, w, None, rms=True)
        check_forward((output, mean, rstd), x, w, rms=True)
        check_backward(gradients, dy, x, w, rms=True)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)], ids=str)
def test_empty_tensors(backend, shape):
    x, w = (torch.empty(s, device=backend.device) for s in (shape, shape[1:]))
    output, total, mean, rstd, *gradients = run(backend, x, x.clone(), x, x, w, w, rms=True)
    assert output.shape == total.shape == shape and mean is None and rstd.shape == (shape[0], 1)
    assert [g.shape for g in gradients] == [shape, shape[1:], shape[1:]]
    assert not any(g.any() for g in gradients)


def test_a_row_has_the_same_bits_alone(backend):
    for cols in (40, 768, 5000):
        *rows, w = (randn((9, cols), BF16, backend.device) for _ in range(5))
        options = {"w": w[0], "b": None, "mask": [True, False, False], "rms": True}
        together = run(backend, *rows, **options)
        for r in range(9):
            alone = run(backend, *(t[r : r + 1] for t in rows), **options)
            assert_same_bits(alone, [None if t is None else t[r : r + 1] for t in together], cols, r)


@data_dtypes
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm_function_matches_torchs(dtype, eps):
    """The default eps is torch's; it matters for input of size 1e-3 or 0."""
    for scale in (1, 1e-3, 0):
        x, w = randn((4, 40), dtype) * scale, randn(40, dtype)
        actual = layernorm_ext.rms_norm(x, (40,), w, eps)
        expected = torch.nn.functional.rms_norm(x, (40,), w, eps)
        # torch rounds several times.
        torch.testing.assert_close(actual, expected, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny * 4)
        expected = Forward(exact(x), eps or torch.finfo(statistics_dtype(dtype)).eps, rms=True)
        assert_within(actual, expected.output(exact(w), None), output_bound(dtype, expected, exact(w), None))


# Backward from the output


@all_dtypes
@variants
def test_gradients_from_the_output_match_float64(backend, dtypes, variant):
    """The bound is the documented one: the error of xhat that rounding of the output causes."""
    centre = int(variant["zero_centered_weight"])
    for cols, smallest in itertools.product((5, 200, 1100, 5000), (0.5, 2.0**-16)):
        x, dy = (randn((3, cols), dtypes[0], backend.device, offset=1) for _ in range(2))
        w, b = (randn(cols, dtypes[1], backend.device) for _ in range(2))
        w = torch.where(w.abs() < smallest, smallest, w) - centre
        if centre:
            w = w.clamp(-0.5)  # near -1, the sum 1 + w would lose its digits
        for weight, bias in ((w, b), (w, None), (None, b)):
            gradients = run(backend, x, None, dy, None, weight, bias, memory_efficient=True, **variant)[4:]
            error = xhat_error_from_output(x, weight, bias, **variant)
            dtype = (bias if weight is None else weight).dtype
            check_backward(gradients, dy, x, weight, dtype, context=(cols, smallest), xhat_error=error, **variant)


@all_dtypes
@variants
def test_weights_below_2_to_the_minus_16_give_nan(backend, dtypes, variant):
    """All of grad_input is NaN, and the gradient of that weight. A weight of 2^-16 gives finite gradients."""
    centre = int(variant["zero_centered_weight"])
    for cols, size in itertools.product((5, 200, 1100, 5000), (2.0**-16, 2.0**-17, -(2.0**-17), 0.0)):
        if centre and size and dtypes[1].itemsize == 2:
            continue  # size - 1 rounds to -1
        x, dy = (randn((3, cols), dtypes[0], backend.device) for _ in range(2))
        w = torch.full((cols,), 0.5 - centre, dtype=dtypes[1], device=backend.device)
        w[cols // 2] = size - centre
        gradients = run(backend, x, None, dy, None, w, None, memory_efficient=True, **variant)[4:]
        if abs(size) < 2.0**-16:
            assert gradients[0].isnan().all() and gradients[1][cols // 2].isnan(), (cols, size)
        else:
            assert all(gradient.isfinite().all() for gradient in gradients), (cols, size)


def test_memory_efficient_saves_the_output_and_one_number_a_row():
    x = torch.randn(64, 256, requires_grad=True)
    norm = layernorm_ext.LayerNorm(256, memory_efficient=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = norm(x * 1)
    sizes = {t.data_ptr(): t.numel() for t in saved if t is not None and t.numel()}
    for tensor in (norm.weight, norm.bias, y):
        assert sizes.pop(tensor.data_ptr()) == tensor.numel()
    assert sum(sizes.values()) == 64


def test_memory_efficient_has_no_second_derivative():
    x = torch.randn(4, 8, requires_grad=True)
    y = layernorm_ext.layer_norm(x, (8,), memory_efficient=True)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="memory_efficient=True does not keep"):
        gradient.sum().backward()


def test_host_code_reads_no_tensor_values(backend):
    """On a GPU it would wait for earlier kernels. All backends share the host code."""
    leaves = [torch.randn(s, device=backend.device, requires_grad=True) for s in ((4, 8), (4, 8), (8,))]
    flags = ("rms", "zero_centered_weight", "memory_efficient")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for values, residual in itertools.product(MASKS, (None, leaves[1])):
            options = dict(zip(flags, values, strict=True))
            output = forward(backend, leaves[0], residual, leaves[2], None, **options)[0]
            output.backward(torch.ones_like(output))
    called = {event.key for event in profile.key_averages()}
    assert any("::backward" in name for name in called)
    assert called.isdisjoint({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"})


# Derivatives


@variants
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
def test_first_and_second_derivatives(backend, variant, with_residual):
    """Reverse and forward mode agree with finite differences, also batched by vmap."""
    x, r, w, b = (torch.randn(s, dtype=F64, requires_grad=True) for s in ((3, 5), (3, 5), (5,), (5,)))

    def norm(x, w, b, r=None):
        output, total, *_ = forward(backend, x, r, w, b, **variant)
        return output if r is None else (output, total * 1.5)

    arguments = (x, w, b, r) if with_residual else (x, w, b)
    assert gradcheck(norm, arguments, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(norm, arguments, check_batched_grad=True)


@rms_or_not
def test_gradients_of_fused_addition(rms):
    """Equal to those of separate operations if both outputs are used, or one, or if some inputs are constant."""
    fused = layernorm_ext.add_rms_norm if rms else layernorm_ext.add_layer_norm
    plain = layernorm_ext.rms_norm if rms else layernorm_ext.layer_norm
    leaves = [torch.randn(s, dtype=F64) for s in ((3, 5), (3, 5), (5,))]
    dy, dsum = torch.randn(3, 5, dtype=F64), torch.randn(3, 5, dtype=F64)

    def gradients(function, requires_grad, output_used, sum_used):
        x, r, w = inputs = [t.clone().requires_grad_(flag) for t, flag in zip(leaves, requires_grad, strict=True)]
        output, total = function(x, r, w)
        loss = sum((t * g).sum() for t, g, used in ((output, dy, output_used), (total, dsum, sum_used)) if used)
        if loss.requires_grad:
            loss.backward()
        return [t.grad for t in inputs]

    for requires_grad, used in itertools.product(MASKS, ((1, 1), (1, 0), (0, 1))):
        actual = gradients(lambda x, r, w: fused(x, r, (5,), w), requires_grad, *used)
        expected = gradients(lambda x, r, w: (plain(x + r, (5,), w), x + r), requires_grad, *used)
        # Sums are added in another order: some roundings of float64.
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_derivatives_of_in_place_addition():
    x, r, w = (torch.randn(s, dtype=F64, requires_grad=True) for s in ((3, 5), (3, 5), (5,)))

    def in_place(x, r, w):
        r = r * 2
        output, total = layernorm_ext.add_layer_norm(x, r, (5,), w, inplace=True)
        assert total.data_ptr() == r.data_ptr()
        return output, r, total

    assert gradcheck(in_place, (x, r, w))
    assert gradgradcheck(in_place, (x, r, w))


def test_in_place_addition_refuses_what_autograd_cannot_follow():
    x, r = (torch.randn(3, 5, requires_grad=True) for _ in range(2))
    before = r.detach().clone()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
        layernorm_ext.add_layer_norm(x, r, (5,), inplace=True)
    assert torch.equal(r, before)
    with pytest.raises(RuntimeError, match="Expected residual not to be a view"):
        layernorm_ext.add_layer_norm(x, (r * 2)[:], (5,), inplace=True)
    saved = r.exp()  # the backward of exp needs its output
    layernorm_ext.add_layer_norm(x, saved, (5,), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


FUNCTIONS = {
    "layer": lambda x, r, w: layernorm_ext.layer_norm(x, (8,), w, zero_centered_weight=True),
    "rms": lambda x, r, w: layernorm_ext.rms_norm(x, (8,), w),
    "add layer": lambda x, r, w: layernorm_ext.add_layer_norm(x, r, (8,), w),
    "add rms": lambda x, r, w: layernorm_ext.add_rms_norm(x, r, (8,), w, zero_centered_weight=True),
    "in place": lambda x, r, w: layernorm_ext.add_layer_norm(x, r * 2, (8,), w, inplace=True),
    "memory-efficient": lambda x, r, w: layernorm_ext.layer_norm(x, (8,), w, memory_efficient=True),
    "images": lambda x, r, w: layernorm_ext.layer_norm_2d(x[..., None, None], w),
}


def gradients_of(function, x, r, w):
    outputs = function(x, r, w)
    loss = sum(output.square().sum() for output in (outputs if isinstance(outputs, tuple) else (outputs,)))
    return outputs, torch.autograd.grad(loss, (x, w))


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F64)], ids=dtypes_id)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiles_to_one_graph_for_any_batch(name, dtypes):
    """Inductor fuses the operations around our operators, and decides whether one in place needs a copy."""
    torch._dynamo.reset()
    compiler = "aot_eager" if dtypes == (F32, F32) and name != "in place" else "inductor"
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend=compiler, dynamic=True)
    tolerance = 16 * torch.finfo(dtypes[0]).eps  # Inductor rounds fewer intermediate results
    for rows in (3, 4, 7):
        x, r = (randn((rows, 8), dtypes[0]).requires_grad_() for _ in range(2))
        w = randn(8, dtypes[1]).requires_grad_()
        actual, expected = (gradients_of(function, x, r, w) for function in (compiled, FUNCTIONS[name]))
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        with torch.inference_mode():
            torch.testing.assert_close(compiled(x, r, w), actual[0], rtol=tolerance, atol=tolerance)


def test_compiled_autograd():
    """Compiled autograd gives the first and second derivatives of eager autograd."""
    x, r, w = leaves = [torch.randn(s, requires_grad=True) for s in ((3, 8), (3, 8), (8,))]

    def loss():
        output, total = FUNCTIONS["add rms"](x, r, w)
        y = FUNCTIONS["layer"](total * output, None, w) * FUNCTIONS["images"](total, None, w).flatten(1)
        gradients = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True)
        return FUNCTIONS["memory-efficient"](y, None, w).square().sum() + sum(g.square().sum() for g in gradients)

    expected = torch.autograd.grad(loss(), leaves)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss().backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


@pytest.mark.parametrize("variant", [VARIANTS["layer"], VARIANTS["rms-centred"]], ids=["layer", "rms-centred"])
def test_opcheck(backend, variant):
    x, r, dy, grad_sum, w, b = (torch.randn(s, requires_grad=True) for s in ((3, 5),) * 4 + ((5,),) * 2)
    mean, rstd, ops = torch.randn(3, 1), torch.rand(3, 1), backend.ops
    torch.library.opcheck(ops.forward.default, (x, (5,), w, b), variant)
    torch.library.opcheck(ops.forward.residual, (x, r, (5,), w, b), variant)
    for dsum, mask in ((grad_sum, ALL), (None, [True, False, True])):
        arguments = (dy, x, (5,), None if variant["rms"] else mean, rstd, w, b, mask, dsum)
        torch.library.opcheck(ops.backward.default, arguments, variant)
    torch.library.opcheck(ops.forward_.residual, (x, r.detach(), (5,), w.detach(), None), variant)


# Modules


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "AddLayerNorm", "AddRMSNorm"])
def test_zero_centred_module_starts_as_the_identity_weight(name):
    plain, centred = (getattr(layernorm_ext, name)(8, zero_centered_weight=flag) for flag in (False, True))
    assert plain.weight.eq(1).all() and not centred.weight.any()
    assert repr(centred) == repr(plain)[:-1] + ", zero_centered_weight=True)"
    x = torch.randn(3, 8)
    torch.testing.assert_close(centred(x), plain(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["AddLayerNorm", "AddRMSNorm"])
def test_add_module_is_addition_and_norm(name):
    norm, in_place = (getattr(layernorm_ext, name)(8, inplace=flag) for flag in (False, True))
    plain = getattr(layernorm_ext, name.removeprefix("Add"))(8)
    torch.nn.init.normal_(norm.weight)
    plain.load_state_dict(norm.state_dict())
    x, r = torch.randn(3, 8), torch.randn(3, 8)
    output, total = norm(x)
    assert total is x and torch.equal(output, plain(x))
    output, total = norm(x, r)
    assert torch.equal(total, x + r) and torch.equal(output, plain(x + r))
    assert repr(in_place) == repr(norm)[:-1] + ", inplace=True)"
    with torch.no_grad():
        assert in_place(x, r)[1].data_ptr() == r.data_ptr()


# Errors


@pytest.mark.parametrize("mode", ["eager", "fake", "meta"])
def test_errors_name_the_argument_and_both_values(mode):
    device = "meta" if mode == "meta" else "cpu"
    with torch._subclasses.FakeTensorMode() if mode == "fake" else torch.no_grad():
        x, w, rstd = (torch.zeros(s, device=device) for s in ((2, 3), 3, (2, 1)))
        ops = torch.ops.layernorm
        for wrong, kind, got, expected in [(x[:1], "shape", "[1, 3]", "[2, 3]"), (x.half(), "dtype", "Half", "Float")]:
            message = "Expected {0} to be of the {1} of input, but got {0} of {1} {2} and input of {1} {3}"
            for op in (ops.forward.residual, ops.forward_.residual):
                with pytest.raises(RuntimeError, match=re.escape(message.format("residual", kind, got, expected))):
                    op(x, wrong, (3,), w)
            with pytest.raises(RuntimeError, match=re.escape(message.format("grad_sum", kind, got, expected))):
                ops.backward(x, x, (3,), rstd, rstd, w, w, ALL, wrong)
        with pytest.raises(RuntimeError, match="Expected mean to be a tensor, but got None"):
            ops.backward(x, x, (3,), None, rstd, w, w, ALL)
        with pytest.raises(RuntimeError, match="Expected weight to be of same shape as normalized_shape"):
            ops.forward(x, (3,), w[:2], rms=True)


def test_in_place_residual_must_not_overlap():
    x = torch.randn(2, 3)
    for residual in (torch.zeros(3).expand(2, 3), x):
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.ops.layernorm.forward_(x, residual, (3,))
