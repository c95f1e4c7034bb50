"""Strides of results and gradients: what the docstrings promise, in every mode and for inputs of every layout.

Results are contiguous, so that ``view()`` works. Those of images have the strides of ``torch.empty_like(input)``, and
those of RMSNorm without a residual have torch's. Gradients of images are laid out as the results, and other gradients
are contiguous.
"""

import itertools
import math
import warnings

import pytest
import torch
from support.family import EPS, MEMBERS, family
from support.models import ViewOfNorm
from support.reference import F64
from torch.autograd import forward_ad
from torch.func import jvp, vjp, vmap

from layernorm_ext import LayerNorm2d, RMSNorm2d, add_rms_norm, fusion, layer_norm, rms_norm, trace_as

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


class Call:
    """A call of a function of the family: its tensors, and the strides that its results and gradients must have.

    `layout` is that of the input, and `others_layout` that of residual or gate: keys of LAYOUTS.
    """

    def __init__(self, member, layout, others_layout, parameter_shape):
        self.member = member
        self.context = f"{member.name}, {layout}, {others_layout}, {list(parameter_shape)}"
        shape = (2, 8, 4, 6) if member.takes_images else (2, 4, 6, 8)
        x, r = LAYOUTS[layout](torch.randn(shape)), LAYOUTS[others_layout](torch.randn(shape))
        parameters = [torch.randn(parameter_shape) for _ in range(2)]
        self.tensors = [x, r, *parameters]
        # Tensors with the strides that output, sum and gradients must have.
        output = contiguous = torch.empty(shape)
        if member.takes_images:
            output = torch.empty_like(x)
        elif "rms" in member.name and not member.adds_residual:
            output = torch.nn.functional.rms_norm(x, (8,))
        results = [output, r.clone() if "inplace" in member.options else contiguous][: 1 + member.adds_residual]
        gradients = [output if member.takes_images else contiguous] * 2 + parameters
        takes = [True, member.takes_r, True, member.takes_b]
        self.strides = [y.stride() for y in results]
        self.strides_of_gradients = [
            t.stride() if is_taken else None for t, is_taken in zip(gradients, takes, strict=True)
        ]

    def __call__(self, x, r, w, b):
        arguments, options = self.member.arguments(x, r, w, b)
        if "inplace" in self.member.options:
            arguments[1] = arguments[1].clone()  # a leaf cannot change in place
        results = self.member.function(*arguments, eps=EPS, **options)
        return results if self.member.adds_residual else (results,)

    def leaves(self):
        return [t.detach().requires_grad_() for t in self.tensors]

    def check(self, results, gradients=(None,) * 4):
        assert [y.stride() for y in results] == self.strides, self.context
        for i, (gradient, strides) in enumerate(zip(gradients, self.strides_of_gradients, strict=True)):
            if gradient is not None and strides is not None:
                assert gradient.stride() == strides, f"gradient {i} of {self.context}"


def calls(member):
    """Yield calls whose tensors have the same layout or different ones, with parameters of several shapes."""
    per_row, per_sample = ((2, 8), (2, 8)) if member.takes_images else ((2, 4, 6, 8), (2, 1, 1, 8))
    for layout in LAYOUTS:
        yield Call(member, layout, layout, (8,))
        yield Call(member, layout, "contiguous", per_sample)
        yield Call(member, "contiguous", layout, per_row)


def upstream_gradients(results):
    """Yield upstream gradients of other layouts: expanded, as those of a sum over the rows, and transposed."""
    yield [torch.randn(len(y), 1, 1, 1, device=y.device).expand_as(y) for y in results]
    yield [torch.randn(y.shape[::-1], device=y.device).permute(3, 2, 1, 0) for y in results]


@family
def test_eager_calls(member):
    """Gradients, those with create_graph, which aten's operations compute, and second derivatives are checked."""
    for call in calls(member):
        tensors = call.leaves()
        results = call(*tensors)
        for grads in upstream_gradients(results):
            options = {"retain_graph": True, "allow_unused": True}
            call.check(results, torch.autograd.grad(results, tensors, grads, **options))
            first = torch.autograd.grad(results, tensors, grads, create_graph=True, **options)
            call.check(results, first)
            if "memory_efficient" not in member.options:  # it has no second derivative
                loss = sum(g.square().sum() for g in first if g is not None)
                call.check(results, torch.autograd.grad(loss, tensors, **options))


def relevant_strides(t):
    """Return the strides of dimensions with more than one element; those of others have no effect."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1 and t.numel()]


@pytest.mark.parametrize("shape", [(2, 4, 6, 8), (2, 1, 6, 8), (2, 4, 1, 1), (0, 4, 6, 8)], ids=str)
def test_rms_norm_over_any_dimensions_has_the_strides_and_numbers_of_torch(shape):
    for layout, dims in itertools.product(LAYOUTS.values(), (1, 2, 3)):
        x, weight = layout(torch.randn(shape, dtype=F64)).requires_grad_(), torch.randn(shape[-dims:], dtype=F64)
        functions = rms_norm, torch.nn.functional.rms_norm
        actual, expected = (function(x, shape[-dims:], weight, 1e-5) for function in functions)
        assert relevant_strides(actual) == relevant_strides(expected)
        assert rms_norm(x.detach().to("meta"), shape[-dims:]).stride() == actual.stride()
        torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)  # a few roundings of float64
        dy = torch.randn(shape, dtype=F64)
        gradients = [torch.autograd.grad(y, x, dy)[0] for y in (actual, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)  # sums of up to 192 products


@family
def test_meta_tensors(member):
    for call in calls(member):
        tensors = [torch.empty_strided(t.shape, t.stride(), device="meta", requires_grad=True) for t in call.tensors]
        results = call(*tensors)
        for grads in upstream_gradients(results):
            options = {"retain_graph": True, "allow_unused": True}
            call.check(results, torch.autograd.grad(results, tensors, grads, **options))


@family
def test_function_transforms(member):
    for call in calls(member):
        results, pull = vjp(call, *call.tensors)
        for grads in upstream_gradients(results):
            call.check(results, pull(tuple(grads)))
        if any(0 in t.stride() for t in call.tensors):  # torch makes no dual tensors of expanded ones
            continue
        tangents = tuple(map(torch.randn_like, call.tensors))
        for results in jvp(call, tuple(call.tensors), tangents):
            call.check(results)
        with forward_ad.dual_level():
            results = call(*map(forward_ad.make_dual, call.tensors, tangents))
            call.check(results)
            call.check([forward_ad.unpack_dual(y).tangent for y in results])


def stack_of_three(t):
    """Return a tensor of three random ones, each with the shape and strides of t."""
    size = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) + 1
    return torch.randn(3 * size).as_strided((3, *t.shape), (size, *t.stride()))


@family
@pytest.mark.parametrize(("batched", "dim"), [((0, 1, 2, 3), 0), ((0, 1, 2, 3), 1), ((2, 3), 0)], ids=str)
def test_vmap(member, batched, dim):
    if "inplace" in member.options and (batched == (2, 3) or dim == 1):  # the residual must have the batch
        return
    for call in calls(member):
        tensors = [stack_of_three(t).movedim(0, dim) if i in batched else t for i, t in enumerate(call.tensors)]
        in_dims = tuple(dim if i in batched else None for i in range(4))

        def gradients(*tensors, call=call):
            results, pull = vjp(call, *tensors)
            return pull(tuple(map(torch.ones_like, results)))

        results = vmap(call, in_dims)(*tensors)
        assert results[0].stride(0) == math.prod(results[0].shape[1:])
        call.check([y[0] for y in results], [t[0] for t in vmap(gradients, in_dims)(*tensors)])


# Tracers

# Layouts to trace: a graph takes 0.1 s for a call. test_functions.py compiles calls of contiguous tensors.
SOME = ["transposed batch", "channels_last", "expanded rows"]


class Calls(torch.nn.Module):
    """Calls all functions, with all options but zero_centered_weight, which concerns no layout."""

    def __init__(self, layouts):
        super().__init__()
        members = [m for m in MEMBERS if m.adds_residual or [*m.options] != ["zero_centered_weight"]]
        self.calls = [Call(member, layout, layout, (8,)) for layout in layouts for member in members]
        self.tensors = [t for call in self.calls for t in call.tensors]

    def forward(self, *tensors):
        return [call(*tensors[4 * i : 4 * i + 4]) for i, call in enumerate(self.calls)]

    def check(self, results):
        for call, each in zip(self.calls, results, strict=True):
            call.check(each)


@pytest.mark.parametrize("fuses", [False, True], ids=["", "fusion"])
def test_compiled_calls(fuses):
    module, backend = Calls(SOME[1:] if fuses else SOME), fusion.eager if fuses else "aot_eager"
    tensors = [t.detach().requires_grad_() for t in module.tensors]
    results = torch.compile(module, fullgraph=True, backend=backend)(*tensors)
    outputs = [y for each in results for y in each]
    grads = [next(upstream_gradients([y]))[0] for y in outputs]
    gradients = torch.autograd.grad(outputs, tensors, grads, allow_unused=True)
    for i, (call, each) in enumerate(zip(module.calls, results, strict=True)):
        call.check(each, gradients[4 * i : 4 * i + 4])


def test_calls_compiled_as_aten_for_inference():
    """In training, torch would choose the strides of the gradients of aten's operators."""
    module = Calls(SOME)
    with trace_as("aten"), torch.no_grad():
        module.check(torch.compile(module, fullgraph=True, backend="aot_eager")(*module.tensors))


@pytest.mark.parametrize("operators", ["kernel", "aten"])
def test_exported_programs(operators):
    module = Calls(SOME)
    with trace_as(operators):
        program = torch.export.export(module, tuple(module.tensors))
    for each in (program, program.run_decompositions()):
        module.check(each.module()(*module.tensors))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("operators", ["kernel", "aten"])
def test_jit_traces(operators):
    for call in Calls(LAYOUTS).calls:
        with trace_as(operators):
            traced = torch.jit.trace(call.__call__, tuple(call.tensors), check_trace=False)
        call.check(traced(*call.tensors))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_tracers_view_the_norm_of_a_transposed_tensor():
    model, x = ViewOfNorm(), torch.randn(2, 8, 5)
    for program in (torch.export.export(model, (x,)).module(), torch.jit.trace(model, x)):
        torch.testing.assert_close(program(x), model(x))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("cls", [LayerNorm2d, RMSNorm2d])
def test_modules_of_images_in_torchscript(cls):
    """Scripted modules return the strides of eager calls. Tracing a layer gives no TracerWarning."""
    norm = cls(8)
    scripted = torch.jit.script(norm)
    for name, layout in LAYOUTS.items():
        x = layout(torch.randn(2, 8, 4, 6)).requires_grad_()
        y = scripted(x)
        assert y.stride() == torch.empty_like(x).stride(), name
        torch.testing.assert_close(y, norm(x))
        torch.testing.assert_close(*(torch.autograd.grad(f(x).sin().sum(), x) for f in (scripted, norm)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        torch.jit.trace(norm, x)


@pytest.mark.parametrize("compiles", [False, True], ids=["", "compiled"])
def test_jagged_tensors_normalized_over_the_ragged_dimension(compiles):
    def function(x):
        return (layer_norm(x, x.shape[1:]), *add_rms_norm(x, x, x.shape[1:]))

    x = torch.nested.nested_tensor([torch.randn(n, 8) for n in (3, 5, 2)], layout=torch.jagged).transpose(1, 2)
    results = torch.compile(function, backend="aot_eager")(x) if compiles else function(x)
    assert all(y.values().is_contiguous() for y in results)
