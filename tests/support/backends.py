"""The backends under test, the results of their operators, and the comparison of results with float64."""

import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

import layernorm_ext
from support.reference import broadcast_rows, check_backward, check_forward, check_sum

# The output_mask of backward requests the gradients of input, weight and bias, then those of gate, scaled_input and
# input_scale. The masks of tests without gates have the first three entries.
ALL = [True, True, True]
NONE = [False, False, False]
MASKS = [list(mask) for mask in itertools.product([False, True], repeat=3)]


@dataclass(frozen=True)
class Backend:
    """One implementation of the operators. A test with the argument `backend` runs on each of them."""

    name: str
    device: str
    ops: object  # torch.ops.layernorm, or the namespace of the emulated operators
    layer_norm: Callable  # (input, normalized_shape, weight, bias, eps) -> output, differentiable
    limits: Callable = contextlib.nullcontext  # makes the context of a test: limits of the emulated GPU

    @property
    def forward(self):  # (input, normalized_shape, weight, bias, eps) -> output, mean, rstd
        return self.ops.forward

    def backward(self, grad_output, input, shape, mean, rstd, weight, bias, output_mask, *others, **options):
        """Return the gradients of input, weight and bias."""
        arguments = (grad_output, input, shape, mean, rstd, weight, bias, [*output_mask, *NONE])
        return self.ops.backward(*arguments, *others, **options)[:3]

    def __str__(self):
        return self.name


def installed(device):
    """Return the backend that calls the installed package with tensors on this device."""
    return Backend(device, device, torch.ops.layernorm, layernorm_ext.layer_norm)


def emulated(name, mode="plain", **limits):
    """Return a backend that emulates the CUDA kernels on CPU tensors. It needs the headers of CUDA.

    `mode` and `limits` are those of emulated_build.library() and Library.schedule().
    """
    import emulated_build  # in tools/cuda_emulator

    library = emulated_build.library(mode)
    schedule = functools.partial(library.schedule, **limits)
    return Backend(name, "cpu", library.ops, lambda *args, **kwargs: library.ops.forward(*args, **kwargs)[0], schedule)


# Forward keeps short rows in registers. Other rows, and all rows of backward, are staged in the shared memory of a
# block or of a cluster of blocks, or take two launches, which read them twice. Limits of the emulated GPU make short
# rows take each path: with path_limit=0, registers hold no row, a block holds 32 vectors of a row, and shared memory
# holds no image; compute capability 8.0 has no clusters.
PATHS = {
    "registers": {},
    "clusters": {"path_limit": 0},
    "launches": {"path_limit": 0, "architecture": 80},
}
EMULATED = {"emulated", *PATHS}
BACKENDS = {
    "cpu": lambda: installed("cpu"),
    "cuda": lambda: installed("cuda"),
    "emulated": lambda: emulated("emulated"),
    **{name: functools.partial(emulated, name, "checked", **limits) for name, limits in PATHS.items()},
}

# A test with this mark also runs on each path of the CUDA kernels with every memory access checked: make test-device.
every_path = pytest.mark.every_path


class Results(NamedTuple):
    """The results of forward and backward. Those that were not computed are None.

    With a residual, the norm's input is total = input + residual or, if the operators also get an input_scale,
    total = input_scale * scaled_input + residual. grad_input is then the gradient of total.
    """

    output: torch.Tensor
    total: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    rstd: torch.Tensor | None = None
    grad_input: torch.Tensor | None = None
    grad_weight: torch.Tensor | None = None
    grad_bias: torch.Tensor | None = None
    grad_gate: torch.Tensor | None = None  # of a gated norm
    grad_scaled_input: torch.Tensor | None = None
    grad_input_scale: torch.Tensor | None = None

    @property
    def forward(self):
        return self.output, self.mean, self.rstd

    @property
    def gradients(self):
        return self.grad_input, self.grad_weight, self.grad_bias

    @property
    def gradients_of_gates(self):
        return self.grad_gate, self.grad_scaled_input, self.grad_input_scale

    def map(self, function):
        return Results(*(t if t is None else function(t) for t in self))

    def rows(self, index=...):
        """Select rows of the results that have one for each row of the input. The parameters' gradients become None."""
        return self._replace(grad_weight=None, grad_bias=None, grad_input_scale=None).map(lambda t: t[index])

    def map_rows(self, function):
        """Apply a function to all results but the parameters' gradients."""
        parameters = {name: getattr(self, name) for name in ("grad_weight", "grad_bias", "grad_input_scale")}
        return self.rows().map(function)._replace(**parameters)

    def requested(self, mask):
        """Return the results that a call with this output_mask has: the other gradients are None."""
        all_gradients = (*self.gradients, *self.gradients_of_gates)
        gradients = (g if requested else None for g, requested in zip(all_gradients, mask, strict=False))
        return Results(self.output, self.total, self.mean, self.rstd, *gradients)


def forward(
    backend, x, residual, weight, bias, eps=1e-5, normalized_shape=None, gate=None, input_scale=None, **options
):
    """Return the results of the forward operator, with or without a residual and gates."""
    arguments = (normalized_shape or x.shape[-1:], weight, bias, eps)
    if residual is not None or gate is not None:
        return Results(*backend.ops.forward.fused(x, *arguments, residual, gate, input_scale, **options))
    output, mean, rstd = backend.ops.forward(x, *arguments, **options)
    return Results(output, None, mean, rstd)


def run(
    backend, x, dy, weight=None, bias=None, eps=1e-5, normalized_shape=None, mask=ALL, *, residual=None,
    grad_sum=None, gate=None, input_scale=None, **options,
):  # fmt: skip
    """Return the results of both operators for the upstream gradients of the output, `dy`, and of the sum, `grad_sum`.

    x is the input; with a residual, the norm's input is the sum. weight, bias, residual, gate and input_scale are
    arguments of forward. `mask` is the output_mask of backward, or its first three entries. `options` are passed to
    both operators.
    """
    shape = normalized_shape or x.shape[-1:]
    gates = {"gate": gate, "input_scale": input_scale}
    output, total, mean, rstd, *_ = forward(backend, x, residual, weight, bias, eps, shape, **gates, **options)
    saved = output if options.get("memory_efficient") else x if residual is None else total  # for backward
    arguments = (dy, saved, shape, mean, rstd, weight, bias, [*mask, *NONE][:6], grad_sum)
    arguments += (gate, input_scale, None if input_scale is None else x)
    gradients = backend.ops.backward(*arguments, **options)
    return Results(output, total, mean, rstd, *gradients)


def run_images(backend, x, dy, *args, **options):
    """Return the results of `run` for images [N, C, *]."""
    return run(backend, x, dy, *args, normalized_shape=x.shape[1:2], images=True, **options)


def run_pixels(backend, x, dy, weight=None, bias=None, *args, **options):
    """Return the results of `run`, computed by the kernels for images: rows become pixels, and columns channels.

    Rows [samples, rows, cols] are images [samples, cols, rows] in memory. A matrix is one image or, if its parameters
    are matrices too, an image of one pixel for each row.
    """
    is_one_image = x.dim() == 2 and all(t is None or t.dim() == 1 for t in (weight, bias))
    images = [t[None] if is_one_image else t for t in (x, dy)]
    images = [t.movedim(-1, 1).contiguous() for t in images]
    weight, bias = (t if t is None or t.dim() == 1 else t.movedim(-1, 1) for t in (weight, bias))
    results = run_images(backend, *images, weight, bias, *args, **options)
    results = results.map(lambda t: t.movedim(1, -1) if t.dim() > 1 else t)
    if is_one_image:
        results = results.map_rows(lambda t: t.squeeze(0))
    return results.map(torch.Tensor.contiguous)


# A test with the argument `run` tests the kernels for rows and those for channels-first images.
rows_and_images = pytest.mark.parametrize("run", [run, run_pixels], ids=["rows", "images"])


def check(
    results, x, dy, weight=None, bias=None, eps=1e-5, context=(), *, residual=None, input_scale=None, grad_sum=None,
    xhat_error=0, **options,
):  # fmt: skip
    """Check the results of `run` against float64. A sum without an input_scale is one addition: its bits are checked.

    `context` is shown if a check fails, and check_backward() explains `xhat_error`. The others are arguments of `run`.
    """
    batch, dtype, scaled_input = x.shape[:-1], x.dtype, x
    if residual is not None and input_scale is None:
        assert_same_bits([results.total], [x.to(residual.dtype) + residual], *context)
    elif residual is not None:
        assert results.total.dtype == residual.dtype and results.total.shape == x.shape
        check_sum(*(broadcast_rows(t, batch) for t in (results.total, x, residual, input_scale)), context)
    x = x if residual is None else results.total
    assert results.output.shape == x.shape
    assert all(t is None or t.shape == (*batch, 1) for t in (results.mean, results.rstd))
    matrices, arguments = ([broadcast_rows(t, batch) for t in group] for group in (results.forward, (x, weight, bias)))
    gate = broadcast_rows(options.get("gate"), batch)
    check_forward(matrices, *arguments, eps, context, dtype=dtype, **options | {"gate": gate})
    options |= {"grad_sum": grad_sum, "xhat_error": xhat_error}
    if input_scale is not None:
        options |= {"scaled_input": scaled_input, "input_scale": input_scale}
    gradients = (*results.gradients, *results.gradients_of_gates)
    check_backward(gradients, dy, x, weight, bias, eps, context, **options)


def check_images(results, x, dy, *args, **kwargs):
    """Check the results of `run_images`."""
    results = results.map_rows(lambda t: t.movedim(1, -1).contiguous())
    check(results, x.movedim(1, -1), dy.movedim(1, -1), *args, **kwargs)


def bits(tensor):
    """Return the bytes of a tensor's elements. Those of -0 and 0 differ, and those of equal NaNs are equal."""
    values = tensor.detach().resolve_conj().resolve_neg()
    return values.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_same_bits(results, expected, *context):
    """Compare dtypes and bits of two lists, whose elements are tensors or None; show `context` if they differ."""
    for i, (a, e) in enumerate(zip(results, expected, strict=True)):
        assert a is e is None or (a.dtype == e.dtype and torch.equal(bits(a), bits(e))), (f"result {i}", *context)
