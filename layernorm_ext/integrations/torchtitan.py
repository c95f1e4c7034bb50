"""Overrides that build this package's norms in torchtitan.

Name them on the command line, optionally with options::

    --override.imports layernorm_ext.integrations.torchtitan.rms_norm,layernorm_ext.integrations.torchtitan.layer_norm
    --override.imports 'layernorm_ext.integrations.torchtitan.layer_norm={"memory_efficient": true}'
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .. import modules
from .._compatibility import require

__all__ = ["LayerNorm", "RMSNorm", "layer_norm", "rms_norm"]

require("torchtitan", "0.3")
_config: Any = import_module("torchtitan.config")
_modules: Any = import_module("torchtitan.models.common.nn_modules")
_Module: Any = import_module("torchtitan.protocols.module").Module


class LayerNorm(modules.LayerNorm, _Module):  # type: ignore[misc]
    """:class:`layernorm_ext.LayerNorm` with a config."""

    @dataclass(kw_only=True, slots=True)
    class Config(_modules.LayerNorm.Config):  # type: ignore[misc]
        """The config of torchtitan's LayerNorm, with an option of this package."""

        memory_efficient: bool = False

    def __init__(self, config: Config):
        """Create the parameters."""
        super().__init__(
            config.normalized_shape,
            config.eps,
            config.elementwise_affine,
            memory_efficient=config.memory_efficient,
        )


class RMSNorm(modules.RMSNorm, _Module):  # type: ignore[misc]
    """:class:`layernorm_ext.RMSNorm` with a config."""

    @dataclass(kw_only=True, slots=True)
    class Config(_modules.RMSNorm.Config):  # type: ignore[misc]
        """The config of torchtitan's RMSNorm."""

    def __init__(self, config: Config):
        """Create the weight."""
        super().__init__(config.normalized_shape, config.eps, config.elementwise_affine)


# With `exact`, an override does not apply to subclasses of its target, which are configs of other formulas.


@_config.override(target=_modules.LayerNorm.Config, description="LayerNorm of layernorm_ext", exact=True)  # type: ignore[untyped-decorator]
def layer_norm(config: Any, **options: Any) -> LayerNorm.Config:
    """Return the config of :class:`LayerNorm` with the values of torchtitan's, and the options."""
    return _config.derive(config, LayerNorm.Config, **options)


@_config.override(target=_modules.RMSNorm.Config, description="RMSNorm of layernorm_ext", exact=True)  # type: ignore[untyped-decorator]
def rms_norm(config: Any, **options: Any) -> RMSNorm.Config:
    """Return the config of :class:`RMSNorm` with the values of torchtitan's, and the options."""
    return _config.derive(config, RMSNorm.Config, **options)
