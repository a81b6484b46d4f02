"""Number of processors that this process may keep busy, by its affinity and the quotas of its
control groups.

A container with a quota of 4 processors on a host of 64 sees all 64. With 64 threads, it would use
up the quota in the first sixteenth of each period. Then all its threads would stop until the period
ends, even while they hold a lock.

    /proc/self/mountinfo    mount point of each hierarchy, and the group at the top of the mount
    /proc/self/cgroup       the group of this process in each hierarchy
    cpu.max                 cgroup v2: quota and period, of a group and of every group above it
    cpu.cfs_quota_us        cgroup v1: quota, with the period in cpu.cfs_period_us
    memory.max              cgroup v2: limit in bytes
    memory.limit_in_bytes   cgroup v1: the same
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Controller and kind of the hierarchy -> files with the limit and, for processors, its period.
_FILES = {
    ("cpu", "cgroup2"): ("cpu.max",),
    ("cpu", "cgroup"): ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
    ("memory", "cgroup2"): ("memory.max",),
    ("memory", "cgroup"): ("memory.limit_in_bytes",),
}
# The quotas are read again after so many seconds, because they may change while a container runs.
_SECONDS = 60.0
_cached = (0, -math.inf)
_narrowed = False


def cores() -> int:
    """Return how many processors this process may keep busy, at least 1; updated every minute."""
    global _cached
    count, read = _cached
    if time.monotonic() - read > _SECONDS:
        count = within(_allowed(), quota())
        _cached = count, time.monotonic()
    return count


def within(processors: int, share: float) -> int:
    """Return the number of threads for a quota of `share` processors on a machine with `processors`
    processors.

    A quota is rounded up: threads sleep while they wait, so two threads rarely use more than 1.5
    processors, and one thread never uses more than 1.
    """
    return max(1, min(processors, math.ceil(share - 0.05) if share < processors else processors))


def narrow_libraries() -> None:
    """Limit threads of libraries loaded later to `cores`, unless OMP_NUM_THREADS is set."""
    global _narrowed
    if cores() < _allowed() and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(cores())
        _narrowed = True


def most_threads(now: int) -> int:
    """Return the threads that a library with `now` threads may have if quotas grow later."""
    return max(now, _allowed()) if _narrowed else now


def _allowed() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(root: Path = Path("/")) -> float:
    """Return how many processors the control groups of this process allow; infinity if there is no
    limit.

    The groups above its own groups count, too.

    Parameters
    ----------
    root : path
        Root of the file system to read.
    """
    return min(_limits(root, "cpu"), default=math.inf)


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of DRAM that this process may use: those of the machine, or the limit of its
    control groups.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min([physical, *_limits(root, "memory")]))


def _limits(root: Path, controller: str) -> Iterator[float]:
    """Yield the limits of this process's groups and those above, in processors or in bytes."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    paths = {}
    for line in groups:
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = path
    for line in mounts:
        # 31 23 0:28 /docker/1f /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup
        # rw,cpu,cpuacct
        before, _, behind = line.partition(" - ")
        top, place = (_unescaped(part) for part in before.split()[3:5])
        kind, _, options = behind.split(" ", 2)
        if kind in paths and (kind == "cgroup2" or controller in options.split(",")):
            yield from _above(root / place.lstrip("/"), top, paths[kind], _FILES[controller, kind])


def _above(mounted: Path, top: str, path: str, files: tuple[str, ...]) -> Iterator[float]:
    """Yield the limit of a group and of each group above it, up to the top of the mount."""
    group = PurePosixPath(path)
    inside = group.relative_to(top) if group.is_relative_to(top) else PurePosixPath()
    # If the group is outside its namespace (/../other), the mount shows only the top.
    parts = () if ".." in inside.parts else inside.parts
    for depth in range(len(parts), -1, -1):
        limit = _limit(mounted.joinpath(*parts[:depth]), files)
        if limit is not None:
            yield limit


def _limit(group: Path, files: tuple[str, ...]) -> float | None:
    try:
        allowed, period = [*(word for file in files for word in (group / file).read_text().split()), "1"][
            :2
        ]
        return None if allowed in ("max", "-1") else int(allowed) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        # The top of a hierarchy has no such file. If a file cannot be read, there is no limit.
        return None


def _unescaped(name: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)
