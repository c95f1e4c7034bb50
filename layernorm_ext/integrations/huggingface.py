"""This package's kernels for Hugging Face's ``kernels``, which replaces the ``forward`` of decorated layers.

After :func:`register`, ``kernels.kernelize`` and ``use_kernels=True`` of transformers run this package's kernels on
CPUs and, if it was built with CUDA, on GPUs, in all modes, ``torch.compile`` included.

========================  ======================================================================
name of the layer         classes
========================  ======================================================================
``RMSNorm``               the RMSNorms that transformers decorates, which are four of five
``RMSNormZeroCentered``   ten classes that multiply by ``weight + 1``, such as Gemma's
``RMSNormGated``          the RMSNorms that multiply the output by an activated gate, such as Qwen3-Next's
``RMSNormGateFirst``      five classes that multiply the input by an activated gate, such as Mamba-2's
``LayerNorm``             ``torch.nn.LayerNorm``, after ``kernels.replace_kernel_forward_from_hub``
========================  ======================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .. import _build_info
from .._compatibility import require
from ..functional import gated_rms_norm, layer_norm, rms_norm

__all__ = ["register"]

kernels = require("kernels", "0.17")


def register() -> None:
    """Map the layers of the table above to this package's kernels.

    If transformers is installed, its own mapping, which ``use_kernels=True`` registers, is changed in the same way, and
    its RMSNorms that no decorator names get the name ``RMSNormZeroCentered``, such as Gemma's, or ``RMSNormGateFirst``,
    such as Mamba-2's. Mappings for other layers and devices stay in force.

    Raises:
        ImportError: transformers is older than 5.16, or needs another version of ``kernels``.
    """
    devices = ("cpu", "cuda") if _build_info.with_cuda else ("cpu",)
    mapping = {name: dict.fromkeys(devices, _Repository(layer)) for name, layer in _LAYERS.items()}
    if find_spec("transformers"):
        _register_with_transformers(mapping)
    kernels.register_kernel_mapping(mapping)


def _register_with_transformers(mapping: dict[str, dict[str, _Repository]]) -> None:
    require("transformers", "5.16")
    import_utils = import_module("transformers.utils.import_utils")
    if not import_utils.is_kernels_available():
        raise ImportError(
            f"The installed transformers needs kernels {import_utils.KERNELS_MIN_VERSION} or newer, before "
            f"{import_utils.KERNELS_MAX_VERSION}, but kernels {kernels.__version__} is installed"
        )
    hub_kernels = import_module("transformers.integrations.hub_kernels")
    classes = [
        (getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name), layer)
        for layer, names in _UNDECORATED.items()
        for model, name in names.items()
        if find_spec(f"transformers.models.{model}")  # older versions have fewer models
    ]
    theirs = hub_kernels.get_kernel_mapping_transformers()
    for name, repositories in mapping.items():
        theirs.setdefault(name, {}).update(repositories)
    for cls, layer in classes:
        # The replacement also applies to subclasses, which may have another formula.
        kernels.replace_kernel_forward_from_hub(cls, layer, condition=lambda module, cls=cls: type(module) is cls)


# Models of transformers, and their RMSNorms that are zero-centered and not decorated.
_ZERO_CENTERED = {
    "gemma": "GemmaRMSNorm",
    "gemma2": "Gemma2RMSNorm",
    "gemma3": "Gemma3RMSNorm",
    "minimax_m3_vl": "MiniMaxM3VLRMSNorm",
    "qwen3_next": "Qwen3NextRMSNorm",
    "recurrent_gemma": "RecurrentGemmaRMSNorm",
    "step3p7": "Step3p7RMSNorm",
    "t5gemma": "T5GemmaRMSNorm",
    "t5gemma2": "T5Gemma2RMSNorm",
    "vaultgemma": "VaultGemmaRMSNorm",
}

# The classes that multiply the input by the gate before the norm. Some normalize groups.
_GATE_FIRST = {
    "bamba": "BambaRMSNormGated",
    "granitemoehybrid": "GraniteMoeHybridRMSNormGated",
    "mamba2": "MambaRMSNormGated",
    "nemotron_h": "NemotronHRMSNormGated",
    "zamba2": "Zamba2RMSNormGated",
}

_UNDECORATED = {"RMSNormZeroCentered": _ZERO_CENTERED, "RMSNormGateFirst": _GATE_FIRST}


# The layers. ``kernels`` binds their ``forward`` to the modules that it replaces, and allows no further methods.


class _RMSNorm(torch.nn.Module):
    has_backward = can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _rms_norm(self, hidden_states, zero_centered_weight=False)


class _RMSNormZeroCentered(torch.nn.Module):
    has_backward = can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(self, x, zero_centered_weight=True)


class _LayerNorm(torch.nn.Module):
    has_backward = can_torch_compile = True
    normalized_shape: Any
    weight: Any
    bias: Any
    eps: Any

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class _RMSNormGated(torch.nn.Module):
    has_backward = can_torch_compile = True
    activation: Any

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is None:  # a default of some classes, with which their own forward fails
            raise TypeError(f"Expected gate to be a Tensor for {type(self).__name__}, but got gate=None")
        return _rms_norm(self, hidden_states, gate, activation=self.activation)


class _RMSNormGateFirst(torch.nn.Module):
    has_backward = can_torch_compile = True

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return _rms_norm(self, hidden_states, gate, gate_first=True)


_LAYERS = {
    "RMSNorm": _RMSNorm,
    "RMSNormZeroCentered": _RMSNormZeroCentered,
    "LayerNorm": _LayerNorm,
    "RMSNormGated": _RMSNormGated,
    "RMSNormGateFirst": _RMSNormGateFirst,
}


def _rms_norm(module: Any, x: Tensor, *gate: Tensor | None, **options: Any) -> Tensor:
    """Compute what the class's own ``forward`` computes, in the dtype that it returns."""
    weight = module.weight
    shape = module.normalized_shape if weight is None else weight.shape
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    dtype = x.dtype
    # Some classes return the input's dtype, others the wider one: call their own forward with an input of zero rows.
    if weight is not None and weight.dtype != dtype:
        empty = x.new_empty(0, *shape)
        dtype = type(module).forward(module, empty, *(empty for _ in gate)).dtype
        x = x.to(torch.promote_types(x.dtype, dtype))
    if not gate:
        return rms_norm(x, shape, weight, eps, **options).to(dtype)
    num_groups = 1
    if hasattr(module, "group_size"):
        num_groups, remainder = divmod(shape[-1], module.group_size)
        if remainder:
            raise ValueError(
                f"Expected group_size to divide the width, but got group_size={module.group_size} and a weight of "
                f"shape {list(shape)}"
            )
    return gated_rms_norm(x, gate[0], shape, weight, eps, num_groups=num_groups, **options).to(dtype)


@dataclass(frozen=True)
class _Repository:
    """The object from which ``kernels`` loads a layer."""

    layer: type[torch.nn.Module]

    def load(self) -> type[torch.nn.Module]:
        return self.layer
