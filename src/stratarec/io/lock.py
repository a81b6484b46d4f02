"""One writer a directory of ours, any number of readers: by a lock that dies with its process.

The lock is the system's, on the directory's marker. Beside it a writer notes who it is, for whoever comes later to be
told; the note alone keeps nobody out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

from stratarec.errors import DatasetError, StorageError
from stratarec.io.atomic import storage_error
from stratarec.io.opening import open_regular
from stratarec.io.owned_directory import HOLDER, MARKER
from stratarec.io.sealed import Count, Model, read_sealed, write_sealed


class Holder(Model):
    """The process that writes in a directory."""

    format: Literal[1] = 1
    pid: Count
    host: str
    since: str
    """Local time."""

    @property
    def is_gone(self) -> bool:
        """Whether it certainly runs no more."""
        return self.host == socket.gethostname() and not Path(f"/proc/{self.pid}").exists() and Path("/proc/1").exists()


@contextlib.contextmanager
def held(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Keep other processes from writing in a marked directory for as long as this one works with it.

    Parameters
    ----------
    shared : bool
        For readers: others may read too.

    Raises
    ------
    StorageError
        When another process, or another part of this one, is in the way; names it where it writes.
    """
    try:
        file = open_regular(path / MARKER)
    except FileNotFoundError as error:
        raise _busy(path) from error
    except OSError as error:
        raise storage_error(path, error) from error
    with file:
        if not lock(file, shared=shared) or not _is_open(path / MARKER, file):
            # Held by another, or whoever held it has replaced or removed the directory.
            raise _busy(path)
        if shared:
            yield
            return
        # The directory may have another name in the end, or another one its name.
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _sign(path)
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(HOLDER, dir_fd=folder)
            os.close(folder)


def lock(file: IO[bytes], *, shared: bool = False) -> bool:
    """Lock an open file; False where another has it. Where the file system knows no locks, users must keep apart."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _busy(path: Path) -> StorageError:
    who = "another process or trainer, which reads or writes it"
    with contextlib.suppress(DatasetError):
        found = read_sealed(path / HOLDER, Holder, "remove it")
        if not found.is_gone:
            who = f"process {found.pid} on {found.host} since {found.since}"
    return StorageError(f"{path} is in use by {who}: wait for it, or end it")


def _sign(path: Path) -> None:
    note = Holder(pid=os.getpid(), host=socket.gethostname(), since=time.strftime("%Y-%m-%d %H:%M:%S"))
    with contextlib.suppress(StorageError):  # it is for people alone
        write_sealed(path / HOLDER, note.to_dict())


def _is_open(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False
