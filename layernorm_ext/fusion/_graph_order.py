"""Reads and writes in a graph of Dynamo, which is not functional, and the preparation of the graph."""

from __future__ import annotations

import bisect
import inspect
import itertools
import logging
import operator
import re
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

logger = logging.getLogger(__package__)


def is_call(node: Any) -> bool:
    return isinstance(node, Node) and node.op in ("call_function", "call_method")


def recorded(node: Any) -> Any:
    """Return the fake value that the tracer recorded for a node."""
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, Node) else None


def fake_tensor(node: Any) -> Tensor | None:
    """Return the fake tensor that the tracer recorded, unless it is of another subclass, such as DTensor."""
    value = recorded(node)
    return value if type(value) is FakeTensor and value.layout is torch.strided else None


def evaluate(function: Any, node: Node, fake_mode: FakeTensorMode) -> Any:
    """Return the fake result of a function, or a tensor's method, for the arguments of a node."""
    function = getattr(Tensor, function) if isinstance(function, str) else function
    args, kwargs = map_arg((node.args, node.kwargs), recorded)
    with fake_mode, enable_python_dispatcher(), torch.no_grad():  # the dispatcher supports symbolic sizes
        return function(*args, **kwargs)


def are_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def are_interchangeable(new: Tensor | None, old: Tensor | None) -> bool:
    """Return whether two tensors have the same metadata, including the strides."""
    if new is None or old is None or (new.dtype, new.device) != (old.dtype, old.device):
        return False
    return are_equal(new.shape, old.shape) and are_equal(new.stride(), old.stride())


def may_share_storage(a: Node, b: Node) -> bool:
    first, second = _storages(a), _storages(b)
    return first is None or second is None or not first.isdisjoint(second)


# Names of functions that write, or that change a mode such as the grad mode.
_IN_PLACE = re.compile(r"(?<!_)_$|^__|(^|_)(set|enter|exit|seed)(_|$)")
_MODE = re.compile(r"(^|_)(set|enter|exit)(_|$)")
# Functions with these names write running statistics, which aten's schemas do not show.
_STATISTICS = re.compile("(batch|instance)_norm|^_?sync_batch")
_KNOWN_MODULES = {"torch", "torch._C", "torch._C._nn", "torch._C._special", "torch._C._linalg", "torch._C._fft"}
_KNOWN_MODULES |= {"torch.functional", "torch.nn.functional", "torch._jit_internal", "_operator", "math"}
_IN_PLACE_OPERATOR = re.compile("i(?!n|s_)|(set|del)item")  # iadd and isub, but not index and is_not
# In-place operations that change a shape, so that recorded values mislead.
_IN_PLACE_RESHAPES = {"as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_"}
_IN_PLACE_RESHAPES |= {"transpose_", "unsqueeze_"}
_CONVERSIONS = {"to", "type_as", "float", "half", "bfloat16", "double", "contiguous"}
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size)


def operation(node: Any) -> str:
    """Return the name of a call, which a function of torch, a method and the operators of aten share."""
    if not is_call(node):
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.removeprefix("aten::")
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def source_of(view: Node) -> Any:
    """Return the tensor that a view reshapes, which may be a keyword argument."""
    return view.args[0] if view.args else view.kwargs.get("input", view.kwargs.get("self"))


def forbids_fusion(node: Node) -> bool:
    """Return whether a node changes a shape in place, so that recorded shapes are wrong, or observes gradients.

    In the fused graph, the gradient of a sum lacks the part that comes from the norm of this sum.
    """
    name = operation(node)
    return name in _IN_PLACE_RESHAPES or name in ("grad", "backward", "retain_grad") or "hook" in name


def bodies(node: Node) -> list[GraphModule]:
    """Return the graphs that a higher-order operator calls."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    module = node.graph.owning_module
    found = [getattr(module, str(each.target), None) for each in node.all_input_nodes if each.op == "get_attr"]
    return [each for each in found if isinstance(each, GraphModule)]


def may_write(node: Node) -> bool:
    """Return whether a node may change a tensor, or a mode in which others are computed. Unknown functions may."""
    target: Any = node.target
    if not is_call(node):
        return node.op == "call_module"
    if str(target).startswith("streams."):  # torch.ops.streams, such as the wait for another stream
        return True
    name = operation(node)
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable or bool(_STATISTICS.search(name))
    if isinstance(target, torch._ops.OpOverloadPacket):  # such as torch.ops.layernorm.check
        return any(getattr(target, overload)._schema.is_mutable for overload in target.overloads())
    if isinstance(target, torch._ops.HigherOrderOperator):
        called = bodies(node)
        return not called or any(may_write(each) for body in called for each in body.graph.nodes)
    module = getattr(target, "__module__", None)
    if module == "_operator":
        return _IN_PLACE_OPERATOR.match(name) is not None
    names = inspect.signature(target).parameters if isinstance(target, types.FunctionType) else ()
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if given.get("inplace", False) is not False or given.get("out") is not None or given.get("max_norm") is not None:
        return True
    if _IN_PLACE.search(name) or _STATISTICS.search(name):
        return True
    is_known = isinstance(target, (types.FunctionType, types.BuiltinFunctionType)) and module in _KNOWN_MODULES
    return node.op == "call_function" and not (is_known or target in (getattr, torch.Size))


def hoist_numbers(graph: Graph) -> None:
    """Move sizes and numbers, such as ``eps`` under ``dynamic=True``, to the front, since the call must follow them."""
    first = next(filter(is_call, graph.nodes))
    before_writes = itertools.takewhile(lambda node: not may_write(node), graph.nodes)
    for node in [node for node in before_writes if is_call(node) and isinstance(recorded(node), _NUMBERS)]:
        if all(each < first for each in node.all_input_nodes):
            first.prepend(node)


def make_sums_out_of_place(graph: Graph) -> None:
    """Replace sums in place whose tensor has no later readers, in graphs of Dynamo: ``x += r`` becomes ``x = x + r``.

    Later users of ``x`` read the sum. The recorded values stay, and with them the storages that later nodes share.
    """
    named = (node for node in graph.nodes if operation(node) in ("iadd", "add_") and len(node.args) in (1, 2))
    sums = {node for node in named if "val" not in node.meta and fake_tensor(node.args[0]) is not None}
    for node in sorted(sums):
        node.args[0].replace_all_uses_with(node, lambda user: user > node)  # noqa: B023 (called immediately)
    first: dict[int | None, Node] = {}  # the first node of each storage; values of unknown types have the storage None
    reader: dict[int | None, Node] = {}  # the last reader of the tensors that a storage has so far
    mode = None  # the last switch of grad mode, which decides whether the sum has a gradient
    for node in graph.nodes:
        value = fake_tensor(node)
        if node in sums and value is not None:
            storage = value.untyped_storage()._cdata
            is_new = is_call(first[storage]) and (mode is None or first[storage] > mode)
            is_last_reader = reader[storage] <= node and reader.get(None, node) <= node
            new = evaluate(torch.add, node, recorded(node).fake_mode) if is_new and is_last_reader else None
            if are_interchangeable(new, value):
                node.op, node.target = "call_function", torch.add
            else:
                logger.debug("%s stays in place: an input, another reader or a mode has its tensor", node.name)
        storages = _storages(node)
        for each in (None,) if storages is None else storages:
            first.setdefault(each, node)
            reader[each] = max([reader.get(each, node), *node.users])
        if is_call(node) and _MODE.search(operation(node)):
            mode = node


def remove_identities(graph: Graph) -> None:
    """Remove conversions and dropouts that return their input itself."""
    for node in [node for node in graph.nodes if is_call(node) and not may_write(node)]:
        name, source = operation(node), source_of(node)
        flags = [*node.args[2:3], node.kwargs.get("training"), node.kwargs.get("train")]
        is_identity = name == "dropout" and any(flag is False for flag in flags)  # training is False
        is_identity |= name in _CONVERSIONS and may_share_storage(source, node)
        if is_identity and are_interchangeable(fake_tensor(source), fake_tensor(node)):
            node.replace_all_uses_with(source, lambda user: user.op != "output")  # whose names export knows
            if not node.users:
                graph.erase_node(node)


class Writes:
    """The nodes of a graph that may write, found once: fusing norms neither adds nor removes one."""

    def __init__(self, graph: Graph) -> None:
        self._nodes = list(filter(may_write, graph.nodes))
        self._last = {key: node for node in self._nodes for each in _written(node) for key in _storages(each) or ()}

    def within(self, first: Node, last: Node) -> bool:
        """Return whether a node from the first to the last one may write."""
        return bisect.bisect_left(self._nodes, first) < bisect.bisect_right(self._nodes, last)

    def after(self, last: Node, tensors: Iterable[Node]) -> bool:
        """Return whether a node after ``last`` may write one of these tensors, which backward reads, or a view."""
        return any(self._last.get(key, last) > last for tensor in tensors for key in _storages(tensor) or ())


def _written(node: Node) -> list[Node]:
    """Return the nodes that a node may write: what a schema or an assignment says, else all that it reads."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable and not node.kwargs:
        given = zip(node.target._schema.arguments, node.args, strict=False)
        return [leaf for each, arg in given if each.is_write for leaf in tree_leaves(arg) if isinstance(leaf, Node)]
    is_assignment = node.target is operator.setitem or (node.op == "call_method" and operation(node) == "copy_")
    return [node.args[0]] if is_assignment and isinstance(node.args[0], Node) else node.all_input_nodes


def _storages(node: Node) -> set[int] | None:
    """Return the storages of a node's tensors, or None if a value is of an unknown kind."""
    leaves, found = tree_leaves(recorded(node)), set()
    while leaves:
        leaf = leaves.pop()
        if type(leaf) is FakeTensor and leaf.layout is torch.strided:
            found.add(leaf.untyped_storage()._cdata)
        elif is_traceable_wrapper_subclass(leaf):  # such as a jagged tensor, or DTensor, whose mesh is no tensor
            inner = (getattr(leaf, name) for name in leaf.__tensor_flatten__()[0])
            leaves += (each for each in inner if isinstance(each, Tensor))
        elif not isinstance(leaf, (str, type(None), *_NUMBERS)):
            return None
    return found
