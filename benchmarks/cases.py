"""What is computed: rows, parameters and gradients, and how far the results of anybody are from the exact ones."""

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

# The formulas that results are compared with are those of the tests.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from reference import BF16, DTYPES, F16, F32, F64, Backward, Forward, dtypes_id, exact  # noqa: E402

PAIRS = {dtypes_id(pair): pair for pair in DTYPES}  # name -> dtypes of the data and of the parameters
EPS = 1e-5
QUANTITIES = ("output", "grad_input", "grad_weight", "grad_bias")
RESULTS = {"forward": QUANTITIES[:1], "backward": QUANTITIES[1:], "both": QUANTITIES}  # of a pass

# How far from the exact result, in parts of its largest value, is called wrong: no claim of precision, which `accuracy`
# looks at, but what whoever looks at a time has to know. 16-bit results may be off by 4 roundings, as when they are
# rounded in between, float32 and float64 by some hundred.
WRONG = {F64: 1e-13, F32: 1e-5, F16: 4 * 2.0**-10, BF16: 4 * 2.0**-7}

CHUNK = 1 << 20  # elements that are compared at a time, as numbers of 8 or 16 bytes


def parse_shape(text: str) -> tuple[int, int]:
    """Return rows and columns of "4096x768"."""
    rows, _, cols = text.partition("x")
    if not (rows.isdecimal() and cols.isdecimal() and int(rows) and int(cols)):
        raise ValueError(f"Expected a shape ROWSxCOLS such as 4096x768, but got {text!r}")
    return int(rows), int(cols)


class Case:
    """Rows of normal numbers of mean `offset` and deviation `scale`, gradients and parameters.

    Args:
        rows: Number of rows.
        cols: Number of columns, over which is normalized.
        dtypes: One of PAIRS.
        device: Where the tensors are.
        offset: Mean of the input.
        scale: Deviation of the input.
    """

    def __init__(self, rows: int, cols: int, dtypes: str, device: str = "cpu", offset: float = 0, scale: float = 1):
        self.rows, self.cols, self.dtypes = rows, cols, dtypes
        self.dtype, self.parameter_dtype = PAIRS[dtypes]
        # In float64 where float32 could not tell the numbers apart.
        drawn = F64 if offset or self.dtype == F64 else F32

        def draw(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, dtype=drawn, device=device).to(dtype)

        x = torch.randn((rows, cols), dtype=drawn, device=device) * scale + offset
        self.x = x.to(self.dtype).requires_grad_()  # [rows, cols]
        self.dy = draw((rows, cols), self.dtype)  # [rows, cols]
        self.weight, self.bias = (torch.nn.Parameter(draw((cols,), self.parameter_dtype)) for _ in range(2))  # [cols]

    def bytes_moved(self, which: str) -> int:
        """Return the bytes that forward, backward or both must read and write.

        forward reads x, weight and bias and writes y, mean and rstd; backward reads dy, x, mean, rstd and weight and
        writes the three gradients.
        """
        statistics = 2 * self.rows * (8 if self.dtype == F64 else 4)
        forward = 2 * self.x.nbytes + statistics + 2 * self.weight.nbytes
        backward = 3 * self.x.nbytes + statistics + 3 * self.weight.nbytes
        return {"forward": forward, "backward": backward, "both": forward + backward}[which]

    def operations(self, which: str) -> int:
        """Return the additions and multiplications of the formulas in csrc/layer_norm.h.

        forward, for each element: mean 1, deviation 1, variance 2, xhat 1, output 2. backward: xhat 2, g 1, its mean 1,
        mean of g * xhat 2, grad_input 4, grad_weight 2, grad_bias 1.
        """
        return self.x.numel() * {"forward": 7, "backward": 13, "both": 20}[which]


def errors(case: Case, results: dict[str, tuple[Tensor, ...]]) -> dict[str, dict[str, float]]:
    """Return the largest error of each of QUANTITIES in parts of the largest exact value, for each of `results`.

    A result is all of QUANTITIES, or the first alone.

    Exact are the formulas of tests/reference.py, in float64, and for float64 in numpy's long double. Where all exact
    values are zero, as are gradients of rows of a single column, the error is absolute. NaN counts as infinite.
    """
    wide = exact if case.dtype == F64 else lambda tensor: tensor.detach().double()
    weight, bias = wide(case.weight), wide(case.bias)
    rows = max(1, CHUNK // case.cols)
    largest = dict.fromkeys(QUANTITIES, 0.0)
    worst = {name: dict.fromkeys(QUANTITIES[: len(result)], 0.0) for name, result in results.items()}
    sums = [0, 0]  # of weight and bias

    def compare(index: int, value, part: slice = slice(None)) -> None:  # noqa: ANN001 (a tensor, or numpy's)
        quantity = QUANTITIES[index]
        largest[quantity] = max(largest[quantity], float(abs(value).max()))
        for name in (name for name in results if quantity in worst[name]):
            error = float(abs(wide(results[name][index][part]) - value).max())
            worst[name][quantity] = max(worst[name][quantity], math.inf if math.isnan(error) else error)

    for first in range(0, case.rows, rows):
        part = slice(first, first + rows)
        forward = Forward(wide(case.x[part]), EPS)
        backward = Backward(wide(case.dy[part]), forward, weight)
        compare(0, forward.output(weight, bias), part)
        compare(1, backward.grad_input, part)
        sums = [sums[0] + backward.grad_weight, sums[1] + backward.grad_bias]
    compare(2, sums[0])
    compare(3, sums[1])
    return {name: {q: error / (largest[q] or 1) for q, error in by.items()} for name, by in worst.items()}


def largest_error(error: dict[str, float], which: str) -> float | None:
    """Return the largest error of the results of forward, backward or both; None if there are none."""
    return max((error[quantity] for quantity in RESULTS[which] if quantity in error), default=None)


def fault(case: Case, error: dict[str, float], which: str) -> str:
    """Say which result of forward, backward or both is wrong, and by how much; "" if none is."""
    quantity = max(RESULTS[which], key=error.get)
    return (
        ""
        if error[quantity] <= WRONG[case.dtype]
        else f"{quantity} is off by {error[quantity]:.1e} of its largest value"
    )
