"""Launches one family of kernels, for a profiler to look at: python tests/workload.py FAMILY.

What each shape comes to is tested in tests/emulator/test_workload.py.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-5


@dataclass(frozen=True)
class Family:
    """Rows [rows, columns] or images [images, channels, pixels] of bfloat16 whose pass launches a kernel."""

    kernel: str  # the name of its function
    shape: tuple[int, ...]
    backward: bool = False
    capability: tuple[int, int] = (8, 0)  # the least one


# As large as is usual and several times the L2 cache, but for what is for small problems.
FAMILIES = {
    "forward_rows_warp": Family("forward_rows", (32768, 256)),
    "forward_rows_block": Family("forward_rows", (16384, 4096)),
    "forward_chunk_in_cluster": Family("forward_chunk_in_cluster", (2048, 65536), capability=(9, 0)),
    "forward_in_cluster": Family("forward_in_cluster", (512, 1 << 18), capability=(9, 0)),
    "forward_moments": Family("forward_moments", (128, 1 << 20)),
    "forward_output": Family("forward_output", (128, 1 << 20)),
    "backward_rows_in_one_launch": Family("backward_rows", (32, 768), True),
    "backward_rows_warp": Family("backward_rows", (32768, 768), True),
    "backward_rows_block": Family("backward_rows", (16384, 4096), True),
    "backward_rows_cluster": Family("backward_rows", (2048, 65536), True, (9, 0)),
    "backward_rows_after_sums": Family("backward_rows", (512, 1 << 18), True),
    "backward_sums": Family("backward_sums", (512, 1 << 18), True),
    "add_partials": Family("add_partials", (32768, 768), True),
    "channels_first_forward": Family("channels_first_forward", (32, 256, 3136)),
    "channels_first_forward_not_staged": Family("channels_first_forward", (256, 2048, 196)),
    "channels_first_backward": Family("channels_first_backward", (32, 256, 3136), True),
    "channels_first_backward_not_staged": Family("channels_first_backward", (256, 2048, 196), True),
}


def launch(family: Family, ops: object, device: str, rows: int | None = None) -> tuple[Tensor, ...]:
    """Call the operator of a namespace once, on fewer rows or images if so wished; return its results.

    The statistics that backward needs are torch's, so that no other kernel of ours is launched.
    """
    shape = (rows or family.shape[0], *family.shape[1:])
    x, dy = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight, bias = (torch.randn(shape[1], device=device, dtype=torch.bfloat16) for _ in range(2))
    of_rows, normalized = len(shape) == 2, shape[1:2]
    if not family.backward:
        if of_rows:
            return ops.forward(x, normalized, weight, bias, EPS)
        return ops.channels_first_forward(x, weight, bias, EPS)
    variance, mean = torch.var_mean(x.float(), 1, correction=0, keepdim=True)
    statistics, mask = (mean, (variance + EPS).rsqrt()), [True, True, True]
    if of_rows:
        return ops.backward(dy, x, normalized, *statistics, weight, bias, mask)
    return ops.channels_first_backward(dy, x, *statistics, weight, bias, mask)


def main(arguments: list[str] | None = None) -> None:
    """Launch the kernels of one family."""
    import layernorm_ext  # noqa: F401 (registers torch.ops.layernorm)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--rows", type=int, help="rows or images (default: those of the family)")
    options = parser.parse_args(arguments)
    launch(FAMILIES[options.family], torch.ops.layernorm, options.device, options.rows)
    if options.device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
