"""The residual sums, gates and modulations around a norm, which one call can compute together with it.

Questions about symbolic sizes add no guard: if the answer is not known, it is False.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from . import _graph_order as order
from ._graph_order import fake_tensor, is_call

_OPERAND_NAMES = {"add": ("self", "other"), "mul": ("self", "other"), "addcmul": ("self", "tensor1", "tensor2")}
_OTHER_NAMES = {"multiply": "mul", "input": "self"}
_RESHAPES = {"reshape", "reshape_as", "view", "view_as", "flatten", "unflatten", "squeeze", "unsqueeze", "getitem"}
_NO_EFFECT = {"alpha": 1, "value": 1, "out": None}  # options with these values change nothing


def _operands(node: Any, name: str) -> tuple[Any, ...] | None:
    """Return the operands of a node, or None if it is another operation or has an option that changes its value."""
    called = order.operation(node)
    names = _OPERAND_NAMES[name]
    if _OTHER_NAMES.get(called, called) != name or len(node.args) > len(names):
        return None
    given = dict(zip(names, node.args, strict=False))
    given |= {_OTHER_NAMES.get(key, key): value for key, value in node.kwargs.items()}
    operands = tuple(given.pop(name, None) for name in names)
    return operands if given.items() <= _NO_EFFECT.items() else None


def _both_orders(pair: tuple[Any, ...] | None) -> Iterable[tuple[Any, ...]]:
    return (pair, pair[::-1]) if pair else ()


def are_alike(first: Any, *others: Any) -> bool:
    """Return whether all are tensors of the same shape, dtype and device: operations among them convert nothing."""
    x, *rest = map(fake_tensor, (first, *others))
    return x is not None and all(
        y is not None and (y.dtype, y.device) == (x.dtype, x.device) and order.are_equal(y.shape, x.shape) for y in rest
    )


def _is_parameter(parameter: Any, x: Any, dims: int) -> bool:
    """Return whether a tensor can be a weight, bias or gate of x, and the product with it has the metadata of x."""
    p, like = fake_tensor(parameter), fake_tensor(x)
    if p is None or like is None or p.device != like.device or p.dim() not in (dims, like.dim()):
        return False
    keeps_dtype = p.is_floating_point() and torch.promote_types(p.dtype, like.dtype) == like.dtype
    batch = zip(p.shape[: p.dim() - dims], like.shape, strict=False)
    broadcasts = all(statically_known_true(n == 1) or statically_known_true(n == m) for n, m in batch)
    return keeps_dtype and broadcasts and order.are_equal(p.shape[-dims:], like.shape[-dims:])


def share_batch_sizes(dims: int, *parameters: Any) -> bool:
    """Return whether all parameters with batch sizes other than 1 have the same."""
    sizes = [value.shape[:-dims] for value in map(fake_tensor, parameters) if value is not None and value.dim() > dims]
    sizes = [size for size in sizes if not all(statically_known_true(n == 1) for n in size)]
    return all(order.are_equal(size, sizes[0]) for size in sizes)


@dataclass(frozen=True)
class Sum:
    """``total = residual + gate * x``, which a norm reads through ``views`` that reshape its batch dimensions."""

    nodes: list[Node]  # the last one computes the total
    x: Node
    residual: Node
    gate: Node | None
    views: list[Node]  # the norm reads the first one, which reads the next one

    @property
    def total(self) -> Node:
        return self.nodes[-1]

    @property
    def replaced(self) -> list[Node]:
        return [*self.nodes, *itertools.takewhile(lambda view: len(view.users) == 1, self.views)]


@dataclass(frozen=True)
class Modulation:
    """``result = y * factor + shift``, or ``y + y * factor + shift`` if the factor is zero-centered."""

    replaced: list[Node]  # the last one is the result
    factor: Node
    shift: Node | None = None
    is_zero_centered: bool = False

    @property
    def parameters(self) -> list[Node]:
        return [self.factor] if self.shift is None else [self.factor, self.shift]


def find_sums(source: Any, dims: int) -> Iterator[Sum]:
    """Yield the ways in which a norm over the last ``dims`` dimensions reads a sum, the most complete first."""
    total, views = source, []
    while _keeps_rows(total, dims):
        views.append(total)
        total = order.source_of(total)
    for residual, factors, nodes in _multiply_adds(total):
        for gate, x in _both_orders(factors):
            if are_alike(total, x, residual) and _is_parameter(gate, total, dims) and not are_alike(gate, total):
                yield Sum(nodes, x, residual, gate, views)
    if (pair := _operands(total, "add")) and are_alike(total, *pair):
        yield Sum([total], pair[0], pair[1], None, views)


def _multiply_adds(node: Any) -> Iterator[tuple[Any, tuple[Any, ...], list[Node]]]:
    """Yield term, factors and nodes of each way to read a node as ``term + factor * factor``."""
    if triple := _operands(node, "addcmul"):
        yield triple[0], triple[1:], [node]
    for product, term in _both_orders(_operands(node, "add")):
        factors = _operands(product, "mul")
        if factors and product is not term and len(product.users) == 1 and are_alike(product, node):
            yield term, factors, [product, node]


def _keeps_rows(node: Any, dims: int) -> bool:
    """Return whether a node reshapes batch dimensions only."""
    if order.operation(node) not in _RESHAPES:
        return False
    source = order.source_of(node)
    new, old = fake_tensor(node), fake_tensor(source)
    if new is None or old is None or new.dtype != old.dtype:  # view(dtype) reads other numbers
        return False
    is_whole = order.may_share_storage(node, source) and statically_known_true(new.numel() == old.numel())
    if order.operation(node) == "getitem" and not is_whole:  # a slice or a gather
        return False
    return order.are_equal(new.shape[-dims:], old.shape[-dims:])


def find_modulations(y: Node, dims: int) -> Iterator[Modulation]:
    """Yield the modulations of a norm's output that include all of its uses, the most complete first."""
    last = max(y.users, default=None)
    results = [*(last.users if len(last.users) == 1 else ()), last] if last else []  # the nodes that may be the result
    found = [
        Modulation([*scaled.replaced, result], scaled.factor, shift, scaled.is_zero_centered)
        for result in results
        for product, shift in _both_orders(_operands(result, "add"))
        if is_call(product) and product is not shift and len(product.users) == 1
        for scaled in _scaled(product, y)
    ]
    for result in results:
        triple = _operands(result, "addcmul") or ()
        found += [Modulation([result], factor, triple[0]) for this, factor in _both_orders(triple[1:]) if this is y]
    for each in [*found, *itertools.chain(*(_scaled(result, y) for result in results))]:
        factor, shift = each.factor, each.shift
        if y in (factor, shift) or not set(y.users) <= set(each.replaced) or not _is_parameter(factor, y, dims):
            continue
        is_gate = are_alike(factor, y) and order.operation(factor) != "add"  # an activation, and not 1 + scale
        is_residual = are_alike(shift, y) and not are_alike(factor, y)  # which the next norm can take
        if not is_gate and not is_residual and (shift is None or _is_parameter(shift, y, dims)):
            yield each


def _scaled(node: Node, y: Node) -> Iterator[Modulation]:
    """Yield the ways in which a node is ``y * factor`` or ``y + y * factor``."""
    for this, factor in _both_orders(_operands(node, "mul")):
        if this is y:
            yield Modulation([node], factor)
    for term, factors, nodes in _multiply_adds(node):
        if term is y and y in factors:
            yield Modulation(nodes, factors[factors[0] is y], None, True)
