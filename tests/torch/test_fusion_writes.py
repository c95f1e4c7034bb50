"""Operators of torch that write to arguments, although their schemas do not say so: the fusing pass knows them."""

import importlib
import itertools
import sys
import types
import unittest
import warnings

import torch
from support.backends import bits
from torch.fx import Graph
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layernorm_ext.fusion._graph_order import may_write

# The samples of each operator that run. The first ones of batch_norm and instance_norm include running statistics.
SAMPLES = 3


def changed_by(call, arguments):
    """Return the result of a call, and whether a version or a bit of its arguments changes."""
    tensors = [t for t in tree_leaves(arguments) if type(t) is torch.Tensor and t.layout is torch.strided]
    before = [(t._version, t.detach().clone()) for t in tensors]
    result = call()
    pairs = zip(tensors, before, strict=True)
    return result, not all(t._version == version and torch.equal(bits(t), bits(old)) for t, (version, old) in pairs)


class UndeclaredWriters(TorchDispatchMode):
    """Collects the operators that write although their schemas do not say so, in `found`, and all in `seen`."""

    def __init__(self):
        super().__init__()
        self.found, self.seen = set(), set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.seen.add(operator)
        if operator._schema.is_mutable:
            return operator(*args, **kwargs)
        result, is_changed = changed_by(lambda: operator(*args, **kwargs), (args, kwargs))
        if is_changed:
            self.found.add(operator)
        return result


def call_of(target):
    """Return a node of a graph, which is what may_write() takes."""
    return Graph().create_node("call_function", target, (), {})


def test_operators_that_write_although_their_schemas_do_not_say_so():
    """Run all operators for which torch has samples; a new version of torch may add a writer."""
    # torch's samples import a package of its own tests, which nothing here uses.
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False))
    common = importlib.import_module("torch.testing._internal.common_methods_invocations")
    functions, ran = set(), 0
    with warnings.catch_warnings(), UndeclaredWriters() as writers:
        warnings.simplefilter("ignore")
        for info in common.op_db:
            dtype = torch.float32 if torch.float32 in info.dtypes else next(iter(info.dtypes), None)
            # Thousands of samples of max_pool and max_unpool take seconds.
            if dtype is None or "max_pool" in info.name or "max_unpool" in info.name:
                continue
            # info.sample_inputs() looks up every frame of pytest's stack, which takes 30 seconds in all.
            for sample in itertools.islice(info.sample_inputs_func(info, "cpu", dtype, requires_grad=False), SAMPLES):
                arguments = (sample.input, sample.args, sample.kwargs)
                try:
                    _, is_changed = changed_by(lambda: info.op(sample.input, *sample.args, **sample.kwargs), arguments)  # noqa: B023
                except Exception:  # samples of errors, and dtypes that this processor does not have
                    continue
                ran += 1
                if is_changed and isinstance(info.op, (types.FunctionType, types.BuiltinFunctionType)):
                    functions.add(info.op)
    assert ran > 1200 and len(writers.seen) > 400  # few samples fail
    assert writers.found == {torch.ops.aten.native_batch_norm.default}
    assert {function.__name__ for function in functions} >= {"batch_norm", "instance_norm"}
    assert all(may_write(call_of(target)) for target in writers.found | functions)


def test_schemas_with_running_statistics_are_writers():
    """Operators that take running statistics write them, also those for devices that this machine does not have."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    packets = {name.partition("::")[2].partition(".")[0] for name in names}
    overloads = [
        getattr(packet, name)
        for packet in (getattr(torch.ops.aten, name) for name in packets)
        for name in packet.overloads()
    ]
    statistics = [each for each in overloads if any("running" in arg.name for arg in each._schema.arguments)]
    assert torch.ops.aten.cudnn_batch_norm.default in statistics and len(overloads) > 2000
    readers = {each._schema.name for each in statistics if not may_write(call_of(each))}
    assert readers <= {"aten::_fused_moving_avg_obs_fq_helper_functional"}  # it returns the new statistics
