"""Stores whose records are addressable memory: an array in DRAM, or in a memory-mapped file (DAX,
CXL, tmpfs).

Both have two more bits per row: written, and changed. Pages get memory when they are first touched,
so a store of mostly unwritten rows is cheap. Memory is therefore reported by resident pages, not by
the sizes of arrays.

If the file system is full, writing to a page of a sparse file ends the program with SIGBUS instead
of raising an error. So the file's space is reserved when the file is created, which raises an error
if there is no room.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.stores.base import Manifest, RecordStore, StoreBytes, check_rows
from stratarec.embedding.stores.row_files import DeltaChain, require_same
from stratarec.errors import StorageError
from stratarec.io.atomic import make_directory, storage_error
from stratarec.kernels import bit_rows as kernels
from stratarec.kernels.runtime.memory import allocate

# Rows scanned at once: the unpacked bits of a chunk fit the L2 cache.
_CHUNK_ROWS = 1 << 19
_CHUNK_PAGES = 1 << 20


def allocate_bytes(size: int) -> NDArray[np.uint8]:
    """Return `size` zeroed bytes, page-aligned, on huge pages if the system provides them."""
    return allocate(-(-size // 4)).view(np.uint8)[:size]


def allocate_bits(rows: int) -> NDArray[np.uint8]:
    """Return a bitmap with a cleared bit for each row."""
    return allocate_bytes(-(-rows // 8))


def row_chunks(rows: int) -> Iterator[NDArray[np.int64]]:
    """Yield all rows, ascending, in chunks."""
    for first in range(0, rows, _CHUNK_ROWS):
        yield np.arange(first, min(first + _CHUNK_ROWS, rows), dtype=np.int64)


def set_rows(bits: NDArray[np.uint8]) -> Iterator[NDArray[np.int64]]:
    """Yield the rows whose bit is set, ascending, in chunks.

    Only bytes other than zero are unpacked: a few changed rows of 10^9 cost one pass over 125 MB.
    """
    step = _CHUNK_ROWS // 8
    for first in range(0, len(bits), step):
        chunk = bits[first : first + step]
        places = np.flatnonzero(chunk)
        # Unpacking every bit of 10^9 rows took 9 of the 10 seconds of a checkpoint after five
        # batches.
        if len(places):
            set_bits = np.unpackbits(chunk[places], bitorder="little").reshape(-1, 8)
            place, bit = np.nonzero(set_bits)
            yield (places[place] + first) * 8 + bit


def clear_bits(bits: NDArray[np.uint8]) -> None:
    """Clear every bit without touching new pages."""
    for first in range(0, len(bits), mmap.PAGESIZE):
        # Page by page: writing zeros to a page that was never touched would allocate it.
        page = bits[first : first + mmap.PAGESIZE]
        if page.any():
            page[:] = 0


def resident_bytes(*arrays: NDArray[np.generic]) -> int:
    """Return the bytes of the arrays' pages that are in memory.

    Each array begins on a new page. Without `mincore`, all of their bytes are returned.
    """
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    if mincore is None:
        return sum(array.nbytes for array in arrays)
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return sum(_resident(mincore, array) for array in arrays)


def _resident(mincore: ctypes._NamedFuncPointer, array: NDArray[np.generic]) -> int:
    pages = -(-array.nbytes // mmap.PAGESIZE)
    total = 0
    for first in range(0, pages, _CHUNK_PAGES):
        flags = np.empty(min(_CHUNK_PAGES, pages - first), np.uint8)
        address = array.ctypes.data + first * mmap.PAGESIZE
        if mincore(address, len(flags) * mmap.PAGESIZE, flags.ctypes.data):
            return array.nbytes
        total += int((flags & 1).sum()) * mmap.PAGESIZE
    return min(total, array.nbytes)


class NumberedRecords(RecordStore):
    """The part of a `RecordStore` that is common to stores with records by number, in host memory
    or on a device.

    Two bits per row, in host memory, record whether it was ever written and whether it changed
    since the last checkpoint.

    Parameters
    ----------
    rows, record_bytes : int
        R, and bytes of one record.
    """

    kind = "array"
    array: NDArray[np.uint8] | None = None
    bits: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None

    def __init__(self, rows: int, record_bytes: int) -> None:
        self.rows = rows
        self.record_bytes = record_bytes
        self._written = allocate_bits(rows)
        self._changed = allocate_bits(rows)
        self._chain = DeltaChain()

    @property
    def _by_number(self) -> Any:
        """Object with ``[R, record_bytes]`` uint8 for files: indexing by rows reads and writes
        their records.
        """
        raise NotImplementedError

    def written(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        check_rows(self, rows)
        return kernels.test_bits(self._written, rows)

    def mark_written(self, rows: NDArray[np.int64]) -> None:
        """Record that the records of `rows` were written, or that the caller has queued it."""
        check_rows(self, rows)
        self._mark(rows)

    def _mark(self, rows: NDArray[np.int64]) -> None:
        # Set after the records are written: a thread that sees the bit may read the row.
        kernels.set_bits(self._written, rows)
        kernels.set_bits(self._changed, rows)

    def memory(self) -> StoreBytes:
        return StoreBytes(dram_bytes=resident_bytes(self._written, self._changed), block_bytes=0)

    def _identity(self) -> Manifest:
        return {"format": 1, "layout": "rows", "rows": self.rows, "record_bytes": self.record_bytes}

    def checkpoint(self, directory: Path, previous: Path | None) -> Manifest:
        files = self._chain.save(
            directory,
            previous,
            self._by_number,
            lambda: set_rows(self._written),
            lambda: set_rows(self._changed),
        )
        # Only after the checkpoint succeeded: a failed one does not contain these changes.
        clear_bits(self._changed)
        return {**self._identity(), "files": files}

    def clear(self) -> None:
        self._chain = DeltaChain()
        clear_bits(self._written)
        clear_bits(self._changed)

    def restore(self, directory: Path, manifest: Manifest) -> None:
        """Restore a checkpoint; `dram`, `mapped` and `hbm` stores read each other's checkpoints."""
        require_same(directory, manifest, self._identity(), "files")
        self._chain.verify(directory, manifest["files"])
        # Before rows are replaced: if that fails, the next checkpoint must not build on either
        # checkpoint.
        self.clear()
        for rows in self._chain.load(directory, manifest["files"], self._by_number):
            kernels.set_bits(self._written, rows)

    def check(self) -> None:
        """Do nothing: memory has no checksums."""

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        self._written = self._changed = np.empty(0, np.uint8)


class ArrayRecords(NumberedRecords):
    """A `RecordStore` over `array` ``[R, record_bytes]`` uint8, which callers may write."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        super().__init__(*array.shape)
        self.array = self._array = array
        self.bits = self._written, self._changed

    @property
    def _by_number(self) -> Any:
        return self._array

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        check_rows(self, rows, out)
        written = kernels.test_bits(self._written, rows)
        kernels.gather(self._array, rows, written, out)
        return written

    def write(self, rows: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        check_rows(self, rows, records)
        kernels.scatter(self._array, rows, records)
        self._mark(rows)

    def close(self) -> None:
        super().close()
        self.array = None
        self.bits = None
        self._array = np.empty((0, self.record_bytes), np.uint8)


class DramRecords(ArrayRecords):
    """A `RecordStore` in DRAM on huge pages. Pages without written rows take no memory.

    Parameters
    ----------
    rows : int
        R.
    record_bytes : int
        Bytes of one record.
    """

    kind = "dram"

    def __init__(self, *, rows: int, record_bytes: int) -> None:
        super().__init__(allocate_bytes(rows * record_bytes).reshape(rows, record_bytes))

    def memory(self) -> StoreBytes:
        return super().memory() + StoreBytes(dram_bytes=resident_bytes(self._array), block_bytes=0)


class MappedRecords(ArrayRecords):
    """A `RecordStore` whose array is a new memory-mapped file in `directory`.

    Parameters
    ----------
    directory : Path
        Directory of ``records.map``; one store per directory.
    rows : int
        R.
    record_bytes : int
        Bytes of one record.

    Raises
    ------
    StorageError
        If the file cannot be created, or the file system has no room for it.
    """

    kind = "mapped"

    def __init__(self, directory: Path, *, rows: int, record_bytes: int) -> None:
        self.path = Path(directory) / "records.map"
        size = max(rows * record_bytes, mmap.PAGESIZE)
        make_directory(self.path.parent)
        # A file of an earlier run is not needed: `restore` fills the store from a checkpoint.
        self.path.unlink(missing_ok=True)
        try:
            with self.path.open("x+b") as file:
                os.truncate(file.fileno(), size)
                # Later, a full file system would be a signal (SIGBUS) and not an error.
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
