"""Replaces the normalization layers of a model by those of this package, and puts them back."""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor
from torch.nn import Module, TransformerEncoder, TransformerEncoderLayer

from . import _build_info
from .channels_first import LayerNorm2d
from .modules import LayerNorm, RMSNorm

__all__ = ["ConversionReport", "convert", "converted", "register_conversion", "revert"]


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` has replaced, and what it has not; ``print`` it.

    Attributes:
        replaced: The names of the modules that were replaced, and of what by what. Of a module in several places it is
            the first name.
        skipped: The names of the normalization layers that were left as they are, and why.
        fast_paths: The names of the transformer modules whose fast path was switched off, and by which attribute.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    fast_paths: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = {"replaced": self.replaced, "skipped": self.skipped, "fast path off": self.fast_paths}
        lines = [f"{what}: {name or '(model)'}: {how}" for what, part in parts.items() for name, how in part.items()]
        return "\n".join([*lines, ", ".join(f"{len(part)} {what}" for what, part in parts.items())])


def convert(model: Module) -> ConversionReport:
    r"""Replace the normalization layers of a model by layernorm_ext's, in place.

    A module is replaced if its exact type is :class:`torch.nn.LayerNorm`, :class:`torch.nn.RMSNorm` or registered, as
    timm's, torchvision's and Hugging Face's are (:func:`register_conversion` for others), and if it computes what its
    replacement does: both are given the same random rows and parameters, in float64 on the CPU, and their outputs and
    gradients, of size 1, may differ by 1e-5. Every pair of floating dtypes of input and parameters that the module
    accepts is then compared, too: outputs may differ by a few roundings, and the replacement returns the dtype that the
    module does. Other normalization layers are skipped and named, with the reason.

    The module stays the object that it is and changes its class, as torch's lazy modules do. So its parameters, hooks,
    dtype, device and mode, its name in the ``state_dict``, and all references to it are kept.

    In inference, :class:`torch.nn.TransformerEncoderLayer` may call one operator for all that it does, which reads the
    parameters of its normalization layers but never calls them. Where one of them has been replaced, this fast path is
    switched off, by ``activation_relu_or_gelu = 0``, and so are the nested tensors that
    :class:`torch.nn.TransformerEncoder` makes for it of padded input, by ``use_nested_tensor = False``; its outputs at
    padding are then no longer zeros.

    Args:
        model: Any module; it may itself be a normalization layer.

    Returns:
        What was replaced, what was skipped and why, and which fast paths were switched off.

    Note:
        The replacement's output is rounded once. Hugging Face's ``LlamaRMSNorm`` and its kin round a 16-bit normalized
        input before they multiply by the weight. Under autocast, torch's layers may return float32 for 16-bit input;
        the replacement returns what it does without autocast.

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
            was = _name(type(module))
            try:
                ours = _replacement(module)
                replacements.append((module, ours))
                report.replaced[name] = f"{was} by {ours!r}"
            except _SkippedError as reason:
                report.skipped[name] = f"{was}: {reason}"
    for module, ours in replacements:  # once all are known, so that an error leaves the model as it was
        _become(module, ours)
    for name, module in modules:
        if isinstance(module, TransformerEncoderLayer) and _calls_ours(module) and module.activation_relu_or_gelu:
            report.fast_paths[name] = _set(module, "activation_relu_or_gelu", 0)
        if isinstance(module, TransformerEncoder) and any(map(_calls_ours, module.layers)) and module.use_nested_tensor:
            report.fast_paths[name] = _set(module, "use_nested_tensor", False)
    return report


def revert(model: Module) -> None:
    """Undo :func:`convert`: give each module of a model its class and attributes back.

    Args:
        model: A model that was converted, a part of it, or a copy.

    Raises:
        RuntimeError: The class of a module was changed again after its conversion, as parametrizations and FSDP do.
            Nothing is undone then.
    """
    _restore((name, module) for name, module in model.named_modules() if _is_changed(module))


@contextmanager
def converted(model: Module) -> Iterator[ConversionReport]:
    """Convert a model for a trial, and undo that at the end.

    Args:
        model: See :func:`convert`. What was converted before stays so.

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
    """Have :func:`convert` consider the modules of another class.

    Each is compared with its replacement before it is replaced, and its ``forward`` must take the input alone.

    Args:
        cls: The class, or the name of one that need not be imported, ``"package.module.Class"``, in which ``*`` stands
            for anything. Subclasses are registered by themselves.
        build: A function from a module of the class to the ``LayerNorm``, ``LayerNorm2d`` or ``RMSNorm`` that may take
            its place, with parameters of the same names; they are not used, and best made on the device "meta". If
            ``None``, all three are tried, also with a zero-centred weight; ``normalized_shape`` (or else the shape of
            ``weight``) and ``eps`` (or else ``variance_epsilon``) are read from the module.

    Raises:
        TypeError: ``cls`` is neither; or, from :func:`convert`, ``build`` returned something else.

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

# These names propose; the comparison decides.
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


# Replacements for layers whose output dtype or parameter names differ from ours


# Where the output does not have the input's dtype: its dtype, by those of input and weight.
_OutputDtypes = dict[tuple[torch.dtype, torch.dtype | None], torch.dtype]


class _KeepsOutputDtypes:
    """A layer that returns the dtype which the original returns."""

    _output_dtypes: _OutputDtypes = {}

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(_widen(input, self.weight, self._output_dtypes))
        return _round(output, input, self.weight, self._output_dtypes)

    def _get_name(self) -> str:
        return type(self).__bases__[-1].__name__


@torch.fx.wrap  # symbolic tracing knows no dtypes
def _widen(input: Tensor, weight: Tensor | None, output_dtypes: _OutputDtypes) -> Tensor:
    """Convert an input to the wider of its own dtype and the output's."""
    dtype = output_dtypes.get((input.dtype, None if weight is None else weight.dtype))
    return input if dtype is None else input.to(torch.promote_types(input.dtype, dtype))


@torch.fx.wrap
def _round(output: Tensor, input: Tensor, weight: Tensor | None, output_dtypes: _OutputDtypes) -> Tensor:
    """Convert an output to its dtype."""
    dtype = output_dtypes.get((input.dtype, None if weight is None else weight.dtype))
    return output if dtype is None else output.to(dtype)


class _LayerNorm(_KeepsOutputDtypes, LayerNorm):
    pass


class _LayerNorm2d(_KeepsOutputDtypes, LayerNorm2d):
    pass


class _RMSNorm(_KeepsOutputDtypes, RMSNorm):
    pass


class _RMSNormWithGain(_KeepsOutputDtypes, RMSNorm):
    """A layer whose weight has the name ``g``."""

    weight = property(lambda self: self.g)


_KEEPS_OUTPUT_DTYPES = {LayerNorm: _LayerNorm, LayerNorm2d: _LayerNorm2d, RMSNorm: _RMSNorm}


def _diffusers_rms_norm(module: Module) -> Module:
    return RMSNorm(module.dim, module.eps, module.weight is not None, device="meta")


def _x_transformers_rms_norm(module: Module) -> Module:
    # torch.nn.functional.normalize divides by max(norm, 1e-12). Division by sqrt(norm^2 + 1e-24) gives the same output
    # and gradient for zero rows, and for rows with a norm of at least 1e-9.
    width = module.g.numel()
    ours = RMSNorm(width, 1e-24 / width, zero_centered_weight=getattr(module, "unit_offset", False), device="meta")
    ours.__class__, ours._parameters = _RMSNormWithGain, {"g": ours._parameters["weight"]}
    return ours


register_conversion("diffusers.models.normalization.RMSNorm", _diffusers_rms_norm)
register_conversion("x_transformers.x_transformers.RMSNorm", _x_transformers_rms_norm)


# What is replaced

_DEVICES = {"cpu", "meta", "cuda"} if _build_info.with_cuda else {"cpu", "meta"}


class _SkippedError(Exception):
    """Says why a module is not replaced."""


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _key(cls: type) -> type | str | None:
    """Return what a class is registered as: itself, or the last of the names that fit."""
    if cls in _REGISTRY:
        return cls
    names = [key for key in _REGISTRY if isinstance(key, str) and fnmatchcase(_name(cls), key)]
    return names[-1] if names else None


def _is_normalization(module: Module) -> bool:
    """Say whether a module is to be replaced or named: it, or what it is derived from, is registered or called so."""
    if isinstance(module, (LayerNorm, RMSNorm)):
        return False
    if isinstance(module, tuple(key for key in _REGISTRY if isinstance(key, type))):
        return True
    if list(module.children()):  # a block called after the layer in it
        return False
    cls = type(module)
    return any(map(_key, cls.__mro__)) or re.search("(layer|rms)_?norm", cls.__name__, re.IGNORECASE) is not None


def _replacement(module: Module) -> Module:
    """Return a module of ours that computes the same."""
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
    for ours in _likely(module) if build is None else [build(module)]:
        if not isinstance(ours, (LayerNorm, RMSNorm)):
            raise TypeError(
                f"Expected build to return a LayerNorm, LayerNorm2d or RMSNorm of layernorm_ext for a {_name(cls)}, "
                f"but got {ours!r}"
            )
        difference = _difference(module, ours)
        if difference is None:
            return ours
        differences.append(f"not {ours!r}: {difference}")
    raise _SkippedError("; ".join(differences))


def _likely(module: Module) -> Iterator[Module]:
    """Build all that a layer with the usual attributes may be."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    shape = getattr(module, "normalized_shape", None if weight is None else weight.shape)
    if shape is None:
        raise _SkippedError("it has neither normalized_shape nor weight")
    if not (hasattr(module, "eps") or hasattr(module, "variance_epsilon")):
        raise _SkippedError("it has neither eps nor variance_epsilon")
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    options = {"eps": eps, "elementwise_affine": weight is not None, "device": "meta"}
    for zero_centered in (False,) if weight is None else (False, True):
        if bias is None:
            yield RMSNorm(shape, zero_centered_weight=zero_centered, **options)
        if eps is not None:
            yield LayerNorm(shape, bias=bias is not None, zero_centered_weight=zero_centered, **options)
    if len(shape) == 1 and eps is not None:
        yield LayerNorm2d(shape[0], bias=bias is not None, **options)


# Of outputs and gradients of size 1. A layer that normalizes in float32, whatever its input is, loses some 1e-6; a
# deviation from N - 1 instead of N numbers is off by 1 / (2 N).
_TOLERANCE = 1e-5

# Outputs in narrower dtypes may differ by this many times torch.finfo.eps, of the value or of 1. That is eight
# roundings; layers that compute in 16 bits round about four times.
_ROUNDINGS = 4

# The smallest scale of the rows for which eps matters. x-transformers clamps the norm of smaller rows, to which its
# replacement adds an eps instead.
_SMALLEST_SCALE = 1e-8


@torch.inference_mode(False)
@torch.enable_grad()
@torch.autocast("cpu", enabled=False)
def _difference(module: Module, ours: Module) -> str | None:
    """Return how two modules differ for the same random numbers; make ours return the output dtypes of the other."""
    unknown = [name for name, _ in module.named_parameters() if name not in ours._parameters]
    if unknown:
        return f"it has a parameter {unknown[0]}"
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    parameters = {name: random(*p.shape).requires_grad_() for name, p in module._parameters.items() if p is not None}
    theirs = object.__new__(type(module))  # a copy, without what it would take to copy the tensors
    vars(theirs).update(vars(module), _parameters=module._parameters | parameters)
    ours._parameters.update(parameters)
    names = ("output", "gradient of input", *(f"gradient of {name}" for name in parameters))

    def results(module: Module, x: Tensor, dy: Tensor) -> dict[str, Tensor] | Exception:
        try:
            y = type(module).forward(module, x)  # without hooks
            gradients = torch.autograd.grad(y, (x, *parameters.values()), dy, materialize_grads=True)
        except Exception as error:  # of somebody else's code
            return error
        return dict(zip(names, (y, *gradients), strict=True))

    accepted = None
    shape = tuple(ours.normalized_shape)
    width = 2 if shape[-1] != 2 else 3
    for size in ((3, *shape), (2, 3, *shape), (2, 3, 2, *shape), (2, *shape, 3, width)):  # the last for channels
        dy, scale = random(*size), torch.ones(size, dtype=torch.float64, device="cpu")
        eps = torch.finfo(torch.float64).eps if ours.eps is None else ours.eps
        scale[0] = max(eps**0.5, _SMALLEST_SCALE)  # so small that eps counts
        x = ((random(*size) + 1) * scale).requires_grad_()
        expected, actual = results(theirs, x, dy), results(ours, x, dy)
        if isinstance(expected, Exception):
            if not isinstance(actual, Exception):  # what both refuse tells nothing
                return f"{type(expected).__name__} for input of size{list(size)}: {str(expected).partition(chr(10))[0]}"
        elif isinstance(actual, Exception):
            return f"it takes input of size{list(size)}"
        else:
            for name, value in expected.items():
                error = (actual[name] - value).abs() * (scale if name == "gradient of input" else 1)
                if not (error <= _TOLERANCE).all():
                    return f"{name} differs by {error.max():.2g}"
            accepted = (x / scale).detach()
    if accepted is None:
        return "it refuses every input"
    return _difference_by_dtype(theirs, ours, parameters, accepted)


def _difference_by_dtype(theirs: Module, ours: Module, parameters: dict[str, Tensor], x: Tensor) -> str | None:
    """Return for which dtypes the outputs of two modules differ; make ours return the output dtypes of the other."""
    outputs = {}
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    for dtypes in itertools.product(floats, floats if parameters else (None,)):
        typed = {name: parameter.detach().to(dtypes[1]) for name, parameter in parameters.items()}
        theirs._parameters.update(typed)
        with warnings.catch_warnings(), suppress(Exception):  # an original may refuse any pair in any way
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
        except Exception as error:  # in a user's subclass of ours
            return f"it takes {names}: {error}"
        if actual.dtype != expected.dtype:
            return f"output of {names} is {expected.dtype}"
        roundings = _ROUNDINGS * max(torch.finfo(dtype).eps for dtype in (*dtypes, expected.dtype) if dtype)
        expected, actual = expected.double(), actual.double()
        error = (actual - expected).abs() / expected.abs().clamp_min(1)
        if not (error <= max(_TOLERANCE, roundings)).all():
            return f"output of {names} differs by {error.max():.2g}"
    return None


# Changes of a module


@dataclass(frozen=True)
class _Before:
    """What a changed module was, and what it has become."""

    cls: type[Module]
    attributes: dict[str, object]  # those that were there
    added: list[str]  # those that were not
    parameters: list[str]  # likewise
    became: type[Module]


_BEFORE = "_before_conversion"  # the attribute of a changed module that holds it, so that copies have it too


def _is_changed(module: Module) -> bool:
    return _BEFORE in vars(module)


def _become(module: Module, ours: Module) -> None:
    """Give a module the class of one of ours, and the attributes that this has and every module has not."""
    attributes = {name: value for name, value in vars(ours).items() if name not in vars(Module())}
    _change(module, type(ours), attributes, [name for name in ours._parameters if not hasattr(module, name)])


def _set(module: Module, name: str, value: object) -> str:
    """Set an attribute, and say so."""
    _change(module, type(module), {name: value}, [])
    return f"{_name(type(module))}.{name} = {value}"


def _change(module: Module, cls: type[Module], attributes: dict[str, object], parameters: list[str]) -> None:
    state = vars(module)
    before = {name: state[name] for name in attributes if name in state}
    added = [name for name in attributes if name not in state]
    state.update(attributes)
    state[_BEFORE] = _Before(module.__class__, before, added, parameters, cls)
    for name in parameters:
        module.register_parameter(name, None)
    module.__class__ = cls


def _restore(changed: Iterable[tuple[str, Module]]) -> None:
    changed = list(changed)
    for name, module in changed:
        became = vars(module)[_BEFORE].became
        if type(module) is not became:
            raise RuntimeError(
                f"Expected {name or 'the model'} to be a {_name(became)}, as which it was converted, but got a "
                f"{_name(type(module))}; undo that first"
            )
    for _, module in changed:
        state = vars(module)
        before = state.pop(_BEFORE)
        module.__class__ = before.cls
        for name in before.added:
            del state[name]
        state.update(before.attributes)
        for name in before.parameters:
            del module._parameters[name]


def _calls_ours(layer: Module) -> bool:
    return any(isinstance(child, (LayerNorm, RMSNorm)) for child in layer.children())
