"""Records in DRAM."""

from __future__ import annotations

from stratarec.embedding.stores.array import ArrayRecords
from stratarec.embedding.stores.base import StoreBytes
from stratarec.embedding.stores.memory import allocate_bytes, resident_bytes


class DramRecords(ArrayRecords):
    """A `RecordStore` in memory on huge pages; rows that were never written cost nothing until their page is touched.

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
