"""The kernels' machine code for sm_90, run: what it computes, and how many instructions that takes."""

import ctypes
import functools

import cuda_binary
import pytest
import sass_run
import torch
from reference import BF16, F16, F32, check_backward, check_forward, dtypes_id
from shapes import randn
from test_kernels import TILES

# All but fp64, which no memory keeps up with.
PAIRS = [(F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32)]
NAMES = {F32: "float", F16: "__half", BF16: "__nv_bfloat16"}
CHUNK, CLUSTER = 1024, 8  # vectors; blocks


class Params(ctypes.Structure):
    """ForwardParams of csrc/layer_norm.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "cols", "input", "input_stride")),
        *((name, ctypes.c_int64) for name in ("residual", "residual_stride", "sum", "weight", "bias")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("output", "mean", "rstd", "workspace")),
        *((name, ctypes.c_bool) for name in ("rms", "zero_centered_weight")),
        *((name, ctypes.c_int) for name in ("dtype", "param_dtype")),
        ("stream", ctypes.c_int64),
    ]


class Cut(ctypes.Structure):
    """How csrc/cuda/forward.cu cuts long rows."""

    _fields_ = [(name, ctypes.c_int) for name in ("chunk", "chunks_of_part", "parts", "first_row")]


class Known(ctypes.Structure):
    """Besides, what it asks often: here, of rows with a weight and a bias."""

    _fields_ = [("flags", ctypes.c_uint), *((name, ctypes.c_float) for name in ("eps", "cols", "reciprocal"))]


def ceil_div(a, b):
    return -(-a // b)


class BackwardParams(ctypes.Structure):
    """Of csrc/layer_norm.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "cols", "grad_output", "grad_output_stride")),
        *((name, ctypes.c_int64) for name in ("input", "input_stride", "grad_sum", "grad_sum_stride")),
        *((name, ctypes.c_int64) for name in ("mean", "rstd", "weight", "bias")),
        *((name, ctypes.c_int64) for name in ("grad_input", "grad_weight", "grad_bias", "workspace")),
        *((name, ctypes.c_bool) for name in ("rms", "zero_centered_weight", "from_output")),
        *((name, ctypes.c_int) for name in ("dtype", "param_dtype")),
        ("stream", ctypes.c_int64),
    ]


class Plan(ctypes.Structure):
    """How csrc/cuda/backward.cu shares out the work."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("first_row", "end_row", "slots", "pitch")),
        ("reciprocal_cols", ctypes.c_double),
        *((name, ctypes.c_int) for name in ("chunks", "chunk", "parts", "chunks_of_part")),
        *((name, ctypes.c_int) for name in ("log2_lanes", "rows_of_block", "stages")),
        *((name, ctypes.c_bool) for name in ("in_cluster", "sums_first", "adds")),
        *((name, ctypes.c_bool) for name in ("aligned", "aligned_parameters", "usual")),
        *((name, ctypes.c_int64) for name in ("grad_weight", "grad_bias")),
    ]


@functools.cache
def sections(source="forward.cu"):
    kernels = cuda_binary.compile_kernels(cuda_binary.CSRC / source, 90)
    return {kernel.name.replace("layernorm::cuda::", "").replace(" ", ""): kernel.section for kernel in kernels}


def issued_per_row(dtypes, cols):
    """Return the instructions that forward issues for a row, those of a warp counted for each of its lanes."""
    count = 16 // dtypes[0].itemsize
    vectors = ceil_div(cols, count)
    threads, of_thread = next((tile for limit, tile in TILES.items() if vectors <= limit), (None, None))
    rows = 1 if threads is None else max(128 // threads, 1)  # as many as a block has
    x, w, b = randn((rows, cols), dtypes[0]), randn(cols, dtypes[1]), randn(cols, dtypes[1])
    y, mean, rstd = torch.empty_like(x), torch.empty(rows, 1), torch.empty(rows, 1)
    params = Params(rows=rows, cols=cols, input_stride=cols, eps=1e-5)
    for name, tensor in {"input": x, "weight": w, "bias": b, "output": y, "mean": mean, "rstd": rstd}.items():
        setattr(params, name, tensor.data_ptr())
    known = Known(4 | 8 | (cols % count == 0), 1e-5, cols, 1 / cols)

    def run(kernel, threads, *arguments, **blocks):
        launch = sass_run.Launch(sections()[kernel], b"".join(map(bytes, arguments)), threads, **blocks)
        launch.buffers = [tensor.flatten().view(torch.uint8).numpy() for tensor in (x, w, b, y, mean, rstd)]
        return 32 * launch.run() / rows

    names = ",".join(NAMES[dtype] for dtype in dtypes)
    if threads:
        block = 128 if threads <= 32 else ceil_div(vectors, 128) * 32
        issued = run(f"forward_rows<{names},Tile<{threads},{of_thread}>>", block, params, known)
    else:
        chunk = ceil_div(ceil_div(vectors, ceil_div(vectors, CHUNK)), 32) * 32
        of_part = ceil_div(ceil_div(vectors, chunk), CLUSTER)
        cut = Cut(chunk * count, of_part, ceil_div(ceil_div(vectors, chunk), of_part))
        kernel = "forward_chunk_in_cluster" if of_part == 1 else "forward_in_cluster"
        issued = run(f"{kernel}<{names}>", ceil_div(chunk, 128) * 32, params, cut, known, blocks=cut.parts)
    check_forward((y, mean, rstd), x, w, b, context=(cols,))
    return issued


@pytest.mark.parametrize("dtypes", PAIRS, ids=dtypes_id)
def test_memory_is_the_limit_at_every_length(dtypes):
    """In the time in which an H100's memory moves a byte, its warps issue 7.75 instructions for a lane.

    For an element of 16 bits that is read and written that is 31, of 32 bits 62; the statistics come on top. Counted is
    all that the warps of a block issue, whether for lanes that have columns or for idle ones, of rows that are aligned.
    Most lanes are idle in rows of one vector more than the last tile holds, or than fills the lanes.
    """
    count, size = 16 // dtypes[0].itemsize, dtypes[0].itemsize
    lengths = {1, 3, 5, 97, 128, 161, 257, 2048, 8 * CHUNK, 16 * CHUNK} | {limit + 1 for limit in TILES}
    for vectors in sorted(lengths | {9 * CHUNK // 4 + 1, 3 * CHUNK + 1, 8 * CHUNK + 1}):
        cols = vectors * count
        assert issued_per_row(dtypes, cols) <= 7.75 * 2 * cols * size, vectors


@pytest.mark.parametrize("dtypes", PAIRS, ids=dtypes_id)
def test_full_rows(dtypes):
    """Those that fill a tile, or a cluster's blocks, issue at most 24 per element of 16 bits, 40 of 32.

    Lanes with room for one vector have too few elements for that.
    """
    limit = 40 if dtypes[0] == F32 else 24
    for vectors in (*(limit for limit, (_, of_thread) in TILES.items() if of_thread > 1), 80 * CHUNK):
        cols = vectors * 16 // dtypes[0].itemsize
        assert issued_per_row(dtypes, cols) <= limit * cols, vectors


@pytest.mark.parametrize("dtypes", PAIRS, ids=dtypes_id)
def test_rows_that_are_not_aligned(dtypes):
    """Full tiles, less an element, issue no more than keeps them at 0.8 of the memory's rate; shorter rows do."""
    count = 16 // dtypes[0].itemsize
    for vectors in (128, 2048):
        cols = vectors * count - 1
        assert issued_per_row(dtypes, cols) <= 7.75 / 0.8 * 2 * cols * dtypes[0].itemsize, vectors


def issued_by_backward(dtypes, vectors, rounds, blocks=1):
    """Return the instructions that a block, or a cluster, issues which takes rows so many times; how many those are."""
    cols = vectors * 16 // dtypes[0].itemsize
    is_short = vectors <= 128
    lanes = next(n for n in (1, 2, 4, 8, 16, 32) if vectors <= (1 if n == 1 else 4 * n)) if is_short else 1
    rows_of_block = 128 // lanes if is_short else 1
    rows = rounds * rows_of_block
    x, dy, w = randn((rows, cols), dtypes[0]), randn((rows, cols), dtypes[0]), randn(cols, dtypes[1])
    variance, mean = torch.var_mean(x.double(), 1, correction=0, keepdim=True)
    mean, rstd = mean.float(), (variance + 1e-5).rsqrt().float()
    dx, partial_sums = torch.empty_like(x), torch.empty(2, cols)
    params = BackwardParams(
        rows=rows, cols=cols, grad_output_stride=cols, input_stride=cols, grad_weight=1, grad_bias=1
    )
    tensors = {"grad_output": dy, "input": x, "mean": mean, "rstd": rstd, "weight": w, "grad_input": dx}
    tensors["workspace"] = partial_sums
    for name, tensor in tensors.items():
        setattr(params, name, tensor.data_ptr())
    plan = Plan(end_row=rows, slots=1, pitch=cols, reciprocal_cols=1 / cols, chunks=blocks, chunk=cols // blocks)
    plan.stages, plan.in_cluster = 2, blocks > 1
    plan.log2_lanes, plan.rows_of_block = lanes.bit_length() - 1, rows_of_block
    plan.aligned = plan.aligned_parameters = plan.usual = True
    names = ",".join(NAMES[dtype] for dtype in dtypes)
    kernel = f"backward_rows<{names},{'WarpTile' if is_short else 'BlockTile'}>"
    threads = 128 if is_short else ceil_div(vectors // blocks, 128) * 32
    launch = sass_run.Launch(sections("backward.cu")[kernel], bytes(params) + bytes(plan), threads, blocks=blocks)
    launch.buffers = [tensor.flatten().view(torch.uint8).numpy() for tensor in tensors.values()]
    issued = 32 * launch.run()
    check_backward((dx, *partial_sums.to(dtypes[1])), dy, x, w, context=(cols,))
    return issued, rows


@pytest.mark.parametrize("dtypes", PAIRS, ids=dtypes_id)
def test_backward_issues_few_instructions(dtypes):
    """Of full warps, blocks and clusters: at most 36 for an element of 16 bits, 70 of 32.

    In the time in which an H100's memory moves three elements, its warps issue 46.5 and 93 for a lane. Counted is what
    each further row costs: a block's first takes, besides, what begins the sums and stores them.
    """
    for vectors, blocks in ((8, 1), (128, 1), (256, 1), (1024, 2)):
        (first, one), (both, two) = (issued_by_backward(dtypes, vectors, rounds, blocks) for rounds in (3, 4))
        cols = vectors * 16 // dtypes[0].itemsize
        assert (both - first) / (two - one) <= (36 if dtypes[0].itemsize == 2 else 70) * cols, (vectors, blocks)
