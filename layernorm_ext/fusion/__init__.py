"""Joins this package's norms with their neighbors, in the graphs of torch.compile and torch.export.

One call of the operator ``layernorm::forward`` replaces a residual sum with a gate, a norm, and a modulation::

    s = residual + gate * x
    y = norm(s)                         ->  output, s = forward(x, weight=scale, bias=shift, residual=residual,
    output = y * (1 + scale) + shift                            input_scale=gate, zero_centered_weight=True)

Everything but the norm may be missing. The operator's autograd serves training. Example::

    from layernorm_ext.fusion import fuse_neighbors

    model = torch.compile(model, options={"pre_grad_custom_pass": fuse_neighbors})
    torch._inductor.config.pre_grad_custom_pass = fuse_neighbors  # for the whole process, and beside mode=

    model = torch.compile(model, backend=layernorm_ext.fusion.eager)  # without Inductor

    with layernorm_ext.trace_as("kernel"):
        program = torch.export.export(model, inputs)
    fuse_neighbors(program.graph)

The logger ``layernorm_ext.fusion`` gets a line for each graph at level INFO, and ``fuse_neighbors.counts`` has the
number of calls of each kind. The graph is neither functional nor normalized, so that the pass knows many spellings of a
sum, and leaves a norm as it is if it cannot exclude that the order of reads and writes changes. This module is not
imported by ``import layernorm_ext``, because Inductor's modules take a second to import.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

import layernorm_ext

from . import _graph_order
from ._graph_order import Writes, are_on_one_stream, fake_tensor, is_call, is_sorted, misleads, recorded

__all__ = ["FuseNeighbors", "eager", "fuse_neighbors"]

_logger = logging.getLogger(__name__)
_ops, _aten = torch.ops.layernorm, torch.ops.aten


class FuseNeighbors(CustomGraphPass):
    """A pass over a graph of Dynamo or torch.export, for ``torch._inductor.config.pre_grad_custom_pass``.

    Attributes:
        counts: The number of calls of each kind, such as ``"gate and add"``, in all graphs since the last
            ``counts.clear()``. Graphs from Inductor's cache are not counted.
        raises: Whether an exception inside the pass reaches the caller. By default, it is logged as a warning once, and
            the norm stays as it is.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.raises = False
        self._has_warned = False

    def uuid(self) -> bytes:
        """Return the part of Inductor's cache key that depends on this pass."""
        return get_hash_for_files((__file__, _graph_order.__file__), layernorm_ext.__version__)

    def __call__(self, graph: Graph) -> None:
        """Join the norms of a graph with their neighbors, in place."""
        norms = [node for node in graph.nodes if node.target is _ops.forward.default]
        joined: Counter[str] = Counter()
        with self._caught("the graph"):
            if norms and not is_sorted(graph):
                stable_topological_sort(graph)  # Inductor sorts behind custom passes
            if any(map(misleads, graph.nodes)):
                _logger.debug("a node changes a shape in place or observes a gradient: all norms are left")
            elif norms:
                _remove_conversions_without_effect(graph)
                writes = Writes(graph)
                for norm in norms:
                    with self._caught(norm.name):
                        joined.update(filter(None, [_join_neighbors(norm, writes)]))
            if self.raises:
                graph.lint()
        self.counts += joined
        _logger.info("%d norms%s", len(norms), ": " * bool(joined) + ", ".join(f"{k} {n}" for k, n in joined.items()))

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
    """Join the norms with their neighbors and run the graph as it is, as the backend of :func:`torch.compile`.

    As under Inductor, a gradient with respect to a sum that leaves the graph lacks the part of the norm within it.
    """
    for each in module.modules():  # the bodies of checkpoints are submodules
        if isinstance(each, GraphModule):
            fuse_neighbors(each.graph)
            each.recompile()
    return module.forward


# Spellings of the operations

_SPELLINGS = {
    "add": {operator.add, torch.add, torch.Tensor.add, _aten.add.Tensor, "add"},
    "mul": {operator.mul, torch.mul, torch.multiply, torch.Tensor.mul, _aten.mul.Tensor, "mul", "multiply"},
    "addcmul": {torch.addcmul, torch.Tensor.addcmul, _aten.addcmul.default, "addcmul"},
}
_OPERATIONS: dict[Any, str] = {target: name for name, targets in _SPELLINGS.items() for target in targets}
_OPERANDS = {"add": ("input", "other"), "mul": ("input", "other"), "addcmul": ("input", "tensor1", "tensor2")}
_RESHAPES = {torch.reshape, torch.flatten, torch.unsqueeze, "reshape", "view", "flatten", "unsqueeze"}
_RESHAPES |= {_aten.view.default, _aten.reshape.default, _aten.unsqueeze.default, _aten.flatten.using_ints}
_VIEWS = {operator.getitem, *_RESHAPES}
_CONVERSIONS = {"to", "type_as", "float", "half", "bfloat16", "double", "contiguous"}
_NO_EFFECT = {"alpha": 1, "value": 1, "out": None}


def _operands(node: Any, operation: str) -> tuple[Any, ...] | None:
    """Return the operands of a node, or None if it is another operation or has an option that changes its value."""
    if not is_call(node) or _OPERATIONS.get(node.target) != operation:
        return None
    names = _OPERANDS[operation]
    if len(node.args) > len(names):
        return None
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    operands = tuple(given.pop(name, None) for name in names)
    return operands if _has_no_effect(given) else None


def _source(view: Node) -> Any:
    """Return what a view reads, which may be a keyword argument."""
    return view.args[0] if view.args else view.kwargs.get("input", view.kwargs.get("self"))


def _has_no_effect(options: dict[str, Any]) -> bool:
    return all(name in _NO_EFFECT and value == _NO_EFFECT[name] for name, value in options.items())


def _only(nodes: dict[Node, None]) -> Node | None:
    return next(iter(nodes)) if len(nodes) == 1 else None


def _orders(pair: tuple[Any, ...] | None) -> Iterable[tuple[Any, ...]]:
    return (pair, pair[::-1]) if pair else ()


def _remove_conversions_without_effect(graph: Graph) -> None:
    """Remove conversions that return their input itself."""
    for node in list(graph.nodes):
        is_conversion = node.op == "call_method" and node.target in _CONVERSIONS and node.kwargs.keys() <= {"dtype"}
        if is_conversion and not any(isinstance(arg, bool) for arg in node.args):  # copy=True
            source, value = fake_tensor(_source(node)), fake_tensor(node)
            if source is not None and _are_interchangeable(source, value):
                node.replace_all_uses_with(_source(node))
                graph.erase_node(node)


# Recorded values. No question about symbolic sizes adds a guard.


def _are_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def _are_alike(first: Any, *others: Any) -> bool:
    """Return whether all are tensors of the same shape, dtype and device: operations among them convert nothing."""
    x, *rest = map(fake_tensor, (first, *others))
    return x is not None and all(
        y is not None and (y.dtype, y.device) == (x.dtype, x.device) and _are_equal(y.shape, x.shape) for y in rest
    )


def _are_interchangeable(new: Tensor, old: Tensor | None) -> bool:
    """Return whether the new tensor has the metadata of the old one, including its strides."""
    if old is None or (new.dtype, new.device) != (old.dtype, old.device):
        return False
    return _are_equal(new.shape, old.shape) and _are_equal(new.stride(), old.stride())


_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _is_parameter(parameter: Any, x: Any, dims: int) -> bool:
    """Return whether the operator takes a tensor as weight, bias or gate of x as it is, and a product stays like x."""
    p, like = fake_tensor(parameter), fake_tensor(x)
    if p is None or like is None or p.device != like.device or p.dim() not in (dims, like.dim()):
        return False
    if p.dtype not in _FLOATS or torch.promote_types(p.dtype, like.dtype) != like.dtype:
        return False
    batch = zip(p.shape[: p.dim() - dims], like.shape, strict=False)
    broadcasts = all(statically_known_true(n == 1) or statically_known_true(n == m) for n, m in batch)
    return broadcasts and _are_equal(p.shape[-dims:], like.shape[-dims:])


def _share_groups(dims: int, *parameters: Any) -> bool:
    """Return whether all parameters with batch sizes other than 1 have equal ones."""
    sizes = [value.shape[:-dims] for value in map(fake_tensor, parameters) if value is not None and value.dim() > dims]
    sizes = [size for size in sizes if not all(statically_known_true(n == 1) for n in size)]
    return all(_are_equal(size, sizes[0]) for size in sizes)


def _is_shared(parameter: Any, dims: int) -> bool:
    """Return whether all rows have the same weight or bias."""
    value = fake_tensor(parameter)
    return value is not None and value.dim() == dims


# Neighbors


@dataclass(frozen=True)
class _Sum:
    """``total = residual + gate * x``, the input of a norm, or its reshaped input if there is a ``view``."""

    nodes: list[Node]  # the last one is the total
    x: Node
    residual: Node
    gate: Node | None = None
    view: Node | None = None

    @property
    def total(self) -> Node:
        return self.nodes[-1]

    @property
    def replaced(self) -> list[Node]:
        return [*self.nodes, self.view] if self.view and len(self.view.users) == 1 else self.nodes


@dataclass(frozen=True)
class _Modulation:
    """``result = y * (1 + scale) + shift``. The factor may be a view of ``1 + scale`` by the nodes ``views``."""

    scale: Node
    shift: Node | None
    replaced: list[Node]  # the last one is the result
    one_plus: Node
    views: list[Node]  # the last one first

    @property
    def result(self) -> Node:
        return self.replaced[-1]

    @property
    def factor(self) -> Node:
        return self.views[0] if self.views else self.one_plus


def _sums(source: Any, dims: int) -> Iterator[_Sum]:
    """Yield the ways in which a norm over the last ``dims`` dimensions reads a sum, the most complete first."""
    view = source if _keeps_rows(source, dims) else None
    total = _source(view) if view else source
    for residual, factors, nodes in _products_plus(total):
        for gate, x in _orders(factors):
            if _are_alike(total, x, residual) and _is_gate(gate, total, dims):
                yield _Sum(nodes, x, residual, gate, view)
    pair = _operands(total, "add")
    if pair and _are_alike(total, *pair):
        yield _Sum([total], pair[0], pair[1], view=view)


def _products_plus(node: Any) -> Iterator[tuple[Any, tuple[Any, ...], list[Node]]]:
    """Yield term, factors, and the nodes that compute it without other uses, of ``term + factor * factor``."""
    triple = _operands(node, "addcmul")
    if triple:
        yield triple[0], triple[1:], [node]
    for product, term in _orders(_operands(node, "add")):
        factors = _operands(product, "mul")
        if factors and product is not term and len(product.users) == 1 and _are_alike(product, node):
            yield term, factors, [product, node]


def _is_gate(gate: Any, total: Any, dims: int) -> bool:
    """Return whether a factor is a parameter of rows, and not one of two activations."""
    return _is_parameter(gate, total, dims) and not _are_alike(gate, total)


def _keeps_rows(node: Any, dims: int) -> bool:
    """Return whether a node reshapes batch dimensions only."""
    if not (is_call(node) and node.target in _RESHAPES):
        return False
    new, old = map(fake_tensor, (node, _source(node)))
    if new is None or old is None or new.dtype != old.dtype:  # view(dtype) reads other numbers
        return False
    return _are_equal(new.shape[-dims:], old.shape[-dims:])


def _modulations(y: Node, dims: int) -> Iterator[_Modulation]:
    """Yield the ways in which the only use of a norm's output modulates it, the most complete first."""
    user: Any = _only(y.users)
    ends = [user, user and _only(user.users)]
    terms = [each for end in ends for each in _products_plus(end)]
    terms += [(None, factors, [user]) for factors in [_operands(user, "mul")] if factors]
    for shift, factors, replaced in terms:
        for this, factor in _orders(factors):
            if this is not y or y in (factor, shift):
                continue
            for scale, one_plus, views in _one_plus(factor, y, dims):
                if shift is None or _is_shift(shift, factor, y, dims):
                    yield _Modulation(scale, shift, replaced, one_plus, views)


def _one_plus(factor: Any, y: Node, dims: int) -> Iterator[tuple[Node, Node, list[Node]]]:
    """Yield the scale of a factor ``1 + scale`` in the dtype of y, its sum, and the views that insert dimensions."""
    if not _is_parameter(factor, y, dims):
        return
    views, node = [], factor
    while is_call(node) and node.target in _VIEWS:
        views.append(node)
        node = _source(node)
    for one, scale in _orders(_operands(node, "add")):
        dtypes = {value.dtype for value in map(fake_tensor, (scale, factor, y)) if value is not None}
        if type(one) in (int, float) and one == 1 and fake_tensor(scale) is not None and len(dtypes) == 1:
            yield scale, node, views


def _is_shift(shift: Any, factor: Node, y: Node, dims: int) -> bool:
    """Return whether a term is a parameter of rows beside the factor, and not a residual that is added behind."""
    is_residual = _are_alike(shift, y) and not _are_alike(factor, y)
    return _is_parameter(shift, y, dims) and _share_groups(dims, factor, shift) and not is_residual


# The joined call

_ARGUMENTS = _ops.forward.default._schema.arguments
_OPTIONS = {argument.name: argument.default_value for argument in _ARGUMENTS if argument.kwarg_only}


def _join_neighbors(norm: Node, writes: Writes) -> str | None:
    """Replace a norm and its neighbors by one call if possible, and return what was joined."""
    given: dict[str, Any] = {argument.name: argument.default_value for argument in _ARGUMENTS}
    given |= dict(zip(given, norm.args, strict=False)) | norm.kwargs
    for unused in [user for user in norm.users if user.target is operator.getitem and not user.users]:
        norm.graph.erase_node(unused)  # in the bodies of checkpoints, Dynamo takes all results
    y = _only(norm.users)
    if y is None or y.target is not operator.getitem or y.args[1] != 0:
        return None
    if given["memory_efficient"] or given["images"]:
        return None
    dims = len(map_arg(given["normalized_shape"], recorded))
    is_plain = given["weight"] is None and given["bias"] is None
    modulations = [*(_modulations(y, dims) if is_plain else ()), None]
    sums = [*_sums(given["input"], dims), None]
    choices = [(s, m) for m in modulations for s in sums if s] + [(None, m) for m in modulations if m]
    for choice in choices:
        match = _Match(norm, y, given, dims, writes, *choice)
        if match.fits() and match.join():
            return match.kind
        _logger.debug("%s: %s is not joined: an order, a shape, a write or a border forbids it", norm.name, match.kind)
    return None


@dataclass(frozen=True)
class _Match:
    """A norm with its output y and its given arguments, and the neighbors that are joined with it."""

    norm: Node
    y: Node
    given: dict[str, Any]
    dims: int
    writes: Writes
    total: _Sum | None
    modulation: _Modulation | None
    new: list[Node] = field(default_factory=list)  # the inserted nodes, in order

    @property
    def kind(self) -> str:
        parts = ["gate"] * bool(self.total and self.total.gate) + ["add"] * bool(self.total)
        parts += ["modulate"] * bool(self.modulation)
        return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))

    @property
    def result(self) -> Node:
        return self.modulation.result if self.modulation else self.y

    @property
    def replaced(self) -> list[Node]:
        """The nodes whose work the call does."""
        around = [each.replaced for each in (self.total, self.modulation) if each]
        return [self.norm, self.y, *itertools.chain(*around)]

    @property
    def read(self) -> list[Node]:
        """The nodes of the factor ``1 + scale``, which the call reads as scale; they may have other users."""
        return [self.modulation.one_plus, *self.modulation.views] if self.modulation else []

    @property
    def arguments(self) -> dict[str, Any]:
        arguments = dict(self.given)
        if self.total:
            arguments |= {"residual": self.total.residual, "input": self.total.x}
            if self.total.gate:
                arguments |= {"gate": None, "input_scale": self.total.gate}
        if self.modulation:
            arguments |= {"weight": self.modulation.scale, "bias": self.modulation.shift, "zero_centered_weight": True}
        return arguments

    def fits(self) -> bool:
        """Return whether the operator takes the batch sizes of all parameters together."""
        dims, given = self.dims, [self.given["weight"], self.given["bias"]]
        if self.total and self.is_observed(self.total.total):
            return False
        parameters = [self.modulation.factor, self.modulation.shift] if self.modulation else given
        if self.total and self.total.view and not all(p is None or _is_shared(p, dims) for p in parameters):
            return False  # rows of the reshaped sum have other batch dimensions
        return _share_groups(dims, *parameters, self.total and self.total.gate)

    def is_observed(self, total: Node) -> bool:
        """Return whether the body of a higher-order operator returns the sum, whose gradient its parent may observe."""
        is_body = hasattr(self.norm.graph.owning_module, "torchdynamo_force_dynamic")  # Dynamo sets it on bodies
        return is_body and any(user.op == "output" for user in total.users)

    def place(self) -> Node | None:
        """Return the node before which the call belongs, or None if there is no such node.

        The call comes after all that it reads and before all that reads what it replaces. No node between the first
        and the last one that it replaces writes, so that its arguments have the same values everywhere there. Streams
        and waits for them do not change either.
        """
        first, last = min(self.replaced), max(self.replaced)
        inputs = [leaf for leaf in tree_leaves(self.arguments) if isinstance(leaf, Node)]
        for view in self.modulation.views if self.modulation else ():
            inputs += [node for node in view.all_input_nodes if node is not _source(view)]
        place = max([first, *(node.next for node in inputs)])
        users = {user for node in self.replaced for user in node.users}.difference(self.replaced)
        if any(user < place for user in users) or not set(inputs).isdisjoint(self.replaced):
            return None
        saved = [self.total.total] if self.total else []
        saved += inputs if self.modulation or (self.total and self.total.gate) else []
        is_changed = self.writes.between(min([first, *self.read]), last) or self.writes.behind(last, saved)
        return place if are_on_one_stream([*self.replaced, *self.read]) and not is_changed else None

    def join(self) -> bool:
        """Insert the call, and let the nodes of the result and of the sum take its results; return whether they fit."""
        place = self.place()
        stack = self.module_stack(place) if place else None
        if place is None or stack is None:
            return False
        is_done = False
        try:
            results = self.insert(place)
            is_done = all(_are_interchangeable(recorded(node), fake_tensor(old)) for old, node in results.items())
        finally:
            if not is_done:
                for node in reversed(self.new):
                    self.norm.graph.erase_node(node)
        if not is_done:
            return False
        for node in [*self.new, *results]:
            if "nn_module_stack" in node.meta:
                node.meta["nn_module_stack"] = stack
        for old, node in results.items():
            _become(old, node)
        for node in sorted([*self.replaced, *self.read], reverse=True):
            if not node.users and node not in results:
                node.graph.erase_node(node)
        return True

    def module_stack(self, place: Node) -> dict[str, Any] | None:
        """Return the modules that contain all replaced nodes, or None if the call splits the nodes of another one.

        torch.export.unflatten makes a module of consecutive nodes, and no tuple may cross its border.
        """
        stacks = [list(node.meta.get("nn_module_stack", {}).items()) for node in self.replaced]
        depth = 0
        while all(len(stack) > depth and stack[depth] == stacks[0][depth] for stack in stacks):
            depth += 1
        if "val" in self.norm.meta and any(len(stack) > depth for stack in stacks):
            around = [node for node in (place.prev, place) if node not in self.replaced]
            around += [self.result.next]
            inner = [list(node.meta.get("nn_module_stack", {}))[depth : depth + 1] for node in around]
            if len(inner) > 1 and any(each and each == inner[-1] for each in inner[:-1]):
                return None
        return dict(stacks[0][:depth])

    def insert(self, place: Node) -> dict[Node, Node]:
        """Insert the call, and return the nodes that take the place of the result and of the sum."""
        graph, arguments = self.norm.graph, self.arguments
        with graph.inserting_before(place):
            for view in reversed(self.modulation.views if self.modulation else ()):
                arguments["weight"] = self._copy_of_view(view, arguments["weight"])
            options = {name: arguments.pop(name) for name in _OPTIONS}
            options = {name: value for name, value in options.items() if value != _OPTIONS[name]}
            target = _ops.forward.fused if self.total else _ops.forward.default
            call = self._call(target, tuple(arguments.values()), options)
            results = {self.result: self._call(operator.getitem, (call, 0))}
            if self.total:
                results[self.total.total] = self._call(operator.getitem, (call, 1))
        if self.total and self.total.view:
            with graph.inserting_before(self.result):
                results[self.result] = self._copy_of_view(self.total.view, results[self.result])
        return results

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        return self._with_value(self.norm.graph.call_function(target, args, kwargs))

    def _copy_of_view(self, view: Node, source: Node) -> Node:
        """Insert the view of another tensor."""
        given = {name: value for name, value in view.kwargs.items() if value is not _source(view)}
        args = source, *view.args[1:]
        return self._with_value(self.norm.graph.create_node(view.op, view.target, args, given))

    def _with_value(self, node: Node) -> Node:
        """Record what the tracer records: the stack of the norm, and a fake value."""
        self.new.append(node)
        args, kwargs = map_arg((node.args, node.kwargs), recorded)
        function = node.target if callable(node.target) else getattr(torch.Tensor, node.target)
        node.meta = self.norm.meta.copy()
        with recorded(self.y).fake_mode, torch.no_grad():
            node.meta["val" if "val" in node.meta else "example_value"] = function(*args, **kwargs)
        return node


def _become(old: Node, new: Node) -> None:
    """Let a node, whose name and users stay, compute what a new node computes."""
    new.append(old)
    old.op, old.target, old.args, old.kwargs = new.op, new.target, new.args, new.kwargs
    new.graph.erase_node(new)
