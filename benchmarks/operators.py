"""What the benchmarks time: ours and torch's on the same tensors, once the results are known to be right."""

import statistics
from functools import partial

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
EPS = 1e-5
ALL = [True, True, True]


def ratio(theirs: list[float], ours: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles((t / o for t, o in zip(theirs, ours, strict=True)), n=4)
    return dict(zip(("low", "median", "high"), quartiles, strict=True))


def check(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Against a wrong result, not for its last bits, which the tests look at: within 4 roundings of the largest."""
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    if not error <= 4 * torch.finfo(actual.dtype).eps:
        raise SystemExit(f"{name} is off by {error:.1e} of its largest value")


class Operators:
    """Rows, gradients and parameters, and the calls of both: of overloads, else the search for one is timed too."""

    def __init__(self, rows: int, cols: int, dtype: torch.dtype, device: str = "cpu"):
        self.x, self.dy = (torch.randn(rows, cols, device=device).to(dtype) for _ in range(2))
        self.w, self.b = (torch.randn(cols, device=device).to(dtype) for _ in range(2))
        self.shape = [cols]
        ours, theirs = torch.ops.layernorm, torch.ops.aten
        forward = (self.x, self.shape, self.w, self.b, EPS)
        self.our_forward = partial(ours.forward.default, *forward)
        self.their_forward = partial(theirs.native_layer_norm.default, *forward)

        def backward(operator, statistics):
            return partial(operator, self.dy, self.x, self.shape, *statistics, self.w, self.b, ALL)

        _, *self.statistics = self.our_forward()
        _, *their_statistics = self.their_forward()
        self.our_backward = backward(ours.backward.default, self.statistics)
        self.their_backward = backward(theirs.native_layer_norm_backward.default, their_statistics)

    def check(self) -> None:
        """Compare our results with float64."""
        wide = [t.double().requires_grad_() for t in (self.x, self.w, self.b)]
        expected = torch.nn.functional.layer_norm(wide[0], self.shape, *wide[1:], EPS)
        check(self.our_forward()[0], expected.detach(), "output")
        gradients = torch.autograd.grad(expected, wide, self.dy.double())
        for actual, right in zip(self.our_backward(), gradients, strict=True):
            check(actual, right, "gradient")
