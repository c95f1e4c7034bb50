"""What pyproject.toml cannot say, because it depends on the torch that the extension is built against."""

from setuptools import setup

from build_support import target_torch

if target_torch.is_importable():
    from build_support import extension

    setup(**extension.setup_arguments())
else:  # for an sdist, or to list what a build needs; build_support/backend.py refuses the rest
    setup(install_requires=[target_torch.REQUIREMENT])
