"""torch.jit.script: modules and functions give the bits of eager calls, also after saving and loading."""

import dataclasses
import inspect
import subprocess
import sys

import pytest
import torch
from support.family import MEMBERS, ROWS, family, module_and_inputs, module_cases, with_gradients
from support.models import save_and_load

import layernorm_ext
from layernorm_ext import LayerNorm, LayerNorm2d, add_layer_norm, add_rms_norm, layer_norm

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


@module_cases
def test_scripted_modules_have_the_same_bits(cls, options, shapes):
    module, inputs = module_and_inputs(cls, options, shapes)

    def outputs_and_gradients(call):
        copies = [x * 1 for x in inputs]  # a leaf cannot change in place
        outputs = call(*copies)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert "inplace" not in options or len(copies) == 1 or outputs[1].data_ptr() == copies[1].data_ptr()
        return with_gradients(lambda *_: outputs, [*inputs, *call.parameters()])

    scripted = torch.jit.script(module)
    for each in (scripted, save_and_load(scripted)):
        for _ in range(3):  # TorchScript optimizes the later calls
            torch.testing.assert_close(outputs_and_gradients(each), outputs_and_gradients(module), rtol=0, atol=0)


def call_functions(x: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(8)
    y = layernorm_ext.rms_norm(x, [8], weight)
    x = layer_norm(x, [8], weight, eps=0.1, zero_centered_weight=True) + y
    x, residual = add_layer_norm(x, y, [8], weight, inplace=True)
    x, residual = add_rms_norm(x, residual, [8])
    return layernorm_ext.layer_norm_2d(x.transpose(1, 2).unsqueeze(-1), weight)


def test_scripted_functions_have_the_same_bits():
    x, scripted = torch.randn(ROWS), torch.jit.script(call_functions)
    for each in (scripted, save_and_load(scripted)):
        assert torch.equal(each(x), call_functions(x))


FUNCTIONS = sorted({member.function for member in MEMBERS}, key=lambda function: function.__name__)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_operators_have_the_arguments_of_the_functions(function):
    arguments = getattr(torch.ops.layernorm, function.__name__).default._schema.arguments
    parameters = inspect.signature(function).parameters.values()
    assert [(a.name, a.kwarg_only, a.default_value) for a in arguments] == [
        (p.name, p.kind == p.KEYWORD_ONLY, None if p.default is p.empty else p.default) for p in parameters
    ]
    assert [a.has_default_value() for a in arguments] == [p.default is not p.empty for p in parameters]


@family
def test_scripted_functions_have_the_same_results(member):
    shape = (2, 5, 3, 8) if member.takes_images else (2, 5, 8)
    x, r, w, b = (torch.randn(size) for size in (shape, shape, 8, 8))
    scripted = torch.jit.script(member.function)
    scripted.__name__ = member.function.__name__  # which a member looks at
    results = dataclasses.replace(member, function=scripted)(x, r, w, b)
    for actual, expected in zip(results, member(x, r, w, b), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("member", "transform"),
    [(member, "vmap") for member in MEMBERS]
    + [(member, "functionalize") for member in MEMBERS if "inplace" not in member.options],  # it refuses all of these
    ids=lambda value: getattr(value, "name", value),
)
def test_scripted_functions_in_transforms(member, transform):
    """Without rules of their own, both refuse operators that may change an argument."""
    shape = (2, 5, 3, 8) if member.takes_images else (2, 5, 8)
    x, r, w, b = (torch.randn(size) for size in (shape, shape, 8, 8))
    scripted = torch.jit.script(member.function)
    scripted.__name__ = member.function.__name__
    functions = [dataclasses.replace(member, function=function) for function in (scripted, member.function)]
    if transform == "vmap":
        batches = x.expand(3, *shape), r.expand(3, *shape)
        results, expected = (torch.vmap(f, (0, 0, None, None))(*batches, w, b) for f in functions)
    else:
        results, expected = (torch.func.functionalize(f)(x, r, w, b) for f in functions)
    for actual, right in zip(results, expected, strict=True):
        # vmap of in-place functions and of eager ones take the same composition.
        torch.testing.assert_close(actual, right, rtol=0, atol=0)


def test_scripted_converted_model_has_the_same_bits():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.RMSNorm(8)).eval()
    assert layernorm_ext.convert(model).replaced
    x, scripted = torch.randn(3, 8), torch.jit.script(model)
    for each in (scripted, torch.jit.freeze(scripted)):
        assert torch.equal(each(x), model(x))
    assert type(model[1]) is LayerNorm  # scripting leaves the model as it was


@pytest.fixture
def legacy_executor():
    """The executor that speechbrain selects."""
    functions = torch._C._jit_set_profiling_executor, torch._C._jit_set_profiling_mode
    values = [function(False) for function in functions]
    yield
    for function, value in zip(functions, values, strict=True):
        function(value)


@pytest.mark.parametrize("cls", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_double_backward_in_the_legacy_executor(legacy_executor, cls):
    """It matches that of torch's eager layers. Torch's scripted LayerNorm is off by 41; the largest value is 50."""
    layers = torch.nn.Linear(8, 8), cls(8), torch.nn.Linear(8, 8)
    model, x = torch.nn.Sequential(*layers).double(), torch.randn(4, 8, dtype=torch.float64)

    def second_derivatives(model):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(model(x).sin().sum(), parameters, create_graph=True)
        return torch.autograd.grad(sum(gradient.sin().sum() for gradient in gradients), parameters)

    expected = second_derivatives(model)
    assert layernorm_ext.convert(model).replaced
    scripted = torch.jit.script(model)
    for _ in range(3):  # TorchScript optimizes the later calls
        # Some hundred operations round by 1e-16 each.
        torch.testing.assert_close(second_derivatives(scripted), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("shape", "channels"), [((2, 7, 3, 3), 8), ((8,), "C")], ids=str)
def test_scripted_modules_give_the_errors_of_eager_calls(shape, channels):
    module = LayerNorm2d(8)
    for each in (module, torch.jit.script(module)):
        with pytest.raises((RuntimeError, torch.jit.Error), match=rf"Expected input of shape \[N, {channels}, \*\]"):
            each(torch.randn(shape))


def test_saved_module_runs_only_with_this_package(tmp_path):
    torch.jit.script(LayerNorm(8)).save(tmp_path / "norm.pt")
    code = (
        "import torch\n"
        "try: torch.jit.load('norm.pt')\n"
        "except RuntimeError as error: assert 'layernorm::layer_norm' in str(error)\n"
        "else: raise AssertionError('The module was loaded')\n"
        "import layernorm_ext\n"
        "torch.jit.load('norm.pt')(torch.randn(3, 8))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
