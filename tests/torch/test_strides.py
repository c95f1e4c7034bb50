"""Strides of results and gradients: what the docstrings promise, in every mode and for inputs of every layout.

Results are contiguous, so that ``view()`` works. Those of images have the strides of ``torch.empty_like(input)``, and
those of RMSNorm without a residual have torch's. Gradients of images are laid out as the results, and other gradients
are contiguous.
"""

import math

import pytest
import torch
from support.family import EPS, MEMBERS, family
from torch.autograd import forward_ad
from torch.func import jvp, vjp, vmap

# Each of these functions returns a tensor of four dimensions in another layout.
LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed batch": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "transposed rows": lambda t: t.mT.contiguous().mT,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "rows of images": lambda t: t.movedim(-1, 1).contiguous().movedim(1, -1),
    "expanded": lambda t: t[:1].expand_as(t),
    "expanded rows": lambda t: t[:, :, :1].contiguous(memory_format=torch.channels_last).expand_as(t),
    "expanded columns": lambda t: t[..., :1].expand_as(t),
    "sliced": lambda t: torch.cat([t, t], -1)[..., : t.size(-1)],
    "sliced channels_last": lambda t: torch.cat([t, t], 1).contiguous(memory_format=torch.channels_last)[
        :, : t.size(1)
    ],
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


class Call:
    """A call of a function of the family: its tensors, and the strides of its results and gradients."""

    def __init__(self, member, layout, others_layout=None, parameter_shape=(8,)):
        self.member = member
        shape = (2, 8, 4, 6) if member.takes_images else (2, 4, 6, 8)
        parameters = [torch.randn(parameter_shape) for _ in range(2)]
        self.tensors = [layout(torch.randn(shape)), (others_layout or layout)(torch.randn(shape)), *parameters]
        x, r = self.tensors[:2]
        contiguous = torch.empty(shape)
        if member.takes_images:
            output = torch.empty_like(x)
        elif "rms" in member.name and not member.adds:
            output = torch.nn.functional.rms_norm(x, (8,))
        else:
            output = contiguous
        results = [output, r.clone() if "inplace" in member.options else contiguous][: 1 + member.adds]
        gradients = [output if member.takes_images else contiguous] * 2 + parameters
        takes = [True, member.takes_two, True, member.takes_bias]
        self.strides = [y.stride() for y in results]
        self.strides_of_gradients = [t.stride() if taken else None for t, taken in zip(gradients, takes, strict=True)]

    def __call__(self, x, r, w, b):
        arguments, options = self.member.arguments(x, r, w, b)
        if "inplace" in self.member.options:
            arguments[1] = arguments[1].clone()  # a leaf cannot change in place
        results = self.member.function(*arguments, eps=EPS, **options)
        return results if self.member.adds else (results,)

    def check(self, results, gradients=()):
        assert [y.stride() for y in results] == self.strides
        for i, (gradient, stride) in enumerate(zip(gradients, self.strides_of_gradients, strict=False)):
            assert stride is None or gradient.stride() == stride, i


def calls(layout, members=MEMBERS):
    """Return calls whose other tensors have the same layout or are contiguous, with parameters of several shapes."""
    result = []
    for member in members:
        result += [Call(member, layout), Call(member, layout, torch.Tensor.contiguous)]
        result.append(Call(member, LAYOUTS["contiguous"], layout))
        if member.takes_images:
            result.append(Call(member, layout, parameter_shape=(2, 8)))
        else:
            result += [
                Call(member, layout, parameter_shape=shape) for shape in ((2, 1, 1, 8), (1, 4, 1, 8), (2, 4, 6, 8))
            ]
    return result


def each_call(function):
    return layouts(family(lambda layout, member: [function(call) for call in calls(layout, [member])]))


def upstream(results):
    """Return upstream gradients of other layouts: expanded, as those of a sum over the rows, and transposed."""
    yield [torch.randn(len(y), 1, 1, 1).expand_as(y) for y in results]
    yield [torch.randn(y.shape[::-1]).permute(3, 2, 1, 0) for y in results]


def leaves(call):
    return [t.detach().requires_grad_() for t in call.tensors]


@layouts
@family
@pytest.mark.parametrize("create_graph", [False, True], ids=["", "create_graph"])
def test_eager_calls(member, layout, create_graph):
    for call in calls(layout, [member]):
        tensors = leaves(call)
        results = call(*tensors)
        for grads in upstream(results):
            options = {"retain_graph": True, "allow_unused": True, "create_graph": create_graph}
            call.check(results, torch.autograd.grad(results, tensors, grads, **options))


@layouts
@family
def test_second_derivatives(member, layout):
    if "memory_efficient" in member.options:
        return
    for call in calls(layout, [member]):
        tensors = leaves(call)
        results = call(*tensors)
        for grads in upstream(results):
            first = torch.autograd.grad(results, tensors, grads, create_graph=True, allow_unused=True)
            loss = sum(g.square().sum() for g in first if g is not None)
            second = torch.autograd.grad(loss, tensors, retain_graph=True, materialize_grads=True)
            call.check(results, second)


@layouts
@family
def test_function_transforms(member, layout):
    for call in calls(layout, [member]):
        results, pull = vjp(call, *call.tensors)
        for grads in upstream(results):
            call.check(results, pull(tuple(grads)))
        if any(0 in t.stride() for t in call.tensors):  # torch makes no dual tensors of these
            continue
        for results in jvp(call, tuple(call.tensors), tuple(map(torch.randn_like, call.tensors))):
            call.check(results)
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t, torch.randn_like(t)) for t in call.tensors]
            call.check(call(*duals))
            call.check([forward_ad.unpack_dual(y).tangent for y in call(*duals)])


def batch(t):
    """Return three tensors with the strides of t as one."""
    size = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) + 1
    return torch.randn(3 * size).as_strided((3, *t.shape), (size, *t.stride()))


@layouts
@family
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("batched", [(0, 1, 2, 3), (2, 3)], ids=str)
def test_vmap(member, layout, dim, batched):
    for call in calls(layout, [member]):
        if "inplace" in member.options and (batched == (2, 3) or dim == 1):  # the residual must have the batch
            continue
        tensors = [batch(t).movedim(0, dim) if i in batched else t for i, t in enumerate(call.tensors)]
        in_dims = tuple(dim if i in batched else None for i in range(4))
        results = vmap(call, in_dims)(*tensors)
        assert results[0].stride(0) == math.prod(results[0].shape[1:])
        call.check([y[0] for y in results])

        def gradients(*tensors, call=call):
            results, pull = vjp(call, *tensors)
            return pull(tuple(map(torch.ones_like, results)))

        call.check([y[0] for y in results], [t[0] for t in vmap(gradients, in_dims)(*tensors)])


@layouts
@family
def test_meta_tensors(member, layout):
    for call in calls(layout, [member]):
        tensors = [torch.empty_strided(t.shape, t.stride(), device="meta", requires_grad=True) for t in call.tensors]
        results = call(*tensors)
        for grads in upstream(results):
            grads = [g.to("meta") for g in grads]
            options = {"retain_graph": True, "allow_unused": True}
            call.check(results, torch.autograd.grad(results, tensors, grads, **options))
