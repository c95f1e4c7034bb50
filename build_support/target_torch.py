"""Finds the torch of the environment that the package is installed into."""

import importlib
import importlib.util
import os
import subprocess
import sys

OLDEST = (2, 11)
REQUIREMENT = "torch>=2.11"


def is_importable() -> bool:
    """Return whether torch can be imported."""
    return importlib.util.find_spec("torch") is not None


def make_importable() -> bool:
    """Add the target environment to sys.path if torch is only there; return whether torch can be imported."""
    if not is_importable():
        sys.path.extend(_target_path())
        importlib.invalidate_caches()
    return is_importable()


def _target_path() -> list[str]:
    """Return the sys.path of this interpreter without pip's isolation: venv, user site-packages and .pth files."""
    # pip isolates a build by a sitecustomize.py on PYTHONPATH and by PYTHONNOUSERSITE.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    command = [sys.executable, "-P", "-c", "import sys; print(*sys.path, sep='\\n')"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return result.stdout.splitlines()
