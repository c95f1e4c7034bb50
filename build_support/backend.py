"""A PEP 517 backend: setuptools, plus a rule about torch. It refuses other systems than Linux at its first step.

The extension must be compiled for the torch that it will be loaded into, but pip's isolated build environment hides the
installed torch, and build-system.requires would download another one. Therefore this backend lets the build import the
torch of the target environment. If there is none, pip installs torch for the build, and the wheel requires the same
minor version.
"""

import functools

from setuptools import build_meta
from setuptools.build_meta import build_sdist, get_requires_for_build_sdist  # noqa: F401  (need no torch)

from . import BuildError, check_system, target_torch


def _requiring_torch(hook):
    """Return a PEP 517 hook that also requires torch for the build, unless the target environment has it."""

    @functools.wraps(hook)
    def get_requires(*args, **kwargs):
        check_system()
        requirements = hook(*args, **kwargs)
        return requirements if target_torch.make_importable() else [*requirements, target_torch.REQUIREMENT]

    return get_requires


def _with_torch(hook):
    """Return a PEP 517 hook that can import torch, or ends the build if there is none."""

    @functools.wraps(hook)
    def build(*args, **kwargs):
        check_system()
        if not target_torch.make_importable():
            raise BuildError("torch is not installed", "pip install torch first")
        return hook(*args, **kwargs)

    return build


get_requires_for_build_wheel = _requiring_torch(build_meta.get_requires_for_build_wheel)
get_requires_for_build_editable = _requiring_torch(build_meta.get_requires_for_build_editable)
prepare_metadata_for_build_wheel = _with_torch(build_meta.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _with_torch(build_meta.prepare_metadata_for_build_editable)
build_wheel = _with_torch(build_meta.build_wheel)
build_editable = _with_torch(build_meta.build_editable)
