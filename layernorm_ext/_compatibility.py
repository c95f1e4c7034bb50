"""Compares the installed torch with the one that the compiled module was built for."""

import torch

from . import _build_info as built


def check_torch() -> None:
    """Raise an ImportError if torch has another binary interface, with which the compiled module could misbehave."""
    is_compatible = _minor(built.torch_version) == _minor(torch.__version__) and (
        not built.with_cuda or _major(built.torch_cuda_version) == _major(torch.version.cuda)
    )
    if not is_compatible:
        raise ImportError(
            f"layernorm_ext was compiled for torch {built.torch_version} (CUDA {built.torch_cuda_version}) "
            f"and does not fit the installed torch {torch.__version__} (CUDA {torch.version.cuda}); "
            "run `pip install .` in its checkout again"
        )


def _minor(torch_version: str) -> list[str]:
    return torch_version.split(".")[:2]


def _major(cuda_version: str | None) -> str | None:
    return cuda_version and cuda_version.split(".")[0]
