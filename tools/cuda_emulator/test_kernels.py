"""Every path of the CUDA kernels runs in the emulator with each memory access checked.

The sizes are few, on both sides of the limits where another kernel begins. The ordinary tests compare the results of
many more inputs with float64, in a faster mode of the emulator: `--backends emulated`. Tests of hard values, NaN and
constant rows also run on each path with each access checked: `make test-device`. float64 has no kernels.
"""

import math
import random

import emulated_build
import pytest
import torch
from support.backends import (
    ALL,
    MASKS,
    NONE,
    PATHS,
    Results,
    assert_same_bits,
    check,
    check_images,
    run,
    run_images,
    run_pixels,
)
from support.inputs import amid_nans, randn, random_args
from support.reference import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    RESIDUALS,
    broadcast_rows,
    check_forward,
    dtypes_id,
    xhat_error_from_output,
)

kernel_dtypes = pytest.mark.parametrize("dtypes", [d for d in DTYPES if F64 not in d], ids=dtypes_id)
residual_dtypes = pytest.mark.parametrize(
    "dtypes", [d for d in RESIDUALS if F64 not in d], ids=lambda d: f"{dtypes_id(d[:2])}+{dtypes_id(d[2:])}"
)


@pytest.fixture(scope="module")
def library():
    return emulated_build.library(emulated_build.CHECKED)


# path_limit for images: with 0, no tile fits into shared memory. Otherwise, images of 24 pixels are copied there, 16
# bytes at a time.
STAGED = [emulated_build.UNLIMITED, 0]
staged = pytest.mark.parametrize("path_limit", STAGED, ids=["staged", "not staged"])
rows_and_pixels = pytest.mark.parametrize(
    "run, path",
    [*((run, path) for path in PATHS.values()), *((run_pixels, {"path_limit": limit}) for limit in STAGED)],
    ids=[*PATHS, "staged pixels", "pixels"],
)


# Schedules


# The limits, in vectors of 16 bytes, are the longest rows of 1 to 32 lanes and of a block, and of threads with two,
# four and eight vectors (forward_registers.cu).
@kernel_dtypes
@pytest.mark.parametrize("limit", [1, 8, 16, 31, 64, 128, 256, 1024, 2048])
def test_all_schedules_give_the_same_bits(library, dtypes, limit):
    """Rows of whole vectors are aligned; rows with one element less or more are not."""
    vector = 16 // dtypes[0].itemsize
    seeds = range(4) if limit <= 128 else [2]
    for cols in {1, limit * vector - 1, limit * vector, limit * vector + 1}:
        x, dy, w, b = random_args(library, dtypes, max(2, 150 // limit), cols)  # blocks take up to 64 short rows
        expected = None
        for seed in seeds:
            with library.schedule(seed):
                results = run(library, x, dy, w, b)
            expected = expected or results
            assert_same_bits(results, expected, cols, seed)
        check(results, x, dy, w, b, context=(cols,))
        if cols == 1:  # g - mean(g) is exactly 0, unless the product g is fused with the subtraction
            assert not results.grad_input.any()


@kernel_dtypes
@pytest.mark.parametrize("blocks", [2, 8])
def test_all_schedules_of_a_cluster_give_the_same_bits(library, dtypes, blocks):
    """A cluster takes several rows, and its last row may not exist. With 99 KiB, a block may have fewer stages."""
    vectors = blocks * 32 * 16 // dtypes[0].itemsize
    for cols, architecture in [(vectors, 90), (vectors, 120), (vectors - 1, 90)]:
        x, dy, w, b = random_args(library, dtypes, 11, cols)
        expected = None
        for seed in range(8):
            library.launched()
            with library.schedule(seed, architecture=architecture, path_limit=0):
                results = run(library, x, dy, w, b)
            assert launches(library, "backward_staged") == {blocks: 1}
            expected = expected or results
            assert_same_bits(results, expected, cols, seed)
        check(results, x, dy, w, b, context=(cols,))


@kernel_dtypes
@staged
def test_all_schedules_and_layouts_give_the_same_bits_for_images(library, dtypes, path_limit):
    """Only the weight gradients depend on the number of blocks.

    Images have fewer pixels than a warp has lanes, as many, or more. Channels are fewer than a block has warps, or many
    for each warp. With 49 pixels, the number of a pixel's image is at first computed as one too low, because
    49 * (1 / 49) is less than 1.
    """
    places = [(0, 0), (0, 1), (3, 0), (2, 5)]  # gap and offset of amid_nans()
    for shape in [(1, 1, 2), (2, 3, 31), (1, 7, 32), (3, 8, 33), (70, 9, 2), (3, 130, 13), (1, 150, 40), (2, 5, 49)]:
        x, dy, w, b = random_args(library, dtypes, *shape)
        expected = None
        for seed, place in enumerate(places):
            with library.schedule(seed, path_limit=path_limit):
                results = run_images(library, amid_nans(x, *place), amid_nans(dy, *place), w, b)
            expected = expected or results
            check_images(results, x, dy, w, b, context=(shape, seed))
            assert_same_bits(results.rows(), expected.rows(), shape, seed)


# Which kernels are launched


def launches_of(launched, name):
    """Return {cluster size: number of launches} of the kernels whose names include `name`."""
    return {cluster: count for (kernel, cluster), count in launched.items() if name in kernel}


def launches(library, name):
    """Return launches_of() since the last call of launched()."""
    return launches_of(library.launched(), name)


@kernel_dtypes
def test_long_rows_in_clusters_and_two_launches(library, dtypes):
    """A cluster has up to 8 blocks for a row, of `limit` vectors each. Rows of more blocks take two launches.

    The last warps of the row of 7 * 256 + 1 vectors have no columns. The results of a row have the same bits in a
    cluster and in two launches, if backward gets the same statistics.
    """
    vector = 16 // dtypes[0].itemsize
    blocks_and_missing_elements = [(1, 1), (2, 0), (4, 0), (8, 1), (9, 0), (24, 3)]
    cases = [(blocks, 32, 32 * blocks, missing) for blocks, missing in blocks_and_missing_elements]
    cases += [(8, 256, 7 * 256 + 1, 0), (8, 256, 7 * 256 + 1, 1)]
    if dtypes == (F32, F32):  # with more than 8 blocks, each has limit / 2 vectors, but at least 32
        cases += [(80, 32, 32 * 80, vector + 1), (40, 512, 256 * 40, vector + 1)]
    for blocks, limit, vectors, missing_elements in cases:
        x, dy, w, b = random_args(library, dtypes, 5 if blocks < 40 else 1, vectors * vector - missing_elements)
        x += 3  # a warp without columns must not count as zeros
        saved, rows = None, []
        for architecture, resident in ((90, 3), (90, 100), (89, 100), (89, 1)):
            library.launched()
            with library.schedule(blocks, architecture=architecture, path_limit=limit, resident=resident):
                output, *statistics = library.ops.forward(x, x.shape[1:], w, b, 1e-5)
                forward_launches = launches(library, "forward")
                saved = saved or statistics
                gradients = library.ops.backward(dy, x, x.shape[1:], *saved, w, b, [*ALL, *NONE])[:3]
                backward_launches = launches(library, "backward")
            context = (blocks, architecture, resident)
            check(Results(output, None, *statistics, *gradients), x, dy, w, b, context=context)
            rows.append([output, *statistics, gradients[0]])
            in_cluster = architecture >= 90 and blocks <= 8
            expected = {blocks: 1} if in_cluster else {1: 1 if blocks == 1 else 2}
            assert forward_launches == expected, context
            assert backward_launches == expected, context
        for results in rows[1:]:
            assert_same_bits(results, rows[0], blocks)


@kernel_dtypes
@pytest.mark.parametrize("architecture", [89, 90])
def test_a_gpu_that_holds_one_row_sums_all_rows_in_one_segment(library, dtypes, architecture):
    """600 iterations are three sums of up to 256 rows (kIterationsPerSum), which are added in the workspace."""
    x, dy, w, b = random_args(library, dtypes, 600, 2 * 32 * 16 // dtypes[0].itemsize)
    with library.schedule(architecture=architecture, path_limit=32, resident=1):
        check(run(library, x, dy, w, b), x, dy, w, b)


# The longest row of 4 blocks with 8 warps of 512 columns has 16383 columns, and that of a cluster 65535.
@pytest.mark.parametrize("cols, blocks", [(8191, 1), (8193, 4), (16383, 4), (16385, 8), (65535, 8)])
def test_blocks_that_share_a_row_of_forward_have_few_warps(library, cols, blocks):
    x, _, w, b = random_args(library, (BF16, BF16), 1, cols)
    library.launched()
    results = library.ops.forward(x, (cols,), w, b, 1e-5)
    assert launches(library, "forward") == {blocks: 1}
    check_forward(results, x, w, b)


@pytest.mark.parametrize("architecture", [89, 90, 120])
@pytest.mark.parametrize("dtype, vectors", [(BF16, 1024), (BF16, 1025), (BF16, 2048), (F32, 1280), (F32, 2048)])
def test_backward_fits_into_shared_memory(library, architecture, dtype, vectors):
    """With 99 KiB, a block holds one unaligned row of nearly 2048 float32 vectors, but not the next row."""
    x, dy, w, b = random_args(library, (dtype, dtype), 1, vectors * 16 // dtype.itemsize - 1)
    for grad_sum in (randn(x.shape, dtype), None):
        with library.schedule(1, architecture=architecture):
            check(run(library, x, dy, w, b, grad_sum=grad_sum), x, dy, w, b, grad_sum=grad_sum)


# Numbers of columns, in vectors of 16 bytes.
@kernel_dtypes
@pytest.mark.parametrize("vectors", [5, 100, 200, 700])
def test_few_rows_take_one_launch(library, dtypes, vectors):
    """A block or the blocks of a cluster add up the weight gradients. The address of a row changes no bit."""
    vector = 16 // dtypes[0].itemsize
    elements = 16  # of a thread
    for cols in (vectors * vector, vectors * vector - 1):
        # The threads of a row in backward, and the rows that a block of 256 threads takes in one iteration.
        threads = max(2 ** math.ceil(math.log2(cols / elements)), 2)
        if threads > 32:
            threads = math.ceil(cols / elements / 32) * 32
        rows_of_iteration = max(256 // threads, 1)
        # (compute capability, iterations, whether they take one launch), around the limits with and without clusters
        for architecture, iterations, in_one_launch in (
            *((89, 1, True), (89, 2, True), (89, 3, False)),
            *((90, 1, True), (90, 2, True), (90, 3, True), (90, 16, True), (90, 17, False)),
        ):
            rows = (iterations - 1) * rows_of_iteration + 1
            x, dy, w, b = random_args(library, dtypes, rows, cols)
            # A cluster has up to 8 blocks, each with a segment of as many iterations (GradientPlan::set_segments).
            blocks = math.ceil(iterations / math.ceil(iterations / 8)) if architecture == 90 else 1
            with library.schedule(iterations, architecture=architecture, few_iterations=2):
                library.launched()
                results = run(library, x, dy, w, b)
                counts = library.launched()
                at_other_addresses = run(library, amid_nans(x, gap=0), amid_nans(dy), amid_nans(w), b)
            assert_same_bits(results, at_other_addresses, cols, architecture, iterations)
            check(results, x, dy, w, b, context=(cols, architecture, iterations))
            if in_one_launch:
                assert launches_of(counts, "backward") == {blocks: 1}, (cols, architecture, iterations)
                assert not launches_of(counts, "add_partials"), (cols, architecture, iterations)
            else:
                assert launches_of(counts, "add_partials") == {1: 1}, (cols, architecture, iterations)


def test_few_rows_with_some_gradients(library):
    x, dy, w, b = random_args(library, (BF16, F32), 40, 72)
    with library.schedule(3, few_iterations=2):
        for mask in MASKS:
            check(run(library, x, dy, w, b, mask=mask), x, dy, w, b, context=(mask,))


# Options and layouts on every path


def in_fused_projection(tensor):
    """Return a tensor with gaps between samples, like the queries of a fused projection, which are read in place."""
    return torch.stack([tensor, tensor], 1)[:, 1]


@rows_and_pixels
@residual_dtypes
def test_options_match_float64(library, dtypes, run, path):
    """Each test draws 20 combinations of sizes, options and layouts, the same in each run.

    Samples have few or many rows, so that they have one segment or several, and a block's rows share a sample or not.
    Rows of 260 vectors take several warps, or several blocks of 32 vectors; 100 and 1030 vectors take other loops in
    registers. Images of 24 pixels are copied by 16 bytes. One row of the sum overflows. A gradient that is not
    requested has no memory, so that a kernel that writes it fails.

    The layout of a tensor changes no bit of a row's results, nor does an addition in place.
    """
    draw = random.Random(f"{dtypes} {path}").choice
    for case in range(20):
        samples, rows = draw([(1, 33), (2, 24), (3, 5), (70, 1)])
        vectors = draw([1, 5, 9, 260]) if path else draw([1, 5, 9, 100, 260, 1030])
        if vectors == 260:
            samples, rows = draw([(1, 11), (2, 8), (3, 5), (11, 1)])
        if vectors == 1030:
            samples, rows = 2, 3
        cols = vectors * 16 // dtypes[0].itemsize + draw([0, 0, 3])
        adds, has_grad_sum, efficient = (draw([False, True]) for _ in range(3))
        if run is run_pixels:  # there are no kernels for residuals of images
            adds = has_grad_sum = False
        sum_dtype = dtypes[2] if adds else dtypes[0]
        variant = {"rms": draw([False, True]), "zero_centered_weight": draw([False, True])}
        efficient &= not (adds or has_grad_sum or variant["rms"])
        options = {"mask": draw(MASKS), "memory_efficient": efficient, **variant}

        tensors = {name: randn((samples, rows, cols), dtypes[0]) for name in ("x", "dy")}
        if adds:
            tensors["residual"] = randn((samples, rows, cols), sum_dtype)
            tensors["residual"][0, 0] *= torch.finfo(sum_dtype).max / 16
        if has_grad_sum:
            tensors["grad_sum"] = randn((samples, rows, cols), sum_dtype)
        for name in ("weight", "bias"):
            if shape := draw([None, (cols,), (samples, 1, cols)]):
                tensors[name] = randn(shape, dtypes[1])
        if (w := tensors.get("weight")) is not None:
            tensors["weight"] = torch.where(w.abs() < 0.1, 0.5, w) - int(variant["zero_centered_weight"])

        with library.schedule(case, **path):
            aligned = run(library, **tensors, **options)
            tensors = {name: draw([in_fused_projection, amid_nans, torch.clone])(t) for name, t in tensors.items()}
            results = run(library, **tensors, **options)
            x, dy, w, b, residual = map(tensors.get, ("x", "dy", "weight", "bias", "residual"))
            total = results.total if adds else x
            if adds:
                in_place = residual.clone()
                output, mean, rstd = library.ops.forward_.fused(x, (cols,), w, b, 1e-5, in_place, **variant)
                assert_same_bits(Results(output, in_place, mean, rstd), results.requested(NONE), case)
        assert_same_bits(results.rows(), aligned.rows(), case)
        more = {"residual": residual, "grad_sum": tensors.get("grad_sum"), "context": (case,), **variant}
        if options["memory_efficient"]:
            rows_of = [broadcast_rows(t, x.shape[:-1]) for t in (total, w, b)]
            more["xhat_error"] = xhat_error_from_output(*rows_of, **variant)
        for each in (aligned, results):
            assert [gradient is not None for gradient in each.gradients] == options["mask"], case
            check(each, x, dy, w, b, **more)


@pytest.mark.parametrize("run", [run, run_pixels], ids=["rows", "pixels"])
@pytest.mark.parametrize("samples_and_rows", [(2, 700), (2, 1024), (3, 2200)])
def test_rows_of_long_samples_share_segments(library, samples_and_rows, run):
    """The rows of a block share a segment. The 1024 rows of a sample are exactly one segment."""
    x, dy = (randn((*samples_and_rows, 8), F32, offset=0.5) for _ in range(2))
    w, b = (randn((samples_and_rows[0], 1, 8), F32) for _ in range(2))
    with library.schedule(1):
        for bias in (b, b[0, 0]):
            check(run(library, x, dy, w, bias), x, dy, w, bias)


# Sums of gradients


@pytest.mark.parametrize("run", [run, run_pixels], ids=["rows", "pixels"])
def test_sums_of_segments_do_not_depend_on_which_gradients_are_computed(library, run):
    """The bias is per sample, so its gradient is the sum of fewer segments than that of the weight.

    The sums of the first two and the last two segments of a sample are large and cancel. The others lose lower bits
    where they are added to large ones, so that another order of addition changes the total.
    """
    rows, cols, rows_of_segment = 20480, 16, 2048
    x, dy = (randn((2, rows, cols), F32) for _ in range(2))
    dy[:, : 2 * rows_of_segment] *= 2**40
    dy[:, -2 * rows_of_segment :] = -dy[:, : 2 * rows_of_segment]
    w, b = randn(cols, F32), randn((2, 1, cols), F32)
    with library.schedule(0):
        _, grad_weight, grad_bias = run(library, x, dy, w, b).gradients
        for mask in ((True, True, False), (True, False, True)):
            some = run(library, x, dy, w, b, mask=mask).gradients
            assert_same_bits(
                some[1:], [t if m else None for t, m in zip((grad_weight, grad_bias), mask[1:], strict=True)]
            )


@pytest.mark.parametrize("rows", [257, 511])
@pytest.mark.parametrize(
    "path_limit, cols", [(0, 132), (emulated_build.UNLIMITED, 2056)], ids=["several blocks", "one block"]
)
def test_weight_gradients_sum_256_rows_at_once(library, rows, path_limit, cols):
    """In float32, 2^24 + 1 is 2^24: ones after 2^24 are lost in the same sum of 256 rows, but not in the next sum.

    Sums of 255 rows would leave 2 for the next sum of 257 rows, and sums of 257 rows would leave 254 of 511.
    """
    dy = torch.ones(3, rows)  # each block takes successive rows, one at a time
    dy[:, 0] = 2.0**24
    dy[2, 255] = 2  # changes the result, so that the test notices a sum without its last row
    dy = dy.reshape(-1, 1).expand(-1, cols)
    x, rstd = torch.ones(len(dy), cols), torch.ones(len(dy), 1)
    with library.schedule(path_limit=path_limit):
        mask = [False, True, True, *NONE]
        sums = library.ops.backward(dy, x, (cols,), None, rstd, None, None, mask, rms=True)[1:3]
    expected = torch.tensor([2.0**24, 2.0**24, 2.0**24 + 2]) + (rows - 256)
    assert all(gradient.eq(expected.sum(dtype=F64).float()).all() for gradient in sums)


# Gates


# Masks for the gradients of input, weight, bias, gate, scaled_input and input_scale; a call has a gate or the last two.
GATED_MASKS = [
    [True] * 6,
    [True, False, False, False, True, False],
    [False, True, True, True, False, True],
    [False, False, False, True, False, True],
]


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@residual_dtypes
def test_gates_beside_residuals_match_float64(library, dtypes, path):
    """Each test draws 10 combinations of sizes, gates, layouts and wanted gradients, the same in each run.

    Samples have one segment or several, and a block has rows of one sample or of several.
    """
    draw = random.Random(f"gate {dtypes} {path}").choice
    for case in range(10):
        samples, rows = draw([(1, 33), (2, 24), (3, 70), (70, 1)])
        vectors = draw([1, 5, 260]) if path else draw([1, 5, 100, 260, 1030])
        cols = vectors * 16 // dtypes[0].itemsize + draw([0, 0, 3])
        if cols > 1000:
            samples, rows = 2, 3
        variant = {"rms": draw([False, True]), "zero_centered_weight": draw([False, True])}
        layout = draw([in_fused_projection, amid_nans, torch.clone])
        x, dy = (layout(randn((samples, rows, cols), dtypes[0])) for _ in range(2))
        residual, grad_sum = (layout(randn((samples, rows, cols), dtypes[2])) for _ in range(2))
        w, b, gate = (
            draw([amid_nans, torch.clone])(randn(draw([(cols,), (samples, 1, cols)]), dtypes[1])) for _ in range(3)
        )
        options = {"residual": residual, "input_scale": gate, "grad_sum": grad_sum, **variant}
        mask = draw(GATED_MASKS)
        with library.schedule(case, **path):
            results = run(library, x, dy, w, b, mask=GATED_MASKS[0], **options)
            requested = run(library, x, dy, w, b, mask=mask, **options)
            in_place = residual.clone()
            output, mean, rstd = library.ops.forward_.fused(x, (cols,), w, b, 1e-5, in_place, gate, **variant)
        assert_same_bits(Results(output, in_place, mean, rstd), results.requested(NONE), case)
        assert_same_bits(requested, results.requested(mask), case)
        check(results, x, dy, w, b, context=(case,), **options)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=dtypes_id)
def test_gated_norms_match_float64(library, dtype, path):
    """Each test draws 12 combinations of sizes, options, layouts and wanted gradients, the same in each run.

    The gate is a slice of a fused projection, or at any address. Some of its numbers are large.
    """
    draw = random.Random(f"gated {dtype} {path}").choice
    for case in range(12):
        samples, rows = draw([(1, 33), (2, 24), (3, 5), (70, 1)])
        vectors = draw([1, 5, 9, 260]) if path else draw([1, 5, 9, 100, 260, 1030])
        cols = vectors * 16 // dtype.itemsize + draw([0, 0, 3])
        if cols > 1000:
            samples, rows = 2, 3
        layouts = [in_fused_projection, amid_nans, torch.clone]
        x, dy, z = (draw(layouts)(randn((samples, rows, cols), dtype)) for _ in range(3))
        z[0, 0] *= 20
        w, b = (draw([None, torch.randn(cols), torch.randn(samples, 1, cols)]) for _ in range(2))
        variant = {"rms": draw([False, True]), "zero_centered_weight": draw([False, True])}
        gated = {"sigmoid": draw([False, True]), "gate_first": draw([False, True])}
        mask = draw(GATED_MASKS)
        options = {"gate": z, **variant, **gated}
        with library.schedule(case, **path):
            results = run(library, x, dy, w, b, mask=mask, **options)
        given = [gradient is not None for gradient in (*results.gradients, *results.gradients_of_gates)]
        assert given == [*mask[:4], False, False], case
        check(results, x, dy, w, b, context=(case, samples, rows, cols, variant, gated), **options)
