"""The interface of stores, the homes of rows.

A *record* is one row as it is stored: its encoded weights, their scale and offset, and its
optimizer state, in a fixed number of bytes. A store has `rows` numbered records. A record that was
never written does not exist: it takes no space, `read` reports it as missing, and the caller
computes the row's initial values from (seed, table, row).

Methods are called from one thread at a time, but not always the same thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Manifest = dict[str, Any]
"""A JSON object that `RecordStore.restore` needs in addition to the files; part of the caller's
checkpoint.
"""


@dataclass(frozen=True, kw_only=True)
class StoreBytes:
    """Memory that a store actually occupies."""

    dram_bytes: int
    """Bytes of records, bitmaps, locations and buffers in DRAM, without pages never touched."""
    block_bytes: int
    """Bytes of file space in the store's directory, without files that only checkpoints use."""
    device_bytes: int = 0
    """Bytes in the memory of a device."""

    def __add__(self, other: StoreBytes) -> StoreBytes:
        return StoreBytes(
            dram_bytes=self.dram_bytes + other.dram_bytes,
            block_bytes=self.block_bytes + other.block_bytes,
            device_bytes=self.device_bytes + other.device_bytes,
        )


@runtime_checkable
class RecordStore(Protocol):
    """Records of all rows that have the same home.

    In all methods, `rows` is ``[n]`` int64, distinct and within 0..R-1, and `records` and `out` are
    ``[n, record_bytes]`` uint8, C-contiguous. Other arguments raise `ValueError`.
    """

    rows: int
    """R: rows are numbered 0..R-1."""
    record_bytes: int
    """Bytes of one record."""
    kind: str
    """A key of `HOMES`."""
    array: NDArray[np.uint8] | None
    """``[R, record_bytes]`` if records are directly addressable (dram, mapped), else None."""

    @property
    def bits(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]] | None:
        """Two bitmaps: rows that were ever written, and rows that changed since the last
        checkpoint.

        None if `array` is None. A caller that writes a record to `array` must set both bits.
        """

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy records into `out` and return ``[n]`` bool, True if the row was ever written.

        ``out[i]`` of a row that was never written is unchanged. `StorageError` names the file and
        the block that is damaged or cannot be read.
        """

    def write(self, rows: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        """Store records; visible to the next `read`.

        After a `StorageError` (the disk is full or the budget is used up), each row has its old or
        its new record.
        """

    def written(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return ``[n]`` bool: True if the row was ever written."""

    def mark_written(self, rows: NDArray[np.int64]) -> None:
        """Record that the caller wrote ``array[row]``; `ValueError` if `array` is None."""

    def memory(self) -> StoreBytes:
        """Return the bytes in use now."""

    def checkpoint(self, directory: Path, previous: Path | None) -> Manifest:
        """Write the files that `restore` needs into `directory`, which is new and empty, and return
        the manifest.

        Parameters
        ----------
        directory : Path
            Its files are complete and synced on return. It may be renamed or moved afterwards.
        previous : Path or None
            The last checkpoint of this store object, or the one it was restored from. Unchanged
            files are hard-linked from it (copied if links fail) and only changed rows are written.
            If it is another checkpoint or was deleted, all rows are written.
        """

    def clear(self) -> None:
        """Discard all records, as if no row was ever written."""

    def restore(self, directory: Path, manifest: Manifest) -> None:
        """Replace all contents with those of the checkpoint in `directory`; `manifest` is the
        result of `checkpoint`.

        `CheckpointError` names the file that is missing or damaged, or the field that differs; the
        contents are then undefined until a `restore` succeeds.
        """

    def check(self) -> None:
        """Verify every checksum; `StorageError` names the file, the segment and the block."""

    def flush(self) -> None:
        """Write buffered records to the files."""

    def close(self) -> None:
        """Release memory, threads and files; the store's directory is not needed any more."""


def check_rows(
    store: RecordStore, rows: NDArray[np.int64], records: NDArray[np.uint8] | None = None
) -> None:
    """Raise `ValueError` unless the store accepts these arrays: shape, dtype, range of rows."""
    if rows.ndim != 1 or rows.dtype != np.int64 or not rows.flags.c_contiguous:
        raise ValueError(
            f"rows are {rows.dtype}{list(rows.shape)}, expected contiguous int64 of one dimension"
        )
    # Kernels do not check rows: a row out of range would be read from other memory.
    if len(rows) and (rows.min() < 0 or rows.max() >= store.rows):
        raise ValueError(f"rows span {rows.min()}..{rows.max()}, the store has rows 0..{store.rows - 1}")
    if records is None:
        return
    expected = (len(rows), store.record_bytes)
    if records.shape != expected or records.dtype != np.uint8 or not records.flags.c_contiguous:
        raise ValueError(
            f"records are {records.dtype}{list(records.shape)}, expected contiguous uint8{list(expected)} "
            f"for {len(rows)} rows of {store.record_bytes} bytes"
        )
