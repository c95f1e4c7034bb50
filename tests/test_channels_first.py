"""LayerNorm over the channels of images [N, C, *]; in the reference, each pixel is a row."""

import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import BF16, F16, F32, F64, check_backward, check_forward, dtypes_id, statistics_dtype
from shapes import all_dtypes, amid_nans_1d, bits, data_dtypes, dtypes_and_offsets, huge, huge_rows, lazy_zeros, randn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jvp, vmap

import layernorm_ext
from layernorm_ext import LayerNorm, LayerNorm2d, layer_norm, layer_norm_2d

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ALL = [True, True, True]
MASKS = [list(mask) for mask in itertools.product([False, True], repeat=3)]
EPS = 1e-5
CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last
formats = pytest.mark.parametrize("memory_format", [CONTIGUOUS, CHANNELS_LAST], ids=["contiguous", "channels_last"])

# Packs hold 4 to 32 pixels, blocks 64 to 256.
PIXELS = [*range(1, 70), 127, 128, 129, 196, 255, 256, 257, 300, 511, 520]
# Sums run over 16 channels at a time; 96 and 192 are widths of ConvNeXt.
CHANNELS = [1, 2, 3, 15, 16, 17, 31, 33, 96, 192]
SHAPES = {
    "every tail of packs and blocks": [(2, 5, pixels) for pixels in PIXELS],
    "numbers of channels": [(n, c, p) for c in CHANNELS for n, p in ((3, 7), (2, 45), (1, 300))],
    "shorter blocks, and too many channels for shared memory": [(2, 1100, 130), (1, 5000, 3)],
    "partial sums over several images": [(31, 3, 1), (33, 3, 2), (70, 3, 5)],
    "partial sums over one image or a part of it": [(3, 3, 31), (5, 3, 32), (20, 3, 300), (1, 3, 2000), (4, 2, 16384)],
}


def forward(backend, x, w=None, b=None):
    return backend.ops.channels_first_forward(x, w, b, EPS)


def backward(backend, dy, x, mean, rstd, w=None, b=None, mask=ALL):
    return backend.ops.channels_first_backward(dy, x, mean, rstd, w, b, mask)


def run(backend, x, dy, w=None, b=None):
    """Return output, mean, rstd, grad_input, grad_weight and grad_bias."""
    output, mean, rstd = forward(backend, x, w, b)
    return output, mean, rstd, *backward(backend, dy, x, mean, rstd, w, b)


def as_rows(images):
    """Return images [N, C, *] as contiguous rows [N * pixels, C]."""
    return images.movedim(1, -1).reshape(-1, images.size(1)).contiguous()


def check(backend, x, dy, w=None, b=None, parameter_dtype=None):
    """Check all results against float64 and return them."""
    results = run(backend, x, dy, w, b)
    y, mean, rstd, dx, dw, db = results
    assert y.shape == dx.shape == x.shape and mean.shape == rstd.shape == (x.shape[0], 1, *x.shape[2:])
    check_forward([as_rows(t) for t in (y, mean, rstd)], as_rows(x), w, b, EPS, context=x.shape)
    check_backward((as_rows(dx), dw, db), as_rows(dy), as_rows(x), w, parameter_dtype, EPS, context=x.shape)
    return results


def assert_same_bits(actual, expected, *context):
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(bits(a), bits(e)), (i, *context)


def amid_nans(images, image_gap=3, channel_gap=2, offset=1):
    """Return images [N, C, P] as a view into a buffer of NaN, with gaps between channels and between images."""
    n, c, p = images.shape
    strides = (c * (p + channel_gap) + image_gap, p + channel_gap, 1)
    margin = 70 + offset  # more than two packs
    buffer = torch.full((2 * margin + n * strides[0],), torch.nan, dtype=images.dtype, device=images.device)
    view = buffer.as_strided(images.shape, strides, margin)
    return view.copy_(images)


def random_inputs(backend, dtypes, shape, offset=0):
    """Return input, grad_output, weight and bias."""
    x, dy = (randn(shape, dtypes[0], backend.device, offset) for _ in range(2))
    w, b = (randn(shape[1], dtypes[1], backend.device) for _ in range(2))
    return x, dy, w, b


# Results


@all_dtypes
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_results_match_float64(backend, dtypes, shapes):
    """The tensors are surrounded by NaN, which appears in the results if a kernel reads outside the pixels."""
    for shape in shapes:
        x, dy, w, b = random_inputs(backend, dtypes, shape)
        x, dy, w, b = amid_nans(x), amid_nans(dy, 5, 1, 3), amid_nans_1d(w), amid_nans_1d(b)
        before = bits(x), bits(dy)
        check(backend, x, dy, w, b)
        assert torch.equal(bits(x), before[0]) and torch.equal(bits(dy), before[1]), "the inputs have changed"


@all_dtypes
@pytest.mark.parametrize("shape", [(2, 6, 4, 5), (3, 6, 1, 1), (1, 6, 2, 3), (2, 1, 3, 3), (1, 1, 1, 1)], ids=str)
@formats
def test_results_keep_the_memory_format_of_the_input(backend, dtypes, shape, memory_format):
    x, dy, w, b = random_inputs(backend, dtypes, shape)
    x = x.to(memory_format=memory_format)
    for gradient_format in (CONTIGUOUS, CHANNELS_LAST):
        output, _, _, grad_input, *_ = check(backend, x, dy.to(memory_format=gradient_format), w, b)
        for result in (output, grad_input):
            assert result.is_contiguous(memory_format=memory_format)
            assert result.stride() == torch.empty_like(x).stride()


@data_dtypes
def test_other_layouts_give_the_bits_of_a_copy(backend, dtype):
    x, dy, w, b = random_inputs(backend, (dtype, dtype), (2, 6, 4, 10))
    expected = run(backend, x, dy, w, b)
    more_channels = torch.full((2, 9, 4, 10), torch.nan, dtype=dtype, device=backend.device)
    more_channels[:, 2:8] = x
    views = {
        "transposed pixels": x.transpose(2, 3).contiguous().transpose(2, 3),
        "transposed images": x.transpose(0, 1).contiguous().transpose(0, 1),
        "sliced channels": more_channels[:, 2:8],
        "every second element": x.repeat_interleave(2, 3).repeat_interleave(2, 1)[:, ::2, :, ::2],
        "negative bit": torch._neg_view(-x),
    }
    for name, view in views.items():
        results = run(backend, view, dy, w, b)
        assert_same_bits(results, expected, name)
        assert results[0].is_contiguous() and results[3].is_contiguous(), name
        assert_same_bits(run(backend, x, view, w, b)[3:], run(backend, x, x, w, b)[3:], name)
    results = run(backend, more_channels.to(memory_format=CHANNELS_LAST)[:, 2:8], dy, w, b)
    assert_same_bits(results, run(backend, x.to(memory_format=CHANNELS_LAST), dy, w, b))
    assert all(results[i].is_contiguous(memory_format=CHANNELS_LAST) for i in (0, 3))


@formats
def test_statistics_may_have_any_layout(backend, memory_format):
    """torch's compiler may choose one."""
    x, dy, w, b = random_inputs(backend, (F32, F32), (2, 6, 4, 10))
    x = x.to(memory_format=memory_format)
    _, mean, rstd, *expected = run(backend, x, dy, w, b)
    transposed = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (mean, rstd)]
    assert_same_bits(backward(backend, dy, x, *transposed, w, b), expected)


@data_dtypes
@pytest.mark.parametrize("shape", [(1, 5, 3, 4), (2, 1, 3, 4), (2, 5, 1, 1), (1, 1, 1, 1)], ids=str)
def test_expanded_tensors(backend, dtype, shape):
    x, dy = randn(shape, dtype, backend.device).expand(2, 5, 3, 4), randn((2, 5, 3, 4), dtype, backend.device)
    w = randn(1, dtype, backend.device).expand(5)
    check(backend, x, dy, w, w)
    check(backend, dy, x, w, w)


@all_dtypes
@pytest.mark.parametrize("shape", [(0, 4, 2, 2), (2, 0, 3, 3), (2, 3, 0, 4), (0, 0, 0, 0)], ids=str)
@formats
def test_empty_tensors(backend, dtypes, shape, memory_format):
    x, dy, w, b = random_inputs(backend, dtypes, shape)
    results = run(backend, x.to(memory_format=memory_format), dy, w, b)
    statistics = (shape[0], 1, *shape[2:])
    assert [tuple(r.shape) for r in results] == [shape, statistics, statistics, shape, shape[1:2], shape[1:2]]
    assert [r.dtype for r in results] == [dtypes[0], *[statistics_dtype(dtypes[0])] * 2, dtypes[0], *[dtypes[1]] * 2]
    assert not any(r.any() for r in results)


@all_dtypes
@pytest.mark.parametrize("shape", [(1, 3, 2), (9, 20, 3), (2, 40, 300)], ids=str)
def test_absent_parameters_and_masks(backend, dtypes, shape):
    """A gradient that is not requested is None. The others do not depend on the mask."""
    x, dy, w, b = random_inputs(backend, dtypes, shape)
    for weight, bias in ((w, b), (w, None), (None, b), (None, None)):
        parameter_dtype = dtypes[0] if weight is bias is None else dtypes[1]
        _, mean, rstd, *gradients = check(backend, x, dy, weight, bias, parameter_dtype)
        for mask in MASKS:
            results = backward(backend, dy, x, mean, rstd, weight, bias, mask)
            for requested, result, gradient in zip(mask, results, gradients, strict=True):
                assert torch.equal(result, gradient) if requested else result is None, mask


# Values that are hard to normalize


@dtypes_and_offsets
def test_large_means(backend, dtypes, offset):
    for shape in ((2, 2, 9), (1, 31, 33), (2, 96, 20), (1, 768, 5)):
        x, _, w, b = random_inputs(backend, dtypes, shape, offset)
        check(backend, x, randn(shape, dtypes[0], backend.device, offset=1), w, b)


@all_dtypes
def test_outliers_among_equal_values(backend, dtypes):
    """The rounding errors of these sums all have the same sign."""
    for channels in (7, 96, 1000, 3000):
        pixels = torch.ones(4, channels, dtype=F64)
        pixels[0, :1] = pixels[1, -2:] = 1000
        pixels[2] *= 0.1
        pixels[3, ::2] = 0.7
        x = pixels.to(dtypes[0]).to(backend.device).t()[None].contiguous()
        dy, w = randn(x.shape, dtypes[0], backend.device, offset=1), randn(channels, dtypes[1], backend.device)
        check(backend, x, dy, w, w)


@all_dtypes
def test_constant_pixels_give_exactly_the_bias(backend, dtypes):
    """The gradient of the weight is exactly zero."""
    for channels in (1, 2, 3, 10, 49, 96, 257, 768):
        x = torch.tensor([0.1, -0.7, 1 / 3, 1234.567, 0.0], dtype=dtypes[0], device=backend.device)
        x = x.repeat(1, channels, 1)
        _, dy, w, b = random_inputs(backend, dtypes, x.shape)
        output, _, _, _, grad_weight, _ = run(backend, x, dy, w, b)
        assert torch.equal(output, b.to(dtypes[0])[:, None].expand_as(x)), channels
        assert not grad_weight.any(), channels


@huge
@pytest.mark.parametrize("channels", [2, 7, 64, 300])
def test_huge_values_match_float64(backend, dtype, magnitude, channels):
    """Sums and squares overflow. An ordinary pixel among them has the same bits as without them."""
    x = huge_rows(dtype, magnitude, channels, backend.device).t()[None].contiguous()
    _, dy, w, b = random_inputs(backend, (dtype, dtype), x.shape)
    results = check(backend, x, dy, w, b)
    ordinary = [torch.cat([t[..., 3:4], torch.zeros_like(t[..., :1])], 2) for t in (x, dy)]
    expected = run(backend, *ordinary, w, b)
    assert_same_bits([result[..., 3:4] for result in results[:4]], [right[..., :1] for right in expected[:4]])


@data_dtypes
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("where", [0, 1], ids=["input", "grad_output"])
@pytest.mark.parametrize("pixels", [5, 40, 300])
def test_nan_and_inf_stay_in_their_pixel(backend, dtype, value, where, pixels):
    inputs = random_inputs(backend, (dtype, dtype), (2, 20, pixels))
    expected = run(backend, *inputs)
    for pixel in (0, pixels // 2, pixels - 1):
        changed = [t.clone() for t in inputs]
        changed[where][1, 17, pixel] = value
        results = run(backend, *changed)
        others = torch.arange(2 * pixels) != pixels + pixel
        for i in (0, 1, 2, 3) if where == 0 else (3,):
            result, right = as_rows(results[i]), as_rows(expected[i])
            assert_same_bits([result[others]], [right[others]], i, pixel)
            assert not result[~others].isfinite().any(), (i, pixel)
        if where == 0:
            assert results[4].isnan().all() and torch.equal(results[5], expected[5])


@pytest.mark.parametrize("dtypes", [(F16, F16), (F16, F32), (BF16, BF16), (BF16, F32)], ids=dtypes_id)
def test_subnormal_values_are_kept(backend, dtypes):
    """The conversion to bfloat16 of AVX-512 would flush them to zero."""
    smallest = torch.finfo(dtypes[0]).smallest_normal
    x, dy, w, _ = random_inputs(backend, dtypes, (2, 10, 40))
    tiny = (dy.double() * smallest / 4).to(dtypes[0])
    grad_input = check(backend, x, tiny, torch.ones_like(w), None)[3]
    assert ((grad_input != 0) & (grad_input.abs() < smallest)).sum() > grad_input.numel() / 2
    b = (w.double() * smallest / 8).to(dtypes[1])
    y, *_ = forward(backend, x * 0, None, b)
    assert torch.equal(y, b.to(dtypes[0])[:, None].expand_as(y)) and y.any()


# Reproducible bits


@all_dtypes
def test_bits_of_a_pixel_depend_on_the_pixel_alone(backend, dtypes):
    """Other images and pixels, their order, the alignment and inference mode change nothing."""
    x, dy, w, b = random_inputs(backend, dtypes, (3, 37, 300), offset=10)
    expected = run(backend, x, dy, w, b)
    parts = [slice(0, 2), slice(1, 34), slice(37, 300), slice(290, 300), torch.randperm(300)]
    for images, pixels in itertools.product((slice(0, 1), slice(1, 3)), parts):
        results = run(backend, x[images, :, pixels], dy[images, :, pixels], w, b)
        assert_same_bits(results[:4], [right[images, :, pixels] for right in expected[:4]], images, pixels)
    with torch.inference_mode():
        assert_same_bits(run(backend, x, dy, w, b), expected)
    for gaps in ((0, 0, 1), (1, 0, 0), (0, 1, 3), (7, 5, 13)):
        assert_same_bits(run(backend, amid_nans(x, *gaps), amid_nans(dy, *gaps), w, b), expected, gaps)


@pytest.mark.parametrize("dtypes", [(F64, F64), (F32, F32), (BF16, BF16), (BF16, F32)], ids=dtypes_id)
@pytest.mark.parametrize("shape", [(32, 40, 49), (3, 96, 1000), (70, 64, 9), (1, 3000, 40)], ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(backend, use_threads, dtypes, shape):
    inputs = random_inputs(backend, dtypes, shape, offset=10)
    use_threads(1)
    expected = run(backend, *inputs)
    for threads in (2, 3, 8):
        use_threads(threads)
        assert_same_bits(run(backend, *inputs), expected, threads)


# Memory


def test_writes_nothing_outside_its_outputs(backend):
    """glibc's checking allocator aborts the program if a byte behind an allocation has changed."""
    if backend.name != "cpu":
        pytest.skip("only CPU memory comes from glibc; the emulator checks each access itself")
    folders = ("/lib/x86_64-linux-gnu", "/lib64", "/usr/lib", "/lib/aarch64-linux-gnu")
    libraries = [Path(folder) / "libc_malloc_debug.so.0" for folder in folders]
    library = next((str(path) for path in libraries if path.exists()), None)
    if library is None:
        pytest.skip("this system has no libc_malloc_debug.so.0")
    environment = {**os.environ, "LD_PRELOAD": library, "GLIBC_TUNABLES": "glibc.malloc.check=3"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    code = "import test_channels_first; test_channels_first.run_every_tail()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "done\n", (done.returncode, done.stdout, done.stderr[-2000:])


def run_every_tail():
    from conftest import installed

    backend = installed("cpu")
    for dtypes in ((F64, F64), (F32, F32), (F16, F16), (BF16, F32)):
        for pixels, channels in itertools.product([*range(2, 70), 256, 257], (1, 17)):
            run(backend, *random_inputs(backend, dtypes, (2, channels, pixels)))
    print("done")


@pytest.mark.large
def test_more_than_2_to_the_31_elements(backend):
    """The inputs are zero almost everywhere and take little memory; output and grad_input take 4.3 GB each."""
    torch.use_deterministic_algorithms(False)  # poisoning would take as long as the test
    n, c, p = 3, 86, (1 << 23) - 5
    x, dy = (lazy_zeros((n * c, p), BF16, backend.device).view(n, c, p) for _ in range(2))
    some = [0, 1, p // 3, p - 2, p - 1]
    for tensor in (x, dy):
        for image in tensor:
            image[:, some] = randn((c, len(some)), BF16, backend.device)
    b = randn(c, BF16, backend.device)
    y, mean, rstd = forward(backend, x, None, b)
    check_forward([as_rows(t[..., some]) for t in (y, mean, rstd)], as_rows(x[..., some]), None, b, EPS)
    assert torch.equal(y[2, :, p // 2], b)
    del y
    dx, dw, db = backward(backend, dy, x, mean, rstd, None, b)
    check_backward((as_rows(dx[..., some]), dw, db), as_rows(dy[..., some]), as_rows(x[..., some]), None, BF16, EPS)
    assert not dx[2, :, p // 2].any()


# Derivatives


def double(*shape):
    return torch.randn(shape, dtype=F64)


def formula(x, w=None, b=None):
    """Normalize with torch operations, which autograd differentiates to any order."""
    d = x - x.mean(1, keepdim=True)
    y = d / (d.square().mean(1, keepdim=True) + EPS).sqrt()
    y = y if w is None else y * w[:, None, None]
    return y if b is None else y + b[:, None, None]


def assert_equal_but_for_rounding(actual, expected):
    """Allow some hundred float64 operations of relative error 1e-16."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weight, bias", [(True, True), (True, False), (False, True), (False, False)])
@formats
def test_first_and_second_derivatives(backend, weight, bias, memory_format):
    """Reverse and forward mode agree with finite differences, also combined and batched by vmap."""
    torch.use_deterministic_algorithms(False)
    x = double(2, 3, 2, 2).to(backend.device).to(memory_format=memory_format)
    inputs = [t.requires_grad_() for t in (x, *(double(3).to(backend.device) for _ in range(weight + bias)))]

    def norm(x, *parameters):
        w, b = (*parameters, None, None)[:2] if weight else (None, *parameters, None)[:2]
        return forward(backend, x, w, b)[0]

    assert gradcheck(norm, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(norm, inputs, check_fwd_over_rev=True, check_batched_grad=True)


@all_dtypes
@formats
def test_requires_grad(backend, dtypes, memory_format):
    """Each tensor that requires a gradient gets that of the operator, and no other tensor gets one."""
    x, dy, w, b = random_inputs(backend, dtypes, (2, 6, 3, 5))
    x = x.to(memory_format=memory_format)
    for tensors, mask in itertools.product(((x, w, b), (x, w, None), (x, None, b)), MASKS):
        inputs = [None if t is None else t.detach().requires_grad_(m) for t, m in zip(tensors, mask, strict=True)]
        y, mean, rstd = forward(backend, *inputs)
        assert not mean.requires_grad and not rstd.requires_grad
        if y.requires_grad:
            y.backward(dy)
        expected = run(backend, x, dy, *tensors[1:])[3:]
        for tensor, gradient in zip(inputs, expected, strict=True):
            if tensor is not None:
                assert torch.equal(tensor.grad, gradient) if tensor.requires_grad else tensor.grad is None, mask


def test_tensors_saved_for_backward(backend):
    """The input, the weight and the statistics are saved, but not the bias. A changed input is noticed."""
    saved = []
    x, w, b = (t.requires_grad_() for t in (double(2, 5, 3, 3), double(5), double(5)))
    x = x * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        forward(backend, x, w, b)
    assert {x.data_ptr(), w.data_ptr()} < set(saved) and b.data_ptr() not in saved and len(saved) == 4
    y = forward(backend, x, w, b)[0]
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_func_transforms(backend):
    def loss(norm):
        return lambda *inputs: norm(*inputs).pow(3).sum()

    def results(norm):
        yield hessian(loss(norm), (0, 1, 2))(x, w, b)
        yield jvp(norm, (x, w, b), (tangent, b, w))
        for in_dims in ((0, None, None), (2, 0, None), (None, 0, 0)):
            inputs = [t if d is None else many.movedim(0, d) for t, many, d in zip(one, batch, in_dims, strict=True)]
            yield vmap(norm, in_dims)(*inputs)
            yield vmap(grad(loss(norm), (0, 1, 2)), in_dims)(*inputs)

    x, w, b, tangent = double(2, 5, 3, 2), double(5), double(5), double(2, 5, 3, 2)
    one, batch = (x, w, b), (double(4, 2, 5, 3, 2), double(4, 5), double(4, 5))
    for actual, expected in zip(results(lambda *t: forward(backend, *t)[0]), results(formula), strict=True):
        assert_equal_but_for_rounding(actual, expected)


# Compilers


LAYOUTS = {
    "contiguous": lambda: torch.randn(2, 4, 3, 5),
    "channels_last": lambda: torch.randn(2, 4, 3, 5).to(memory_format=CHANNELS_LAST),
    "sliced": lambda: torch.randn(4, 6, 3, 5)[::2, 1:5],
    "sliced channels_last": lambda: torch.randn(4, 6, 3, 5).to(memory_format=CHANNELS_LAST)[::2, 1:5],
    "transposed": lambda: torch.randn(2, 4, 3, 5).transpose(2, 3),
    "expanded": lambda: torch.randn(2, 4, 1, 1).expand(2, 4, 3, 5),
    "one pixel": lambda: torch.randn(2, 4, 1, 1),
    "empty": lambda: torch.randn(0, 4, 3, 5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(backend, layout):
    """The shape functions predict sizes, dtypes and strides. Autograd is checked for the two dense layouts only."""
    torch.use_deterministic_algorithms(False)
    x, w, b = LAYOUTS[layout](), torch.randn(4), torch.randn(4)
    forward_op, backward_op = backend.ops.channels_first_forward, backend.ops.channels_first_backward
    for weight, bias in ((w, b), (w, None), (None, b), (None, None)):
        _, mean, rstd = forward(backend, x, weight, bias)
        dy = torch.randn(x.shape)
        options = {"test_utils": ("test_schema", "test_faketensor")}
        torch.library.opcheck(forward_op.default, (x, weight, bias), **options)
        for mask in MASKS:
            torch.library.opcheck(backward_op.default, (dy, x, mean, rstd, weight, bias, mask), **options)
    if layout in ("contiguous", "channels_last"):
        x, dy, w, b = (t.detach().requires_grad_() for t in (x, dy, w, b))
        torch.library.opcheck(forward_op.default, (x, w, b))
        torch.library.opcheck(backward_op.default, (dy, x, mean, rstd, w, b, ALL))


@formats
def test_compile(memory_format):
    """Sizes may change, and the memory format is that of eager mode."""
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    norm = LayerNorm2d(8)

    def step(x):
        return norm(x * 2).sin()

    def results(function, x):
        y = function(x)
        return y, *torch.autograd.grad(y.sum(), (x, *norm.parameters()))

    compiled = torch.compile(step, fullgraph=True)
    for n, h in ((2, 3), (3, 3), (4, 5)):
        x = torch.randn(n, 8, h, 4).to(memory_format=memory_format).requires_grad_()
        actual, expected = results(compiled, x), results(step, x)
        assert all(t.is_contiguous(memory_format=memory_format) for t in (*actual[:2], *expected[:2]))
        # Compiled code may add up the losses in another order.
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order, memory_format", [(1, CONTIGUOUS), (2, CONTIGUOUS), (1, CHANNELS_LAST)])
def test_compiled_autograd(backend, order, memory_format):
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()

    def gradients(n):
        x = torch.linspace(-1, 2, 24 * n, dtype=F64).exp().reshape(n, 4, 2, 3).to(memory_format=memory_format)
        inputs = [t.requires_grad_() for t in (x, torch.linspace(1, 2, 4, dtype=F64), torch.ones(4, dtype=F64))]
        value = forward(backend, *inputs)[0].sin().sum()
        if order == 2:
            (gradient,) = torch.autograd.grad(value, inputs[0], create_graph=True)
            value = gradient.square().sum()
        value.backward()
        return [t.grad for t in inputs if t.grad is not None]

    for n in (3, 4):
        expected = gradients(n)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            actual = gradients(n)
        assert_equal_but_for_rounding(actual, expected)


def test_export():
    module, x = LayerNorm2d(8), torch.randn(3, 8, 4, 5)
    with layernorm_ext.trace_as("kernel"):
        program = torch.export.export(module, (x,), dynamic_shapes={"input": {0: torch.export.Dim("batch")}})
    assert torch.ops.layernorm.channels_first_forward.default in [node.target for node in program.graph.nodes]
    x = torch.randn(7, 8, 4, 5)
    assert torch.equal(program.module()(x), module(x))


# Errors

X, STATISTICS = torch.ones(2, 3, 4, 4), torch.ones(2, 1, 4, 4)
BACKWARD = {"grad_output": X, "mean": STATISTICS, "rstd": STATISTICS, "weight": None, "bias": None, "output_mask": ALL}
WEIGHT_ERROR = "Expected weight of one number for each channel, but got weight of shape [4] and input of 3 channels"
BIAS_ERROR = "Expected bias of one number for each channel, but got bias of shape [3, 1] and input of 3 channels"
DTYPE_ERROR = "Expected weight of dtype Double, Float, Half or BFloat16, but got weight of dtype Long"
LIKE_ERROR = "Expected grad_output to be of the {0} of input, but got grad_output of {0} {1} and input of {0} {2}"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"input": X[0, :, 0, 0]}, "Expected input of shape [N, C, *], but got input of size[3]"),
        ({"input": X.long()}, "but got input of dtype Long"),
        ({"weight": torch.ones(4)}, WEIGHT_ERROR),
        ({"weight": torch.ones(3).long()}, DTYPE_ERROR),
        ({"bias": torch.ones(3, 1)}, BIAS_ERROR),
        ({**BACKWARD, "weight": torch.ones(4)}, WEIGHT_ERROR),
        ({**BACKWARD, "grad_output": X[..., :3]}, LIKE_ERROR.format("shape", "[2, 3, 4, 3]", "[2, 3, 4, 4]")),
        ({**BACKWARD, "grad_output": X.double()}, LIKE_ERROR.format("dtype", "Double", "Float")),
        ({**BACKWARD, "mean": X}, "Expected mean of shape [2, 1, 4, 4], but got mean of shape [2, 3, 4, 4]"),
        ({**BACKWARD, "rstd": STATISTICS.double()}, "Expected rstd of dtype Float for input of dtype Float, but got"),
    ],
)
def test_errors_name_the_argument_and_both_values(backend, arguments, message):
    """Kernels check with and without autograd, and so do the shape functions."""
    name = "channels_first_backward" if "output_mask" in arguments else "channels_first_forward"
    for context in (torch.enable_grad, torch.inference_mode, lambda: FakeTensorMode(allow_non_fake_inputs=True)):
        with context(), pytest.raises(RuntimeError, match=re.escape(message)):
            getattr(backend.ops, name)(**{"input": X, **arguments})


def test_parameter_on_another_device(backend):
    message = "Expected weight to be on the device of input, but got weight on meta and input on cpu"
    with pytest.raises(RuntimeError, match=message):
        backend.ops.channels_first_forward(X, torch.ones(3, device="meta"))


@pytest.mark.skipif(layernorm_ext._build_info.with_cuda, reason="the package was built with CUDA")
def test_package_without_cuda_kernels_refuses_cuda_tensors():
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match="layernorm_ext was built without CUDA kernels"):
        torch.ops.layernorm.channels_first_forward.default.redispatch(keys, X, None, None, EPS)


def test_number_of_dimensions_is_checked():
    for shape in ((3,), (2, 3), (2, 3, 4), (2, 3, 4, 4, 4)):
        with pytest.raises(RuntimeError, match=r"Expected input of shape \[N, C, H, W\], but got input of size\["):
            layer_norm_2d(torch.ones(shape))
    with pytest.raises(
        RuntimeError, match=r"Expected input of shape \[N, 4, H, W\], but got input of size\[2, 3, 4, 4\]"
    ):
        LayerNorm2d(4, elementwise_affine=False)(X)


# Function and module


@formats
def test_function_is_the_norm_of_permuted_rows(memory_format):
    x, w, b = torch.randn(2, 6, 4, 5).to(memory_format=memory_format), torch.randn(6), torch.randn(6)
    expected = layer_norm(x.permute(0, 2, 3, 1), (6,), w, b, 1e-6).permute(0, 3, 1, 2)
    actual = layer_norm_2d(x, w, b)
    # Channels-last images use the row kernels. Otherwise each result is within 5e-7 of the exact one.
    tolerance = 0 if memory_format is CHANNELS_LAST else 1e-6
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 1e-3, "dtype": F64}, {"device": "meta"}],
    ids=str,
)
def test_module_is_a_layer_norm_over_channels(options):
    norm, rows_norm = LayerNorm2d(6, **options), LayerNorm(6, **{"eps": 1e-6, **options})
    assert isinstance(norm, LayerNorm) and norm.normalized_shape == (6,)
    assert repr(norm) == repr(rows_norm).replace("LayerNorm", "LayerNorm2d", 1)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    rows_norm.load_state_dict(norm.state_dict())
    x = torch.randn(2, 6, 3, 4, dtype=options.get("dtype"), device=options.get("device"))
    expected = rows_norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    # Both results are within 5e-7 of the exact one.
    torch.testing.assert_close(norm(x), expected, rtol=1e-6, atol=1e-6)


def test_signature_is_torchs_but_for_channels_and_eps():
    """eps is ConvNeXt's."""
    ours, torchs = (inspect.signature(cls.__init__).parameters for cls in (LayerNorm2d, torch.nn.LayerNorm))
    assert list(ours)[1:3] == ["num_channels", "eps"] and ours["eps"].default == 1e-6
    assert [(p.name, p.default) for p in ours.values()][3:] == [(p.name, p.default) for p in torchs.values()][3:]
    assert inspect.signature(layer_norm_2d).parameters["eps"].default == 1e-6
