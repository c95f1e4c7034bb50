"""The adaptive blocks of converted models, which scale and shift the result of a norm by a projected condition.

Each class has the forward of the diffusers class of its name, with the norm and its modulation in one call. convert()
tries the classes whose forward has the same signature. The blocks keep their children, of which NORMS are norms.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from . import _calls, tracing
from ._replacements import OutputDtypes, public_class
from .functional import ada_layer_norm, ada_rms_norm
from .modules import LayerNorm, RMSNorm


def _modulate(norm: Any, x: Tensor, scale: Tensor | None, shift: Tensor | None = None) -> Tensor:
    """Return ``norm(x) * (1 + scale) + shift``, in one call if possible."""
    if _must_be_called(norm, x):
        return _scale_and_shift(norm(x), scale, shift)
    rms = isinstance(norm, RMSNorm)
    return _modulated_norm(
        x,
        scale,
        shift,
        norm.weight,
        None if rms else norm.bias,
        tuple(norm.normalized_shape),
        norm.eps,
        rms,
        norm.zero_centered_weight,
        getattr(norm, "_output_dtypes", {}),
    )


def _scale_and_shift(y: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    y = y if scale is None else y * (1 + scale)
    return y if shift is None else y + shift


def _must_be_called(norm: Any, x: Tensor) -> bool:
    """Return whether others observe or have changed a norm, or the input is nested."""
    is_nested = isinstance(x, Tensor) and x.is_nested  # a tracer of torch.fx has no Tensor
    return is_nested or not is_plain_norm(norm) or "forward" in vars(norm) or _has_hooks(norm)


def is_plain_norm(norm: Any) -> bool:
    """Return whether an object is a module with the forward of LayerNorm or RMSNorm, perhaps with another dtype."""
    return public_class(norm) in (LayerNorm, RMSNorm) and not norm._modules


# An attribute of norms in the comparison of blocks, which calls no hooks.
IS_COMPARED = "_is_compared"


def _has_hooks(norm: Module) -> bool:
    own = norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
    return bool(own or (IS_COMPARED not in vars(norm) and torch.nn.modules.module._has_any_global_hook()))


@torch.fx.wrap  # symbolic tracing knows neither dtypes nor shapes
def _modulated_norm(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: tuple[int, ...],
    eps: float | None,
    rms: bool,
    zero_centered_weight: bool,
    output_dtypes: OutputDtypes,
) -> Tensor:
    """Compute the composition with its broadcasting and its output dtype, in the widest dtype of all.

    ``scale`` and ``shift`` have the same sizes, as chunks of one tensor have.
    """
    normalized_shape = normalized_shape or x.shape[-1:]
    eps = _calls.rms_eps(x, eps)
    dtype = output_dtypes.get((x.dtype, None if weight is None else weight.dtype), x.dtype)
    for each in (scale, shift):
        if each is not None:
            dtype = torch.promote_types(dtype, each.dtype)
            sizes = tracing.constant_sizes(x.shape)
            if tuple(sizes[-len(normalized_shape) :]) == normalized_shape and not _broadcasts_to(sizes, each):
                x = x.expand(torch.broadcast_shapes(x.shape, each.shape))
    x = x.to(torch.promote_types(x.dtype, dtype))
    scale, shift = (_insert_dims(each, x, normalized_shape) for each in (scale, shift))
    wide = torch.promote_types(x.dtype, torch.float32)  # 16-bit products would round more than the composition does
    has_parameters = weight is not None or bias is not None
    gain = 1 + scale.to(wide) if has_parameters and scale is not None else 1
    if bias is not None:
        bias = bias.to(wide) * gain
        shift = bias if shift is None else bias + shift
    if weight is None:
        y = (ada_rms_norm if rms else ada_layer_norm)(x, normalized_shape, scale, shift, eps)
    else:
        weight = (weight.to(wide) + 1 if zero_centered_weight else weight.to(wide)) * gain
        y = _calls.norm(x, None, normalized_shape, weight, shift, eps, rms=rms)[0]
    return y.to(dtype)


def _broadcasts_to(sizes: Sequence[int], modulation: Tensor) -> bool:
    pairs = zip(tracing.constant_sizes(modulation.shape)[::-1], sizes[::-1], strict=False)
    return modulation.dim() <= len(sizes) and all(n in (1, m) for n, m in pairs)


def _insert_dims(modulation: Tensor | None, x: Tensor, normalized_shape: tuple[int, ...]) -> Tensor | None:
    """Insert the first dimensions that a scale or a shift lacks, unless all rows share it, and expand all columns."""
    if modulation is None:
        return None
    batch_dims = modulation.dim() - len(normalized_shape)
    if batch_dims <= 0:
        return modulation.expand(normalized_shape)
    batch_sizes = (1,) * (x.dim() - modulation.dim()) + modulation.shape[:batch_dims]
    return modulation.expand(*batch_sizes, *normalized_shape)


class Block(Module):
    """A block with children of any class; only those of NORMS are replaced."""

    NORMS: tuple[str, ...] = ("norm",)
    emb: Any
    linear: Any
    norm: Any
    silu: Any


class AdaLayerNorm(Block):
    chunk_dim: int

    def forward(self, x: Tensor, timestep: Tensor | None = None, temb: Tensor | None = None) -> Tensor:
        if self.emb is not None:
            temb = self.emb(timestep)
        temb = self.linear(self.silu(temb))
        if self.chunk_dim == 1:
            shift, scale = temb.chunk(2, dim=1)
            return _modulate(self.norm, x, scale[:, None], shift[:, None])
        scale, shift = temb.chunk(2, dim=0)
        return _modulate(self.norm, x, scale, shift)


class AdaLayerNormZero(Block):
    def forward(
        self,
        x: Tensor,
        timestep: Tensor | None = None,
        class_labels: Tensor | None = None,
        hidden_dtype: torch.dtype | None = None,
        emb: Any = None,
    ) -> tuple[Tensor, ...]:
        if self.emb is not None:
            emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.linear(self.silu(emb)).chunk(6, dim=1)
        return _modulate(self.norm, x, scale[:, None], shift[:, None]), gate, mlp_shift, mlp_scale, mlp_gate


class ChromaAdaLayerNormZeroPruned(Block):
    def forward(
        self,
        x: Tensor,
        timestep: Tensor | None = None,
        class_labels: Tensor | None = None,
        hidden_dtype: torch.dtype | None = None,
        emb: Any = None,
    ) -> tuple[Tensor, ...]:
        if self.emb is not None:
            emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = emb.flatten(1, 2).chunk(6, dim=1)
        return _modulate(self.norm, x, scale[:, None], shift[:, None]), gate, mlp_shift, mlp_scale, mlp_gate


class AdaLayerNormZeroSingle(Block):
    def forward(self, x: Tensor, emb: Any = None) -> tuple[Tensor, ...]:
        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        return _modulate(self.norm, x, scale[:, None], shift[:, None]), gate


class ChromaAdaLayerNormZeroSinglePruned(Block):
    def forward(self, x: Tensor, emb: Any = None) -> tuple[Tensor, ...]:
        shift, scale, gate = emb.flatten(1, 2).chunk(3, dim=1)
        return _modulate(self.norm, x, scale[:, None], shift[:, None]), gate


class LuminaRMSNormZero(Block):
    def forward(self, x: Tensor, emb: Any = None) -> tuple[Tensor, ...]:
        scale, gate, mlp_scale, mlp_gate = self.linear(self.silu(emb)).chunk(4, dim=1)
        return _modulate(self.norm, x, scale[:, None]), gate, mlp_scale, mlp_gate


class MochiRMSNormZero(Block):
    def forward(self, hidden_states: Tensor, emb: Tensor) -> tuple[Tensor, ...]:
        scale, gate, mlp_scale, mlp_gate = self.linear(self.silu(emb)).chunk(4, dim=1)
        x, scale = hidden_states, scale[:, None]
        if _must_be_called(self.norm, x):  # in float32, as before
            x, scale = x.to(torch.float32), scale.to(torch.float32)
        y = _modulate(self.norm, x, scale).to(hidden_states.dtype)
        return y, gate, mlp_scale, mlp_gate


class SD35AdaLayerNormZeroX(Block):
    def forward(self, hidden_states: Tensor, emb: Any = None) -> tuple[Tensor, ...]:
        chunks = self.linear(self.silu(emb)).chunk(9, dim=1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate, shift2, scale2, gate2 = chunks
        if _must_be_called(self.norm, hidden_states):  # once, as before
            y = self.norm(hidden_states)
            first = _scale_and_shift(y, scale[:, None], shift[:, None])
            second = _scale_and_shift(y, scale2[:, None], shift2[:, None])
        else:
            first = _modulate(self.norm, hidden_states, scale[:, None], shift[:, None])
            second = _modulate(self.norm, hidden_states, scale2[:, None], shift2[:, None])
        return first, gate, mlp_shift, mlp_scale, mlp_gate, second, gate2


class Qwen2_5_OmniAdaLayerNormZero(Block):
    def forward(self, hidden_states: Tensor, emb: Any = None) -> tuple[Tensor, ...]:
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.linear(self.silu(emb)).chunk(6, dim=1)
        y = _modulate(self.norm, hidden_states, scale[:, None], shift[:, None])
        return y, gate, mlp_shift, mlp_scale, mlp_gate


class Qwen2_5_OmniAdaLayerNormZero_Final(Block):
    def forward(self, hidden_states: Tensor, emb: Tensor) -> Tensor:
        scale, shift = self.linear(self.silu(emb)).chunk(2, dim=1)
        return _modulate(self.norm, hidden_states, scale[:, None], shift[:, None])


class AdaLayerNormContinuous(Block):
    def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        scale, shift = self.linear(self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
        return _modulate(self.norm, x, scale[:, None], shift[:, None])


class CogView4AdaLayerNormContinuous(Block):
    """Also GLM-Image's."""

    def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        scale, shift = self.linear(conditioning_embedding.to(x.dtype)).chunk(2, dim=1)
        return _modulate(self.norm, x, scale[:, None], shift[:, None])


class LuminaLayerNormContinuous(Block):
    linear_1: Any
    linear_2: Any

    def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        scale = self.linear_1(self.silu(conditioning_embedding).to(x.dtype))
        x = _modulate(self.norm, x, scale[:, None])
        return x if self.linear_2 is None else self.linear_2(x)


class ChromaAdaLayerNormContinuousPruned(Block):
    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        shift, scale = emb.flatten(1, 2).to(x.dtype).chunk(2, dim=1)
        return _modulate(self.norm, x, scale[:, None], shift[:, None])


class AdaLayerNormShift(Block):
    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        shift = self.linear(self.silu(emb.to(torch.float32)).to(emb.dtype))
        return _modulate(self.norm, x, None, shift[:, None])


class Flux3AdaLayerNorm(Block):
    act_fn: Any

    def forward(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
        scale, shift = self.linear(self.act_fn(temb)).chunk(2, dim=-1)
        return _modulate(self.norm, hidden_states, scale, shift)


class AudioDiTAdaLayerNormZeroFinal(Block):
    def forward(self, hidden_states: Tensor, embedding: Tensor) -> Tensor:
        scale, shift = self.linear(self.silu(embedding)).chunk(2, dim=-1)
        if scale.ndim == 2:
            scale, shift = scale[:, None], shift[:, None]
        return _modulate(self.norm, hidden_states, scale, shift)


class CogVideoXLayerNormZero(Block):
    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor) -> tuple[Tensor, ...]:
        shift, scale, gate, c_shift, c_scale, c_gate = self.linear(self.silu(temb)).chunk(6, dim=1)
        hidden_states = _modulate(self.norm, hidden_states, scale[:, None], shift[:, None])
        encoder_hidden_states = _modulate(self.norm, encoder_hidden_states, c_scale[:, None], c_shift[:, None])
        return hidden_states, encoder_hidden_states, gate[:, None], c_gate[:, None]


class EasyAnimateLayerNormZero(Block):
    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor) -> tuple[Tensor, ...]:
        shift, scale, gate, c_shift, c_scale, c_gate = self.linear(self.silu(temb)).chunk(6, dim=1)
        hidden_states = _modulate(self.norm, hidden_states, scale[:, None], shift[:, None])
        encoder_hidden_states = _modulate(self.norm, encoder_hidden_states, c_scale[:, None], c_shift[:, None])
        return hidden_states, encoder_hidden_states, gate, c_gate


class CogView3PlusAdaLayerNormZeroTextImage(Block):
    NORMS = "norm_x", "norm_c"
    norm_x: Any
    norm_c: Any

    def forward(self, x: Tensor, context: Tensor, emb: Any = None) -> tuple[Tensor, ...]:
        chunks = self.linear(self.silu(emb)).chunk(12, dim=1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = chunks[:6]
        x = _modulate(self.norm_x, x, scale[:, None], shift[:, None])
        c_shift, c_scale, c_gate, c_mlp_shift, c_mlp_scale, c_mlp_gate = chunks[6:]
        context = _modulate(self.norm_c, context, c_scale[:, None], c_shift[:, None])
        return x, gate, mlp_shift, mlp_scale, mlp_gate, context, c_gate, c_mlp_shift, c_mlp_scale, c_mlp_gate


class CogView4AdaLayerNormZero(Block):
    """Also GLM-Image's."""

    NORMS = "norm", "norm_context"
    norm_context: Any

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor) -> tuple[Tensor, ...]:
        chunks = self.linear(temb).chunk(12, dim=1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = chunks[::2]
        x = _modulate(self.norm, hidden_states, scale[:, None], shift[:, None])
        c_shift, c_scale, c_gate, c_mlp_shift, c_mlp_scale, c_mlp_gate = chunks[1::2]
        context = _modulate(self.norm_context, encoder_hidden_states, c_scale[:, None], c_shift[:, None])
        context = context.to(x.dtype)  # the original rounds both norms to the dtype of hidden_states
        return x, gate, mlp_shift, mlp_scale, mlp_gate, context, c_gate, c_mlp_shift, c_mlp_scale, c_mlp_gate


class CosmosAdaLayerNorm(Block):
    activation: Any
    embedding_dim: int
    linear_1: Any
    linear_2: Any

    def forward(self, hidden_states: Tensor, embedded_timestep: Tensor, temb: Tensor | None = None) -> Tensor:
        modulation = self.linear_2(self.linear_1(self.activation(embedded_timestep)))
        if temb is not None:
            modulation = modulation + temb[..., : 2 * self.embedding_dim]
        if modulation.ndim == 2:
            modulation = modulation[:, None]
        shift, scale = modulation.chunk(2, dim=-1)
        return _modulate(self.norm, hidden_states, scale, shift)


class CosmosAdaLayerNormZero(Block):
    activation: Any
    linear_1: Any
    linear_2: Any

    def forward(
        self, hidden_states: Tensor, embedded_timestep: Tensor, temb: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        modulation = self.linear_2(self.linear_1(self.activation(embedded_timestep)))
        if temb is not None:
            modulation = modulation + temb
        if modulation.ndim == 2:
            modulation = modulation[:, None]
        shift, scale, gate = modulation.chunk(3, dim=-1)
        return _modulate(self.norm, hidden_states, scale, shift), gate


def _signature(cls: type) -> list[tuple[object, ...]]:
    parameters = inspect.signature(cls.forward).parameters.values()  # type: ignore[attr-defined]
    return [(each.name, each.kind, each.default) for each in parameters]


_FORMS = [(cls, _signature(cls)) for cls in Block.__subclasses__()]


def forms(cls: type) -> list[type[Block]]:
    """Return the classes that may be forms of a block's class."""
    signature = _signature(cls)
    return [form for form, other in _FORMS if signature == other]
