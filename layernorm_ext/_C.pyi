from collections.abc import Sequence

from torch import Tensor

def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor: ...
def norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool,
    zero_centered_weight: bool,
    memory_efficient: bool,
    in_place: bool,
) -> tuple[Tensor, Tensor | None]: ...
def cpu_capability() -> str: ...
