"""The family over the channels of images [N, C, *], and the kernels for contiguous images.

Tracers and exporters are in test_tracing.py, scripts in test_script.py.
"""

import inspect
import itertools
import re

import pytest
import torch
from reference import BF16, DTYPES_16_BIT, F16, F32, F64, check_backward, check_forward, dtypes_id, statistics_dtype
from shapes import (
    ALL,
    MASKS,
    all_dtypes,
    amid_nans,
    as_rows,
    assert_same_bits,
    backward_images,
    bits,
    check_images,
    data_dtypes,
    dtypes_and_offsets,
    every_second_column,
    forward_images,
    huge,
    huge_rows,
    lazy_zeros,
    misaligned,
    negative,
    randn,
    run_images,
    transposed,
    with_gaps,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

import layernorm_ext
from layernorm_ext import (
    LayerNorm2d,
    ada_layer_norm_2d,
    ada_rms_norm_2d,
    add_layer_norm_2d,
    add_rms_norm_2d,
    layer_norm_2d,
    rms_norm_2d,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EPS = 1e-6
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


def random_images(backend, dtypes, shape, offset=0):
    """Return input, grad_output, weight and bias."""
    x, dy = (randn(shape, dtypes[0], backend.device, offset) for _ in range(2))
    return x, dy, *(randn(shape[1], dtypes[1], backend.device) for _ in range(2))


def run_and_check(backend, x, dy, w=None, b=None):
    """Check all results against float64 and return them."""
    results = run_images(backend, x, dy, w, b)
    output, mean, rstd, grad_input, *_ = results
    assert output.shape == grad_input.shape == x.shape and mean.shape == rstd.shape == (x.shape[0], 1, *x.shape[2:])
    check_images(results, x, dy, w, b, context=x.shape)
    return results


# The kernels for contiguous images


@all_dtypes
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_results_match_float64(backend, dtypes, shapes):
    """All arguments are surrounded by NaN, which shows reads outside of them."""
    for shape in shapes:
        x, dy, w, b = (amid_nans(t) for t in random_images(backend, dtypes, shape))
        before = bits(x), bits(dy)
        run_and_check(backend, x, dy, w, b)
        assert torch.equal(bits(x), before[0]) and torch.equal(bits(dy), before[1]), "arguments have changed"


@all_dtypes
@pytest.mark.parametrize("shape", [(2, 6, 4, 5), (3, 6, 1, 1), (1, 6, 2, 3), (2, 1, 3, 3), (1, 1, 1, 1)], ids=str)
@formats
def test_results_keep_the_memory_format_of_the_input(backend, dtypes, shape, memory_format):
    x, dy, w, b = random_images(backend, dtypes, shape)
    x = x.to(memory_format=memory_format)
    for gradient_format in (CONTIGUOUS, CHANNELS_LAST):
        output, _, _, grad_input, *_ = run_and_check(backend, x, dy.to(memory_format=gradient_format), w, b)
        for result in (output, grad_input):
            assert result.is_contiguous(memory_format=memory_format)
            assert result.stride() == torch.empty_like(x).stride()


def transposed_pixels(images):
    return images.mT.contiguous().mT


@data_dtypes
@pytest.mark.parametrize(
    "layout", [transposed, transposed_pixels, every_second_column, with_gaps, misaligned, negative]
)
def test_other_layouts_give_the_bits_of_a_copy(backend, dtype, layout):
    """Other dense layouts are kept, with the bits of rows. The statistics may have any layout too."""
    x, dy, w, b = random_images(backend, (dtype, dtype), (2, 6, 4, 10))
    is_dense = layout in (transposed, transposed_pixels)
    for views in ((layout(x), dy), (x, layout(dy))):
        as_rows = is_dense and views[1] is dy
        copy = x.to(memory_format=CHANNELS_LAST) if as_rows else x
        results = run_images(backend, *views, w, b)
        assert_same_bits(results, run_images(backend, copy, dy, w, b))
        assert results[0].stride() == results[3].stride() == torch.empty_like(views[0]).stride()
    for images in (x, x.to(memory_format=CHANNELS_LAST)):
        _, mean, rstd, *gradients = run_images(backend, images, dy, w, b)
        statistics = layout(mean), layout(rstd)
        assert_same_bits(backward_images(backend, dy, images, *statistics, w, b), gradients)


def test_sliced_channels_last_images_stay_channels_last(backend):
    x, dy, w, b = random_images(backend, (F32, F32), (2, 6, 4, 10))
    x = x.to(memory_format=CHANNELS_LAST)
    results = run_images(backend, torch.cat([x, x], 1)[:, 6:], dy, w, b)
    assert_same_bits(results, run_images(backend, x, dy, w, b))
    assert all(results[i].is_contiguous(memory_format=CHANNELS_LAST) for i in (0, 3))


@data_dtypes
@pytest.mark.parametrize("shape", [(1, 5, 3, 4), (2, 1, 3, 4), (2, 5, 1, 1), (1, 1, 1, 1)], ids=str)
def test_expanded_tensors(backend, dtype, shape):
    x, dy = randn(shape, dtype, backend.device).expand(2, 5, 3, 4), randn((2, 5, 3, 4), dtype, backend.device)
    w = randn(1, dtype, backend.device).expand(5)
    run_and_check(backend, x, dy, w, w)
    run_and_check(backend, dy, x, w, w)


@all_dtypes
@pytest.mark.parametrize("shape", [(0, 4, 2, 2), (2, 0, 3, 3), (2, 3, 0, 4), (0, 0, 0, 0)], ids=str)
@formats
def test_empty_tensors(backend, dtypes, shape, memory_format):
    x, dy, w, b = random_images(backend, dtypes, shape)
    results = run_images(backend, x.to(memory_format=memory_format), dy, w, b)
    statistics = (shape[0], 1, *shape[2:])
    assert [tuple(r.shape) for r in results] == [shape, statistics, statistics, shape, shape[1:2], shape[1:2]]
    assert [r.dtype for r in results] == [dtypes[0], *[statistics_dtype(dtypes[0])] * 2, dtypes[0], *[dtypes[1]] * 2]
    assert not any(r.any() for r in results)


@all_dtypes
@pytest.mark.parametrize("shape", [(1, 3, 2), (9, 20, 3), (2, 40, 300)], ids=str)
def test_absent_parameters_and_masks(backend, dtypes, shape):
    """A requested gradient has the same bits whatever else is requested, and the others are None."""
    x, dy, w, b = random_images(backend, dtypes, shape)
    for parameters in ((w, b), (w, None), (None, b), (None, None)):
        expected = run_and_check(backend, x, dy, *parameters)
        for mask in MASKS:
            gradients = [t if requested else None for requested, t in zip(mask, expected[3:], strict=True)]
            assert_same_bits(run_images(backend, x, dy, *parameters, mask=mask)[3:], gradients, mask)


# Extreme values


@dtypes_and_offsets
def test_large_means_lose_no_precision(backend, dtypes, offset):
    for shape in ((2, 2, 9), (1, 31, 33), (2, 96, 20), (1, 768, 5)):
        x, _, w, b = random_images(backend, dtypes, shape, offset)
        run_and_check(backend, x, randn(shape, dtypes[0], backend.device, offset=1), w, b)


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
        run_and_check(backend, x, dy, w, w)


@all_dtypes
def test_constant_pixels_give_exactly_the_bias(backend, dtypes):
    """The gradient of the weight is exactly zero."""
    for channels in (1, 2, 3, 10, 49, 96, 257, 768):
        x = torch.tensor([0.1, -0.7, 1 / 3, 1234.567, 0.0], dtype=dtypes[0], device=backend.device)
        x = x.repeat(1, channels, 1)
        _, dy, w, b = random_images(backend, dtypes, x.shape)
        output, _, _, _, grad_weight, _ = run_images(backend, x, dy, w, b)
        assert torch.equal(output, b.to(dtypes[0])[:, None].expand_as(x)), channels
        assert not grad_weight.any(), channels


@huge
@pytest.mark.parametrize("channels", [2, 7, 64, 300])
def test_huge_numbers(backend, dtype, magnitude, channels):
    """Sums and squares overflow. The ordinary pixel 3 keeps the bits that it has alone."""
    x = huge_rows(dtype, magnitude, channels, backend.device).t()[None].contiguous()
    _, dy, w, b = random_images(backend, (dtype, dtype), x.shape)
    results = run_and_check(backend, x, dy, w, b)
    # An image of one pixel would be normalized as a row.
    two_pixels = [torch.cat([t[..., 3:4], torch.zeros_like(t[..., :1])], 2) for t in (x, dy)]
    expected = run_images(backend, *two_pixels, w, b)
    assert_same_bits([result[..., 3:4] for result in results[:4]], [right[..., :1] for right in expected[:4]])


@data_dtypes
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("pixels", [5, 40, 300])
def test_nan_and_inf_stay_in_their_pixel(backend, dtype, value, pixels):
    """Other pixels keep their bits. The gradient of the weight, which adds up all pixels, becomes NaN."""
    x, dy, w, b = random_images(backend, (dtype, dtype), (2, 20, pixels))
    expected = run_images(backend, x, dy, w, b)
    for pixel in (0, pixels // 2, pixels - 1):
        bad_x, bad_dy = x.clone(), dy.clone()
        bad_x[1, 17, pixel] = bad_dy[1, 17, pixel] = value
        others = torch.arange(2 * pixels) != pixels + pixel
        results = run_images(backend, bad_x, dy, w, b)
        assert results[4].isnan().all() and torch.equal(results[5], expected[5])
        grad_input = run_images(backend, x, bad_dy, w, b)[3]
        for actual, right in zip((*results[:4], grad_input), (*expected[:4], expected[3]), strict=True):
            actual, right = as_rows(actual), as_rows(right)
            assert_same_bits([actual[others]], [right[others]], pixel)
            assert not actual[~others].isfinite().any(), pixel


@pytest.mark.parametrize("dtypes", DTYPES_16_BIT, ids=dtypes_id)
def test_subnormal_numbers_are_kept(backend, dtypes):
    """AVX-512's own conversion to bf16 flushes them to zero."""
    smallest = torch.finfo(dtypes[0]).smallest_normal
    x, dy, w, _ = random_images(backend, dtypes, (2, 10, 40))
    tiny = (dy.double() * smallest / 4).to(dtypes[0])
    grad_input = run_and_check(backend, x, tiny, torch.ones_like(w))[3]
    assert ((grad_input != 0) & (grad_input.abs() < smallest)).sum() > grad_input.numel() / 2
    b = (w.double() * smallest / 8).to(dtypes[1])
    output = run_images(backend, x * 0, dy, None, b)[0]
    assert torch.equal(output, b.to(dtypes[0])[:, None].expand_as(output)) and output.any()


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
    y, mean, rstd = forward_images(backend, x, None, b)
    check_forward([as_rows(t[..., some]) for t in (y, mean, rstd)], as_rows(x[..., some]), None, b)
    assert torch.equal(y[2, :, p // 2], b)
    del y
    dx, dw, db = backward_images(backend, dy, x, mean, rstd, None, b)
    check_backward((as_rows(dx[..., some]), dw, db), as_rows(dy[..., some]), as_rows(x[..., some]), None, BF16)
    assert not dx[2, :, p // 2].any()


# Reproducible bits


@all_dtypes
def test_bits_of_a_pixel_depend_on_the_pixel_alone(backend, dtypes):
    """Other images and pixels, their order, the alignment and inference mode change nothing."""
    x, dy, w, b = random_images(backend, dtypes, (3, 37, 300), offset=10)
    expected = run_images(backend, x, dy, w, b)
    parts = [slice(0, 2), slice(1, 34), slice(37, 300), slice(290, 300), torch.randperm(300)]
    for images, pixels in itertools.product((slice(0, 1), slice(1, 3)), parts):
        results = run_images(backend, x[images, :, pixels], dy[images, :, pixels], w, b)
        assert_same_bits(results[:4], [right[images, :, pixels] for right in expected[:4]], images, pixels)
    with torch.inference_mode():
        assert_same_bits(run_images(backend, x, dy, w, b), expected)
    for gap, offset in ((0, 0), (0, 1), (1, 3), (5, 13)):
        views = [amid_nans(t, gap, offset) for t in (x, dy)]
        assert_same_bits(run_images(backend, *views, w, b), expected, gap, offset)


@pytest.mark.parametrize("dtypes", [(F64, F64), (F32, F32), (BF16, BF16), (BF16, F32)], ids=dtypes_id)
@pytest.mark.parametrize("shape", [(32, 40, 49), (3, 96, 1000), (70, 64, 9), (1, 3000, 40)], ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(backend, use_threads, dtypes, shape):
    arguments = random_images(backend, dtypes, shape, offset=10)
    use_threads(1)
    expected = run_images(backend, *arguments)
    for threads in (2, 3, 8):
        use_threads(threads)
        assert_same_bits(run_images(backend, *arguments), expected, threads)


# The family


def normalized(x, w, b, rms=False):
    """Return the output in terms of operations that autograd differentiates."""
    d = x if rms else x - x.mean(1, keepdim=True)
    y = d / (d.square().mean(1, keepdim=True) + EPS).sqrt()
    w, b = (
        t.view(*t.shape, *[1] * (x.dim() - max(t.dim(), 2))) if t.dim() > 1 else t[:, *[None] * (x.dim() - 2)]
        for t in (w, b)
    )
    return y * w + b


# Functions of input, residual, weight and bias, and their formulas.
FAMILY = {
    "layer": (lambda x, r, w, b: layer_norm_2d(x, w, b), normalized),
    "zero-centered layer": (
        lambda x, r, w, b: layer_norm_2d(x, w, b, zero_centered_weight=True),
        lambda x, w, b: normalized(x, w + 1, b),
    ),
    "memory-efficient layer": (lambda x, r, w, b: layer_norm_2d(x, w, b, memory_efficient=True), normalized),
    "rms": (lambda x, r, w, b: rms_norm_2d(x, w, EPS), lambda x, w, b: normalized(x, w, b * 0, True)),
    "add layer": (lambda x, r, w, b: add_layer_norm_2d(x, r, w, b), normalized),
    "add layer in place": (lambda x, r, w, b: add_layer_norm_2d(x, r * 1, w, b, inplace=True), normalized),
    "add rms": (
        lambda x, r, w, b: add_rms_norm_2d(x, r, w, EPS, zero_centered_weight=True),
        lambda x, w, b: normalized(x, w + 1, b * 0, True),
    ),
    "ada layer": (lambda x, r, w, b: ada_layer_norm_2d(x, w, b), lambda x, w, b: normalized(x, w + 1, b)),
    "ada rms": (lambda x, r, w, b: ada_rms_norm_2d(x, w, b), lambda x, w, b: normalized(x, w + 1, b, True)),
}
family = pytest.mark.parametrize("member", FAMILY)
any_rank = pytest.mark.parametrize("shape", [(6, 9), (3, 9, 20), (2, 9, 4, 5), (2, 9, 3, 2, 4)], ids=str)


def with_format(images, memory_format):
    """Return a copy of images of any rank with the channels last or not."""
    if memory_format is CONTIGUOUS:
        return images.contiguous()
    return images.movedim(1, -1).contiguous().movedim(-1, 1)


def parameter_shapes(shape):
    """Return the shapes of parameters: shared by all pixels, per image, per column of pixels, and per pixel."""
    n, c, *pixels = shape
    return {(c,), (n, c), (n, c, *[1] * len(pixels)), (1, c, *pixels), (*shape[:-1], 1)[: len(shape)], shape}


def results_of(function, tensors, gradients):
    """Return the outputs of a function, and the gradients of the tensors."""
    outputs = function(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [t for t in tensors if t.requires_grad]
    return outputs, torch.autograd.grad(outputs, wanted, gradients[: len(outputs)], materialize_grads=True)


@family
@any_rank
@formats
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_family_matches_the_formula(member, shape, memory_format, dtype):
    """Output and gradient keep the memory format of the input, for every shape of the parameters."""
    function, formula = FAMILY[member]
    adds = member.startswith("add")
    for parameter_shape in parameter_shapes(shape):
        if parameter_shape[1:2] not in ((), (9,)):
            continue
        x, r, *gradients = (with_format(randn(shape, dtype), memory_format) for _ in range(4))
        w, b = (randn(parameter_shape, dtype) for _ in range(2))
        w = torch.where(w.abs() < 0.5, 0.5, w)  # memory_efficient divides by it
        tensors = [t.requires_grad_() for t in (x, r, w, b)]
        wide = [t.detach().double().requires_grad_() for t in tensors]

        def exact(x, r, w, b, adds=adds):
            total = x + r if adds else x
            return (formula(total, w, b), total) if adds else formula(total, w, b)

        actual = results_of(function, tensors, gradients)
        expected = results_of(exact, wide, [g.double() for g in gradients])
        for group, right in zip(actual, expected, strict=True):
            for t, e in zip(group, right, strict=True):
                # Some ten roundings; the gradients of parameters sum up to 60 pixels.
                tolerance = 32 * torch.finfo(dtype).eps * max(1, e.abs().max().item())
                assert t.shape == e.shape and t.dtype == dtype
                torch.testing.assert_close(t.double(), e, rtol=0, atol=tolerance)
        for result in (actual[0][0], actual[1][0]):
            assert result.stride() == x.stride(), parameter_shape


@pytest.mark.parametrize("function", [add_layer_norm_2d, add_rms_norm_2d])
@formats
def test_float32_residual_of_16_bit_images(function, memory_format):
    x, r = (with_format(randn((2, 9, 4, 5), dtype), memory_format).requires_grad_() for dtype in (F16, F32))
    output, total = function(x, r)
    plain = layer_norm_2d if function is add_layer_norm_2d else rms_norm_2d
    assert total.dtype == F32 and torch.equal(total, x.float() + r)
    assert torch.equal(output, plain(total).to(F16))
    output.float().square().sum().backward()
    assert x.grad.dtype == F16 and r.grad.dtype == F32


@family
@formats
def test_first_and_second_derivatives(member, memory_format):
    """Reverse and forward mode agree with finite differences, also combined and batched by vmap."""
    torch.use_deterministic_algorithms(False)
    per_image = (2, 3) if member.startswith("ada") else (3,)
    tensors = [with_format(randn((2, 3, 2, 1), F64), memory_format) for _ in range(2)]
    tensors += [randn(per_image, F64).abs() + 0.5 for _ in range(2)]
    inputs = [t.requires_grad_() for t in tensors]
    function = FAMILY[member][0]
    forward = "place" not in member  # forward mode has no tangents for r * 1 within vmap
    assert gradcheck(
        function, inputs, check_forward_ad=forward, check_batched_grad=True, check_batched_forward_grad=forward
    )
    if "memory" not in member:
        assert gradgradcheck(function, inputs, check_fwd_over_rev=forward, check_batched_grad=True)


@family
@formats
def test_compiled_family_has_the_same_bits(member, memory_format):
    """Also the gradients, in the memory format of the input, and when the sizes change."""
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    function = FAMILY[member][0]
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, h in ((2, 3), (4, 5)):
        x, r, *gradients = (with_format(torch.randn(n, 8, h, 4), memory_format) for _ in range(4))
        w, b = torch.randn(n, 8), torch.randn(n, 8)
        tensors = [t.requires_grad_() for t in (x, r, w, b)]
        actual, expected = (results_of(f, tensors, gradients) for f in (compiled, function))
        for results, right in zip(actual, expected, strict=True):
            assert_same_bits(results, right)
        assert actual[0][0].stride() == actual[1][0].stride() == x.stride()


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
    """The shape functions predict the strides of all results."""
    torch.use_deterministic_algorithms(False)
    x = LAYOUTS[layout]().movedim(1, -1)
    r, dy, w = torch.randn(x.shape), torch.randn(x.shape), torch.randn(4)
    options = {"preserve_layout": True}
    utils = {"test_utils": ("test_schema", "test_faketensor")}
    _, mean, rstd = backend.ops.forward(x, (4,), w, **options)
    torch.library.opcheck(backend.ops.forward.default, (x, (4,), w), options, **utils)
    torch.library.opcheck(backend.ops.forward.residual, (x, r, (4,), w), options, **utils)
    torch.library.opcheck(backend.ops.backward.default, (dy, x, (4,), mean, rstd, w, None, ALL), options, **utils)


def test_in_place_addition_changes_the_residual():
    """Without a graph, the kernel writes to it. Autograd tracks the change, also of a view."""
    x, r = torch.randn(2, 8, 3, 4), torch.randn(2, 8, 3, 4)
    expected, total = add_layer_norm_2d(x, r)
    for recorded, view in itertools.product((False, True), repeat=2):
        changed = r.clone()
        residual = changed[:] if view else changed
        output, returned = add_layer_norm_2d(x.clone().requires_grad_(recorded), residual, inplace=True)
        assert returned is residual and returned.requires_grad == recorded
        assert_same_bits((output, changed), (expected, total))
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
        add_layer_norm_2d(x, r.requires_grad_(), inplace=True)


# Errors

X = torch.ones(2, 3, 4, 4)
SHAPE_ERROR = (
    "Expected {0} of shape [C], [N, C] or [N, C, *], with C = 3 and each other size equal to the input's or 1, but got "
    "{0} of shape {1} and input of shape [2, 3, 4, 4]"
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_norm_2d(X[0, :, 0, 0]), "Expected input of shape [N, C, *], but got input of size[3]"),
        (lambda: rms_norm_2d(X.long()), "but got input of dtype Long"),
        (lambda: layer_norm_2d(X, torch.ones(4)), SHAPE_ERROR.format("weight", "[4]")),
        (lambda: layer_norm_2d(X, None, torch.ones(3, 1)), SHAPE_ERROR.format("bias", "[3, 1]")),
        (lambda: rms_norm_2d(X, torch.ones(2, 3, 4)), SHAPE_ERROR.format("weight", "[2, 3, 4]")),
        (lambda: ada_rms_norm_2d(X, torch.ones(4, 3)), SHAPE_ERROR.format("scale", "[4, 3]")),
        (lambda: ada_layer_norm_2d(X, None, torch.ones(1, 3, 2, 1)), SHAPE_ERROR.format("shift", "[1, 3, 2, 1]")),
        (
            lambda: ada_layer_norm_2d(X, torch.ones(2, 3), torch.ones(1, 3, 4, 1)),
            "Expected scale and shift to have the same batch sizes, but got scale of shape [2, 3] and shift of shape",
        ),
        (lambda: ada_rms_norm_2d(X, torch.ones(3).long()), "Expected scale of dtype Double, Float, Half or BFloat16"),
        (
            lambda: layer_norm_2d(X, torch.ones(3, device="meta")),
            "Expected weight to be on the device of input, but got weight on meta and input on cpu",
        ),
        (
            lambda: add_layer_norm_2d(X, X[:1]),
            "Expected residual to be of the shape of input, but got residual of shape [1, 3, 4, 4] and input of shape",
        ),
        (lambda: add_rms_norm_2d(X, X.double()), "Expected residual to be of the dtype of input"),
        (lambda: LayerNorm2d(4, elementwise_affine=False)(X), "Expected input of shape [N, 4, *], but got input of"),
        (lambda: layernorm_ext.AdaRMSNorm2d(4)(X), "Expected input of shape [N, 4, *], but got input of size[2, 3, 4"),
    ],
)
def test_errors_name_the_argument_and_both_values(call, message):
    for context in (torch.enable_grad, torch.inference_mode, lambda: FakeTensorMode(allow_non_fake_inputs=True)):
        with context(), pytest.raises(RuntimeError, match=re.escape(message)):
            call()


# Modules


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "AddLayerNorm", "AddRMSNorm"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"elementwise_affine": False},
        {"eps": 1e-3, "dtype": F64},
        {"zero_centered_weight": True},
        {"device": "meta"},
    ],
    ids=str,
)
@formats
def test_module_is_that_of_rows_over_channels(name, options, memory_format):
    rows_class, images_class = getattr(layernorm_ext, name), getattr(layernorm_ext, name + "2d")
    default = {} if "RMS" in name else {"eps": 1e-6}
    norm, rows_norm = images_class(6, **options), rows_class(6, **default | options)
    assert isinstance(norm, rows_class) and repr(norm) == repr(rows_norm).replace(name, name + "2d", 1)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    rows_norm.load_state_dict(norm.state_dict())
    x = torch.randn(2, 6, 3, 4, dtype=options.get("dtype"), device=options.get("device"))
    inputs = [x.to(memory_format=memory_format)] * (2 if name.startswith("Add") else 1)
    outputs, expected = norm(*inputs), rows_norm(*(t.movedim(1, -1) for t in inputs))
    for y, e in zip(*(t if isinstance(t, tuple) else (t,) for t in (outputs, expected)), strict=True):
        # Channels-last images use the row kernels. Otherwise each result is within 5e-7 of the exact one.
        tolerance = 0 if memory_format is CHANNELS_LAST else 1e-6
        torch.testing.assert_close(y, e.movedim(-1, 1), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "AddLayerNorm", "AddRMSNorm"])
def test_signature_is_that_of_rows_but_for_channels_and_eps(name):
    """The eps of LayerNorm is ConvNeXt's."""
    images, rows = (
        [*inspect.signature(getattr(layernorm_ext, n).__init__).parameters.values()] for n in (name + "2d", name)
    )
    assert [p.name for p in images[1:3]] == ["num_channels", "eps"]
    assert images[2].default == (None if "RMS" in name else 1e-6)
    assert [(p.name, p.default, p.kind) for p in images[3:]] == [(p.name, p.default, p.kind) for p in rows[3:]]


def test_adaptive_modules_call_the_functions():
    x, scale, shift = torch.randn(2, 6, 3, 4), torch.randn(2, 6), torch.randn(2, 6)
    for name, function in (("AdaLayerNorm2d", ada_layer_norm_2d), ("AdaRMSNorm2d", ada_rms_norm_2d)):
        norm = getattr(layernorm_ext, name)(6, eps=0.1)
        assert torch.equal(norm(x, scale, shift), function(x, scale, shift, 0.1))
        assert repr(norm) == f"{name}(6, eps=0.1)"
