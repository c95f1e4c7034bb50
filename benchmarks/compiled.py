"""Time blocks under torch.compile: written with this package's norms, fused, called by hand, and with torch's norms.

`fused` compiles the same code as `written` with `layernorm_ext.fusion.fuse_neighbors`; `by hand` calls the function
that adds, gates and modulates. Training is forward and backward.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layernorm_ext
from layernorm_ext.fusion import fuse_neighbors

from .cases import EPS, PAIRS
from .contenders import Calls, Contender, results_of, time_pass
from .timing import Device
from .train_digits import Block

BATCH, ROWS, COLS = 16, 256, 768
X, PARAMETER, PER_SAMPLE = (BATCH, ROWS, COLS), (COLS,), (BATCH, 1, COLS)
Results = Tensor | tuple[Tensor, ...]


def residual_norm(norm: Callable, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Results:
    total = x + residual
    return norm(total, (COLS,), weight, bias, EPS), total


def residual_norm_modulate(norm: Callable, x: Tensor, residual: Tensor, scale: Tensor, shift: Tensor) -> Results:
    total = x + residual
    return norm(total, (COLS,), eps=EPS) * (1 + scale) + shift, total


def gate_residual_norm_modulate(norm: Callable, x: Tensor, residual: Tensor, *modulation: Tensor) -> Results:
    gate, scale, shift = modulation
    total = residual + gate * x
    return norm(total, (COLS,), eps=EPS) * (1 + scale) + shift, total


def norm_modulate(norm: Callable, x: Tensor, scale: Tensor, shift: Tensor) -> Results:
    return norm(x, (COLS,), eps=EPS) * (1 + scale) + shift


def norm_gelu(norm: Callable, x: Tensor, weight: Tensor, bias: Tensor) -> Results:
    return F.gelu(norm(x, (COLS,), weight, bias, EPS))


def add_ada(x: Tensor, residual: Tensor, *modulation: Tensor) -> Results:
    *gate, scale, shift = modulation
    options = {"gate": gate[0]} if gate else {}
    return layernorm_ext.add_ada_layer_norm(x, residual, (COLS,), scale, shift, EPS, **options)


# name -> the shapes of the inputs, the block with the function of a norm, and the call by hand; None for modules
BLOCKS = {
    "norm, GELU": ([X, PARAMETER, PARAMETER], norm_gelu, None),
    "residual, norm": (
        [X, X, PARAMETER, PARAMETER],
        residual_norm,
        lambda x, residual, *parameters: layernorm_ext.add_layer_norm(x, residual, (COLS,), *parameters, EPS),
    ),
    "residual, norm, modulate": ([X, X, PER_SAMPLE, PER_SAMPLE], residual_norm_modulate, add_ada),
    "gate, residual, norm, modulate": ([X, X, *[PER_SAMPLE] * 3], gate_residual_norm_modulate, add_ada),
    "norm, modulate": (
        [X, PER_SAMPLE, PER_SAMPLE],
        norm_modulate,
        lambda x, scale, shift: layernorm_ext.ada_layer_norm(x, (COLS,), scale, shift, EPS),
    ),
    "pre-norm transformer block": ([(BATCH // 8, ROWS, COLS)], None, None),
}


def functions_of(block: str, device: Device, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, tuple]]:
    """Return the inputs of a block and its contenders: the function, its parameters, and the pass that compiles it."""
    shapes, function, by_hand = BLOCKS[block]
    if function:
        written = partial(function, layernorm_ext.layer_norm)
        contenders = {"written": (written, [], None), "fused": (written, [], fuse_neighbors)}
        contenders |= {"by hand": (by_hand, [], None)} if by_hand else {}
        contenders["torch"] = partial(function, F.layer_norm), [], None
    else:
        theirs, ours = (Block(COLS, COLS // 64, library.LayerNorm) for library in (nn, layernorm_ext))
        ours.load_state_dict(theirs.state_dict())
        modules = {"written": (ours, None), "fused": (copy.deepcopy(ours), fuse_neighbors), "torch": (theirs, None)}
        contenders = {
            name: (module.to(device.name, dtype), list(module.parameters()), joins)
            for name, (module, joins) in modules.items()
        }
    return [torch.randn(shape, device=device.name).to(dtype) for shape in shapes], contenders


def bind(function: Callable[..., Results], inputs: list[Tensor], parameters: list[Tensor]) -> list[Calls]:
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    return [Calls(partial(function, *inputs), [*inputs, *parameters], inputs[0].detach().flip(0))]


def measure(device: Device, block: str, dtypes: str, seconds: float) -> Iterator[dict]:
    """Yield a record for each pass and contender."""
    torch.compiler.reset()
    dtype = PAIRS[dtypes][0]
    inputs, contenders = functions_of(block, device, dtype)
    function, parameters, _ = contenders["torch"]
    if parameters:
        function = copy.deepcopy(function).double()
        parameters = list(function.parameters())
    (exact,) = bind(function, [tensor.double() for tensor in inputs], parameters)
    expected, entries = results_of(exact), []
    for name, (function, parameters, joins) in contenders.items():
        options = {"pre_grad_custom_pass": joins} if joins else None
        compiled = torch.compile(function, fullgraph=True, dynamic=False, options=options)
        entries.append(Contender(name, dtype, partial(bind, compiled, inputs, parameters), expected))
    for name, pass_name in ("forward", "forward"), ("training", "both"):
        yield from time_pass(device, entries, {"block": block, "dtypes": dtypes, "pass": name}, pass_name, seconds)
