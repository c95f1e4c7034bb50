"""Check an installation: `python -m layernorm_ext` shows how it was built, how exact it is and how fast.

Needs nothing but torch, takes about ten seconds, and exits with an error if a result is off by more than its
bound or a GPU is visible that the package was not built for. Times are information; no check depends on them.
"""

import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _C, _build_info, layer_norm

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
NAMES = {F64: "fp64", F32: "fp32", F16: "fp16", BF16: "bf16"}
DTYPES = ((F64, F64), (F32, F32), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32))  # input, parameters
QUANTITIES = ("output", "grad_input", "grad_weight", "grad_bias")

# Many rows, short rows, and rows too long for registers: each takes another way through the kernels.
CHECKED_SHAPES = ((1024, 768), (8192, 64), (3, 20001))
TIMED_SHAPES = ((32, 768), (4096, 768), (65536, 64))
MEAN = 100.0  # of the rows, whose standard deviation is 1: hard enough to tell a good variance from a poor one
EPS = 1e-5
SECONDS_PER_TIMING = 0.25

# What may be lost besides the rounding of the result to its dtype, relative to the terms it is made of. Sums
# are kept in fp32, whose rounding, 2^-24 = 6e-8, enters a handful of times: the package promises 5e-7. For
# fp64 input they are kept in fp64, as are the reference's: 1e-13 is 900 roundings of 2^-53.
ARITHMETIC_BOUND = {F64: 1e-13, F32: 5e-7, F16: 5e-7, BF16: 5e-7}

LayerNorm = Callable[[Tensor, tuple[int, ...], Tensor, Tensor, float], Tensor]


def main() -> None:
    """Print everything, and exit with a sentence for every failed check."""
    print_environment()
    failures = []
    devices = ["cpu"]
    if torch.cuda.is_available():
        if _build_info.with_cuda:
            devices.append("cuda")
        else:
            failures.append(
                f"a GPU is visible, but layernorm_ext was built without CUDA ({_build_info.cuda_reason}); "
                "install what was missing and run `pip install .` in its checkout again"
            )
    failures += check_errors(devices)
    if failures:
        sys.exit("\n" + "\n".join(f"FAILED: {failure}" for failure in failures))
    print_times(devices)


def print_environment() -> None:
    """Print versions, devices and how the package was built."""
    built_with = f"CUDA for {_build_info.cuda_architectures}" if _build_info.with_cuda else "no CUDA"
    print(f"python          {platform.python_version()}")
    print(f"torch           {torch.__version__} (CUDA {torch.version.cuda})")
    print(f"layernorm_ext   {version('layernorm-ext')}")
    print(f"built           for torch {_build_info.torch_version}, {built_with}: {_build_info.cuda_reason}")
    print(f"cpu             {_C.cpu_capability()} kernels, {torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        print(f"cuda:{index}          {torch.cuda.get_device_name(index)}")


def check_errors(devices: list[str]) -> list[str]:
    """Print the largest errors of every device and pair of dtypes; return a sentence for each too large."""
    print(f"\nlargest error / largest value, against float64; rows of mean {MEAN:g} and deviation 1")
    print(" " * 18 + "".join(f"{quantity:>20}" for quantity in QUANTITIES))
    print(f"{'device  dtype':<18}" + "      ours     torch" * len(QUANTITIES))
    failures, notes = [], []
    for device in devices:
        for dtype, parameter_dtype in DTYPES:
            pair = NAMES[dtype] if dtype == parameter_dtype else f"{NAMES[dtype]}+{NAMES[parameter_dtype]}"
            label = f"{device}, {pair}"
            try:
                ours, outside = measure(layer_norm, device, dtype, parameter_dtype)
            except RuntimeError as error:
                ours, outside = [float("nan")] * len(QUANTITIES), ["no result: " + first_line(error)]
            try:
                theirs = [f"{e:.1e}" for e in measure(F.layer_norm, device, dtype, parameter_dtype)[0]]
            except RuntimeError as error:
                theirs = ["—"] * len(QUANTITIES)
                notes.append(f"— {label}: torch refuses the pair: {first_line(error)}")
            cells = "".join(f"{a:>10.1e}{b:>10}" for a, b in zip(ours, theirs, strict=True))
            print(f"{device:<8}{pair:<10}{cells}  {'FAIL' if outside else 'ok'}")
            failures += [f"{label}: {what}" for what in outside]
    print("fp16+fp32: input in fp16, parameters in fp32", *notes, sep="\n")
    return failures


def first_line(error: Exception) -> str:
    """Return what an error says, without the C++ stack that may follow."""
    return str(error).partition("\n")[0]


def measure(
    function: LayerNorm, device: str, dtype: torch.dtype, parameter_dtype: torch.dtype
) -> tuple[list[float], list[str]]:
    """Return the largest error of each of QUANTITIES, and a sentence for each that exceeds its bound."""
    relative, outside = [], []
    for shape in CHECKED_SHAPES:
        arguments = make_arguments(shape, device, dtype, parameter_dtype)
        results = forward_and_backward(function, *arguments)
        expected = reference(*(argument.detach().double().cpu() for argument in arguments))
        relative.append([])
        for quantity, result, (value, terms) in zip(QUANTITIES, results, expected, strict=True):
            error = (result.double().cpu() - value).abs()
            relative[-1].append(error.max() / value.abs().max())
            # Rounding to the dtype costs at most half a unit in the last place: finfo.eps / 2 of the value.
            bound = torch.finfo(result.dtype).eps / 2 * value.abs() + ARITHMETIC_BOUND[dtype] * terms
            if not (error <= bound).all():  # written so that NaN fails too
                excess = (error / bound).max().item()
                outside.append(f"the error of {quantity} is {excess:.3g} times its bound at {shape[0]}x{shape[1]}")
    return torch.tensor(relative).amax(dim=0).tolist(), outside  # amax, unlike max(), keeps a NaN


def make_arguments(
    shape: tuple[int, int], device: str, dtype: torch.dtype, parameter_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return input, weight, bias and grad_output, the same numbers for every device."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator) for _ in range(2))
    w, b = (torch.randn(shape[1], generator=generator) for _ in range(2))
    return (
        (x + MEAN).to(device, dtype),
        w.to(device, parameter_dtype),
        b.to(device, parameter_dtype),
        dy.to(device, dtype),
    )


def forward_and_backward(function: LayerNorm, x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Return the QUANTITIES."""
    for tensor in (x, w, b):
        tensor.requires_grad_()
    y = function(x, w.shape, w, b, EPS)
    return y.detach(), *torch.autograd.grad(y, (x, w, b), dy)


def reference(x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Compute the QUANTITIES in float64, each with the size of the terms that its error is relative to.

    An error of xhat, relative to 1 + |xhat|, passes into everything that xhat is a factor of.
    """
    centered = x - x.mean(1, keepdim=True)
    rstd = 1 / (centered.square().mean(1, keepdim=True) + EPS).sqrt()
    xhat = centered * rstd
    g = dy * w
    size = 1 + xhat.abs()

    def mean(t: Tensor) -> Tensor:
        return t.mean(1, keepdim=True)

    return [
        (xhat * w + b, 1 + (xhat * w).abs() + b.abs()),
        (rstd * (g - mean(g) - xhat * mean(g * xhat)), rstd * (g.abs() + size * mean(g.abs() * size))),
        ((dy * xhat).sum(0), (dy.abs() * size).sum(0)),
        (dy.sum(0), dy.abs().sum(0)),
    ]


def print_times(devices: list[str]) -> None:
    """Print how long forward and backward take, and the ratio to torch's time."""
    print(f"\n{'microseconds':<24}{'forward':>30}{'backward':>30}")
    print(f"{'device  dtype   shape':<24}" + "      ours     torch     ratio" * 2)
    for device in devices:
        for dtype in (F32, BF16):
            for shape in TIMED_SHAPES:
                cells = "".join(
                    f"{ours:>10.1f}{theirs:>10.1f}{ratio:>10.2f}"
                    for ours, theirs, ratio in time_both(device, dtype, shape)
                )
                print(f"{device:<8}{NAMES[dtype]:<8}{'x'.join(map(str, shape)):<8}{cells}")
    print("ratio: time of ours / time of torch's, the median of runs in turn")


def time_both(device: str, dtype: torch.dtype, shape: tuple[int, int]) -> list[tuple[float, float, float]]:
    """Return, for forward and for backward, the microseconds of ours, those of torch's, and their ratio."""
    x, w, b, dy = make_arguments(shape, device, dtype, dtype)
    calls = [partial(function, x, w.shape, w, b, EPS) for function in (layer_norm, F.layer_norm)]
    forward = compare(*calls, device)
    for tensor in (x, w, b):
        tensor.requires_grad_()
    backward = [partial(torch.autograd.grad, call(), (x, w, b), dy, retain_graph=True) for call in calls]
    return [forward, compare(*backward, device)]


def compare(ours: Callable[[], object], theirs: Callable[[], object], device: str) -> tuple[float, float, float]:
    """Return the median microseconds of both, timed in turn for SECONDS_PER_TIMING, and of their ratios."""

    def microseconds(call: Callable[[], object], repeats: int) -> float:
        wait_for(device)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        wait_for(device)
        return 1e6 * (time.perf_counter() - start) / repeats

    microseconds(theirs, 1)  # the first calls allocate, and load a GPU's kernels
    # A millisecond or more each, so that neither the clock nor waiting for a GPU counts.
    repeats = 1 + int(1000 / microseconds(ours, 2))
    pairs = []
    end = time.perf_counter() + SECONDS_PER_TIMING
    while time.perf_counter() < end or len(pairs) < 3:
        pairs.append((microseconds(ours, repeats), microseconds(theirs, repeats)))
    median_ours, median_theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    return median_ours, median_theirs, statistics.median(a / b for a, b in pairs)


def wait_for(device: str) -> None:
    """Wait until the device has finished what it was given; a CPU always has."""
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
