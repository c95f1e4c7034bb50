"""LayerNorm over the channels of images [N, C, *]; in the reference, each pixel is a row.

Derivatives of every order and mode are in test_autograd.py, tracers and exporters in test_tracing.py.
"""

import inspect
import itertools
import re

import pytest
import torch
from reference import BF16, DTYPES_16_BIT, F32, F64, check_backward, check_forward, dtypes_id, statistics_dtype
from shapes import (
    ALL,
    MASKS,
    all_dtypes,
    amid_nans,
    as_rows,
    assert_same_bits,
    bits,
    check_images,
    data_dtypes,
    dtypes_and_offsets,
    every_second_column,
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

from layernorm_ext import LayerNorm, LayerNorm2d, layer_norm_2d

pytestmark = pytest.mark.usefixtures("poisoned_memory")

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


# Results


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
    """The statistics may have any layout too: torch's compiler may choose one."""
    x, dy, w, b = random_images(backend, (dtype, dtype), (2, 6, 4, 10))
    expected = run_images(backend, x, dy, w, b)
    for views in ((layout(x), dy), (x, layout(dy))):
        results = run_images(backend, *views, w, b)
        assert_same_bits(results, expected)
        assert results[0].is_contiguous() and results[3].is_contiguous()
    for images in (x, x.to(memory_format=CHANNELS_LAST)):
        _, mean, rstd, *gradients = run_images(backend, images, dy, w, b)
        statistics = layout(mean), layout(rstd)
        assert_same_bits(backend.ops.channels_first_backward(dy, images, *statistics, w, b, ALL), gradients)


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
    y, mean, rstd = backend.ops.channels_first_forward(x, None, b, EPS)
    check_forward([as_rows(t[..., some]) for t in (y, mean, rstd)], as_rows(x[..., some]), None, b, EPS)
    assert torch.equal(y[2, :, p // 2], b)
    del y
    dx, dw, db = backend.ops.channels_first_backward(dy, x, mean, rstd, None, b, ALL)
    check_backward((as_rows(dx[..., some]), dw, db), as_rows(dy[..., some]), as_rows(x[..., some]), None, BF16, EPS)
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


# Autograd and compilers


@pytest.mark.parametrize("weight, bias", [(True, True), (True, False), (False, True), (False, False)])
@formats
def test_first_and_second_derivatives(backend, weight, bias, memory_format):
    """Reverse and forward mode agree with finite differences, also combined and batched by vmap."""
    torch.use_deterministic_algorithms(False)
    tensors = [randn((2, 3, 2, 2), F64, backend.device).to(memory_format=memory_format)]
    tensors += [randn(3, F64, backend.device) for _ in range(weight + bias)]
    inputs = [t.requires_grad_() for t in tensors]

    def norm(x, *parameters):
        w = parameters[0] if weight else None
        return backend.ops.channels_first_forward(x, w, parameters[-1] if bias else None, EPS)[0]

    assert gradcheck(norm, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(norm, inputs, check_fwd_over_rev=True, check_batched_grad=True)


@all_dtypes
@formats
def test_autograd_computes_what_requires_grad(backend, dtypes, memory_format):
    """`.grad` has the bits of the operator's gradient, and is None for tensors that require none."""
    x, dy, w, b = random_images(backend, dtypes, (2, 6, 3, 5))
    x = x.to(memory_format=memory_format)
    for tensors, mask in itertools.product(((x, w, b), (x, w, None), (x, None, b)), MASKS):
        inputs = [None if t is None else t.detach().requires_grad_(m) for t, m in zip(tensors, mask, strict=True)]
        y = backend.ops.channels_first_forward(*inputs, EPS)[0]
        if y.requires_grad:
            y.backward(dy)
        gradients = run_images(backend, x, dy, *tensors[1:])[3:]
        expected = [g if t is not None and t.requires_grad else None for t, g in zip(inputs, gradients, strict=True)]
        assert_same_bits([None if t is None else t.grad for t in inputs], expected, mask)


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
    dy, ops = torch.randn(x.shape), backend.ops
    for weight, bias in ((w, b), (w, None), (None, b), (None, None)):
        _, mean, rstd = ops.channels_first_forward(x, weight, bias)
        options = {"test_utils": ("test_schema", "test_faketensor")}
        torch.library.opcheck(ops.channels_first_forward.default, (x, weight, bias), **options)
        for mask in MASKS:
            arguments = (dy, x, mean, rstd, weight, bias, mask)
            torch.library.opcheck(ops.channels_first_backward.default, arguments, **options)
    if layout in ("contiguous", "channels_last"):
        x, dy, w, b = (t.detach().requires_grad_() for t in (x, dy, w, b))
        torch.library.opcheck(ops.channels_first_forward.default, (x, w, b))
        torch.library.opcheck(ops.channels_first_backward.default, (dy, x, mean, rstd, w, b, ALL))


@formats
def test_compiled_module_keeps_the_memory_format(memory_format):
    """Also of the gradient, and when the sizes change."""
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    norm = LayerNorm2d(8)
    compiled = torch.compile(norm, fullgraph=True)
    for n, h in ((2, 3), (3, 3), (4, 5)):
        x = torch.randn(n, 8, h, 4).to(memory_format=memory_format).requires_grad_()
        output, right = compiled(x), norm(x)
        results, expected = ([y, *torch.autograd.grad(y, (x, *norm.parameters()), x)] for y in (output, right))
        assert_same_bits(results, expected)
        assert all(t.is_contiguous(memory_format=memory_format) for t in results[:2])


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


def test_errors_of_function_and_module():
    for shape in ((3,), (2, 3), (2, 3, 4), (2, 3, 4, 4, 4)):
        with pytest.raises(RuntimeError, match=r"Expected input of shape \[N, C, H, W\], but got input of size\["):
            layer_norm_2d(torch.ones(shape))
    message = r"Expected input of shape \[N, 4, H, W\], but got input of size\[2, 3, 4, 4\]"
    with pytest.raises(RuntimeError, match=message):
        LayerNorm2d(4, elementwise_affine=False)(X)
    message = "Expected weight to be on the device of input, but got weight on meta and input on cpu"
    with pytest.raises(RuntimeError, match=message):
        layer_norm_2d(X, torch.ones(3, device="meta"))


# Module


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"elementwise_affine": False}, {"eps": 1e-3, "dtype": F64}, {"device": "meta"}],
    ids=str,
)
@formats
def test_module_is_a_layer_norm_over_channels(options, memory_format):
    norm, rows_norm = LayerNorm2d(6, **options), LayerNorm(6, **{"eps": 1e-6, **options})
    assert isinstance(norm, LayerNorm) and norm.normalized_shape == (6,)
    assert repr(norm) == repr(rows_norm).replace("LayerNorm", "LayerNorm2d", 1)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    rows_norm.load_state_dict(norm.state_dict())
    x = torch.randn(2, 6, 3, 4, dtype=options.get("dtype"), device=options.get("device"))
    x = x.to(memory_format=memory_format)
    # Channels-last images use the row kernels. Otherwise each result is within 5e-7 of the exact one.
    tolerance = 0 if memory_format is CHANNELS_LAST else 1e-6
    expected = rows_norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    torch.testing.assert_close(norm(x), expected, rtol=tolerance, atol=tolerance)


def test_signature_is_torchs_but_for_channels_and_eps():
    """eps is ConvNeXt's."""
    ours, torchs = (inspect.signature(cls.__init__).parameters for cls in (LayerNorm2d, torch.nn.LayerNorm))
    assert list(ours)[1:3] == ["num_channels", "eps"] and ours["eps"].default == 1e-6
    assert [(p.name, p.default) for p in ours.values()][3:] == [(p.name, p.default) for p in torchs.values()][3:]
    assert inspect.signature(layer_norm_2d).parameters["eps"].default == 1e-6
