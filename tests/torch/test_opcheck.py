"""torch.library.opcheck: schema, shape functions and autograd registration of the operators are right."""

import itertools

import pytest
import torch
from support.backends import ALL, MASKS, forward
from support.inputs import IMAGE_LAYOUTS, variants
from support.reference import BF16, F16, F32, F64, dtypes_id
from torch._subclasses.fake_tensor import FakeTensorMode

# Autograd and compilation, the other checks, take longest and do not depend on dtypes, layouts and parameter shapes.
SHAPE_FUNCTIONS = {"test_utils": ("test_schema", "test_faketensor")}


def opcheck(backend, x, weight, bias, checks, normalized_shape=None, masks=(ALL,), **options):
    """Check forward, with a residual and without, and backward. `checks` are options of torch.library.opcheck."""
    shape, ops = normalized_shape or x.shape[-1:], backend.ops
    x, residual, dy = (t.detach().requires_grad_() for t in (x, torch.randn_like(x), torch.randn_like(x)))
    weight, bias = (p if p is None else p.detach().requires_grad_() for p in (weight, bias))
    torch.library.opcheck(ops.forward.default, (x, shape, weight, bias), options, **checks)
    torch.library.opcheck(ops.forward.fused, (x, shape, weight, bias, 1e-5, residual), options, **checks)
    saved = forward(backend, x.detach(), None, weight, bias, normalized_shape=shape, **options).map(torch.Tensor.detach)
    for mask in masks:
        grad_sum = residual if mask[2] else None
        arguments = (dy, x, shape, saved.mean, saved.rstd, weight, bias, mask, grad_sum)
        torch.library.opcheck(ops.backward.default, arguments, options, **checks)


@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, True), (True, False), (False, True), (False, False)])
def test_masks_and_missing_parameters(backend, has_weight, has_bias):
    x, w, b = (torch.randn(s, device=backend.device) for s in ((3, 2, 4), (2, 4), (2, 4)))
    masks = [ALL, *(mask for mask in MASKS if sum(mask) == 1)] if has_weight and has_bias else [ALL]
    opcheck(backend, x, w if has_weight else None, b if has_bias else None, {}, normalized_shape=(2, 4), masks=masks)


@variants
def test_variants(backend, variant):
    """With parameters per sample."""
    x, residual, w = (torch.randn(s, device=backend.device) for s in ((3, 2, 5), (3, 2, 5), (3, 1, 5)))
    opcheck(backend, x, w, w, {}, **variant)
    torch.library.opcheck(backend.ops.forward_.fused, (x.requires_grad_(), (5,), w, None, 1e-5, residual), variant)


@pytest.mark.parametrize("batch", [(), (3, 1), (1, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32), (F16, F64)], ids=dtypes_id)
def test_gated_residuals(backend, batch, dtypes):
    """With a residual of another dtype."""
    dtype, parameter_dtype = dtypes
    x, residual, dy = (torch.randn(3, 2, 5, device=backend.device) for _ in range(3))
    x, dy, w, gate = (t.to(dtype) for t in (x, dy, residual[0, 0], torch.randn(*batch, 5, device=backend.device)))
    w, gate, forward = w.to(parameter_dtype), gate.to(parameter_dtype), backend.ops.forward.fused
    checks = {} if dtype == F32 else SHAPE_FUNCTIONS
    inputs = [t.requires_grad_() for t in (x, w, residual, gate)]
    torch.library.opcheck(forward, (x, (5,), w, None, 1e-5, residual, None, gate), **checks)
    in_place = x.detach(), (5,), w.detach(), None, 1e-5, residual.detach(), gate.detach()
    torch.library.opcheck(backend.ops.forward_.fused, in_place, **SHAPE_FUNCTIONS)
    x, w, residual, gate = (t.detach() for t in inputs)
    _, total, mean, rstd = forward(x, (5,), w, None, 1e-5, residual, None, gate)
    for mask in ([True] * 6, [False] * 5 + [True]):
        arguments = (dy, total, (5,), mean, rstd, w, None, mask, residual, None, gate, x)
        torch.library.opcheck(backend.ops.backward.fused, arguments, **SHAPE_FUNCTIONS)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, F32), (F16, F64)], ids=dtypes_id)
def test_gated_norms(backend, gate_first, dtypes):
    """The gate has strides of its own, and in two cases another dtype than the input."""
    x, dy, w = (torch.randn(s, device=backend.device).to(dtypes[0]) for s in ((3, 2, 5), (3, 2, 5), (5,)))
    gate = torch.randn(3, 2, 10, device=backend.device).to(dtypes[1])[..., 5:]
    options, checks = {"activation": "silu", "gate_first": gate_first}, {} if dtypes[0] == F32 else SHAPE_FUNCTIONS
    leaves = [t.detach().requires_grad_() for t in (x, w, gate)]
    torch.library.opcheck(
        backend.ops.forward.fused, (leaves[0], (5,), leaves[1], None, 1e-5, None, leaves[2]), options, **checks
    )
    _, _, mean, rstd = backend.ops.forward.fused(x, (5,), w, None, 1e-5, None, gate, **options)
    arguments = (dy, x, (5,), mean, rstd, w, None, [True] * 6, None, gate)
    torch.library.opcheck(backend.ops.backward.fused, arguments, options, **SHAPE_FUNCTIONS)


LAYOUTS = IMAGE_LAYOUTS | {
    "sliced": lambda: torch.randn(4, 6, 3, 5)[::2, 1:5],
    "expanded": lambda: torch.randn(2, 4, 1, 1).expand(2, 4, 3, 5),
}


@pytest.mark.parametrize(
    ("layout", "options"),
    [*itertools.product(LAYOUTS, ({}, {"images": True})), ("channels_last", {"rms": True})],
    ids=str,
)
def test_layouts(backend, layout, options):
    """The strides of the results are those that the shape functions promise."""
    x = LAYOUTS[layout]().to(backend.device)
    shape = x.shape[1:2] if "images" in options else x.shape[-1:]
    opcheck(backend, x, torch.randn(shape, device=backend.device), None, SHAPE_FUNCTIONS, shape, **options)


def test_fake_cuda_tensors():
    """torch.compile traces with them, which needs no GPU."""
    with FakeTensorMode():
        x, w = torch.empty(3, 4, 8, device="cuda"), torch.empty(8, device="cuda")
        output, mean, rstd = torch.ops.layernorm.forward(x, [8], w, w)
        results = (output, mean, rstd, *torch.ops.layernorm.backward(output, x, [8], mean, rstd, w, w, ALL))
    assert {result.device for result in results} == {torch.device("cuda:0")}
    assert [result.shape for result in results] == [x.shape, (3, 4, 1), (3, 4, 1), x.shape, (8,), (8,)]
