"""The modules for other packages are imported only by their users, and say which versions they need."""

import subprocess
import sys

import pytest

from layernorm_ext import _compatibility

HOOKS = ("hub",)


def test_the_package_does_not_import_its_hooks():
    code = "import sys, layernorm_ext; print(*sys.modules)"
    modules = set(subprocess.check_output([sys.executable, "-P", "-c", code], text=True).split())
    assert "layernorm_ext.functional" in modules
    assert not modules & {f"layernorm_ext.{hook}" for hook in HOOKS}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_refuse_to_be_imported_without_their_package(hook):
    code = f"""
from importlib import metadata
import layernorm_ext
def version(name):
    raise metadata.PackageNotFoundError(name)
metadata.version = version
import layernorm_ext.{hook}
"""
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert "or newer here, but it is not installed" in result.stderr.splitlines()[-1]


def test_missing_and_old_packages_are_import_errors(monkeypatch):
    with pytest.raises(
        ImportError, match=r"layernorm_ext needs no-such-package 1\.0 or newer here, but it is not inst"
    ):
        _compatibility.require("no-such-package", "1.0")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.9.11")
    with pytest.raises(ImportError, match=r"layernorm_ext needs kernels 0\.17 or newer here, but kernels 0\.9\.11 is"):
        _compatibility.require("kernels", "0.17")
    _compatibility.require("kernels", "0.9.2")
