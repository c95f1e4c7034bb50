"""Measure the memory of forward and backward on SHAPES (default: 4096x768 and 64x65536).

The records have the peak, and the bytes that autograd keeps between the passes.
"""

from collections.abc import Iterator

import torch

from .cases import Case
from .contenders import Calls, bind_contenders
from .timing import Device, first_line

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
            peak = kept = None
            failed = {}
            if pass_name not in entry.failed:
                try:
                    peak, kept = device.memory(lambda: call(entry.calls[0]))  # noqa: B023 (called immediately)
                except Exception as error:  # other packages may raise anything
                    failed[entry.name] = first_line(error)
            record = {"rows": rows, "cols": cols, "dtypes": dtypes, "stage": stage} | entry.record(pass_name, failed)
            yield record | {"input_bytes": case.x.nbytes, "peak_bytes": peak, "kept_bytes": kept}
