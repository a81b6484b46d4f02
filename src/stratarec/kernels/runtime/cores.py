"""Number of processors that this process may keep busy, by its affinity and the quotas of its control groups.

A container with a quota of four on a host of 64 sees all 64. With a thread for each it would spend a period's quota in
the first sixteenth of the period and then stall, together with any lock that it holds.

    /proc/self/mountinfo    mount point of each hierarchy, and the group at the top of the mount
    /proc/self/cgroup       the group of this process in each hierarchy
    cpu.max                 cgroup v2: quota and period, of a group and of every group above it
    cpu.cfs_quota_us        cgroup v1: quota, with the period in cpu.cfs_period_us
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Read again after so long: a container's quota may change while it runs.
_SECONDS = 60.0
_cached = (0, -math.inf)
_narrowed = False


def cores() -> int:
    """Return the number of processors that this process may keep busy, at least 1; updated every minute."""
    global _cached
    count, read = _cached
    if time.monotonic() - read > _SECONDS:
        count = within(_allowed(), quota())
        _cached = count, time.monotonic()
    return count


def within(processors: int, share: float) -> int:
    """Return the number of threads for a quota of `share` processors on a machine with `processors`.

    A quota is rounded up: our threads sleep while they wait, so two of them rarely exceed 1.5 processors, and one
    never uses more than 1.
    """
    return max(1, min(processors, math.ceil(share - 0.05) if share < processors else processors))


def narrow_libraries() -> None:
    """Limit the threads of libraries that are loaded later to `cores`, unless the user has set a number."""
    global _narrowed
    if cores() < _allowed() and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(cores())
        _narrowed = True


def most_threads(now: int) -> int:
    """Return the number of threads that a library with `now` threads may have after quotas grow."""
    return max(now, _allowed()) if _narrowed else now


def _allowed() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(root: Path = Path("/")) -> float:
    """Return the processors that the control groups of this process, and all above them, allow; infinite without limit.

    Parameters
    ----------
    root : path
        Root of the system's files.
    """
    return min(_quotas(root), default=math.inf)


def _quotas(root: Path) -> Iterator[float]:
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    paths = {}
    for line in groups:
        number, controllers, path = line.split(":", 2)
        if number == "0" or "cpu" in controllers.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = path
    for line in mounts:
        # 31 23 0:28 /docker/1f /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
        before, _, behind = line.partition(" - ")
        top, place = (_unescaped(part) for part in before.split()[3:5])
        kind, _, options = behind.split(" ", 2)
        if kind in paths and (kind == "cgroup2" or "cpu" in options.split(",")):
            yield from _above(root / place.lstrip("/"), top, paths[kind], kind)


def _above(mounted: Path, top: str, path: str, kind: str) -> Iterator[float]:
    """Yield the quota of a group, and of each group above it that the mount shows."""
    group = PurePosixPath(path)
    inside = group.relative_to(top) if group.is_relative_to(top) else PurePosixPath()
    # For a group outside its namespace (/../other) the mount shows only the top.
    parts = () if ".." in inside.parts else inside.parts
    for depth in range(len(parts), -1, -1):
        limit = _limit(mounted.joinpath(*parts[:depth]), kind)
        if limit is not None:
            yield limit


def _limit(group: Path, kind: str) -> float | None:
    try:
        if kind == "cgroup2":
            allowed, period = (group / "cpu.max").read_text().split()
        else:
            allowed, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if allowed in ("max", "-1") else int(allowed) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        # The top of a hierarchy has no such file. An unreadable file is taken as no limit.
        return None


def _unescaped(name: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)
