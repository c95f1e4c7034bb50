"""The modules for other packages are imported only by their users, and say which versions they need."""

import re
import subprocess
import sys
import types

import pytest

from layernorm_ext import _compatibility

HOOKS = {"huggingface": "kernels", "megatron": "megatron.core", "torchtitan": "torchtitan"}


def test_imports_in_a_new_process():
    """The package imports neither a hook nor torch's Inductor. A hook refuses to be imported without its package.

    Importing the package again, or reloading the module that adds the import hook, adds no second import hook.
    """
    code = f"""
import importlib, sys, layernorm_ext
print(*sys.modules)
for hook, package in {HOOKS}.items():
    sys.modules[package] = None
    try:
        importlib.import_module("layernorm_ext.integrations." + hook)
    except ImportError as error:
        print(hook, error)

finders = len(sys.meta_path)
importlib.reload(layernorm_ext)
importlib.reload(layernorm_ext._ops)
importlib.reload(layernorm_ext)
for name in [name for name in sys.modules if name.startswith("layernorm_ext") and not name.endswith("._C")]:
    del sys.modules[name]
import layernorm_ext
print(len(sys.meta_path) - finders)
"""
    output = subprocess.check_output([sys.executable, "-P", "-c", code], text=True)
    modules, *errors, new_finders = output.splitlines()
    assert "layernorm_ext.functional" in modules.split()
    others = ("layernorm_ext.integrations", "layernorm_ext.fusion", "torch._inductor")
    assert not any(name.startswith(others) for name in modules.split())
    for (hook, package), error in zip(HOOKS.items(), errors, strict=True):
        assert re.match(rf"{hook} layernorm_ext needs \S+ [\d.]+ or newer here, but there is .*{package}", error)
    assert new_finders == "0"


def test_missing_and_old_packages_are_import_errors(monkeypatch):
    with pytest.raises(
        ImportError, match=r"needs some-thing 1\.0 or newer here, but there is no module named 'some_th"
    ):
        _compatibility.require("some-thing", "1.0", "some_thing")
    package = types.ModuleType("some_thing")
    monkeypatch.setitem(sys.modules, "some_thing", package)
    package.__version__ = "0.9.11"
    with pytest.raises(
        ImportError, match=r"needs some_thing 0\.17 or newer here, but some_thing 0\.9\.11 is installed"
    ):
        _compatibility.require("some_thing", "0.17")
    assert _compatibility.require("some_thing", "0.9.2") is package
    package.__version__ = "0.0.0+unknown"  # a checkout that is not installed
    assert _compatibility.require("some_thing", "0.17") is package
