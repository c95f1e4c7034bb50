from collections.abc import Sequence
from typing import Any

from torch import Tensor

def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
    *,
    zero_centered_weight: bool = False,
    memory_efficient: bool = False,
) -> Tensor | None: ...
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered_weight: bool = False,
) -> Tensor | None: ...
def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
    *,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor] | None: ...
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor] | None: ...
def norm_2d(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    rms: bool,
    zero_centered_weight: bool,
    memory_efficient: bool,
    inplace: bool,
    adaptive: bool,
) -> Any: ...
def check_forward(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
) -> None: ...
def check_images(
    input: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, adaptive: bool
) -> None: ...
def cpu_capability() -> str: ...
