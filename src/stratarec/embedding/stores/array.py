"""Records in directly addressable memory: what `dram` and `mapped` share.

Two bits a row say whether it was ever written and whether it changed since the last checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.stores.base import Manifest, StoreBytes, check_rows
from stratarec.embedding.stores.chain import Chain, require_same
from stratarec.embedding.stores.memory import allocate_bits, clear_bits, resident_bytes, set_rows
from stratarec.kernels import records as kernels


class ArrayRecords:
    """A `RecordStore` over `array` ``[R, record_bytes]`` uint8, which may be written by its holder too."""

    kind = "array"

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.array: NDArray[np.uint8] | None = array
        self._array = array
        self.rows, self.record_bytes = array.shape
        self._written = allocate_bits(self.rows)
        self._changed = allocate_bits(self.rows)
        self._chain = Chain()

    @property
    def bits(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]] | None:
        return self._written, self._changed

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        check_rows(self, rows, out)
        found = kernels.test_bits(self._written, rows)
        kernels.gather(self._array, rows, found, out)
        return found

    def write(self, rows: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        check_rows(self, rows, records)
        kernels.scatter(self._array, rows, records)
        self._mark(rows)

    def written(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        check_rows(self, rows)
        return kernels.test_bits(self._written, rows)

    def mark_written(self, rows: NDArray[np.int64]) -> None:
        check_rows(self, rows)
        self._mark(rows)

    def _mark(self, rows: NDArray[np.int64]) -> None:
        kernels.set_bits(self._written, rows)
        kernels.set_bits(self._changed, rows)

    def memory(self) -> StoreBytes:
        return StoreBytes(dram_bytes=resident_bytes(self._written, self._changed), block_bytes=0)

    def _identity(self) -> Manifest:
        return {"format": 1, "layout": "rows", "rows": self.rows, "record_bytes": self.record_bytes}

    def checkpoint(self, directory: Path, previous: Path | None) -> Manifest:
        files = self._chain.save(
            directory, previous, self._array, lambda: set_rows(self._written), lambda: set_rows(self._changed)
        )
        clear_bits(self._changed)
        return {**self._identity(), "files": files}

    def restore(self, directory: Path, manifest: Manifest) -> None:
        """See `RecordStore.restore`; a checkpoint of a `dram` store fits a `mapped` one and the other way round."""
        require_same(directory, manifest, self._identity(), "files")
        self._chain.verify(directory, manifest["files"])
        self._chain = Chain()
        clear_bits(self._written)
        clear_bits(self._changed)
        for rows in self._chain.load(directory, manifest["files"], self._array):
            kernels.set_bits(self._written, rows)

    def check(self) -> None:
        """Nothing to do: memory carries no checksums."""

    def flush(self) -> None:
        """Nothing to do: nothing is buffered."""

    def close(self) -> None:
        self.array = None
        self._array = np.empty((0, self.record_bytes), np.uint8)
        self._written = self._changed = np.empty(0, np.uint8)
