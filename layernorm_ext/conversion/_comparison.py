"""Compares the results of a module with those of its replacement."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..modules import LayerNorm, LayerNorm2d, RMSNorm, RMSNorm2d
from ._converted import NormSpec, OutputDtypes


class SkippedError(Exception):
    """The reason why a module is not replaced."""


# The tolerance for outputs and gradients of size 1. Layers that always normalize in float32 lose about 1e-6; a standard
# deviation over N - 1 instead of N elements is off by 1 / (2 N).
_TOLERANCE = 1e-5

# The tolerance for outputs in narrower dtypes, as a multiple of torch.finfo.eps, relative to the value or to 1 if that
# is larger. Four such units are eight roundings; layers that compute in 16 bits round about four times.
_ROUNDINGS = 4

# The smallest scale of a compared row. x-transformers clamps the norm of smaller rows, but our layers add an eps.
_SMALLEST_SCALE = 1e-8

# The factors of the first, second and third sample of further inputs and gates: some layers clamp large numbers.
_SCALES = (30, 1e3, 1e-3)

# The classes that torch's own layers get.
TORCH_REPLACEMENTS = {torch.nn.LayerNorm: LayerNorm, torch.nn.RMSNorm: RMSNorm}

# The normalized sizes of torch's own layers are reduced to this one for the comparison. Layers that have no normalized
# size get inputs of this width and of the next one.
_WIDTH = 8

# Names of a module's parameters, for each parameter of this package's layers.
_NAMES = {"weight": ("weight", "gamma", "scale", "g"), "bias": ("bias", "beta", "b")}

# Layers with children of these names, a dropout and an activation, apply them to the result of the norm. The comparison
# calls these functions instead; they do not commute, so that it also sees a wrong order.
KNOWN_CHILDREN: dict[str, Module] = {"drop": torch.nn.Softsign(), "act": torch.nn.Tanh()}

_CONTAINERS = (dict, list, set)  # attributes of these types are copied, because forward may change them
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# The dtypes of input, parameters and gate; None if a call has no parameters or no gate.
_Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]


def has_only_known_children(module: Module) -> bool:
    """Return whether a module has no children but those of KNOWN_CHILDREN."""
    names = set(module._modules.keys())  # a list in a ScriptModule, whose iterator is of another kind
    return names <= KNOWN_CHILDREN.keys() and None not in module._modules.values()


def takes_gate(module: Module) -> bool:
    """Return whether forward of a module takes a gate as second input."""
    return list(inspect.signature(type(module).forward).parameters)[2:] == ["gate"]


class Comparison:
    """Calls a module's own forward and that of its replacement, ``spec.compute``, on copies of the module."""

    def __init__(self, module: Module, ours: Any, spec: NormSpec) -> None:
        """Find an input that the module accepts, or raise the reason why the module differs from all replacements."""
        self.module, self.ours, self.spec = module, ours, spec
        self.original: Callable[..., Tensor] = type(module).forward
        self.has_gate = takes_gate(module)
        children = {name: KNOWN_CHILDREN[name] for name in module._modules} if has_only_known_children(module) else {}
        self.replaced_attributes: dict[str, object] = {"_modules": children} if children else {}
        names = [name for name, parameter in module.named_parameters() if not _is_flattened(parameter)]
        own = [first_tensor(module, parameter)[0] for parameter in ours._parameters]
        unknown = [name for name in names if name not in own and name.partition(".")[0] not in children]
        if unknown:
            raise SkippedError(f"it has a parameter {unknown[0]}")
        shape = tuple(ours.normalized_shape)
        is_reduced = type(module) in TORCH_REPLACEMENTS and module.normalized_shape == shape
        if is_reduced:  # a comparison in the full size of a wide layer would take long
            shape = tuple(min(size, _WIDTH) for size in shape)
            self.replaced_attributes["normalized_shape"] = shape
        self.shape = shape
        tensors = {name: tensor_attribute(module, name) for name in own}
        shapes = {name: shape if is_reduced else full_shape(p) for name, p in tensors.items() if p is not None}
        self.parameters = {name: _random(size, seed) for seed, (name, size) in enumerate(shapes.items())}
        eps = torch.finfo(torch.float64).eps if ours.eps is None else abs(ours.eps)
        self.small_scale = max(eps**0.5, _SMALLEST_SCALE)
        widths = [shape] if shape else [(_WIDTH,), (_WIDTH + 1,)]
        self.sizes = [size for width in widths for size in _sizes(width)]
        self.accepted_size, self.dtypes = self._find_accepted()

    def _find_accepted(self) -> tuple[tuple[int, ...], _Dtypes]:
        """Return the first input size, and the widest dtypes, that the module accepts."""
        # Layers that convert the input to float32, but not the parameters, take only float32 parameters.
        for dtype, parameter_dtype in itertools.product(_FLOATS[:2], _FLOATS[:2] if self.parameters else (None,)):
            dtypes = dtype, parameter_dtype, dtype if self.has_gate else None
            for size in self.sizes:
                if not isinstance(self._results(self.original, dtypes, *self._input_and_gradient(size)), Exception):
                    return size, dtypes
        error = self._results(self.original, dtypes, *self._input_and_gradient(self.sizes[0]))
        raise SkippedError(f"it refuses every input: {shortened(error)}")

    def _input_and_gradient(self, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return an input and an upstream gradient."""
        x, dy = _random(size, 2) + 1, _random(size, 3)
        x[0] *= self.small_scale  # eps matters for these rows
        if math.prod(self.shape) != 1:
            x[-1].view(-1)[0] = 0  # some layers take zeros for masked elements, and leave them out of the mean
        return x, dy

    def _results(
        self,
        forward: Callable[..., Tensor],
        dtypes: _Dtypes,
        x: Tensor,
        dy: Tensor | None = None,
        gate_scale: Tensor | float = 1,
        **attributes: object,
    ) -> dict[str, Tensor] | Exception:
        """Return the output in these dtypes, and the gradients if ``dy`` is given."""
        inputs = {"input": x.to(dtypes[0], copy=True)}
        if dtypes[2]:
            inputs["gate"] = _random_gate(x, gate_scale).to(dtypes[2])
        copies = {name: p.to(dtypes[1], copy=True) for name, p in self.parameters.items()}
        tensors = [*inputs.values(), *copies.values()]
        for tensor in tensors:
            tensor.requires_grad_(dy is not None)
        try:
            y = forward(_copy_with(self.module, copies, self.replaced_attributes | attributes), *inputs.values())
            if y.shape != x.shape:  # parameters of shape [C, 1, 1] add dimensions to rows
                raise ValueError(f"the output is of size{list(y.shape)}")
            if dy is None:
                return {"output": y}
            gradients = torch.autograd.grad(y, tensors, dy.to(y.dtype), materialize_grads=True)
            names = (f"gradient of {name}" for name in (*inputs, *copies))
            return {"output": y, **dict(zip(names, gradients, strict=True))}
        except Exception as error:  # foreign code may raise anything
            return error

    def _results_of_both(self, *arguments: Any, **options: Any) -> list[Any]:
        """Return the results of the module's own forward and of the replacement's."""
        return [self._results(forward, *arguments, **options) for forward in (self.original, self.spec.compute)]

    def difference(self) -> str | None:
        """Return how the results differ, if they do; otherwise, ``self.spec`` gets the output dtypes of the module."""
        return self._compare_sizes() or self._compare_large_numbers() or self._compare_dtypes()

    def _compare_sizes(self) -> str | None:
        """Compare outputs and gradients for all sizes, and for one size also in the other mode (training or eval)."""
        dtype, parameter_dtype, _ = self.dtypes
        gates = (dtype, None) if self.has_gate else (None,)  # without one, some layers raise an error
        is_training = self.module.training
        modes = {"": is_training, f" in {'eval' if is_training else 'training'} mode": not is_training}
        for (mode, training), size, gate in itertools.product(modes.items(), self.sizes, gates):
            if mode and size != self.accepted_size:
                continue
            dtypes = dtype, parameter_dtype, gate
            theirs, mine = self._results_of_both(dtypes, *self._input_and_gradient(size), training=training)
            if isinstance(theirs, Exception):
                # Replacements for images take input of any rank, and gated ones are plain norms without a gate.
                takes_more = isinstance(self.ours, (LayerNorm2d, RMSNorm2d)) or (self.has_gate and gate is None)
                if not isinstance(mine, Exception) and not takes_more:
                    return f"input of size{list(size)} raises {shortened(theirs)}{mode}"
            elif isinstance(mine, Exception):
                return f"it takes input of size{list(size)}{mode}"
            else:
                for value, expected in theirs.items():
                    distance = (expected.double() - mine[value].double()).abs()
                    if value == "gradient of input":  # it is large for the small rows in x[0]
                        distance[0] *= self.small_scale
                    if not (distance <= _TOLERANCE).all():
                        return f"{value} differs by {distance.max():.2g}{mode}"
        return None

    def _compare_large_numbers(self) -> str | None:
        """Compare outputs for inputs, and then for gates, of the scales of _SCALES."""
        x, one = _random(self.accepted_size, 2) + 1, torch.ones((), device="cpu")
        samples = self.accepted_size[0]
        scales = torch.tensor(_SCALES, device="cpu").repeat(samples)[:samples].view(-1, *[1] * (x.dim() - 1))
        for name, x_scale, gate_scale in [("inputs", scales, one), ("gates", one, scales)][: 1 + self.has_gate]:
            theirs, mine = self._results_of_both(self.dtypes, x_scale * x, gate_scale=gate_scale)
            if isinstance(theirs, Exception) or isinstance(mine, Exception):
                return f"large {name} raise {shortened(theirs if isinstance(theirs, Exception) else mine)}"
            distance = (theirs["output"].double() - mine["output"].double()).abs()
            # A large gate multiplies the roundings of the norm.
            if not (distance <= _TOLERANCE * _random_gate(x, gate_scale).abs().clamp_min(1)).all():
                return f"output for large {name} differs by {distance.max():.2g}"
        return None

    def _compare_dtypes(self) -> str | None:
        """Compare outputs for all combinations of dtypes; set the output dtypes of the replacement."""
        # Adjacent elements differ by about 4. If the elements of a narrow row were nearly equal, their deviations in 16
        # bits would be rounding noise, and equal layers would seem to differ.
        dims = range(len(self.accepted_size))
        parity = sum(torch.ones(self.accepted_size, device="cpu").cumsum(dim) for dim in dims) % 2
        x = _random(self.accepted_size, 2) + 4 * parity - 1
        x_and_small_rows = x.clone()
        x_and_small_rows[0] *= self.small_scale
        # In float16, squares of small rows are subnormal, and layers that compute in 16 bits lose digits.
        inputs = {dtype: x if dtype == torch.float16 else x_and_small_rows for dtype in _FLOATS}
        gates = (*_FLOATS, None) if self.has_gate else (None,)
        outputs = {}
        for dtypes in itertools.product(_FLOATS, _FLOATS if self.parameters else (None,), gates):
            theirs = self._results(self.original, dtypes, inputs[dtypes[0]])
            if not isinstance(theirs, Exception):
                outputs[dtypes] = theirs["output"]
        output_dtypes: OutputDtypes = {
            (dtype, None if self.spec.weight is None else parameter_dtype, gate_dtype): output.dtype
            for (dtype, parameter_dtype, gate_dtype), output in outputs.items()
            if output.dtype != dtype
        }
        self.spec = replace(self.spec, output_dtypes=output_dtypes)
        for dtypes, expected in outputs.items():
            mine = self._results(self.spec.compute, dtypes, inputs[dtypes[0]])
            names = " and ".join(str(dtype) for dtype in dtypes if dtype)
            if isinstance(mine, Exception):
                return f"it takes {names}: {shortened(mine)}"
            if mine["output"].dtype != expected.dtype:
                return f"output of {names} is {expected.dtype} instead of {mine['output'].dtype}"
            roundings = _ROUNDINGS * max(torch.finfo(dtype).eps for dtype in (*dtypes, expected.dtype) if dtype)
            distance = (mine["output"].double() - expected.double()).abs() / expected.double().abs().clamp_min(1)
            if not (distance <= max(_TOLERANCE, roundings)).all():
                return f"output of {names} differs by {distance.max():.2g}"
        return None


def _sizes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return sizes of inputs with rows of this shape, which are the last dimensions or, in images, the channels."""
    m, n = [size for size in range(2, 4 + len(shape)) if size not in shape][:2]  # batch sizes, which are not in shape
    sizes = [(n, *shape), (m, n, *shape), (m, n, m, *shape), (m, *shape, n, m)]
    return [*sizes, (m, *shape, n), (m, *shape, n, m, n)] if len(shape) == 1 else sizes


def _random(size: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")


def _random_gate(x: Tensor, scale: Tensor | float) -> Tensor:
    return scale * _random(tuple(x.shape), 4)


def _copy_with(module: Module, parameters: dict[str, Tensor], others: dict[str, Any]) -> Module:
    """Return a copy of a module with other parameters, buffers and attributes, which shares none of these with it."""
    copied: Any = object.__new__(type(module))
    for name, value in vars(module).items():
        # Tools for sharding replace _parameters by other classes, or keep parameters as attributes.
        if name not in parameters:
            vars(copied)[name] = copy(value) if type(value) in _CONTAINERS else value
    buffers = {name: buffer if buffer is None else _other_buffer(buffer) for name, buffer in module._buffers.items()}
    vars(copied).update(others, _parameters=dict.fromkeys(module._parameters) | parameters, _buffers=buffers)
    return copied


def _other_buffer(buffer: Tensor) -> Tensor:
    """Return a copy of a buffer with other floating-point values, because a norm must not depend on these."""
    if not buffer.is_floating_point() or buffer.layout != torch.strided or buffer.itemsize == 1:
        return buffer.clone()  # sparse and float8 tensors have no arithmetic
    return torch.where(buffer.abs() < 100, buffer + 1, 1)


def shortened(error: object) -> str:
    """Return the class of an error and the first line of its text, which foreign code may fail to give."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:
        text = ""
    return f"{type(error).__name__}: {shorten(text, 120, placeholder=' ...')}"


def tensor_attribute(module: Module, name: str) -> Tensor | None:
    """Return a parameter, which some tools keep as another attribute, or ``None``."""
    value = getattr(module, name, None)
    return value if isinstance(value, Tensor) else None


def first_tensor(module: Module, parameter: str) -> tuple[str, Tensor | None]:
    """Return the name that ``weight`` or ``bias`` has in a module, and the tensor, or ``None`` if it is absent."""
    tensors = ((name, tensor_attribute(module, name)) for name in _NAMES[parameter])
    return next(((name, tensor) for name, tensor in tensors if tensor is not None), (parameter, None))


def full_shape(parameter: Any) -> tuple[int, ...]:
    """Return the whole shape of a parameter, even if this process has only a part of it."""
    if _is_flattened(parameter):
        raise SkippedError("FSDP has flattened its parameters; convert the model before it is wrapped")
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # DeepSpeed's ZeRO-3 leaves an empty tensor
    if 0 in shape:
        raise SkippedError(f"a parameter has the shape {list(shape)}")
    return shape


def _is_flattened(parameter: Any) -> bool:
    """Return whether FSDP1 has replaced a parameter by one dimension with its elements or a part of them."""
    return getattr(parameter, "_fsdp_flattened", False)
