"""A store whose records are in the memory of the device that trains the rows: encoded rows under a float32 cache.

Slots and records are encoded and decoded on the device, so no record crosses the bus. The host keeps one bit for rows
that were written and one for rows that changed, because it lists the moves. Records are padded to whole words there;
in checkpoints they have the bytes of other homes, so a run can be resumed with another home.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.slots import Level0
from stratarec.embedding.stores.arrays import allocate_bits, clear_bits, resident_bytes, set_rows
from stratarec.embedding.stores.base import Manifest, StoreBytes, check_rows
from stratarec.embedding.stores.row_files import DeltaChain, require_same
from stratarec.errors import ConfigError
from stratarec.kernels import bit_rows
from stratarec.kernels.runtime.accelerator import on_device


class DeviceRecords:
    """A `RecordStore` in the memory of a device.

    Parameters
    ----------
    level0 : Level0
        Memory of the slots, on the same device.
    rows, record_bytes : int
        R, and bytes of one record.

    Raises
    ------
    ConfigError
        If the device has too little free memory.
    """

    kind = "hbm"
    array: NDArray[np.uint8] | None = None
    bits: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None

    def __init__(self, level0: Level0, *, rows: int, record_bytes: int) -> None:
        self.rows, self.record_bytes, self._order = rows, record_bytes, level0.order
        self.shape = rows, record_bytes
        size = rows, -(-record_bytes // 4) * 4
        try:
            with self._order.rarely():
                self.records = torch.zeros(size, dtype=torch.uint8, device=level0.device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{level0.device} has too little free memory for {rows:,} records of {record_bytes} bytes, "
                f"{size[0] * size[1] / 2**30:.1f} GiB: keep these tables in dram, or give them a smaller precision"
            ) from error
        self._written, self._changed = allocate_bits(rows), allocate_bits(rows)
        self._chain = DeltaChain()

    # Records by number, for files

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[np.uint8]:
        with self._order.rarely():
            chosen = self.records.index_select(0, self._up(rows))
            result: NDArray[np.uint8] = chosen[:, : self.record_bytes].contiguous().cpu().numpy()
        return result

    def __setitem__(self, rows: NDArray[np.int64], records: NDArray[np.uint8], /) -> None:
        padded = np.zeros((len(rows), self.records.shape[1]), np.uint8)
        padded[:, : self.record_bytes] = records
        with self._order.rarely():
            self.records[self._up(rows)] = on_device(torch.from_numpy(padded), self.records)

    def _up(self, rows: NDArray[np.int64]) -> Tensor:
        return on_device(torch.from_numpy(np.require(rows, requirements=["C", "W"])), self.records)

    # The interface

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        check_rows(self, rows, out)
        written = bit_rows.test_bits(self._written, rows)
        if written.any():
            out[written] = self[rows[written]]
        return written

    def write(self, rows: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        check_rows(self, rows, records)
        if len(rows):
            self[rows] = records
        self.mark_written(rows)

    def written(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        check_rows(self, rows)
        return bit_rows.test_bits(self._written, rows)

    def mark_written(self, rows: NDArray[np.int64]) -> None:
        """Record that the caller has queued a write of ``records[row]``."""
        check_rows(self, rows)
        bit_rows.set_bits(self._written, rows)
        bit_rows.set_bits(self._changed, rows)

    def memory(self) -> StoreBytes:
        bitmaps = resident_bytes(self._written, self._changed)
        return StoreBytes(dram_bytes=bitmaps, block_bytes=0, device_bytes=self.records.nbytes)

    def _identity(self) -> Manifest:
        return {"format": 1, "layout": "rows", "rows": self.rows, "record_bytes": self.record_bytes}

    def checkpoint(self, directory: Path, previous: Path | None) -> Manifest:
        files = self._chain.save(
            directory, previous, self, lambda: set_rows(self._written), lambda: set_rows(self._changed)
        )
        # Only after the checkpoint succeeded: a failed one does not contain these changes.
        clear_bits(self._changed)
        return {**self._identity(), "files": files}

    def clear(self) -> None:
        self._chain = DeltaChain()
        clear_bits(self._written)
        clear_bits(self._changed)

    def restore(self, directory: Path, manifest: Manifest) -> None:
        """Restore a checkpoint; `dram`, `mapped` and `hbm` stores accept each other's checkpoints."""
        require_same(directory, manifest, self._identity(), "files")
        self._chain.verify(directory, manifest["files"])
        # Before rows are replaced: if that fails, the next checkpoint must not build on either checkpoint.
        self.clear()
        for rows in self._chain.load(directory, manifest["files"], self):
            bit_rows.set_bits(self._written, rows)

    def check(self) -> None:
        """Do nothing: memory has no checksums."""

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def close(self) -> None:
        self.records = self.records[:0].clone()
        self._written = self._changed = np.empty(0, np.uint8)
