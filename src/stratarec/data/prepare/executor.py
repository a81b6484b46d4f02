"""Executors, which run the numbered pieces of a pass, and leases, which allow tasks to write to a
directory.

A pass writes its results to files, so it does not matter which process runs a piece, when, or how
often. Counts, moments and repeats are the only results that are added over partitions. The process
that runs `prepare` adds them in the order of partitions, so the bytes of a data set do not depend
on the executor.

The lock of an owned directory is released when its process ends, but tasks on other machines may
run a little longer. They must not write to a directory that another process has claimed in the
meantime. So a file in the directory contains a token. A task must know the token, and keeps a
shared lock on the file while it runs. The next call of `prepare` first waits until these locks are
released, and replaces the token.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from stratarec.data.threads import ahead
from stratarec.errors import StorageError
from stratarec.io.atomic import open_regular
from stratarec.io.owned_directory import try_lock
from stratarec.progress import Progress


class Pass(Protocol):
    """A part of `prepare` that is divided into pieces with the numbers 0, 1 and so on. It can be
    pickled.
    """

    def __call__(self, number: int) -> Iterator[int]:
        """Compute a piece, and return an iterator that does the rest of its work. After each part
        of this work, it yields the number of steps by which the progress bar advances.
        """
        ...

    def memory(self, number: int) -> int:
        """Estimate the memory in bytes of a process that runs the piece."""
        ...


class Executor(Protocol):
    """Runs the pieces of passes."""

    @property
    def readers(self) -> int:
        """Number of processes that may read one log in parallel."""
        ...

    def begin(self, work: Path, logs: Sequence[str]) -> None:
        """Prepare to run pieces that read `logs` and write to the directory `work`, which this
        process has locked.
        """
        ...

    def run(self, data_pass: Pass, numbers: Sequence[int], progress: Progress) -> None:
        """Run pieces of `data_pass`. If a piece fails, its error is raised and no more pieces
        start.
        """
        ...


class SerialExecutor:
    """Runs one piece after another in this process. A piece is computed while the rest of the piece
    before it is done.
    """

    readers = 1

    def begin(self, work: Path, logs: Sequence[str]) -> None: ...

    def run(self, data_pass: Pass, numbers: Sequence[int], progress: Progress) -> None:
        for rest in ahead(map(data_pass, numbers)):
            for amount in rest:
                progress.advance(amount)


LEASE = "lease"
_PATIENCE_SECONDS = 30.0
# Maximum length of a token.
_TOKEN_BYTES = 64


def revoke_leases(work: Path) -> None:
    """Wait until all tasks of earlier calls that write to `work` have ended, and prevent new ones
    from starting.

    Raises
    ------
    StorageError
        If tasks have not ended after 30 seconds.
    """
    if (work / LEASE).exists():
        grant(work, "")


def grant(work: Path, token: str | None = None) -> str:
    """Revoke earlier leases, and return the token that tasks now need to write to `work`.

    If the token is an empty string, no task can write. By default the token is random.
    """
    token = secrets.token_hex(8) if token is None else token
    limit = time.monotonic() + _PATIENCE_SECONDS
    with _open(work) as file:
        while not try_lock(file):
            if time.monotonic() > limit:
                raise StorageError(
                    f"{work} is in use by tasks of an earlier call: wait for them, or end them"
                )
            time.sleep(0.1)
        file.truncate(0)
        file.write(token.encode())
    return token


def revoke(work: Path) -> None:
    """Make all tokens for `work` invalid: no task can start, and running tasks stop at their next
    check.
    """
    with _open(work) as file:
        file.truncate(0)


@contextmanager
def leased(work: Path, token: str) -> Iterator[Callable[[], None]]:
    """Hold a lease on `work`. Yields a function that raises an error if the token is no longer
    valid.

    Raises
    ------
    StorageError
        If the directory does not exist, or the token is no longer valid.
    """
    over = StorageError(f"{work} does not exist, or now belongs to another call of `prepare`")
    try:
        file = open_regular(work / LEASE)
    except FileNotFoundError as error:
        raise over from error

    def check() -> None:
        # Read without the file object's buffer, which would return the earlier content.
        if os.pread(file.fileno(), _TOKEN_BYTES, 0).decode() != token:
            raise over

    with file:
        if not token or not try_lock(file, shared=True):
            raise over
        check()
        yield check


def _open(work: Path) -> BinaryIO:
    """Open the token's file. It is never replaced by a new file, because locks belong to the file,
    not its name.
    """
    return os.fdopen(
        os.open(work / LEASE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+b"
    )
