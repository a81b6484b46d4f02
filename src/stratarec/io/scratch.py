"""Directories that are of one process's use: the next process removes those whose owner died."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import IO

from stratarec.errors import StorageError
from stratarec.io.atomic import make_directory, storage_error
from stratarec.io.lock import lock
from stratarec.io.opening import open_regular

READING = "stratarec-reading-"
"""Prefix of the directories of `reading_directory`."""

_OWNER = ".owner"
_MAKING_SECONDS = 60


class ScratchDirectory:
    """A new directory ``<parent>/<prefix><token>``, locked until it is closed and then removed.

    The system lets go of a lock when its process ends, however it ends: what carries the prefix and is not locked is
    removed first.

    Parameters
    ----------
    parent : Path
        Made where it does not exist.
    prefix : str
        Of all directories of this kind.
    token : str
        Of this one; a random one by default.

    Raises
    ------
    StorageError
        When the directory cannot be made.
    """

    def __init__(self, parent: Path, prefix: str, token: str = "") -> None:
        make_directory(parent)
        remove_abandoned(parent, prefix)
        self.path = parent / f"{prefix}{token or uuid.uuid4().hex[:12]}"
        # Locked under a name that nobody looks for, so that it is never seen without its lock.
        hidden = parent / f".making-{self.path.name}"
        try:
            hidden.mkdir(mode=0o700)  # it may be in everybody's temporary directory
            self._owner = (hidden / _OWNER).open("wb")
            lock(self._owner)
            hidden.rename(self.path)
        except BaseException as error:
            shutil.rmtree(hidden, ignore_errors=True)
            if isinstance(error, OSError):
                raise storage_error(self.path, error) from error
            raise

    def close(self) -> None:
        """Remove the directory and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        # After the files: the lock says that somebody works here.
        self._owner.close()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def reading_directory() -> ScratchDirectory:
    """Make a directory of this process below ``TMPDIR``, for commands that only read a run."""
    return ScratchDirectory(Path(tempfile.gettempdir()), READING)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Delete the scratch directories in `parent` with this prefix whose processes have ended."""
    pattern = glob.escape(prefix)
    # A directory that another process is creating right now is not locked yet.
    unfinished = [path for path in parent.glob(f".making-{pattern}*") if _age(path) > _MAKING_SECONDS]
    for path in (*parent.glob(f"{pattern}*"), *unfinished):
        if _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


def hold(path: Path) -> IO[bytes]:
    """Lock a directory for as long as the file that this gives is open; `StorageError` when another holds it."""
    make_directory(path)
    try:
        file = os.fdopen(os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "wb")
    except OSError as error:
        raise storage_error(path / ".lock", error) from error
    if lock(file):
        return file
    file.close()
    raise StorageError(f"{path} is in use by another store: give each its own directory")


def _age(path: Path) -> float:
    """Seconds since something was made in a directory; 0 where it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _is_abandoned(path: Path) -> bool:
    """Whether the owner of a scratch directory is certainly gone."""
    try:
        with open_regular(path / _OWNER) as file:
            # Where the file system has no locks nothing is certain, and nothing is removed.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
