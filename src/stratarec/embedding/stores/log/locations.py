"""Where each row is, in DRAM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.stores.log.layout import Layout
from stratarec.embedding.stores.memory import allocate_bits, allocate_bytes, clear_bits, set_rows

_CHUNK_ROWS = 1 << 20


class Locations:
    """A location for each row (see `stratarec.kernels.blocks`) and a bit that says whether it changed since the last
    checkpoint; pages of rows that were never written do not exist.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.of_row: NDArray[np.unsignedinteger[Any]] = self._new()
        self.changed = allocate_bits(layout.rows)

    def _new(self) -> NDArray[np.unsignedinteger[Any]]:
        kind = self._layout.location_type
        return allocate_bytes(self._layout.rows * kind.itemsize).view(kind)

    @property
    def as_bytes(self) -> NDArray[np.uint8]:
        """``[R, 4 or 8]`` uint8, the same memory."""
        return self.of_row.view(np.uint8).reshape(self._layout.rows, -1)

    def written_rows(self) -> Iterator[NDArray[np.int64]]:
        """Rows that have a location, ascending, in chunks."""
        for first in range(0, len(self.of_row), _CHUNK_ROWS):
            rows = np.flatnonzero(self.of_row[first : first + _CHUNK_ROWS])
            if len(rows):
                yield rows + first

    def changed_rows(self) -> Iterator[NDArray[np.int64]]:
        """Rows whose location changed since `forget_changes`, ascending, in chunks."""
        return set_rows(self.changed)

    def forget_changes(self) -> None:
        """Begin a new checkpoint's changes."""
        clear_bits(self.changed)

    def clear(self) -> None:
        """Have no row written, giving the memory back."""
        self.of_row = self._new()
        clear_bits(self.changed)
