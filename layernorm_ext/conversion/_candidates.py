"""Chooses the replacement of a module among the candidates, the layers that its attributes describe."""

from __future__ import annotations

import inspect
import itertools
import math
import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.utils._python_dispatch import _disable_current_modes

from .. import _build_info
from ..modules import LayerNorm, LayerNorm2d, RMSNorm, RMSNorm2d, options_of
from ..modules_fused import GatedLayerNorm, GatedRMSNorm, is_of_parallel_style
from ._comparison import (
    KNOWN_CHILDREN,
    TORCH_REPLACEMENTS,
    Comparison,
    SkippedError,
    first_tensor,
    full_shape,
    has_only_known_children,
    shortened,
    takes_gate,
)
from ._converted import FUNCTIONS, NormSpec, as_sizes, converted_class, is_ours, num_groups

Build = Callable[[Any], LayerNorm | RMSNorm]

REGISTRY: dict[type[Module] | str, Build | None] = {torch.nn.LayerNorm: None, torch.nn.RMSNorm: None}

# Besides registered classes, convert() tries to replace the classes of these packages whose names match _NAME. Remote
# code of transformers is in transformers_modules.
_PACKAGES = re.compile(
    "chronos|clip|diffusers|esm|k_diffusion|kokoro|kornia|lavis|litgpt|open_clip|rfdetr|sam2|segment_anything|"
    "segmentation_models_pytorch|tabpfn|timm|torchao|torchtune|torchvision|transformers|transformers_modules|"
    "ultralytics|vit_pytorch|whisper|x_transformers"
)
_NAME = re.compile("(layer|rms)_?norm", re.IGNORECASE)

# Names of a module's attributes. A class that has none for eps may be based on torch.nn.functional.normalize.
_EPS = ("eps", "variance_epsilon")
_SHAPE = "normalized_shape"
_GROUPS = ("group_size", "n_groups", "num_groups")  # group_size is the width of a group, the others their number

# The devices on which the replacements of modules can run; a module on the meta device gets another one later.
_DEVICES = {"cpu", "meta", "cuda"} if _build_info.with_cuda else {"cpu", "meta"}


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _registered_builds(cls: type) -> list[Build | None]:
    """Return the functions registered for a class, of which the last one applies; None means to try all layers."""
    if cls in REGISTRY:
        return [REGISTRY[cls]]
    name = class_name(cls)
    builds = [None] if _PACKAGES.fullmatch(name.partition(".")[0]) and _NAME.search(cls.__name__) else []
    return [*builds, *(build for key, build in REGISTRY.items() if isinstance(key, str) and fnmatchcase(name, key))]


def _is_normalization(module: Module) -> bool:
    """Return whether to replace or report a module: its class or a base is registered, or its name says so."""
    cls = type(module)
    if is_ours(cls):
        return False
    if issubclass(cls, tuple(key for key in REGISTRY if isinstance(key, type))):
        return True
    if not has_only_known_children(module):  # a block that contains a norm, and is named after it
        return False
    return any(map(_registered_builds, cls.__mro__)) or _NAME.search(cls.__name__) is not None


_MODULE_ATTRIBUTES = frozenset(vars(Module()))


def _comparison_key(module: Module) -> Hashable:
    """Return a key that modules share if they compute the same for all values of their parameters.

    Attributes of other types than _COMPARED_BY_VALUE are compared by identity, because their ``==`` may do anything.
    """
    attributes = [(name, _comparable(value)) for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES]
    # DeepSpeed's ZeRO-3 empties parameters and keeps their shapes in ds_shape.
    parameters = [(name, p.shape, getattr(p, "ds_shape", None), p.device) for name, p in module.named_parameters()]
    buffers = [(name, id(buffer)) for name, buffer in module._buffers.items()]
    children: Iterable[Hashable] = module._modules
    if not has_only_known_children(module):
        children = [(name, id(child)) for name, child in module._modules.items()]
    key: tuple[Any, ...] = (type(module), module.training, _is_parallelized(module), *module._parameters)
    return *key, *buffers, *children, *attributes, *parameters


def _is_parallelized(module: Module) -> bool:
    """Return whether a parallel style of torch.distributed has registered a hook that changes the inputs."""
    return any(map(is_of_parallel_style, module._forward_pre_hooks.values()))


def _comparable(value: object) -> Hashable:
    if isinstance(value, tuple):
        return type(value), *map(_comparable, value)
    return (type(value), value) if type(value) in _COMPARED_BY_VALUE else id(value)


_COMPARED_BY_VALUE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class Choice(NamedTuple):
    """The class that a module should get, and the ``repr`` of this package's layer that computes the same."""

    cls: type[Module]
    description: str


def choose(module: Module, cached: dict[Hashable, Choice | SkippedError]) -> Choice | SkippedError | None:
    """Return the class that a module should get, or the reason why it keeps its own.

    The result is None for a module that is no normalization layer. ``cached`` has the results by comparison key.
    """
    try:
        if not _is_normalization(module):
            return None
        key = _comparison_key(module)
        if key not in cached:
            with (
                _disable_current_modes(),  # of fake tensors, for example
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autocast("cpu", enabled=False),
                torch.random.fork_rng(devices=(), device_type="cpu"),
                warnings.catch_warnings(action="ignore"),  # torch's RMSNorm warns of dtypes without a fused kernel
            ):
                cached[key] = _first_equal_candidate(module)
        return cached[key]
    except _BuildError:
        raise
    except SkippedError as reason:
        cached[key] = reason
        return reason
    except Exception as error:  # foreign code may raise anything
        return SkippedError(shortened(error))


class _BuildError(TypeError):
    """The error of a function given to register_conversion, which convert() passes on."""


def _first_equal_candidate(module: Module) -> Choice:
    """Return the class for a module that computes the same as one of the candidates; otherwise, raise the reason."""
    cls: Any = type(module)
    if any(base.__name__ == "FSDPModule" for base in cls.__mro__):
        raise SkippedError("fully_shard has changed its class; convert the model before it is sharded")
    builds = _registered_builds(cls)
    if not builds:
        raise SkippedError("not registered by layernorm_ext.register_conversion")
    if "forward" in vars(module):
        raise SkippedError("its forward was replaced by another")
    parameters = list(inspect.signature(cls.forward).parameters.values())
    if len(parameters) != 2 and not takes_gate(module):
        raise SkippedError(f"its forward has the parameters {', '.join(each.name for each in parameters)}")
    if takes_gate(module) and _is_parallelized(module):
        raise SkippedError("a parallel style may leave out its gate; convert the model before it is parallelized")
    devices = {parameter.device.type for parameter in module.parameters()} - _DEVICES
    if devices:
        raise SkippedError(f"it is on the device {', '.join(devices)}, for which layernorm_ext was built no kernels")
    if cls not in TORCH_REPLACEMENTS:  # torch's layers have a normalized_shape, even if a tool shards their parameters
        for parameter in module.parameters():
            full_shape(parameter)  # raises an error if it is unknown
    build = builds[-1]
    reasons = []
    for ours in _candidates(module) if build is None else [build(module)]:
        if type(ours) not in FUNCTIONS:
            raise _BuildError(
                f"Expected build to return a LayerNorm, LayerNorm2d, RMSNorm or RMSNorm2d of layernorm_ext for a "
                f"{class_name(cls)}, but got {ours!r}"
            )
        comparison = Comparison(module, ours, _spec(module, ours))
        reason = comparison.difference()
        if reason is None:
            spec = comparison.spec
            becomes_ours = spec.layer_class is TORCH_REPLACEMENTS.get(cls) and not (spec.options or spec.output_dtypes)
            return Choice(spec.layer_class if becomes_ours else converted_class(cls, spec), repr(ours))
        reasons.append(f"not {ours!r}: {reason}")
    raise SkippedError("; ".join(reasons) or "its eps is None, which only an RMSNorm without a bias may have")


def _spec(module: Any, ours: Any) -> NormSpec:
    """Describe how a module computes the same as ``ours``, by the names of its attributes."""

    def name_of(parameter: str) -> str | None:
        name, tensor = first_tensor(module, parameter)
        return None if tensor is None or getattr(ours, parameter, None) is None else name

    shape = getattr(module, _SHAPE, None)
    has_shape = isinstance(shape, (int, tuple, list)) and as_sizes(shape) == ours.normalized_shape
    names = (name for name in _EPS if hasattr(module, name) and getattr(module, name) in (None, ours.eps))
    eps = next(names, None)
    options = options_of(ours)
    groups, number = _groups(module, ours.normalized_shape)
    if number == options.get("num_groups"):  # each call reads the attribute instead
        del options["num_groups"]
    else:
        groups = None
    return NormSpec(
        layer_class=type(ours),
        weight=name_of("weight"),
        bias=name_of("bias"),
        shape=_SHAPE if has_shape else None,
        eps=eps,
        default_eps=ours.eps if eps is None or getattr(module, eps) is None else None,
        groups=groups,
        children=tuple(name for name in KNOWN_CHILDREN if name in module._modules),
        options=options,
    )


def _candidates(module: Any) -> Iterator[Module]:
    """Yield all layers that a module with the common attributes may be."""
    (weight_name, weight), (_, bias) = first_tensor(module, "weight"), first_tensor(module, "bias")
    shape = _shape(module, weight_name, weight)
    rms_eps, eps = _rms_and_layer_norm_eps(module, shape)
    has_gate = takes_gate(module)
    classes: list[tuple[Any, Any, Any, dict[str, Any]]] = []  # normalized size, RMSNorm, LayerNorm, their options
    if has_gate:
        classes += [(shape, GatedRMSNorm, GatedLayerNorm, options) for options in _gate_options(module, shape)]
    elif shape:
        classes.append((shape, RMSNorm, LayerNorm, {}))
        if len(shape) == 1:
            classes.append((shape[0], RMSNorm2d, LayerNorm2d, {}))
    all_rms_eps = [rms_eps]
    if rms_eps is None and type(module) not in TORCH_REPLACEMENTS:  # some layers take float32's eps for all dtypes
        all_rms_eps.append(torch.finfo(torch.float32).eps)
    for size, rms_norm, layer_norm, others in classes:
        for zero_centered in (False,) if weight is None else (False, True):
            options = others | {"elementwise_affine": weight is not None, "zero_centered_weight": zero_centered}
            if bias is None:
                yield from (rms_norm(size, each, device="meta", **options) for each in all_rms_eps)
            if eps is not None:
                yield layer_norm(size, eps, bias=bias is not None, device="meta", **options)
    if bias is None and not module._modules and not has_gate:  # even with a weight, because some class never uses it
        for rms_norm, each in itertools.product((RMSNorm, RMSNorm2d), all_rms_eps):
            layer: Any = rms_norm(1, each, elementwise_affine=False)
            layer.normalized_shape = ()  # any width
            yield layer


def _gate_options(module: Any, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return all options that a gated norm with the common attributes may have."""
    if not shape:
        raise SkippedError("it takes a gate, but has neither a weight nor a normalized_shape")
    if module._modules:
        raise SkippedError(f"it takes a gate and has a child {next(iter(module._modules))}")
    return [
        {"activation": activation, "gate_first": gate_first, "num_groups": _groups(module, shape)[1]}
        for activation, gate_first in itertools.product(("silu", "sigmoid"), (True, False))
    ]


def _groups(module: Module, shape: tuple[int, ...]) -> tuple[str | None, int]:
    """Return the name of the attribute that has the number of groups or their width, and the number."""
    for name in _GROUPS:
        value = getattr(module, name, None)
        if isinstance(value, int) and len(shape) == 1 and value > 0 and shape[0] % value == 0:
            return name, num_groups(module, name, *shape)
    return None, 1


def _shape(module: Any, weight_name: str, weight: torch.Tensor | None) -> tuple[int, ...]:
    """Return the sizes over which a module may normalize, or no sizes if it may take rows of any width."""
    if getattr(module, _SHAPE, None) is not None:
        return as_sizes(getattr(module, _SHAPE))
    if weight is None:
        return ()
    shape = full_shape(weight)
    if weight_name != "weight":  # its shape may be [C, 1, 1]
        shape = tuple(size for size in shape if size != 1) or (1,)
    return shape


def _rms_and_layer_norm_eps(module: Any, shape: tuple[int, ...]) -> tuple[float | None, float | None]:
    """Return the eps that a module has if it is an RMSNorm, and if it is a LayerNorm.

    The first may be None, the default of RMSNorm; if the second is None, the module is no LayerNorm. A module without
    such an attribute may call torch.nn.functional.normalize, or has LayerNorm's default of 1e-5.
    """
    for name in _EPS:
        if hasattr(module, name):
            eps = getattr(module, name)
            if not isinstance(eps, (Real, type(None))):
                raise SkippedError(f"its {name} is of type {type(eps).__name__}")
            return eps, eps  # type: ignore[return-value]
    # torch.nn.functional.normalize divides by max(norm, 1e-12). Division by sqrt(norm^2 + 1e-24) gives the same output
    # and gradient for zero rows, and for rows with a norm of at least 1e-9.
    return 1e-24 / math.prod(shape) if shape else None, 1e-5
