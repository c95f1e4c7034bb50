"""The benchmarks' inputs, and the errors of results against float64."""

import math
import sys
from pathlib import Path

import numpy
import torch
from torch import Tensor

# The exact formulas are in tests/support/reference.py.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.reference import BF16, DTYPES, F16, F32, F64, Backward, Forward, dtypes_id, exact  # noqa: E402

DTYPE_PAIRS = {dtypes_id(pair): pair for pair in DTYPES}  # name -> dtypes of the data and of the parameters
EPS = 1e-5
QUANTITIES = ("output", "grad_input", "grad_weight", "grad_bias")
Exact = Tensor | numpy.ndarray

# A result is wrong if its error, divided by the largest exact value, exceeds this. The 16-bit limits are 4 roundings of
# that value, which allow for 16-bit intermediate values. The `accuracy` command measures the errors themselves.
TOLERANCE = {F64: 1e-13, F32: 1e-5, F16: 4 * 2.0**-10, BF16: 4 * 2.0**-7}


class Case:
    """Input, upstream gradient and parameters of one problem size, drawn from normal distributions.

    `dtypes` is a key of DTYPE_PAIRS; `offset` and `scale` are the mean and the standard deviation of the input.
    """

    def __init__(self, rows: int, cols: int, dtypes: str, device: str = "cpu", offset: float = 0, scale: float = 1):
        self.rows, self.cols, self.dtypes = rows, cols, dtypes
        self.dtype, self.parameter_dtype = DTYPE_PAIRS[dtypes]
        # float32 cannot represent small deviations from a large mean, so such inputs are drawn in float64.
        drawn = F64 if offset or self.dtype == F64 else F32

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=drawn, device=device)

        self.x = (draw(rows, cols) * scale + offset).to(self.dtype).requires_grad_()  # [rows, cols]
        self.dy = draw(rows, cols).to(self.dtype)  # [rows, cols]
        self.weight, self.bias = (torch.nn.Parameter(draw(cols).to(self.parameter_dtype)) for _ in range(2))  # [cols]

    def bytes_moved(self) -> tuple[int, int]:
        """Return the bytes that forward and backward must read and write.

        forward reads x, weight and bias and writes y, mean and rstd. backward reads dy, x, mean, rstd and weight and
        writes three gradients.
        """
        statistics = 2 * self.rows * (8 if self.dtype == F64 else 4)
        return tuple(count * (self.x.nbytes + self.weight.nbytes) + statistics for count in (2, 3))


def exact_results(case: Case) -> dict[str, Exact]:
    """Return the exact output and gradients: in float64 or, if the data is float64, in long double."""
    widen = exact if case.dtype == F64 else lambda tensor: tensor.detach().double()
    weight, bias = widen(case.weight), widen(case.bias)
    forward = Forward(widen(case.x), EPS)
    backward = Backward(widen(case.dy), forward, weight)
    results = forward.output(weight, bias), backward.grad_input, backward.grad_weight, backward.grad_bias
    return dict(zip(QUANTITIES, results, strict=True))


@torch.no_grad()
def error(found: Tensor, expected: Exact) -> float:
    """Return the largest difference, divided by the largest expected value; NaN counts as infinite.

    If all expected values are zero, as the input gradient is for a single column, the error is absolute.
    """
    found = found.detach().double() if isinstance(expected, Tensor) else exact(found)
    largest = float(abs(found - expected).max()) / (float(abs(expected).max()) or 1)
    return math.inf if math.isnan(largest) else largest
