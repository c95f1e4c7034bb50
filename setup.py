"""The part of the project's metadata that depends on the torch that the extension is built for."""

from setuptools import setup

from build_support import target_torch

if target_torch.is_importable():
    from build_support import extension

    setup(**extension.setup_arguments())
else:  # for an sdist and for build requirements; build_support/backend.py refuses other builds
    setup(install_requires=[target_torch.REQUIREMENT])
