"""Random calls of every operator, most of them invalid: see test_operator_calls.py.

Each call must raise an error that names an argument, or return the results of the formulas in float64. The shape
functions, which torch calls for meta tensors, must give the same errors, shapes, dtypes and strides. A seed determines
a call: ``python -m support.operator_calls 0 100000`` makes the calls of 100,000 seeds and prints each fault. With
``--show`` it also prints each seed before its call, so that the last one belongs to a call that crashes.
"""

import random
import re
import sys
import warnings
from types import SimpleNamespace

import torch

import layernorm_ext  # noqa: F401  (registers the operators)
from support.reference import Backward, Forward, activate, norm

OPERATORS = {
    name: getattr(getattr(torch.ops.layernorm, name.partition(".")[0]), name.partition(".")[2] or "default")
    for name in ("forward", "forward.fused", "forward_.fused", "backward")
}
CHECKS = {"check": torch.ops.layernorm.check.default}  # the checks of forward.fused alone
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

# Relative to the largest result. Rounding errors are 100 times smaller, and wrong formulas are off by about 1.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


# Valid calls

KINDS = {"forward": ["plain"], "forward_.fused": ["residual", "scaled input and residual"]}
ALL_KINDS = ["plain", "residual", "scaled input and residual", "gate"]


def valid_call(name, rng):
    """Return the arguments of a valid call by their names."""
    batch = rng.choice([(), (3,), (1,), (2, 3), (5, 4, 2), (1, 7), (0, 3), (2, 70)])
    shape = rng.choice([(4,), (16,), (2, 8), (1,), (33,)])  # normalized_shape
    dtype = rng.choice(DTYPES)
    accumulation_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    kind = rng.choice(KINDS.get(name, ALL_KINDS))
    parameter_batch = [rng.choice([1, size]) for size in batch]
    images = bool(batch) and len(shape) == 1 and rng.random() < 0.3
    images &= kind == "plain"
    may_have_groups = len(shape) == 1 and not images and "residual" not in kind
    num_groups = rng.choice([n for n in (1, 2, 4, 11) if may_have_groups and shape[0] % n == 0] or [1])
    flags = {flag: rng.random() < 0.3 for flag in ("rms", "zero_centered_weight", "memory_efficient")}
    flags["memory_efficient"] &= kind == "plain" and not flags["rms"]

    def lay_out(t):
        """Move the channels of images to dimension 1; half of them are channels last in memory. Rows stay."""
        t = t.movedim(-1, 1) if images and t.dim() > 1 else t
        return t if rng.random() < 0.5 else t.contiguous()

    def draw(dtype):
        return lay_out(torch.randn((*batch, *shape), dtype=torch.float64)).to(dtype)

    def parameter(least=0.5):
        """Return numbers in [least, least + 1), because memory_efficient divides by a weight."""
        # Parameters of images do not differ between pixels, the dimensions of the batch after the first one.
        own = [size if d == 0 or not images else 1 for d, size in enumerate(parameter_batch)]
        first = own[:1] if images else own[: rng.randint(0, len(own))]  # the later batch dimensions may be absent
        sizes = rng.choice([shape, (*own, *shape), (*[1] * len(batch), *shape), (*first, *shape)])
        values = lay_out(torch.rand(sizes, dtype=torch.float64)) + least
        return values.to(rng.choice([dtype, accumulation_dtype, rng.choice(DTYPES)]))

    args = {"input": draw(dtype), "normalized_shape": list(shape)}
    args["weight"] = rng.choice([None, parameter(least=-0.5 if flags["zero_centered_weight"] else 0.5)])
    args["bias"] = rng.choice([None, parameter()])
    if name != "forward":
        args["input_scale"] = parameter() if kind == "scaled input and residual" else None
    args |= flags | {"images": images, "num_groups": num_groups}
    args |= {"sigmoid": rng.random() < 0.5, "gate_first": rng.random() < 0.5}
    if kind == "gate":
        args["gate"] = draw(rng.choice([dtype, accumulation_dtype]))
    if "forward" in name:
        args["eps"] = 0.01
        if "residual" in kind:
            args["residual"] = draw(rng.choice([dtype, accumulation_dtype]))
        return args
    # For backward, the input of a norm with a residual is the sum.
    if "residual" in kind or (kind == "plain" and num_groups == 1 and not (images or flags["memory_efficient"])):
        args["input"] = args["input"].to(rng.choice([dtype, accumulation_dtype]))
        args["grad_sum"] = rng.choice([None, draw(args["input"].dtype)])
    if kind == "scaled input and residual":
        args["scaled_input"] = draw(dtype)
    args["grad_output"] = draw(dtype)
    args["output_mask"] = [rng.random() < 0.7 for _ in range(6)]
    statistics = Forward(as_rows(args["input"].double(), args), 0.01, flags["rms"])
    for key, t in (("mean", statistics.mean), ("rstd", statistics.rstd)):
        ones = [] if num_groups > 1 else [1] * len(shape)  # the normalized dimensions
        args[key] = None if t is None else lay_out(t.reshape(*t.shape[:-1], *ones)).to(accumulation_dtype)
    return args


# Changes that make a call invalid or unusual


def other_shape(t, rng):
    choices = [t[None], t.flatten(), t.new_ones(7), t.new_ones(())]
    return rng.choice([*choices, t[..., :1], t[:1], torch.cat([t, t], -1)] if t.dim() else choices)


def other_dtype(t, rng):
    return t.to(rng.choice([*DTYPES, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn]))


def other_layout(t, rng):
    t = t.float()
    return rng.choice(
        [
            t.to_sparse,
            t.reshape(-1, t.size(-1) if t.numel() else 1).to_sparse_csr if t.dim() else t.to_sparse,
            t.to_mkldnn,
            lambda: torch.quantize_per_tensor(t, 0.1, 0, torch.quint8),
            lambda: torch.nested.nested_tensor([t, t] if t.dim() else [t[None]]),
            lambda: torch.nested.nested_tensor([t, t] if t.dim() else [t[None]], layout=torch.jagged),
        ]
    )()


def freed(t, rng):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def overlapping(t, rng):
    """Return a tensor some of whose elements share memory."""
    dim = rng.randrange(t.dim()) if t.dim() else 0
    return t.narrow(dim, 0, 1).expand(t.shape) if t.numel() and t.dim() else t


def frames(t, rng):
    """Return a view whose rows overlap, like the frames of a signal."""
    if not t.numel() or not t.dim():
        return t
    strides = [rng.randint(1, 2) for _ in t.shape]
    size = 1 + sum(stride * (n - 1) for stride, n in zip(strides, t.shape, strict=True))
    return t.flatten().repeat(2 * t.dim())[:size].as_strided(t.shape, strides)


def strided(t, rng):
    """Return the values with another order of dimensions in memory, or with gaps between elements."""
    dims = rng.sample(range(t.dim()), t.dim())
    back = sorted(range(t.dim()), key=dims.__getitem__)
    return rng.choice([t.permute(dims).contiguous().permute(back), torch.stack([t, t], -1)[..., 0]])


CHANGES = {
    "None": lambda t, rng: None,
    "shape": other_shape,
    "dtype": other_dtype,
    "device": lambda t, rng: t.to("meta"),
    "layout": other_layout,
    "freed": freed,
    "empty": lambda t, rng: t.new_empty([0, *t.shape[1:]]),
    "negative": lambda t, rng: torch._neg_view(-t),
    "zeros": lambda t, rng: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "overlapping": overlapping,
    "frames": frames,
    "strided": strided,
}
VALUES = {
    "rms": [False, True],
    "zero_centered_weight": [False, True],
    "memory_efficient": [False, True],
    "images": [False, True],
    "num_groups": [None, 1, 2, 3, 0, -1],
    "gate_first": [False, True],
    "sigmoid": [False, True],
    "normalized_shape": [[], [3], [0], [-1], [4], [4, 4, 4, 4, 4]],
}


def change(name, args, rng):
    """Change up to two tensors and up to one other argument; return what has changed in words."""
    changes, ones = [], torch.ones_like(args.get("input", torch.ones(2)))
    schema = (OPERATORS | CHECKS)[name]._schema.arguments
    tensors = [argument.name for argument in schema if "Tensor" in str(argument.type)]
    others = [argument.name for argument in schema if argument.name in VALUES]
    for key in rng.sample(tensors, min(len(tensors), rng.choice([0, 1, 1, 1, 2]))):
        kind = rng.choice(list(CHANGES))
        if (key, kind) == ("bias", "freed") and name.startswith("backward"):
            continue  # valid where backward needs only the shape and dtype of the bias
        if (key, kind) == ("residual", "frames") and name.startswith("forward_"):
            continue  # torch's check of tensors that change in place accepts some overlaps
        value = ones if args.get(key) is None else args[key]
        args[key] = CHANGES[kind](value, rng)
        changes.append(f"{key}: {kind}")
    if others and rng.random() < 0.25:
        key = rng.choice(others)
        args[key] = rng.choice(VALUES[key])
        changes.append(f"{key}={args[key]}")
    return changes


# Exact results, in float64


def as_rows(t, args):
    """Return an argument or result as [*, cols] or [*, groups, cols], broadcasting to the input (csrc/ops/shapes.h)."""
    dims, normalized_dims = args["input"].dim(), len(args["normalized_shape"])
    groups = args.get("num_groups") or 1
    if t.dim() > normalized_dims and args["images"]:
        t = t.reshape(*t.shape, *[1] * (dims - t.dim())).movedim(1, -1)
    while normalized_dims < t.dim() < dims:  # a parameter [N, cols] applies to each row of a sample
        t = t.unsqueeze(-1 - normalized_dims)
    t = t.flatten(-normalized_dims)
    return t if groups == 1 else t.unflatten(-1, (groups, t.shape[-1] // groups))


def exact_results(name, args):
    """Return the exact results of a call by their names, as rows (see as_rows())."""
    values = {key: as_rows(t.double(), args) if isinstance(t, torch.Tensor) else t for key, t in args.items()}
    return (forward if "forward" in name else backward)(**values)


def forward(input, normalized_shape, memory_efficient, images, num_groups, **options):
    output, total, statistics = norm(input, **options)
    return {"output": output, "total": total, "mean": statistics.mean, "rstd": statistics.rstd}


def backward(
    grad_output, input, rstd, output_mask, weight=None, bias=None, grad_sum=None, gate=None, input_scale=None,
    scaled_input=None, rms=False, zero_centered_weight=False, memory_efficient=False, num_groups=None, sigmoid=False,
    gate_first=False, **_,
):  # fmt: skip
    """Return the gradients by their names, from the given rstd and, with memory_efficient, from the output."""
    factor, derivative = (None, None) if gate is None else activate(gate, sigmoid)[:2]
    gates_input, gates_output = gate is not None and gate_first, gate is not None and not gate_first
    x, dy = input * factor if gates_input else input, grad_output * factor if gates_output else grad_output
    w, b = 1 if weight is None else weight + zero_centered_weight, 0 if bias is None else bias
    xhat = (x - b) / w if memory_efficient else x * rstd  # with memory_efficient, the input is forward's output
    xhat = xhat if rms else xhat - xhat.mean(-1, keepdim=True)
    forward = SimpleNamespace(xhat=xhat, rstd=rstd)  # has what Backward reads of a Forward
    dx = Backward(dy, forward, w, rms, 0 if grad_sum is None else grad_sum).grad_input

    # The gradient of an absent parameter has the shape of the other one or, if both are absent, of a row.
    row = x.shape[-1 if num_groups in (None, 1) else -2 :]
    shape = next((p.shape for p in (weight, bias) if p is not None), row)
    shapes = (shape if p is None else p.shape for p in (weight, bias))
    results = [dx * factor if gates_input else dx, *map(torch.Tensor.sum_to_size, (dy * xhat, dy), shapes)]
    results.append(dx * input * derivative if gates_input else None)
    if gates_output:
        results[3] = grad_output * (xhat * w + b) * derivative
    results.append(None if input_scale is None else input_scale * dx)
    results.append(None if scaled_input is None else (scaled_input * dx).sum_to_size(input_scale.shape))
    names = ("grad_input", "grad_weight", "grad_bias", "grad_gate", "grad_scaled_input", "grad_input_scale")
    return {name: t if requested else None for name, t, requested in zip(names, results, output_mask, strict=True)}


# Calls


def is_plain(value):
    """Return whether a value is an ordinary tensor: strided, with memory, neither meta nor quantized; or no tensor."""
    if not isinstance(value, torch.Tensor):
        return True
    if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_nested or value.is_quantized:
        return False
    return not value.is_meta and (value._is_zerotensor() or not value.numel() or value.untyped_storage().nbytes() > 0)


def like(value):
    """Return a meta tensor with the shape, strides and dtype of a plain tensor; another value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    strides = [0] * value.dim() if value._is_zerotensor() else value.stride()  # the kernels get an expanded zero
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device="meta")


def metadata(t):
    """Return shape, dtype and strides. Strides of dimensions of size 1 do not count: torch may choose them."""
    if t is None:
        return None
    return t.shape, t.dtype, [(n, stride) for n, stride in zip(t.shape, t.stride(), strict=True) if t.numel() and n > 1]


def outcome(function, args):
    """Return the results of a call as a list, or the first line of its error."""
    try:
        results = function(**args)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return list(results) if isinstance(results, tuple | list) else [results]


# Errors of torch that name no argument: of residuals that cannot be changed in place, and of calls without any tensor.
TORCH_ERRORS = ("ZeroTensors are immutable", "unsupported operation: ", "There were no tensor arguments")
# Parts of messages that a user should never see.
INTERNAL = ("Unknown keyword", "expected at most", "Internal", "INTERNAL", "Could not run", "Undefined")


def fault(name, args):
    """Make a call and return what is wrong with its error or its results, or None."""
    function = (OPERATORS | CHECKS)[name]
    plain = all(is_plain(value) for value in args.values())
    before = dict(args)
    if plain and args.get("residual") is not None:
        before["residual"] = args["residual"].clone()  # forward_ changes it
    actual = outcome(function, args)
    if isinstance(actual, str):
        if not actual.startswith(TORCH_ERRORS):
            named = any(re.search(rf"\b{key}\b", actual) for key in (*args, "scaled_input"))
            if not named or any(word in actual for word in INTERNAL):
                return f"the error names no argument: {actual}"
        if not plain or actual.startswith(TORCH_ERRORS) or "ot allocated" in actual:
            return None  # meta tensors do not raise these errors
        expected = outcome(function, {key: like(value) for key, value in args.items()})
        return None if actual == expected else f"the shape function says {expected!r}, and the operator {actual!r}"
    if name in CHECKS:
        return None
    if not plain:
        return None if all(t is None or t.is_meta for t in actual) else f"accepts {describe(args)}"
    expected = outcome(function, {key: like(value) for key, value in args.items()})
    if isinstance(expected, str):
        return f"only the shape function refuses the call: {expected}"
    if name == "forward":  # has no sum
        actual.insert(1, None)
        expected.insert(1, None)
    if name == "forward_.fused":  # has written the sum into the residual
        actual.insert(1, args["residual"])
        expected.insert(1, like(args["residual"]))
    for t, e in zip(actual, expected, strict=True):
        if metadata(t) != metadata(e):
            return f"a result of {describe({'': t})} is {describe({'': e})} for the shape function"
    return compare(name, before, actual)


def compare(name, args, actual):
    """Return which result is wrong, or None."""
    weight = args.get("weight")
    if args["memory_efficient"] and "backward" in name and weight is not None:
        divisor = weight.double() + args["zero_centered_weight"]
        if divisor.numel() and divisor.abs().min() < 0.1:  # a division by it magnifies rounding errors
            return None
    dtype = max((t.dtype for t in args.values() if isinstance(t, torch.Tensor)), key=lambda d: TOLERANCES.get(d, 0))
    for (key, expected), result in zip(exact_results(name, args).items(), actual, strict=True):
        if (result is None) != (expected is None):
            return f"{key} is {result}, not {expected}"
        if result is None:
            continue
        if args["input"].numel() == 0:
            if result.any():
                return f"{key} of empty input is {result}"
            continue
        result = as_rows(result.double(), args)
        error = (result - expected.expand(result.shape)).abs().max().item()
        if not error <= TOLERANCES[dtype] * (1 + expected.abs().max().item()):
            return f"{key} is off by {error}"
    return None


def describe(args):
    tensors = {key: t for key, t in args.items() if isinstance(t, torch.Tensor)}
    return ", ".join(f"{key} {t.dtype} {t.device} {t.layout} {t.stride()}" for key, t in tensors.items())


def run(seeds, show):
    """Make the call of each seed; return what is wrong in words. `show` is called with the seed before its call."""
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    faults = []
    for seed in seeds:
        show(seed)
        rng = random.Random(seed)
        torch.manual_seed(seed)
        name = rng.choice([*OPERATORS, *OPERATORS, *CHECKS])
        args = valid_call("forward.fused" if name in CHECKS else name, rng)
        changes = change(name, args, rng)
        wrong = fault(name, args)
        if wrong:
            faults.append(f"seed {seed}, {name}, {', '.join(changes) or 'unchanged'}: {wrong}")
    return faults


if __name__ == "__main__":
    show = (lambda seed: print(seed, flush=True)) if "--show" in sys.argv else lambda seed: None
    found = run(range(int(sys.argv[1]), int(sys.argv[2])), show)
    print(*found, sep="\n")
    sys.exit(bool(found))
