"""Compares the results of a module with those of its replacement."""

from __future__ import annotations

import inspect
import itertools
import math
from copy import copy
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..modules import LayerNorm, LayerNorm2d, RMSNorm, RMSNorm2d
from ._replacements import keep_output_dtypes


class SkippedError(Exception):
    """The reason why a module is not replaced."""


# The tolerance for outputs and gradients of size 1. Layers that always normalize in float32 lose about 1e-6; a standard
# deviation over N - 1 instead of N elements is off by 1 / (2 N).
_TOLERANCE = 1e-5

# The tolerance for outputs in narrower dtypes, in units of torch.finfo.eps of the value or of 1. Four units are eight
# roundings; layers that compute in 16 bits round about four times.
_ROUNDINGS = 4

# The smallest scale of rows for which eps matters. x-transformers clamps the norm of smaller rows, where its
# replacement adds an eps.
_SMALLEST_SCALE = 1e-8

# The scales of the samples of further inputs and gates, of both signs: some layers clamp large numbers.
_SCALES = (30, 1e3, 1e-3)

# Torch's own layers compute the same for all sizes. They are compared in sizes of at most _WIDTH.
TORCH_LAYERS, _WIDTH = (torch.nn.LayerNorm, torch.nn.RMSNorm), 8

# Layers with children of these names apply them to the result of the norm. To compare the norm, and the order of the
# children, functions that do not commute take their places.
ACTIVATION: dict[str, Module] = {"drop": torch.nn.Softsign(), "act": torch.nn.Tanh()}

_CONTAINERS = (dict, list, set)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# The dtypes of input, parameters and gate; None if a call has no parameters or no gate.
_Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]


def has_activation(module: Module) -> bool:
    """Return whether a module has no children but those of ACTIVATION."""
    names = set(module._modules.keys())  # a list in a ScriptModule, whose iterator is of another kind
    return names <= ACTIVATION.keys() and None not in module._modules.values()


def takes_gate(module: Module) -> bool:
    """Return whether forward of a module takes a gate as second input."""
    return list(inspect.signature(type(module).forward).parameters)[2:] == ["gate"]


def difference(module: Module, ours: Any) -> str | None:
    """Return how the results differ, if they do; set the output dtypes of ``ours``.

    Raises:
        SkippedError: The module differs from all replacements.
    """
    others: dict[str, object] = {}  # attributes of both layers during the comparison
    children: dict[str, Module] = {}
    if has_activation(module):
        children = {name: ACTIVATION[name] for name in module._modules}
    if children:
        others["_modules"] = children
    names = [name for name, parameter in module.named_parameters() if not _is_flattened(parameter)]
    unknown = [name for name in names if name not in ours._parameters and name.partition(".")[0] not in children]
    if unknown:
        raise SkippedError(f"it has a parameter {unknown[0]}")
    shape = tuple(ours.normalized_shape)
    is_reduced = (
        type(module) in TORCH_LAYERS and type(ours) in (LayerNorm, RMSNorm) and module.normalized_shape == shape
    )
    if is_reduced:
        shape = tuple(min(size, _WIDTH) for size in shape)
        others["normalized_shape"] = shape
    tensors = {name: tensor_attribute(module, name) for name in ours._parameters}
    shapes = {name: shape if is_reduced else full_shape(p) for name, p in tensors.items() if p is not None}
    has_gate = takes_gate(module)
    small = max((torch.finfo(torch.float64).eps if ours.eps is None else abs(ours.eps)) ** 0.5, _SMALLEST_SCALE)

    parameters = {name: _random(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}

    def random_gate(x: Tensor, scale: Tensor | float) -> Tensor:
        return scale * _random(tuple(x.shape), 4)

    def results(
        module: Module,
        dtypes: _Dtypes,
        x: Tensor,
        dy: Tensor | None = None,
        *,
        gate_scale: Tensor | float = 1,
        attributes: dict[str, object] | None = None,
    ) -> dict[str, Tensor] | Exception:
        """Return the output in these dtypes, and the gradients if ``dy`` is given."""
        inputs = {"input": x.to(dtypes[0], copy=True)}
        if dtypes[2]:
            inputs["gate"] = random_gate(x, gate_scale).to(dtypes[2])
        copies = {name: p.to(dtypes[1], copy=True) for name, p in parameters.items()}
        tensors = [*inputs.values(), *copies.values()]
        for tensor in tensors:
            tensor.requires_grad_(dy is not None)
        try:
            y = _forward(module, list(inputs.values()), copies, others | (attributes or {}))
            if y.shape != x.shape:  # parameters of shape [C, 1, 1] add dimensions to rows
                raise ValueError(f"the output is of size{list(y.shape)}")
            if dy is None:
                return {"output": y}
            gradients = torch.autograd.grad(y, tensors, dy.to(y.dtype), materialize_grads=True)
            names = (f"gradient of {name}" for name in (*inputs, *copies))
            return {"output": y, **dict(zip(names, gradients, strict=True))}
        except Exception as error:  # foreign code may raise anything
            return error

    def sample(size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        x, dy = _random(size, 2) + 1, _random(size, 3)
        x[0] *= small  # eps matters for these rows
        if math.prod(shape) != 1:
            x[-1].view(-1)[0] = 0  # a masked element for layers that leave zeros out
        return x, dy

    widths = [shape] if shape else [(_WIDTH,), (_WIDTH + 1,)]
    sizes = [size for width in widths for size in _sizes(width)]
    # Layers that convert the input to float32, but not the parameters, take only float32 parameters.
    for dtype, parameter_dtype in itertools.product(_FLOATS[:2], _FLOATS[:2] if parameters else (None,)):
        dtypes = dtype, parameter_dtype, dtype if has_gate else None
        attempts = ((size, results(module, dtypes, *sample(size))) for size in sizes)
        accepted = next((size for size, theirs in attempts if not isinstance(theirs, Exception)), None)
        if accepted is not None:
            break
    else:
        raise SkippedError(f"it refuses every input: {shortened(results(module, dtypes, *sample(sizes[0])))}")

    # Some layers need a gate, while ours are then plain norms.
    gates = (dtype, None) if has_gate else (None,)
    modes = {"": module.training, f" in {'eval' if module.training else 'training'} mode": not module.training}
    for (mode, training), size, gate in itertools.product(modes.items(), sizes, gates):
        if mode and size != accepted:
            continue
        x, dy = sample(size)
        theirs, mine = (
            results(layer, (dtype, parameter_dtype, gate), x, dy, attributes={"training": training})
            for layer in (module, ours)
        )
        if isinstance(theirs, Exception):
            # A layer for images takes any rank.
            takes_more = isinstance(ours, (LayerNorm2d, RMSNorm2d)) or (has_gate and gate is None)
            if not isinstance(mine, Exception) and not takes_more:
                return f"input of size{list(size)} raises {shortened(theirs)}{mode}"
        elif isinstance(mine, Exception):
            return f"it takes input of size{list(size)}{mode}"
        else:
            for value, expected in theirs.items():
                distance = (expected.double() - mine[value].double()).abs()
                if value == "gradient of input":
                    distance[0] *= small
                if not (distance <= _TOLERANCE).all():
                    return f"{value} differs by {distance.max():.2g}{mode}"

    x, one = _random(accepted, 2) + 1, torch.ones((), device="cpu")
    scales = torch.tensor(_SCALES, device="cpu").repeat(accepted[0])[: accepted[0]].view(-1, *[1] * (x.dim() - 1))
    for name, x_scale, gate_scale in [("inputs", scales, one), ("gates", one, scales)][: 1 + has_gate]:
        theirs, mine = (results(layer, dtypes, x_scale * x, gate_scale=gate_scale) for layer in (module, ours))
        if isinstance(theirs, Exception) or isinstance(mine, Exception):
            return f"large {name} raise {shortened(theirs if isinstance(theirs, Exception) else mine)}"
        distance = (theirs["output"].double() - mine["output"].double()).abs()
        # A large gate multiplies the roundings of the norm.
        if not (distance <= _TOLERANCE * random_gate(x, gate_scale).abs().clamp_min(1)).all():
            return f"output for large {name} differs by {distance.max():.2g}"

    # Neighbours differ by about 4, because the deviation of two nearly equal channels is lost in 16-bit roundings.
    parity = sum(torch.ones(accepted, device="cpu").cumsum(dim) for dim in range(len(accepted))) % 2
    x = _random(accepted, 2) + 4 * parity - 1
    x_and_small_rows = x.clone()
    x_and_small_rows[0] *= small
    # In float16, squares of small rows are subnormal, and layers that compute in 16 bits lose digits.
    inputs = {dtype: x if dtype == torch.float16 else x_and_small_rows for dtype in _FLOATS}
    kinds = itertools.product(_FLOATS, _FLOATS if parameters else (None,), (*_FLOATS, None) if has_gate else (None,))
    return _difference_by_dtype(module, ours, inputs, results, list(kinds))


def _sizes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return sizes of inputs to be normalized over their last dimensions, and of images, which have channels first."""
    m, n = [size for size in range(2, 4 + len(shape)) if size not in shape][:2]  # unlike any size to be normalized
    sizes = [(n, *shape), (m, n, *shape), (m, n, m, *shape), (m, *shape, n, m)]
    return [*sizes, (m, *shape, n), (m, *shape, n, m, n)] if len(shape) == 1 else sizes


def _random(size: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")


def _forward(module: Module, inputs: list[Tensor], parameters: dict[str, Tensor], others: dict[str, Any]) -> Tensor:
    """Call a module without hooks, with these parameters and other attributes."""
    return type(module).forward(_double(module, parameters, others), *inputs)


def _double(module: Module, parameters: dict[str, Tensor], others: dict[str, Any]) -> Any:
    """Return a module with these parameters and other attributes, whose forward may change copies of its state."""
    double: Any = object.__new__(type(module))
    for name, value in vars(module).items():
        # Tools for sharding replace _parameters by other classes, or keep parameters as attributes.
        if name not in parameters:
            vars(double)[name] = copy(value) if type(value) in _CONTAINERS else value
    buffers = {name: buffer if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
    vars(double).update(others, _parameters=dict.fromkeys(module._parameters) | parameters, _buffers=buffers)
    return double


def shortened(error: object) -> str:
    """Return the class of an error and the first line of its text, which foreign code may fail to give."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:
        text = ""
    return f"{type(error).__name__}: {shorten(text, 120, placeholder=' ...')}"


def _difference_by_dtype(
    module: Module, ours: Any, inputs: dict[torch.dtype, Tensor], results: Any, kinds: list[_Dtypes]
) -> str | None:
    """Return how the results differ for combinations of dtypes, if they do; set the output dtypes of ``ours``."""
    outputs = {}
    for dtypes in kinds:
        theirs = results(module, dtypes, inputs[dtypes[0]])
        if not isinstance(theirs, Exception):
            outputs[dtypes] = theirs["output"]
    tensors = 3 if takes_gate(module) else 2
    others = {dtypes[:tensors]: output.dtype for dtypes, output in outputs.items() if output.dtype != dtypes[0]}
    if others:
        keep_output_dtypes(ours, others)
    for dtypes, expected in outputs.items():
        mine = results(ours, dtypes, inputs[dtypes[0]])
        names = " and ".join(str(dtype) for dtype in dtypes if dtype)
        if isinstance(mine, Exception):  # from a user's subclass of ours
            return f"it takes {names}: {shortened(mine)}"
        if mine["output"].dtype != expected.dtype:
            return f"output of {names} is {expected.dtype} instead of {mine['output'].dtype}"
        roundings = _ROUNDINGS * max(torch.finfo(dtype).eps for dtype in (*dtypes, expected.dtype) if dtype)
        distance = (mine["output"].double() - expected.double()).abs() / expected.double().abs().clamp_min(1)
        if not (distance <= max(_TOLERANCE, roundings)).all():
            return f"output of {names} differs by {distance.max():.2g}"
    return None


def tensor_attribute(module: Module, name: str) -> Tensor | None:
    """Return a parameter, which some tools keep as another attribute, or ``None``."""
    value = getattr(module, name, None)
    return value if isinstance(value, Tensor) else None


def full_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of a parameter, of which this process may have a part."""
    if _is_flattened(parameter):
        raise SkippedError("FSDP has flattened its parameters; convert the model before it is wrapped")
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # DeepSpeed's ZeRO-3 leaves an empty tensor
    if 0 in shape:
        raise SkippedError(f"a parameter has the shape {list(shape)}")
    return shape


def _is_flattened(parameter: Any) -> bool:
    """Return whether FSDP1 has a parameter's elements, or a part of them, in one dimension."""
    return getattr(parameter, "_fsdp_flattened", False)
