"""The modules for other packages are imported only by their users, and say which versions they need."""

import re
import subprocess
import sys
import types

import pytest

from layernorm_ext import _compatibility

HOOKS = {"huggingface": "kernels", "megatron": "megatron.core", "torchtitan": "torchtitan"}


def test_the_package_imports_neither_its_hooks_nor_inductor():
    code = "import sys, layernorm_ext; print(*sys.modules)"
    modules = set(subprocess.check_output([sys.executable, "-P", "-c", code], text=True).split())
    assert "layernorm_ext.functional" in modules
    others = ("layernorm_ext.integrations", "layernorm_ext.fusion", "torch._inductor")
    assert not any(name.startswith(others) for name in modules)


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_refuse_to_be_imported_without_their_package(hook):
    code = f"import sys, layernorm_ext; sys.modules[{HOOKS[hook]!r}] = None; import layernorm_ext.integrations.{hook}"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    pattern = rf"ImportError: layernorm_ext needs \S+ [\d.]+ or newer here, but there is .*{HOOKS[hook]}"
    assert re.match(pattern, result.stderr.splitlines()[-1])


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
