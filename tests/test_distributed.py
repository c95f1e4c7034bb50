"""Under torch.distributed: real processes that talk through gloo, compared with one.

Every world of processes starts once and works through its checks in order; each test reports the outcome of one.
"""

import copy
import faulthandler
import itertools
import multiprocessing
import subprocess
import sys
import traceback
from datetime import timedelta
from functools import partial
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from layernorm_ext import LayerNorm, add_layer_norm, add_rms_norm, layer_norm, rms_norm

DTENSOR = "torch.distributed.tensor"

CHECKS = {2: [], 4: []}  # by the number of processes

# Sums over rows of several processes, and torch's matrix products, are added in another order than in one process:
# a few roundings of float32 sums of some hundred terms.
ANOTHER_ORDER = {"rtol": 1e-5, "atol": 1e-5}


def in_worlds_of(*sizes):
    def register(check):
        for size in sizes:
            CHECKS[size].append(check)
        return check

    return register


# ---- DTensor ---------------------------------------------------------------------------------------------------------


def tensors():
    """Input, weight, bias and grad_output."""
    return torch.randn(4, 8, 16), torch.randn(16), torch.randn(16), torch.randn(4, 8, 16)


def place(tensor, mesh, *placements):
    """On a mesh of a power of two, so that the summands of a partial placement add up to the bit."""
    whole = [Replicate() if placement.is_partial() else placement for placement in placements]
    summands = prod(mesh.size(dim) for dim, placement in enumerate(placements) if placement.is_partial())
    return DTensor.from_local(distribute_tensor(tensor, mesh, whole).to_local() / summands, mesh, placements)


def count(function, *arguments):
    """What the function returns, and the collectives it takes."""
    with CommDebugMode() as collectives:
        result = function(*arguments)
    return result, {str(name): n for name, n in collectives.get_comm_counts().items()}


def placements_of(results):
    return [None if result is None else result.placements for result in results]


@in_worlds_of(2, 4)
def batch_and_sequence_stay_sharded(mesh, folder):
    x, w, b, dy = tensors()
    expected = layer_norm(x, (16,), w, b)
    for dim in (0, 1):
        shard = (Shard(dim),)
        module = distribute_module(LayerNorm(16), mesh)
        with torch.no_grad():
            module.weight.copy_(place(w, mesh, Replicate()))
            module.bias.copy_(place(b, mesh, Replicate()))
        dx = place(x, mesh, *shard).requires_grad_()
        ddy = place(dy, mesh, *shard)
        y, collectives = count(module, dx)
        assert y.placements == shard and not collectives
        assert torch.equal(y.full_tensor(), expected)
        _, collectives = count(y.backward, ddy)
        assert dx.grad.placements == shard and not collectives
        assert module.weight.grad.placements == module.bias.grad.placements == (Partial(),)

        # What each process holds is, to the bit, what one process makes of the same rows.
        own = [t.requires_grad_() for t in (dx.detach().to_local(), w.clone(), b.clone())]
        gradients = torch.autograd.grad(layer_norm(own[0], (16,), *own[1:]), own, ddy.to_local())
        for actual, e in zip((dx, module.weight, module.bias), gradients, strict=True):
            assert torch.equal(actual.grad.to_local(), e)
        # The whole of the gradients.
        whole = [t.clone().requires_grad_() for t in (x, w, b)]
        gradients = torch.autograd.grad(layer_norm(whole[0], (16,), *whole[1:]), whole, dy)
        assert torch.equal(dx.grad.full_tensor(), gradients[0])
        for parameter, e in zip((module.weight, module.bias), gradients[1:], strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), e, **ANOTHER_ORDER)


@in_worlds_of(2)
def normalized_dimensions_and_partial_sums_become_whole(mesh, folder):
    x, w, b, dy = tensors()
    parameters = [place(t, mesh, Replicate()) for t in (w, b)]
    for placement, collective in ((Shard(2), "all_gather_into_tensor"), (Partial(), "all_reduce")):
        y, collectives = count(layer_norm, place(x, mesh, placement), (16,), *parameters)
        assert y.placements == (Replicate(),) and collectives == {f"c10d_functional.{collective}": 1}
        assert torch.equal(y.to_local(), layer_norm(x, (16,), w, b))


@in_worlds_of(2, 4)
def placements_and_collectives_are_those_of_aten(mesh, folder):
    """Whatever the placements of the input and of the parameters, FSDP's shards among them."""
    of_input = [Shard(0), Shard(1), Replicate()]
    if mesh.size() == 4:
        mesh = init_device_mesh("cpu", (2, 2))
    else:  # on a mesh of several dimensions DTensor may go more than one way about it
        of_input.append(Shard(2))
    x, w, b, dy = tensors()
    weight, bias = layer_norm(x, (16,), w, b), layer_norm(x, (16,), None, b)
    for placements in itertools.product(of_input, repeat=mesh.ndim):
        dx, ddy = place(x, mesh, *placements), place(dy, mesh, *placements)
        for of_parameters in (Replicate(), Shard(0)):
            dw, db = (place(t, mesh, *[of_parameters] * mesh.ndim) for t in (w, b))
            for arguments, expected in (((dw, db), weight), ((None, db), bias)):
                forward, forward_of_aten = (
                    count(op, dx, (16,), *arguments, 1e-5)
                    for op in (torch.ops.layernorm.forward, torch.ops.aten.native_layer_norm)
                )
                assert torch.equal(forward[0][0].full_tensor(), expected)
                mask = [True, arguments[0] is not None, True]
                backward, backward_of_aten = (
                    count(op, ddy, dx, (16,), *statistics, *arguments, mask)
                    for op, (_, *statistics) in (
                        (torch.ops.layernorm.backward, forward[0]),
                        (torch.ops.aten.native_layer_norm_backward, forward_of_aten[0]),
                    )
                )
                for (actual, collectives), (native, native_collectives) in (
                    (forward, forward_of_aten),
                    (backward, backward_of_aten),
                ):
                    assert placements_of(actual) == placements_of(native), (placements, of_parameters)
                    assert collectives == native_collectives, (placements, of_parameters)


@in_worlds_of(2)
def strided_shards_stay(mesh, folder):
    """As they come of flattening batch and sequence when the sequence is sharded."""
    x = torch.randn(4, 8, 16)
    rows = place(x, mesh, Shard(1)).flatten(0, 1)
    y, collectives = count(layer_norm, rows, (16,))
    assert y.placements == rows.placements != (Replicate(),) and not collectives
    assert torch.equal(y.full_tensor(), layer_norm(x, (16,)).flatten(0, 1))


@in_worlds_of(2)
def every_mask_has_its_placements(mesh, folder):
    """And none is given those that DTensor has kept of another call with the same tensors."""
    x, w, b, dy = tensors()
    dx, ddy = (place(t, mesh, Shard(1)) for t in (x, dy))
    dw, db = (place(t, mesh, Replicate()) for t in (w, b))
    for weight, bias in ((dw, db), (dw, None), (None, db), (None, None)):
        _, mean, rstd = torch.ops.layernorm.forward(dx, (16,), weight, bias, 1e-5)
        assert placements_of((mean, rstd)) == [(Shard(1),)] * 2
        for mask in itertools.product([True, False], repeat=3):
            arguments = (ddy, dx, (16,), mean, rstd, weight, bias, mask)
            gradients, collectives = count(torch.ops.layernorm.backward, *arguments)
            expected = [(Shard(1),), (Partial(),), (Partial(),)]
            assert placements_of(gradients) == [p if wanted else None for p, wanted in zip(expected, mask, strict=True)]
            assert not collectives


@in_worlds_of(2)
def the_family_is_sharded_alike(mesh, folder):
    """Sums and gradients stay where their rows are, and nothing is sent."""
    x, w, b, dy = tensors()
    residual, dsum = torch.randn(2, *x.shape)
    members = {
        "rms": lambda x, r, w: (rms_norm(x, (16,), w),),
        "centred": lambda x, r, w: (layer_norm(x, (16,), w, zero_centered_weight=True),),
        "add": lambda x, r, w: add_layer_norm(x, r, (16,), w),
        "add rms": lambda x, r, w: add_rms_norm(x, r, (16,), w),
        "memory efficient": lambda x, r, w: (layer_norm(x, (16,), w, memory_efficient=True),),
    }
    for name, f in members.items():
        own = [place(t, mesh, p).requires_grad_() for t, p in ((x, Shard(1)), (residual, Shard(1)), (w, Replicate()))]
        outputs, collectives = count(f, *own)
        assert placements_of(outputs) == [(Shard(1),)] * len(outputs) and not collectives, name
        cotangents = [place(t, mesh, Shard(1)) for t in (dy, dsum)][: len(outputs)]
        wanted = [t for t in own if t is not own[1] or "add" in name]
        gradients, collectives = count(torch.autograd.grad, outputs, wanted, cotangents)
        assert placements_of(gradients) == [(Shard(1),)] * (len(wanted) - 1) + [(Partial(),)] and not collectives, name
        whole = [t.clone().requires_grad_() for t in (x, residual, w)]
        expected = f(*whole)
        assert all(torch.equal(a.full_tensor(), e) for a, e in zip(outputs, expected, strict=True)), name
        leaves = [t for t in whole if t is not whole[1] or "add" in name]
        expected = torch.autograd.grad(expected, leaves, (dy, dsum)[: len(outputs)])
        for actual, e in zip(gradients, expected, strict=True):
            torch.testing.assert_close(actual.full_tensor(), e, **ANOTHER_ORDER)


@in_worlds_of(2)
def normalized_shape_decides(mesh, folder):
    """Also where DTensor has kept the placements of another normalized_shape for the same tensor."""
    x = torch.randn(4, 8, 16)
    dx = place(x, mesh, Shard(1))
    for shape, placement in (((16,), Shard(1)), ((8, 16), Replicate()), ((16,), Shard(1))):
        y = layer_norm(dx, shape)
        assert y.placements == (placement,)
        assert torch.equal(y.full_tensor(), layer_norm(x, shape))


@in_worlds_of(2)
def derivatives_of_any_order(mesh, folder):
    def second(x, w, b):
        arguments = [t.requires_grad_() for t in (x, w, b)]
        loss = layer_norm(x, (16,), w, b).sin().sum()
        first = torch.autograd.grad(loss, arguments, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), arguments)

    x, w, b, _ = tensors()
    sharded = place(x, mesh, Shard(1)), *(place(t, mesh, Replicate()) for t in (w, b))
    for actual, expected in zip(second(*sharded), second(x, w, b), strict=True):
        torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-4, atol=1e-4)  # sums of sums


@in_worlds_of(2)
def inference_mode(mesh, folder):
    x = torch.randn(4, 8, 16)
    with torch.inference_mode():
        y = layer_norm(place(x, mesh, Shard(1)), (16,))
        assert y.placements == (Shard(1),)
        assert torch.equal(y.full_tensor(), layer_norm(x, (16,)))


@in_worlds_of(2)
def compiled(mesh, folder):
    module = distribute_module(LayerNorm(16), mesh)
    dx = place(torch.randn(4, 8, 16), mesh, Shard(1)).requires_grad_()
    y = torch.compile(module, fullgraph=True, backend="aot_eager")(dx)
    y.sin().sum().backward()
    compiled_gradients = [t.grad for t in (dx, *module.parameters())]
    for t in (dx, *module.parameters()):
        t.grad = None
    expected = module(dx)
    expected.sin().sum().backward()
    for actual, e in zip(
        (y, *compiled_gradients), (expected, dx.grad, *(p.grad for p in module.parameters())), strict=True
    ):
        assert actual.placements == e.placements
        assert torch.equal(actual.to_local(), e.to_local())


# ---- tensor and sequence parallel ------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer's block with the normalizations before attention and before the two linear layers."""

    def __init__(self, norm, width=16, head_width=4):
        super().__init__()
        self.head_width = head_width
        self.norm1, self.norm2 = norm(width), norm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def heads(self, x):
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def forward(self, x):
        y = self.norm1(x)
        y = scaled_dot_product_attention(*(self.heads(layer(y)) for layer in (self.query, self.key, self.value)))
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(gelu(self.up(self.norm2(x))))


@in_worlds_of(2, 4)
def sequence_parallel(mesh, folder):
    """Accepts the module as it is, and takes its parameters for replicated."""
    module = parallelize_module(LayerNorm(16), mesh, SequenceParallel())
    assert type(module) is LayerNorm
    assert module.weight.placements == (Replicate(),)
    x = torch.randn(4, 8, 16)
    y, collectives = count(module, place(x, mesh, Shard(1)))
    assert y.placements == (Shard(1),) and not collectives
    assert torch.equal(y.full_tensor(), LayerNorm(16)(x))


@in_worlds_of(2, 4)
def transformer_block(mesh, folder):
    """Sequence parallel in the normalizations, tensor parallel between them."""
    gathering = partial(ColwiseParallel, input_layouts=Shard(1))
    scattering = partial(RowwiseParallel, output_layouts=Shard(1), use_local_output=False)
    plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "out": scattering(), "down": scattering()}
    plan |= {name: gathering() for name in ("query", "key", "value", "up")}

    x = torch.randn(4, 8, 16)
    dx = place(x, mesh, Shard(1))

    def run(block, x):
        y = block(x)
        y.square().sum().backward()
        return y

    collectives = {}
    for norm in (LayerNorm, nn.LayerNorm):
        torch.manual_seed(1)
        block = Block(norm)
        parallel = parallelize_module(copy.deepcopy(block), mesh, plan)
        y, collectives[norm] = count(run, parallel, dx)
        assert y.placements == (Shard(1),)
        torch.testing.assert_close(y.full_tensor(), run(block, x), **ANOTHER_ORDER)
        for (name, actual), expected in zip(parallel.named_parameters(), block.parameters(), strict=True):
            if "norm" in name:
                assert actual.grad.placements == (Partial(),)
            torch.testing.assert_close(actual.grad.full_tensor(), expected.grad, **ANOTHER_ORDER)
    assert collectives[LayerNorm] == collectives[nn.LayerNorm]


# ---- data parallel ---------------------------------------------------------------------------------------------------


def model():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), LayerNorm(32), nn.GELU(), nn.Linear(32, 32), LayerNorm(32, bias=False))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def loss(model, x):
    return model(x).float().sin().sum()


def mean_of_gradients(model, chunks):
    """What data parallel training computes, in one process: the mean of the gradients of the chunks."""
    gradients = [torch.autograd.grad(loss(model, chunk), list(model.parameters())) for chunk in chunks]
    return [sum(g.float() for g in of_chunks) / len(chunks) for of_chunks in zip(*gradients, strict=True)]


def assert_sums_equal(actual, expected, summands):
    """To the bit for two; more are added in an order of gloo's choosing."""
    for a, e in zip(actual, expected, strict=True):
        if summands == 2:
            assert torch.equal(a, e)
        else:
            torch.testing.assert_close(a, e, **ANOTHER_ORDER)


@in_worlds_of(2, 4)
def distributed_data_parallel(mesh, folder):
    parallel = DistributedDataParallel(model())
    chunks = torch.randn(mesh.size(), 8, 16)
    loss(parallel, chunks[dist.get_rank()]).backward()
    gradients = [parameter.grad for parameter in parallel.parameters()]
    assert_sums_equal(gradients, mean_of_gradients(model(), chunks), mesh.size())


@in_worlds_of(2, 4)
def fully_sharded(mesh, folder):
    parallel = fully_shard(model(), mesh=mesh)
    chunks = torch.randn(mesh.size(), 8, 16)
    loss(parallel, chunks[dist.get_rank()]).backward()
    assert {parameter.grad.placements for parameter in parallel.parameters()} == {(Shard(0),)}
    gradients = [parameter.grad.full_tensor() for parameter in parallel.parameters()]
    assert_sums_equal(gradients, mean_of_gradients(model(), chunks), mesh.size())


@in_worlds_of(2, 4)
def fully_sharded_mixed_precision(mesh, folder):
    """Computed in bfloat16, also with normalizations whose parameters stay in float32; reduced in float32."""
    reduced = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    kept = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=False)
    chunks = torch.randn(mesh.size(), 8, 16)
    for of_norms in (reduced, kept):
        parallel, one = model(), model()
        for sharded, module in zip(parallel, one, strict=True):
            policy = of_norms if isinstance(module, LayerNorm) else reduced
            fully_shard(sharded, mesh=mesh, mp_policy=policy)
            module.to(policy.param_dtype)
        fully_shard(parallel, mesh=mesh, mp_policy=reduced)

        x = chunks[dist.get_rank()]
        y = parallel(x)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, one(x.bfloat16()))
        loss(parallel, x).backward()
        assert {parameter.grad.dtype for parameter in parallel.parameters()} == {torch.float32}
        gradients = [parameter.grad.full_tensor() for parameter in parallel.parameters()]
        assert_sums_equal(gradients, mean_of_gradients(one, chunks.bfloat16()), mesh.size())


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class Training:
    """A model and its optimizer. Every process is given the same batch, so that means of gradients are exact."""

    def __init__(self, mesh=None):
        self.model = model() if mesh is None else fully_shard(model(), mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=False)

    def step(self):
        torch.manual_seed(2)
        self.optimizer.zero_grad()
        loss(self.model, torch.randn(8, 16)).backward()
        self.optimizer.step()

    def forget(self):
        for parameter in self.model.parameters():
            nn.init.zeros_(parameter)

    def save(self, folder):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoint.load(
            {"model": model, "optimizer": optimizer}, checkpoint_id=folder, no_dist=not dist.is_initialized()
        )
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def train(steps):
    training = Training()
    for _ in range(steps):
        training.step()
    return training.model.state_dict()


def assert_trained(state, steps):
    expected = train(steps)
    assert state.keys() == expected.keys()
    for name, parameter in state.items():
        assert torch.equal(parameter, expected[name]), name


@in_worlds_of(2)
def checkpoint_saved(mesh, folder):
    training = Training(mesh)
    training.step()
    training.save(folder / "checkpoint-of-2")


@in_worlds_of(4)
def checkpoint_loaded_by_more(mesh, folder):
    training = Training(mesh)
    training.forget()
    training.load(folder / "checkpoint-of-2")
    training.step()
    training.save(folder / "checkpoint-of-4")
    assert_trained({name: t.full_tensor() for name, t in training.model.state_dict().items()}, steps=2)


def test_checkpoint_loaded_by_one(folder):
    training = Training()
    training.forget()
    training.load(folder / "checkpoint-of-4")
    assert_trained(training.model.state_dict(), steps=2)
    training.step()
    assert_trained(training.model.state_dict(), steps=3)


# ---- the worlds ------------------------------------------------------------------------------------------------------

SECONDS = 120  # until a process that hangs prints its stack and ends


def report_of(folder, check, size, rank):
    return folder / f"{check.__name__}.{rank}-of-{size}"


def work(rank, size, folder):
    """Be one process of a world, and report on every check."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    torch.set_num_threads(1)
    store, timeout = f"file://{folder}/store-of-{size}", timedelta(seconds=SECONDS / 2)
    dist.init_process_group("gloo", store, timeout, rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    for check in CHECKS[size]:
        report = report_of(folder, check, size, rank)
        torch.manual_seed(0)  # the same numbers on every process
        try:
            check(mesh, folder)
            dist.barrier()
        except Exception:
            report.write_text(traceback.format_exc())
            return  # the others learn of it in their next collective, so that none goes on out of step
        report.write_text("")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the worlds leave behind: reports and checkpoints."""
    folder = tmp_path_factory.mktemp("distributed")
    context = multiprocessing.get_context("forkserver")
    # Processes are forked from one that has done nothing but these imports, which take seconds.
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", DTENSOR])
    for size in CHECKS:
        processes = [context.Process(target=work, args=(rank, size, folder)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    return folder


@pytest.mark.parametrize(
    ("check", "size"),
    [pytest.param(check, size, id=f"{check.__name__}-{size}") for size in CHECKS for check in CHECKS[size]],
)
def test_in_processes(folder, check, size):
    reports = [report_of(folder, check, size, rank) for rank in range(size)]
    texts = {report.name: report.read_text() for report in reports if report.exists()}
    failures = [f"{name}:\n{text}" for name, text in texts.items() if text]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    if len(texts) < size:
        pytest.fail("not finished, because a check before it failed or a process ended", pytrace=False)


# ---- imports ---------------------------------------------------------------------------------------------------------


def run_python(code):
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS)


@pytest.mark.parametrize("modules", [("layernorm_ext", DTENSOR), (DTENSOR, "layernorm_ext")], ids=" before ".join)
def test_rules_are_there_whichever_is_imported_first(modules):
    """And the package does not bring DTensor, whose import takes half as long as that of torch."""
    first, second = modules
    run_python(f"""
import sys, {first}
assert "{second}" not in sys.modules
import torch, {second}
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
x = torch.distributed.tensor.distribute_tensor(torch.ones(2, 8), mesh, [torch.distributed.tensor.Shard(0)])
assert layernorm_ext.layer_norm(x, (8,)).placements == x.placements
""")


def test_works_without_dtensor():
    """As in a torch that is built without torch.distributed."""
    run_python(f"""
import sys
sys.modules["{DTENSOR}"] = None  # to import it is an ImportError
import layernorm_ext, torch
layernorm_ext.LayerNorm(8)(torch.ones(2, 8))
""")
