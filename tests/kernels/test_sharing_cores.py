"""Test the number of cores that a process may use, and that waiting for a kernel changes no bit of
its result.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from stratarec.kernels.runtime.cores import memory_bytes, quota

V1 = "33 31 0:29 {top} /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"
V2 = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
SPACED = "30 23 0:26 {top} /sys/fs/control\\040groups rw - cgroup2 cgroup2 rw"
OTHER = "34 31 0:33 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"


def v1(group: str, quota: int) -> dict[str, str]:
    """Create the files of a control group (version 1) with a quota in microseconds."""
    return {
        f"sys/fs/cgroup/cpu{group}/cpu.cfs_{name}_us": str(us)
        for name, us in (("quota", quota), ("period", 10**5))
    }


def v2(**limits: str) -> dict[str, str]:
    """Create the files of control groups (version 2). Underscores in names stand for slashes."""
    return {f"sys/fs/cgroup/{name.replace('_', '/')}/cpu.max": limit for name, limit in limits.items()}


SYSTEMS: dict[str, tuple[str, str, str, dict[str, str], float]] = {
    "v2": (V2, "/", "0::/a/b", v2(a_b="150000 100000"), 1.5),
    "v2, above": (V2, "/", "0::/a/b", v2(a="50000 100000", a_b="max 100000"), 0.5),
    "v2, least": (V2, "/", "0::/a/b", v2(a="400000 100000", a_b="60000 20000"), 3.0),
    "v2, a container's own": (V2, "/", "0::/", {"sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
    "v2, beyond its namespace": (V2, "/", "0::/../x", {"sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
    "v2, a name with a space": (SPACED, "/", "0::/", {"sys/fs/control groups/cpu.max": "200000 100000"}, 2.0),
    "v2, none": (V2, "/", "0::/a", v2(a="max 100000"), math.inf),
    "v2, unreadable": (V2, "/", "0::/a", v2(a="much"), math.inf),
    "v1": (V1, "/", "4:cpu,cpuacct:/a", v1("/a", 250000), 2.5),
    "v1, docker without a namespace": (V1, "/docker/1f", "4:cpu,cpuacct:/docker/1f", v1("", 400000), 4.0),
    "v1, none": (V1, "/", "4:cpu,cpuacct:/", v1("", -1), math.inf),
    "no control groups": (OTHER, "/", "3:cpuset:/", {}, math.inf),
}  # fmt: skip


def write_files(root: Path, mount: str, group: str, files: dict[str, str]) -> None:
    given = {"proc/self/mountinfo": f"{OTHER}\n{mount}\n", "proc/self/cgroup": f"9:pids:/\n{group}\n"}
    for name, text in {**given, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_quota_is_the_minimum_of_a_group_and_its_ancestors(tmp_path: Path, system: str) -> None:
    mount, top, group, files, expected = SYSTEMS[system]
    write_files(tmp_path, mount.format(top=top), group, files)
    assert quota(tmp_path) == expected


MEMORY_V1 = "35 31 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
GROUPS: dict[str, tuple[str, str, dict[str, str], int | None]] = {
    "v2": (V2, "0::/a", {"sys/fs/cgroup/a/memory.max": "1000000\n"}, 10**6),
    "v2, above": (
        V2,
        "0::/a/b",
        {"sys/fs/cgroup/a/memory.max": "5000", "sys/fs/cgroup/a/b/memory.max": "max"},
        5000,
    ),
    "v2, none": (V2, "0::/a", {"sys/fs/cgroup/a/memory.max": "max"}, None),
    "v1": (MEMORY_V1, "5:memory:/a", {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4096"}, 4096),
    "v1, none": (
        MEMORY_V1,
        "5:memory:/",
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096)},
        None,
    ),
}


@pytest.mark.parametrize("system", GROUPS)
def test_the_memory_is_the_limit_of_the_groups(tmp_path: Path, system: str) -> None:
    mount, group, files, expected = GROUPS[system]
    write_files(tmp_path, mount.format(top="/"), group, files)
    (tmp_path / "none").mkdir()
    assert memory_bytes(tmp_path) == (expected or memory_bytes(tmp_path / "none"))
