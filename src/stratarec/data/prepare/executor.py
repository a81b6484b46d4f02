"""Executors, which run the numbered pieces of a stage, and the lease by which tasks may work in a directory.

A stage leaves its results in files, so it does not matter which process runs a piece, when, or how often. Only sums
of counts, moments and repeats cross partitions. The process that runs `prepare` adds them by partition number, so the
bytes of a data set do not depend on the executor.

The lock of `io/lock.py` ends with its process, but tasks on other machines may run a little longer. They must not write
into a directory that another process has claimed since. So a file in the directory holds a token. A task must know the
token and holds a shared lock on the file; the next call waits for these locks and replaces the token first.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from stratarec.errors import StorageError
from stratarec.io.atomic import open_regular
from stratarec.io.owned_directory import try_lock
from stratarec.progress import Progress


class Stage(Protocol):
    """A part of `prepare` in pieces 0, 1, ...; it can be pickled."""

    def __call__(self, number: int) -> Iterator[int]:
        """Run a piece; yields the steps by which to advance the progress."""
        ...

    def memory(self, number: int) -> int:
        """Estimate the bytes of a process that runs the piece."""
        ...


class Executor(Protocol):
    """Runs the pieces of stages."""

    @property
    def readers(self) -> int:
        """Number of processes that may read one log in parallel."""
        ...

    def begin(self, work: Path, logs: Sequence[str]) -> None:
        """Announce that later pieces write in `work`, which this process has locked, and may read `logs`."""
        ...

    def run(self, stage: Stage, numbers: Sequence[int], progress: Progress) -> None:
        """Run pieces of `stage`; the error of a piece ends it."""
        ...


class SerialExecutor:
    """Runs one piece after another in this process."""

    readers = 1

    def begin(self, work: Path, logs: Sequence[str]) -> None: ...

    def run(self, stage: Stage, numbers: Sequence[int], progress: Progress) -> None:
        for number in numbers:
            for amount in stage(number):
                progress.advance(amount)


LEASE = "lease"
_PATIENCE_SECONDS = 30.0
# Upper bound of a token's length.
_TOKEN_BYTES = 64


def revoke_leases(work: Path) -> None:
    """Wait until no task of an earlier call works in `work`, and keep further ones from starting.

    Raises
    ------
    StorageError
        If tasks have not ended after half a minute.
    """
    if (work / LEASE).exists():
        grant(work, "")


def grant(work: Path, token: str | None = None) -> str:
    """Revoke earlier leases, and return the token that tasks now need to work in `work`; empty allows no task."""
    token = secrets.token_hex(8) if token is None else token
    limit = time.monotonic() + _PATIENCE_SECONDS
    with _open(work) as file:
        while not try_lock(file):
            if time.monotonic() > limit:
                raise StorageError(f"{work} is in use by tasks of an earlier call on a cluster: wait, or end them")
            time.sleep(0.1)
        file.truncate(0)
        file.write(token.encode())
    return token


def revoke(work: Path) -> None:
    """Keep tasks from starting in `work`; running ones stop at their next check."""
    with _open(work) as file:
        file.truncate(0)


@contextmanager
def leased(work: Path, token: str) -> Iterator[Callable[[], None]]:
    """Hold a lease on `work` under a token; yields a function that checks whether the token is still valid.

    Raises
    ------
    StorageError
        If the directory does not exist, or the token is not valid any more.
    """
    over = StorageError(f"{work} does not exist, or belongs to another call of `prepare` now")
    try:
        file = open_regular(work / LEASE)
    except FileNotFoundError as error:
        raise over from error

    def check() -> None:
        # Not through the file's buffer, which would return the earlier content.
        if os.pread(file.fileno(), _TOKEN_BYTES, 0).decode() != token:
            raise over

    with file:
        if not token or not try_lock(file, shared=True):
            raise over
        check()
        yield check


def _open(work: Path) -> BinaryIO:
    """Open the file without replacing it: locks belong to the file, not to its name."""
    return os.fdopen(os.open(work / LEASE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+b")
