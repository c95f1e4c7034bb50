"""No bit of the results depends on the memory layout, the other rows, the threads, or repetition."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from support.backends import ALL, assert_same_bits, installed, run, run_images, run_pixels
from support.family import MEMBERS, with_gradients
from support.inputs import (
    LAYOUTS,
    all_dtypes,
    amid_nans,
    arguments,
    data_dtypes,
    output_dtypes,
    randn,
    random_args,
    transposed,
)
from support.reference import BF16, DTYPES, F16, F32, F64, RESIDUALS, dtypes_id, statistics_dtype

import layernorm_ext

pytestmark = pytest.mark.usefixtures("poisoned_memory")


# Layout


def transposed_batch(t):
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def transposed_rows(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def transposed_pixels(t):
    return t.mT.contiguous().mT


def channels_last(t):
    return t.to(memory_format=torch.channels_last)


def sliced_channels_last(images):
    """Return a view with gaps between pixels, which results do not have."""
    images = channels_last(images)
    return torch.cat([images, images], 1)[:, images.shape[1] :]


@all_dtypes
@pytest.mark.parametrize("normalized_shape", [(10,), (4, 10)], ids=str)
@pytest.mark.parametrize("layout", [*LAYOUTS, transposed_batch, channels_last])
def test_layout(backend, dtypes, normalized_shape, layout):
    """Input, grad_output, both or the parameters have the layout. All results are contiguous."""
    x, dy = (randn((2, 6, 4, 10), dtypes[0], backend.device) for _ in range(2))
    w, b = (randn(normalized_shape, dtypes[1], backend.device) for _ in range(2))
    expected = run(backend, x, dy, w, b, normalized_shape=normalized_shape)
    choices = [(layout(x), dy, w, b), (x, layout(dy), w, b), (layout(x), layout(dy), w, b)]
    if layout in LAYOUTS:
        choices.append((x, dy, layout(w), layout(b)))
    for views in choices:
        results = run(backend, *views, normalized_shape=normalized_shape)
        assert_same_bits(results, expected)
        assert all(r.is_contiguous() and not r.is_neg() for r in results if r is not None)


@all_dtypes
@pytest.mark.parametrize("cols", [5, 64, 257, 1100, 5000])
def test_alignment_and_row_stride(backend, dtypes, cols):
    """All four arguments are views at several offsets, with gaps between the rows and without."""
    arguments = random_args(backend, dtypes, 9, cols, offset=10)
    expected = run(backend, *arguments)
    for offset in (0, 1, 3, 8, 13):
        for gap in (0, 1, 7):
            views = [amid_nans(t, gap, offset) for t in arguments[:2]]
            views += [amid_nans(t[None], gap, offset + 1)[0] for t in arguments[2:]]
            assert_same_bits(run(backend, *views), expected, offset, gap)


@data_dtypes
@pytest.mark.parametrize("layout", [*LAYOUTS, transposed_pixels, sliced_channels_last])
def test_layout_of_images(backend, dtype, layout):
    """Results have the strides of torch.empty_like(input), and the bits of contiguous or channels_last images.

    The statistics that backward gets may have any layout too.
    """
    x, dy, w, b = random_args(backend, (dtype, dtype), 2, 6, 4, 10)
    # The kernels for rows normalize images of these layouts, as they do channels_last images.
    takes_kernels_for_rows = layout in (transposed, transposed_pixels, sliced_channels_last)
    for views in ((layout(x), dy), (x, layout(dy))):
        same_kernels = channels_last(x) if takes_kernels_for_rows and views[1] is dy else x
        results = run_images(backend, *views, w, b)
        assert_same_bits(results, run_images(backend, same_kernels, dy, w, b))
        assert results.output.stride() == results.grad_input.stride() == torch.empty_like(views[0]).stride()
    for images in (x, channels_last(x)):
        results = run_images(backend, images, dy, w, b)
        statistics = layout(results.mean), layout(results.rstd)
        gradients = backend.backward(dy, images, (6,), *statistics, w, b, ALL, images=True)
        assert_same_bits(gradients, results.gradients)


# Each of these functions returns a view [N, M, cols] whose rows are not at equal distances: the next n is farther away,
# or nearer, than the next m. Kernels divide the number of a row by M to find it.
STRIDED = {
    "first rows": lambda t: torch.cat([t, t], 1)[:, : t.size(1)],
    "last rows": lambda t: torch.cat([t, t], 1)[:, t.size(1) :],
    "transposed": transposed_batch,
}


@pytest.mark.parametrize("strided", STRIDED.values(), ids=STRIDED)
@pytest.mark.parametrize("dtypes", DTYPES, ids=dtypes_id)
@pytest.mark.parametrize("batch", [(400, 5), (67, 30), (30, 67), (3, 700)], ids=str)
def test_rows_at_two_distances(dtypes, batch, strided):
    """The weight gradients are sums of the same rows in the same order as in contiguous tensors."""
    cpu = installed("cpu")
    for cols in (1, 5, 64, 100, 300):
        x, dy, total = (randn((*batch, cols), dtypes[0]) for _ in range(3))
        w, b = (randn(cols, dtypes[1]) for _ in range(2))
        expected = run(cpu, x, dy, w, b, grad_sum=total)
        for views in (
            (strided(x), dy, total),
            (x, strided(dy), total),
            (x, dy, strided(total)),
            map(strided, (x, dy, total)),
        ):
            *views, total_view = views
            assert_same_bits(run(cpu, *views, w, b, grad_sum=total_view), expected, cols)


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16)], ids=dtypes_id)
@pytest.mark.parametrize("batch, cols", [((1700, 5), 600), ((9, 30), 1500), ((300, 1), 5000)], ids=str)
def test_wide_rows_at_two_distances(dtypes, batch, cols):
    x, dy = (randn((*batch, cols), dtypes[0]) for _ in range(2))
    w, b = (randn(cols, dtypes[1]) for _ in range(2))
    expected = run(installed("cpu"), x, dy, w, b)
    assert_same_bits(run(installed("cpu"), STRIDED["first rows"](x), dy, w, b), expected)


@pytest.mark.parametrize("member", [m for m in MEMBERS if not m.takes_images], ids=lambda member: member.name)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=dtypes_id)
def test_functions_of_rows_at_two_distances(member, dtype):
    """The functions include those with residuals and gates. Their gradients are compared, too."""
    x, other = (randn((400, 5, 64), dtype) for _ in range(2))
    parameters = [randn(64, statistics_dtype(dtype)) for _ in range(2)]

    def results(*tensors):
        outputs, gradients = with_gradients(member, [t.detach().requires_grad_() for t in tensors])
        return [*outputs, *gradients]

    expected = results(x, other, *parameters)
    for strided in STRIDED.values():
        for views in ((strided(x), other), (x, strided(other)), (strided(x), strided(other))):
            assert_same_bits(results(*views, *parameters), expected)


# Addresses


def at_address(tensor, offset):
    """Return a copy that begins `offset` bytes after a multiple of 64, and the memory around it, which holds 0xff."""
    memory = torch.full((tensor.nbytes + 256,), 0xFF, dtype=torch.uint8)
    begin = 64 - memory.data_ptr() % 64 + offset
    copy = torch.frombuffer(memory.numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=begin)
    return copy.view(tensor.shape).copy_(tensor), (memory[:begin], memory[begin + tensor.nbytes :])


@pytest.mark.parametrize("dtypes", RESIDUALS, ids=dtypes_id)
@pytest.mark.parametrize("cols", [77, 130, 1023, 2048, 2049, 4100])
def test_address_of_every_tensor(dtypes, cols):
    """Arguments, and the sum that replaces the residual, begin at each of the 64 bytes of a vector.

    The rows of the other results begin at each element of a vector: the rows are so many that their addresses have each
    remainder. They have the bits of results with one row, which is aligned.
    """
    dtype, parameter_dtype, residual_dtype = dtypes
    rows = 33 if cols % 2 else 17  # a vector has up to 32 elements, and rows of an even width begin at even ones
    x, r, dy = (randn((rows, cols), t) for t in (dtype, residual_dtype, dtype))
    w, b = (randn(cols, parameter_dtype) for _ in range(2))
    expected = run(installed("cpu"), x, dy, w, b, residual=r, grad_sum=r)
    for row in (slice(k, k + 1) for k in range(rows)):
        alone = run(installed("cpu"), x[row], dy[row], w, b, residual=r[row], grad_sum=r[row])
        assert_same_bits(alone.rows(), expected.rows(row), row)
    for offset in range(64):
        (x_at, _), (w_at, _), (b_at, _), (dy_at, _) = (at_address(t, offset) for t in (x, w, b, dy))
        r_at, around = at_address(r, 63 - offset)
        results = run(installed("cpu"), x_at, dy_at, w_at, b_at, residual=r_at, grad_sum=r_at)
        assert_same_bits(results, expected, offset)
        output, total = layernorm_ext.add_layer_norm(x_at, r_at, (cols,), w_at, b_at, inplace=True)
        assert total.data_ptr() == r_at.data_ptr() and all((part == 0xFF).all() for part in around)
        assert_same_bits((output, total), (expected.output, expected.total), offset)


@output_dtypes
@pytest.mark.parametrize("rows, cols", [(2, 2097704), (520, 8193), (1030, 8200), (4099, 2049)])
def test_rows_of_large_outputs_have_the_bits_of_small_outputs(use_threads, dtypes, rows, cols):
    """Outputs from 16 MiB on have streaming stores, which need aligned addresses in each row and each thread's part.

    The parts are too small for them, except a row of 2,097,704 columns of float64.
    """
    x, _, w, b = random_args(installed("cpu"), dtypes, rows, cols)
    for threads in (1, 4):
        use_threads(threads)
        output = layernorm_ext.layer_norm(x, (cols,), w, b)
        parts = torch.cat([layernorm_ext.layer_norm(part, (cols,), w, b) for part in x.split(max(1, rows // 13))])
        assert_same_bits((output,), (parts,), threads)


# Other rows


@all_dtypes
@pytest.mark.parametrize("cols", [1, 64, 129, 513, 1100, 5000])
@pytest.mark.parametrize("adds", [False, True], ids=["", "residual"])
def test_batch_and_position_of_a_row(backend, dtypes, cols, adds):
    """A row gives the same bits alone, in any batch, and at any position."""
    x, dy, w, b = random_args(backend, dtypes, 13, cols, offset=10)
    inputs = {"residual": x.flip(0), "grad_sum": dy.flip(0)} if adds else {}
    expected = run(backend, x, dy, w, b, **inputs)
    selections = [slice(r, r + 1) for r in range(13)] + [slice(*s) for s in ((0, 2), (1, 4), (2, 6), (3, 8), (7, 13))]
    for rows in (*selections, torch.randperm(13)):
        some = {name: tensor[rows] for name, tensor in inputs.items()}
        results = run(backend, x[rows], dy[rows], w, b, **some)
        assert_same_bits(results.rows(), expected.rows(rows), rows)


@all_dtypes
def test_other_samples_change_no_bit(backend, dtypes):
    """Neither other samples nor their number change a bit of a sample's results and parameter gradients."""
    sizes = [(40, 1), (40, 9), (40, 70), (768, 9), (5000, 1), (5000, 9)]
    for (cols, rows), efficient in itertools.product(sizes, (False, True)):
        tensors = arguments(((4, rows), (4, 1), (4, 1)), cols, dtypes, backend.device)
        all_samples = run(backend, *tensors, memory_efficient=efficient)
        for some in ([0], [3], [1, 3], [2, 0, 1]):
            results = run(backend, *(t[some] for t in tensors), memory_efficient=efficient)
            expected = all_samples.map(lambda t, some=some: t[some])
            # A GPU divides the rows of a single sample among all multiprocessors, and so adds them in another order.
            if backend.name != "cpu" and len(some) == 1:
                results, expected = results.rows(), expected.rows()
            assert_same_bits(results, expected, cols, rows, some)


@data_dtypes
def test_gradients_of_a_sample_in_arrays_outside_the_caches(dtype):
    """The size of the array decides how many rows the loops of the CPU take together, and changes no bit."""
    cpu = installed("cpu")
    for row_bytes in (64, 256, 384, 520, 640, 700, 1000, 1496, 2600, 5000, 9000):
        samples = (9 << 20) // (256 * row_bytes) + 1  # of 256 rows: 9 MB do not fit into the caches
        shapes = [(samples, rows) for rows in (256, 1, 1)]
        tensors = arguments(shapes, row_bytes // dtype.itemsize, (dtype, dtype), "cpu")
        expected = run(cpu, *(t[:1] for t in tensors))
        assert_same_bits(run(cpu, *tensors).map(lambda t: t[:1]), expected, row_bytes)


@all_dtypes
def test_batch_and_position_of_a_pixel(backend, dtypes):
    """A pixel gives the same bits in any image and at any position and address."""
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
@pytest.mark.parametrize("batch", [(3, 1, 1), (1, 1, 1)], ids=str)
def test_batch_of_an_image(backend, dtype, batch):
    """An image has the same bits alone, with its own parameters or shared ones, by kernels for images or rows."""
    x, dy = (randn((3, 37, 5, 6), dtype, backend.device, offset=10) for _ in range(2))
    n, *pixels = batch
    w, b = (randn((n, 37, *pixels), dtype, backend.device) for _ in range(2))
    for layout in (torch.clone, transposed_batch, transposed_pixels, transposed_rows):
        expected = run_images(backend, layout(x), layout(dy), w, b)
        for n in range(3):
            one, parameters = slice(n, n + 1), slice(n, n + 1) if len(w) > 1 else slice(None)
            for images in (layout(x)[one], layout(x[one])):
                results = run_images(backend, images, layout(dy[one]), w[parameters], b[parameters])
                assert_same_bits(results.rows(), expected.rows(one), n)


# Threads


def run_samples(backend, x, dy, w, b, samples, positions):
    """Return the results of rows [samples, positions, cols] with parameters per sample, per position, and per row."""
    x, dy = (t.unflatten(0, (samples, positions)) for t in (x, dy))
    return [
        result
        for batch in ((samples, 1), (1, positions), (samples, positions))
        for result in run(backend, x, dy, *(p.repeat(*batch, 1) for p in (w, b)))
    ]


def run_pixels_of_images(backend, x, dy, w, b, images):
    """Return the results of rows that are the pixels of several images."""
    return run_pixels(backend, *(t.unflatten(0, (images, -1)) for t in (x, dy)), w, b)


# Rows, columns and the call, for each way in which the CPU kernels divide their work among threads. Segments of rows
# have sums of parameter gradients of their own, which are added at the end.
WORK = {
    "narrow rows, many segments": (4099, 64, run),
    "narrow rows, a few segments": (700, 200, run),
    "wide rows, many segments": (300, 1100, run),
    "fewer segments than threads: some columns for each task": (20, 5000, run),
    "some columns of narrow 16-bit rows for each task": (20, 1536, run),
    "fewer rows than threads: runs of a row": (5, 20001, run),
    "one long row": (1, 300_001, run),
    "runs of several chunks": (2, (1 << 20) + 5000, run),
    "samples": (512, 768, partial(run_samples, samples=8, positions=64)),
    "samples of wide rows": (24, 3000, partial(run_samples, samples=2, positions=12)),
    "many images": (32 * 49, 40, partial(run_pixels_of_images, images=32)),
    "many pixels": (3000, 96, partial(run_pixels_of_images, images=3)),
    "images of few pixels": (70 * 9, 64, partial(run_pixels_of_images, images=70)),
    "many channels": (40, 3000, run_pixels),
}


@pytest.mark.parametrize("dtypes", [(F64, F64), (F32, F32), (BF16, BF16), (BF16, F32)], ids=dtypes_id)
@pytest.mark.parametrize("rows, cols, call", WORK.values(), ids=WORK)
def test_the_number_of_threads_changes_no_bit(backend, use_threads, dtypes, rows, cols, call):
    """In torch, it changes bits of the gradient of the weight."""
    arguments = random_args(backend, dtypes, rows, cols, offset=10)
    use_threads(1)
    expected = call(backend, *arguments)
    for threads in (2, 3, 8):
        use_threads(threads)
        assert_same_bits(call(backend, *arguments), expected, threads)


def test_repeated_calls_from_two_python_threads(backend):
    calls = [random_args(backend, (F32, F32), *shape, offset=10) for shape in ((500, 64), (5, 20001))]
    expected = [run(backend, *arguments) for arguments in calls]

    def work(arguments, expected):
        for _ in range(10):
            assert_same_bits(run(backend, *arguments), expected)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, calls, expected))


@pytest.mark.parametrize("member", [m for m in MEMBERS if not m.takes_images], ids=lambda member: member.name)
@pytest.mark.parametrize(
    "dtype, rows, cols",
    [(F32, 96, 384), (BF16, 96, 384), (F16, 300, 70), (F64, 40, 1000), (F32, 3, 20002), (BF16, 70, 2048)],
    ids=dtypes_id,
)
def test_functions_depend_on_neither_threads_nor_strides_nor_other_rows(use_threads, member, dtype, rows, cols):
    """Results do not depend on which tensors require gradients either. The tensors are slices of a fused projection."""
    projection, parameters = randn((rows, 3 * cols), dtype), [randn(cols, statistics_dtype(dtype)) for _ in range(2)]
    views = [projection[:, :cols], projection[:, 2 * cols :]]

    def results(tensors, mask=(True,) * 4):
        tensors = [t.detach().requires_grad_(requires) for t, requires in zip(tensors, mask, strict=True)]
        outputs = member(*tensors)
        differentiable = [t for t in tensors if t.requires_grad]
        grad_outputs = [y.detach().sin() for y in outputs]
        return [*outputs, *torch.autograd.grad(outputs, differentiable, grad_outputs, allow_unused=True)]

    use_threads(1)
    expected = results([t.contiguous() for t in views] + parameters)
    last = results([t[-1:] for t in views] + parameters)
    assert_same_bits(last[:-2], [t if t is None else t[-1:] for t in expected[:-2]])  # all but dw and db
    use_threads(4)
    assert_same_bits(results([*views, *parameters]), expected)
    outputs, gradients = expected[:-4], expected[-4:]
    for mask in itertools.product([True], *[[False, True]] * 3):  # if x requires a gradient, all outputs do
        some = [g for g, requires in zip(gradients, mask, strict=True) if requires]
        assert_same_bits(results([*views, *parameters], mask), [*outputs, *some], mask)
