"""Counterparts of the public functions that torch.jit.script compiles in their place.

TorchScript supports neither keyword-only arguments nor ``__torch_function__``.
"""

import torch
from torch import Tensor


def layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered_weight: bool = False,
    memory_efficient: bool = False,
) -> Tensor:
    """Compute :func:`layernorm_ext.layer_norm`."""
    return torch.ops.layernorm.forward(
        input,
        normalized_shape,
        weight,
        bias,
        eps,
        zero_centered_weight=zero_centered_weight,
        memory_efficient=memory_efficient,
    )[0]


def rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    zero_centered_weight: bool = False,
) -> Tensor:
    """Compute :func:`layernorm_ext.rms_norm`."""
    return torch.ops.layernorm.forward(
        input,
        normalized_shape,
        weight,
        None,
        rms_eps(input, eps),
        rms=True,
        zero_centered_weight=zero_centered_weight,
    )[0]


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`layernorm_ext.add_layer_norm`."""
    return _add_norm(input, residual, normalized_shape, weight, bias, eps, False, zero_centered_weight, False, inplace)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`layernorm_ext.add_rms_norm`."""
    eps = rms_eps(input, eps)
    return _add_norm(input, residual, normalized_shape, weight, None, eps, True, zero_centered_weight, False, inplace)


def _add_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    zero_centered_weight: bool,
    preserve_layout: bool,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    if inplace:
        output = torch.ops.layernorm.forward_(
            input,
            residual,
            normalized_shape,
            weight,
            bias,
            eps,
            rms=rms,
            zero_centered_weight=zero_centered_weight,
            preserve_layout=preserve_layout,
        )[0]
        return output, residual
    results = torch.ops.layernorm.forward(
        input,
        residual,
        normalized_shape,
        weight,
        bias,
        eps,
        rms=rms,
        zero_centered_weight=zero_centered_weight,
        preserve_layout=preserve_layout,
    )
    return results[0], results[1]


def layer_norm_2d(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_weight: bool = False,
    memory_efficient: bool = False,
) -> Tensor:
    """Compute :func:`layernorm_ext.layer_norm_2d`."""
    return _norm_2d(input, weight, bias, eps, False, zero_centered_weight, memory_efficient, False)


def rms_norm_2d(
    input: Tensor, weight: Tensor | None = None, eps: float | None = None, zero_centered_weight: bool = False
) -> Tensor:
    """Compute :func:`layernorm_ext.rms_norm_2d`."""
    return _norm_2d(input, weight, None, rms_eps(input, eps), True, zero_centered_weight, False, False)


def add_layer_norm_2d(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`layernorm_ext.add_layer_norm_2d`."""
    return _add_norm_2d(input, residual, weight, bias, eps, False, zero_centered_weight, inplace)


def add_rms_norm_2d(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`layernorm_ext.add_rms_norm_2d`."""
    return _add_norm_2d(input, residual, weight, None, rms_eps(input, eps), True, zero_centered_weight, inplace)


def ada_layer_norm_2d(
    input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Compute :func:`layernorm_ext.ada_layer_norm_2d`."""
    return _norm_2d(input, scale, shift, eps, False, True, False, True)


def ada_rms_norm_2d(
    input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Compute :func:`layernorm_ext.ada_rms_norm_2d`."""
    return _norm_2d(input, scale, shift, eps, True, True, False, True)


def _norm_2d(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    zero_centered_weight: bool,
    memory_efficient: bool,
    adaptive: bool,
) -> Tensor:
    input = torch.ops.layernorm.check_images(input, None, weight, bias, adaptive)
    output = torch.ops.layernorm.forward(
        input.movedim(1, -1),
        [input.size(1)],
        channels_last(weight, input.dim()),
        channels_last(bias, input.dim()),
        eps,
        rms=rms,
        zero_centered_weight=zero_centered_weight,
        memory_efficient=memory_efficient,
        preserve_layout=True,
    )[0]
    return output.movedim(-1, 1)


def _add_norm_2d(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    zero_centered_weight: bool,
    inplace: bool,
) -> tuple[Tensor, Tensor]:
    input = torch.ops.layernorm.check_images(input, residual, weight, bias)
    output, total = _add_norm(
        input.movedim(1, -1),
        residual.movedim(1, -1),
        [input.size(1)],
        channels_last(weight, input.dim()),
        channels_last(bias, input.dim()),
        eps,
        rms,
        zero_centered_weight,
        True,
        inplace,
    )
    return output.movedim(-1, 1), residual if inplace else total.movedim(-1, 1)


def channels_last(parameter: Tensor | None, dims: int) -> Tensor | None:
    """Move the channels of a parameter of images last; a parameter ``[N, C]`` lacks the last of ``dims`` dimensions."""
    if parameter is None or parameter.dim() == 1:
        return parameter
    while parameter.dim() < dims:
        parameter = parameter.unsqueeze(-1)
    return parameter.movedim(1, dims - 1)  # torch's older ONNX exporter does not support -1


def rms_eps(input: Tensor, eps: float | None) -> float:
    """Return eps, by default torch.finfo(dtype).eps of the accumulation dtype, as in torch."""
    if eps is None:
        return 2.0**-52 if input.dtype == torch.float64 else 2.0**-23
    return eps
