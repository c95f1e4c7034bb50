"""The order of reads and writes in a graph of Dynamo, which is not functional."""

from __future__ import annotations

import bisect
import inspect
import operator
import re
import types
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node


def is_call(node: Any) -> bool:
    return isinstance(node, Node) and node.op in ("call_function", "call_method")


def recorded(node: Any) -> Any:
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, Node) else None


def fake_tensor(node: Any) -> Tensor | None:
    """Return the fake tensor that the tracer recorded, unless it is of another subclass, such as DTensor."""
    value = recorded(node)
    return value if type(value) is FakeTensor and value.layout is torch.strided else None


_IN_PLACE = re.compile(r"(?<!_)_$|^__|(^|_)(set|enter|exit|seed)(_|$)")
# Running statistics, which neither names nor aten's schemas show to be written.
_STATISTICS = re.compile("(batch|instance)_norm|^_?sync_batch")
_KNOWN_MODULES = {"torch", "torch._C", "torch._C._nn", "torch._C._special", "torch._C._linalg", "torch._C._fft"}
_KNOWN_MODULES |= {"torch.functional", "torch.nn.functional", "torch._jit_internal", "_operator", "math"}
_IN_PLACE_OPERATOR = re.compile("i(?!n|s_)|(set|del)item")  # iadd and isub, but not index and is_not
# In-place operations that change a shape, so that recorded values mislead.
_RESHAPES = {"as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_"}
_RESHAPES |= {"unsqueeze_"}


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def misleads(node: Node) -> bool:
    """Return whether no norm of a graph with this node is joined.

    The node changes a shape in place, or observes the gradient of an intermediate sum, which lacks the norm's part in
    the joined graph.
    """
    name = _name(node).partition(".")[0]
    return is_call(node) and (name in _RESHAPES or name in ("grad", "backward", "retain_grad") or "hook" in name)


def _may_write(node: Node) -> bool:
    """Return whether a node may change a tensor, or a mode in which others are computed. Unknown functions may."""
    target: Any = node.target
    if not is_call(node):
        return node.op == "call_module"
    if str(target).startswith("streams."):  # torch.ops.streams, such as the wait for another stream
        return True
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable or bool(_STATISTICS.search(str(target)))
    if isinstance(target, torch._ops.OpOverloadPacket):  # a check of this package
        return any(getattr(target, overload)._schema.is_mutable for overload in target.overloads())
    name, module = _name(node), getattr(target, "__module__", None)
    if module == "_operator":
        return _IN_PLACE_OPERATOR.match(name) is not None
    if _IN_PLACE.search(name) or _STATISTICS.search(name) or node.kwargs.get("out") is not None:
        return True
    if _argument(node, "inplace", False) is not False or _argument(node, "max_norm", None) is not None:
        return True
    is_function = isinstance(target, (types.FunctionType, types.BuiltinFunctionType))
    return node.op == "call_function" and not (is_function and (module in _KNOWN_MODULES or target is getattr))


def _argument(node: Node, name: str, default: Any) -> Any:
    """Return an argument of a Python function, in any position."""
    parameters = _parameters(node.target)
    if name in parameters and len(node.args) > parameters.index(name):
        return node.args[parameters.index(name)]
    return node.kwargs.get(name, default)


@cache
def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters) if isinstance(function, types.FunctionType) else []


def are_on_one_stream(nodes: Iterable[Node]) -> bool:
    """Return whether the nodes are in one region of ``torch.cuda.stream``, or in none."""
    return len({node.meta.get("custom", {}).get("stream") for node in nodes}) == 1


def is_sorted(graph: Graph) -> bool:
    """Return whether each node comes after all that it reads."""
    return not any(source > node for node in graph.nodes for source in node.all_input_nodes)


class Writes:
    """The nodes of a graph that may write. Joining norms neither adds nor removes one."""

    def __init__(self, graph: Graph) -> None:
        self._nodes = list(filter(_may_write, graph.nodes))
        self._last = {_storage(written): node for node in self._nodes for written in _written(node)}

    def between(self, first: Node, last: Node) -> bool:
        """Return whether a node from the first to the last one may change what another one reads."""
        index = bisect.bisect_left(self._nodes, first)
        return index < len(self._nodes) and self._nodes[index] <= last

    def behind(self, last: Node, tensors: Iterable[Node]) -> bool:
        """Return whether a later node may change one of these tensors, which the call saves for backward, or a view."""
        writes = (self._last.get(storage) for storage in set(map(_storage, tensors)) - {None})
        return any(write is not None and write > last for write in writes)


def _written(node: Node) -> list[Node]:
    """Return the nodes that a node may write: the first argument of an assignment, else all that it reads."""
    is_assignment = node.target is operator.setitem or (node.op == "call_method" and _name(node) == "copy_")
    return [node.args[0]] if is_assignment and isinstance(node.args[0], Node) else node.all_input_nodes


def _storage(node: Node) -> int | None:
    value = fake_tensor(node)
    return None if value is None else value.untyped_storage()._cdata
