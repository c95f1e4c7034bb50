"""The public functions and modules with their options, and the functions' formulas in torch's operations."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import layernorm_ext

EPS = 2.0**-10  # the default of no function, and exact in float32, which ONNX has


@dataclass(frozen=True)
class Member:
    """A function of input and residual [*, C], weight and bias [C], with batch dimensions if it is adaptive.

    It returns a tuple of the output and, if it adds the residual, the sum. The functions of images get the channels
    second.
    """

    function: Callable
    options: dict

    @property
    def name(self):
        return ", ".join([self.function.__name__, *self.options])

    @property
    def adds(self):
        return "add" in self.name

    @property
    def takes_images(self):
        return "2d" in self.name

    @property
    def has_bias(self):
        return "rms" not in self.name or "ada" in self.name

    def __call__(self, x, r, w, b):
        tensors = [x, r, w] if self.adds else [x, w]
        tensors += [b] if self.has_bias else []
        if self.takes_images:
            tensors = [t.movedim(t.dim() - 1, 1) if t.dim() > 1 else t for t in tensors]
        else:
            tensors.insert(2 if self.adds else 1, (x.size(-1),))  # a strided nested tensor has no shape
        if "inplace" in self.options:
            tensors[1] = tensors[1].clone()  # a leaf cannot change in place
        results = self.function(*tensors, eps=EPS, **self.options)
        results = results if self.adds else (results,)
        if "inplace" in self.options:
            results = (results[0], tensors[1])
        return tuple(y.movedim(1, y.dim() - 1) for y in results) if self.takes_images else results

    def formula(self, x, r, w, b):
        total = x + r if self.adds else x
        w, b = (p if p.dim() in (1, x.dim()) else p[:, *[None] * (x.dim() - 2)] for p in (w, b))  # [N, C]
        w = w + 1 if "ada" in self.name or "zero_centered_weight" in self.options else w
        y = formula(total, w, b if self.has_bias else None, rms="rms" in self.name)
        return (y, total) if self.adds else (y,)


def formula(x, weight=None, bias=None, rms=False):
    """Return the output in terms of operations that autograd differentiates to any order."""
    d = x if rms else x - x.mean(-1, keepdim=True)
    y = d / (d.square().mean(-1, keepdim=True) + EPS).sqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


OPTIONS = {
    "layer_norm": [{}, {"zero_centered_weight": True}, {"memory_efficient": True}],
    "rms_norm": [{}, {"zero_centered_weight": True}],
    "add_layer_norm": [{}, {"inplace": True}],
    "add_rms_norm": [{"zero_centered_weight": True}],
    "ada_layer_norm": [{}],
    "ada_rms_norm": [{}],
}
MEMBERS = [
    Member(getattr(layernorm_ext, name + suffix), options)
    for suffix in ("", "_2d")
    for name, choices in OPTIONS.items()
    for options in choices
]
MODULES = [
    getattr(layernorm_ext, name)
    for name in layernorm_ext.__all__
    if name.removesuffix("2d").endswith("Norm") and name != "LazyLayerNorm"
]
family = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)


def flags(module_class):
    """Return the names of the keyword-only options, which torch's modules lack."""
    return [p.name for p in inspect.signature(module_class).parameters.values() if p.kind == p.KEYWORD_ONLY]


ROWS, IMAGES = (3, 5, 8), (2, 8, 5, 3)

# Every module with each of its options: its class, the options, and the shapes of its inputs.
MODULE_CASES = [
    (layernorm_ext.LayerNorm, {"normalized_shape": (5, 8)}, [ROWS]),
    (layernorm_ext.AdaRMSNorm, {}, [ROWS, (8,), ROWS]),
    (layernorm_ext.AdaRMSNorm2d, {}, [IMAGES, (2, 8, 1, 1)]),
]
for module_class in MODULES:
    shape = IMAGES if module_class.__name__.endswith("2d") else ROWS
    others = {"Add": [shape], "Ada": [(shape[0], 8)] * 2}.get(module_class.__name__[:3], [])
    choices = [{}, {"eps": 0.1}, *({flag: True} for flag in flags(module_class))]
    choices += [] if "Ada" in module_class.__name__ else [{"elementwise_affine": False}, {"dtype": torch.float64}]
    MODULE_CASES += [(module_class, options, [shape, *others]) for options in choices]
    if others:  # the residual, or scale and shift, may be absent
        MODULE_CASES += [(module_class, options, [shape]) for options in choices]
module_cases = pytest.mark.parametrize(
    ("cls", "options", "shapes"), MODULE_CASES, ids=lambda v: getattr(v, "__name__", str(v))
)


def module_and_inputs(cls, options, shapes):
    """Return a module for 8 features with random parameters, and inputs of their dtype."""
    module = cls(**options) if "normalized_shape" in options else cls(8, **options)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    dtype = options.get("dtype", torch.float32)
    return module, [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def with_gradients(function, tensors, grad_outputs=None, **options):
    """Return the outputs of a function and, for a given or simple loss, the gradients of all tensors."""
    outputs = function(*tensors)
    grad_outputs = [y.detach().sin() for y in outputs] if grad_outputs is None else grad_outputs[: len(outputs)]
    options = {"materialize_grads": True} | options
    return outputs, torch.autograd.grad(outputs, tensors, grad_outputs, **options)
