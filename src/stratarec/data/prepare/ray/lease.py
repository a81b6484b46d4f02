"""Work in a directory for the process that holds it, by tasks that may outlive it.

The lock of `io/lock.py` dies with its process, and tasks on other machines may run a little longer. They must not write
into what another process has begun since. So a file in the directory holds a token, which a task must know, and on
which it has a shared lock; the next call waits for these locks and takes the token away before it does anything.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from stratarec.errors import StorageError
from stratarec.io.lock import lock
from stratarec.io.opening import open_regular

LEASE = "lease"
_PATIENCE_SECONDS = 30.0
# More than a token has.
_TOKEN_BYTES = 64


def end_leases(work: Path) -> None:
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
        while not lock(file):
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
        if not token or not lock(file, shared=True):
            raise over
        check()
        yield check


def _open(work: Path) -> BinaryIO:
    """The file, never a new one in its place: locks are on what it is, and not on its name."""
    return os.fdopen(os.open(work / LEASE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+b")
