"""What every home of rows can do.

A *record* is one row at rest: its encoded weights, their parameters and its optimizer state, a fixed number of bytes. A
store holds `rows` numbered records, of which those never written do not exist: they cost no space, and whoever reads
them is told so and makes their initial values from (seed, table, row).

Everything here is called from one thread at a time, though not always the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Manifest = dict[str, Any]
"""What `RecordStore.restore` needs besides the files: a JSON object, part of the caller's checkpoint."""


@dataclass(frozen=True, kw_only=True)
class StoreBytes:
    """Memory that a store really occupies."""

    dram_bytes: int
    """Bytes of DRAM: records, bitmaps, locations, buffers. Pages that were never touched do not count."""
    block_bytes: int
    """Bytes of file space in the store's own directory; what checkpoints keep besides is not in it."""

    def __add__(self, other: StoreBytes) -> StoreBytes:
        return StoreBytes(
            dram_bytes=self.dram_bytes + other.dram_bytes, block_bytes=self.block_bytes + other.block_bytes
        )


@runtime_checkable
class RecordStore(Protocol):
    """Rows at rest.

    Shapes: `rows` is ``[n]`` int64, distinct and within 0..R-1; `records` and `out` are ``[n, record_bytes]`` uint8,
    C-contiguous. `ValueError` where they are not.
    """

    rows: int
    """R: rows are numbered 0..R-1."""
    record_bytes: int
    """Bytes of one record."""
    kind: str
    """``dram``, ``mapped`` or ``log``."""
    array: NDArray[np.uint8] | None
    """``[R, record_bytes]`` where records are directly addressable memory (dram, mapped), else None."""

    @property
    def bits(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]] | None:
        """A bit for each row that was ever written and for each that changed since the last checkpoint; else None.

        They are there where `array` is, for callers that set both with every record that they write.
        """

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy records into `out`; ``[n]`` bool, True where the row was ever written.

        ``out[i]`` of a row that was never written stays as it was. `StorageError` names the file and the block that is
        damaged or cannot be read.
        """

    def write(self, rows: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        """Store records; visible to the next `read`.

        When it raises `StorageError` (a full disk, a spent budget) each row holds either its old or its new record.
        """

    def written(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """``[n]`` bool: True where the row was ever written."""

    def mark_written(self, rows: NDArray[np.int64]) -> None:
        """Note that the caller wrote ``array[row]`` itself; only where `array` is not None, else `ValueError`."""

    def memory(self) -> StoreBytes:
        """Bytes in use now."""

    def checkpoint(self, directory: Path, previous: Path | None) -> Manifest:
        """Write all that `restore` needs into `directory`, which is new and empty, and return its manifest.

        Parameters
        ----------
        directory : Path
            Files in it are whole and synced when this returns. It may be renamed or moved afterwards.
        previous : Path or None
            The last checkpoint of this store object, or the one it was restored from. What has not changed since is
            hard-linked from there (copied where links fail) and only changed rows are written. Another checkpoint, or
            one that is gone, makes this one a full one.
        """

    def restore(self, directory: Path, manifest: Manifest) -> None:
        """Replace all contents by those of a checkpoint.

        `CheckpointError` names the file that is missing or damaged, or the field that differs; the contents are then
        undefined until a `restore` succeeds.
        """

    def check(self) -> None:
        """Verify every checksum; `StorageError` names the file, the segment and the block."""

    def flush(self) -> None:
        """Hand what is buffered to the files."""

    def close(self) -> None:
        """Give back memory, threads and files; the store's own directory holds nothing of worth afterwards."""


def check_rows(store: RecordStore, rows: NDArray[np.int64], records: NDArray[np.uint8] | None = None) -> None:
    """`ValueError` unless rows and records have the shapes, types and range that a store takes."""
    if rows.ndim != 1 or rows.dtype != np.int64 or not rows.flags.c_contiguous:
        raise ValueError(f"rows are {rows.dtype}{list(rows.shape)}, expected contiguous int64 of one dimension")
    # What kernels and files take next checks nothing: a row outside would be read from other memory.
    if len(rows) and (rows.min() < 0 or rows.max() >= store.rows):
        raise ValueError(f"rows span {rows.min()}..{rows.max()}, the store has rows 0..{store.rows - 1}")
    if records is None:
        return
    expected = (len(rows), store.record_bytes)
    if records.shape != expected or records.dtype != np.uint8 or not records.flags.c_contiguous:
        raise ValueError(
            f"records are {records.dtype}{list(records.shape)}, expected contiguous uint8{list(expected)} for "
            f"{len(rows)} rows of {store.record_bytes} bytes"
        )
