"""Peak memory of forward and of forward with backward, and the memory that training keeps between them."""

from collections.abc import Callable, Iterator

import torch

from .cases import Case
from .contenders import Calls, enter
from .timing import Device, first_line


def inference(calls: Calls) -> object:
    with torch.no_grad():
        return calls.forward()


# stage -> the call, and the pass that must work for it
STAGES: dict[str, tuple[Callable[[Calls], object], str]] = {
    "inference": (inference, "forward"),
    "forward with graph": (Calls.forward, "both"),
    "forward and backward": (Calls.both, "both"),
}


def measure(device: Device, rows: int, cols: int, dtypes: str, names: list[str]) -> Iterator[dict]:
    """Yield a record for each stage and contender."""
    case = Case(rows, cols, dtypes, device.name)
    for entry in enter(names, [case]):
        for stage, (call, which) in STAGES.items():
            peak = kept = None
            failed = {}
            if which not in entry.failed:
                try:
                    peak, kept = device.memory(lambda: call(entry.calls[0]))  # noqa: B023 (called immediately)
                except Exception as error:  # other packages may raise anything
                    failed[entry.name] = first_line(error)
            record = {"rows": rows, "cols": cols, "dtypes": dtypes, "stage": stage} | entry.record(which, failed)
            yield record | {"input_bytes": case.x.nbytes, "peak_bytes": peak, "kept_bytes": kept}
