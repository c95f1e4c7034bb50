"""Measure the memory of forward and backward on SHAPES (default: 4096x768 and 64x65536).

The records have the peak, and the bytes that autograd keeps between the passes.
"""

from collections.abc import Iterator
from functools import partial

import torch

from .cases import Case
from .contenders import Calls, bind_contenders
from .timing import Device

# stage -> the call, and the pass that must work for it
STAGES = {
    "inference": (torch.no_grad()(Calls.forward), "forward"),
    "forward with graph": (Calls.forward, "both"),
    "forward and backward": (Calls.both, "both"),
}


def measure(device: Device, rows: int, cols: int, dtypes: str, contenders: list[str]) -> Iterator[dict]:
    """Yield a record for each stage and contender."""
    case = Case(rows, cols, dtypes, device.name)
    for entry in bind_contenders(contenders, [case]):
        for stage, (call, pass_name) in STAGES.items():
            works = pass_name not in entry.failed
            peak, kept = device.memory(partial(call, entry.calls[0])) if works else (None, None)
            record = {"rows": rows, "cols": cols, "dtypes": dtypes, "stage": stage} | entry.record(pass_name, {})
            yield record | {"input_bytes": case.x.nbytes, "peak_bytes": peak, "kept_bytes": kept}
