"""Temporary directories of one process. If the process is killed, a later process removes them."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

from stratarec.errors import StorageError
from stratarec.io.atomic import is_locked, lock_directory, make_directory, storage_error, storage_errors
from stratarec.io.owned_directory import try_lock

_PREFIX = "stratarec-temporary-"


class ScratchDirectory:
    """New directory ``<parent>/<prefix><token>``, which is locked until it is closed and then
    removed.

    The system releases a lock when its process ends for any reason. So a directory with the same
    prefix that is not locked is abandoned. Abandoned directories are removed before the new one is
    created.

    Parameters
    ----------
    parent : Path
        Created if it does not exist.
    prefix : str
        Start of the names of all directories of this kind.
    token : str
        End of the name of this directory, by default random.

    Raises
    ------
    StorageError
        If the directory cannot be created.
    """

    def __init__(self, parent: Path, prefix: str, token: str = "") -> None:
        make_directory(parent)
        remove_abandoned(parent, prefix)
        self.path = parent / f"{prefix}{token or secrets.token_hex(6)}"
        # The directory is created under another name and then renamed, so that other processes only
        # see it locked.
        hidden = parent / f".making-{self.path.name}"
        try:
            hidden.mkdir(mode=0o700)  # the parent may be shared by all users
            self._lock: int | None = lock_directory(hidden)
            hidden.rename(self.path)
        except BaseException as error:
            shutil.rmtree(hidden, ignore_errors=True)
            if isinstance(error, OSError):
                raise storage_error(self.path, error) from error
            raise

    def close(self) -> None:
        """Remove the directory and its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)  # after the files: the lock marks the directory as in use
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def temporary_directory() -> ScratchDirectory:
    """Create a directory in ``TMPDIR``."""
    return ScratchDirectory(Path(tempfile.gettempdir()), _PREFIX)


def remove_abandoned(parent: Path | None = None, prefix: str = _PREFIX) -> None:
    """Delete the scratch directories in `parent` with this prefix whose processes have ended.

    By default, these are the directories of `temporary_directory`.
    """
    parent = parent or Path(tempfile.gettempdir())
    for path in parent.glob(f"{glob.escape(prefix)}*"):
        if not is_locked(path):
            shutil.rmtree(path, ignore_errors=True)


def lock_store(path: Path) -> IO[bytes]:
    """Lock a directory until the returned file is closed. Raises `StorageError` if another process
    has locked it.
    """
    make_directory(path)
    with storage_errors(path / ".lock"):
        file = os.fdopen(
            os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "wb"
        )
    if try_lock(file):
        return file
    file.close()
    raise StorageError(f"{path} is in use by another store: give each its own directory")
