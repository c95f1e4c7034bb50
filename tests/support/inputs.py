"""Inputs for the kernels: sizes, ordinary and extreme values, memory layouts."""

import math

import numpy as np
import pytest
import torch

from support.reference import BF16, DTYPES, F16, F32, F64, dtypes_id

all_dtypes = pytest.mark.parametrize("dtypes", DTYPES, ids=dtypes_id)
# One pair for each dtype of the output, for tests of stores, which do not depend on the dtype of the parameters.
output_dtypes = pytest.mark.parametrize("dtypes", [(F64, F64), (F32, F32), (F16, F16), (BF16, F32)], ids=dtypes_id)
data_dtypes = pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=dtypes_id)

# Numbers of columns by the code path that they cover. A pack of the CPU kernels has 4 to 32 elements; the kernels for
# narrow rows take up to 4096 bytes, and the sums of longer rows are added in chunks of 128 to 1024 elements.
COLUMNS = {
    "tails of one pack": [*range(1, 132)],
    "fp64 row limit": [511, 512, 513],
    "transformer widths and fp32 row limit": [767, 768, 769, 1023, 1024, 1025, 1535, 1536, 1537],
    "16-bit row limit": [2047, 2048],
    "tails of two packs": [*range(2049, 2113)],
    "chunk limits": [4095, 4096, 4097, 8191, 8192, 8193],
    "many chunks": [20001],
}
columns = pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)


def rows_for(cols):
    """Return numbers of rows that leave a remainder in loops over two or four rows at a time."""
    return [1, 7, 9] if cols <= 131 else [1, 7] if cols <= 2048 else [3] if cols < 4095 else [1, 3]


# Means of inputs whose standard deviation is 1. float32 rounds a mean of 1e6 by up to 0.03.
OFFSETS = [0, 1e2, 1e4, 1e6]
dtypes_and_offsets = pytest.mark.parametrize(
    "dtypes, offset",
    [(d, offset) for d in DTYPES for offset in OFFSETS if offset < torch.finfo(d[0]).max],  # fp16's is 65504
    ids=dtypes_id,
)


def randn(shape, dtype, device="cpu", offset=0):
    """Return normal numbers with the mean `offset`. Drawing takes long, so they repeat after a million."""
    shape = torch.Size((shape,) if isinstance(shape, int) else shape)
    size, period = shape.numel(), 1_000_003  # a prime number, so that rows differ
    values = torch.randn(min(size, period), dtype=F64) + offset
    values = values if size <= period else values.repeat(-(-size // period))[:size]
    return values.view(shape).to(dtype).to(device)


def random_args(backend, dtypes, *shape, offset=0):
    """Return input, grad_output, weight and bias for rows [N, C] or images [N, C, *].

    With a mean of 0 instead of 0.5, sums of grad_output would be so small that an error in them could be missed.
    """
    x, dy = (randn(shape, dtypes[0], backend.device, mean) for mean in (offset, 0.5))
    return x, dy, *(randn(shape[1], dtypes[1], backend.device) for _ in range(2))


def amid_nans(tensor, gap=3, offset=1):
    """Return a view of a buffer of NaN, with `gap` NaNs after each row and at least 80 on both sides.

    Elements that a kernel reads outside a row make its results NaN. The view is aligned to its element size only.
    """
    *batch, cols = tensor.shape
    rows, margin = math.prod(batch), 80 + offset  # a pack has up to 32 elements; kernels load two at a time
    buffer = torch.full((2 * margin + rows * (cols + gap),), torch.nan, dtype=tensor.dtype, device=tensor.device)
    return buffer.as_strided((rows, cols), (cols + gap, 1), margin).view(tensor.shape).copy_(tensor)


def hard_rows(dtype, cols):
    """Return rows of large means, of outliers, and of numbers whose sums, squares or differences overflow."""
    huge, half = torch.finfo(dtype).max, cols // 2
    x = torch.randn(19, cols, dtype=F64)
    x[:3] += torch.tensor([1e2, 1e4, 1e6])[:, None]
    x[3:7] = 1
    x[3, 0] = x[4, -2:] = 1000  # outliers at either end
    x[5] *= 0.1  # a constant that is no binary fraction
    x[6, ::2] = 0.7
    x[7] = huge * x[7].sign()
    x[8] = huge * x[8].abs().clamp(0.5, 1)
    x[9] = huge * x[9].clamp(-1e-10, 1e-10)
    x[10, :half] *= huge / 16  # the sums of only some chunks of a row overflow
    x[11, half:] *= huge / 16
    x[12, :half] += huge / 4  # no chunk overflows, but the differences of their means do
    x[12, half:] -= huge / 4
    x[13, -1] = huge / 2
    x[14] = x[14].sign() * huge / 1e4  # only the sum of squares overflows
    chunk = 32 * 16 // dtype.itemsize  # 32 vectors of 16 bytes, as in emulated clusters of short rows
    x[15] += huge / 1e4 * (1 - torch.arange(cols).double() // chunk % 2 * 2)  # the means of chunks alternate in sign
    x[16] *= (huge / 256) ** 0.5  # squares near the largest number
    x[17, 1:] = 0
    x[17, 0] = huge
    x[18, ::2] = huge * x[18, ::2].sign()
    return x.clamp(-huge, huge).to(dtype)  # float16 has no mean of 1e6


def tiny_rows(dtype, cols):
    """Return rows whose squares underflow in the accumulation type, except in float16, which has no such numbers."""
    # The reciprocals of their standard deviations, which multiply the gradients of the input, are finite.
    exponent = -20 if dtype == F16 else 12 - math.log2(torch.finfo(dtype).max)
    x = torch.randn(9, cols, dtype=F64) * torch.logspace(exponent / 3, exponent, 9, base=2, dtype=F64)[:, None]
    x[1::4] += x[1::4].abs().amax(1, keepdim=True) * 100  # large means
    x[2, 1:] = 0  # an outlier
    return x.to(dtype)


def lazy_zeros(shape, device):
    """Return zeros of bfloat16. On a CPU, pages that are never written take no memory."""
    if device == "cpu":
        return torch.from_numpy(np.zeros(shape, np.int16)).view(BF16)
    size = math.prod(shape) * BF16.itemsize
    if torch.cuda.mem_get_info()[0] < 5 * size:  # input, output, grad_output, grad_input, and one to spare
        pytest.skip(f"needs a GPU with {5 * size / 1e9:.0f} GB of free memory")
    return torch.zeros(shape, dtype=BF16, device=device)


# Each of these functions returns the values of a tensor in another memory layout. The memory between them is NaN.


def transposed(t):
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def every_second_column(t):
    buffer = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype, device=t.device)
    return buffer[..., ::2].copy_(t)


def with_gaps(t):
    """Leave gaps in every dimension."""
    buffer = torch.full([n + 3 for n in t.shape], torch.nan, dtype=t.dtype, device=t.device)
    return buffer[tuple(slice(1, n + 1) for n in t.shape)].copy_(t)


def misaligned(t):
    buffer = torch.full((t.numel() + 6,), torch.nan, dtype=t.dtype, device=t.device)
    return buffer[3:-3].view(t.shape).copy_(t)


def negative(t):
    return torch._neg_view(-t)


LAYOUTS = [transposed, every_second_column, with_gaps, misaligned, negative]

# Options of the operators, and batch dimensions of parameters. A sample is the rows that share a weight and a bias.

VARIANTS = {
    "layer": {"rms": False, "zero_centered_weight": False},
    "layer-centered": {"rms": False, "zero_centered_weight": True},
    "rms": {"rms": True, "zero_centered_weight": False},
    "rms-centered": {"rms": True, "zero_centered_weight": True},
}
variants = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
# The variants that have memory_efficient=True, which saves the output for backward.
layer_variants = pytest.mark.parametrize("variant", list(VARIANTS.values())[:2], ids=list(VARIANTS)[:2])
rms_or_not = pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])

# Batch sizes of input, weight and bias: the shapes without the normalized dimension. () is a parameter that all rows
# share, and None an absent one.
BATCH_SIZES = {
    "shared": ((3, 5), (), ()),
    "shared, all dimensions": ((3, 5), (1, 1), (1, 1)),
    "per sample": ((3, 5), (3, 1), (3, 1)),
    "per position": ((3, 5), (1, 5), (1, 5)),
    "per row": ((3, 5), (3, 5), (3, 5)),
    "rows of a matrix": ((7,), (7,), (7,)),
    "weight per sample, bias shared": ((3, 5), (3, 1), ()),
    "weight shared, bias per position": ((3, 5), (1, 1), (1, 5)),
    "bias alone": ((3, 5), None, (3, 1)),
    "outer and inner dimension": ((2, 3, 4), (2, 1, 4), (2, 1, 4)),
    "middle dimension": ((2, 3, 4), (1, 3, 1), (1, 3, 1)),
    "many rows": ((2, 70), (2, 1), (2, 1)),
}
batch_sizes = pytest.mark.parametrize("batches", BATCH_SIZES.values(), ids=BATCH_SIZES)


def arguments(batches, cols, dtypes, device="cpu", surround=lambda t: t):
    """Return input, grad_output, weight and bias.

    `batches` is a value of BATCH_SIZES. `dtypes` are those of input and both parameters, or of input, weight and bias.
    `surround` changes the layout of each tensor.
    """
    x, dy = (surround(randn((*batches[0], cols), dtypes[0], device)) for _ in range(2))
    parameters = zip(batches[1:], (dtypes[1], dtypes[-1]), strict=True)
    return x, dy, *(None if p is None else surround(randn((*p, cols), dtype, device)) for p, dtype in parameters)
