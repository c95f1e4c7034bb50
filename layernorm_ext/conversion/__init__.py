"""Replaces the normalization layers of a model with this package's, and undoes that."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Module, TransformerEncoder, TransformerEncoderLayer

from . import _candidates
from ._candidates import Choice, choose, class_name
from ._comparison import TORCH_REPLACEMENTS, SkippedError, shortened
from ._converted import is_ours

__all__ = ["ConversionReport", "convert", "converted", "register_conversion", "revert"]


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
        lines = [f"{kind}: {name or '(model)'}: {how}" for kind, part in parts.items() for name, how in part.items()]
        return "\n".join([*lines, ", ".join(f"{len(part)} {kind}" for kind, part in parts.items())])


def convert(model: Module) -> ConversionReport:
    r"""Replace the normalization layers of a model with layernorm_ext's, in place.

    A module is replaced if its class is :class:`torch.nn.LayerNorm`, :class:`torch.nn.RMSNorm` or registered, and if it
    computes the same as its replacement. The layers of Hugging Face, also in remote code, diffusers, timm and many
    other packages are registered; :func:`register_conversion` adds others. To compare them, both layers get the same
    random rows and parameters, and changed buffers, in float64 on the CPU or in the widest dtypes that the module
    accepts. Outputs and gradients of size 1 may differ by 1e-5. For every pair of floating dtypes of input and
    parameters that the module accepts, the outputs may differ by a few roundings, and the replacement returns the
    module's output dtype. Equal layers are compared once. Other normalization layers, and layers that raise errors, are
    skipped and reported with the reason.

    The module object stays and its class changes, as in torch's lazy modules. This keeps its parameters, hooks, dtype,
    device, mode, name in the ``state_dict`` and all references to it. Torch's own layers become :class:`LayerNorm` and
    :class:`RMSNorm`. Any other layer becomes a subclass of its own class, which still finds it by ``isinstance``: its
    ``forward`` takes the same arguments and reads the original's attributes in each call, so that later changes count.

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
    cached: dict[Hashable, Choice | SkippedError] = {}  # equal layers are compared once
    choices = [choose(module, cached) for _, module in modules]
    # The first class changes after the last comparison, so that an error in one leaves the model as it is.
    for (name, module), choice in zip(modules, choices, strict=True):
        if choice is not None:
            cls = class_name(type(module))
            result = _become(module, choice) if isinstance(choice, Choice) else choice
            if isinstance(result, Choice):
                report.replaced[name] = f"{cls} by {result.description}"
            else:
                report.skipped[name] = f"{cls}: {result}"
    for name, module in modules:
        _disable_fast_path(report, name, module)
    return report


def revert(model: Module) -> None:
    """Undo :func:`convert`: restore the classes of all modules, and the fast paths.

    Attributes and parameters that have changed since then keep their values.

    Args:
        model: A converted model, a part of one, or a copy.

    Raises:
        TypeError: ``model`` is no module.
        RuntimeError: The class or the forward of a module was changed again after its conversion, as parametrizations,
            FSDP and hooks of accelerate do. In this case nothing is undone.
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


def register_conversion(cls: type[Module] | str, build: _candidates.Build | None = None) -> None:
    """Let :func:`convert` replace the modules of another class, if they compute the same as their replacements.

    Args:
        cls: A class whose ``forward`` takes only the input, or also a ``gate``. Or a class name
            ``"package.module.Class"``, in which ``*`` matches anything. Subclasses are not included.
        build: A function that takes a module of the class and returns the ``LayerNorm``, ``LayerNorm2d``, ``RMSNorm``
            or ``RMSNorm2d``, with a gate the ``GatedLayerNorm`` or ``GatedRMSNorm``, that computes the same; no
            subclass. The values of its parameters are not used, so the device can be "meta". If ``None``, all layers
            are tried, also with a zero-centered weight. The parameters of the module, and the attributes that these
            layers need, may have the names that ``docs/convert.md`` lists.

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
        >>> register_conversion(MyNorm, lambda norm: layernorm_ext.RMSNorm(norm.weight.shape, eps=1e-6, device="meta"))
        >>> model = MyNorm(8)
        >>> len(convert(model).replaced), model
        (1, MyNorm(converted to RMSNorm))
    """
    is_name = isinstance(cls, str) and ("." in cls or "*" in cls)
    if not is_name and not (isinstance(cls, type) and issubclass(cls, Module)):
        expected = "a subclass of torch.nn.Module or a name such as 'package.module.Class'"
        raise TypeError(f"Expected cls to be {expected}, but got cls={cls!r}")
    if build is not None and (isinstance(build, Module) or not callable(build)):
        raise TypeError(f"Expected build to be a function or None, but got build={build!r}")
    _candidates.REGISTRY[cls] = build


def _named_modules(model: Module) -> list[tuple[str, Module]]:
    if not isinstance(model, Module):
        raise TypeError(f"Expected model to be a torch.nn.Module, but got model of type {type(model).__name__}")
    return list(model.named_modules())


# Changes to a module


# Names of the attributes that convert() sets. Copies of a module have them, too.
_ORIGINAL = "_converted_from"  # the original class; set on a layer that was torch's, and on the new class of any other
_FAST_PATH = "_fast_path"  # the name and the value of the encoder's attribute that enabled its fast path


def _is_changed(module: Module) -> bool:
    """Return whether convert() has changed the class of a module, or disabled its fast path."""
    return _FAST_PATH in vars(module) or _original(module) is not None


def _original(module: Module) -> type[Module] | None:
    """Return the class that a module had before convert(), or None if convert() has not changed it."""
    return vars(module).get(_ORIGINAL, getattr(type(module), _ORIGINAL, None))


def _converted_class(module: Module) -> type[Module] | None:
    """Return the class that convert() gave a module; parametrizations and FSDP derive another one from it."""
    if _ORIGINAL in vars(module):
        return TORCH_REPLACEMENTS[vars(module)[_ORIGINAL]]
    return next((cls for cls in type(module).__mro__ if _ORIGINAL in vars(cls)), None)


def _become(module: Module, choice: Choice) -> Choice | SkippedError:
    """Change the class of a module, or return why it cannot change."""
    original = type(module)
    try:
        module.__class__ = choice.cls
    except Exception as error:  # a class may refuse to change
        return SkippedError(f"its class cannot change: {shortened(error)}")
    if choice.cls in TORCH_REPLACEMENTS.values():
        vars(module)[_ORIGINAL] = original
    return choice


def _disable_fast_path(report: ConversionReport, name: str, module: Any) -> None:
    """Disable the fast path of a transformer encoder or of its layer, which would not call replaced norms."""
    cls, attribute, off = type(module), "", None
    try:
        if issubclass(cls, TransformerEncoderLayer) and _calls_ours(module):
            attribute, off = "activation_relu_or_gelu", 0
        if issubclass(cls, TransformerEncoder) and any(map(_calls_ours, module.layers)):
            attribute, off = "use_nested_tensor", False
        value = getattr(module, attribute) if attribute else None
        if value:
            setattr(module, attribute, off)
            vars(module)[_FAST_PATH] = attribute, value
            report.fast_paths[name] = f"{class_name(cls)}.{attribute} = {off}"
    except Exception as error:  # a subclass may raise anything
        report.skipped[name] = f"{class_name(cls)}: {shortened(error)}"


def _restore(modules: Iterable[tuple[str, Module]]) -> None:
    modules = list(modules)
    for name, module in modules:
        expected = _converted_class(module)
        if expected is not None and type(module) is not expected:
            raise RuntimeError(
                f"Expected {name or 'the model'} to be a {class_name(expected)}, as convert has left it, but got a "
                f"{class_name(type(module))}; undo that change first"
            )
        if expected is not None and _has_foreign_forward(module):
            raise RuntimeError(
                f"Expected {name or 'the model'} to have the forward of its class, as convert has left it, but got "
                f"another, as hooks of accelerate set it; undo that change first"
            )
    for _, module in modules:
        original = _original(module)
        if original is not None:
            module.__class__ = original
            vars(module).pop(_ORIGINAL, None)
            # accelerate leaves the converted class's forward on the module when it removes its hooks.
            vars(module).pop("forward", None)
        attribute, value = vars(module).pop(_FAST_PATH, ("", None))
        if attribute and not getattr(module, attribute):  # otherwise the user has enabled it again
            setattr(module, attribute, value)


def _has_foreign_forward(module: Module) -> bool:
    """Return whether a module has a forward of its own that is not the method of its class."""
    forward: Any = vars(module).get("forward")
    is_of_class = getattr(forward, "__self__", None) is module and forward.__func__ is type(module).forward
    return forward is not None and not is_of_class


def _calls_ours(layer: Any) -> bool:
    return any(is_ours(type(child)) for child in layer._modules.values())
