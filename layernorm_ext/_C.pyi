from collections.abc import Sequence

from torch import Tensor

def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor | None: ...
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
) -> tuple[Tensor, Tensor | None] | None: ...
def layer_norm_2d(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None: ...
def check_forward(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
) -> None: ...
def check_images(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> None: ...
def cpu_capability() -> str: ...
