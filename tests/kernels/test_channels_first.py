"""The kernels for contiguous images [N, C, *].

The tests with the argument `run` in test_forward.py and test_backward.py also run these kernels. test_functions.py
tests results and derivatives of the functions.
"""

import itertools

import pytest
import torch
from support.backends import ALL, assert_same_bits, bits, check_images, run_images
from support.inputs import (
    all_dtypes,
    amid_nans,
    data_dtypes,
    every_second_column,
    misaligned,
    negative,
    randn,
    random_args,
    transposed,
    with_gaps,
)

import layernorm_ext

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CHANNELS_LAST = torch.channels_last

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


# The kernels for contiguous images


@all_dtypes
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_results_match_float64(backend, dtypes, shapes):
    """All arguments are surrounded by NaN, which shows reads outside of them."""
    for shape in shapes:
        x, dy, w, b = (amid_nans(t) for t in random_args(backend, dtypes, *shape))
        before = bits(x), bits(dy)
        check_images(run_images(backend, x, dy, w, b), x, dy, w, b, context=shape)
        assert torch.equal(bits(x), before[0]) and torch.equal(bits(dy), before[1]), "arguments have changed"


def transposed_pixels(images):
    return images.mT.contiguous().mT


def transposed_batch(images):
    return images.transpose(0, 1).contiguous().transpose(0, 1)


def transposed_rows(images):
    return images.transpose(1, 2).contiguous().transpose(1, 2)


def sliced_channels_last(images):
    """Return a view that is not dense; the results are."""
    images = images.to(memory_format=CHANNELS_LAST)
    return torch.cat([images, images], 1)[:, images.shape[1] :]


@data_dtypes
@pytest.mark.parametrize(
    "layout",
    [transposed, transposed_pixels, sliced_channels_last, every_second_column, with_gaps, misaligned, negative],
)
def test_other_layouts_give_the_bits_of_a_copy(backend, dtype, layout):
    """Other dense layouts are kept, with the bits of rows. The statistics may have any layout too."""
    x, dy, w, b = random_args(backend, (dtype, dtype), 2, 6, 4, 10)
    keeps_layout = layout in (transposed, transposed_pixels, sliced_channels_last)
    for views in ((layout(x), dy), (x, layout(dy))):
        as_rows = keeps_layout and views[1] is dy
        copy = x.to(memory_format=CHANNELS_LAST) if as_rows else x
        results = run_images(backend, *views, w, b)
        assert_same_bits(results, run_images(backend, copy, dy, w, b))
        assert results.output.stride() == results.grad_input.stride() == torch.empty_like(views[0]).stride()
    for images in (x, x.to(memory_format=CHANNELS_LAST)):
        results = run_images(backend, images, dy, w, b)
        statistics = layout(results.mean), layout(results.rstd)
        gradients = backend.backward(dy, images, (6,), *statistics, w, b, ALL, images=True)
        assert_same_bits(gradients, results.gradients)


# Reproducible bits


@all_dtypes
def test_bits_of_a_pixel_depend_on_the_pixel_alone(backend, dtypes):
    """Other images and pixels, their order and the alignment change nothing."""
    x, dy, w, b = random_args(backend, dtypes, 3, 37, 300, offset=10)
    expected = run_images(backend, x, dy, w, b)
    parts = [slice(0, 2), slice(1, 34), slice(37, 300), slice(290, 300), torch.randperm(300)]
    for images, pixels in itertools.product((slice(0, 1), slice(1, 3)), parts):
        results = run_images(backend, x[images, :, pixels], dy[images, :, pixels], w, b)
        assert_same_bits(results.rows(), expected.rows((images, slice(None), pixels)), images, pixels)
    for gap, offset in ((0, 0), (0, 1), (1, 3), (5, 13)):
        views = [amid_nans(t, gap, offset) for t in (x, dy)]
        assert_same_bits(run_images(backend, *views, w, b), expected, gap, offset)


@data_dtypes
@pytest.mark.parametrize("batch", [(1, 5, 6), (3, 5, 6), (1, 5, 1), (3, 5, 1), (3, 1, 1), (1, 1, 1)], ids=str)
def test_bits_of_an_image_depend_on_the_image_alone(backend, dtype, batch):
    """Also where parameters vary between the pixels. In layouts that keep the pixels apart, rows are normalized."""
    x, dy = (randn((3, 37, 5, 6), dtype, backend.device, offset=10) for _ in range(2))
    n, *pixels = batch
    w, b = (randn((n, 37, *pixels), dtype, backend.device) for _ in range(2))
    for layout in (torch.clone, transposed_batch, transposed_pixels, transposed_rows):
        expected = run_images(backend, layout(x), layout(dy), w, b)
        for n in range(3):
            one, own = slice(n, n + 1), slice(n, n + 1) if len(w) > 1 else slice(None)
            for images in (layout(x)[one], layout(x[one])):
                results = run_images(backend, images, layout(dy[one]), w[own], b[own])
                assert_same_bits(results.rows(), expected.rows(one), n)


def test_autocast_keeps_the_single_node_of_the_graph():
    """Otherwise views move the channels, which takes several times as long for a small call."""
    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert layernorm_ext.layer_norm_2d(x, torch.ones(8)).grad_fn.name() == "LayerNormBackward"
