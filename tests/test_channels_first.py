"""Normalization over the channels of images: against the formulas in float64, and what rows promise held of pixels."""

import copy
import doctest
import inspect
import itertools
import os
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
from torch.nn import functional as F

import layernorm_ext
from layernorm_ext import LayerNorm, LayerNorm2d, layer_norm, layer_norm_2d
from layernorm_ext import channels_first as module_under_test

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ALL = [True, True, True]
MASKS = [list(mask) for mask in itertools.product([False, True], repeat=3)]
EPS = 1e-5
CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last
formats = pytest.mark.parametrize("memory_format", [CONTIGUOUS, LAST], ids=["contiguous", "channels_last"])

# Numbers of pixels, one row of them: every tail of every pack (4 to 32 numbers), and of the blocks (64 to 256).
PIXELS = [*range(1, 70), 127, 128, 129, 196, 255, 256, 257, 300, 511, 520]
# Channels: around the 16 that are summed in a run, widths of ConvNeXt, and so many that blocks become shorter.
CHANNELS = [1, 2, 3, 15, 16, 17, 31, 33, 96, 192]


def forward(backend, x, w=None, b=None, eps=EPS):
    return operators(backend).channels_first_forward(x, w, b, eps)


def backward(backend, dy, x, mean, rstd, w=None, b=None, mask=ALL):
    return operators(backend).channels_first_backward(dy, x, mean, rstd, w, b, mask)


def operators(backend):
    """Return the operators' namespace."""
    return getattr(torch.ops, backend.forward._qualified_op_name.partition("::")[0])


def everything(backend, x, dy, w, b, mask=ALL):
    """Return output, mean, rstd, grad_input, grad_weight and grad_bias."""
    output, mean, rstd = forward(backend, x, w, b)
    return output, mean, rstd, *backward(backend, dy, x, mean, rstd, w, b, mask)


def rows(images):
    """Return images [N, C, *] as contiguous rows [N * pixels, C]."""
    return None if images is None else images.movedim(1, -1).reshape(-1, images.size(1)).contiguous()


def check(backend, x, dy, w=None, b=None, parameter_dtype=None, context=()):
    """Check all results against the formulas; return them."""
    results = everything(backend, x, dy, w, b)
    y, mean, rstd, dx, dw, db = results
    assert y.shape == dx.shape == x.shape and mean.shape == rstd.shape == (x.shape[0], 1, *x.shape[2:])
    check_forward((rows(y), rows(mean), rows(rstd)), rows(x), w, b, EPS, context)
    check_backward((rows(dx), dw, db), rows(dy), rows(x), w, parameter_dtype, EPS, context)
    return results


def assert_same(results, expected, *context):
    for name, result, right in zip(
        ("output", "mean", "rstd", "grad_input", "grad_weight", "grad_bias"), results, expected, strict=False
    ):
        assert torch.equal(bits(result), bits(right)), (name, *context)


def amid_nans(images, image_gap=3, channel_gap=2, offset=1):
    """Return images [N, C, P] as a view into a buffer of NaN, with gaps between channels and images."""
    n, c, p = images.shape
    strides = (c * (p + channel_gap) + image_gap, p + channel_gap, 1)
    margin = 70 + offset  # more than two packs
    buffer = torch.full((2 * margin + n * strides[0],), torch.nan, dtype=images.dtype, device=images.device)
    view = buffer.as_strided(images.shape, strides, margin)
    return view.copy_(images)


def arguments(backend, dtypes, shape, offset=0):
    x, dy = (randn(shape, dtypes[0], backend.device, offset) for _ in range(2))
    w, b = (randn(shape[1], dtypes[1], backend.device) for _ in range(2))
    return x, dy, w, b


# ---- results ---------------------------------------------------------------------------------------------------------


@all_dtypes
def test_pixels(backend, dtypes):
    """Everything lies amid NaN: a read outside of the pixels shows."""
    for pixels in PIXELS:
        x, dy, w, b = arguments(backend, dtypes, (2, 5, pixels))
        x, dy, w, b = amid_nans(x), amid_nans(dy, 5, 1, 3), amid_nans_1d(w), amid_nans_1d(b)
        before = bits(x), bits(dy)
        check(backend, x, dy, w, b, context=(pixels,))
        assert torch.equal(bits(x), before[0]) and torch.equal(bits(dy), before[1]), "arguments have changed"


@all_dtypes
@pytest.mark.parametrize("channels", CHANNELS)
def test_numbers_of_channels(backend, dtypes, channels):
    for shape in ((3, channels, 7), (2, channels, 5, 9), (1, channels, 300)):
        x, dy, w, b = arguments(backend, dtypes, shape)
        check(backend, x, dy, w, b, context=shape)


@all_dtypes
@pytest.mark.parametrize("shape", [(2, 1100, 130), (1, 5000, 3)], ids=str)
def test_many_channels(backend, dtypes, shape):
    """Blocks of fewer pixels, and on a GPU channels that do not fit into shared memory."""
    x, dy, w, b = arguments(backend, dtypes, shape)
    check(backend, x, dy, w, b)


@all_dtypes
@pytest.mark.parametrize("shape", [(2, 6, 4, 5), (3, 6, 1, 1), (1, 6, 2, 3), (2, 1, 3, 3), (1, 1, 1, 1)], ids=str)
@formats
def test_memory_formats(backend, dtypes, shape, memory_format):
    """Output and grad_input keep the format of the input, whatever that of grad_output."""
    x, dy, w, b = arguments(backend, dtypes, shape)
    x = x.to(memory_format=memory_format)
    for gradient_format in (CONTIGUOUS, LAST):
        results = check(backend, x, dy.to(memory_format=gradient_format), w, b)
        for result in (results[0], results[3]):
            assert result.is_contiguous(memory_format=memory_format)
            assert result.stride() == torch.empty_like(x).stride()


@data_dtypes
def test_layouts(backend, dtype):
    """What does not lie channel by channel, or channels last, is copied."""
    x, dy = (randn((2, 6, 4, 10), dtype, backend.device) for _ in range(2))
    w, b = (randn(6, dtype, backend.device) for _ in range(2))
    expected = everything(backend, x, dy, w, b)
    wide = torch.full((4, 12, 4, 20), torch.nan, dtype=dtype, device=backend.device)
    wide[::2, ::2, :, ::2] = x
    deep = torch.full((2, 9, 4, 10), torch.nan, dtype=dtype, device=backend.device)
    deep[:, 2:8] = x
    views = {
        "transposed pixels": x.transpose(2, 3).contiguous().transpose(2, 3),
        "transposed images": x.transpose(0, 1).contiguous().transpose(0, 1),
        "sliced channels": deep[:, 2:8],
        "every second of everything": wide[::2, ::2, :, ::2],
        "negative bit": torch._neg_view(-x),
    }
    for name, view in views.items():
        assert torch.equal(view, x), name
        results = everything(backend, view, dy, w, b)
        assert_same(results, expected, name)
        assert results[0].is_contiguous() and results[3].is_contiguous(), name
        assert_same(everything(backend, x, view, w, b)[3:], everything(backend, x, x, w, b)[3:], name)
    deep = deep.to(memory_format=LAST)
    results = everything(backend, deep[:, 2:8], dy, w, b)
    assert_same(results, everything(backend, x.to(memory_format=LAST), dy, w, b))
    assert results[0].is_contiguous(memory_format=LAST) and results[3].is_contiguous(memory_format=LAST)


@formats
def test_layouts_of_statistics(backend, memory_format):
    """Which torch's compiler may choose."""
    x, dy = (randn((2, 6, 4, 10), F32, backend.device).to(memory_format=memory_format) for _ in range(2))
    _, mean, rstd = forward(backend, x)
    expected = backward(backend, dy, x, mean, rstd)
    mean, rstd = (t.transpose(2, 3).contiguous().transpose(2, 3) for t in (mean, rstd))
    assert not mean.is_contiguous()
    assert_same(backward(backend, dy, x, mean, rstd), expected)


@data_dtypes
@pytest.mark.parametrize("shape", [(1, 5, 3, 4), (2, 1, 3, 4), (2, 5, 1, 1), (1, 1, 1, 1)], ids=str)
def test_expanded(backend, dtype, shape):
    """Strides of 0 in input, grad_output and parameters."""
    x, dy = randn(shape, dtype, backend.device).expand(2, 5, 3, 4), randn((2, 5, 3, 4), dtype, backend.device)
    w = randn(1, dtype, backend.device).expand(5)
    check(backend, x, dy, w, w)
    check(backend, dy, x, w, w)


@all_dtypes
@pytest.mark.parametrize("shape", [(0, 4, 2, 2), (2, 0, 3, 3), (2, 3, 0, 4), (0, 0, 0, 0)], ids=str)
@formats
def test_empty(backend, dtypes, shape, memory_format):
    x, dy, w, b = arguments(backend, dtypes, shape)
    results = everything(backend, x.to(memory_format=memory_format), dy, w, b)
    assert results[0].shape == results[3].shape == shape and results[1].shape == (shape[0], 1, *shape[2:])
    assert [r.dtype for r in results] == [dtypes[0], *[statistics_dtype(dtypes[0])] * 2, dtypes[0], *[dtypes[1]] * 2]
    assert not any(r.any() for r in results)


@all_dtypes
@pytest.mark.parametrize("shape", [(1, 3, 2), (9, 20, 3), (2, 40, 300)], ids=str)
def test_masks_and_absent_parameters(backend, dtypes, shape):
    """What is asked for is bitwise what the full call gives; what is not is None."""
    x, dy, w, b = arguments(backend, dtypes, shape)
    for weight, bias in ((w, b), (w, None), (None, b), (None, None)):
        present = (w if weight is not None else b if bias is not None else x).dtype
        full = check(backend, x, dy, weight, bias, present, context=(weight is None, bias is None))
        for mask in MASKS:
            results = backward(backend, dy, x, *full[1:3], weight, bias, mask)
            for asked, result, right in zip(mask, results, full[3:], strict=True):
                assert torch.equal(result, right) if asked else result is None, mask


@all_dtypes
@pytest.mark.parametrize("images, pixels", [(31, 1), (33, 2), (70, 5), (3, 31), (5, 32), (1, 2000), (20, 300)])
def test_slots(backend, dtypes, images, pixels):
    """Partial sums of the weight's gradients: of several images, of one, of many parts of one."""
    x, dy, w, b = arguments(backend, dtypes, (images, 3, pixels, 1))
    check(backend, x, dy, w, b)


# ---- hard numbers ----------------------------------------------------------------------------------------------------


@dtypes_and_offsets
def test_offset(backend, dtypes, offset):
    for shape in ((2, 2, 9), (1, 31, 33), (2, 96, 20), (1, 768, 5)):
        x = randn(shape, dtypes[0], backend.device, offset)
        dy = randn(shape, dtypes[0], backend.device, offset=1)
        w, b = (randn(shape[1], dtypes[1], backend.device) for _ in range(2))
        check(backend, x, dy, w, b, context=(shape, offset))


@all_dtypes
def test_pixels_of_few_values(backend, dtypes):
    """One or two outliers among equal numbers: their sums err in one direction."""
    for channels in (7, 96, 1000, 3000):
        x = torch.ones(4, channels, dtype=F64)
        x[0, :1] = x[1, -2:] = 1000
        x[2] *= 0.1
        x[3, ::2] = 0.7
        x = x.to(dtypes[0]).to(backend.device).t()[None].contiguous()
        dy, w = randn(x.shape, dtypes[0], backend.device, offset=1), randn(channels, dtypes[1], backend.device)
        check(backend, x, dy, w, w, context=(channels,))


@all_dtypes
def test_constant_pixels(backend, dtypes):
    """The output is exactly the bias, and the gradient of the weight exactly 0."""
    for channels in (1, 2, 3, 10, 49, 96, 257, 768):
        x = torch.tensor([0.1, -0.7, 1 / 3, 1234.567, 0.0], dtype=dtypes[0], device=backend.device)
        x = x.repeat(1, channels, 1)
        w, b = (randn(channels, dtypes[1], backend.device) for _ in range(2))
        results = everything(backend, x, randn(x.shape, dtypes[0], backend.device), w, b)
        assert torch.equal(results[0], b.to(dtypes[0])[:, None].expand_as(x)), channels
        assert not results[4].any(), channels


@huge
@pytest.mark.parametrize("channels", [2, 7, 64, 300])
def test_huge_numbers(backend, dtype, magnitude, channels):
    """Sums and squares overflow. The ordinary pixel among them stays bitwise what it is alone."""
    x = huge_rows(dtype, magnitude, channels, backend.device).t()[None].contiguous()
    dy, w, b = randn(x.shape, dtype, backend.device), *(randn(channels, dtype, backend.device) for _ in range(2))
    results = check(backend, x, dy, w, b)
    padded = [torch.cat([t[..., 3:4], torch.zeros_like(t[..., :1])], 2) for t in (x, dy)]
    alone = everything(backend, *padded, w, b)
    assert_same([result[..., 3:4] for result in results[:4]], [right[..., :1] for right in alone[:4]])


@data_dtypes
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("where", [0, 1], ids=["input", "grad_output"])
@pytest.mark.parametrize("pixels", [5, 40, 300])
def test_nan_and_inf_stay_in_their_pixel(backend, dtype, value, where, pixels):
    clean = arguments(backend, (dtype, dtype), (2, 20, pixels))
    expected = everything(backend, *clean)
    for pixel in (0, pixels // 2, pixels - 1):
        changed = [t.clone() for t in clean]
        changed[where][1, 17, pixel] = value
        results = everything(backend, *changed)
        others = torch.ones(2, pixels, dtype=torch.bool)
        others[1, pixel] = False
        for i in (0, 1, 2, 3) if where == 0 else (3,):
            result, right = rows(results[i]), rows(expected[i])
            assert_same([result[others.flatten()]], [right[others.flatten()]], i, pixel)
            assert not result[~others.flatten()].isfinite().any(), (i, pixel)
        if where == 0:
            assert results[4].isnan().all() and torch.equal(results[5], expected[5])


@pytest.mark.parametrize("dtypes", [(F16, F16), (F16, F32), (BF16, BF16), (BF16, F32)], ids=dtypes_id)
def test_subnormal_numbers(backend, dtypes):
    """In input, parameters and gradients they are kept; AVX-512's own conversion to bf16 flushes them."""
    smallest = torch.finfo(dtypes[0]).smallest_normal
    x, dy, w, _ = arguments(backend, dtypes, (2, 10, 40))
    tiny = (dy.double() * smallest / 4).to(dtypes[0])
    results = check(backend, x, tiny, torch.ones_like(w), None)
    assert ((results[3] != 0) & (results[3].abs() < smallest)).sum() > results[3].numel() / 2
    b = (w.double() * smallest / 8).to(dtypes[1])
    y, *_ = forward(backend, x * 0, None, b)
    assert torch.equal(y, b.to(dtypes[0])[:, None].expand_as(y)) and y.any()


@pytest.mark.parametrize("dtypes", [(F16, F16), (BF16, BF16), (BF16, F32)], ids=dtypes_id)
def test_parameter_gradients_of_many_pixels(backend, dtypes):
    """At most 3e-3 off: half a unit in the last place of bf16, and next to nothing."""
    x, dy, w, b = arguments(backend, dtypes, (4, 8, 128, 128))
    _, _, _, _, *gradients = everything(backend, x, dy, w, b)
    wide = [t.double().requires_grad_() for t in (x, w, b)]
    F.layer_norm(wide[0].movedim(1, -1), (8,), *wide[1:], EPS).backward(dy.double().movedim(1, -1))
    for gradient, right in zip(gradients, (wide[1].grad, wide[2].grad), strict=True):
        assert (gradient.double() - right).abs().max() <= 3e-3 * right.abs().max()


# ---- what changes no bit ---------------------------------------------------------------------------------------------


@all_dtypes
def test_batch_position_and_alignment(backend, dtypes):
    """A pixel gives the same in a smaller batch, among fewer pixels and wherever it stands."""
    x, dy, w, b = arguments(backend, dtypes, (3, 37, 300), offset=10)
    expected = everything(backend, x, dy, w, b)
    for images, pixels in itertools.product(
        (slice(0, 1), slice(1, 3)), (slice(0, 2), slice(1, 34), slice(37, 300), slice(290, 300))
    ):
        results = everything(backend, x[images, :, pixels], dy[images, :, pixels], w, b)
        assert_same(results[:4], [right[images, :, pixels] for right in expected[:4]], images, pixels)
    order = torch.randperm(300)
    results = everything(backend, x[..., order], dy[..., order], w, b)
    assert_same(results[:4], [right[..., order] for right in expected[:4]])
    for gaps in ((0, 0, 1), (1, 0, 0), (0, 1, 3), (7, 5, 13)):
        results = everything(backend, amid_nans(x, *gaps), amid_nans(dy, *gaps), w, b)
        assert_same(results, expected, gaps)


@all_dtypes
def test_pixel_among_huge_ones(backend, dtypes):
    """A pixel that is scaled takes none of its neighbours along."""
    x, dy, w, b = arguments(backend, dtypes, (1, 20, 40))
    expected = everything(backend, x, dy, w, b)
    for pixel in (0, 7, 39):
        changed = x.clone()
        changed[..., pixel] = torch.finfo(dtypes[0]).max
        changed[:, ::2, pixel] *= -1
        others = torch.arange(40) != pixel
        results = everything(backend, changed, dy, w, b)[:4]
        assert_same([r[..., others] for r in results], [right[..., others] for right in expected[:4]], pixel)


@pytest.mark.parametrize("dtypes", [(F64, F64), (F32, F32), (BF16, BF16), (BF16, F32)], ids=dtypes_id)
@pytest.mark.parametrize("shape", [(32, 40, 49), (3, 96, 1000), (70, 64, 9), (1, 3000, 40)], ids=str)
def test_threads(backend, use_threads, dtypes, shape):
    values = arguments(backend, dtypes, shape, offset=10)
    use_threads(1)
    expected = everything(backend, *values)
    for threads in (2, 3, 8):
        use_threads(threads)
        assert_same(everything(backend, *values), expected, threads)
    assert_same(everything(backend, *values), expected, "again")


@all_dtypes
def test_inference_mode(backend, dtypes):
    values = arguments(backend, dtypes, (2, 6, 3, 5))
    expected = everything(backend, *values)
    with torch.inference_mode():
        assert_same(everything(backend, *values), expected)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_writes_nothing_outside(backend):
    """Run every tail with glibc's checking allocator, which aborts where a byte behind an allocation has changed."""
    if backend.name != "cpu":
        pytest.skip("glibc allocates on the CPU alone, and the emulator looks at every access itself")
    folders = ("/lib/x86_64-linux-gnu", "/lib64", "/usr/lib", "/lib/aarch64-linux-gnu")
    libraries = [Path(folder) / "libc_malloc_debug.so.0" for folder in folders]
    library = next((str(path) for path in libraries if path.exists()), None)
    if library is None:
        pytest.skip("this system has no libc_malloc_debug.so.0")
    environment = {**os.environ, "LD_PRELOAD": library, "GLIBC_TUNABLES": "glibc.malloc.check=3"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    code = "import test_channels_first; test_channels_first.touch_every_end()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "done\n", (done.returncode, done.stdout, done.stderr[-2000:])


def touch_every_end():
    from conftest import installed

    for dtypes, pixels, channels in itertools.product(
        [(F64, F64), (F32, F32), (F16, F16), (BF16, F32)], [*range(2, 70), 256, 257], (1, 16, 17)
    ):
        everything(installed("cpu"), *arguments(installed("cpu"), dtypes, (2, channels, pixels)))
    print("done")


@pytest.mark.large
def test_more_than_2_31_elements(backend):
    """Of input and grad_output, which take no memory where they are zero, and of output or grad_input: 4.3 GB."""
    torch.use_deterministic_algorithms(False)  # poisoning would take as long as the test
    n, c, p = 3, 96, (1 << 23) - 5  # 2.4e9
    x, dy = (lazy_zeros((n * c, p), BF16, backend.device).view(n, c, p) for _ in range(2))
    some = [0, 1, p // 3, p - 2, p - 1]
    for tensor in (x, dy):
        for image in range(n):
            tensor[image][:, some] = randn((c, len(some)), BF16, backend.device)
    b = randn(c, BF16, backend.device)
    y, mean, rstd = forward(backend, x, None, b)
    check_forward([rows(t[..., some]) for t in (y, mean, rstd)], rows(x[..., some]), None, b, EPS)
    assert torch.equal(y[2, :, p // 2], b)
    del y
    dx, dw, db = backward(backend, dy, x, mean, rstd, None, b)
    check_backward((rows(dx[..., some]), dw, db), rows(dy[..., some]), rows(x[..., some]), None, BF16, EPS)
    assert not dx[2, :, p // 2].any()


# ---- derivatives -----------------------------------------------------------------------------------------------------


def double(*shape):
    return torch.randn(shape, dtype=F64)


def norm_of(backend):
    return lambda x, w=None, b=None: forward(backend, x, w, b)[0]


def formula(x, w=None, b=None):
    """Written out; autograd differentiates this to any order."""
    d = x - x.mean(-3, keepdim=True)
    y = d / (d.square().mean(-3, keepdim=True) + EPS).sqrt()
    y = y if w is None else y * w[..., None, None]
    return y if b is None else y + b[..., None, None]


def assert_equal(actual, expected):
    """Equal but for rounding in double: up to some hundred operations of relative error 1e-16."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


CASES = [
    (weight, bias, requires_grad)
    for weight, bias in itertools.product([True, False], repeat=2)
    for requires_grad in itertools.product([True, False], repeat=1 + weight + bias)
    if any(requires_grad)
]


@pytest.mark.parametrize(("weight", "bias", "requires_grad"), CASES)
@formats
def test_gradcheck(backend, weight, bias, requires_grad, memory_format):
    """Reverse, forward, and batched; forward over reverse and reverse over reverse."""
    torch.use_deterministic_algorithms(False)
    x = double(2, 3, 2, 2).to(backend.device).to(memory_format=memory_format)
    tensors = [x, *([double(3).to(backend.device)] * weight), *([double(3).to(backend.device)] * bias)]
    inputs = [t.clone().requires_grad_(r) for t, r in zip(tensors, requires_grad, strict=True)]

    def function(x, *parameters):
        parameters = list(parameters)
        w = parameters.pop(0) if weight else None
        b = parameters.pop(0) if bias else None
        return forward(backend, x, w, b)[0]

    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("order", [1, 2, 3])
@formats
def test_higher_order(backend, order, memory_format):
    tensors = [double(2, 5, 3, 2).to(memory_format=memory_format), double(5), double(5)]
    directions = [double(2, 5, 3, 2), double(5), double(5)]

    def derivative(function):
        inputs = [t.clone().requires_grad_() for t in tensors]
        value = function(*inputs).pow(3).sum()
        for _ in range(order):
            gradients = torch.autograd.grad(value, inputs, create_graph=True)
            value = sum((g * c).sum() for g, c in zip(gradients, directions, strict=True))
        return value

    assert_equal(derivative(norm_of(backend)), derivative(formula))


@all_dtypes
@formats
def test_requires_grad(backend, dtypes, memory_format):
    """Exactly the gradients asked for, which are those of the operator."""
    x, dy, w, b = arguments(backend, dtypes, (2, 6, 3, 5))
    x = x.to(memory_format=memory_format)
    right = everything(backend, x, dy, w, b)[3:]
    for mask in MASKS:
        inputs = [t.detach().requires_grad_(wanted) for t, wanted in zip((x, w, b), mask, strict=True)]
        y, mean, rstd = forward(backend, *inputs)
        assert y.requires_grad == any(mask) and not mean.requires_grad and not rstd.requires_grad
        if any(mask):
            y.backward(dy)
        for wanted, tensor, gradient in zip(mask, inputs, right, strict=True):
            assert torch.equal(tensor.grad, gradient) if wanted else tensor.grad is None, mask
    for weight, bias in ((w, None), (None, b)):
        p = (w if bias is None else b).detach().requires_grad_()
        forward(backend, x, *(None if t is None else p for t in (weight, bias)))[0].backward(dy)
        expected = everything(backend, x, dy, weight, bias)[4 if bias is None else 5]
        assert torch.equal(p.grad, expected)


def test_saved_for_backward(backend):
    """No bias beside a weight; a changed input is noticed."""
    saved = []
    x, w, b = (t.requires_grad_() for t in (double(2, 5, 3, 3), double(5), double(5)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        forward(backend, x, w, b)
    assert {x.data_ptr(), w.data_ptr()} < set(saved) and b.data_ptr() not in saved and len(saved) == 4
    x = x * 1
    y = forward(backend, x)[0]
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_transforms(backend):
    norm = norm_of(backend)
    x, w, b, v = double(2, 5, 3, 2), double(5), double(5), double(2, 5, 3, 2)
    value = lambda f: lambda *t: f(*t).pow(3).sum()  # noqa: E731
    for actual, expected in zip(
        grad(value(norm), (0, 1, 2))(x, w, b), grad(value(formula), (0, 1, 2))(x, w, b), strict=True
    ):
        assert_equal(actual, expected)
    assert_equal(hessian(value(norm))(x, w, b), hessian(value(formula))(x, w, b))
    assert_equal(jvp(norm, (x, w, b), (v, b, w)), jvp(formula, (x, w, b), (v, b, w)))
    for in_dims in ((0, None, None), (2, 0, None), (None, 0, 0)):
        shapes = [(2, 5, 3, 2), (5,), (5,)]
        batched = [
            double(*shape) if d is None else double(*shape[:d], 4, *shape[d:])
            for shape, d in zip(shapes, in_dims, strict=True)
        ]
        assert_equal(vmap(norm, in_dims)(*batched), vmap(formula, in_dims)(*batched))
        for actual, expected in zip(
            vmap(grad(value(norm), (0, 1, 2)), in_dims)(*batched),
            vmap(grad(value(formula), (0, 1, 2)), in_dims)(*batched),
            strict=True,
        ):
            assert_equal(actual, expected)


# ---- compilers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weight", "bias"), list(itertools.product([True, False], repeat=2)))
@formats
def test_opcheck(backend, weight, bias, memory_format):
    torch.use_deterministic_algorithms(False)
    ops = operators(backend)
    x = torch.randn(3, 4, 2, 5).to(memory_format=memory_format).requires_grad_()
    w = torch.randn(4, requires_grad=True) if weight else None
    b = torch.randn(4, requires_grad=True) if bias else None
    torch.library.opcheck(ops.channels_first_forward.default, (x, w, b, EPS))
    _, mean, rstd = forward(backend, x, w, b)
    for mask in MASKS:
        dy = torch.randn(3, 4, 2, 5, requires_grad=True)
        torch.library.opcheck(ops.channels_first_backward.default, (dy, x, mean, rstd, w, b, mask))


@pytest.mark.parametrize("layout", ["sliced", "sliced channels last", "transposed", "expanded", "one pixel", "empty"])
def test_opcheck_layouts(backend, layout):
    """Strides of the outputs are those that the shape functions promise, whatever those of the inputs."""
    x = {
        "sliced": torch.randn(4, 6, 3, 5)[::2, 1:5],
        "sliced channels last": torch.randn(4, 6, 3, 5).to(memory_format=LAST)[::2, 1:5],
        "transposed": torch.randn(2, 4, 3, 5).transpose(2, 3),
        "expanded": torch.randn(2, 4, 1, 1).expand(2, 4, 3, 5),
        "one pixel": torch.randn(2, 4, 1, 1),
        "empty": torch.randn(0, 4, 3, 5),
    }[layout]
    ops = operators(backend)
    torch.library.opcheck(ops.channels_first_forward.default, (x,))
    _, mean, rstd = forward(backend, x)
    torch.library.opcheck(ops.channels_first_backward.default, (torch.randn(x.shape), x, mean, rstd, None, None, ALL))


# Compiled code may order the sums around the operator in its own way.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@formats
def test_compile(memory_format):
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    norm = LayerNorm2d(8)

    def step(x):
        return norm(x * 2).sin()

    compiled = torch.compile(step, fullgraph=True)
    for n, h in ((2, 3), (3, 3), (4, 5), (5, 7)):
        x = torch.randn(n, 8, h, 4).to(memory_format=memory_format).requires_grad_()
        results = []
        for function in (step, compiled):
            y = function(x)
            gradients = torch.autograd.grad(y.sum(), (x, *norm.parameters()))
            for t in (y, gradients[0]):
                assert t.is_contiguous(memory_format=memory_format)
            results.append((y, *gradients))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("order", [1, 2])
@formats
def test_compiled_autograd(backend, order, memory_format):
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()

    def gradients(n):
        x = torch.linspace(-1, 2, 24 * n, dtype=F64).exp().reshape(n, 4, 2, 3).to(memory_format=memory_format)
        x, w, b = (t.requires_grad_() for t in (x, *torch.linspace(1, 2, 8, dtype=F64).view(2, 4).clone()))
        w, b = (t.detach().requires_grad_() for t in (w, b))
        value = forward(backend, x, w, b)[0].sin().sum()
        if order == 2:
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            value = gradient.square().sum()
        value.backward()
        return [t.grad for t in (x, w, b) if t.grad is not None]

    for n in (3, 4, 5):
        expected = gradients(n)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            actual = gradients(n)
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)  # the same kernels; sums around them may differ


def test_export():
    module, x = LayerNorm2d(8), torch.randn(3, 8, 4, 5)
    with layernorm_ext.trace_as("kernel"):
        program = torch.export.export(module, (x,), dynamic_shapes={"input": {0: torch.export.Dim("batch")}})
    assert torch.ops.layernorm.channels_first_forward.default in [node.target for node in program.graph.nodes]
    x = torch.randn(7, 8, 4, 5)
    assert torch.equal(program.module()(x), module(x))


# ---- errors ----------------------------------------------------------------------------------------------------------

X, STATISTICS = torch.ones(2, 3, 4, 4), torch.ones(2, 1, 4, 4)
FORWARD = {
    "input has one dimension": (
        (torch.ones(3), None, None),
        r"Expected input of shape [N, C, *], but got input of size[3]",
    ),
    "weight has another shape": (
        (X, torch.ones(4), None),
        "Expected weight of one number for each channel, but got weight of shape [4] and input of 3 channels",
    ),
    "bias has more dimensions": (
        (X, None, torch.ones(3, 1, 1)),
        "Expected bias of one number for each channel, but got bias of shape [3, 1, 1] and input of 3 channels",
    ),
    "weight is of integers": (
        (X, torch.ones(3).long(), None),
        "Expected weight of dtype Double, Float, Half or BFloat16, but got weight of dtype Long",
    ),
    "input is of integers": ((X.long(), None, None), "but got input of dtype Long"),
}
BACKWARD = {
    "as in forward": ({"weight": torch.ones(4)}, FORWARD["weight has another shape"][1]),
    "grad_output has another shape": (
        {"grad_output": torch.ones(2, 3, 4, 5)},
        "Expected grad_output to be of the shape of input, but got grad_output of shape [2, 3, 4, 5] and input of "
        "shape [2, 3, 4, 4]",
    ),
    "grad_output has another dtype": (
        {"grad_output": X.double()},
        "Expected grad_output to be of the dtype of input, but got grad_output of dtype Double and input of dtype "
        "Float",
    ),
    "mean has another shape": (
        {"mean": torch.ones(2, 4, 4)},
        "Expected mean of shape [2, 1, 4, 4], but got mean of shape [2, 4, 4]",
    ),
    "rstd has another dtype": (
        {"rstd": STATISTICS.double()},
        "Expected rstd of dtype Float for input of dtype Float, but got rstd of dtype Double",
    ),
}


def refuses(message, function, *arguments):
    """Check that the kernels refuse, also where autograd is off, and that the shape functions do."""
    for context in (torch.enable_grad, torch.inference_mode, lambda: FakeTensorMode(allow_non_fake_inputs=True)):
        with context(), pytest.raises(RuntimeError) as refusal:
            function(*arguments)
        assert message in str(refusal.value)


@pytest.mark.parametrize(("arguments", "message"), FORWARD.values(), ids=FORWARD.keys())
def test_errors_of_forward(backend, arguments, message):
    refuses(message, operators(backend).channels_first_forward, *arguments)


@pytest.mark.parametrize(("changes", "message"), BACKWARD.values(), ids=BACKWARD.keys())
def test_errors_of_backward(backend, changes, message):
    arguments = {"grad_output": X, "input": X, "mean": STATISTICS, "rstd": STATISTICS, "weight": None, "bias": None}
    refuses(message, operators(backend).channels_first_backward, *{**arguments, **changes}.values(), ALL)


def test_other_device(backend):
    message = "Expected weight to be on the device of input, but got weight on meta and input on cpu"
    with pytest.raises(RuntimeError, match=message):
        operators(backend).channels_first_forward(X, torch.ones(3, device="meta"))


@pytest.mark.skipif(layernorm_ext._build_info.with_cuda, reason="the package was built with CUDA")
def test_no_cuda_kernels():
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match="layernorm_ext was built without CUDA kernels"):
        torch.ops.layernorm.channels_first_forward.default.redispatch(keys, X, None, None, EPS)


# ---- function and module ---------------------------------------------------------------------------------------------


@formats
def test_function(memory_format):
    """Equals the norm of the permuted rows, whose kernel it is where channels are last."""
    x = torch.randn(2, 6, 4, 5).to(memory_format=memory_format)
    w, b = torch.randn(6), torch.randn(6)
    expected = layer_norm(x.permute(0, 2, 3, 1), (6,), w, b, 1e-6).permute(0, 3, 1, 2)
    actual = layer_norm_2d(x, w, b)
    if memory_format is LAST:
        assert torch.equal(actual, expected)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)  # two results within 5e-7 of the exact one


def test_dimensions():
    for shape in ((3,), (2, 3), (2, 3, 4), (2, 3, 4, 4, 4)):
        with pytest.raises(RuntimeError, match=r"Expected input of shape \[N, C, H, W\], but got input of size\["):
            layer_norm_2d(torch.ones(shape))
    with pytest.raises(
        RuntimeError, match=r"Expected input of shape \[N, 4, H, W\], but got input of size\[2, 3, 4, 4\]"
    ):
        LayerNorm2d(4, elementwise_affine=False)(X)


def test_overridden():
    """A tensor subclass is asked once, for layer_norm_2d."""
    asked = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            asked.append(function)
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

    y = layer_norm_2d(X.as_subclass(Asked), torch.ones(3))
    assert asked == [layer_norm_2d] and torch.equal(y, layer_norm_2d(X))


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 1e-3, "dtype": F64}, {"device": "meta"}],
    ids=str,
)
def test_module(options):
    norm = LayerNorm2d(6, **options)
    assert isinstance(norm, LayerNorm) and norm.normalized_shape == (6,)
    rows_norm = LayerNorm(6, **{"eps": 1e-6, **options})
    assert repr(norm) == repr(rows_norm).replace("LayerNorm", "LayerNorm2d", 1)
    assert [(k, v.shape, v.dtype, v.device) for k, v in norm.state_dict().items()] == [
        (k, v.shape, v.dtype, v.device) for k, v in rows_norm.state_dict().items()
    ]
    if options.get("device") == "meta":
        assert norm(torch.empty(2, 6, 3, 3, device="meta")).shape == (2, 6, 3, 3)
        return
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    rows_norm.load_state_dict(norm.state_dict())
    x = torch.randn(2, 6, 3, 4, dtype=options.get("dtype"))
    expected = rows_norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    torch.testing.assert_close(norm(x), expected, rtol=1e-6, atol=1e-6)  # two results within 5e-7 of the exact one
    assert torch.equal(copy.deepcopy(norm)(x), norm(x))


def test_signature():
    """That of torch's LayerNorm, but for the first argument and eps, which is ConvNeXt's."""
    ours, rows = (inspect.signature(cls.__init__).parameters for cls in (LayerNorm2d, torch.nn.LayerNorm))
    assert list(ours)[1:3] == ["num_channels", "eps"] and ours["eps"].default == 1e-6
    assert [(p.name, p.default) for p in ours.values()][3:] == [(p.name, p.default) for p in rows.values()][3:]
    assert inspect.signature(layer_norm_2d).parameters["eps"].default == 1e-6


def test_autocast():
    """The output keeps the dtype of the input."""
    norm, x = LayerNorm2d(6), torch.randn(2, 6, 3, 3).bfloat16()
    with torch.autocast("cpu", BF16):
        assert norm(x).dtype == BF16


def test_doctests():
    results = doctest.testmod(module_under_test, extraglobs={"torch": torch})
    assert results.attempted >= 4 and results.failed == 0
