"""The public functions and modules with their options, and the functions' formulas."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import layernorm_ext
from support.reference import norm

EPS = 2.0**-10  # not the default of any function, and exact in float32, in which ONNX stores eps


@dataclass(frozen=True)
class Member:
    """A public function with some of its options. Calls pass four tensors; it gets those that it has arguments for.

    x [*, C] is the input; r [*, C] the residual, or the gate of a gated norm; w the weight or scale; and b the bias or
    shift. With the option "gate", b is also the gate that multiplies x before the residual is added. w and b are [C]
    or, if they differ between rows, have batch dimensions. The result is a tuple: the output and, with a residual, the
    sum. The channels are last for functions of images too: the call moves them to dimension 1 and back.
    """

    function: Callable
    options: dict

    @property
    def name(self):
        return ", ".join([self.function.__name__, *self.options])

    @property
    def adds_residual(self):
        return "add" in self.name

    @property
    def is_gated_norm(self):
        return self.name.startswith("gated")

    @property
    def takes_r(self):
        return self.adds_residual or self.is_gated_norm

    @property
    def takes_images(self):
        return "2d" in self.name

    @property
    def has_bias(self):
        return "rms" not in self.name or "ada" in self.name

    @property
    def takes_b(self):
        return self.has_bias or "gate" in self.options

    def arguments(self, x, r, w, b):
        """Return the positional arguments of the function and its options. The channels of images are dimension 1."""
        shape = [] if self.takes_images else [(x.size(-1),)]  # strided nested tensors have size(-1), but no shape
        arguments = [x, *[r] * self.takes_r, *shape, w, *[b] * self.has_bias]
        return arguments, self.options | ({"gate": b} if "gate" in self.options else {})

    def __call__(self, x, r, w, b):
        tensors, options = self.arguments(*(channels_second(t) if self.takes_images else t for t in (x, r, w, b)))
        if "inplace" in self.options:
            tensors[1] = tensors[1].clone()  # a leaf cannot change in place
        results = self.function(*tensors, eps=EPS, **options)
        results = results if self.adds_residual else (results,)
        if "inplace" in self.options:
            results = (results[0], tensors[1])
        return tuple(y.movedim(1, y.dim() - 1) for y in results) if self.takes_images else results

    def formula(self, x, r, w, b):
        # A parameter [N, C] becomes [N, 1, ..., C].
        w, b = (p if p.dim() in (1, x.dim()) else p[:, *[None] * (x.dim() - 2)] for p in (w, b))
        options = {name: self.options[name] for name in ("num_groups", "gate_first") if name in self.options}
        options["sigmoid"] = "activation" in self.options
        options["zero_centered_weight"] = "ada" in self.name or "zero_centered_weight" in self.options
        options |= {"residual": r if self.adds_residual else None, "input_scale": b if "gate" in self.options else None}
        options |= {"gate": r if self.is_gated_norm else None, "rms": "rms" in self.name}
        y, total, _ = norm(x, w, b if self.has_bias else None, EPS, **options)
        return (y, total) if self.adds_residual else (y,)


def channels_second(t):
    """Return rows or parameters [N, *, C] as images [N, C, *]; a parameter [C] or None stays."""
    return t if t is None or t.dim() == 1 else t.movedim(t.dim() - 1, 1)


SIGMOID_FIRST = {"activation": "sigmoid", "gate_first": True}
OPTIONS = {  # function -> the options of each of its members
    "layer_norm": [{}, {"zero_centered_weight": True}, {"memory_efficient": True}],
    "rms_norm": [{}, {"zero_centered_weight": True}],
    "add_layer_norm": [{}, {"inplace": True}, {"gate": True}],
    "add_rms_norm": [{"zero_centered_weight": True}, {"gate": True, "inplace": True}],
    "ada_layer_norm": [{}],
    "ada_rms_norm": [{}],
    "add_ada_layer_norm": [{"gate": True}],
    "add_ada_rms_norm": [{}],
    "gated_layer_norm": [{}, SIGMOID_FIRST],
    "gated_rms_norm": [{"activation": "sigmoid"}, {"gate_first": True, "num_groups": 2, "zero_centered_weight": True}],
}
MEMBERS = [
    Member(getattr(layernorm_ext, name + suffix), options)
    for suffix in ("", "_2d")
    for name, choices in OPTIONS.items()
    for options in choices
    if not suffix or name in ("layer_norm", "rms_norm")  # the functions of images
]
MODULES = [
    getattr(layernorm_ext, name)
    for name in layernorm_ext.__all__
    if name.removesuffix("2d").endswith("Norm") and name != "LazyLayerNorm"
]
family = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)


def flags(module_class):
    """Return the names of the options that are False by default, which this package's modules add to torch's."""
    return [p.name for p in inspect.signature(module_class).parameters.values() if p.default is False]


ROWS, IMAGES = (3, 5, 8), (2, 8, 5, 3)

# Every module with each of its options: its class, the options, and the shapes of its inputs.
MODULE_CASES = [
    (layernorm_ext.LayerNorm, {"normalized_shape": (5, 8)}, [ROWS]),
    (layernorm_ext.AdaRMSNorm, {}, [ROWS, (8,), ROWS]),
    (layernorm_ext.GatedLayerNorm, {"activation": "sigmoid"}, [ROWS, ROWS]),
    (layernorm_ext.GatedRMSNorm, {"num_groups": 4}, [ROWS, ROWS]),
    (layernorm_ext.GatedRMSNorm, {"num_groups": 4}, [ROWS]),
]
for module_class in MODULES:
    name = module_class.__name__
    shape = IMAGES if name.endswith("2d") else ROWS
    per_sample = (shape[0], 8)
    # The shapes of the inputs after x: residual, scale, shift, gate. All may be absent, except that AddAda modules
    # need the residual.
    others = {
        "Ada": [[per_sample] * 2, []],
        "Add": [[shape], [shape, per_sample], []],
        "AddAda": [[shape, *[per_sample] * 3], [shape, per_sample], [shape]],
        "Gated": [[shape], []],
    }
    choices = [{}, {"eps": 0.1}, *({flag: True} for flag in flags(module_class))]
    choices += [] if "Ada" in name else [{"elementwise_affine": False}, {"dtype": torch.float64}]
    prefix = name.removesuffix("LayerNorm").removesuffix("RMSNorm")
    for shapes in others.get(prefix, [[]]):
        MODULE_CASES += [(module_class, options, [shape, *shapes]) for options in choices]
module_cases = pytest.mark.parametrize(
    ("cls", "options", "shapes"), MODULE_CASES, ids=lambda v: getattr(v, "__name__", str(v))
)


def module_and_inputs(cls, options, shapes):
    """Return a module with random parameters, and inputs of their dtype; 8 features if no option says how many."""
    module = cls(**options) if "normalized_shape" in options else cls(8, **options)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    dtype = options.get("dtype", torch.float32)
    return module, [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def with_gradients(function, tensors, grad_outputs=None, **options):
    """Return a function's outputs and the gradients of its tensors; the default upstream gradients are sin(outputs)."""
    outputs = function(*tensors)
    grad_outputs = [y.detach().sin() for y in outputs] if grad_outputs is None else grad_outputs[: len(outputs)]
    options = {"materialize_grads": True} | options
    return outputs, torch.autograd.grad(outputs, tensors, grad_outputs, **options)
