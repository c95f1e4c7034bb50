"""torch.distributed: four processes that communicate through gloo give the results of one process.

Starting processes takes seconds. One test therefore starts them once, and they run all functions in CHECKS.
"""

import copy
import faulthandler
import itertools
import multiprocessing
import subprocess
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from layernorm_ext import LayerNorm, add_layer_norm, add_rms_norm, layer_norm, rms_norm

PROCESSES = 4
SECONDS = 240  # until a process that hangs prints its stack and exits
DTENSOR = "torch.distributed.tensor"
CHECKS = []

# Four processes add float32 numbers in another order than one: some hundred terms of size 1, each rounded by 6e-8.
ANOTHER_ORDER = {"rtol": 1e-5, "atol": 1e-5}


def in_four_processes(check):
    CHECKS.append(check)
    return check


def run_checks(rank, folder):
    """Run all checks in one of the processes and return the traceback of the first failure."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS / 2)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    try:
        for check in CHECKS:
            torch.manual_seed(0)  # all processes draw the same numbers
            check(mesh)
            dist.barrier()
        load_and_save_checkpoint(mesh, folder)
    except Exception:
        return traceback.format_exc()
    finally:
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def test_four_processes_give_the_results_of_one(tmp_path):
    checkpoint.save(make_model().state_dict(), checkpoint_id=tmp_path / "of one process", no_dist=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint", DTENSOR])
    with ProcessPoolExecutor(PROCESSES, context) as pool:
        failures = list(filter(None, pool.map(run_checks, range(PROCESSES), [tmp_path] * PROCESSES)))
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)

    load_checkpoint(make_model(), tmp_path / "of four processes")


# DTensor


def random_tensors():
    """Return input, weight, bias and grad_output."""
    return torch.randn(4, 8, 16), torch.randn(16), torch.randn(16), torch.randn(4, 8, 16)


def place(tensor, mesh, *placements):
    """Distribute a tensor. With Partial, each process holds an equal summand; dividing by a power of two is exact."""
    whole = [Replicate() if placement.is_partial() else placement for placement in placements]
    summands = prod(mesh.size(dim) for dim, placement in enumerate(placements) if placement.is_partial())
    return DTensor.from_local(distribute_tensor(tensor, mesh, whole).to_local() / summands, mesh, placements)


def with_collectives(function, *arguments):
    """Return the result of the function, and how often it called each collective."""
    with CommDebugMode() as collectives:
        result = function(*arguments)
    return result, {str(name): count for name, count in collectives.get_comm_counts().items()}


def placements_of(tensors):
    return [None if tensor is None else tensor.placements for tensor in tensors]


@in_four_processes
def family_keeps_batch_and_sequence_sharded(mesh):
    """Without any collective, in forward and backward. Parameter gradients are partial sums."""
    x, w, b, dy = random_tensors()
    residual, dsum = torch.randn(2, *x.shape)
    tensors = {"x": x, "r": residual, "w": w, "b": b}
    members = [
        (lambda x, w, b: (layer_norm(x, (16,), w, b),), "xwb"),
        (lambda x, w: (layer_norm(x, (16,), w, zero_centered_weight=True),), "xw"),
        (lambda x, w: (layer_norm(x, (16,), w, memory_efficient=True),), "xw"),
        (lambda x, w: (rms_norm(x, (16,), w),), "xw"),
        (lambda x, r, w, b: add_layer_norm(x, r, (16,), w, b), "xrwb"),
        (lambda x, r, w: add_rms_norm(x, r, (16,), w), "xrw"),
    ]
    for shard, (function, names) in itertools.product((Shard(0), Shard(1)), members):
        placements = [shard if name in "xr" else Replicate() for name in names]
        pairs = zip(names, placements, strict=True)
        distributed = [place(tensors[name], mesh, placement).requires_grad_() for name, placement in pairs]
        outputs, collectives = with_collectives(function, *distributed)
        assert placements_of(outputs) == [(shard,)] * len(outputs) and not collectives
        grad_outputs = (dy, dsum)[: len(outputs)]
        sharded_grad_outputs = [place(t, mesh, shard) for t in grad_outputs]
        gradients, collectives = with_collectives(torch.autograd.grad, outputs, distributed, sharded_grad_outputs)
        assert placements_of(gradients) == [(shard,) if name in "xr" else (Partial(),) for name in names]
        assert not collectives

        # Each process has the bits that one process computes from the same rows.
        local = [t.detach().to_local().requires_grad_() for t in distributed]
        local_grad_outputs = [t.to_local() for t in sharded_grad_outputs]
        expected = torch.autograd.grad(function(*local), local, local_grad_outputs)
        assert all(torch.equal(actual.to_local(), e) for actual, e in zip(gradients, expected, strict=True))

        whole = [tensors[name].clone().requires_grad_() for name in names]
        expected = function(*whole)
        assert all(torch.equal(actual.full_tensor(), e) for actual, e in zip(outputs, expected, strict=True))
        for actual, e in zip(gradients, torch.autograd.grad(expected, whole, grad_outputs), strict=True):
            torch.testing.assert_close(actual.full_tensor(), e, **ANOTHER_ORDER)


@in_four_processes
def normalized_dimensions_and_partial_sums_become_replicated(mesh):
    x, w, b, dy = random_tensors()
    parameters = [place(t, mesh, Replicate()) for t in (w, b)]
    for placement, collective in ((Shard(2), "all_gather_into_tensor"), (Partial(), "all_reduce")):
        y, collectives = with_collectives(layer_norm, place(x, mesh, placement), (16,), *parameters)
        assert y.placements == (Replicate(),) and collectives == {f"c10d_functional.{collective}": 1}
        assert torch.equal(y.to_local(), layer_norm(x, (16,), w, b))


@in_four_processes
def placements_and_collectives_equal_those_of_aten(mesh):
    """FSDP shards the parameters, and tensor parallelism replicates them."""
    x, w, b, dy = random_tensors()
    two_by_two = init_device_mesh("cpu", (2, 2))
    cases = [(mesh, (shard,)) for shard in (Shard(0), Shard(1), Shard(2), Replicate())]
    cases += [(two_by_two, pair) for pair in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2)]
    for mesh, placements in cases:
        dx, ddy = place(x, mesh, *placements), place(dy, mesh, *placements)
        for parameter_placement, has_weight in itertools.product((Replicate(), Shard(0)), (True, False)):
            dw, db = (place(t, mesh, *[parameter_placement] * mesh.ndim) for t in (w, b))
            parameters = (dw if has_weight else None, db)
            results, values = [], []
            for forward, backward in (
                (torch.ops.layernorm.forward, torch.ops.layernorm.backward),
                (torch.ops.aten.native_layer_norm, torch.ops.aten.native_layer_norm_backward),
            ):
                outputs, forward_collectives = with_collectives(forward, dx, (16,), *parameters, 1e-5)
                arguments = (ddy, dx, (16,), *outputs[1:], *parameters, [True, has_weight, True])
                gradients, backward_collectives = with_collectives(backward, *arguments)
                results.append((*placements_of((*outputs, *gradients)), forward_collectives, backward_collectives))
                values.append(outputs[0].full_tensor())
            assert results[0] == results[1], (placements, parameter_placement, has_weight)
            torch.testing.assert_close(*values, **ANOTHER_ORDER)


@in_four_processes
def strided_shards_stay_sharded(mesh):
    """Flattening the batch and a sharded sequence makes strided shards."""
    x = torch.randn(4, 8, 16)
    rows = place(x, mesh, Shard(1)).flatten(0, 1)
    y, collectives = with_collectives(layer_norm, rows, (16,))
    assert y.placements == rows.placements != (Replicate(),) and not collectives
    assert torch.equal(y.full_tensor(), layer_norm(x, (16,)).flatten(0, 1))


@in_four_processes
def cached_placements_depend_on_output_mask(mesh):
    """DTensor caches the placements of a call, and these calls differ only in missing parameters and output_mask."""
    x, w, b, dy = random_tensors()
    dx, ddy = (place(t, mesh, Shard(1)) for t in (x, dy))
    dw, db = (place(t, mesh, Replicate()) for t in (w, b))
    for parameters in ((dw, db), (dw, None), (None, db), (None, None)):
        _, mean, rstd = torch.ops.layernorm.forward(dx, (16,), *parameters, 1e-5)
        assert placements_of((mean, rstd)) == [(Shard(1),)] * 2
        for mask in itertools.product([True, False], repeat=3):
            arguments = (ddy, dx, (16,), mean, rstd, *parameters, mask)
            gradients, collectives = with_collectives(torch.ops.layernorm.backward, *arguments)
            expected = zip([(Shard(1),), (Partial(),), (Partial(),)], mask, strict=True)
            assert placements_of(gradients) == [placement if wanted else None for placement, wanted in expected]
            assert not collectives


@in_four_processes
def cached_placements_depend_on_normalized_shape(mesh):
    x = torch.randn(4, 8, 16)
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            dx = place(x, mesh, Shard(1))
            for shape, placement in (((16,), Shard(1)), ((8, 16), Replicate()), ((16,), Shard(1))):
                y = layer_norm(dx, shape)
                assert y.placements == (placement,)
                assert torch.equal(y.full_tensor(), layer_norm(x, shape))


@in_four_processes
def second_derivatives_match(mesh):
    def second(x, w, b):
        arguments = [t.requires_grad_() for t in (x, w, b)]
        loss = layer_norm(x, (16,), w, b).sin().sum()
        first = torch.autograd.grad(loss, arguments, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), arguments)

    x, w, b, _ = random_tensors()
    distributed = place(x, mesh, Shard(1)), *(place(t, mesh, Replicate()) for t in (w, b))
    for actual, expected in zip(second(*distributed), second(x, w, b), strict=True):
        # The gradients of the sums are sums again, with values up to a hundred.
        torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-4, atol=1e-4)


@in_four_processes
def compiled_module_has_the_same_bits(mesh):
    module = distribute_module(LayerNorm(16), mesh)
    x = place(torch.randn(4, 8, 16), mesh, Shard(1)).requires_grad_()
    results = []
    for function in (torch.compile(module, fullgraph=True, backend="aot_eager"), module):
        y = function(x)
        results.append((y, *torch.autograd.grad(y.sin().sum(), (x, *module.parameters()))))
    for actual, expected in zip(*results, strict=True):
        assert actual.placements == expected.placements
        assert torch.equal(actual.to_local(), expected.to_local())


# Tensor and sequence parallelism


@in_four_processes
def feed_forward_block_takes_the_collectives_of_torchs(mesh):
    """The norm is sequence parallel, the linear layers are tensor parallel."""
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    x = torch.randn(4, 8, 16)

    def step(block, x):
        y = block(x)
        y.square().sum().backward()
        return y

    collectives = []
    for norm in (LayerNorm, nn.LayerNorm):
        torch.manual_seed(1)
        block = nn.Sequential(norm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        parallel = parallelize_module(copy.deepcopy(block), mesh, plan)
        assert type(parallel[0]) is norm and parallel[0].weight.placements == (Replicate(),)
        y, counts = with_collectives(step, parallel, place(x, mesh, Shard(1)))
        collectives.append(counts)
        assert y.placements == (Shard(1),)
        torch.testing.assert_close(y.full_tensor(), step(block, x), **ANOTHER_ORDER)
        assert parallel[0].weight.grad.placements == (Partial(),)
        for actual, expected in zip(parallel.parameters(), block.parameters(), strict=True):
            torch.testing.assert_close(actual.grad.full_tensor(), expected.grad, **ANOTHER_ORDER)
    assert collectives[0] == collectives[1]


# Data parallelism: each process has a chunk of the batch, and the gradients are the means over the chunks


def make_model():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), LayerNorm(32), nn.GELU(), nn.Linear(32, 32), LayerNorm(32, bias=False))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def loss(model, x):
    return model(x).float().sin().sum()


def assert_means_over_chunks(gradients, model, chunks):
    by_chunk = [torch.autograd.grad(loss(model, chunk), list(model.parameters())) for chunk in chunks]
    for actual, parts in zip(gradients, zip(*by_chunk, strict=True), strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, sum(part.float() for part in parts) / len(chunks), **ANOTHER_ORDER)


@in_four_processes
def distributed_data_parallel_matches(mesh):
    parallel = DistributedDataParallel(make_model())
    chunks = torch.randn(PROCESSES, 8, 16)
    loss(parallel, chunks[dist.get_rank()]).backward()
    assert_means_over_chunks([p.grad for p in parallel.parameters()], make_model(), chunks)


@in_four_processes
def fully_sharded_data_parallel_matches(mesh):
    """In float32, in bfloat16, and in bfloat16 with the norms' parameters in float32; gradients are always float32."""
    wide = MixedPrecisionPolicy()
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wide_norm = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=False)
    chunks = torch.randn(PROCESSES, 8, 16)
    for policy, norm_policy in ((wide, wide), (narrow, narrow), (narrow, wide_norm)):
        dtype = policy.param_dtype or torch.float32
        parallel, model = make_model(), make_model()
        for sharded, module in zip(parallel, model, strict=True):
            policy_of_module = norm_policy if isinstance(module, LayerNorm) else policy
            fully_shard(sharded, mesh=mesh, mp_policy=policy_of_module)
            module.to(policy_of_module.param_dtype)
        fully_shard(parallel, mesh=mesh, mp_policy=policy)

        x = chunks[dist.get_rank()]
        y = parallel(x)
        assert y.dtype == dtype and torch.equal(y, model(x.to(dtype)))
        loss(parallel, x).backward()
        assert {parameter.grad.placements for parameter in parallel.parameters()} == {(Shard(0),)}
        assert_means_over_chunks([p.grad.full_tensor() for p in parallel.parameters()], model, chunks.to(dtype))


# Checkpoints: one process saves, four load and save, one loads


def load_checkpoint(model, folder):
    """Load over zeros and compare with the model that was saved."""
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    state = model.state_dict()
    checkpoint.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    for name, expected in make_model().state_dict().items():
        assert torch.equal(state[name].full_tensor() if dist.is_initialized() else state[name], expected), name


def load_and_save_checkpoint(mesh, folder):
    model = fully_shard(make_model(), mesh=mesh)
    load_checkpoint(model, folder / "of one process")
    checkpoint.save(model.state_dict(), checkpoint_id=folder / "of four processes")


# Imports


def run_python(code):
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS)


def test_later_import_of_dtensor_registers_the_sharding_rules():
    """This file tests the other order. layernorm_ext does not import DTensor, which takes half as long as torch."""
    run_python(f"""
import sys, layernorm_ext
assert "{DTENSOR}" not in sys.modules
import torch, {DTENSOR}
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
x = torch.distributed.tensor.distribute_tensor(torch.ones(2, 8), mesh, [torch.distributed.tensor.Shard(0)])
assert layernorm_ext.layer_norm(x, (8,)).placements == x.placements
""")


def test_works_in_a_torch_without_distributed():
    run_python(f"""
import sys
sys.modules["{DTENSOR}"] = None  # makes the import fail
import layernorm_ext, torch
layernorm_ext.LayerNorm(8)(torch.ones(2, 8))
""")
