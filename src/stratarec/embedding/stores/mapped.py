"""Records in a memory-mapped file: DAX, CXL memory behind a file system, or tmpfs.

A write to a page of a sparse file on a full file system is no error that a program can handle but a SIGBUS that ends
it. So the file's whole space is reserved when it is made, and a file system without room is refused there.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np

from stratarec.embedding.stores.base import StoreBytes
from stratarec.embedding.stores.dram import ArrayRecords
from stratarec.errors import StorageError
from stratarec.io.atomic import make_directory, storage_error


class MappedRecords(ArrayRecords):
    """A `RecordStore` whose array is a file in `directory`, made anew.

    Parameters
    ----------
    directory : Path
        Where ``records.map`` is made; one store a directory.
    rows : int
        R.
    record_bytes : int
        Bytes of one record.
    sparse : bool
        Reserve no space: rows that were never written cost none, but the process dies of SIGBUS if the file system
        fills up. For file systems whose free space is certain.

    Raises
    ------
    StorageError
        When the file cannot be made, or the file system has no room for it (unless `sparse`).
    """

    kind = "mapped"

    def __init__(self, directory: Path, *, rows: int, record_bytes: int, sparse: bool = False) -> None:
        self.path = Path(directory) / "records.map"
        size = max(rows * record_bytes, mmap.PAGESIZE)
        make_directory(self.path.parent)
        # Contents of a run before are of no worth: `restore` fills the store from a checkpoint.
        self.path.unlink(missing_ok=True)
        try:
            with self.path.open("x+b") as file:
                os.truncate(file.fileno(), size)
                if not sparse:
                    # See above: the last moment at which a full file system is an error and not a signal.
                    os.posix_fallocate(file.fileno(), 0, size)
                memory = mmap.mmap(file.fileno(), size)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise self._explain(error, size) from error
        super().__init__(np.frombuffer(memory, np.uint8)[: rows * record_bytes].reshape(rows, record_bytes))

    def _explain(self, error: OSError, size: int) -> StorageError:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            return storage_error(self.path, error)
        room = os.statvfs(self.path.parent)
        return StorageError(
            f"{self.path} needs {size} bytes and its file system has {room.f_bavail * room.f_frsize} free "
            f"({error.strerror}): free space, name another path, or give the table fewer bytes by its codec"
        )

    def memory(self) -> StoreBytes:
        return super().memory() + StoreBytes(dram_bytes=0, block_bytes=self.path.stat().st_blocks * 512)

    def close(self) -> None:
        super().close()
        self.path.unlink(missing_ok=True)
