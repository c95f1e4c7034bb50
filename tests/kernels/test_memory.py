"""Tensors whose memory is unusual: freed storages, strides of gradients, and residuals changed in place."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from support.backends import assert_same_bits
from support.family import MEMBERS
from support.inputs import randn
from support.reference import F32

import layernorm_ext
from layernorm_ext import add_layer_norm, layer_norm_2d, trace_as

NOT_ALLOCATED = "^The tensor has a non-zero number of elements, but its data is not allocated yet: "


def freed(t):
    """Return a copy of a tensor whose storage was freed, as FSDP and offloading do."""
    copy = t.clone()
    copy.untyped_storage().resize_(0)
    return copy


def arguments_of(member):
    return ["input", *["residual or gate"] * member.takes_r, "weight", *["bias"] * member.takes_b]


def random_arguments(member):
    shape = (2, 8, 3) if member.takes_images else (2, 3, 8)
    shapes = {"input": shape, "residual or gate": shape, "weight": (8,), "bias": (8,)}
    return {name: torch.randn(size) for name, size in shapes.items()}


# Freed storages


members_and_arguments = pytest.mark.parametrize(
    ("member", "name"),
    [(member, name) for member in MEMBERS for name in arguments_of(member)],
    ids=lambda value: getattr(value, "name", value),
)


@members_and_arguments
def test_functions_refuse_freed_tensors(member, name):
    """Calls with a graph, without one and in torch.func are refused.

    In torch.func, which composes aten's operations, the error does not name the argument. With the option "gate", the
    bias is also the gate (support/family.py).
    """
    tensors = random_arguments(member)
    many = torch.stack([tensors["input"]] * 2)
    tensors[name] = freed(tensors[name])

    def call(x):
        arguments, options = member.arguments(x, *[*tensors.values()][1:])
        return member.function(*arguments, **options)

    x = tensors["input"]
    gate = r"input_scale \(gate\)"
    names = {"input": "input", "residual or gate": "residual|gate"}
    names |= {"weight": rf"weight( \(scale\))?|{gate}", "bias": rf"bias( \(shift\))?|{gate}"}
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(RuntimeError, match=f"{NOT_ALLOCATED}({names[name]}) of shape"):
            call(x)
    with pytest.raises(RuntimeError, match=NOT_ALLOCATED):
        call(x.requires_grad_())
    if name in ("weight", "bias") and "inplace" not in member.options:  # vmap changes no residual in place
        loss = lambda x: sum(y.sum() for y in (call(x) if member.adds_residual else [call(x)]))  # noqa: E731
        for transform in (
            torch.vmap(call),
            torch.vmap(torch.func.grad(loss)),
            torch.func.grad(lambda t: torch.vmap(loss)(t).sum()),
        ):
            with pytest.raises(RuntimeError, match=NOT_ALLOCATED):
                transform(many)
        with pytest.raises(RuntimeError, match=NOT_ALLOCATED):
            torch.func.jvp(call, (many[0],), (many[1],))


@members_and_arguments
def test_functions_take_zeros_without_memory(member, name):
    """Torch makes such tensors in forward-mode AD. They cannot be changed in place."""
    tensors = random_arguments(member)
    zeros = {name: torch._efficientzerotensor(tensors[name].shape)}
    overwrites = "inplace" in member.options
    if overwrites and name.startswith("residual"):
        return

    def call(tensors):
        tensors = tensors | ({"residual or gate": tensors["residual or gate"].clone()} if overwrites else {})
        arguments, options = member.arguments(*tensors.values())
        return member.function(*arguments, **options)

    torch.testing.assert_close(call(tensors | zeros), call(tensors | {name: torch.zeros_like(tensors[name])}))
    other = "weight" if name == "input" else "input"
    _, tangent = torch.func.jvp(lambda t: call(tensors | zeros | {other: t}), (tensors[other],), (tensors[other],))
    assert all(t.isfinite().all() for t in (tangent if member.adds_residual else (tangent,)))


def test_backward_refuses_saved_tensors_that_were_freed():
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    for saved in (x, w):
        loss = layernorm_ext.layer_norm(x, (8,), w).sum()
        size = saved.untyped_storage().nbytes()
        saved.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=NOT_ALLOCATED):
            loss.backward()
        saved.untyped_storage().resize_(size)


@pytest.mark.parametrize("memory_efficient", [False, True])
def test_batched_backward_refuses_saved_tensors_that_were_freed(memory_efficient):
    """Within vmap, aten's operations compute backward. They would crash the process by reading freed memory."""
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    y = layernorm_ext.layer_norm(x, (8,), w, memory_efficient=memory_efficient)
    w.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=NOT_ALLOCATED):
        torch.autograd.grad(y, x, torch.randn(2, 3, 8), is_grads_batched=True)


def test_empty_tensors_need_no_memory():
    x = torch.randn(0, 8, requires_grad=True)
    assert x.untyped_storage().data_ptr() == 0
    assert layernorm_ext.layer_norm(x, (8,), torch.randn(8)).shape == (0, 8)


# Strides of gradients


@pytest.mark.parametrize("parameter", [(1, 6, 1, 1), (2, 6, 1, 1), (2, 6)], ids=str)
@pytest.mark.parametrize("mode", ["eager", "kernel", "aten"])
def test_gradients_of_image_parameters_have_the_strides_of_a_contiguous_tensor(parameter, mode):
    """DistributedDataParallel warns if the strides of gradient and parameter differ, even in a dimension of size 1."""
    x = torch.randn(2, 6, 4, 5, requires_grad=True)
    w, b = (torch.randn(parameter, requires_grad=True) for _ in range(2))
    with trace_as(None if mode == "eager" else mode):
        norm = layer_norm_2d if mode == "eager" else torch.compile(layer_norm_2d, backend="aot_eager")
        norm(x, w, b).sum().backward()
    assert w.grad.stride() == b.grad.stride() == w.stride()


# Residuals changed in place


def in_place(name):
    """Return a call with inplace=True: a function of input, residual and, if `name` is not a module's, weight."""
    member = getattr(layernorm_ext, name)
    if isinstance(member, type):
        return member(8, inplace=True)
    return lambda x, r, *weight: member(x, r, (8,), *weight, inplace=True)


ADDITIONS = {name: in_place(name) for name in layernorm_ext.__all__ if name.lower().startswith("add")}
FUNCTIONS = {name: add for name, add in ADDITIONS.items() if "_" in name}
additions = pytest.mark.parametrize("add", ADDITIONS.values(), ids=ADDITIONS)
functions = pytest.mark.parametrize("add", FUNCTIONS.values(), ids=FUNCTIONS)
SHAPE = (3, 8, 8)


def not_in_place(add, x, r):
    return add(x, r.clone())


@additions
def test_retained_gradient_and_hooks_of_a_residual_changed_in_place(add):
    """The residual has become the sum, so its retained gradient and its hooks get the gradient of the sum.

    As for any tensor that was changed in place, this gradient comes from its later uses alone, not from the norm.
    """
    x, leaf = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE, requires_grad=True)
    residual = leaf * 2
    residual.retain_grad()
    gradients_in_hook = []
    output, total = add(x, residual)
    residual.register_hook(gradients_in_hook.append)
    (output.sin().sum() + total.cos().sum()).backward()
    assert total is residual and len(gradients_in_hook) == 1

    for gradient in (residual.grad, gradients_in_hook[0]):
        torch.testing.assert_close(gradient, -total.detach().sin(), rtol=0, atol=1e-6)  # the error of one sine

    total = (x.detach() + leaf.detach() * 2).requires_grad_()
    output = not_in_place(add, torch.zeros(SHAPE), total)[0]
    (output.sin().sum() + total.cos().sum()).backward()
    for gradient in (x.grad, leaf.grad / 2):
        torch.testing.assert_close(gradient, total.grad, rtol=0, atol=1e-6)  # the sum of two gradients below 4


@additions
def test_a_residual_of_inference_mode_is_refused_outside_of_it(add):
    with torch.inference_mode():
        residual = torch.randn(SHAPE)
        before = residual.clone()
        add(torch.randn(SHAPE), residual.clone())  # accepted within the mode
    for requires_grad in (False, True):
        with pytest.raises(RuntimeError, match="^Inplace update to inference tensor outside InferenceMode"):
            add(torch.randn(SHAPE, requires_grad=requires_grad), residual)
    assert torch.equal(residual, before)


@functions
def test_a_weight_that_is_a_view_of_the_residual_is_refused(add):
    """The kernels would read the weight after they have overwritten it."""
    for requires_grad in (False, True):
        residual = torch.randn(SHAPE)
        before = residual.clone()
        with pytest.raises(RuntimeError, match="single memory location"):
            add(torch.randn(SHAPE, requires_grad=requires_grad), residual, residual[1, 1])
        assert torch.equal(residual, before)


@pytest.mark.parametrize("name", ["input", "weight", "bias"])
@pytest.mark.parametrize("start", [0, 992, 1920])
def test_slices_beside_the_residual_are_read_before_it_changes(backend, name, start):
    """Torch cannot tell whether strided slices of a buffer overlap the residual. Slices that may are copied first."""
    buffer = randn((4096,), F32, backend.device)
    residual, other = buffer[960:1920].view(3, 5, 64), buffer[start : start + 1920].view(3, 5, 128)[..., :64]
    x = randn((3, 5, 64), F32, backend.device)
    tensors = {"input": x, "normalized_shape": (64,), "weight": None, "bias": None, "eps": 1e-5, "residual": residual}
    tensors[name] = other
    expected, before = backend.ops.forward.fused(**tensors), buffer.clone()
    output, mean, rstd = backend.ops.forward_.fused(**tensors)
    assert_same_bits((output, residual, mean, rstd), expected)
    before[960:1920] = residual.flatten()
    assert torch.equal(buffer, before)


def test_backward_refuses_a_weight_that_was_overwritten_with_the_residual():
    x, residual = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    output, _ = add_layer_norm(x, residual, (8,), residual.flatten()[:16:2], inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("name", ["input", "weight"])
@pytest.mark.parametrize("mode", ["vmap", "forward mode"])
def test_transforms_change_the_residual_last(name, mode):
    """In vmap and forward mode too, an argument that is a view of the residual is read before the residual changes."""
    buffer, x = torch.randn(4, 12), torch.randn(4, 6)

    def call(mode):
        changed = buffer.clone()
        residual = changed[:, ::2]
        weight = changed[1, ::2] if name == "weight" else None

        def add(x, residual):
            return add_layer_norm(x, residual, (6,), weight, inplace=True)

        input = changed[:, :6] if name == "input" else x
        if mode == "vmap":
            output, total = torch.vmap(add)(input, residual)
        elif mode == "forward mode":
            with forward_ad.dual_level():
                results = add(forward_ad.make_dual(input, torch.ones(4, 6)), residual)
                output, total = (forward_ad.unpack_dual(t).primal for t in results)
        else:
            output, total = add(input, residual)
        assert torch.equal(total, residual)
        return output, total

    for actual, expected in zip(call(mode), call("eager"), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)  # some roundings of values below 10
