"""How many processors this process may keep busy: those of its affinity, and what its control groups' quotas leave.

A container with a quota of four on a host of 64 sees all 64. With a thread for each it spends a period's quota in the
first sixteenth of it and then stands still, with whatever lock it holds.

    /proc/self/mountinfo    where each hierarchy is mounted, and which group the mount shows as its top
    /proc/self/cgroup       the group of this process in each
    cpu.max                 cgroup v2: quota and period, of a group and of every group above it
    cpu.cfs_quota_us        cgroup v1: likewise, with cpu.cfs_period_us
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_SECONDS = 60.0
"""After so long it is read again: a container's quota may change while it runs."""
_known = (0, -math.inf)
_narrowed = False


def cores() -> int:
    """Processors that this process may keep busy, at least 1; read again every minute."""
    global _known
    found, read = _known
    if time.monotonic() - read > _SECONDS:
        found = within(_allowed(), quota())
        _known = found, time.monotonic()
    return found


def within(processors: int, share: float) -> int:
    """Threads for a quota of `share` processors on so many.

    A quota is rounded up: threads of ours sleep while they wait, so two of them use up 1.5 processors rarely, and one
    never uses more than 1.
    """
    return max(1, min(processors, math.ceil(share - 0.05) if share < processors else processors))


def narrow_libraries() -> None:
    """Let libraries that are loaded from now on start no more threads than `cores`, unless the user said how many."""
    global _narrowed
    if cores() < _allowed() and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(cores())
        _narrowed = True


def most_threads(now: int) -> int:
    """Threads that a library that has `now` of them may have when quotas grow."""
    return max(now, _allowed()) if _narrowed else now


def _allowed() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota(root: Path = Path("/")) -> float:
    """Processors that the control groups of this process, and all above them, leave it; infinite where none limits it.

    Parameters
    ----------
    root : path
        Where the system's files lie.
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
    """What a group allows, and each above it as far as the mount shows them."""
    group = PurePosixPath(path)
    inside = group.relative_to(top) if group.is_relative_to(top) else PurePosixPath()
    # Of a group beyond the top of its namespace (/../other) the mount shows nothing but the top.
    parts = () if ".." in inside.parts else inside.parts
    for depth in range(len(parts), -1, -1):
        found = _limit(mounted.joinpath(*parts[:depth]), kind)
        if found is not None:
            yield found


def _limit(group: Path, kind: str) -> float | None:
    try:
        if kind == "cgroup2":
            allowed, period = (group / "cpu.max").read_text().split()
        else:
            allowed, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if allowed in ("max", "-1") else int(allowed) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        # The top of a hierarchy has no such file; what cannot be read limits nothing that we know of.
        return None


def _unescaped(name: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), name)
