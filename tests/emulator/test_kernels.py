"""Every CUDA kernel is run with each of its memory accesses checked, in several orders of its threads.

What they compute is what the ordinary tests look at, with `--backends emulated`; here sizes are the ones at which
another kernel takes over, one less and one more.
"""

import itertools

import emulated_build
import emulated_ops
import pytest
import torch
from reference import (
    BF16,
    F32,
    F64,
    check_backward,
    check_forward,
    dtypes_id,
    xhat_error_from_output,
)
from shapes import HUGE, all_dtypes, bits, huge_rows, randn

# The longest rows of each tile (row.cuh), in vectors of 16 bytes: its threads and the vectors of each. Beyond the last,
# rows are cut.
TILES = {1: (1, 1), 2: (2, 1), 8: (2, 4), 16: (4, 4), 32: (8, 4), 64: (16, 4), 128: (32, 4), 2048: (512, 4)}
SCHEDULES = [("forward", 0, 1), ("reverse", 0, 1), ("random", 1, 2), ("random", 2, 4)]  # the last: blocks at a time
ALL = [True, True, True]
# Which kernels rows of any length go to: those for long ones, with and without clusters, or for short ones, of which
# backward takes few in a launch of its own.
PATHS = {
    "in a cluster": {"path_limit": 0},
    "read twice": {"path_limit": 0, "architecture": 80},
    "in registers": {"one_launch_limit": 0},
    "in one launch": {},
}
paths = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


@pytest.fixture(scope="module")
def library():
    return emulated_ops.library(emulated_build.CHECKED)


def run(library, x, dy, w=None, b=None, mask=ALL, eps=1e-5):
    normalized = x.shape[-1:]
    output, mean, rstd = library.ops.forward(x, normalized, w, b, eps)
    return (output, mean, rstd), library.ops.backward(dy, x, normalized, mean, rstd, w, b, mask)


def arguments(rows, cols, dtypes):
    x, dy = (randn((rows, cols), dtypes[0]) for _ in range(2))
    return x, dy, randn(cols, dtypes[1]), randn(cols, dtypes[1])


@all_dtypes
@pytest.mark.parametrize("limit", TILES)
def test_sizes_at_the_limits(library, dtypes, limit):
    """N, which is aligned, and N - 1 and N + 1, which are not; any order of the threads gives the same bits."""
    vector = 16 // dtypes[0].itemsize
    for cols in {limit * vector - 1, limit * vector, limit * vector + 1, limit * vector + vector} - {0}:
        rows = max(3, 600 // limit)  # a block of short rows has up to 64
        x, dy, w, b = arguments(rows, cols, dtypes)
        first = None
        for order, seed, blocks in SCHEDULES if limit <= 128 else SCHEDULES[1:3] if limit <= 512 else SCHEDULES[2:3]:
            with library.schedule(order, seed, blocks):
                forward, backward = run(library, x, dy, w, b)
            if first is None:
                first = forward + backward
                check_forward(forward, x, w, b, context=(cols,))
                check_backward(backward, dy, x, w, context=(cols,))
                with library.schedule(order, seed, blocks, one_launch_limit=0):
                    _, (dx, *parameter_gradients) = run(library, x, dy, w, b)
                check_backward((dx, *parameter_gradients), dy, x, w, context=(cols,))
                assert torch.equal(bits(dx), bits(backward[0])), cols
            for actual, expected in zip(forward + backward, first, strict=True):
                assert torch.equal(bits(actual), bits(expected)), (cols, order, seed)


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16)], ids=dtypes_id)
def test_which_kernels_are_for_which_rows(library, dtypes):
    """At the limits, and one vector before and after them: the smallest tile that holds a row."""
    warps = {limit: "WarpTile" for limit in TILES if limit <= 128}
    kinds = {
        "forward": ({limit: "Tile<{}, {}>".format(*tile) for limit, tile in TILES.items()}, "forward_chunk_in_cluster"),
        "backward": (warps | {2048: "BlockTile"}, "BlockTile"),
    }
    for vectors in {limit + more for limit in TILES for more in (-1, 0, 1)} - {0}:
        x, dy, w, b = arguments(1, vectors * 16 // dtypes[0].itemsize, dtypes)
        library.launched()
        run(library, x, dy, w, b)
        launched = library.launched()
        for kind, (tiles, beyond) in kinds.items():
            expected = next((tile for limit, tile in tiles.items() if vectors <= limit), beyond)
            assert any(kind in name and expected in name for name in launched), (vectors, launched)
            assert sum(kind in name for name in launched) == 1


@pytest.mark.parametrize("architecture", [89, 90])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (F64, F64)], ids=dtypes_id)
def test_which_kernels_are_for_longer_rows(library, dtypes, architecture):
    """Rows of more than a chunk, of 32 vectors here: 80 chunks by a cluster, one more by two launches."""
    vector = 16 // dtypes[0].itemsize
    for chunks in (1, 2, 8, 9, 80, 81, *((256, 257) if dtypes[0] == F32 else ())):
        x, _, w, b = arguments(1, (chunks * 32 - 1) * vector - 1, dtypes)
        library.launched()
        with library.schedule("random", chunks, 3, architecture=architecture, path_limit=0):
            forward = library.ops.forward(x, x.shape[1:], w, b, 1e-5)
        check_forward(forward, x, w, b, context=(chunks,))
        in_cluster = architecture >= 90 and chunks <= 80 and dtypes[0] != F64
        cluster = "forward_chunk_in_cluster" if chunks <= 8 else "forward_in_cluster"
        expected = {cluster} if in_cluster else {"forward_moments", "forward_output"}
        assert {name.partition("<")[0].rpartition(":")[2] for name in library.launched()} == expected, chunks


def test_clusters_have_as_much_shared_memory_as_there_is(library):
    """Compute capability 12.0 has 99 KiB a block: of 1024 vectors and a residual's, a block keeps 5 chunks."""
    for chunks, launched in ((40, "forward_in_cluster"), (41, "forward_output")):
        x = randn((1, chunks * 1024 * 8), BF16)
        library.launched()
        with library.schedule("random", 1, 2, architecture=120):
            forward = library.ops.forward(x, x.shape[1:], None, None, 1e-5)
        check_forward(forward, x)
        assert any(launched in name for name in library.launched())


def test_backward_fits_into_what_shared_memory_there_is(library):
    """Where a block has 99 KiB, it takes 1024 vectors, that are not aligned, and a residual's; longer rows are cut."""
    for architecture, vectors in itertools.product((80, 89, 90, 120), (1024, 1025, 2048)):
        x, dy, w, b = arguments(1, vectors * 8 - 1, (BF16, BF16))
        output, _, mean, rstd = library.ops.norm_forward(x, None, x.shape[1:], w, b)
        for dsum in (randn(x.shape, BF16), None):
            with library.schedule("random", 1, 2, architecture=architecture):
                backward = library.ops.norm_backward(dy, dsum, x, x.shape[1:], mean, rstd, w, b, ALL)
            check_backward(backward, dy, x, w, grad_sum=dsum, context=(architecture, vectors))


@all_dtypes
def test_clusters_and_launches_give_the_same_bits(library, dtypes):
    """On every GPU, rows are cut in the same way; the rows' order in dweight and dbias is another."""
    for chunks, lost in ((2, 0), (8, 1), (9, 0), (24, 3)):
        x, dy, w, b = arguments(2, chunks * 32 * 16 // dtypes[0].itemsize - lost, dtypes)
        outputs = []
        for architecture in (80, 90):
            with library.schedule("random", 1, 2, architecture=architecture, path_limit=0):
                forward, backward = run(library, x, dy, w, b)
            outputs.append((*forward, backward[0]))
            check_backward(backward, dy, x, w, context=(chunks, architecture))
        for a, e in zip(*outputs, strict=True):
            assert torch.equal(bits(a), bits(e)), chunks


@pytest.mark.parametrize("architecture", [89, 90])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (F64, F64)], ids=dtypes_id)
def test_which_kernels_are_for_longer_rows_of_backward(library, dtypes, architecture):
    """Of chunks of 32 vectors here: up to 8 by a cluster, more by two launches, of which one has up to 256 parts.

    Of 513, a part has more chunks than are on their way at a time.
    """
    vector = 16 // dtypes[0].itemsize
    for chunks in (1, 2, 8, 9, *((257, 513) if dtypes[0] == F32 else ())):
        x, dy, w, b = arguments(3 if chunks < 513 else 1, (chunks * 32 - 1) * vector - 1, dtypes)
        output, mean, rstd = library.ops.forward(x, x.shape[1:], w, b, 1e-5)
        library.launched()
        with library.schedule("random", chunks, 3, architecture=architecture, path_limit=0):
            backward = library.ops.backward(dy, x, x.shape[1:], mean, rstd, w, b, ALL)
        check_backward(backward, dy, x, w, context=(chunks,))
        read_twice = chunks > 1 and (architecture < 90 or chunks > 8 or dtypes[0] == F64)
        assert any("backward_sums" in name for name in library.launched()) == read_twice, chunks


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16)], ids=dtypes_id)
def test_which_problems_are_one_launch(library, dtypes):
    """Up to 128 rows, and 8 MiB that blocks of 32 columns read."""
    most = 4 // dtypes[0].itemsize  # of 8192 columns: 256 blocks read all
    for rows, cols, one in [(128, 64, True), (129, 64, False), (most, 8192, True), (most + 1, 8192, False)]:
        x, dy, w, b = arguments(rows, cols, dtypes)
        library.launched()
        run(library, x, dy, w, b)
        assert any("add_partials" in name for name in library.launched()) != one, (rows, cols)


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16)], ids=dtypes_id)
def test_last_chunks_that_leave_warps_without_columns(library, dtypes, architecture):
    """Eight chunks of up to 256 vectors, which two warps share; the last has but one."""
    cols = (7 * 256 + 1) * 16 // dtypes[0].itemsize
    for lost in (0, 1):
        x, dy, w, b = arguments(2, cols - lost, dtypes)
        x += 3
        with library.schedule("random", lost, 2, architecture=architecture, path_limit=256):
            forward, backward = run(library, x, dy, w, b)
        check_forward(forward, x, w, b)
        check_backward(backward, dy, x, w)


@all_dtypes
@pytest.mark.parametrize("limit", [0, 2, 40])
def test_shorter_rows_on_the_paths_for_longer_ones(library, dtypes, limit):
    """Rows that fit into registers are cut, all the same."""
    for (rows, cols), architecture in itertools.product([(1, 1), (3, 7), (5, 64), (2, 1000), (70, 10)], (80, 90)):
        x, dy, w, b = arguments(rows, cols, dtypes)
        with library.schedule("random", limit, 2, path_limit=limit, architecture=architecture, one_launch_limit=0):
            forward, backward = run(library, x, dy, w, b)
        check_forward(forward, x, w, b, context=(rows, cols))
        check_backward(backward, dy, x, w, context=(rows, cols))


@paths
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32)], ids=["fp32", "bf16-fp32"])
def test_masks_and_absent_parameters(library, dtypes, path):
    """Nothing is written that was not asked for: its memory does not exist."""
    for cols, mask in itertools.product((40, 200, 1200), itertools.product((False, True), repeat=3)):
        x, dy, w, b = arguments(7, cols, dtypes)
        for weight, bias in ((w, b), (w, None), (None, b), (None, None)):
            with library.schedule("reverse", **path):
                forward, backward = run(library, x, dy, weight, bias, list(mask))
            check_forward(forward, x, weight, bias)
            assert [gradient is not None for gradient in backward] == list(mask)
            parameter_dtype = dtypes[1] if weight is not None or bias is not None else dtypes[0]
            check_backward(backward, dy, x, weight, parameter_dtype)


@all_dtypes
def test_alignment_and_strides_do_not_change_bits(library, dtypes):
    """On each path; rows of 1021 that are 1024 apart are not aligned, because those of the output are not."""
    for cols, path in itertools.product((64, 1021, 1024, 2400), PATHS.values()):
        x, dy, w, b = arguments(3, cols, dtypes)
        with library.schedule(**path):
            expected = run(library, x, dy, w, b)
            for gap, offset in ((0, 1), (3, 0), (16, 0), (16, 5)):
                views = []
                for tensor in (x, dy):
                    buffer = torch.full((3 * (cols + gap) + offset,), torch.nan, dtype=tensor.dtype)
                    views.append(buffer[offset:].as_strided((3, cols), (cols + gap, 1), offset).copy_(tensor))
                actual = run(library, *views, w, b)
                for a, e in zip(actual[0] + actual[1], expected[0] + expected[1], strict=True):
                    assert torch.equal(bits(a), bits(e)), (cols, gap, offset)


def test_any_alignment(library):
    """Rows of either array that begin at any element, any distance apart: what is taken for aligned is."""
    x, dy, w, b = arguments(2, 64, (BF16, BF16))
    expected = run(library, x, dy, w, b)
    places = [(0, offset) for offset in range(34)] + [(gap, 0) for gap in range(34)]
    for (gap, offset), moved in itertools.product(places, range(2)):
        arrays = [x, dy]
        buffer = torch.empty(2 * (64 + gap) + offset, dtype=BF16)
        arrays[moved] = buffer.as_strided((2, 64), (64 + gap, 1), offset).copy_(arrays[moved])
        forward, backward = run(library, *arrays, w, b)
        for a, e in zip(forward + backward, expected[0] + expected[1], strict=True):
            assert torch.equal(bits(a), bits(e)), (gap, offset, moved)


def test_any_alignment_of_all_arrays(library):
    """The same of both arrays at once. dweight alone: then all arrays that are looked at can be moved."""
    places = [(0, offset) for offset in range(34)] + [(gap, 0) for gap in (1, 15, 17)]
    which = ((True, False), (False, True), (True, True))
    for cols, moved, (gap, offset) in itertools.product((120, 136), which, places):
        x, _, w, b = arguments(2, cols, (BF16, BF16))
        buffer = torch.empty(2 * (cols + gap) + offset, dtype=BF16)
        view = buffer.as_strided((2, cols), (cols + gap, 1), offset).copy_(x)
        _, mean, rstd = library.ops.forward(x, (cols,), w, b, 1e-5)
        arrays = [view if move else x for move in moved]
        with library.schedule(one_launch_limit=0):
            backward = library.ops.backward(*arrays, (cols,), mean, rstd, w, b, [False, True, False])
        check_backward(backward, x, x, w, context=(cols, moved, gap, offset))


@paths
@all_dtypes
def test_family(library, dtypes, path):
    """RMSNorm, zero-centred weights, residuals, also in place, and backward from the output."""
    for cols, rms, zero_centered in itertools.product((5, 40, 1200), (False, True), (False, True)):
        variant = {"rms": rms, "zero_centered_weight": zero_centered}
        x, dy, w, b = arguments(7, cols, dtypes)
        residual, dsum = randn(x.shape, dtypes[0]), randn(x.shape, dtypes[0])
        w = torch.where(w.abs() < 0.1, 0.5, w)
        with library.schedule("random", cols, 2, **path):
            for r, weight, bias in ((residual, w, b), (residual, None, None), (None, w, None)):
                output, total, mean, rstd = library.ops.norm_forward(x, r, (cols,), weight, bias, **variant)
                if r is None:
                    total = x
                else:
                    assert torch.equal(bits(total), bits(x + r))
                check_forward((output, mean, rstd), total, weight, bias, context=(cols,), **variant)
                ds = None if r is None else dsum
                gradients = library.ops.norm_backward(dy, ds, total, (cols,), mean, rstd, weight, bias, ALL, **variant)
                check_backward(gradients, dy, total, weight, context=(cols,), grad_sum=ds, **variant)
            in_place = residual.clone()
            outputs = library.ops.norm_forward_(x, in_place, (cols,), w, b, **variant)
            expected = library.ops.norm_forward(x, residual, (cols,), w, b, **variant)
            assert torch.equal(bits(in_place), bits(expected[1]))
            assert torch.equal(bits(outputs[0]), bits(expected[0]))

            variant["memory_efficient"] = True
            w = w - int(zero_centered)
            for weight, bias in ((w, b), (w, None), (None, b)):
                output, _, _, rstd = library.ops.norm_forward(x, None, (cols,), weight, bias, **variant)
                error = xhat_error_from_output(x, weight, bias, rms, zero_centered)
                dtype = (bias if weight is None else weight).dtype
                for mask in (ALL, [False, True, False]):
                    gradients = library.ops.norm_backward(
                        dy, None, output, (cols,), None, rstd, weight, bias, mask, **variant
                    )
                    check_backward(
                        gradients, dy, x, weight, dtype, rms=rms, zero_centered_weight=zero_centered, xhat_error=error
                    )


@paths
def test_sums_that_overflow(library, path):
    """Rows that are gone over twice are those of the sum, also where it has taken the place of the residual."""
    for cols in (5, 40, 600):
        x, residual, w, b = arguments(9, cols, (F32, F32))
        w, b = w[:1].expand(cols), b[:1].expand(cols)
        residual[1::2] *= 1e37
        expected = library.ops.norm_forward(x + residual, None, (cols,), None, None)
        in_place = residual.clone()
        with library.schedule("random", cols, 2, **path):
            output, mean, rstd = library.ops.norm_forward_(x, in_place, (cols,))
        assert torch.equal(in_place, x + residual)
        check_forward((output, mean, rstd), x + residual)
        assert expected[0].isfinite().all()


@paths
def test_alignment_of_residuals_and_parameters(library, path):
    """One that is not aligned has the whole row taken number by number, to the same bits."""
    x, residual, dy, dsum, w, b = (randn((3, 64), F32) for _ in range(6))

    def shifted(t):
        return torch.empty(t.numel() + 1)[1:].view_as(t).copy_(t)

    def run_all(*moved):
        r, ds, weight, bias = (shifted(t) if i in moved else t for i, t in enumerate((residual, dsum, w[0], b[0])))
        forward = library.ops.norm_forward(x, r, (64,), weight, bias)
        backward = library.ops.backward(dy, x, (64,), *forward[2:], weight, bias, ALL)
        options = {"memory_efficient": True}
        from_output = library.ops.norm_backward(dy, ds, x, (64,), None, forward[3], weight, bias, ALL, **options)
        return [*forward, *backward, *from_output]

    with library.schedule(**path):
        expected = run_all()
        for moved in range(4):
            assert all(torch.equal(bits(a), bits(e)) for a, e in zip(run_all(moved), expected, strict=True))


@pytest.mark.parametrize("rows", [256, 257, 511, 512])
@pytest.mark.parametrize("path_limit, cols", [(0, 1), (emulated_ops.UNLIMITED, 1024)], ids=["cut", "in registers"])
def test_how_many_rows_are_summed_at_once(library, rows, path_limit, cols):
    """256. The first number of each sum is so large that ones after it are lost; those of the next sum are not."""
    parts = 3  # blocks that take rows in turn
    dy = torch.ones(rows, parts)
    dy[0] = 2.0**24
    dy = dy.reshape(-1, 1).expand(-1, cols)
    ones = torch.ones(len(dy), 1)
    with library.schedule(path_limit=path_limit):
        _, _, grad_bias = library.ops.backward(dy, dy, (cols,), ones, ones, None, None, [False, False, True])
    assert grad_bias.eq(parts * (torch.tensor(2.0**24) + (rows - 256))).all()


@paths
def test_constant_rows_of_huge_numbers(library, path):
    """Their mean times 1 / sqrt(eps) overflows, and xhat is 0 all the same."""
    for cols in (1, 5, 300):
        x = torch.tensor([3e38, -3e38, 2.0**120]).reshape(-1, 1).repeat(1, cols)
        dy, w = randn(x.shape, F32), randn(cols, F32)
        with library.schedule("random", cols, 2, **path):
            _, backward = run(library, x, dy, w, torch.zeros_like(w))
        check_backward(backward, dy, x, w, context=(cols,))
        assert backward[1].eq(0).all(), cols


def test_statistics_are_scaled_only_where_they_must_be(library):
    """Rows of a standard deviation up to 2^60 are not: numbers so small that scaling would cost them digits survive."""
    small = 2.0**-40 * (1 + 2.0**-23)
    x = torch.tensor([[small, -small] * 20])
    dy = torch.ones_like(x)
    zero = torch.zeros(1, 1)
    for path_limit, rstd in itertools.product((0, emulated_ops.UNLIMITED), (0.5, 2.0**-60)):
        with library.schedule(path_limit=path_limit):
            _, grad_weight, _ = library.ops.backward(
                dy, x, (40,), zero, torch.full((1, 1), rstd), None, None, [False, True, False]
            )
        assert torch.equal(grad_weight, x[0] * rstd), (path_limit, rstd)


@paths
def test_constant_outputs(library, path):
    """From the output, xhat is 1 everywhere, of which the correction of the mean leaves nothing."""
    for cols, w, b in itertools.product((5, 40, 600), (None, 2.0), (None, 0.5)):
        weight, bias = (None if value is None else torch.full((cols,), value) for value in (w, b))
        y = torch.full((3, cols), (w or 1.0) + (b or 0.0))
        with library.schedule("random", cols, 2, **path):
            _, grad_weight, _ = library.ops.norm_backward(
                randn(y.shape, F32), None, y, (cols,), None, torch.ones(3, 1), weight, bias, ALL, memory_efficient=True
            )
        assert grad_weight.eq(0).all(), (cols, w, b)


def test_many_rows(library):
    """More than are summed in one go, by three blocks of four rows, which have a warp each, and of one."""
    for rows, cols, dtype in [(3 * 4 * 256 + 9, 129, F64), (3 * 256 + 9, 514, F32)]:
        x, dy, w, b = arguments(rows, cols, (dtype, dtype))
        for mask in (ALL, [False, True, False]):
            with library.schedule("random", rows, 3):
                forward, backward = run(library, x, dy, w, b, mask)
            check_forward(forward, x, w, b)
            check_backward(backward, dy, x, w)


def test_many_rows_of_ones(library):
    """More than are added up in one go: to a whole number, exactly."""
    rows = 64 * 256 + 33
    x = torch.ones(rows, 1)
    with library.schedule(path_limit=0):
        _, _, grad_bias = library.ops.backward(x, x, (1,), x, x, None, None, [False, False, True])
    assert grad_bias == rows


@paths
@pytest.mark.parametrize("dtypes", [(F32, F32), (F64, F64), (BF16, F32)], ids=dtypes_id)
def test_hard_numbers(library, dtypes, path):
    """Large means, rows of few or of equal numbers, and numbers whose squares, sums or differences overflow."""
    for cols in (7, 300, 1000, 3000) if "path_limit" not in path else (7, 1030):
        w, b = (randn(cols, dtypes[1]) for _ in range(2))
        rows = [randn((2, cols), dtypes[0], offset=offset) for offset in (1e2, 1e4, 1e6)]
        outliers = torch.ones(4, cols, dtype=F64)
        outliers[0, :1] = outliers[1, -2:] = 1000
        outliers[2] *= 0.1
        outliers[3, ::2] = 0.7
        rows += [outliers.to(dtypes[0])]
        rows += [huge_rows(dtypes[0], magnitude, cols, "cpu") for d, magnitude in HUGE if d == dtypes[0]]
        for x in rows:
            dy = randn(x.shape, dtypes[0], offset=1)
            with library.schedule("random", cols, 2, **path):
                forward, backward = run(library, x, dy, w, b)
                _, weight_alone = run(library, x, dy, w, b, [False, True, False])
            check_forward(forward, x, w, b, context=(cols,))
            check_backward(backward, dy, x, w, context=(cols,))
            check_backward(weight_alone, dy, x, w, context=(cols,))


@paths
def test_numbers_that_overflow(library, path):
    """Rows are gone over twice."""
    for cols in (5, 40, 600, 1200):
        x, dy, w, b = arguments(9, cols, (F32, F32))
        x[1::2] *= 1e37
        x[2] = torch.inf
        x[4] = torch.nan
        with library.schedule("random", cols, 2, **path):
            (output, *_), (dx, *_) = run(library, x, dy, w, b, [True, False, False])
        wrong = torch.zeros(9, dtype=torch.bool)
        wrong[[2, 4]] = True
        assert torch.equal(output.isnan().all(1), wrong) and torch.equal(output.isnan().any(1), wrong)
        assert torch.equal(dx.isnan().any(1), wrong)


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("dtypes", [(F32, F32), (F64, F64)], ids=dtypes_id)
def test_parts_that_overflow(library, dtypes, architecture):
    """Of some parts, and not of others; or all parts are tame, and their distances overflow, or the sum of squares."""
    huge = torch.finfo(dtypes[0]).max
    for cols in (300, 40 * 128):
        x, _, w, b = arguments(7, cols, dtypes)
        x[0, : cols // 2] *= huge / 16
        x[1, cols // 2 :] *= huge / 16
        x[2, : cols // 2] += huge / 4
        x[2, cols // 2 :] -= huge / 4
        x[3, -1] = huge / 2
        x[4, : cols // 2] += huge / 1e4  # no sum of a chunk overflows
        x[4, cols // 2 :] -= huge / 1e4
        x[5] += huge / 1e4 * (1 - torch.arange(cols, dtype=dtypes[0]) // 128 % 2 * 2)
        x[6] *= (huge / 256) ** 0.5
        with library.schedule("random", cols, 2, path_limit=0, architecture=architecture):
            forward = library.ops.forward(x, x.shape[1:], w, b, 1e-5)
        check_forward(forward, x, w, b, context=(cols,))


# Of all sizes; at last those whose distances from their rounded mean have squares that underflow, in float and double:
# then a sum of these is less than that of the squared mean distance.
EXPONENTS = torch.cat([torch.arange(-10.0, 27.0), torch.full((20,), -52.0), torch.full((20,), -486.0)])
CONSTANTS = torch.linspace(1, 1.99, len(EXPONENTS), dtype=F64) * 2.0 ** EXPONENTS.double()


@paths
@pytest.mark.parametrize("dtype", [F32, F64])
def test_constant_rows(library, dtype, path):
    """Nothing is left of them, however their mean was rounded; their variance may be 0 and no less: eps is nearly 0."""
    for cols in (7, 40, 300, 1200):
        x = CONSTANTS.to(dtype).reshape(-1, 1).repeat(1, cols)
        with library.schedule("random", cols, 2, **path):
            output, _, _ = library.ops.forward(x, (cols,), None, None, 1e-30)
            _, _, rstd = library.ops.forward(x, (cols,), None, None, 0.0)
        assert torch.equal(output, torch.zeros_like(x)), cols
        assert rstd.gt(10).all(), cols


def test_constant_rows_of_many_parts(library):
    """Nothing is left of them but the bias, whatever the mean's rounding was."""
    x = torch.tensor([0.1, 1e6 + 0.3, 3e-39]).reshape(-1, 1).expand(-1, 5000)
    for path_limit in (0, emulated_ops.UNLIMITED):
        with library.schedule(path_limit=path_limit):
            output, _, _ = library.ops.forward(x, x.shape[1:], None, None, 1e-5)
        assert torch.equal(output, torch.zeros_like(output))


# ---- channels first --------------------------------------------------------------------------------------------------

STAGED = [emulated_ops.UNLIMITED, 0]  # whether a block's numbers fit into shared memory
staged = pytest.mark.parametrize("path_limit", STAGED, ids=["staged", "not staged"])


def images(shape, dtypes):
    """Return images [N, C, P] of input and grad_output, weight and bias."""
    x, dy = (randn(shape, dtypes[0]) for _ in range(2))
    return x, dy, randn(shape[1], dtypes[1]), randn(shape[1], dtypes[1])


def run_images(library, x, dy, w=None, b=None, mask=ALL):
    output, mean, rstd = library.ops.channels_first_forward(x, w, b, 1e-5)
    return (output, mean, rstd), library.ops.channels_first_backward(dy, x, mean, rstd, w, b, mask)


def check_images(forward, backward, x, dy, w=None, b=None, parameter_dtype=None, context=()):
    def rows(t):
        return None if t is None else t.movedim(1, -1).reshape(-1, t.size(1)).contiguous()

    check_forward([rows(t) for t in forward], rows(x), w, b, context=context)
    check_backward((rows(backward[0]), *backward[1:]), rows(dy), rows(x), w, parameter_dtype, context=context)


@all_dtypes
@staged
def test_images(library, dtypes, path_limit):
    """Fewer pixels than lanes, as many, and more, of two images in a warp; fewer channels than warps, or many runs.

    49 * (1 / 49) is less than 1: that pixel's image is found too low at first.
    Any order of the threads gives the same bits, but for the weight's gradients, which depend on the number of blocks.
    """
    for shape in [(1, 1, 2), (2, 3, 31), (1, 7, 32), (3, 8, 33), (70, 9, 2), (5, 130, 13), (1, 300, 40), (2, 5, 49)]:
        x, dy, w, b = images(shape, dtypes)
        first = None
        for order, seed, blocks in SCHEDULES:
            with library.schedule(order, seed, blocks, path_limit=path_limit):
                forward, backward = run_images(library, x, dy, w, b)
            check_images(forward, backward, x, dy, w, b, context=(shape, order))
            first = first or (*forward, backward[0])
            for actual, expected in zip((*forward, backward[0]), first, strict=True):
                assert torch.equal(bits(actual), bits(expected)), (shape, order, seed)


@pytest.mark.parametrize("architecture, kib", [(80, 96), (86, 93), (89, 93), (90, 96), (120, 93)])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32)], ids=["fp32", "bf16-fp32"])
def test_which_images_are_staged(library, dtypes, architecture, kib):
    """96 KiB of dynamic shared memory, where the GPU has that beside 6 KiB of static, hold 32 pixels.

    In forward of the input, in backward of the input and grad_output.
    """
    channels = kib * 1024 // 32 // dtypes[0].itemsize
    for count in (channels // 2, channels // 2 + 1, channels, channels + 1):
        x, dy, w, b = images((1, count, 2), dtypes)
        library.launched()
        with library.schedule(architecture=architecture):
            forward, backward = run_images(library, x, dy, w, b)
        check_images(forward, backward, x, dy, w, b, context=(count,))
        launched = library.launched()
        for kind, limit in (("forward", channels), ("backward", channels // 2)):
            (name,) = (name for name in launched if f"channels_first_{kind}" in name)
            assert name.endswith(f"{str(count <= limit).lower()}>"), (count, name)


@staged
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32)], ids=["fp32", "bf16-fp32"])
def test_masks_and_absent_parameters_of_images(library, dtypes, path_limit):
    """Nothing is written that was not asked for: its memory does not exist."""
    x, dy, w, b = images((3, 20, 15), dtypes)
    for mask, (weight, bias) in itertools.product(
        itertools.product((False, True), repeat=3), ((w, b), (w, None), (None, b), (None, None))
    ):
        with library.schedule("reverse", path_limit=path_limit):
            forward, backward = run_images(library, x, dy, weight, bias, list(mask))
        assert [gradient is not None for gradient in backward] == list(mask)
        parameter_dtype = dtypes[1] if weight is not None or bias is not None else dtypes[0]
        check_images(forward, backward, x, dy, weight, bias, parameter_dtype, context=(mask,))


@all_dtypes
@staged
def test_strides_of_images(library, dtypes, path_limit):
    """Channels and images lie amid NaN."""
    x, dy, w, b = images((3, 10, 15), dtypes)
    with library.schedule(path_limit=path_limit):
        expected = run_images(library, x, dy, w, b)
        for gap, offset in ((0, 1), (3, 0), (2, 5)):
            views = []
            for tensor in (x, dy):
                buffer = torch.full((3 * 10 * (15 + gap) + 3 * gap + offset,), torch.nan, dtype=tensor.dtype)
                strides = (10 * (15 + gap) + gap, 15 + gap, 1)
                views.append(buffer.as_strided(tensor.shape, strides, offset).copy_(tensor))
            actual = run_images(library, *views, w, b)
            for a, e in zip(actual[0] + actual[1], expected[0] + expected[1], strict=True):
                assert torch.equal(bits(a), bits(e)), (gap, offset)


@staged
def test_hard_numbers_of_images(library, path_limit):
    """Large means, and numbers whose squares, sums or differences overflow, beside ordinary ones."""
    for dtype, channels in ((F32, 7), (F32, 300), (F64, 40), (BF16, 64)):
        w, b = (randn(channels, dtype) for _ in range(2))
        pixels = [randn((3, channels), dtype, offset=offset) for offset in (0, 1e4, 1e6)]
        pixels += [huge_rows(d, magnitude, channels, "cpu") for d, magnitude in HUGE if d == dtype]
        for rows in pixels:
            x = rows.t()[None].contiguous()
            dy = randn(x.shape, dtype, offset=1)
            with library.schedule("random", channels, 2, path_limit=path_limit):
                forward, backward = run_images(library, x, dy, w, b)
            check_images(forward, backward, x, dy, w, b, context=(dtype, channels))


@staged
@pytest.mark.parametrize("dtype", [F32, F64])
def test_constant_pixels(library, dtype, path_limit):
    """As constant rows."""
    for channels in (7, 49, 300):
        x = CONSTANTS.to(dtype).repeat(1, channels, 1)
        with library.schedule("random", channels, 2, path_limit=path_limit):
            output, _, _ = library.ops.channels_first_forward(x, None, None, 1e-30)
            _, _, rstd = library.ops.channels_first_forward(x, None, None, 0.0)
        assert torch.equal(output, torch.zeros_like(x)), channels
        assert rstd.gt(10).all(), channels


@staged
def test_pixels_that_overflow(library, path_limit):
    """What is infinite or NaN stays in its pixel."""
    x, dy, w, b = images((2, 40, 20), (F32, F32))
    x[0, :, 1::2] *= 1e37
    x[0, 3, 2] = torch.inf
    x[1, 5, 4] = torch.nan
    with library.schedule("random", 1, 2, path_limit=path_limit):
        (output, *_), (dx, *_) = run_images(library, x, dy, w, b, [True, False, False])
    wrong = torch.zeros(2, 20, dtype=torch.bool)
    wrong[0, 2] = wrong[1, 4] = True
    for result in (output, dx):
        assert torch.equal(result.isnan().all(1), wrong) and torch.equal(result.isnan().any(1), wrong)
