"""Replaces the normalization layers of a model with this package's, and undoes that."""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, TransformerEncoder, TransformerEncoderLayer

from . import _build_info
from .channels_first import LayerNorm2d
from .modules import LayerNorm, RMSNorm

__all__ = ["ConversionReport", "convert", "converted", "register_conversion", "revert"]


@dataclass(frozen=True)
class ConversionReport:
    """The result of :func:`convert`, for ``print``.

    Attributes:
        replaced: Each replaced module's name, with its old class and its replacement. A module with several names has
            the first.
        skipped: Each skipped normalization layer's name, with its class and the reason.
        fast_paths: The name of each transformer module whose fast path was disabled, with the attribute that disables
            it.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    fast_paths: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = {"replaced": self.replaced, "skipped": self.skipped, "fast path off": self.fast_paths}
        lines = [f"{what}: {name or '(model)'}: {how}" for what, part in parts.items() for name, how in part.items()]
        return "\n".join([*lines, ", ".join(f"{len(part)} {what}" for what, part in parts.items())])


def convert(model: Module) -> ConversionReport:
    r"""Replace the normalization layers of a model with layernorm_ext's, in place.

    A module is replaced if its class is :class:`torch.nn.LayerNorm`, :class:`torch.nn.RMSNorm` or registered, and if it
    computes the same as its replacement. The layers of timm, torchvision, Hugging Face, diffusers and x-transformers
    are registered; :func:`register_conversion` adds others. To compare them, both layers get the same random rows and
    parameters. In float64 on the CPU, outputs and gradients of size 1 may differ by 1e-5. For every pair of floating
    dtypes of input and parameters that the module accepts, the outputs may differ by a few roundings, and the
    replacement returns the module's output dtype. Other normalization layers are skipped and reported with the reason.

    The module object stays and its class changes, as in torch's lazy modules. This keeps its parameters, hooks, dtype,
    device, mode, name in the ``state_dict`` and all references to it.

    The fast path of :class:`torch.nn.TransformerEncoderLayer` in inference never calls its normalization layers. It is
    disabled if one was replaced, and so is the conversion of padded input to nested tensors in
    :class:`torch.nn.TransformerEncoder`, so that outputs at padding are no longer zeros.

    Args:
        model: Any module; it may itself be a normalization layer.

    Returns:
        The replaced and skipped layers, and the disabled fast paths.

    Note:
        The replacement rounds its output once. Hugging Face's ``LlamaRMSNorm`` and similar layers also round a 16-bit
        normalized input before they multiply by the weight. Under autocast, torch's layers may return float32 for
        16-bit input; the output dtype of a replacement does not depend on autocast.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        >>> print(convert(model))  # doctest: +ELLIPSIS
        replaced: 1: torch.nn.modules.normalization.LayerNorm by LayerNorm((8,), eps=1e-05, ...)
        1 replaced, 0 skipped, 0 fast path off
        >>> revert(model)
        >>> type(model[1])
        <class 'torch.nn.modules.normalization.LayerNorm'>
    """
    report = ConversionReport()
    modules = list(model.named_modules())
    replacements = []
    for name, module in modules:
        if _is_normalization(module):
            cls = _name(type(module))
            try:
                ours = _replacement(module)
                replacements.append((module, ours))
                report.replaced[name] = f"{cls} by {ours!r}"
            except _SkippedError as reason:
                report.skipped[name] = f"{cls}: {reason}"
    for module, ours in replacements:  # after the loop, so that an error leaves the model unchanged
        _become(module, ours)
    for name, module in modules:
        if isinstance(module, TransformerEncoderLayer) and _calls_ours(module) and module.activation_relu_or_gelu:
            report.fast_paths[name] = _set(module, "activation_relu_or_gelu", 0)
        if isinstance(module, TransformerEncoder) and any(map(_calls_ours, module.layers)) and module.use_nested_tensor:
            report.fast_paths[name] = _set(module, "use_nested_tensor", False)
    return report


def revert(model: Module) -> None:
    """Undo :func:`convert`: restore the classes and attributes of all modules.

    Args:
        model: A converted model, a part of one, or a copy.

    Raises:
        RuntimeError: The class of a module was changed again after its conversion, as parametrizations and FSDP do.
            In this case nothing is undone.
    """
    _restore((name, module) for name, module in model.named_modules() if _is_changed(module))


@contextmanager
def converted(model: Module) -> Iterator[ConversionReport]:
    """Convert a model within a ``with`` statement, and undo that at its end.

    Args:
        model: See :func:`convert`. Modules that were already converted stay converted.

    Yields:
        The report of :func:`convert`.

    Example:
        >>> model, x = torch.nn.LayerNorm(8), torch.randn(2, 8)
        >>> with converted(model):
        ...     y = model(x)
        >>> torch.testing.assert_close(y, model(x))
    """
    before = {module for module in model.modules() if _is_changed(module)}
    report = convert(model)
    changed = [(name, module) for name, module in model.named_modules() if _is_changed(module) and module not in before]
    try:
        yield report
    finally:
        _restore(changed)


def register_conversion(cls: type[Module] | str, build: Callable[[Module], Module] | None = None) -> None:
    """Let :func:`convert` replace the modules of another class, if they compute the same as their replacements.

    Args:
        cls: A class whose ``forward`` takes only the input, or a class name ``"package.module.Class"``, in which ``*``
            matches anything. Subclasses are not included.
        build: A function that takes a module of the class and returns the ``LayerNorm``, ``LayerNorm2d`` or ``RMSNorm``
            that should replace it. Its parameters must have the same names; their values are not used, so the device
            can be "meta". If ``None``, all three layers are tried, also with a zero-centered weight; the attributes
            ``normalized_shape`` (or else the shape of ``weight``) and ``eps`` (or else ``variance_epsilon``) are used.

    Raises:
        TypeError: ``cls`` is neither a class nor a name. Or, from :func:`convert`, ``build`` returned another type.

    Example:
        >>> class MyNorm(torch.nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.ones(width))
        ...
        ...     def forward(self, x):
        ...         return self.weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        >>> register_conversion(MyNorm, lambda norm: RMSNorm(norm.weight.shape, eps=1e-6, device="meta"))
        >>> model = MyNorm(8)
        >>> len(convert(model).replaced), model
        (1, RMSNorm((8,), eps=1e-06, elementwise_affine=True))
    """
    if not isinstance(cls, (type, str)):
        raise TypeError(f"Expected cls to be a class or the name of one, but got {cls!r}")
    _REGISTRY[cls] = build


_REGISTRY: dict[type[Module] | str, Callable[[Module], Module] | None] = {}

# Classes that may be replaced; a comparison of results decides.
for _cls in (
    torch.nn.LayerNorm,
    torch.nn.RMSNorm,
    "diffusers.models.normalization.FP32LayerNorm",
    "timm.layers.norm.LayerNorm",
    "timm.layers.norm.LayerNorm2d",
    "timm.layers.norm.LayerNorm2dFp32",
    "timm.layers.norm.LayerNormFp32",
    "timm.layers.norm.RmsNorm",
    "timm.layers.norm.RmsNormFp32",
    "timm.models.metaformer.LayerNorm2dNoBias",
    "timm.models.metaformer.LayerNormNoBias",
    "torchvision.models.convnext.LayerNorm2d",
    "transformers.models.*LayerNorm",
    "transformers.models.*LayerNorm1P",
    "transformers.models.*LayerNorm2d",
    "transformers.models.*RMSNorm",
):
    register_conversion(_cls)


# Replacements whose output dtype or parameter names differ from ours

# The output dtype for the dtypes of input and weight, if it is not that of the input.
_OutputDtypes = dict[tuple[torch.dtype, torch.dtype | None], torch.dtype]


class _KeepsOutputDtypes(Module):
    """A layer that returns the output dtype of the original."""

    _output_dtypes: _OutputDtypes = {}
    weight: Any

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(_widen(input, self.weight, self._output_dtypes))
        return _round(output, input, self.weight, self._output_dtypes)

    def _get_name(self) -> str:
        return type(self).__bases__[-1].__name__


@torch.fx.wrap  # symbolic tracing knows no dtypes
def _widen(input: Tensor, weight: Tensor | None, output_dtypes: _OutputDtypes) -> Tensor:
    """Convert the input to the wider of its own dtype and the output's."""
    dtype = output_dtypes.get((input.dtype, None if weight is None else weight.dtype))
    return input if dtype is None else input.to(torch.promote_types(input.dtype, dtype))


@torch.fx.wrap
def _round(output: Tensor, input: Tensor, weight: Tensor | None, output_dtypes: _OutputDtypes) -> Tensor:
    dtype = output_dtypes.get((input.dtype, None if weight is None else weight.dtype))
    return output if dtype is None else output.to(dtype)


class _LayerNorm(_KeepsOutputDtypes, LayerNorm):
    pass


class _LayerNorm2d(_KeepsOutputDtypes, LayerNorm2d):
    pass


class _RMSNorm(_KeepsOutputDtypes, RMSNorm):
    pass


class _RMSNormWithGain(_KeepsOutputDtypes, RMSNorm):
    """A layer whose weight is called ``g``."""

    weight = property(lambda self: self.g)


_KEEPS_OUTPUT_DTYPES = {LayerNorm: _LayerNorm, LayerNorm2d: _LayerNorm2d, RMSNorm: _RMSNorm}


def _diffusers_rms_norm(module: Any) -> Module:
    return RMSNorm(module.dim, module.eps, module.weight is not None, device="meta")


def _x_transformers_rms_norm(module: Any) -> Module:
    # torch.nn.functional.normalize divides by max(norm, 1e-12). Division by sqrt(norm^2 + 1e-24) gives the same output
    # and gradient for zero rows, and for rows with a norm of at least 1e-9.
    width = module.g.numel()
    ours = RMSNorm(width, 1e-24 / width, zero_centered_weight=getattr(module, "unit_offset", False), device="meta")
    ours.__class__, ours._parameters = _RMSNormWithGain, {"g": ours._parameters["weight"]}
    return ours


register_conversion("diffusers.models.normalization.RMSNorm", _diffusers_rms_norm)
register_conversion("x_transformers.x_transformers.RMSNorm", _x_transformers_rms_norm)


# The choice of a replacement

_DEVICES = {"cpu", "meta", "cuda"} if _build_info.with_cuda else {"cpu", "meta"}


class _SkippedError(Exception):
    """The reason why a module is not replaced."""


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _key(cls: type) -> type | str | None:
    """Return the key of a class in the registry: the class, or else the last name that matches."""
    if cls in _REGISTRY:
        return cls
    names = [key for key in _REGISTRY if isinstance(key, str) and fnmatchcase(_name(cls), key)]
    return names[-1] if names else None


def _is_normalization(module: Module) -> bool:
    """Return whether to replace or report a module: its class or a base is registered, or its name says so."""
    if isinstance(module, (LayerNorm, RMSNorm)):
        return False
    if isinstance(module, tuple(key for key in _REGISTRY if isinstance(key, type))):
        return True
    if list(module.children()):  # a block that is named after the layer in it
        return False
    cls = type(module)
    return any(map(_key, cls.__mro__)) or re.search("(layer|rms)_?norm", cls.__name__, re.IGNORECASE) is not None


def _replacement(module: Module) -> LayerNorm | RMSNorm:
    """Return a layer of this package that computes the same as a module."""
    cls = type(module)
    key = _key(cls)
    if key is None:
        raise _SkippedError("not registered by layernorm_ext.register_conversion")
    if "forward" in vars(module):
        raise _SkippedError("its forward was replaced by another")
    parameters = list(inspect.signature(cls.forward).parameters)
    if len(parameters) != 2:
        raise _SkippedError(f"its forward has the parameters {', '.join(parameters)}")
    devices = {parameter.device.type for parameter in module.parameters()} - _DEVICES
    if devices:
        raise _SkippedError(f"it is on the device {', '.join(devices)}, for which layernorm_ext was built no kernels")
    build = _REGISTRY[key]
    differences = []
    for ours in _candidates(module) if build is None else [build(module)]:
        if not isinstance(ours, (LayerNorm, RMSNorm)):
            raise TypeError(
                f"Expected build to return a LayerNorm, LayerNorm2d or RMSNorm of layernorm_ext for a {_name(cls)}, "
                f"but got {ours!r}"
            )
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            difference = _difference(module, ours)
        if difference is None:
            return ours
        differences.append(f"not {ours!r}: {difference}")
    raise _SkippedError("; ".join(differences))


def _candidates(module: Any) -> Iterator[Module]:
    """Yield all layers that a module with the common attributes may be."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    shape = getattr(module, "normalized_shape", None if weight is None else weight.shape)
    if shape is None:
        raise _SkippedError("it has neither normalized_shape nor weight")
    if not (hasattr(module, "eps") or hasattr(module, "variance_epsilon")):
        raise _SkippedError("it has neither eps nor variance_epsilon")
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    options: dict[str, Any] = {"eps": eps, "elementwise_affine": weight is not None, "device": "meta"}
    for zero_centered in (False,) if weight is None else (False, True):
        if bias is None:
            yield RMSNorm(shape, zero_centered_weight=zero_centered, **options)
        if eps is not None:
            yield LayerNorm(shape, bias=bias is not None, zero_centered_weight=zero_centered, **options)
    if len(shape) == 1 and eps is not None:
        yield LayerNorm2d(shape[0], bias=bias is not None, **options)


# The tolerance for outputs and gradients of size 1. Layers that always normalize in float32 lose about 1e-6; a standard
# deviation over N - 1 instead of N elements is off by 1 / (2 N).
_TOLERANCE = 1e-5

# The tolerance for outputs in narrower dtypes, in units of torch.finfo.eps of the value or of 1. Four units are eight
# roundings; layers that compute in 16 bits round about four times.
_ROUNDINGS = 4

# The smallest scale of rows for which eps matters. x-transformers clamps the norm of smaller rows, where its
# replacement adds an eps.
_SMALLEST_SCALE = 1e-8


def _difference(module: Module, ours: Any) -> str | None:
    """Return how the results differ, if they do; set the output dtypes of ``ours``."""
    unknown = [name for name, _ in module.named_parameters() if name not in ours._parameters]
    if unknown:
        return f"it has a parameter {unknown[0]}"
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    parameters = {name: random(*p.shape).requires_grad_() for name, p in module._parameters.items() if p is not None}
    theirs: Any = object.__new__(type(module))  # a copy of the module, but not of its tensors
    vars(theirs).update(vars(module), _parameters=module._parameters | parameters)
    ours._parameters.update(parameters)
    names = ("output", "gradient of input", *(f"gradient of {name}" for name in parameters))

    def results(module: Module, x: Tensor, dy: Tensor) -> dict[str, Tensor] | Exception:
        try:
            y = type(module).forward(module, x)  # without hooks
            gradients = torch.autograd.grad(y, (x, *parameters.values()), dy, materialize_grads=True)
        except Exception as error:  # foreign code may raise anything
            return error
        return dict(zip(names, (y, *gradients), strict=True))

    accepted = None
    shape = tuple(ours.normalized_shape)
    width = 2 if shape[-1] != 2 else 3
    for size in ((3, *shape), (2, 3, *shape), (2, 3, 2, *shape), (2, *shape, 3, width)):  # the last has channels first
        dy, scale = random(*size), torch.ones(size, dtype=torch.float64, device="cpu")
        eps = torch.finfo(torch.float64).eps if ours.eps is None else ours.eps
        scale[0] = max(eps**0.5, _SMALLEST_SCALE)  # so small that eps matters
        x = ((random(*size) + 1) * scale).requires_grad_()
        expected, actual = results(theirs, x, dy), results(ours, x, dy)
        if isinstance(expected, Exception):
            takes_more = isinstance(ours, LayerNorm2d) and len(size) != 4  # LayerNorm2d takes images of any rank
            if not isinstance(actual, Exception) and not takes_more:  # an error of both layers proves nothing
                return f"{type(expected).__name__} for input of size{list(size)}: {str(expected).partition(chr(10))[0]}"
        elif isinstance(actual, Exception):
            return f"it takes input of size{list(size)}"
        else:
            for name, value in expected.items():
                distance = (actual[name] - value).abs() * (scale if name == "gradient of input" else 1)
                if not (distance <= _TOLERANCE).all():
                    return f"{name} differs by {distance.max():.2g}"
            accepted = (x / scale).detach()
    if accepted is None:
        return "it refuses every input"
    return _difference_by_dtype(theirs, ours, parameters, accepted)


def _difference_by_dtype(theirs: Any, ours: Any, parameters: dict[str, Tensor], x: Tensor) -> str | None:
    """Return how the results differ for pairs of dtypes, if they do; set the output dtypes of ``ours``."""
    outputs = {}
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for dtypes in itertools.product(floats, floats if parameters else (None,)):
        typed = {name: parameter.detach().to(dtypes[1]) for name, parameter in parameters.items()}
        theirs._parameters.update(typed)
        with warnings.catch_warnings(), suppress(Exception):  # pairs that it refuses
            warnings.simplefilter("ignore")  # torch's RMSNorm warns about pairs without a fused kernel
            outputs[dtypes] = type(theirs).forward(theirs, x.to(dtypes[0])), typed
    others = {dtypes: output.dtype for dtypes, (output, _) in outputs.items() if output.dtype != dtypes[0]}
    if others:
        ours.__class__ = _KEEPS_OUTPUT_DTYPES.get(type(ours), type(ours))
        ours._output_dtypes = others
    for dtypes, (expected, typed) in outputs.items():
        ours._parameters.update(typed)
        names = " and ".join(str(dtype) for dtype in dtypes if dtype)
        try:
            actual = ours.forward(x.to(dtypes[0]))
        except Exception as error:  # from a user's subclass of ours
            return f"it takes {names}: {error}"
        if actual.dtype != expected.dtype:
            return f"output of {names} is {expected.dtype}"
        roundings = _ROUNDINGS * max(torch.finfo(dtype).eps for dtype in (*dtypes, expected.dtype) if dtype)
        expected, actual = expected.double(), actual.double()
        distance = (actual - expected).abs() / expected.abs().clamp_min(1)
        if not (distance <= max(_TOLERANCE, roundings)).all():
            return f"output of {names} differs by {distance.max():.2g}"
    return None


# Changes to a module


@dataclass(frozen=True)
class _Change:
    """The state that revert() restores."""

    old_cls: type[Module]
    new_cls: type[Module]
    old_attributes: dict[str, object]
    added: list[str]  # attributes and parameters


_CHANGE = "_before_conversion"  # an attribute of the changed module, so that copies of the module have it


def _is_changed(module: Module) -> bool:
    return _CHANGE in vars(module)


def _become(module: Module, ours: Module) -> None:
    """Give a module the class of ``ours``, and the attributes that not every module has."""
    attributes = {name: value for name, value in vars(ours).items() if name not in vars(Module())}
    _change(module, type(ours), attributes, [name for name in ours._parameters if not hasattr(module, name)])


def _set(module: Module, name: str, value: object) -> str:
    """Set an attribute and describe this for the report."""
    _change(module, type(module), {name: value}, [])
    return f"{_name(type(module))}.{name} = {value}"


def _change(module: Module, cls: type[Module], attributes: dict[str, object], parameters: list[str]) -> None:
    state = vars(module)
    old = {name: state[name] for name in attributes if name in state}
    added = [name for name in attributes if name not in state]
    state.update(attributes)
    state[_CHANGE] = _Change(module.__class__, cls, old, [*added, *parameters])
    for name in parameters:
        module.register_parameter(name, None)
    module.__class__ = cls


def _restore(modules: Iterable[tuple[str, Module]]) -> None:
    modules = list(modules)
    for name, module in modules:
        expected = vars(module)[_CHANGE].new_cls
        if type(module) is not expected:
            raise RuntimeError(
                f"Expected {name or 'the model'} to be a {_name(expected)}, as convert has left it, but got a "
                f"{_name(type(module))}; undo that change first"
            )
    for _, module in modules:
        change = vars(module).pop(_CHANGE)
        module.__class__ = change.old_cls
        for name in change.added:
            delattr(module, name)
        vars(module).update(change.old_attributes)


def _calls_ours(layer: Module) -> bool:
    return any(isinstance(child, (LayerNorm, RMSNorm)) for child in layer.children())
