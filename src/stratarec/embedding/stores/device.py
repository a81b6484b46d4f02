"""A store whose records are in the memory of the device that trains the rows: encoded rows under a
float32 cache.

Slots and records are encoded and decoded on the device, so no record crosses the bus. The host
keeps one bit for rows that were written and one for rows that changed, because it lists the moves.
Records are padded to whole words there; in checkpoints they have the bytes of other homes, so a run
can be resumed with another home.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratarec.embedding.slots import Level0
from stratarec.embedding.stores.arrays import NumberedRecords
from stratarec.embedding.stores.base import StoreBytes, check_rows
from stratarec.errors import ConfigError
from stratarec.kernels import bit_rows
from stratarec.kernels.runtime.accelerator import on_device


class DeviceRecords(NumberedRecords):
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

    def __init__(self, level0: Level0, *, rows: int, record_bytes: int) -> None:
        super().__init__(rows, record_bytes)
        self._order = level0.order
        self.shape = rows, record_bytes
        size = rows, -(-record_bytes // 4) * 4
        try:
            with self._order.rarely():
                self.records = torch.zeros(size, dtype=torch.uint8, device=level0.device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{level0.device} has too little free memory for {rows:,} records of {record_bytes} bytes, "
                f"{size[0] * size[1] / 2**30:.1f} GiB: keep these tables in dram, or give "
                "them a smaller precision"
            ) from error

    # Records by number, for files

    @property
    def _by_number(self) -> DeviceRecords:
        return self

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
        self._mark(rows)

    def memory(self) -> StoreBytes:
        return super().memory() + StoreBytes(dram_bytes=0, block_bytes=0, device_bytes=self.records.nbytes)

    def close(self) -> None:
        super().close()
        self.records = self.records[:0].clone()
