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
        """Do a piece, and give what to advance the progress by."""
        ...

    def memory(self, number: int) -> int:
        """About how many bytes a process holds that does the piece."""
        ...


class Executor(Protocol):
    """Does the pieces of stages."""

    @property
    def readers(self) -> int:
        """How many may read one log at once."""
        ...

    def begin(self, work: Path, logs: Sequence[str]) -> None:
        """Pieces to come write in `work`, which this process holds, and may read `logs`."""
        ...

    def run(self, stage: Stage, numbers: Sequence[int], progress: Progress) -> None:
        """Do those pieces of `stage`; whatever one of them raises ends it."""
        ...


class SerialExecutor:
    """One piece after another, in this process."""

    readers = 1

    def begin(self, work: Path, logs: Sequence[str]) -> None: ...

    def run(self, stage: Stage, numbers: Sequence[int], progress: Progress) -> None:
        for number in numbers:
            for amount in stage(number):
                progress.advance(amount)


LEASE = "lease"
_PATIENCE_SECONDS = 30.0
# More than a token has.
_TOKEN_BYTES = 64


def revoke_leases(work: Path) -> None:
    """Wait until no task of an earlier call works in `work`, and let none begin.

    Raises
    ------
    StorageError
        When tasks have not ended after half a minute.
    """
    if (work / LEASE).exists():
        grant(work, "")


def grant(work: Path, token: str | None = None) -> str:
    """Wait likewise; gives the token that tasks may work in `work` by from now on, none where it is empty."""
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
    """Let no task begin any more in `work`, and those that are under way stop where they can."""
    with _open(work) as file:
        file.truncate(0)


@contextmanager
def leased(work: Path, token: str) -> Iterator[Callable[[], None]]:
    """Work in `work` for whoever gave the token; what this gives is to be asked now and then whether that still holds.

    Raises
    ------
    StorageError
        When the directory is not there, or the token is not valid any more.
    """
    over = StorageError(f"{work} is not there, or no work for this call of `prepare` any more")
    try:
        file = open_regular(work / LEASE)
    except FileNotFoundError as error:
        raise over from error

    def check() -> None:
        # Not by the file's buffer, which would give again what it gave before.
        if os.pread(file.fileno(), _TOKEN_BYTES, 0).decode() != token:
            raise over

    with file:
        if not token or not try_lock(file, shared=True):
            raise over
        check()
        yield check


def _open(work: Path) -> BinaryIO:
    """The file, never a new one in its place: locks are on what it is, and not on its name."""
    return os.fdopen(os.open(work / LEASE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+b")
