"""Counterparts of the public functions of the same names, which torch.jit.script compiles in their place.

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
    return _norm(input, None, normalized_shape, weight, bias, eps, False, zero_centered_weight, memory_efficient)[0]


def rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    zero_centered_weight: bool = False,
) -> Tensor:
    return _norm(input, None, normalized_shape, weight, None, rms_eps(input, eps), True, zero_centered_weight)[0]


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
    return _norm(input, residual, normalized_shape, weight, bias, eps, False, zero_centered_weight, inplace=inplace)


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    eps = rms_eps(input, eps)
    return _norm(input, residual, normalized_shape, weight, None, eps, True, zero_centered_weight, inplace=inplace)


def ada_layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    return _ada_norm(input, normalized_shape, scale, shift, eps, False)


def ada_rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    return _ada_norm(input, normalized_shape, scale, shift, eps, True)


def layer_norm_2d(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_weight: bool = False,
    memory_efficient: bool = False,
) -> Tensor:
    return _norm_2d(input, None, weight, bias, eps, False, zero_centered_weight, memory_efficient)[0]


def rms_norm_2d(
    input: Tensor, weight: Tensor | None = None, eps: float | None = None, zero_centered_weight: bool = False
) -> Tensor:
    return _norm_2d(input, None, weight, None, rms_eps(input, eps), True, zero_centered_weight)[0]


def add_layer_norm_2d(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    return _norm_2d(input, residual, weight, bias, eps, False, zero_centered_weight, inplace=inplace)


def add_rms_norm_2d(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    return _norm_2d(input, residual, weight, None, rms_eps(input, eps), True, zero_centered_weight, inplace=inplace)


def ada_layer_norm_2d(
    input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    return _norm_2d(input, None, scale, shift, eps, False, True, adaptive=True)[0]


def ada_rms_norm_2d(
    input: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    return _norm_2d(input, None, scale, shift, eps, True, True, adaptive=True)[0]


def _norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    zero_centered_weight: bool,
    memory_efficient: bool = False,
    preserve_layout: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute any member of the family: the output, and the sum with a residual or the input."""
    total = input
    if residual is None:
        output = torch.ops.layernorm.forward(
            input,
            normalized_shape,
            weight,
            bias,
            eps,
            rms=rms,
            zero_centered_weight=zero_centered_weight,
            memory_efficient=memory_efficient,
            preserve_layout=preserve_layout,
        )[0]
    elif inplace:
        output = torch.ops.layernorm.forward_(
            input, normalized_shape, weight, bias, eps, residual, rms=rms, zero_centered_weight=zero_centered_weight
        )[0]
        total = residual
    else:
        output, total, _, _ = torch.ops.layernorm.forward(
            input,
            normalized_shape,
            weight,
            bias,
            eps,
            residual,
            rms=rms,
            zero_centered_weight=zero_centered_weight,
            preserve_layout=preserve_layout,
        )
    return output, total


def _ada_norm(
    input: Tensor, normalized_shape: list[int], scale: Tensor | None, shift: Tensor | None, eps: float, rms: bool
) -> Tensor:
    input = torch.ops.layernorm.check_modulation(input, normalized_shape, scale, shift)
    weight = insert_batch_dims(scale, input, len(normalized_shape))
    bias = insert_batch_dims(shift, input, len(normalized_shape))
    return _norm(input, None, normalized_shape, weight, bias, eps, rms, True)[0]


def _norm_2d(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    zero_centered_weight: bool,
    memory_efficient: bool = False,
    inplace: bool = False,
    adaptive: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute any member of the family on images."""
    input = torch.ops.layernorm.check_images(input, residual, weight, bias, adaptive)
    output, total = _norm(
        input.movedim(1, -1),
        None if residual is None else residual.movedim(1, -1),
        [input.size(1)],
        channels_last(weight, input.dim()),
        channels_last(bias, input.dim()),
        eps,
        rms,
        zero_centered_weight,
        memory_efficient,
        preserve_layout=True,
    )
    output, total = output.movedim(-1, 1), total.movedim(-1, 1)
    if residual is not None and inplace:
        return output, residual.copy_(total)  # the operator refuses to change a view
    return output, total


def insert_batch_dims(parameter: Tensor | None, input: Tensor, normalized_dims: int) -> Tensor | None:
    """Insert the batch dimensions that a scale or shift of :func:`ada_layer_norm` lacks after those that it has."""
    if parameter is None or parameter.dim() == normalized_dims:
        return parameter
    for _ in range(input.dim() - parameter.dim()):
        parameter = parameter.unsqueeze(-1 - normalized_dims)
    return parameter


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
