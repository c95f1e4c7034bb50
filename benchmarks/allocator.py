"""Time an addition and a norm, and a whole training step, with different settings of the CPU allocator.

glibc reads its settings when a process starts, so that each setting is measured in a process of its own. The inputs
have 999 x 1536 float32 elements; the training step is that of four transformer blocks of 256 features.
"""

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

from .cases import EPS
from .contenders import Calls, Contender, time_pass
from .timing import Device
from .train_digits import Block

ROWS, COLS, WIDTH = 999, 1536, 256
SETTINGS = {
    "default": {},
    "GLIBC_TUNABLES=glibc.malloc.hugetlb=1": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "THP_MEM_ALLOC_ENABLE=1": {"THP_MEM_ALLOC_ENABLE": "1"},
    "pages kept": {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "10000000000"},
}


def measure(device: Device, setting: str, seconds: float) -> Iterator[dict]:
    """Yield a record for each case and contender, measured in a new process."""
    command = [sys.executable, "-m", "benchmarks.allocator", str(seconds)]
    output = subprocess.check_output(command, env=os.environ | SETTINGS[setting], text=True)
    for record in json.loads(output):
        yield {"setting": setting} | record


def measure_here(seconds: float) -> Iterator[dict]:
    device = Device("cpu")
    x, residual, weight, bias = (torch.randn(size) for size in ((ROWS, COLS), (ROWS, COLS), COLS, COLS))

    def ours() -> tuple[torch.Tensor, ...]:
        return layernorm_ext.add_layer_norm(x, residual, (COLS,), weight, bias, EPS)

    def theirs() -> tuple[torch.Tensor, ...]:
        total = x + residual
        return F.layer_norm(total, (COLS,), weight, bias, EPS), total

    calls = {name: partial(list, [Calls(f, [], x)]) for name, f in {"ours": ours, "torch": theirs}.items()}
    entries = [Contender(name, torch.float32, bind, {}) for name, bind in calls.items()]
    yield from time_pass(device, entries, {"case": "residual, norm"}, "forward", seconds)

    tokens, entries = torch.randn(4, 256, WIDTH), []
    for name, library in {"ours": layernorm_ext, "torch": nn}.items():
        model = nn.Sequential(*(Block(WIDTH, 4, library.LayerNorm) for _ in range(4)))
        step = Calls(lambda model=model: model(tokens).square().mean(), model.parameters(), torch.tensor(1.0))
        entries.append(Contender(name, torch.float32, partial(list, [step]), {}))
    yield from time_pass(device, entries, {"case": "training step"}, "both", seconds)


if __name__ == "__main__":
    print(json.dumps(list(measure_here(float(sys.argv[1])))))
