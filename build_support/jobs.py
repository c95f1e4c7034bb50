"""Counts the compilers that may run at once, by cores, memory, and the limits of a container (control groups)."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

MEMORY_PER_JOB = 2 * 1024**3  # bytes; the largest compilation takes 1.2 GiB


def max_jobs(root: Path = Path("/")) -> int:
    """Return the number of cores (ninja would add two), or fewer if each would have less than MEMORY_PER_JOB."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for group in _control_groups(root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            memory = min([memory, *_numbers(group / name)])
        for limit in (_numbers(group / "cpu.max"), _numbers(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")):
            if len(limit) == 2 and limit[0] > 0:  # a quota of -1 is none
                quota, period = limit
                cores = min(cores, math.ceil(quota / period))
    return max(1, min(cores, memory // MEMORY_PER_JOB))


def _control_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups and of their ancestors, whose limits hold as well.

    In a container, the path of a group may be the one on the host. It does not exist in the container, whose limits are
    then in the root folder.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = [part for part in path.split("/") if part not in ("", "..")]
        # Version 2 has one hierarchy without a name; version 1 has one for each list of controllers.
        for controller in {controllers, *controllers.split(",")}:
            for depth in range(len(names) + 1):
                yield root.joinpath("sys/fs/cgroup", controller, *names[:depth])


def _numbers(*files: Path) -> list[int]:
    """Return the numbers in these files; none if a file is missing or says "max"."""
    try:
        words = " ".join(file.read_text() for file in files).split()
    except OSError:
        return []
    return [] if "max" in words else [int(word) for word in words]
