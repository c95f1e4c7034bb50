"""PEP 517 backend: setuptools, plus one rule about torch.

The extension must be compiled against the very torch it will be loaded into. pip builds in an isolated
environment that does not show that torch, and torch in build-system.requires would fetch another one. So a
torch installed in the target environment is made visible to the build; only where there is none is pip asked
for one, and the wheel then requires the same minor version, so that the torch installed beside it matches.
"""

import functools

from setuptools import build_meta
from setuptools.build_meta import build_sdist, get_requires_for_build_sdist  # noqa: F401  (need no torch)

from . import target_torch
from .errors import BuildError


def _asking_for_torch(hook):
    @functools.wraps(hook)
    def get_requires(*args, **kwargs):
        requirements = hook(*args, **kwargs)
        return requirements if target_torch.make_importable() else [*requirements, target_torch.REQUIREMENT]

    return get_requires


def _with_torch(hook):
    @functools.wraps(hook)
    def build(*args, **kwargs):
        if not target_torch.make_importable():
            raise BuildError("torch is not installed", "pip install torch first")
        return hook(*args, **kwargs)

    return build


get_requires_for_build_wheel = _asking_for_torch(build_meta.get_requires_for_build_wheel)
get_requires_for_build_editable = _asking_for_torch(build_meta.get_requires_for_build_editable)
prepare_metadata_for_build_wheel = _with_torch(build_meta.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _with_torch(build_meta.prepare_metadata_for_build_editable)
build_wheel = _with_torch(build_meta.build_wheel)
build_editable = _with_torch(build_meta.build_editable)
