"""Finds the torch of the environment that is being installed into."""

import importlib
import importlib.util
import os
import subprocess
import sys

OLDEST = (2, 11)
REQUIREMENT = "torch>=2.11"

# What pip isolates a build with: a sitecustomize.py on PYTHONPATH, and no user site-packages.
_ISOLATION = ("PYTHONPATH", "PYTHONNOUSERSITE")


def is_importable() -> bool:
    """Say whether `import torch` would find something here."""
    return importlib.util.find_spec("torch") is not None


def make_importable() -> bool:
    """Extend sys.path by the target environment's own if torch is only there; say whether torch was found."""
    if not is_importable():
        sys.path.extend(_target_path())
        importlib.invalidate_caches()
    return is_importable()


def _target_path() -> list[str]:
    """Ask this same interpreter, outside the isolation, for its sys.path: venv, user site and .pth files."""
    environment = {name: value for name, value in os.environ.items() if name not in _ISOLATION}
    command = [sys.executable, "-P", "-c", "import sys; print(*sys.path, sep='\\n')"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return result.stdout.splitlines()
