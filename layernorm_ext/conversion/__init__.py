"""Replaces the normalization layers of a model with this package's, and undoes that."""

from __future__ import annotations

import inspect
import itertools
import math
import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

import torch
from torch.nn import Module, TransformerEncoder, TransformerEncoderLayer
from torch.utils._python_dispatch import _disable_current_modes

from .. import _build_info
from ..modules import LayerNorm, RMSNorm
from ..modules_2d import LayerNorm2d, RMSNorm2d
from ..modules_fused import GatedLayerNorm, GatedRMSNorm, is_of_parallel_style
from ._comparison import (
    TORCH_LAYERS,
    SkippedError,
    difference,
    full_shape,
    has_activation,
    shortened,
    takes_gate,
    tensor_attribute,
)
from ._replacements import apply_activation, of_any_width, rename_parameters, take_argument

__all__ = ["ConversionReport", "convert", "converted", "register_conversion", "revert"]


_Build = Callable[[Any], LayerNorm | RMSNorm]


@dataclass(frozen=True)
class ConversionReport:
    """The result of :func:`convert`, for ``print``.

    Attributes:
        replaced: Each replaced module's name, with its old class and its replacement. A module with several names has
            the first.
        skipped: The name of each skipped normalization layer, with its class and the reason, which may be the error
            that it raised.
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
    computes the same as its replacement. The layers of Hugging Face, also in remote code, diffusers, timm and many
    other packages are registered; :func:`register_conversion` adds others. To compare them, both layers get the same
    random rows and parameters, in float64 on the CPU or in the widest dtypes that the module accepts. Outputs and
    gradients of size 1 may differ by 1e-5. For every pair of floating dtypes of input and parameters that the module
    accepts, the outputs may differ by a few roundings, and the replacement returns the module's output dtype. Equal
    layers are compared once. Other normalization layers, and layers that raise errors, are skipped and reported
    with the reason.

    The module object stays and its class changes, as in torch's lazy modules. This keeps its parameters, hooks, dtype,
    device, mode, name in the ``state_dict`` and all references to it. ``forward`` takes the input by the same name.

    The fast path of :class:`torch.nn.TransformerEncoderLayer` in inference never calls its normalization layers. It is
    disabled if one was replaced, and so is the conversion of padded input to nested tensors in
    :class:`torch.nn.TransformerEncoder`, so that outputs at padding are no longer zeros.

    Args:
        model: Any module; it may itself be a normalization layer.

    Returns:
        The replaced and skipped layers, and the disabled fast paths.

    Raises:
        TypeError: ``model`` is no module.

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
    modules = _named_modules(model)
    known: dict[Hashable, Module | SkippedError] = {}  # for each kind of layer
    choices = [_choose(module, known) for _, module in modules]
    for (name, module), choice in zip(modules, choices, strict=True):  # afterwards, so that an error changes nothing
        if choice is not None:
            cls = type(module)
            reason = choice if isinstance(choice, SkippedError) else _become(module, choice)
            if reason is None:
                report.replaced[name] = f"{_name(cls)} by {choice!r}"
            else:
                report.skipped[name] = f"{_name(cls)}: {reason}"
    for name, module in modules:
        _disable_fast_path(report, name, module)
    return report


def revert(model: Module) -> None:
    """Undo :func:`convert`: restore the classes and attributes of all modules.

    Args:
        model: A converted model, a part of one, or a copy.

    Raises:
        TypeError: ``model`` is no module.
        RuntimeError: The class of a module was changed again after its conversion, as parametrizations and FSDP do.
            In this case nothing is undone.
    """
    _restore((name, module) for name, module in _named_modules(model) if _is_changed(module))


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
    before = {module for _, module in _named_modules(model) if _is_changed(module)}
    report = convert(model)
    changed = [(name, module) for name, module in model.named_modules() if _is_changed(module) and module not in before]
    try:
        yield report
    finally:
        _restore(changed)


def register_conversion(cls: type[Module] | str, build: _Build | None = None) -> None:
    """Let :func:`convert` replace the modules of another class, if they compute the same as their replacements.

    Args:
        cls: A class whose ``forward`` takes only the input, or also a ``gate``. Or a class name
            ``"package.module.Class"``, in which ``*`` matches anything. Subclasses are not included.
        build: A function that takes a module of the class and returns the ``LayerNorm``, ``LayerNorm2d``, ``RMSNorm``
            or ``RMSNorm2d``, with a gate the ``GatedLayerNorm`` or ``GatedRMSNorm``, that should replace it. Its
            parameters must have the same names; their values are not used, so the device can be "meta". If ``None``,
            all layers are tried, also with a zero-centered weight. The attributes that they need may have the names
            that ``docs/convert.md`` lists.

    Raises:
        TypeError: ``cls`` is neither a class of modules nor a name with its module, or ``build`` is no function. Or,
            from :func:`convert`, ``build`` returned another type.

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
    is_name = isinstance(cls, str) and ("." in cls or "*" in cls)
    if not is_name and not (isinstance(cls, type) and issubclass(cls, Module)):
        expected = "a subclass of torch.nn.Module or a name such as 'package.module.Class'"
        raise TypeError(f"Expected cls to be {expected}, but got cls={cls!r}")
    if build is not None and (isinstance(build, Module) or not callable(build)):
        raise TypeError(f"Expected build to be a function or None, but got build={build!r}")
    _REGISTRY[cls] = build


_REGISTRY: dict[type[Module] | str, _Build | None] = {torch.nn.LayerNorm: None, torch.nn.RMSNorm: None}

# Further candidates are the classes of these packages whose names match _NAME; a comparison of results decides. Remote
# code of transformers is in transformers_modules.
_PACKAGES = re.compile(
    "chronos|clip|diffusers|esm|k_diffusion|kokoro|kornia|lavis|litgpt|open_clip|rfdetr|sam2|segment_anything|"
    "segmentation_models_pytorch|tabpfn|timm|torchao|torchtune|torchvision|transformers|transformers_modules|"
    "ultralytics|vit_pytorch|whisper|x_transformers"
)
_NAME = re.compile("(layer|rms)_?norm", re.IGNORECASE)

# Names of the attributes of candidates. A class that has none for eps may be based on torch.nn.functional.normalize.
_WEIGHTS = ("weight", "gamma", "scale", "g")
_BIASES = ("bias", "beta", "b")
_EPS = ("eps", "variance_epsilon")
_GROUPS = ("group_size", "n_groups", "num_groups")  # the width of a group, or the number of groups


# The choice of a replacement

_DEVICES = {"cpu", "meta", "cuda"} if _build_info.with_cuda else {"cpu", "meta"}


def _named_modules(model: Module) -> list[tuple[str, Module]]:
    if not isinstance(model, Module):
        raise TypeError(f"Expected model to be a torch.nn.Module, but got model of type {type(model).__name__}")
    return list(model.named_modules())


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _builds(cls: type) -> list[_Build | None]:
    """Return the functions registered for a class, or an empty list; the last one applies."""
    if cls in _REGISTRY:
        return [_REGISTRY[cls]]
    name = _name(cls)
    builds = [None] if _PACKAGES.fullmatch(name.partition(".")[0]) and _NAME.search(cls.__name__) else []
    return [*builds, *(build for key, build in _REGISTRY.items() if isinstance(key, str) and fnmatchcase(name, key))]


def _is_normalization(module: Module) -> bool:
    """Return whether to replace or report a module: its class or a base is registered, or its name says so."""
    cls = type(module)
    if issubclass(cls, (LayerNorm, RMSNorm)):
        return False
    if issubclass(cls, tuple(key for key in _REGISTRY if isinstance(key, type))):
        return True
    if not has_activation(module):  # a block that is named after the layer in it
        return False
    return any(map(_builds, cls.__mro__)) or _NAME.search(cls.__name__) is not None


_MODULE_ATTRIBUTES = frozenset(vars(Module()))
_REPLACED_METHODS = ("__call__", "_apply", "_load_from_state_dict")  # a replacement has torch's


def _kind(module: Module) -> Hashable:
    """Return a key that modules share if they compute the same for all values of their parameters.

    Only numbers, strings and the like are compared, because other objects may compare as they like.
    """
    attributes = [(name, _key(value)) for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES]
    parameters = [(name, p.shape, getattr(p, "ds_shape", None), p.device) for name, p in module.named_parameters()]
    buffers = [(name, id(buffer)) for name, buffer in module._buffers.items()]
    children: Iterable[Hashable] = module._modules
    if not has_activation(module):
        children = [(name, id(child)) for name, child in module._modules.items()]
    kind: tuple[Any, ...] = (type(module), module.training, *module._parameters)
    return *kind, *buffers, *children, *attributes, *parameters


def _key(value: object) -> Hashable:
    if isinstance(value, tuple):
        return type(value), *map(_key, value)
    return (type(value), value) if type(value) in _COMPARABLE else id(value)


_COMPARABLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


def _choose(module: Module, known: dict[Hashable, Module | SkippedError]) -> Module | SkippedError | None:
    """Return a layer of this package that computes the same as a module, or the reason why there is none.

    ``known`` has the choices for kinds of modules. For modules that are no normalization layers, the result is None.
    """
    try:
        if not _is_normalization(module):
            return None
        kind = _kind(module)
        if kind not in known:
            with (
                _disable_current_modes(),  # of fake tensors, for example
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autocast("cpu", enabled=False),
                warnings.catch_warnings(action="ignore"),  # torch's RMSNorm warns of dtypes without a fused kernel
            ):
                choice = _replacement(module)
            if not type(choice).__module__.startswith("layernorm_ext."):
                return choice  # it may have attributes that layers must not share
            known[kind] = choice
        return known[kind]
    except _BuildError:
        raise
    except SkippedError as reason:
        known[kind] = reason
        return reason
    except Exception as error:  # foreign code may raise anything
        return SkippedError(shortened(error))


class _BuildError(TypeError):
    """The error of a function given to register_conversion, which convert() passes on."""


def _checked_builds(module: Module) -> list[_Build | None]:
    """Return the functions registered for a module, after a check that its class decides what it computes."""
    cls = type(module)
    if any(base.__name__ == "FSDPModule" for base in cls.__mro__):
        raise SkippedError("fully_shard has changed its class; convert the model before it is sharded")
    builds = _builds(cls)
    if not builds:
        raise SkippedError("not registered by layernorm_ext.register_conversion")
    overridden = [name for name in _REPLACED_METHODS if getattr(cls, name) is not getattr(Module, name)]
    if overridden:
        raise SkippedError(f"its class overrides {overridden[0]}")
    if "forward" in vars(module):
        raise SkippedError("its forward was replaced by another")
    return builds


def _replacement(module: Module) -> Module:
    cls, builds = type(module), _checked_builds(module)
    parameters = list(inspect.signature(cls.forward).parameters.values())
    if len(parameters) != 2 and not takes_gate(module):
        raise SkippedError(f"its forward has the parameters {', '.join(each.name for each in parameters)}")
    if takes_gate(module) and any(map(is_of_parallel_style, module._forward_pre_hooks.values())):
        raise SkippedError("a parallel style may leave out its gate; convert the model before it is parallelized")
    devices = {parameter.device.type for parameter in module.parameters()} - _DEVICES
    if devices:
        raise SkippedError(f"it is on the device {', '.join(devices)}, for which layernorm_ext was built no kernels")
    if cls not in TORCH_LAYERS:  # whose shapes are attributes
        for parameter in module.parameters():
            full_shape(parameter)  # raises an error if it is unknown
    build = builds[-1]
    reasons = []
    for ours in _candidates(module) if build is None else [build(module)]:
        if not isinstance(ours, (LayerNorm, RMSNorm)):
            raise _BuildError(
                f"Expected build to return a LayerNorm, LayerNorm2d, RMSNorm or RMSNorm2d of layernorm_ext for a "
                f"{_name(cls)}, but got {ours!r}"
            )
        reason = difference(module, ours)
        if reason is None:
            if parameters[1].kind == inspect.Parameter.POSITIONAL_OR_KEYWORD:
                take_argument(ours, parameters[1].name)
            return ours
        reasons.append(f"not {ours!r}: {reason}")
    raise SkippedError("; ".join(reasons) or "its eps is None, which only an RMSNorm without a bias may have")


def _candidates(module: Any) -> Iterator[Module]:
    """Yield all layers that a module with the common attributes may be."""
    weight_name, weight = _first_tensor(module, _WEIGHTS)
    bias_name, bias = _first_tensor(module, _BIASES)
    shape = _shape(module, weight_name, weight)
    rms_eps, eps = _rms_and_layer_norm_eps(module, shape)
    has_gate = takes_gate(module)
    kinds: list[tuple[Any, Any, Any, dict[str, Any]]] = []
    if has_gate:
        kinds += [(shape, GatedRMSNorm, GatedLayerNorm, options) for options in _gate_options(module, shape)]
    elif shape:
        kinds.append((shape, RMSNorm, LayerNorm, {}))
        if len(shape) == 1:
            kinds.append((shape[0], RMSNorm2d, LayerNorm2d, {}))
    all_rms_eps = [rms_eps]
    if rms_eps is None and type(module) not in TORCH_LAYERS:  # some compute in float32 for all inputs
        all_rms_eps.append(torch.finfo(torch.float32).eps)
    layers: list[Module] = []
    for size, rms_norm, layer_norm, others in kinds:
        for zero_centered in (False,) if weight is None else (False, True):
            options = others | {"elementwise_affine": weight is not None, "zero_centered_weight": zero_centered}
            if bias is None:
                layers += [rms_norm(size, each, device="meta", **options) for each in all_rms_eps]
            if eps is not None:
                layers.append(layer_norm(size, eps, bias=bias is not None, device="meta", **options))
    if bias is None and not module._modules and not has_gate:  # one class has a weight that it never uses
        layers += [of_any_width(cls, each) for cls in (RMSNorm, RMSNorm2d) for each in all_rms_eps]
    for ours in layers:
        if "act" in module._modules:
            apply_activation(ours)
        if (weight_name, bias_name) != ("weight", "bias"):
            rename_parameters(ours, weight_name, bias_name)
        yield ours


def _gate_options(module: Any, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return all options that a gated norm with the common attributes may have."""
    if not shape:
        raise SkippedError("it takes a gate, but has neither a weight nor a normalized_shape")
    if module._modules:
        raise SkippedError(f"it takes a gate and has a child {next(iter(module._modules))}")
    num_groups = 1
    for name in _GROUPS:
        groups = getattr(module, name, None)
        if isinstance(groups, int) and len(shape) == 1 and groups > 0 and shape[0] % groups == 0:
            num_groups = shape[0] // groups if name == "group_size" else groups
            break
    return [
        {"activation": activation, "gate_first": gate_first, "num_groups": num_groups}
        for activation, gate_first in itertools.product(("silu", "sigmoid"), (True, False))
    ]


def _first_tensor(module: Module, names: Sequence[str]) -> tuple[str, torch.Tensor | None]:
    """Return the first of these names that is a tensor's, and the tensor."""
    tensors = ((name, tensor_attribute(module, name)) for name in names)
    return next(((name, tensor) for name, tensor in tensors if tensor is not None), (names[0], None))


def _shape(module: Any, weight_name: str, weight: torch.Tensor | None) -> tuple[int, ...]:
    """Return the sizes over which a module may normalize, or no sizes if it may take rows of any width."""
    shape = getattr(module, "normalized_shape", None)
    if shape is not None:
        return (shape,) if isinstance(shape, int) else tuple(shape)
    if weight is None:
        return ()
    shape = full_shape(weight)
    if weight_name != "weight":  # its shape may be [C, 1, 1]
        shape = tuple(size for size in shape if size != 1) or (1,)
    return shape


def _rms_and_layer_norm_eps(module: Any, shape: tuple[int, ...]) -> tuple[float | None, float | None]:
    """Return eps, or what it may be if no attribute says so: as an RMSNorm, and as a LayerNorm."""
    for name in _EPS:
        if hasattr(module, name):
            eps = getattr(module, name)
            if not isinstance(eps, (Real, type(None))):
                raise SkippedError(f"its {name} is of type {type(eps).__name__}")
            return eps, eps  # type: ignore[return-value]
    # torch.nn.functional.normalize divides by max(norm, 1e-12). Division by sqrt(norm^2 + 1e-24) gives the same output
    # and gradient for zero rows, and for rows with a norm of at least 1e-9.
    return 1e-24 / math.prod(shape) if shape else None, 1e-5


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


def _become(module: Module, ours: Module) -> SkippedError | None:
    """Give a module the class of ``ours``, and the attributes that not every module has, or return why not."""
    attributes = {name: value for name, value in vars(ours).items() if name not in _MODULE_ATTRIBUTES}
    try:
        missing = [name for name in ours._parameters if tensor_attribute(module, name) is None]
        attributes |= {name: None for name in missing if name in vars(module)}  # such as a flag called bias
        _change(module, type(ours), attributes, [name for name in missing if not hasattr(module, name)])
    except Exception as error:  # a class may have __slots__ or refuse to change
        return SkippedError(f"its class cannot change: {shortened(error)}")
    return None


def _disable_fast_path(report: ConversionReport, name: str, module: Any) -> None:
    """Set the attribute of an encoder or its layer that enables the fast path, if that would leave out our norms."""
    cls, attribute, value = type(module), "", None
    try:
        if issubclass(cls, TransformerEncoderLayer) and _calls_ours(module):
            attribute, value = "activation_relu_or_gelu", 0
        if issubclass(cls, TransformerEncoder) and any(map(_calls_ours, module.layers)):
            attribute, value = "use_nested_tensor", False
        if attribute and getattr(module, attribute):
            _change(module, cls, {attribute: value}, [])
            report.fast_paths[name] = f"{_name(cls)}.{attribute} = {value}"
    except Exception as error:  # from a subclass
        report.skipped[name] = f"{_name(cls)}: {shortened(error)}"


def _change(module: Module, cls: type[Module], attributes: dict[str, object], parameters: list[str]) -> None:
    state, old_cls = vars(module), module.__class__
    old = {name: state[name] for name in attributes if name in state}
    added = [name for name in attributes if name not in state]
    module.__class__ = cls  # which may fail, and then nothing has changed
    state.update(attributes)
    state[_CHANGE] = _Change(old_cls, cls, old, [*added, *parameters])
    module._parameters.update(dict.fromkeys(parameters))


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
            owner = vars(module) if name in vars(module) else module._parameters
            del owner[name]
        vars(module).update(change.old_attributes)


def _calls_ours(layer: Any) -> bool:
    return any(issubclass(type(child), (LayerNorm, RMSNorm)) for child in layer._modules.values())
