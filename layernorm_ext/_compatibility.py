"""Compares the installed torch with the one that the compiled module was built for."""

import torch

from . import _build_info as built


def check_torch() -> None:
    """Raise an ImportError if torch has another binary interface, with which the compiled module could misbehave."""
    minors = [version.split(".")[:2] for version in (built.torch_version, torch.__version__)]
    majors = [version and version.split(".")[0] for version in (built.torch_cuda_version, torch.version.cuda)]
    if minors[0] != minors[1] or (built.with_cuda and majors[0] != majors[1]):
        raise ImportError(
            f"layernorm_ext was compiled for torch {built.torch_version} (CUDA {built.torch_cuda_version}) "
            f"and does not fit the installed torch {torch.__version__} (CUDA {torch.version.cuda}); "
            "run `pip install .` in its checkout again"
        )
