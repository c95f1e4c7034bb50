"""What the operators are called with: numbers of rows and columns, ordinary and hard numbers, layouts in memory."""

import math
import mmap

import pytest
import torch
from reference import BF16, DTYPES, F16, F32, F64, dtype_id, dtypes_id

all_dtypes = pytest.mark.parametrize("dtypes", DTYPES, ids=dtypes_id)
data_dtypes = pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=dtype_id)

# What the numbers of columns are for, and the numbers.
COLUMNS = {
    "every tail of every pack (4 to 32 numbers)": [*range(1, 132)],
    "the last narrow row (4096 bytes) of fp64": [511, 512, 513],
    "widths of transformers, and the last narrow row of fp32": [767, 768, 769, 1023, 1024, 1025, 1535, 1536, 1537],
    "the last narrow row of fp16 and bf16": [2047, 2048],
    "every tail of wide rows, of two packs in flight": [*range(2049, 2113)],
    "chunks of the sums, four and eight": [4095, 4096, 4097, 8191, 8192, 8193],
    "many chunks, and nothing round": [20001],
}

# Narrow rows are swept four at a time in forward and two in backward, the rest one by one.
ROWS = [1, 2, 3, 4, 5, 9]

# Offsets of the rows from zero, in standard deviations, as far as the dtype goes. At 1e6 the mean in fp32 is off by up
# to 0.03.
OFFSETS = [0, 1e2, 1e4, 1e6]
dtypes_and_offsets = pytest.mark.parametrize(
    "dtypes, offset",
    [(d, offset) for d in DTYPES for offset in OFFSETS if offset < torch.finfo(d[0]).max],
    ids=lambda v: dtypes_id(v) if isinstance(v, tuple) else f"{v:g}",
)


def rows_for(cols):
    """Return the numbers of rows worth testing: of long rows few, for the time they take."""
    return ROWS if cols <= 1025 else [1, 5] if cols < 4095 else [1, 3]


def randn(shape, dtype, device="cpu", offset=0):
    """Return normal numbers about `offset`, drawn in float64."""
    return (torch.randn(shape, dtype=F64) + offset).to(dtype).to(device)


def amid_nans(tensor, gap=3, offset=1):
    """Return rows [rows, cols] as a view into a buffer of NaN, with `gap` NaN between rows and at least 70 around.

    What a kernel reads outside a row then shows up in its results. The view is aligned to its element size only.
    """
    rows, cols = tensor.shape
    margin = 70 + offset  # more than two packs
    buffer = torch.full((2 * margin + rows * (cols + gap),), torch.nan, dtype=tensor.dtype, device=tensor.device)
    view = buffer.as_strided((rows, cols), (cols + gap, 1), margin)
    view.copy_(tensor)
    return view


def amid_nans_1d(tensor):
    """Return a vector as a view into a buffer of NaN."""
    return amid_nans(tensor[None])[0]


# The dtype and how large the numbers get: the first powers that overflow when squared, and the very largest.
HUGE = [(F32, 1e20), (F32, 1e30), (F32, 1e38), (F32, "max"), (BF16, 1e20), (BF16, 1e38), (BF16, "max")]
HUGE += [(F64, 1e155), (F64, 1e200), (F64, 1e307), (F64, "max")]
huge = pytest.mark.parametrize("dtype, magnitude", HUGE, ids=lambda v: f"{v}".removeprefix("torch."))


def huge_rows(dtype, magnitude, cols, device):
    """Return 9 rows of numbers up to `magnitude`; the fourth holds ordinary ones."""
    x = torch.rand(9, cols, dtype=F64) * 2 - 1
    x[0] = x[0].sign()
    x[1] = 0.5 + 0.5 * x[1].abs()  # whose sum overflows
    x[2, 1:] = 0
    x[4, ::2] = x[4, ::2].sign()
    x *= torch.finfo(dtype).max if magnitude == "max" else magnitude
    x[3] = torch.randn(cols, dtype=F64)
    return x.to(dtype).to(device)


def lazy_zeros(shape, dtype, device):
    """Return zeros; on a CPU they take memory only where they are written."""
    if device != "cpu":
        bytes_of_it = math.prod(shape) * dtype.itemsize
        if torch.cuda.mem_get_info()[0] < 5 * bytes_of_it:  # input, grad_output and grad_input, and room to spare
            pytest.skip(f"needs a GPU with {5 * bytes_of_it / 1e9:.0f} GB of free memory")
        return torch.zeros(shape, dtype=dtype, device=device)
    rows, cols = shape
    memory = mmap.mmap(-1, rows * cols * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def bits(tensor):
    """Return a copy of the tensor's bytes: unlike numbers, they tell -0 from 0, and NaN equals itself."""
    return tensor.resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def layouts(x):
    """Yield name and view of the numbers of x [2, 6, 4, 10], the last dimension normalized, for each kind of layout."""
    yield "contiguous", x
    yield "transposed batch", x.transpose(0, 1).contiguous().transpose(0, 1)
    yield "transposed columns", x.transpose(2, 3).contiguous().transpose(2, 3)
    yield "channels_last", x.to(memory_format=torch.channels_last)
    wide = torch.full((2, 6, 4, 20), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    yield "columns [::2]", wide[..., ::2]
    wide = torch.full((2, 6, 8, 10), torch.nan, dtype=x.dtype, device=x.device)
    wide[:, :, ::2] = x
    yield "rows [::2]", wide[:, :, ::2]
    wide = torch.full((2, 6, 4, 17), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., 3:13] = x
    yield "sliced columns", wide[..., 3:13]
    for offset in (1, 2, 3, 5):
        buffer = torch.full((x.numel() + offset + 9,), torch.nan, dtype=x.dtype, device=x.device)
        view = buffer[offset : offset + x.numel()].view_as(x)
        yield f"storage offset {offset}", view.copy_(x)
    yield "negative bit", torch._neg_view(-x)
