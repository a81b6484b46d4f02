"""Work in a directory for the process that holds it, by others that may outlive it.

The lock of `holding.py` dies with its process; tasks that the process gave to other machines may run a little longer,
and must not write into what another one has begun there since. So each task holds a shared lock on a file with the
token of the call that it is of. The next call waits for these locks, and replaces the token, before it does anything.
"""

from __future__ import annotations

import fcntl
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stratarec.errors import StorageError
from stratarec.files import write_text
from stratarec.opening import open_regular

LEASE = "lease"
_PATIENCE_SECONDS = 30.0


def end_leases(work: Path) -> None:
    """Wait until no task of an earlier call works in `work`, and let none begin.

    Raises
    ------
    StorageError
        When tasks have not ended after half a minute.
    """
    path = work / LEASE
    if not path.exists():
        return
    limit = time.monotonic() + _PATIENCE_SECONDS
    with open_regular(path) as file:
        while not _locked(file.fileno(), fcntl.LOCK_EX):
            if time.monotonic() > limit:
                raise StorageError(
                    f"{work} is in use by tasks of an earlier call on a cluster: wait for them, or end them"
                )
            time.sleep(0.1)
        path.unlink()


def grant(work: Path) -> str:
    """The token that tasks may work in `work` by."""
    end_leases(work)
    token = secrets.token_hex(8)
    write_text(work / LEASE, token)
    return token


@contextmanager
def leased(work: Path, token: str) -> Iterator[None]:
    """Work in `work` for whoever gave the token.

    Raises
    ------
    StorageError
        When the directory is not there, or another call has begun in it.
    """
    path = work / LEASE
    try:
        with open_regular(path) as file:
            _locked(file.fileno(), fcntl.LOCK_SH)
            if file.read().decode() != token or not path.exists():
                raise StorageError(f"{work} belongs to another call of `prepare` by now")
            yield
    except FileNotFoundError as error:
        raise StorageError(f"{work} is not there, or belongs to another call of `prepare` by now") from error


def _locked(descriptor: int, kind: int) -> bool:
    """Lock; False where somebody is in the way. Where the file system knows no locks, nobody ever is."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
