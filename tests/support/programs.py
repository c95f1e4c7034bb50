"""Random programs around norms, for the pass that fuses norms with their neighbors."""

import contextlib
import operator
import random
import re
from functools import partial

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

import layernorm_ext
from support.reference import F64

# The arguments of a program: activations; parameters for all rows, per sample (s, h, g), and per position (p).
SHAPES = {"x": (2, 3, 8), "r": (2, 3, 8), "q": (3, 2, 8), "w": (8,), "b": (8,)}
SHAPES |= {"s": (2, 1, 8), "h": (2, 1, 8), "g": (2, 1, 8), "p": (1, 3, 8)}
NAMES = {"torch": torch, "F": F, "no_grad": torch.no_grad}
EPS = 1e-5  # for all norms, so that graph_of() need not compute RMSNorm's default
NAMES |= {name: partial(getattr(layernorm_ext, name), eps=EPS) for name in ("layer_norm", "rms_norm", "gated_rms_norm")}

# Template of a statement -> how often it is drawn, relative to others. {f} is an activation, {p} a parameter, {y} the
# newest tensor, and {a} any tensor; {n} is a new name, {k} a number, and {t} True or False. A statement that raises an
# error is dropped.
CHAIN = {  # operations that the pass fuses, and similar ones
    "{n} = {f} + {f}": 6,
    "{n} = {f} + {y}": 4,
    "{n} = torch.add({f}, {f})": 2,
    "{n} = {f}.add(other={f})": 2,
    "{n} = torch.add({f}, {f}, alpha={k})": 2,
    "{n} = {f}.add({f}, alpha=1)": 1,
    "{n} = {f} + {a}": 2,
    "{n} = {p} * {f} + {f}": 4,
    "{n} = {f} + {f} * {p}": 3,
    "{n} = {p} * {f}": 2,
    "{n} = torch.mul({f}, {p})": 1,
    "{n} = torch.addcmul({f}, {p}, {f})": 2,
    "{n} = torch.addcmul({f}, {f}, {p}, value={k})": 1,
    "{n} = layer_norm({y}, (8,))": 6,
    "{n} = layer_norm({f}, (8,))": 4,
    "{n} = layer_norm({y}, (8,), {p}, {p})": 2,
    "{n} = layer_norm({y}, (3, 8), zero_centered_weight={t})": 1,
    "{n} = rms_norm({y}, (8,))": 3,
    "{n} = rms_norm({y}, (8,), {p})": 1,
    "{n} = layer_norm({y}, (8,), {p}, memory_efficient={t})": 1,
    "{n} = gated_rms_norm({y}, None, (8,), {p}, num_groups=2)": 1,
    "{n} = layer_norm({f} + {f}, (8,)) * (1 + {p}) + {p}": 3,
    "{n} = layer_norm({p} * {f} + {f}, (8,)) * (1 + {p}) + {p}": 2,
    "{n} = {y} * (1 + {p}) + {p}": 5,
    "{n} = {y} * (1 + {p})": 3,
    "{n} = torch.addcmul({p}, {y}, 1 + {p})": 2,
    "{n} = {y} * ({p}.add(1)) + {p}": 1,
    "{n} = {y} * (1 + {p}[:, 0])[:, None] + {p}": 1,
    "{n} = {y} * (1 + {a}) + {a}": 2,
    "{n} = 1 + {p}": 2,
    "{n} = {f}.sin(); {n} += {f}": 3,
    "{n} = {y} + {y} * {p}": 1,
    "{n} = layer_norm({f}, (8,), w, b) * (1 + {p}) + {p}": 2,
    "{n} = rms_norm({y}, (8,), w) * (1 + {p})": 1,
    "{n} = {y} * torch.unsqueeze(input=(1 + {p})[..., 0, :], dim=1)": 1,
    "{n} = {y} * (1 + {f})[:, : {y}.size(1)] + {p}": 1,
    "{n} = layer_norm({y}[None], (8,))": 1,
    "{n} = layer_norm(torch.flatten(input={f}, start_dim=0, end_dim=1), (8,))": 1,
    "{n} = layer_norm({y}.unflatten(dim=0, sizes=(1, -1)), (8,))": 1,
    "{n} = layer_norm(F.dropout({y}, 0.5, training=False), (8,))": 1,
    "{n} = {y} * {a}": 2,
}
NOISE = {  # operations that the pass does not fuse
    "{n} = {a}.sin()": 4,
    "{n} = {y}.sin()": 3,
    "{n} = {f}.view(6, 8)": 1,
    "{n} = {y}.view(1, 2, 3, 8)": 2,
    "{n} = {y}.reshape(2, 3, 8)": 2,
    "{n} = {f}[:, :1]": 1,
    "{n} = {f}.transpose(0, 1)": 2,
    "{n} = {y}.mean(1, keepdim=True)": 2,
    "{n} = {a}.detach()": 1,
    "{n} = {a}.clone()": 1,
    "{n} = {a}.double()": 1,
    "{n} = {y}.to(torch.float64)": 1,
    "{n} = {y}.contiguous()": 1,
    "{n} = {a}.float()": 1,
    "{n} = F.dropout({a}, 0.5, True, {t})": 1,
    "{n} = torch.rand_like({a})": 1,
    "{n} = {p}.expand(2, 3, 8)": 1,
    "{n} = {p}.unsqueeze(0)": 1,
}
WRITES = {  # operations that change a tensor, which a fused call may read
    "{a}.mul_(0.5)": 3,
    "{y}.mul_(0.5)": 2,
    "{a}.add_({a})": 2,
    "{a} += {a}": 2,
    "{a}[..., 0] = 0.5": 2,
    "F.relu({a}, True)": 1,
    "{n} = F.dropout({a}, 0.5, True, True)": 1,
    "torch.mul({f}, 0.5, out={a})": 1,
    "{a}.copy_({a})": 1,
    "F.batch_norm({f}.reshape(-1, 8), {p}.detach().view(-1)[:8], {p}.detach().view(-1)[:8], training=True)": 1,
    "{f}.transpose_(0, 1)": 1,
    "with no_grad(): {n} = {f} + {f}": 1,
    "with no_grad(): {y} = layer_norm({y}, (8,))": 1,
}
TEMPLATES = CHAIN | {key: weight / 2 for key, weight in NOISE.items()} | {key: n / 3 for key, n in WRITES.items()}

REPEATABLE = CHAIN | NOISE  # a checkpoint computes its body a second time in backward
STATISTICS = {  # norms beside an operator whose schema does not say that it writes
    "{n} = layer_norm({f}, (8,)); F.batch_norm({f}.reshape(-1, 8), w.detach(), b.detach(), training=True); "
    "{n} = {n} * w + b": 6,
    "{n} = {y} * (1 + w) + b": 2,
}


def inputs(seed):
    """Return the arguments of a program. Each of them requires a gradient with probability 0.7."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(shape, generator=generator, dtype=F64) for shape in SHAPES.values()]
    return [leaf.requires_grad_(random.Random(seed + i).random() < 0.7) for i, leaf in enumerate(leaves)]


def source(seed, templates=TEMPLATES):
    """Return a random program that runs in eager mode: a function of inputs(seed) that returns some of its tensors.

    Each line is drawn, and then executed to see whether it raises an error and which tensors it makes.
    """
    rng = random.Random(seed)
    torch.default_generator.manual_seed(seed)  # for dropout and rand_like
    tensors = dict(zip(SHAPES, (leaf.clone() for leaf in inputs(seed)), strict=True))
    lines = []

    def pick(accepts):
        names = [name for name, tensor in tensors.items() if accepts(tensor)] or ["x"]
        return rng.choices(names, [1.3**i for i in range(len(names))])[0]  # newer tensors more often

    for number in range(rng.randint(4, 14)):
        (template,) = rng.choices(list(templates), templates.values())
        draw = {
            "f": partial(pick, lambda t: t.shape in ((2, 3, 8), (3, 2, 8))),
            "p": partial(pick, lambda t: t.shape[-1:] == (8,) and t.numel() < 48),  # smaller than an activation
            "a": partial(pick, lambda t: True),
            "y": lambda names=tensors: list(names)[-1],
            "n": lambda number=number: f"t{number}",
            "k": lambda: rng.choice([1, 2]),
            "t": lambda: rng.choice([True, False]),
        }
        line = re.sub("{(.)}", lambda match: str(draw[match[1]]()), template)  # noqa: B023 (called immediately)
        if "norm" in line and any(tensors[name].dtype != F64 for name in re.findall(r"\w+", line) if name in tensors):
            continue  # a fused call rounds float32 numbers differently
        variables = dict(tensors)
        try:
            exec(line, NAMES, variables)
        except (RuntimeError, IndexError, TypeError):
            continue
        after = {name: value for name, value in variables.items() if isinstance(value, torch.Tensor)}
        if "norm" in line and list(after.values())[-1].dtype != F64:
            continue  # the line multiplies the norm by float32 numbers
        # The tolerance is relative to the largest element, so large numbers would hide errors.
        if all(value.abs().max() < 100 for value in after.values() if value.numel()):
            tensors = after
            lines.append(line)
    results = [name for name in tensors if name not in SHAPES and rng.random() < 0.5] or ["x"]
    results += [list(tensors)[-1]]
    body = "".join(f"    {line}\n" for line in [*lines, f"return {', '.join(results)},"])
    return f"def program({', '.join(SHAPES)}):\n{body}"


def source_with_child(seed, templates):
    """Return a program in which some lines are a function of their own, ``child``, which ``run(child)`` calls.

    ``run`` checkpoints the child or makes a module of it. The program calls ``hook`` with some results of the child.
    """
    head, *lines, last = source(seed, templates).splitlines()
    rng = random.Random(seed)
    begin, end = sorted(rng.choices(range(len(lines) + 1), k=2))  # lines[begin:end] become the child
    read = re.findall(r"\w+", "\n".join([*lines[end:], last]))
    assigned = re.findall(r"t\d+(?= =)", "\n".join(lines[begin:end]))
    names = [name for name in dict.fromkeys(assigned) if name in read] or ["x"]
    child = ["    def child():", *(f"    {line}" for line in lines[begin:end]), f"        return {', '.join(names)},"]
    call = [f"    {', '.join(names)}, = run(child)", *[f"    hook({rng.choice(names)})"] * rng.randint(0, 1)]
    return "\n".join([head, *lines[:begin], *child, *call, *lines[end:], last])


def build(text, names=NAMES):
    """Return the function that a program defines. `names` has the values of the names that it uses."""
    namespace = dict(names)
    exec(text, namespace)
    return namespace["program"]


class AssignableProxy(torch.fx.Proxy):
    """A proxy that also records assignments, as Dynamo does: += and [...] =."""

    def __iadd__(self, other):
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __setitem__(self, index, value):
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


class Tracer(torch.fx.Tracer):
    def proxy(self, node):
        return AssignableProxy(node, self)


class RecordValues(torch.fx.Interpreter):
    """Runs a graph and stores the value of each node in its metadata, as Dynamo does."""

    def run_node(self, node):
        node.meta["example_value"] = super().run_node(node)
        return node.meta["example_value"]


def graph_of(text, seed):
    """Return the graph that Dynamo would record of a program; torch.fx takes a hundredth of Dynamo's time."""
    tracer = Tracer()

    @contextlib.contextmanager
    def no_grad():
        for enabled in (False, True):
            tracer.create_proxy("call_function", torch._C._set_grad_enabled, (enabled,), {})
            if not enabled:
                yield

    def norm(rms, x, shape, weight=None, bias=None, **options):
        return torch.ops.layernorm.forward.default(x, shape, weight, bias, EPS, rms=rms, **options)[0]

    names = NAMES | {"no_grad": no_grad, "layer_norm": partial(norm, False), "rms_norm": partial(norm, True)}
    module = torch.fx.GraphModule({}, tracer.trace(build(text, names)))
    with FakeTensorMode() as mode, torch.no_grad():
        RecordValues(module).run(*(mode.from_tensor(leaf.detach()) for leaf in inputs(seed)))
    return module


def results_of(function, seed):
    """Return a program's outputs, its arguments, which it may have changed, and the gradients of all these.

    The gradients are with respect to inputs(seed), whose copies are the arguments.
    """
    torch.default_generator.manual_seed(seed)
    leaves = inputs(seed)
    arguments = [leaf.clone() for leaf in leaves]
    outputs = function(*arguments)
    results = [t for t in (*outputs, *arguments) if t.requires_grad]
    differentiable = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = ()
    if results and differentiable:
        grad_outputs = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape) for t in results]
        gradients = torch.autograd.grad(results, differentiable, grad_outputs, materialize_grads=True)
    return [*outputs, *arguments, *gradients]
