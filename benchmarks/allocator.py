"""An addition and a norm, and a training step, with settings of the CPU allocator."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import layernorm_ext

from .blocks import BLOCKS, draw
from .contenders import Calls, Contender, time_pass
from .timing import Device

WIDTH = 256
SETTINGS = {
    "default": {},
    "GLIBC_TUNABLES=glibc.malloc.hugetlb=1": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "THP_MEM_ALLOC_ENABLE=1": {"THP_MEM_ALLOC_ENABLE": "1"},
    "pages kept": {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "10000000000"},
}


def measure(device: Device, setting: str, seconds: float) -> Iterator[dict]:
    """Time an addition and a norm, and a whole training step, with different settings of the CPU allocator.

    glibc reads its settings when a process starts, so that each setting is measured in a process of its own. The inputs
    have 999 x 1536 float32 elements; the training step is that of four transformer blocks of 256 features.
    """
    command = [sys.executable, "-m", "benchmarks.allocator", str(seconds)]
    output = subprocess.check_output(command, env=os.environ | SETTINGS[setting], text=True)
    for record in json.loads(output):
        yield {"setting": setting} | record


def measure_here(seconds: float) -> Iterator[dict]:
    # No result is compared with float64, because glibc keeps more memory after it was given larger arrays.
    def entry(name: str, calls: Calls) -> Contender:
        return Contender(name, torch.float32, lambda: [calls], {})

    device, block = Device("cpu"), BLOCKS["residual, norm"]
    *inputs, dy = draw(block.kinds, device, "fp32", 1, 999, 1536)
    functions = {"ours": block.by_hand, "torch": partial(block.composition, F)}
    entries = [entry(name, Calls(partial(function, *inputs), [], dy)) for name, function in functions.items()]
    yield from time_pass(device, entries, {"case": "residual, norm"}, "forward", seconds)

    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
    theirs = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    ours, tokens, entries = copy.deepcopy(theirs), torch.randn(4, 256, WIDTH), []
    layernorm_ext.convert(ours)
    for name, model in {"ours": ours, "torch": theirs}.items():
        step = Calls(lambda model=model: model(tokens).square().mean(), model.parameters(), torch.tensor(1.0))
        entries.append(entry(name, step))
    yield from time_pass(device, entries, {"case": "training step"}, "both", seconds)


if __name__ == "__main__":
    print(json.dumps(list(measure_here(float(sys.argv[1])))))
