"""Fuses this package's norms with their neighbors, in the graphs of torch.compile and torch.export.

One call of the operator ``layernorm::forward`` replaces a residual sum with a gate, a norm, and a modulation::

    s = residual + gate * x
    y = norm(s)                         ->  output, s = forward(x, weight=1 + scale, bias=shift, residual=residual,
    output = y * (1 + scale) + shift                            input_scale=gate)

Everything but the norm may be missing. ``_neighbors.py`` finds the nodes, ``_graph_order.py`` the writes between them.
If the order of reads and writes might change, a norm stays as it is. ``docs/fusion.md`` shows the uses.

This module is not imported by ``import layernorm_ext``, because Inductor's modules take a second to import.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

import layernorm_ext

from . import _graph_order as order
from . import _neighbors
from ._graph_order import Writes, fake_tensor, recorded
from ._neighbors import Modulation, Sum, are_alike, find_modulations, find_sums, share_batch_sizes

__all__ = ["FuseNeighbors", "eager", "fuse_neighbors"]

_logger, _ops, _aten = order.logger, torch.ops.layernorm, torch.ops.aten


class FuseNeighbors(CustomGraphPass):
    """A pass over a graph of Dynamo or torch.export, for ``torch._inductor.config.pre_grad_custom_pass``.

    Attributes:
        counts: The number of calls of each kind, such as ``"gate and add"``, in all graphs since the last
            ``counts.clear()``. Graphs from Inductor's cache are not counted.
        raises: Whether an exception inside the pass reaches the caller, or is logged as a warning once.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.raises = False
        self._has_warned = False

    def uuid(self) -> bytes:
        """Return the part of Inductor's cache key that depends on this pass."""
        return get_hash_for_files((__file__, order.__file__, _neighbors.__file__), layernorm_ext.__version__)

    def __call__(self, graph: Graph) -> None:
        """Fuse the norms of a graph with their neighbors, in place."""
        for body in {body: None for node in graph.nodes for body in order.bodies(node)}:  # each of them once
            self(body.graph)
            body.recompile()
        norms = [node for node in graph.nodes if node.target in (_ops.forward.default, _ops.forward.fused)]
        fused: Counter[str] = Counter()
        with self._caught("the graph"):
            stable_topological_sort(graph)  # Inductor sorts after custom passes, and other passes may not
            if any(map(order.forbids_fusion, graph.nodes)):
                _logger.debug("a node changes a shape in place or observes a gradient: all norms are left")
            elif len({id(recorded(node).fake_mode) for node in graph.nodes if fake_tensor(node) is not None}) > 1:
                _logger.debug("the recorded values do not share storages, as those of make_fx: all norms are left")
            elif norms:
                order.hoist_numbers(graph)
                order.make_sums_out_of_place(graph)
                order.remove_identities(graph)
                writes = Writes(graph)
                for norm in norms:
                    with self._caught(norm.name):
                        fused.update(filter(None, [_fuse_norm(norm, writes)]))
            if self.raises:
                graph.lint()
        self.counts += fused
        _logger.info("%d norms%s", len(norms), ": " * bool(fused) + ", ".join(f"{k} {n}" for k, n in fused.items()))

    @contextlib.contextmanager
    def _caught(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            if self.raises:
                raise
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True
            _logger.log(level, "%s is left because of an unexpected exception", name, exc_info=True)


fuse_neighbors = FuseNeighbors()


def eager(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Fuse the norms with their neighbors and run the graph as it is, as the backend of :func:`torch.compile`.

    As under Inductor, a gradient with respect to a sum that leaves the graph lacks the part of the norm within it.
    """
    fuse_neighbors(module.graph)
    module.recompile()
    return module.forward


_DEFAULTS: dict[str, Any] = {argument.name: argument.default_value for argument in _ops.forward.fused._schema.arguments}
_DEFAULTS["eps"] = 1e-5  # of forward.default


def _fuse_norm(norm: Node, writes: Writes) -> str | None:
    """Replace a norm and its neighbors by one call if possible, and return what was fused."""
    given = _DEFAULTS | dict(zip(_DEFAULTS, norm.args, strict=False)) | norm.kwargs
    for unused in [user for user in norm.users if user.target is operator.getitem and not user.users]:
        norm.graph.erase_node(unused)  # in the bodies of checkpoints, Dynamo records all results
    items = {user.args[1]: user for user in norm.users if user.target is operator.getitem}
    returns_sum = norm.target is _ops.forward.fused
    y, total = items.pop(0, None), items.pop(1, None) if returns_sum else None
    if y is None or items or len(norm.users) > 2 or given["memory_efficient"] or given["images"] or given["gate"]:
        return None
    dims = len(map_arg(given["normalized_shape"], recorded))
    modulations = [*find_modulations(y, dims), None]
    sums = [*(() if returns_sum or given["num_groups"] else find_sums(given["input"], dims)), None]
    choices = [(s, m) for m in modulations for s in sums if s] + [(None, m) for m in modulations if m]
    for choice in choices:  # the first one that fits
        match = _Match(norm, y, total, given, dims, writes, *choice)
        if match.fits() and match.fuse():
            return match.kind
        _logger.debug("%s: %s is not fused: an order, a shape, a write or a border forbids it", norm.name, match.kind)
    return None


@dataclass(frozen=True)
class _Match:
    """A norm with its results and its given arguments, and the neighbors that are fused with it."""

    norm: Node
    y: Node  # the output
    returned_sum: Node | None  # of a norm that has a residual already
    given: dict[str, Any]  # the arguments by name
    dims: int  # the number of normalized dimensions
    writes: Writes
    sum: Sum | None
    modulation: Modulation | None
    new: list[Node] = field(default_factory=list)  # the inserted nodes, in order

    @property
    def kind(self) -> str:
        parts = {"gate": self.sum and self.sum.gate, "add": self.sum, "modulate": self.modulation}
        *others, last = [name for name, part in parts.items() if part]
        return " and ".join(filter(None, [", ".join(others), last]))

    @property
    def replaced(self) -> list[Node]:
        """The nodes whose values the new call computes."""
        around = [each.replaced for each in (self.sum, self.modulation) if each]
        return [self.norm, self.y, *filter(None, [self.returned_sum]), *itertools.chain(*around)]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the call without a modulation, whose parameters insert() adds."""
        s = self.sum
        return self.given | ({"residual": s.residual, "input": s.x, "input_scale": s.gate} if s else {})

    @property
    def own_parameters(self) -> list[Node]:
        """The weight and the bias that the norm has without its neighbors."""
        return [each for each in (self.given["weight"], self.given["bias"]) if each is not None]

    def fits(self) -> bool:
        """Return whether the operator takes these parameters together, and nothing outside a body observes the sum."""
        is_body = hasattr(self.norm.graph.owning_module, "torchdynamo_force_dynamic")  # of a higher-order operator
        outputs = self.norm.graph.output_node().all_input_nodes
        if is_body and self.sum and any(order.may_share_storage(each, self.sum.total) for each in outputs):
            return False  # the graph around the body may observe the gradient of the sum, which eager() describes
        if self.modulation and self.own_parameters and not self.can_multiply_parameters(self.modulation):
            return False
        parameters = self.modulation.parameters if self.modulation else self.own_parameters
        if self.sum and self.sum.views and any(recorded(each).dim() != self.dims for each in parameters):
            return False  # before the views, the batch dimensions are others
        return share_batch_sizes(self.dims, *parameters, self.sum.gate if self.sum else self.given["input_scale"])

    def can_multiply_parameters(self, modulation: Modulation) -> bool:
        """Return whether weight and bias can be multiplied by the factor: in one dtype, and smaller than the output."""
        if modulation.is_zero_centered or self.given["zero_centered_weight"] or are_alike(modulation.factor, self.y):
            return False  # other formulas, or products of the size of the output
        values = map(fake_tensor, [self.given["input"], *self.own_parameters, *modulation.parameters])
        are_shared = all(recorded(each).dim() == self.dims for each in self.own_parameters)
        return are_shared and all(v is not None and v.dtype == recorded(self.y).dtype for v in values)

    def insertion_point(self) -> Node | None:
        """Return the node before which the call belongs, or None if there is no such node.

        The call comes after all that it reads, and before all that reads what it replaces. From the first to the last
        replaced node, none writes or waits for a stream, and all have one stream: its arguments keep their values.
        """
        first, last = min(self.replaced), max(self.replaced)
        parameters = self.modulation.parameters if self.modulation else []
        inputs = [leaf for leaf in tree_leaves((self.arguments, parameters)) if isinstance(leaf, Node)]
        point = max([first, *(node.next for node in inputs)])
        users = {user for node in self.replaced for user in node.users}.difference(self.replaced)
        has_place = all(point <= user for user in users) and set(inputs).isdisjoint(self.replaced)
        saved = inputs if self.modulation or (self.sum and self.sum.gate) else []
        is_changed = self.writes.within(first, last) or self.writes.after(last, saved)
        streams = {node.meta.get("custom", {}).get("stream") for node in self.replaced}
        return point if has_place and len(streams) == 1 and not is_changed else None

    def fuse(self) -> bool:
        """Insert the call, and let the nodes of the result and of the sum take its results, if these match them."""
        point = self.insertion_point()
        stack = self.module_stack(point) if point else None
        if point is None or stack is None:
            return False
        is_same = False
        try:
            results = self.insert(point)
            is_same = all(order.are_interchangeable(recorded(new), fake_tensor(old)) for old, new in results.items())
        finally:
            for node in () if is_same else reversed(self.new):
                self.norm.graph.erase_node(node)
        if not is_same:
            return False
        for node in [*self.new, *results]:
            if "nn_module_stack" in node.meta:
                node.meta["nn_module_stack"] = stack
        # The old nodes, whose names and users stay, compute what the new ones compute.
        for old, node in results.items():
            node.append(old)
            old.op, old.target, old.args, old.kwargs = node.op, node.target, node.args, node.kwargs
            node.graph.erase_node(node)
        for node in sorted(self.replaced, reverse=True):
            if not node.users and node not in results:
                node.graph.erase_node(node)
        return True

    def module_stack(self, point: Node) -> dict[str, Any] | None:
        """Return the modules that contain all replaced nodes, for the new nodes; None if the call splits another one.

        All new nodes are in the same modules, because the tuple that the call returns cannot leave one. In an exported
        program ("val"), unflatten makes a module of consecutive nodes: a call between two nodes of a.b would split a.b.
        """
        result = self.modulation.replaced[-1] if self.modulation else self.y
        stacks = [list(node.meta.get("nn_module_stack", {}).items()) for node in self.replaced]
        shared = itertools.takewhile(lambda level: level.count(level[0]) == len(level), zip(*stacks, strict=False))
        depth = len(list(shared))
        if "val" in self.norm.meta and any(len(stack) > depth for stack in stacks):
            around = [*(node for node in (point.prev, point) if node not in self.replaced), result.next]
            inner = [list(node.meta.get("nn_module_stack", {}))[depth : depth + 1] for node in around]
            if len(inner) > 1 and any(each and each == inner[-1] for each in inner[:-1]):
                return None
        return dict(stacks[0][:depth])

    def insert(self, point: Node) -> dict[Node, Node]:
        """Insert the call, and return the new node for the old result and for the old sum."""
        arguments, result = self.arguments, self.modulation.replaced[-1] if self.modulation else self.y
        with self.norm.graph.inserting_before(point):
            if self.modulation:
                arguments = arguments | self._modulated_parameters(self.modulation)
            has_sum = arguments["residual"] is not None or arguments["input_scale"] is not None
            target = _ops.forward.fused if has_sum else _ops.forward.default
            values = [(each, arguments[each.name]) for each in target._schema.arguments]
            options = {each.name: value for each, value in values if each.kwarg_only and value != each.default_value}
            call = self._call(target, tuple(value for each, value in values if not each.kwarg_only), options)
            results = {result: self._call(operator.getitem, (call, 0))}
            for total in filter(None, [self.sum.total if self.sum else None, self.returned_sum]):
                results[total] = self._call(operator.getitem, (call, 1))
        with self.norm.graph.inserting_before(result):
            for view in reversed(self.sum.views if self.sum else ()):
                given = {name: value for name, value in view.kwargs.items() if value is not order.source_of(view)}
                args = results[result], *view.args[1:]
                results[result] = self._call(view.target, args, given)
        return results

    def _modulated_parameters(self, modulation: Modulation) -> dict[str, Any]:
        """Return ``weight * factor`` and ``bias * factor + shift``, and insert the nodes that compute them."""
        weight, bias, factor, shift = self.given["weight"], self.given["bias"], modulation.factor, modulation.shift
        product = factor if weight is None else self._call(_aten.mul.Tensor, (weight, factor))
        if bias is not None:
            args = (bias, factor) if shift is None else (shift, bias, factor)
            shift = self._call(_aten.mul.Tensor if shift is None else _aten.addcmul.default, args)
        return {"weight": product, "bias": shift, "zero_centered_weight": modulation.is_zero_centered}

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        """Insert a call with the metadata that a tracer records: the norm's stack, and a fake value of its own."""
        op = "call_method" if isinstance(target, str) else "call_function"
        node = self.norm.graph.create_node(op, target, args, kwargs)
        self.new.append(node)
        node.meta = self.norm.meta.copy()
        value = order.evaluate(target, node, recorded(self.y).fake_mode)
        node.meta["val" if "val" in node.meta else "example_value"] = value
        return node
