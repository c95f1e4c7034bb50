"""Check an installation: print how it was built, and its errors beside torch's.

It needs only torch and takes a few seconds. It exits with an error if a result exceeds its error bound, or if a GPU is
visible but the package was built without CUDA.
"""

import argparse
import platform
import signal
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _C, _build_info, layer_norm

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
NAMES = {F64: "fp64", F32: "fp32", F16: "fp16", BF16: "bf16"}
DTYPES = ((F64, F64), (F32, F32), (F16, F16), (BF16, BF16), (F16, F32), (BF16, F32))  # input, parameters
QUANTITIES = ("output", "grad_input", "grad_weight", "grad_bias")

# Many rows, short rows, and rows that do not fit into registers: the kernels handle each differently.
CHECKED_SHAPES = ((1024, 768), (8192, 64), (3, 20001))
MEAN = 100.0  # large compared with the standard deviation of 1, so that an inaccurate variance shows
EPS = 1e-5

# The error bound in addition to the rounding of the result, relative to the terms of the result. In float32 the package
# promises 5e-7, a few roundings of 2^-24 = 6e-8. For float64 input, 1e-13 is 900 roundings of 2^-53, because the
# reference is float64 as well.
ARITHMETIC_BOUND = {F64: 1e-13, F32: 5e-7, F16: 5e-7, BF16: 5e-7}

LayerNorm = Callable[[Tensor, list[int], Tensor, Tensor, float], Tensor]


def main() -> None:
    """Print the report, and exit with a message for each failed check."""
    argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__).parse_args()
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


def print_environment() -> None:
    """Print versions, devices and how the package was built."""
    built_with = f"CUDA for {_build_info.cuda_architectures}" if _build_info.with_cuda else "no CUDA"
    print(f"python          {platform.python_version()}")
    print(f"torch           {torch.__version__} (CUDA {torch.version.cuda})")
    print(f"layernorm_ext   {_build_info.version}")
    print(f"built           for torch {_build_info.torch_version}, {built_with}: {_build_info.cuda_reason}")
    print(f"cpu             {_C.cpu_capability()} kernels, {torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        print(f"cuda:{index}          {torch.cuda.get_device_name(index)}")


def check_errors(devices: list[str]) -> list[str]:
    """Print the largest errors for each device and pair of dtypes; return a message for each failure."""
    print(f"\nlargest error / largest value, against float64; rows of mean {MEAN:g} and deviation 1")
    print(" " * 18 + "".join(f"{quantity:>20}" for quantity in QUANTITIES))
    print(f"{'device  dtype':<18}" + "      ours     torch" * len(QUANTITIES))
    failures, notes = [], []
    for device in devices:
        for dtype, parameter_dtype in DTYPES:
            pair = NAMES[dtype] if dtype == parameter_dtype else f"{NAMES[dtype]}+{NAMES[parameter_dtype]}"
            label = f"{device}, {pair}"
            try:
                ours, excesses = measure(layer_norm, device, dtype, parameter_dtype)
            except RuntimeError as error:
                ours, excesses = [float("nan")] * len(QUANTITIES), [f"no result: {first_line(error)}"]
            try:
                theirs = [f"{e:.1e}" for e in measure(F.layer_norm, device, dtype, parameter_dtype)[0]]
            except RuntimeError as error:
                theirs = ["—"] * len(QUANTITIES)
                notes.append(f"— {label}: torch refuses the pair: {first_line(error)}")
            cells = "".join(f"{a:>10.1e}{b:>10}" for a, b in zip(ours, theirs, strict=True))
            print(f"{device:<8}{pair:<10}{cells}  {'FAIL' if excesses else 'ok'}")
            failures += [f"{label}: {excess}" for excess in excesses]
    print("fp16+fp32: input in fp16, parameters in fp32", *notes, sep="\n")
    return failures


def first_line(error: Exception) -> str:
    """Return the message without a C++ stack trace."""
    return str(error).partition("\n")[0]


def measure(
    function: LayerNorm, device: str, dtype: torch.dtype, parameter_dtype: torch.dtype
) -> tuple[list[float], list[str]]:
    """Return the largest error of each quantity, and a message for each that exceeds its bound."""
    errors, excesses = [], []
    for shape in CHECKED_SHAPES:
        arguments = make_arguments(shape, device, dtype, parameter_dtype)
        results = forward_and_backward(function, *arguments)
        expected = reference(*(argument.detach().double().cpu() for argument in arguments))
        for quantity, result, (value, terms) in zip(QUANTITIES, results, expected, strict=True):
            error = (result.double().cpu() - value).abs()
            errors.append(error.max() / value.abs().max())
            # Rounding to the dtype adds at most half a unit in the last place.
            bound = torch.finfo(result.dtype).eps / 2 * value.abs() + ARITHMETIC_BOUND[dtype] * terms
            if not (error <= bound).all():  # also true for NaN
                excess = (error / bound).max().item()
                excesses.append(f"the error of {quantity} is {excess:.3g} times its bound at {shape[0]}x{shape[1]}")
    return torch.stack(errors).view(-1, len(QUANTITIES)).amax(dim=0).tolist(), excesses


def make_arguments(
    shape: tuple[int, int], device: str, dtype: torch.dtype, parameter_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return input, weight, bias and grad_output, with the same values on every device."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    w, b = (torch.randn(shape[1], generator=generator).to(device, parameter_dtype) for _ in range(2))
    return (x + MEAN).to(dtype), w, b, dy.to(dtype)


def forward_and_backward(function: LayerNorm, x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Compute the quantities."""
    for tensor in (x, w, b):
        tensor.requires_grad_()
    y = function(x, list(w.shape), w, b, EPS)
    return y.detach(), *torch.autograd.grad(y, (x, w, b), dy)


def reference(x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Compute the quantities in float64, each with the magnitudes of its terms added up, which scale its error bound.

    The magnitude of the normalized value xhat counts as 1 + |xhat|, because its error is relative to that.
    """
    centered = x - x.mean(1, keepdim=True)
    rstd = 1 / (centered.square().mean(1, keepdim=True) + EPS).sqrt()
    xhat = centered * rstd
    g = dy * w
    size = 1 + xhat.abs()

    def mean(t: Tensor) -> Tensor:
        return t.mean(1, keepdim=True)

    return [
        (xhat * w + b, size * w.abs() + b.abs()),
        (rstd * (g - mean(g) - xhat * mean(g * xhat)), rstd * (g.abs() + size * mean(g.abs() * size))),
        ((dy * xhat).sum(0), (dy.abs() * size).sum(0)),
        (dy.sum(0), dy.abs().sum(0)),
    ]


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end silently when the output is a closed pipe
    main()
