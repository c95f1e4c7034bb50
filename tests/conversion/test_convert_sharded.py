"""convert() on models whose parameters DeepSpeed has sharded. test_distributed.py has FSDP.

DeepSpeed is not needed: with one process, its ZeRO-3 does to parameters what this file does.
"""

from collections import OrderedDict

import pytest
import torch
from support.models import LikeLlama, MyNorm, randomize, snapshot

from layernorm_ext import LayerNorm, RMSNorm, convert, register_conversion, revert

pytestmark = pytest.mark.usefixtures("one_thread", "restore_registry")


class ParametersOfAModule(OrderedDict):
    """As DeepSpeed's ZeROOrderedDict, it knows its module, and cannot be created or read without it."""

    def __init__(self, parent_module, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.parent_module = parent_module

    def __reduce__(self):
        cls, _, *others = super().__reduce__()
        return cls, (self.parent_module,), *others

    def __getitem__(self, name):
        assert self.parent_module._parameters is self
        return super().__getitem__(name)


def partition(model):
    """Empty all parameters, as zero.Init does."""
    for parameter in model.parameters():
        parameter.ds_shape, parameter.ds_tensor = parameter.shape, parameter.detach().flatten().clone()
        parameter.data = torch.empty(0, dtype=parameter.dtype)


def inject(model):
    """Exchange the dictionaries of parameters, as deepspeed.initialize does."""
    for module in model.modules():
        module._original_parameters = module._parameters
        module._parameters = ParametersOfAModule(module, module._parameters)


def gather(model):
    """Restore the parameters, as DeepSpeed does in a hook before forward."""
    for parameter in model.parameters():
        parameter.data = parameter.ds_tensor.view(parameter.ds_shape)


@pytest.mark.parametrize("initialized", [False, True], ids=["zero.Init", "initialize"])
def test_layers_with_empty_parameters_are_replaced_with_their_full_shape(initialized):
    register_conversion(LikeLlama)
    layers = [torch.nn.LayerNorm(5), torch.nn.LayerNorm((4, 5), bias=False), torch.nn.RMSNorm(5), LikeLlama(5)]
    model, x = randomize(torch.nn.Sequential(*layers)), torch.randn(3, 4, 5)
    expected = model(x)
    partition(model)
    if initialized:
        inject(model)
    before = [snapshot(module) for module in model.modules()]
    report = convert(model)
    assert len(report.replaced) == 4 and not report.skipped
    assert [layer.normalized_shape for layer in model] == [(5,), (4, 5), (5,), (5,)]
    assert all(isinstance(layer, (LayerNorm, RMSNorm)) for layer in model)
    assert all(parameter.shape == (0,) for parameter in model.parameters())
    gather(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)  # four layers, ten roundings of 6e-8 in each
    model(x).sum().backward()
    assert all(parameter.grad.shape == parameter.ds_shape for parameter in model.parameters())
    revert(model)
    assert [snapshot(module) for module in model.modules()] == before


def test_differences_are_found_without_the_values():
    register_conversion(MyNorm, lambda norm: RMSNorm(norm.width, norm.small, device="meta"))
    model = MyNorm(5)  # with a zero-centered weight
    partition(model)
    inject(model)
    assert "output differs by" in convert(model).skipped[""]


def test_empty_parameters_of_unknown_shape_are_a_reason():
    register_conversion(LikeLlama)
    register_conversion(MyNorm, lambda norm: 1 / norm.weight.numel())
    for model in (LikeLlama(5), MyNorm(5)):
        model.weight.data = torch.empty(0)
        assert convert(model).skipped[""].endswith("a parameter has the shape [0]")
