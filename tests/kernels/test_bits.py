"""The results have the bits that bits.json records: a hash for each member of the family and each instruction set.

Whoever changes results on purpose, or the calls below, records the hashes again:
`for set in default avx2 avx512; do ATEN_CPU_CAPABILITY=$set PYTHONPATH=tests python tests/kernels/test_bits.py; done`.
"""

import functools
import hashlib
import itertools
import json
from pathlib import Path

import torch
from support.backends import bits
from support.family import MEMBERS, family
from support.reference import DTYPES, RESIDUALS

from layernorm_ext import _C

BITS = Path(__file__).with_name("bits.json")
RECORDED = json.loads(BITS.read_text())

# Narrow, wide and long rows with tails, and images of one and of several tiles. Parameter gradients of the 2100 rows
# are sums of several segments.
ROWS = [(1, 1, 1), (1, 3, 7), (4, 16, 33), (3, 700, 64), (2, 150, 768), (5, 8, 1000), (1, 7, 2500), (2, 1, 70000)]
IMAGES = [(2, 5, 7, 3), (3, 9, 9, 96), (2, 28, 28, 192)]  # the channels last


@functools.cache
def values(shape, dtype, seed):
    """Return numbers of up to 102 by exact arithmetic, so that they are the same on any machine.

    None is near 0, because memory_efficient divides by weights.
    """
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64) + 7919 * seed
    numbers = (i * 2654435761 % 2**32).double() / 2**30 - 2
    numbers += torch.where(numbers < 0, -(2.0**-8), 2.0**-8)
    return torch.where(i % 97 == 0, numbers + 100, numbers).to(dtype).view(shape)


def calls(member):
    """Yield x, r, w, b of calls: rows, or images in both layouts, with parameters for all rows, per sample, or none."""
    shapes = IMAGES if member.takes_images else ROWS
    shapes = [shape for shape in shapes if shape[-1] % member.options.get("num_groups", 1) == 0]
    dtypes = RESIDUALS if member.adds_residual else [(*pair, pair[0]) for pair in DTYPES]
    for shape, (dtype, parameter_dtype, other_dtype) in itertools.product(shapes, dtypes):
        x, other = values(shape, dtype, 1), values(shape, other_dtype, 2)
        batches = [()] if member.is_gated_norm else [(), shape[:1] if member.takes_images else (shape[0], 1)]
        pairs = [[values((*batch, shape[-1]), parameter_dtype, seed) for seed in (3, 4)] for batch in batches]
        for w, b in [*pairs, (None, pairs[0][1] if "gate" in member.options else None)]:
            yield x, other, w, b
            if member.takes_images:
                yield x.movedim(-1, 1).contiguous().movedim(1, -1), other, w, b


def digest(results):
    """Return a hash of tensors, some of which may be None."""
    found = hashlib.sha256()
    for tensor in results:
        if tensor is not None:
            assert not tensor.isnan().any()  # a NaN has other bits on other processors
            found.update(bits(tensor).numpy())
    return found.hexdigest()[:16]


def results(member):
    """Yield the outputs, and the gradients of the tensors that the member takes."""
    for call in calls(member):
        tensors = [tensor if tensor is None else tensor.detach().requires_grad_() for tensor in call]
        outputs = member(*tensors)
        grad_outputs = [values(y.shape, y.dtype, 5 + i) for i, y in enumerate(outputs)]
        inputs = [tensor for tensor in tensors if tensor is not None]
        yield from (*outputs, *torch.autograd.grad(outputs, inputs, grad_outputs, allow_unused=True))


@family
def test_results_have_the_recorded_bits(member):
    assert digest(results(member)) == RECORDED[_C.cpu_capability()][member.name]


if __name__ == "__main__":
    found = {member.name: digest(results(member)) for member in MEMBERS}
    BITS.write_text(json.dumps(RECORDED | {_C.cpu_capability(): found}, indent=1) + "\n")
