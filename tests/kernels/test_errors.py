"""Wrong arguments are refused, with torch's error where torch checks them too, and before any memory is touched."""

import contextlib
import inspect
import re
from operator import attrgetter

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import layernorm_ext
from layernorm_ext import (
    _build_info,
    ada_layer_norm,
    ada_rms_norm,
    add_ada_layer_norm,
    add_layer_norm,
    add_rms_norm,
    gated_layer_norm,
    gated_rms_norm,
    layer_norm,
    layer_norm_2d,
    trace_as,
)

X, W, STATISTICS = torch.ones(2, 3), torch.ones(3), torch.ones(2, 1)


def fake_tensors():
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.fixture(params=[contextlib.nullcontext, torch.inference_mode, fake_tensors], ids=["eager", "inference", "fake"])
def context(request):
    """Modes in which torch calls the kernels or the shape functions directly, so that these must check arguments."""
    with request.param():
        yield request.param


def raises(message, error=RuntimeError):
    return pytest.raises(error, match=f"^{re.escape(message)}")


def to_device(values, device):
    """Return a collection of values with the tensors among them moved to a device. They keep their strides."""

    def move(t):
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device).copy_(t)

    return tree_map_only(torch.Tensor, move, values)


def outcome(function, *args):
    """Return the shape of the result, or the type of the error and the first line of its message."""
    try:
        return function(*args).shape
    except Exception as error:
        return type(error), str(error).splitlines()[0]


SAME_ERROR_AS_TORCH = {  # (input, normalized_shape, weight, bias)
    "normalized_shape is empty": (X, [], None, None),
    "input has another shape": (X, [4], None, None),
    "input has too few dimensions": (X, [5, 2, 3], None, None),
    "input has no dimension": (torch.ones(()), [3], None, None),
    "weight has another shape": (X, [3], torch.ones(4), None),
    "bias has another shape": (X, [3], None, torch.ones(4)),
    "weight is checked before bias and input": (X, [4], torch.ones(5), torch.ones(6)),
}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(arguments, outcome(torch.nn.functional.layer_norm, *arguments)) for arguments in SAME_ERROR_AS_TORCH.values()],
    ids=SAME_ERROR_AS_TORCH,
)
def test_errors_of_forward_are_those_of_torch(backend, context, arguments, expected):
    with raises(expected[1], expected[0]):
        backend.forward(*to_device(arguments, backend.device), 1e-5)


# The operators. test_operator_calls.py tests random invalid calls, whose errors must name an argument.

FORWARD = {"input": X, "normalized_shape": [3], "weight": None, "bias": None, "eps": 1e-5}
BACKWARD = {"grad_output": X, "input": X, "normalized_shape": [3], "mean": STATISTICS, "rstd": STATISTICS}
BACKWARD |= {"weight": None, "bias": None, "output_mask": [True] * 6, "grad_sum": None, "gate": None}
SIX_COLUMNS = {"input": torch.ones(2, 6), "normalized_shape": [6]}
OF_IMAGES = {"input": torch.ones(2, 3, 4), "images": True}
GATED = {"gate": X}
GATE_OF_OTHER_DTYPE = {"gate": X.half()}  # valid, but converted: the checks must come before that
SHAPE = "Expected {0} to be of the shape of input, but got {0} of shape {1} and input of shape [2, 3]"
DTYPE = "Expected {0} to be of the dtype of input, but got {0} of dtype {1} and input of dtype {2}"

# Operator -> the beginning of the message -> what differs from a valid call: FORWARD or BACKWARD.
OPERATOR_ERRORS = {
    "forward.fused": {
        SHAPE.format("residual", "[1, 3]"): {"residual": X[:1]},
        DTYPE.format("residual", "Half", "Float"): {"residual": X.half()},
        DTYPE.format("residual", "BFloat16", "Half"): {"input": X.half(), "residual": X.bfloat16()},
        DTYPE.format("residual", "Double", "Half"): {"input": X.half(), "residual": X.double()},
        DTYPE.format("residual", "Float", "Double"): {"input": X.double(), "residual": X},
        "Expected residual to be a tensor with input_scale (gate), but got None with input": {"input_scale": W},
        "Expected residual to be None with a gate, but got residual of shape [2, 3] and input": {"residual": X} | GATED,
        "Expected residual to be None with num_groups other than 1": SIX_COLUMNS
        | {"num_groups": 2, "residual": torch.ones(2, 6)},
        "Expected residual to be None with images=True": OF_IMAGES | {"residual": torch.ones(2, 3, 4)},
        "Expected gate to be None with images=True": OF_IMAGES | {"gate": torch.ones(2, 3, 4)},
        "Expected residual to be None with memory_efficient=True": {"memory_efficient": True, "residual": X},
        "Expected gate to be None with memory_efficient=True": {"memory_efficient": True} | GATED,
        "Expected memory_efficient=False with rms=True": {"memory_efficient": True, "rms": True},
        "Expected num_groups to divide the only dimension of normalized_shape": SIX_COLUMNS | {"num_groups": 4},
        "Expected num_groups to be 1 for images, but got num_groups = 3 and input": OF_IMAGES | {"num_groups": 3},
        "Given normalized_shape=[4], expected input with shape [N, 4, *]": OF_IMAGES | {"normalized_shape": [4]},
    },
    "forward_.fused": {
        SHAPE.format("residual", "[1, 3]"): {"residual": X[:1]},
        DTYPE.format("residual", "Half", "Float"): {"residual": X.half()},
        "Expected residual to be a tensor, but got None for input of shape [2, 3]": {"residual": None},
    },
    "backward": {
        "Given normalized_shape=[4], expected input with shape [*, 4], but got input of size[2, 3]": {
            "normalized_shape": [4]
        },
        SHAPE.format("grad_output", "[3, 2]"): {"grad_output": X.mT},
        DTYPE.format("grad_output", "Double", "Float"): {"grad_output": X.double()},
        "Expected mean to be a tensor, but got None": {"mean": None},
        "Expected mean of shape [2, 1], but got mean of shape [2]": {"mean": STATISTICS[:, 0]},
        "Expected rstd of shape [2, 1], but got rstd of shape [1, 1]": {"rstd": STATISTICS[:1]},
        "Expected rstd of shape [2, 3], but got rstd of shape [2, 1]": SIX_COLUMNS
        | {"grad_output": torch.ones(2, 6), "rms": True, "mean": None, "num_groups": 3},
        "Expected rstd of dtype Float for input of dtype Float, but got rstd of dtype Double": {
            "rstd": STATISTICS.double()
        },
        "Expected mean of dtype Float for input of dtype Half, but got mean of dtype Half": {
            "input": X.half(),
            "grad_output": X.half(),
            "mean": STATISTICS.half(),
        },
        "Expected weight to be of same shape as normalized_shape, but got weight of shape [2]": {"weight": W[:2]},
        "Expected bias of dtype Double, Float, Half or BFloat16, but got bias of dtype Int": {"bias": W.int()},
        SHAPE.format("grad_sum", "[1, 3]"): {"grad_sum": X[:1]},
        DTYPE.format("grad_sum", "Half", "Float"): {"grad_sum": X.half()},
        "Expected scaled_input to be a tensor where the gradient of input_scale is wanted": {"input_scale": W},
        "Expected scaled_input to be of the shape of grad_output, but got scaled_input of shape [1, 3] and": {
            "input_scale": W,
            "scaled_input": X[:1],
        },
        "Expected scaled_input to be of the dtype of grad_output, but got scaled_input of dtype Float and": {
            "input_scale": W,
            "grad_output": X.half(),
            "scaled_input": X,
        },
        DTYPE.format("grad_output", "Half", "Float"): {"grad_output": X.half()} | GATE_OF_OTHER_DTYPE,
        "Expected grad_sum to be None with a gate, but got grad_sum of shape [2, 3]": {"grad_sum": X} | GATED,
        "Expected grad_sum to be None with a gate, but got grad_sum of": {"grad_sum": X} | GATE_OF_OTHER_DTYPE,
        "Expected input_scale (gate) to be None with a gate, but got input_scale (gate)": {"input_scale": W} | GATED,
        "Expected input_scale (gate) to be None with a gate": {"input_scale": W} | GATE_OF_OTHER_DTYPE,
        "Expected scaled_input to be None without an input_scale, but got scaled_input": {"scaled_input": X} | GATED,
        "Expected scaled_input to be None without an input_scale": {"scaled_input": X} | GATE_OF_OTHER_DTYPE,
    },
}


@pytest.mark.parametrize(
    ("operator", "message"),
    [(operator, message) for operator in OPERATOR_ERRORS for message in OPERATOR_ERRORS[operator]],
)
def test_errors_of_operators(backend, context, operator, message):
    valid = BACKWARD if operator.startswith("backward") else FORWARD
    arguments = to_device(valid | OPERATOR_ERRORS[operator][message], backend.device)
    with raises(message):
        attrgetter(operator)(backend.ops)(**arguments)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
def test_input_without_kernels_is_not_implemented(backend, dtype):
    with raises(
        "Expected input of dtype Double, Float, Half or BFloat16, but got input of dtype ", NotImplementedError
    ):
        backend.forward(X.to(backend.device, dtype), [3])


def test_in_place_residual_must_not_overlap(backend):
    x = X.to(backend.device)
    for residual in (torch.zeros(3, device=backend.device).expand(2, 3), x):
        with pytest.raises(RuntimeError, match="single memory location"):
            backend.ops.forward_(x, [3], None, None, 1e-5, residual)


# Arguments of Python functions are converted as torch converts them

NUMBERS = [3, numpy.int64(3), torch.tensor(3), torch.tensor([3]), 3.0, numpy.float32(3), torch.tensor(3.0), "3", True]
SEQUENCES = [(numpy.int32(3),), torch.Size([3]), numpy.array([3]), range(3, 4), None, []]
FUNCTIONS, MODULES = ["layer_norm", "rms_norm"], ["LayerNorm", "RMSNorm"]


@pytest.mark.parametrize("shape", [*NUMBERS, *([n] for n in NUMBERS), *SEQUENCES], ids=repr)
@pytest.mark.parametrize("name", [*FUNCTIONS, *MODULES])
def test_normalized_shape_is_accepted_or_refused_as_by_torch(name, shape):
    def call(package):
        member = getattr(package, name)
        return member(X, shape) if name in FUNCTIONS else member(shape)(X)

    assert outcome(call, layernorm_ext) == outcome(call, torch.nn.functional if name in FUNCTIONS else torch.nn)


@pytest.mark.parametrize("shape", [[numpy.int64(3)], [torch.tensor(3)]], ids=repr)
@pytest.mark.parametrize("name", [*FUNCTIONS, *MODULES])
def test_normalized_shape_of_other_integers_compiles(name, shape):
    x, member = torch.randn(2, 3, requires_grad=True), getattr(layernorm_ext, name)
    function = (lambda x: member(x, shape, W)) if name in FUNCTIONS else member(shape)
    torch.compile(function, fullgraph=True, backend="aot_eager")(x).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize(
    "arguments",
    [("x", [3]), (numpy.ones((2, 3)), [3]), (X, [3], "w"), (X, [3], [1.0] * 3), (X, [3], W, "eps"), (X, [3], W, None)],
    ids=repr,
)
def test_other_arguments_are_accepted_or_refused_as_by_torch(arguments):
    """test_torch_tools.py tests other types of eps."""
    assert outcome(layernorm_ext.rms_norm, *arguments) == outcome(torch.nn.functional.rms_norm, *arguments)
    if len(arguments) == 4:
        arguments = (*arguments[:3], W, arguments[3])  # layer_norm has a bias before eps
    assert outcome(layernorm_ext.layer_norm, *arguments) == outcome(torch.nn.functional.layer_norm, *arguments)


def test_errors_of_residual_functions():
    """torch has no such functions. The errors are worded as torch's for its own functions."""
    with raises("add_layer_norm(): argument 'residual' (position 2) must be Tensor, not str", TypeError):
        layernorm_ext.add_layer_norm(X, "residual", [3])
    with raises("add_rms_norm(): argument 'normalized_shape' (position 3) must be tuple of ints, not int", TypeError):
        layernorm_ext.add_rms_norm(X, X, 3)


def assert_refused_in_every_mode(call, message):
    """Eager, inference, Dynamo, vmap and fake tensors reach the check by different paths."""
    x = torch.randn(2, 4, 4)
    for function in (call, torch.vmap(lambda x: call(x[None])), torch.compile(call, backend="eager")):
        with pytest.raises(TypeError, match=message):
            function(x)
    for mode in (torch.inference_mode, fake_tensors):
        with mode(), pytest.raises(TypeError, match=message):
            call(torch.randn(2, 4, 4))


NORMS = [getattr(layernorm_ext, name) for name in layernorm_ext.__all__ if "orm" in name and "Lazy" not in name]


@pytest.mark.parametrize(
    "norm",
    [norm for norm in NORMS if inspect.signature(norm).parameters["eps"].default is not None],
    ids=lambda norm: norm.__name__,
)
def test_eps_with_a_default_must_be_a_number(norm):
    module = norm(4, eps=None) if isinstance(norm, type) else None

    def call(x):
        inputs = [x] * (1 + norm.__name__.lower().startswith(("add", "gated")))  # with a residual or a gate
        shape = () if norm.__name__.endswith("2d") else ((4,),)
        return module(*inputs) if module else norm(*inputs, *shape, eps=None)

    # The error of a module names its function: add_rms_norm() for AddRMSNorm.
    name = re.sub("(?<=[a-z])(?=[A-Z2])", "_", norm.__name__.replace("RMS", "Rms")).lower() if module else norm.__name__
    assert_refused_in_every_mode(call, rf"{name}\(\): argument 'eps'.* must be float, not NoneType$")


@pytest.mark.parametrize("name", [name for name in layernorm_ext.__all__ if name.startswith(("add_", "gated_"))])
@pytest.mark.parametrize(
    ("argument", "type_name", "values"),
    [("inplace", "bool", [1, None]), ("num_groups", "int", [2.0, True, "2", None])],
)
def test_arguments_of_wrong_types_are_refused_by_name(name, argument, type_name, values):
    function = getattr(layernorm_ext, name)
    second, *others = list(inspect.signature(function).parameters)[1:]  # residual or gate
    for value in values if argument in (second, *others) else []:
        message = rf"{name}\(\): argument '{argument}'.* must be {type_name}, not {type(value).__name__}"

        def call(x, value=value):
            return function(**{"input": x, second: x.clone(), "normalized_shape": (4,)} | {argument: value})

        assert_refused_in_every_mode(call, message)


@pytest.mark.parametrize("name", [name for name in layernorm_ext.__all__ if name.startswith("add_")])
@pytest.mark.parametrize("inplace", [False, None], ids=repr)
def test_a_residual_must_be_a_tensor(name, inplace):
    function = getattr(layernorm_ext, name)
    message = "argument 'residual'.* must be Tensor, not NoneType"
    assert_refused_in_every_mode(lambda x: function(x, None, (4,), inplace=inplace), message)


@pytest.mark.parametrize("num_groups", [numpy.int64(2), torch.tensor(2)], ids=repr)
def test_num_groups_may_be_any_integer(num_groups):
    x = torch.randn(3, 8)
    expected = gated_rms_norm(x, x, (8,), num_groups=2)
    for function in (gated_rms_norm, torch.compile(gated_rms_norm, backend="eager")):
        torch.testing.assert_close(function(x, x, (8,), num_groups=num_groups), expected, rtol=0, atol=0)


# The public functions and modules

ROWS, IMAGES = torch.ones(3, 5, 8), torch.ones(2, 3, 4, 4)
# Created outside of compiled code.
LAYER_NORM_2D, RMS_NORM_2D = layernorm_ext.LayerNorm2d(4), layernorm_ext.RMSNorm2d(4)
OF_ROWS = (
    "Expected {0} of shape [*batch, 8], where batch are the input's first batch sizes or 1, but got {0} of shape {1} "
)
OF_CHANNELS = (
    "Expected {0} of shape [C], [N, C] or [N, C, 1, ...], with C = 3 and N = 2 or 1, but got {0} of shape {1} and "
    "input of shape [2, 3, 4, 4]"
)
OF_GROUPS = (
    "Expected num_groups to divide the only dimension of normalized_shape, but got num_groups = {0}, normalized_shape "
    "= {1} and input of shape [3, 5, 8]"
)
OF_BATCH = (
    "Expected {0} to be of same shape as normalized_shape, but got {0} of shape {1} and normalized_shape = [8]; or of "
    "shape [*batch, 8], where batch are the first batch sizes or 1 of input of shape [3, 5, 8]"
)
FUNCTION_ERRORS = {
    "Given normalized_shape=[7], expected input with shape [*, 7], but got input of size[3, 5, 8": (
        lambda: layer_norm(ROWS, (7,))
    ),
    "Expected input of dtype Double, Float, Half or BFloat16, but got input of dtype Long": (
        lambda: layernorm_ext.rms_norm(ROWS.long(), (8,))
    ),
    "Expected residual to be of the dtype of input, but got residual of dtype Double and input of dtype Float": (
        lambda: layernorm_ext.add_rms_norm(ROWS, ROWS.double(), (8,))
    ),
    OF_BATCH.format("weight", "[2, 5, 8]"): lambda: layer_norm(ROWS, (8,), torch.ones(2, 5, 8)),
    OF_BATCH.format("bias", "[3, 5, 7]"): lambda: layer_norm(ROWS, (8,), None, torch.ones(3, 5, 7)),
    OF_BATCH.format("weight", "[5, 8]"): lambda: layer_norm(ROWS, (8,), torch.ones(5, 8)),
    "Expected weight and bias to have the same batch sizes, but got weight of shape [3, 1, 8], bias of shape [1, 5": (
        lambda: layer_norm(ROWS, (8,), torch.ones(3, 1, 8), torch.ones(1, 5, 8))
    ),
    OF_ROWS.format("weight (scale)", "[2, 8]"): lambda: ada_layer_norm(ROWS, (8,), torch.ones(2, 8)),
    OF_ROWS.format("weight (scale)", "[]"): lambda: ada_rms_norm(ROWS, (8,), torch.ones(())),
    OF_ROWS.format("bias (shift)", "[3, 7]"): lambda: ada_rms_norm(ROWS, (8,), None, torch.ones(3, 7)),
    "Expected weight (scale) and bias (shift) to have the same batch sizes, but got weight (scale) of shape [3, 8]": (
        lambda: ada_layer_norm(ROWS, (8,), torch.ones(3, 8), torch.ones(1, 5, 8))
    ),
    "Expected weight (scale) of dtype Double, Float, Half or BFloat16, but got weight (scale) of dtype Int": (
        lambda: ada_layer_norm(ROWS, (8,), torch.ones(3, 8).int())
    ),
    "Expected input of shape [N, C, *], but got input of size[3]": lambda: layer_norm_2d(IMAGES[0, :, 0, 0]),
    OF_CHANNELS.format("weight", "[4]"): lambda: layer_norm_2d(IMAGES, torch.ones(4)),
    OF_CHANNELS.format("bias", "[3, 1]"): lambda: layer_norm_2d(IMAGES, None, torch.ones(3, 1)),
    OF_CHANNELS.format("bias", "[1, 3, 2, 1]"): lambda: layer_norm_2d(IMAGES, None, torch.ones(1, 3, 2, 1)),
    OF_CHANNELS.format("weight", "[2, 3, 4, 4]"): lambda: layer_norm_2d(IMAGES, torch.ones(2, 3, 4, 4)),
    "Expected residual to be of the shape of input, but got residual of shape [1, 5, 8] and input of shape [3, 5, 8]": (
        lambda: add_layer_norm(ROWS, ROWS[:1], (8,))
    ),
    OF_ROWS.format("input_scale (gate)", "[2, 8]"): lambda: add_layer_norm(ROWS, ROWS, (8,), gate=torch.ones(2, 8)),
    OF_ROWS.format("input_scale (gate)", "[]"): lambda: add_rms_norm(ROWS, ROWS, (8,), gate=torch.ones(())),
    "Expected weight (scale) and input_scale (gate) to have the same batch sizes, but got weight (scale) of shape": (
        lambda: add_ada_layer_norm(ROWS, ROWS, (8,), torch.ones(3, 8), gate=torch.ones(1, 5, 8))
    ),
    "Expected weight and input_scale (gate) to have the same batch sizes, but got weight of shape [1, 5, 8], input": (
        lambda: add_layer_norm(ROWS, ROWS, (8,), torch.ones(1, 5, 8), gate=torch.ones(3, 8))
    ),
    "Expected input_scale (gate) of dtype Double, Float, Half or BFloat16, but got input_scale (gate) of dtype Int": (
        lambda: add_layer_norm(ROWS, ROWS, (8,), gate=torch.ones(8).int())
    ),
    "Expected gate to be of the shape of input, but got gate of shape [3, 1, 8] and input of shape [3, 5, 8]": (
        lambda: gated_rms_norm(ROWS, ROWS[:, :1], (8,))
    ),
    "Expected gate of dtype Double, Float, Half or BFloat16, but got gate of dtype Long": (
        lambda: gated_layer_norm(ROWS, ROWS.long(), (8,))
    ),
    'Expected activation to be "silu" or "sigmoid", but got activation = "relu" and input of shape [3, 5, 8]': (
        lambda: gated_layer_norm(ROWS, ROWS, (8,), activation="relu")
    ),
    'Expected activation to be "silu" or "sigmoid", but got activation = "gelu" and input of shape [3, 5, 8]': (
        lambda: gated_rms_norm(ROWS, None, (8,), activation="gelu")
    ),
    OF_GROUPS.format(3, [8]): lambda: gated_rms_norm(ROWS, ROWS, (8,), num_groups=3),
    OF_GROUPS.format(0, [8]): lambda: gated_layer_norm(ROWS, None, (8,), num_groups=0),
    OF_GROUPS.format(2, [5, 8]): lambda: gated_layer_norm(ROWS, ROWS, (5, 8), num_groups=2),
    "Given normalized_shape=[6], expected input with shape [*, 6], but got input of size[3, 5, 8": (
        lambda: gated_rms_norm(ROWS, ROWS, (6,), num_groups=2)
    ),
    "Expected input of shape [N, 4, *], but got input of size[2, 3, 4": lambda: LAYER_NORM_2D(IMAGES),
    "Expected input of shape [N, 4, *], but got input of size": lambda: RMS_NORM_2D(IMAGES),
}


@pytest.mark.parametrize(("message", "call"), FUNCTION_ERRORS.items())
def test_errors_of_functions_and_modules(context, message, call):
    with raises(message):
        call()


@pytest.mark.parametrize("cls", [layernorm_ext.GatedLayerNorm, layernorm_ext.GatedRMSNorm])
def test_constructors_of_gated_modules_check_their_options(cls):
    message = 'Expected activation to be "silu" or "sigmoid", but got activation = "relu"'
    with pytest.raises(ValueError, match=message):
        cls(8, activation="relu")
    for size, num_groups in ((8, 3), (8, 0), ((5, 8), 2)):
        message = "Expected num_groups to divide the only dimension of normalized_shape, but got num_groups = "
        with pytest.raises(ValueError, match=message + str(num_groups)):
            cls(size, num_groups=num_groups)
    for num_groups in (2.0, True):
        with pytest.raises(TypeError, match="argument 'num_groups' must be int, not "):
            cls(8, num_groups=num_groups)


LAYOUTS = {  # how an error names the layout; the two nested layouts are named alike, but for a space in the key
    "gate of layout Sparse": lambda t: t.to_sparse(),
    "gate of layout SparseCsr": lambda t: t.expand(4, 4).to_sparse_csr(),
    "gate of layout Mkldnn": lambda t: t.to_mkldnn(),
    "a nested tensor": lambda t: torch.nested.nested_tensor([t, t]),
    "a nested tensor ": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for name in layernorm_ext.__all__ if name.endswith(("_norm", "_norm_2d"))])
def test_tensors_of_other_layouts_are_refused_by_name(name, layout):
    """test_nested.py has nested inputs, which functions of rows take."""
    function, x = getattr(layernorm_ext, name), torch.ones(4, 4)
    signature = inspect.signature(function)
    arguments = {"input": x, "residual": x, "gate": x if name.startswith("gated") else x[0], "normalized_shape": (4,)}
    arguments = {key: value for key, value in arguments.items() if key in signature.parameters}
    tensors = ["input", "residual", "gate", "weight", "bias", "scale", "shift"]
    for argument in [each for each in tensors if each in signature.parameters]:
        if argument == "input" and "nested" in layout and not name.endswith("2d"):
            continue
        wrong = arguments | {argument: LAYOUTS[layout](torch.ones(4))}
        names = {"scale": "weight (scale)", "shift": "bias (shift)", "gate": "input_scale (gate)"}
        named = "gate" if name.startswith("gated") and argument == "gate" else names.get(argument, argument)
        message = f"Expected {named} to be a strided tensor, but got {layout.strip().replace('gate', named)}"
        for mode in (contextlib.nullcontext, torch.inference_mode):
            with mode(), pytest.raises(NotImplementedError, match=f"^{re.escape(message)}"):
                function(**wrong)


ERRORS = FUNCTION_ERRORS | {  # fake tensors would raise torch's error of devices
    "Expected weight to be on the device of input": lambda: layer_norm(ROWS, (8,), torch.ones(8, device="meta")),
    "Expected input_scale (gate) to be on the device of input": (
        lambda: add_rms_norm(ROWS, ROWS, (8,), gate=torch.ones(8, device="meta"))
    ),
    "Expected gate to be on the device of input, but got gate on meta": (
        lambda: gated_rms_norm(ROWS, ROWS.to("meta"), (8,))
    ),
    "Expected bias (shift) to be on the device of input": (
        lambda: ada_layer_norm(ROWS, (8,), None, torch.ones(3, 8, device="meta"))
    ),
}


def compile_module(module):
    torch.compile(module, backend="aot_eager", fullgraph=True)(X)


TRACERS = {  # a function that traces a module, and the operators that it records
    "compile": (compile_module, "kernel"),
    "compile as aten": (compile_module, "aten"),
    "export": (lambda module: torch.export.export(module, (X,), strict=False), "aten"),
    "jit.trace": (lambda module: torch.jit.trace(module, X), "aten"),
}


@pytest.mark.parametrize(("message", "call"), ERRORS.items())
@pytest.mark.parametrize(("trace", "operators"), TRACERS.values(), ids=TRACERS)
def test_tracers_give_the_errors_of_eager_calls(message, call, trace, operators):
    class Module(torch.nn.Module):
        def forward(self, x):
            return x, call()

    with raises(message) as eager:
        call()
    with trace_as(operators), pytest.raises(RuntimeError) as traced:
        trace(Module())
    traced_message = re.sub(r"tensor\((\d+)\)", r"\1", str(traced.value))  # torch.jit.trace makes tensors of sizes
    expected = str(eager.value).partition("\n")[0]
    assert expected in traced_message or "Tensor device mismatch" in traced_message  # Dynamo's own check


# Without a CUDA device there are no CUDA tensors, so these tests call operators by dispatch key.
CUDA_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


@pytest.mark.skipif(_build_info.with_cuda, reason="the package was built with CUDA")
@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (torch.ops.layernorm.forward.default, (X, [3])),
        (torch.ops.layernorm.forward.fused, (X, [3], None, None, 1e-5, X)),
        (torch.ops.layernorm.backward.default, (X, X, [3], None, STATISTICS, None, None, [True] * 6)),
    ],
    ids=["forward", "fused", "backward"],
)
def test_build_without_cuda(operator, arguments):
    """A CUDA tensor gets this error."""
    with raises("layernorm_ext was built without CUDA kernels, for a reason that `python -m layernorm_ext` prints"):
        operator.redispatch(CUDA_KEYS, *arguments)


@pytest.mark.skipif(not _build_info.with_cuda or torch.cuda.is_available(), reason="needs CUDA kernels and no GPU")
def test_cuda_runtime_failure_is_a_runtime_error():
    message = r"^layernorm: [\w ]+: (CUDA driver|no CUDA-capable device)"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.layernorm.forward.default.redispatch(CUDA_KEYS, X, [3], None, None, 1e-5)
    arguments = (X, X, [3], STATISTICS, STATISTICS, None, None, [True] * 6)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.layernorm.backward.default.redispatch(CUDA_KEYS, *arguments)
