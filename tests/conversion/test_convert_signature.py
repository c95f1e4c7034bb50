"""A converted layer takes its input by the name that the original's forward has, in every tool of torch."""

import copy
import inspect
import pickle

import pytest
import torch
from support.models import randomize, save_and_load, snapshot
from support.reference import F32, F64

from layernorm_ext import (
    LayerNorm,
    LayerNorm2d,
    RMSNorm,
    RMSNorm2d,
    convert,
    register_conversion,
    revert,
)
from layernorm_ext.conversion import _replacements

pytestmark = [
    pytest.mark.usefixtures("one_thread", "restore_registry"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]

SHAPE = (3, 8, 8, 8)  # rows and images of 8 channels


class Features(torch.nn.LayerNorm):
    def forward(self, features):
        return super().forward(features)


class Images(torch.nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class RMSImages(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, hidden_states):
        rstd = torch.rsqrt(hidden_states.square().mean(1, keepdim=True) + self.eps)
        return (hidden_states * rstd * self.weight[:, None, None]).to(hidden_states.dtype)


class Wide(torch.nn.RMSNorm):
    """Returns float32 for float64 input."""

    def forward(self, output):
        return super().forward(output).float()


class Outer(torch.nn.Module):
    def __init__(self, layer, name):
        super().__init__()
        self.layer, self.name = layer, name

    def forward(self, t):
        return self.layer(**{self.name: t})


CASES = [
    (torch.nn.LayerNorm, "input", LayerNorm),
    (torch.nn.RMSNorm, "x", RMSNorm),
    (Features, "features", LayerNorm),
    (Images, "x", LayerNorm2d),
    (RMSImages, "hidden_states", RMSNorm2d),
    (Wide, "output", RMSNorm),  # the name of a local variable of many functions
]
cases = pytest.mark.parametrize(("cls", "name", "ours"), CASES, ids=lambda v: getattr(v, "__name__", v))


def converted_layer(cls):
    """Return a converted layer, an input, and the original's output."""
    register_conversion(cls)
    layer, x = randomize(cls(8)), torch.randn(SHAPE)
    expected = layer(x)
    assert convert(layer).replaced
    return layer, x, expected


# Torch rounds some ten operations in float32 by 6e-8.
ROUNDED = {"rtol": 1e-5, "atol": 1e-5}
SAME_BITS = {"rtol": 0, "atol": 0}


@cases
def test_keyword_and_signature_are_the_originals(cls, name, ours):
    layer, x, expected = converted_layer(cls)
    assert isinstance(layer, ours) and repr(layer).startswith(f"{ours.__name__}((8,), ")
    assert list(inspect.signature(layer.forward).parameters) == [name]
    assert inspect.signature(layer.forward) == inspect.signature(ours(8).forward).replace(
        parameters=[inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=torch.Tensor)]
    )
    torch.testing.assert_close(layer(**{name: x}), expected, **ROUNDED)
    torch.testing.assert_close(layer(**{name: x}), layer(x), **SAME_BITS)
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        layer(other=x)


@cases
def test_compiled_and_exported_layers_have_the_keyword(cls, name, ours):
    layer, x, _ = converted_layer(cls)
    compiled = torch.compile(Outer(layer, name), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), **SAME_BITS)
    larger, dynamic_shapes = torch.randn(5, *SHAPE[1:]), {name: {0: torch.export.Dim("batch")}}
    for args, kwargs in (([x], {}), ([], {name: x})):
        exported = torch.export.export(layer, (*args,), kwargs, dynamic_shapes=dynamic_shapes).module()
        y = exported(larger) if args else exported(**{name: larger})
        torch.testing.assert_close(y, layer(larger), **ROUNDED)  # torch.export records aten's operators


@cases
def test_traced_graph_has_the_name(cls, name, ours):
    layer, x, _ = converted_layer(cls)
    graph = torch.fx.symbolic_trace(layer)
    assert [node.target for node in graph.graph.find_nodes(op="placeholder")] == [name]
    torch.testing.assert_close(graph(x), layer(x), **SAME_BITS)


@pytest.mark.parametrize("cls", [cls for cls, _, _ in CASES if cls is not Wide])  # TorchScript has no table of dtypes
def test_layers_that_keep_the_dtype_are_scripted(cls):
    layer, x, _ = converted_layer(cls)
    torch.testing.assert_close(save_and_load(torch.jit.script(layer))(x), layer(x), **ROUNDED)


@cases
def test_copies_have_the_keyword_and_are_reverted(cls, name, ours):
    layer, x, _ = converted_layer(cls)
    pickled = pickle.dumps(layer)
    copies = [copy.deepcopy(layer), pickle.loads(pickled)]
    assert {type(copied) for copied in copies} == {type(layer)}
    _replacements._with_argument.cache_clear()  # as in another process
    for copied in (*copies, pickle.loads(pickled)):
        torch.testing.assert_close(copied(**{name: x}), layer(x), **SAME_BITS)
        revert(copied)
        assert type(copied) is cls


def test_output_dtype_and_keyword_are_kept_together():
    layer, x, _ = converted_layer(Wide)
    assert layer.double()(output=x.double()).dtype == F32
    revert(layer)
    assert layer(output=x.double()).dtype == F32


def test_equal_names_give_one_class():
    """Otherwise torch.compile would compile a graph for each layer."""
    first, second = converted_layer(Images)[0], converted_layer(Images)[0]
    assert type(first) is type(second) and type(first).__module__ == _replacements.__name__
    with pytest.raises(AttributeError, match="has no attribute 'LayerNorm1d__x'"):
        _replacements.LayerNorm1d__x  # noqa: B018


def test_positional_only_and_starred_arguments_keep_our_name():
    class Starred(torch.nn.LayerNorm):
        def forward(self, *inputs):
            return super().forward(*inputs)

    class Positional(torch.nn.LayerNorm):
        def forward(self, x, /):
            return super().forward(x)

    for cls in (Starred, Positional):
        layer, x, expected = converted_layer(cls)
        assert type(layer) is LayerNorm
        torch.testing.assert_close(layer(x), expected, **ROUNDED)


def test_users_subclass_keeps_its_own_forward():
    class Ours(LayerNorm):
        def forward(self, features):
            return super().forward(features)

    register_conversion(Images, lambda norm: Ours(8, norm.eps, device="meta"))
    register_conversion(Features, lambda norm: Ours(8, norm.eps, device="meta"))
    layer = Features(8)
    before = snapshot(layer)
    assert convert(layer).replaced and type(layer) is Ours
    revert(layer)
    assert snapshot(layer) == before and convert(Images(8)).skipped


@pytest.mark.parametrize("cls", [torch.nn.RMSNorm, RMSNorm, RMSNorm2d])
def test_rms_norm_has_the_argument_of_torch(cls):
    norm, x = cls(8, dtype=F64), torch.randn(SHAPE, dtype=F64)
    torch.testing.assert_close(norm(x=x), norm(x), **SAME_BITS)
    assert list(inspect.signature(norm.forward).parameters) == ["x"]
