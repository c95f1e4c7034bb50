from collections.abc import Sequence

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
) -> Tensor: ...
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered_weight: bool = False,
) -> Tensor: ...
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
) -> tuple[Tensor, Tensor]: ...
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered_weight: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]: ...
def cpu_capability() -> str: ...
