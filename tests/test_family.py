"""The other members of the family: RMSNorm, the sum with a residual, zero-centred weights, backward from the output.

What they share with layer normalization is tested there. Here it is their numbers, for every dtype, on every backend,
and what is theirs alone.
"""

import copy
import itertools
import pickle
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
    dtype_id,
    exact,
    output_bound,
    xhat_error_from_output,
)
from shapes import HUGE, all_dtypes, amid_nans, amid_nans_1d, bits, data_dtypes, huge_rows, randn
from torch.autograd import gradcheck, gradgradcheck

import layernorm_ext

ALL = [True, True, True]
VARIANTS = [{"rms": rms, "zero_centered_weight": centred} for rms in (False, True) for centred in (False, True)]
variants = pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda v: ("rms" if v["rms"] else "layer") + "-centred" * v["zero_centered_weight"]
)

# On either side of every limit of the kernels: packs, several rows at a time, tiles, chunks, sweeps.
COLUMNS = [1, 3, 31, 32, 33, 64, 100, 257, 768, 1023, 1025, 2048, 2049, 4100, 9000, 20001]


def rms_eps(dtype):
    return torch.finfo(F64 if dtype == F64 else F32).eps


# ---- numbers --------------------------------------------------------------------------------------------------------


@all_dtypes
@variants
def test_forward_and_backward(backend, dtypes, variant):
    """Amid NaN, which shows what is read outside a row; the rows are an odd number, and several at a time."""
    for cols in COLUMNS:
        rows = 5 if cols < 2000 else 1
        x, dy = (amid_nans(randn((rows, cols), dtypes[0], backend.device)) for _ in range(2))
        w, b = (amid_nans_1d(randn(cols, dtypes[1], backend.device)) for _ in range(2))
        output, total, mean, rstd = backend.ops.norm_forward(x, None, (cols,), w, b, **variant)
        assert total is None
        check_forward((output, mean, rstd), x, w, b, context=(cols,), **variant)
        gradients = backend.ops.norm_backward(dy, None, x, (cols,), mean, rstd, w, b, ALL, **variant)
        check_backward(gradients, dy, x, w, context=(cols,), **variant)


@all_dtypes
@variants
def test_residual(backend, dtypes, variant):
    """The sum is torch's, and everything else is that of the sum bit by bit; its gradient is added."""
    for cols, rows in itertools.product(COLUMNS, (1, 6)):
        x, residual, dy, dsum = (amid_nans(randn((rows, cols), dtypes[0], backend.device)) for _ in range(4))
        w, b = (randn(cols, dtypes[1], backend.device) for _ in range(2))
        output, total, *statistics = backend.ops.norm_forward(x, residual, (cols,), w, b, **variant)
        expected = backend.ops.norm_forward(x + residual, None, (cols,), w, b, **variant)
        pairs = [(total, x + residual), (output, expected[0]), *zip(statistics, expected[2:], strict=True)]
        for actual, wanted in pairs:
            assert actual is wanted is None or torch.equal(bits(actual), bits(wanted)), (rows, cols)
        assert total.is_contiguous()
        gradients = backend.ops.norm_backward(dy, dsum, total, (cols,), *statistics, w, b, ALL, **variant)
        check_backward(gradients, dy, total, w, context=(rows, cols), grad_sum=dsum, **variant)
        without = backend.ops.norm_backward(dy, None, total, (cols,), *statistics, w, b, ALL, **variant)
        for actual, wanted in zip(gradients[1:], without[1:], strict=True):
            assert torch.equal(bits(actual), bits(wanted)), (rows, cols)


@data_dtypes
def test_absent_parameters_and_masks(backend, dtype):
    """Nothing is returned that was not asked for. What is, does not depend on the mask, and hardly on the device."""
    for cols, variant in itertools.product((40, 1100, 5000), VARIANTS):
        x, residual, dy, dsum, w, b = (randn((3, cols), dtype, backend.device) for _ in range(6))
        for weight, bias in ((w[0], b[0]), (w[0], None), (None, b[0]), (None, None)):
            output, total, mean, rstd = backend.ops.norm_forward(x, residual, (cols,), weight, bias, **variant)
            check_forward((output, mean, rstd), total, weight, bias, **variant)
            arguments = (dy, dsum, total, (cols,), mean, rstd, weight, bias)
            everything = backend.ops.norm_backward(*arguments, ALL, **variant)
            check_backward(everything, dy, total, weight, grad_sum=dsum, **variant)
            for mask in itertools.product((False, True), repeat=3):
                gradients = backend.ops.norm_backward(*arguments, mask, **variant)
                for gradient, wanted, expected in zip(gradients, mask, everything, strict=True):
                    assert torch.equal(bits(gradient), bits(expected)) if wanted else gradient is None


def test_plain_members_are_layer_norm(backend):
    """Without any flag, the general operators do what the plain ones do, bit by bit."""
    for cols in (7, 768, 5000):
        x, dy, w, b = (randn((4, cols), F32, backend.device) for _ in range(4))
        output, _, mean, rstd = backend.ops.norm_forward(x, None, (cols,), w[0], b[0])
        for actual, expected in zip((output, mean, rstd), backend.forward(x, (cols,), w[0], b[0]), strict=True):
            assert torch.equal(bits(actual), bits(expected))
        actual = backend.ops.norm_backward(dy, None, x, (cols,), mean, rstd, w[0], b[0], ALL)
        expected = backend.backward(dy, x, (cols,), mean, rstd, w[0], b[0], ALL)
        assert all(torch.equal(bits(a), bits(e)) for a, e in zip(actual, expected, strict=True))


def test_add_operators(backend):
    x, residual, dy, dsum, w, b = (randn((4, 40), F32, backend.device) for _ in range(6))
    outputs = backend.ops.add_forward(x, residual, (40,), w[0], b[0])
    expected = backend.ops.norm_forward(x, residual, (40,), w[0], b[0])
    assert all(torch.equal(a, e) for a, e in zip(outputs, expected, strict=True))
    _, *saved = outputs
    gradients = backend.ops.add_backward(dy, dsum, saved[0], (40,), *saved[1:], w[0], b[0], ALL)
    expected = backend.ops.norm_backward(dy, dsum, saved[0], (40,), *saved[1:], w[0], b[0], ALL)
    assert all(torch.equal(a, e) for a, e in zip(gradients, expected, strict=True))


@data_dtypes
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_in_place(backend, dtype, rms):
    """The residual becomes the sum, whatever its layout and however many rows are looked at a second time."""
    for cols in (40, 1100, 5000):
        x, base, w, b = (randn((4, cols), dtype, backend.device) for _ in range(4))
        if dtype == F32:
            x[1] *= 1e37  # of a sum that overflows
        spread = torch.zeros(cols, 4, dtype=dtype, device=backend.device).t()
        for residual in (base.clone(), amid_nans(base), spread.copy_(base)):
            expected = backend.ops.norm_forward(x, base, (cols,), w[0], b[0], rms=rms)
            version = residual._version
            output, mean, rstd = backend.ops.norm_forward_(x, residual, (cols,), w[0], b[0], rms=rms)
            assert residual._version > version
            for actual, wanted in zip((output, residual, mean, rstd), expected, strict=True):
                assert actual is wanted is None or torch.equal(bits(actual), bits(wanted)), cols


@pytest.mark.parametrize("dtype, magnitude", HUGE, ids=lambda v: f"{v}".removeprefix("torch."))
def test_huge_numbers(backend, dtype, magnitude):
    """RMSNorm of numbers whose squares overflow, and whose sum with a residual does not."""
    for cols in (7, 300, 5000):
        x = huge_rows(dtype, magnitude, cols, backend.device)
        dy, w = randn(x.shape, dtype, backend.device), randn(cols, dtype, backend.device)
        output, total, _, rstd = backend.ops.norm_forward(x, torch.zeros_like(x), (cols,), w, None, rms=True)
        check_forward((output, None, rstd), x, w, rms=True)
        gradients = backend.ops.norm_backward(dy, None, total, (cols,), None, rstd, w, None, ALL, rms=True)
        check_backward(gradients, dy, x, w, rms=True)


def test_rows_of_nothing_and_of_zeros(backend):
    """Empty tensors, and rows without any deviation: RMSNorm of zeros is zero, and rstd the root of 1 / eps."""
    for shape in ((0, 5), (3, 0), (0, 0)):
        x = torch.empty(shape, device=backend.device)
        w = torch.empty(shape[1], device=backend.device)
        output, total, mean, rstd = backend.ops.norm_forward(x, x.clone(), shape[1:], w, w, rms=True)
        assert output.shape == total.shape == shape and mean is None and rstd.shape == (shape[0], 1)
        gradients = backend.ops.norm_backward(x, x, x, shape[1:], None, rstd, w, w, ALL, rms=True)
        assert [g.shape for g in gradients] == [shape, shape[1:], shape[1:]]
        assert not any(g.any() for g in gradients)
    x = torch.zeros(2, 40, device=backend.device)
    output, _, _, rstd = backend.ops.norm_forward(x, None, (40,), None, None, 1e-6, rms=True)
    assert not output.any()
    # Two roundings, of eps and of the quotient of 1 and a root.
    torch.testing.assert_close(rstd.cpu(), torch.full((2, 1), 1e3), rtol=4 * 2**-24, atol=0)


def test_rows_are_independent(backend):
    """Of RMSNorm with a residual: the bits of a row do not depend on the rows around it."""
    for cols in (40, 768, 5000):
        x, residual, dy, dsum, w = (randn((9, cols), BF16, backend.device) for _ in range(5))
        whole = backend.ops.norm_forward(x, residual, (cols,), w[0], None, rms=True)
        back = backend.ops.norm_backward(
            dy, dsum, whole[1], (cols,), None, whole[3], w[0], None, [True, False, False], rms=True
        )
        for r in range(9):
            row = slice(r, r + 1)
            alone = backend.ops.norm_forward(x[row], residual[row], (cols,), w[0], None, rms=True)
            for a, e in ((alone[0], whole[0]), (alone[1], whole[1]), (alone[3], whole[3])):
                assert torch.equal(bits(a), bits(e[row]))
            alone = backend.ops.norm_backward(
                dy[row],
                dsum[row],
                whole[1][row],
                (cols,),
                None,
                whole[3][row],
                w[0],
                None,
                [True, False, False],
                rms=True,
            )
            assert torch.equal(bits(alone[0]), bits(back[0][row]))


# ---- backward from the output ---------------------------------------------------------------------------------------


@all_dtypes
@variants
def test_backward_from_output(backend, dtypes, variant):
    """Within the bound that LayerNorm documents: of xhat, u * (|xhat| + |bias / weight|), and fp16's subnormals."""
    for cols, smallest in itertools.product((5, 200, 1100, 5000), (0.5, 2.0**-16)):
        x, dy = (randn((3, cols), dtypes[0], backend.device, offset=1) for _ in range(2))
        w, b = (randn(cols, dtypes[1], backend.device) for _ in range(2))
        w = torch.where(w.abs() < smallest, smallest, w) - int(variant["zero_centered_weight"])
        if variant["zero_centered_weight"]:
            w = w.clamp(-0.5)  # w + 1 is rounded to no 16-bit number, but a weight near -1 would be
        for weight, bias in ((w, b), (w, None), (None, b)):
            options = {**variant, "memory_efficient": True}
            output, _, mean, rstd = backend.ops.norm_forward(x, None, (cols,), weight, bias, **options)
            gradients = backend.ops.norm_backward(dy, None, output, (cols,), None, rstd, weight, bias, ALL, **options)
            error = xhat_error_from_output(x, weight, bias, **variant)
            dtype = (bias if weight is None else weight).dtype
            check_backward(gradients, dy, x, weight, dtype, context=(cols, smallest), xhat_error=error, **variant)


def test_memory_efficient_keeps_nothing_but_the_output():
    """And one number a row. What autograd saves is what its hooks for saved tensors see."""
    x = torch.randn(64, 256, requires_grad=True)
    norm = layernorm_ext.LayerNorm(256, memory_efficient=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = norm(x * 1)
    kept = {t.data_ptr(): t.numel() for t in saved if t is not None and t.numel()}
    own = {norm.weight.data_ptr(), norm.bias.data_ptr(), y.data_ptr()}
    assert own <= set(kept)
    # Nothing of the product, which is freed.
    assert sum(numel for pointer, numel in kept.items() if pointer not in own) == 64


def test_memory_efficient_peak():
    """A stack of blocks whose next layer keeps the norm's output anyway: the norms' inputs are not kept."""
    rows, cols, depth = 512, 256, 6

    def kept(memory_efficient):
        sizes = {}
        blocks = [(layernorm_ext.LayerNorm(cols, memory_efficient=memory_efficient), torch.nn.Linear(cols, cols))]
        blocks = [copy.deepcopy(blocks[0]) for _ in range(depth)]

        def pack(t):
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        x = torch.randn(rows, cols, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = x
            for norm, linear in blocks:
                y = linear(norm(y * 1))
        y.sum().backward()
        parameters = sum(p.nbytes for block in blocks for m in block for p in m.parameters())
        return sum(sizes.values()) - parameters

    tensor = rows * cols * 4
    plain, efficient = kept(False), kept(True)
    assert plain >= 2 * depth * tensor
    assert efficient <= depth * tensor + 2 * depth * rows * 4 + depth * cols * 4 * 4


@all_dtypes
@variants
def test_backward_from_output_with_a_weight_too_small_to_divide_by(backend, dtypes, variant):
    """A weight below 2^-16 gives NaN in every row of grad_input and in its own grad_weight; one of 2^-16 does not."""
    centre = int(variant["zero_centered_weight"])
    options = {**variant, "memory_efficient": True}
    for cols, size in itertools.product((5, 200, 1100, 5000), (2.0**-16, 2.0**-17, -(2.0**-17), 0.0)):
        if centre and size and dtypes[1] in (torch.float16, torch.bfloat16):
            continue  # size - 1 is rounded to -1
        x, dy = (randn((3, cols), dtypes[0], backend.device) for _ in range(2))
        w = torch.full((cols,), 0.5 - centre, dtype=dtypes[1], device=backend.device)
        w[cols // 2] = size - centre
        output, _, _, rstd = backend.ops.norm_forward(x, None, (cols,), w, None, **options)
        grads = backend.ops.norm_backward(dy, None, output, (cols,), None, rstd, w, None, ALL, **options)
        if abs(size) < 2.0**-16:
            assert grads[0].isnan().all() and grads[1][cols // 2].isnan(), (cols, size)
        else:
            assert all(gradient.isfinite().all() for gradient in grads), (cols, size)


def test_nothing_looks_at_the_values_of_a_tensor_on_the_host(backend):
    """On a GPU that would wait for the kernels before it. Host code is the same for all backends."""
    x, residual, w = (torch.randn(shape, device=backend.device) for shape in ((4, 8), (4, 8), (8,)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for rms, zero_centered_weight, memory_efficient in itertools.product((False, True), repeat=3):
            options = {"rms": rms, "zero_centered_weight": zero_centered_weight, "memory_efficient": memory_efficient}
            leaves = [t.clone().requires_grad_() for t in (x, residual, w)]
            for r in (None, leaves[1]):
                output = backend.ops.norm_forward(leaves[0], r, (8,), leaves[2], None, **options)[0]
                output.backward(torch.ones_like(output))
    called = {event.key for event in profile.key_averages()}
    assert any("norm_backward" in name for name in called)
    assert called.isdisjoint({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"})


def test_memory_efficient_has_no_second_derivative():
    x = torch.randn(4, 8, requires_grad=True)
    y = layernorm_ext.layer_norm(x, (8,), memory_efficient=True)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="memory_efficient=True does not keep"):
        gradient.sum().backward()


# ---- derivatives ----------------------------------------------------------------------------------------------------


def family(backend, variant, residual):
    """Return a function of (x, [residual], weight, bias), and its arguments."""
    x, r, w, b = (torch.randn(s, dtype=F64, requires_grad=True) for s in ((3, 5), (3, 5), (5,), (5,)))

    def f(x, *rest):
        r, w, b = rest if residual else (None, *rest)
        output, total, *_ = backend.ops.norm_forward(x, r, (5,), w, b, **variant)
        return (output, total * 1.5) if residual else output

    return f, (x, r, w, b) if residual else (x, w, b)


@variants
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_derivatives(backend, variant, residual):
    """In reverse mode, twice, in forward mode and batched."""
    f, arguments = family(backend, variant, residual)
    assert gradcheck(f, arguments, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(f, arguments, check_batched_grad=True)


@variants
def test_operators_are_what_torch_expects(backend, variant):
    x, r, dy, dsum, w, b = (torch.randn(s, requires_grad=True) for s in ((3, 5),) * 4 + ((5,),) * 2)
    for residual in (None, r):
        torch.library.opcheck(backend.ops.norm_forward.default, (x, residual, (5,), w, b), variant)
    mean = None if variant["rms"] else torch.randn(3, 1)
    for mask, grad_sum in ((ALL, dsum), ([True, False, True], None)):
        arguments = (dy, grad_sum, x, (5,), mean, torch.rand(3, 1), w, b, mask)
        torch.library.opcheck(backend.ops.norm_backward.default, arguments, variant)
    torch.library.opcheck(backend.ops.norm_forward_.default, (x, r.detach(), (5,), w.detach(), None), variant)


def test_add_operators_are_what_torch_expects(backend):
    x, r, dy, dsum, w, b = (torch.randn(s, requires_grad=True) for s in ((3, 5),) * 4 + ((5,),) * 2)
    torch.library.opcheck(backend.ops.add_forward.default, (x, r, (5,), w, b))
    arguments = (dy, dsum, x, (5,), torch.randn(3, 1), torch.rand(3, 1), w, b, ALL)
    torch.library.opcheck(backend.ops.add_backward.default, arguments)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_gradients_of_residual(rms):
    """Of both outputs, of one, and of neither; those of input and residual are the same."""
    function = layernorm_ext.add_rms_norm if rms else layernorm_ext.add_layer_norm
    plain = layernorm_ext.rms_norm if rms else layernorm_ext.layer_norm
    x, r, w = (torch.randn(s, dtype=F64, requires_grad=True) for s in ((3, 5), (3, 5), (5,)))
    dy, dsum = torch.randn(3, 5, dtype=F64), torch.randn(3, 5, dtype=F64)
    for cotangents in ((dy, dsum), (dy, None), (None, dsum)):
        pairs = [
            [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None]
            for outputs in (function(x, r, (5,), w), (plain(x + r, (5,), w), x + r))
        ]
        results = []
        for pair in pairs:
            outputs, grads = zip(*pair, strict=True)
            results.append(torch.autograd.grad(outputs, (x, r, w), grads, allow_unused=True))
        for actual, expected in zip(*results, strict=True):
            assert actual is expected is None or torch.allclose(actual, expected, rtol=1e-12, atol=1e-12)
    for wanted in itertools.product((False, True), repeat=3):
        leaves = [t.detach().requires_grad_(flag) for t, flag in zip((x, r, w), wanted, strict=True)]
        output, total = function(leaves[0], leaves[1], (5,), leaves[2])
        assert output.requires_grad == any(wanted)
        if any(wanted):
            (output.sum() + total.detach().sum()).backward()
            assert [leaf.grad is not None for leaf in leaves] == list(wanted)


def test_gradients_in_place():
    """The graph sees the residual change; what cannot be right is refused before anything is changed."""
    x, r, w = (torch.randn(s, dtype=F64, requires_grad=True) for s in ((3, 5), (3, 5), (5,)))

    def in_place(x, r, w):
        r = r * 2
        output, total = layernorm_ext.add_layer_norm(x, r, (5,), w, inplace=True)
        assert total.data_ptr() == r.data_ptr()
        return output, r, total

    assert gradcheck(in_place, (x, r, w))
    assert gradgradcheck(in_place, (x, r, w))

    leaf = r.detach().clone().requires_grad_()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
        layernorm_ext.add_layer_norm(x, leaf, (5,), w, inplace=True)
    assert torch.equal(leaf, r)
    with pytest.raises(RuntimeError, match="Expected residual not to be a view"):
        layernorm_ext.add_layer_norm(x, (r * 2)[:], (5,), w, inplace=True)
    saved = (r * 1).exp()  # whose backward needs its output
    layernorm_ext.add_layer_norm(x, saved, (5,), w, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


@pytest.mark.parametrize("member", ["layer", "rms", "add layer", "add rms", "in place", "memory efficient"])
def test_compile(member):
    """Forward and backward in one graph, with the batch changing."""
    torch._dynamo.reset()
    w, b = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    functions = {
        "layer": lambda x, r: layernorm_ext.layer_norm(x, (8,), w, b, zero_centered_weight=True),
        "rms": lambda x, r: layernorm_ext.rms_norm(x, (8,), w),
        "add layer": lambda x, r: layernorm_ext.add_layer_norm(x, r, (8,), w, b),
        "add rms": lambda x, r: layernorm_ext.add_rms_norm(x, r, (8,), w, zero_centered_weight=True),
        "in place": lambda x, r: layernorm_ext.add_layer_norm(x, r * 2, (8,), w, b, inplace=True),
        "memory efficient": lambda x, r: layernorm_ext.layer_norm(x, (8,), w, b, memory_efficient=True),
    }
    f = functions[member]
    compiled = torch.compile(f, fullgraph=True)
    for rows in (3, 4, 7):
        results = []
        for function in (f, compiled):
            x, r = (torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)).requires_grad_() for _ in "xr")
            outputs = function(x, r)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            gradients = torch.autograd.grad(sum(o.square().sum() for o in outputs), (x, w))
            results.append((*outputs, *gradients))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)


def test_compiled_autograd():
    """Backward of every member, recorded and compiled."""
    x, r, w = (torch.randn(s, requires_grad=True) for s in ((3, 8), (3, 8), (8,)))

    def loss():
        a, total = layernorm_ext.add_rms_norm(x, r, (8,), w)
        b = layernorm_ext.layer_norm(total * a, (8,), w, zero_centered_weight=True)
        return (b * layernorm_ext.layer_norm(b.sin(), (8,), w, memory_efficient=True)).square().sum()

    expected = torch.autograd.grad(loss(), (x, r, w))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss().backward()
    for leaf, gradient in zip((x, r, w), expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_vmap():
    x, r, w = torch.randn(4, 3, 5), torch.randn(4, 3, 5), torch.randn(5)
    for function in (layernorm_ext.add_layer_norm, layernorm_ext.add_rms_norm):
        batched = torch.vmap(lambda x, r, function=function: function(x, r, (5,), w))(x, r)
        for actual, expected in zip(batched, function(x, r, (5,), w), strict=True):
            torch.testing.assert_close(actual, expected)
    actual = torch.vmap(torch.func.grad(lambda x: layernorm_ext.rms_norm(x, (5,), w).square().sum()))(x)
    leaf = x.clone().requires_grad_()
    layernorm_ext.rms_norm(leaf, (5,), w).square().sum().backward()
    torch.testing.assert_close(actual, leaf.grad)


# ---- Python ---------------------------------------------------------------------------------------------------------


@data_dtypes
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm_is_torchs(dtype, eps):
    """Also without eps, for numbers so small that it matters."""
    for scale in (1, 1e-3):
        x, w = randn((4, 40), dtype) * scale, randn(40, dtype)
        actual = layernorm_ext.rms_norm(x, (40,), w, eps)
        expected = torch.nn.functional.rms_norm(x, (40,), w, eps)
        # torch rounds more often than we do; 4 units in the last place.
        torch.testing.assert_close(actual, expected, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny * 4)
        forward = Forward(exact(x), rms_eps(dtype) if eps is None else eps, rms=True)
        assert_within(
            actual, forward.output(exact(w), None), output_bound(dtype, forward, exact(w), None), dtype_id(dtype)
        )


def test_rms_norm_module_is_torchs():
    ours, theirs = layernorm_ext.RMSNorm((3, 8)), torch.nn.RMSNorm((3, 8))
    assert isinstance(ours, torch.nn.RMSNorm)
    assert repr(ours) == repr(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.weight.data.normal_()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(ours(x), theirs(x))
    assert repr(layernorm_ext.RMSNorm(8, 1e-6, elementwise_affine=False)) == repr(torch.nn.RMSNorm(8, 1e-6, False))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "AddLayerNorm", "AddRMSNorm"])
def test_zero_centred_modules(name):
    """Begin as the others do, from zeros; say what they are; survive copies."""
    plain = getattr(layernorm_ext, name)(8)
    centred = getattr(layernorm_ext, name)(8, zero_centered_weight=True)
    assert not centred.weight.any() and plain.weight.eq(1).all()
    x = torch.randn(3, 8)
    results = [m(x) if isinstance(m(x), tuple) else (m(x),) for m in (plain, centred)]
    for a, e in zip(*results, strict=True):
        torch.testing.assert_close(a, e)
    assert repr(centred) == repr(plain)[:-1] + ", zero_centered_weight=True)"
    for other in (copy.deepcopy(centred), pickle.loads(pickle.dumps(centred))):
        assert other.zero_centered_weight and repr(other) == repr(centred)


@pytest.mark.parametrize("name", ["AddLayerNorm", "AddRMSNorm"])
def test_add_modules(name):
    norm = getattr(layernorm_ext, name)(8)
    plain = getattr(layernorm_ext, name.removeprefix("Add"))(8)
    norm.weight.data.normal_()
    plain.load_state_dict(norm.state_dict())
    x, r = torch.randn(3, 8), torch.randn(3, 8)
    output, total = norm(x)
    assert total is x and torch.equal(output, plain(x))
    output, total = norm(x, r)
    assert torch.equal(total, x + r) and torch.equal(output, plain(x + r))
    in_place = getattr(layernorm_ext, name)(8, inplace=True)
    assert repr(in_place) == repr(norm)[:-1] + ", inplace=True)"
    with torch.no_grad():
        assert in_place(x, r)[1] is r or in_place(x, r)[1].data_ptr() == r.data_ptr()


def test_jagged():
    """Nested tensors with a ragged dimension, member by member."""
    parts = [torch.randn(2, 8), torch.randn(5, 8)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    w = torch.randn(8)
    for actual, part in zip(layernorm_ext.rms_norm(x, (8,), w).unbind(), parts, strict=True):
        assert torch.equal(actual, layernorm_ext.rms_norm(part, (8,), w))
    residual = torch.nested.nested_tensor_from_jagged(torch.randn(7, 8), x.offsets())
    outputs = layernorm_ext.add_layer_norm(x, residual, (8,), w)
    wanted = layernorm_ext.add_layer_norm(x.values(), residual.values(), (8,), w)
    for actual, expected in zip(outputs, wanted, strict=True):
        assert torch.equal(actual.values(), expected)
    with pytest.raises(RuntimeError, match="Expected residual to be nested as input is"):
        layernorm_ext.add_layer_norm(x, torch.randn(7, 8), (8,), w)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "add_layer_norm", "layer_norm"])
def test_torch_function(name):
    """A subclass is asked for the function itself, with the arguments as they were given."""
    seen = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append((function, len(args), sorted(kwargs or {})))
            return "answer"

    function = getattr(layernorm_ext, name)
    x = torch.randn(3, 8).as_subclass(Asked)
    arguments = (x, x, (8,)) if name.startswith("add") else (x, (8,))
    assert function(*arguments, torch.ones(8), zero_centered_weight=True) == "answer"
    assert seen[0][0] is function and "zero_centered_weight" in seen[0][2]


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "fake", "meta"])
def test_errors(mode):
    """Each names the argument and both values, before anything is touched."""
    device = "meta" if mode == "meta" else "cpu"
    with torch._subclasses.FakeTensorMode() if mode == "fake" else torch.no_grad():
        x, w = torch.zeros(2, 3, device=device), torch.zeros(3, device=device)
        rstd = torch.zeros(2, 1, device=device)
        ops = torch.ops.layernorm
        for wrong, kind, got, expected in [(x[:1], "shape", "[1, 3]", "[2, 3]"), (x.half(), "dtype", "Half", "Float")]:
            message = "Expected {0} to be of the {1} of input, but got {0} of {1} {2} and input of {1} {3}"
            for op in (ops.norm_forward, ops.norm_forward_, ops.add_forward):
                with pytest.raises(RuntimeError, match=re.escape(message.format("residual", kind, got, expected))):
                    op(x, wrong, (3,), w)
            with pytest.raises(RuntimeError, match=re.escape(message.format("grad_sum", kind, got, expected))):
                ops.norm_backward(x, wrong, x, (3,), rstd, rstd, w, w, ALL)
        with pytest.raises(RuntimeError, match="Expected mean to be a tensor, but got None"):
            ops.norm_backward(x, None, x, (3,), None, rstd, w, w, ALL)
        with pytest.raises(RuntimeError, match=re.escape("Expected weight to be of same shape as normalized_shape")):
            ops.norm_forward(x, None, (3,), w[:2], rms=True)


def test_errors_in_place():
    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.ops.layernorm.norm_forward_(x, torch.zeros(3).expand(2, 3), (3,))
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.ops.layernorm.norm_forward_(x, x, (3,))
