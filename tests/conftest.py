"""Fixtures for the whole suite."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
from collections.abc import Iterator

# Set before torch starts its threads: with two test processes on two cores, spinning threads take
# time from each other, and teams wait for threads without a core. So whole runs use one thread, and
# `threads` gives kernels and tables two.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

if os.environ.get("NUMBA_DISABLE_JIT") == "1":
    import interpreted

    interpreted.install()

# Fixtures import torch and modules that import it, because the process that distributes tests does
# not need them.
from pathlib import Path

import forked
import pytest
from hypothesis import settings

ONE_WORKER = ("data/ray", "distributed")
"""Folders whose tests share processes that take long to start."""

LONGEST = ("training", "serving", "test_estimator")
"""Folders and files whose groups of tests take longest. They run early, so that workers end at the
same time.
"""

settings.register_profile("untimed", deadline=None, max_examples=50)
settings.load_profile("untimed")


def pytest_configure() -> None:
    forked.start()
    forked.leave_unsynced()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude modules and tests from garbage collection, because they exist until the end."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Use a worker per processor, up to four: more of them interrupt each other's teams of threads,
    which then wait.
    """
    return min(os.cpu_count() or 1, 4)


@pytest.hookimpl(tryfirst=True)  # before xdist's own, which writes groups into ids
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort and group tests for the workers.

    Folders of one worker, files with slow tests and long files come first, so that no worker starts
    one while the others are idle. One worker runs the tests of a class or file, so that its
    fixtures are built once.
    """
    groups = {item: _group(item) for item in items}
    items.sort(
        key=lambda item: (
            groups[item] not in ONE_WORKER,
            item.get_closest_marker("slow") is None,
            not groups[item].startswith(LONGEST),
        )
    )
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))


def _group(item: pytest.Item) -> str:
    place = item.path.relative_to(Path(__file__).parent).with_suffix("").as_posix()
    if isinstance(item, pytest.Function) and item.cls is not None:
        return f"{place}::{item.cls.__name__}"
    return next((folder for folder in ONE_WORKER if place.startswith(f"{folder}/")), place)


TEAMS = ("kernels", "embedding")
"""Folders of tests whose subject runs on teams of threads."""


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use two threads in tests of teams, independent of the environment."""
    import torch

    before = torch.get_num_threads()
    if request.path.relative_to(Path(__file__).parent).parts[0] in TEAMS:
        torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Fill `torch.empty` with NaN (and the largest integers), so that tests notice output that is
    not written.
    """
    import torch

    torch.utils.deterministic.fill_uninitialized_memory = True
    # Not `torch.use_deterministic_algorithms`, which would also import torch's compiler.
    torch.set_deterministic_debug_mode("warn")


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the width of the terminal from the environment."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """Yield a disk of 4 MiB: a tmpfs in a mount namespace that exists during the test."""
    from recipes import DISK_BYTES

    script = f"mount -t tmpfs -o size={DISK_BYTES} tmpfs /mnt && echo ready && exec cat"
    if not shutil.which("unshare"):
        pytest.skip("unshare is not installed, which mounts a small disk")
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            if holder.stdout.readline() != b"ready\n":
                pytest.skip("user and mount namespaces are not permitted here")
            yield Path(f"/proc/{holder.pid}/root/mnt")
        finally:
            holder.stdin.close()
