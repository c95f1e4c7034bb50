"""torch.distributed: four processes that communicate through gloo give the results of one process.

Starting processes takes seconds. One test therefore starts them once, and they run all functions in CHECKS.
"""

import copy
import itertools
import multiprocessing
import subprocess
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.family import MEMBERS, with_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from layernorm_ext import (
    AdaLayerNorm,
    AdaRMSNorm,
    AddLayerNorm,
    AddRMSNorm,
    GatedLayerNorm,
    GatedRMSNorm,
    LayerNorm,
    RMSNorm,
    ada_rms_norm,
    convert,
    layer_norm,
    layer_norm_2d,
    register_conversion,
    revert,
)

PROCESSES = 4
DTENSOR = "torch.distributed.tensor"
CHECKS = []
# The DTensor of torch 2.11 cannot flatten a sharded second dimension, and its aten refuses sharded parameters in
# backward.
IS_2_11 = torch.__version__.startswith("2.11.")

# Four processes add float32 numbers in another order than one: some hundred terms of size 1, each rounded by 6e-8.
ANOTHER_ORDER = {"rtol": 1e-5, "atol": 1e-5}
SAME_BITS = {"rtol": 0, "atol": 0}


def in_four_processes(check):
    """Let the four processes run this function of a device mesh."""
    CHECKS.append(check)
    return check


def run_checks(rank, folder):
    """Run all checks in one of the processes and return the traceback of the first failure."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(minutes=2), rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    try:
        for check in CHECKS:
            torch.manual_seed(0)  # all processes draw the same numbers
            check(mesh)
            dist.barrier()
    except Exception:
        return traceback.format_exc()
    finally:
        dist.destroy_process_group()


def test_four_processes_give_the_results_of_one(tmp_path):
    context = multiprocessing.get_context("forkserver")
    # The server imports once what all processes need. They import DTensor before layernorm_ext; the last test of this
    # file has the other order.
    modules = ["torch.distributed.fsdp", f"{DTENSOR}.parallel", "torch._functorch.aot_autograd"]
    context.set_forkserver_preload(modules)
    with ProcessPoolExecutor(PROCESSES, context) as pool:
        failures = list(filter(None, pool.map(run_checks, range(PROCESSES), [tmp_path] * PROCESSES)))
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)


# DTensor


def random_tensors():
    """Return input, weight, bias and grad_output."""
    return torch.randn(4, 8, 16), torch.randn(16), torch.randn(16), torch.randn(4, 8, 16)


def with_collectives(function, *arguments):
    """Return the result of the function, and how often it called each collective."""
    with CommDebugMode() as collectives:
        result = function(*arguments)
    return result, {str(name): count for name, count in collectives.get_comm_counts().items()}


def placements_of(tensors):
    return [None if tensor is None else tensor.placements for tensor in tensors]


def assert_stays_sharded(mesh, function, tensors, placements, tolerance):
    """Compare a function of distributed tensors with that of whole ones; neither pass needs a collective.

    `placements` are those of the tensors. The first tensor is the input, and all outputs have its placement. Each
    process has only a part of the sum that is the gradient of a replicated parameter. `tolerance` is for the outputs.
    """
    whole = [t.clone().requires_grad_() for t in tensors]
    distributed = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(tensors, placements, strict=True)]
    outputs, collectives = with_collectives(function, *distributed)
    expected = function(*whole)
    assert placements_of(outputs) == [(placements[0],)] * len(outputs) and not collectives
    grad_outputs = [torch.randn_like(t) for t in expected]
    shards = [distribute_tensor(t, mesh, [placements[0]]) for t in grad_outputs]
    gradients, collectives = with_collectives(torch.autograd.grad, outputs, distributed, shards)
    assert placements_of(gradients) == [(p if p.is_shard() else Partial(),) for p in placements] and not collectives
    for y, e in zip(outputs, expected, strict=True):
        torch.testing.assert_close(y.full_tensor(), e, **tolerance)
    for gradient, e in zip(gradients, torch.autograd.grad(expected, whole, grad_outputs), strict=True):
        torch.testing.assert_close(gradient.full_tensor(), e, **ANOTHER_ORDER)


@in_four_processes
def family_keeps_batch_and_sequence_sharded(mesh):
    """Images are sharded over N or H, adaptive parameters over N. Residuals and gates are always float32.

    The memory of whole images is [N, C, H]. That of their shards is [N, H, C], because DTensor makes shards contiguous,
    so the kernels for rows compute them, which add in another order than those for images. In bfloat16, the results
    might round to other neighbors.
    """
    members = [member for member in MEMBERS if "inplace" not in member.options]
    for member, shard, dtype in itertools.product(members, (Shard(0), Shard(1)), (torch.float32, torch.bfloat16)):
        if member.takes_images and dtype == torch.bfloat16:
            continue
        x, r, w, b = torch.randn(4, 8, 16), torch.randn(4, 8, 16), *torch.randn(2, 4, 16)
        is_adaptive = "ada" in member.name
        if member.takes_images:  # the member moves the last dimension to 1, and gets contiguous images
            x, r = (t.movedim(-1, 1).contiguous().movedim(1, -1) for t in (x, r))
        tensors = [x.to(dtype), *([r] if member.takes_r else []), w if is_adaptive else w[0]]
        tensors += [b if is_adaptive else b[0]] if member.takes_b else []
        parameter_placement = shard if is_adaptive and shard == Shard(0) else Replicate()
        placements = [shard if t.dim() == 3 else parameter_placement for t in tensors]

        def function(x, *others, member=member):  # others: r, w and b, without those that the member ignores
            return member(x, others[0], others[int(member.takes_r)], others[-1])

        tolerance = ANOTHER_ORDER if member.takes_images else SAME_BITS
        assert_stays_sharded(mesh, function, tensors, placements, tolerance)


@in_four_processes
def parameters_per_sample_are_sharded_with_the_batch(mesh):
    x, shared = torch.randn(4, 8, 16), torch.randn(16)
    per_sample, per_position = torch.randn(4, 1, 16), torch.randn(1, 8, 16)
    cases = [  # function, shard of the input, weight, bias, and whether each of these has the input's shard
        (layer_norm, Shard(0), per_sample, per_sample.cos(), True, True),
        (layer_norm, Shard(0), per_sample, shared, True, False),
        (layer_norm, Shard(1), per_sample, per_sample.cos(), False, False),
        (layer_norm, Shard(1), per_position, per_position.cos(), True, True),
        (layer_norm, Shard(0), per_position, shared, False, False),
        (ada_rms_norm, Shard(0), per_sample[:, 0], shared, True, False),
    ]
    for function, shard, weight, bias, *has_shard in cases:
        placements = [shard, *(shard if has_own else Replicate() for has_own in has_shard)]
        call = lambda x, *p, f=function: (f(x, (16,), *p),)  # noqa: E731
        assert_stays_sharded(mesh, call, [x, weight, bias], placements, SAME_BITS)


@in_four_processes
def placements_and_collectives_equal_those_of_aten(mesh):
    """Some calls differ only in an absent parameter or output_mask, so that DTensor's cache must tell them apart."""
    x, w, b, dy = random_tensors()
    two_by_two = init_device_mesh("cpu", (2, 2))
    cases = [(mesh, (placement,)) for placement in (Shard(0), Shard(1), Shard(2), Replicate())]
    cases += [(two_by_two, pair) for pair in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2)]
    for mesh, placements in cases:
        dx, ddy = distribute_tensor(x, mesh, placements), distribute_tensor(dy, mesh, placements)
        for parameter_placement, has_weight, needs_db in itertools.product(
            (Replicate(),) if IS_2_11 else (Replicate(), Shard(0)), (False, True), (False, True)
        ):
            dw, db = (distribute_tensor(t, mesh, [parameter_placement] * mesh.ndim) for t in (w, b))
            parameters = (dw if has_weight else None, db)
            results = []
            for forward, backward, gates in (  # `gates` are the last entries of output_mask
                (torch.ops.layernorm.forward, torch.ops.layernorm.backward, [False] * 3),
                (torch.ops.aten.native_layer_norm, torch.ops.aten.native_layer_norm_backward, []),
            ):
                outputs, forward_collectives = with_collectives(forward, dx, (16,), *parameters, 1e-5)
                arguments = (ddy, dx, (16,), *outputs[1:], *parameters, [True, has_weight, needs_db, *gates])
                gradients, backward_collectives = with_collectives(backward, *arguments)
                placed = placements_of((*outputs, *gradients[:3]))
                results.append((*placed, forward_collectives, backward_collectives))
            assert results[0] == results[1], (placements, parameter_placement, has_weight, needs_db)


@in_four_processes
def only_batch_dimensions_stay_sharded(mesh):
    """The input becomes whole if a normalized dimension is sharded, or if processes have terms of its sum."""
    x = torch.randn(4, 8, 16)
    sharded = distribute_tensor(x, mesh, [Shard(1)])
    partial = DTensor.from_local(x, mesh, [Partial()])
    cases = [
        (layer_norm, sharded, ((16,),), sharded.placements),
        (layer_norm, sharded, ((8, 16),), (Replicate(),)),
        (layer_norm, partial, ((16,),), (Replicate(),)),
        (layer_norm_2d, sharded, (), (Replicate(),)),
    ]
    if not IS_2_11:
        strided = sharded.flatten(0, 1)
        cases.append((layer_norm, strided, ((16,),), strided.placements))
    for function, distributed, shape, placements in cases:
        y = function(distributed, *shape)
        assert y.placements == placements
        assert torch.equal(y.full_tensor(), function(distributed.full_tensor(), *shape))


@in_four_processes
def second_derivatives_match(mesh):
    def second(x, w, b):
        arguments = [t.requires_grad_() for t in (x, w, b)]
        loss = layer_norm(x, (16,), w, b).sin().sum()
        first = torch.autograd.grad(loss, arguments, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), arguments)

    x, w, b, _ = random_tensors()
    distributed = distribute_tensor(x, mesh, [Shard(1)]), *(distribute_tensor(t, mesh, [Replicate()]) for t in (w, b))
    for actual, expected in zip(second(*distributed), second(x, w, b), strict=True):
        # The gradients of the sums are sums again, with values up to a hundred.
        torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-4, atol=1e-4)


@in_four_processes
def compiled_module_has_the_same_bits(mesh):
    module = distribute_module(LayerNorm(16), mesh)
    x = distribute_tensor(torch.randn(4, 8, 16), mesh, [Shard(1)]).requires_grad_()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = [with_gradients(lambda x, *_, f=f: [f(x)], [x, *module.parameters()]) for f in (compiled, module)]
    for actual, expected in zip(*((*outputs, *gradients) for outputs, gradients in results), strict=True):
        assert actual.placements == expected.placements
        assert torch.equal(actual.to_local(), expected.to_local())


# Tensor and sequence parallelism


@in_four_processes
def sequence_parallel_block_matches(mesh):
    """The norm is sequence parallel, the linear layers are tensor parallel."""
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    block = nn.Sequential(LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    parallel, x = parallelize_module(copy.deepcopy(block), mesh, plan), torch.randn(4, 8, 16)
    y, expected = parallel(distribute_tensor(x, mesh, [Shard(1)])), block(x)
    assert y.placements == (Shard(1),)
    torch.testing.assert_close(y.full_tensor(), expected, **ANOTHER_ORDER)
    for output in (y, expected):
        output.square().sum().backward()
    assert parallel[0].weight.placements == (Replicate(),) and parallel[0].weight.grad.placements == (Partial(),)
    for actual, expected in zip(parallel.parameters(), block.parameters(), strict=True):
        torch.testing.assert_close(actual.grad.full_tensor(), expected.grad, **ANOTHER_ORDER)


class NormWithGate(nn.RMSNorm):
    def forward(self, x, gate=None):
        y = super().forward(x)
        return y if gate is None else (y * nn.functional.silu(gate)).to(x.dtype)


@in_four_processes
def norms_of_several_inputs_take_a_layout_for_each(mesh):
    """PrepareModuleInput has the layouts, as documented. SequenceParallel distributes only the first input: refused."""
    x, z = torch.randn(2, 4, 8, 16)
    scale, shift = torch.randn(2, 4, 16)
    cases = [
        (GatedLayerNorm, (x, z)),
        (GatedRMSNorm, (x, z)),
        (AddLayerNorm, (x, z, scale)),
        (AddRMSNorm, (x, z)),
        (AdaLayerNorm, (x, scale, shift)),
        (AdaRMSNorm, (x, z)),
    ]

    def results(f, inputs, tensors):
        outputs = f(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return outputs, torch.autograd.grad(sum(y.sin().sum() for y in outputs), tensors)

    for cls, inputs in cases:
        norm = cls(16)
        layouts = tuple(Shard(1) if t.dim() == 3 else Replicate() for t in inputs)
        style = PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)
        parallel = parallelize_module(distribute_module(copy.deepcopy(norm), mesh), mesh, style)
        compiled = torch.compile(parallel, fullgraph=True, backend="aot_eager", dynamic=False)
        shards = [distribute_tensor(t, mesh, [layout]) for t, layout in zip(inputs, layouts, strict=True)]
        local = [t.to_local().requires_grad_() for t in shards]
        whole = [t.clone().requires_grad_() for t in inputs]
        outputs, gradients = results(norm, whole, [whole[0], *norm.parameters()])
        # To save time, these alone are compiled: without a mean, with two results, and with parameters per sample.
        is_compiled = cls in (GatedRMSNorm, AddLayerNorm, AdaLayerNorm)
        for f in (parallel, compiled) if is_compiled else (parallel,):
            actual, (dx, *others) = results(f, local, [local[0], *parallel.parameters()])
            for y, expected in zip(actual, outputs, strict=True):
                assert y.placements == (Shard(1),)
                torch.testing.assert_close(y.full_tensor(), expected, **SAME_BITS)
            dx = DTensor.from_local(dx, mesh, [Shard(1)]).full_tensor()
            torch.testing.assert_close(dx, gradients[0], **SAME_BITS)
            for gradient, expected in zip(others, gradients[1:], strict=True):
                torch.testing.assert_close(gradient.full_tensor(), expected, **ANOTHER_ORDER)
        refused = parallelize_module(copy.deepcopy(norm), mesh, SequenceParallel())
        with pytest.raises(RuntimeError, match=f"all inputs of {cls.__name__} to be distributed, but got one of"):
            refused(*local)

    register_conversion(NormWithGate)
    for is_converted_first in (True, False):
        norm = NormWithGate(16)
        if is_converted_first:
            assert convert(norm).replaced
        parallelize_module(norm, mesh, SequenceParallel())
        if is_converted_first:
            with pytest.raises(RuntimeError, match="all inputs of NormWithGate to be distributed"):
                norm(x, z)
        else:
            assert "convert the model before it is parallelized" in convert(norm).skipped[""]


# Models that are converted before or after they are sharded. Each process has a chunk of the batch.


def torch_model():
    """Return a model of torch's layers and subclasses. The first layer is smaller than a shard of the model."""
    torch.manual_seed(1)
    layers = [nn.LayerNorm(16), nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 32), nn.RMSNorm(32)]
    model = nn.Sequential(*layers, SubclassNorm(32), NormWithGate(32))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


class SubclassNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x)


def report_of_all_processes(report):
    """Return the text of the report, which is the same in each process."""
    reports = [None] * PROCESSES
    dist.all_gather_object(reports, str(report))
    assert len(set(reports)) == 1, reports
    return reports[0]


def assert_output_and_gradients(parallel, full_gradients):
    model, chunks = torch_model(), torch.randn(PROCESSES, 8, 16)
    y = parallel(chunks[dist.get_rank()])
    torch.testing.assert_close(y, model(chunks[dist.get_rank()]), **ANOTHER_ORDER)
    y.sin().sum().backward()
    gradients = full_gradients()
    if gradients:
        expected = torch.autograd.grad(model(chunks).sin().sum() / PROCESSES, list(model.parameters()))
        torch.testing.assert_close(gradients, [*expected], **ANOTHER_ORDER)


@in_four_processes
def converted_layers_are_sharded_by_their_class(mesh):
    """FSDP wraps the layers that it would wrap without the conversion."""
    register_conversion(SubclassNorm)
    register_conversion(NormWithGate)
    norms = (nn.LayerNorm, nn.RMSNorm, NormWithGate)
    parallel = torch_model()
    assert len(convert(parallel).replaced) == 5
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    parallel = FullyShardedDataParallel(parallel, auto_wrap_policy=ModuleWrapPolicy(set(norms)), **options)
    assert len(FullyShardedDataParallel.fsdp_modules(parallel)) == 6  # the model and five norms
    assert_output_and_gradients(parallel, lambda: None)

    parallel = torch_model()
    assert len(convert(parallel).replaced) == 5
    for module in [*(module for module in parallel if isinstance(module, norms)), parallel]:
        fully_shard(module, mesh=mesh)
    assert_output_and_gradients(parallel, lambda: [p.grad.full_tensor() for p in parallel.parameters()])
    with pytest.raises(RuntimeError, match="got a .*FSDPSubclassNorm; undo that change first"):
        revert(parallel[5])


@in_four_processes
def layers_are_replaced_after_fsdp1_has_wrapped_them(mesh):
    """Some processes have an empty part of a small parameter, and others parts of different sizes."""
    register_conversion(SubclassNorm)
    register_conversion(NormWithGate)
    policies = (None, ModuleWrapPolicy({nn.LayerNorm, nn.RMSNorm}))
    for use_orig_params, policy in itertools.product((False, True), policies):
        options = {"use_orig_params": use_orig_params, "auto_wrap_policy": policy, "device_id": torch.device("cpu")}
        parallel = FullyShardedDataParallel(torch_model(), **options)
        report = convert(parallel)
        text = report_of_all_processes(report)
        assert [type(module) for module in parallel.modules() if isinstance(module, LayerNorm)][:2] == [LayerNorm] * 2
        assert any(type(module) is RMSNorm for module in parallel.modules()), text
        if use_orig_params or policy:  # the shape of the subclasses' parameters is unknown
            assert "FSDP has flattened its parameters; convert the model before it is wrapped" in text
            assert len(report.replaced) == 3 and len(report.skipped) == 2, text
        else:
            assert len(report.replaced) == 5 and not report.skipped, text

        def full_gradients(parallel=parallel, use_orig_params=use_orig_params):
            if not use_orig_params:  # gradients are those of the flat parameter
                return None
            with FullyShardedDataParallel.summon_full_params(parallel, with_grads=True):
                return [parameter.grad.clone() for parameter in parallel.parameters()]

        assert_output_and_gradients(parallel, full_gradients)


@in_four_processes
def layers_are_replaced_after_fsdp2_has_sharded_them(mesh):
    register_conversion(SubclassNorm)
    register_conversion(NormWithGate)
    parallel = torch_model()
    for module in (parallel[2], parallel):
        fully_shard(module, mesh=mesh)
    report = convert(parallel)
    text = report_of_all_processes(report)
    assert list(report.replaced) == ["0", "4", "5", "6"], text
    assert (
        "FSDPLayerNorm: fully_shard has changed its class; convert the model before it is sharded"
        in report.skipped["2"]
    )
    assert_output_and_gradients(parallel, lambda: [p.grad.full_tensor() for p in parallel.parameters()])


def test_later_import_of_dtensor_registers_the_sharding_rules():
    """This package does not import DTensor, which takes half as long as torch and which some builds of torch lack.

    An import hook adds a method to DTensor's loader until the import has run. The loader can be pickled all the time.
    """
    code = f"""
import importlib.util, pickle, sys
sys.modules["{DTENSOR}"] = None  # makes the import fail
import layernorm_ext, torch
layernorm_ext.LayerNorm(8)(torch.ones(2, 8))

del sys.modules["{DTENSOR}"]
for _ in range(2):
    loader = pickle.loads(pickle.dumps(importlib.util.find_spec("{DTENSOR}").loader))
    print(loader.name, "layernorm_ext._dtensor" in sys.modules, *sorted(vars(loader)))
    import {DTENSOR}
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
x = torch.distributed.tensor.distribute_tensor(torch.ones(2, 8), mesh, [torch.distributed.tensor.Shard(0)])
assert layernorm_ext.layer_norm(x, (8,)).placements == x.placements
"""
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=240)
    assert output == f"{DTENSOR} False exec_module name path\n{DTENSOR} True name path\n"
