"""Other packages that the tests import."""

import importlib

import pytest
import torch


def import_torchvision():
    """Import torchvision, which timm and transformers import; return ``None`` if it is not installed.

    PyPI has it for GPUs only. Next to a torch for the CPU it lacks its operators, which no test calls, and its import
    fails because it describes them.
    """
    register_fake = torch.library.register_fake

    def register_others(name, *args, **kwargs):
        if torch.version.cuda is None and str(name).startswith("torchvision::"):
            return lambda function: function
        return register_fake(name, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.library, "register_fake", register_others)
        try:
            return importlib.import_module("torchvision")
        except ModuleNotFoundError:
            return None
