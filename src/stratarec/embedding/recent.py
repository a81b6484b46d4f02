"""Which rows the batch that was prepared last looks up: what a batch after it must not read before they are updated.

One bit a slot of level 0. A row that two neighbouring batches look up is in the same slot for both, so slots say it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stratarec.embedding.prepared import Prepared
from stratarec.embedding.stores.memory import allocate_bits
from stratarec.embedding.tables import Tables
from stratarec.kernels.bags import BagBatch, clear_rows, mark_rows, marked_rows


class Recent:
    """The rows of the last batch of one engine.

    Parameters
    ----------
    tables : sequence of Tables
        Those of the engine.
    """

    def __init__(self, tables: Sequence[Tables]) -> None:
        self._tables = tuple(tables)
        self._bits = [allocate_bits(each.memory.slots) for each in tables]
        self._last: tuple[BagBatch, ...] | None = None
        self.number: int | None = None
        """Of the last batch; None where there is none."""

    def holds(self, prepared: Prepared) -> NDArray[np.bool_]:
        """``[N]`` for each lookup of a batch whether its row is one of the last batch's, too."""
        found = np.zeros(prepared.features.values.numel(), dtype=np.bool_)
        if self._last is not None:
            for tables, bags, bits in zip(self._tables, prepared.bags, self._bits, strict=True):
                marked_rows(tables.layout, bags, bits, found)
        return found

    def replace(self, prepared: Prepared) -> None:
        """The last batch is this one now."""
        self.forget()
        for tables, bags, bits in zip(self._tables, prepared.bags, self._bits, strict=True):
            mark_rows(tables.layout, bags, bits)
        # Not the handle: whether somebody still holds it says whether its batch was lost.
        self._last, self.number = prepared.bags, prepared.number

    def forget(self) -> None:
        """There is no last batch."""
        if self._last is not None:
            for tables, bags, bits in zip(self._tables, self._last, self._bits, strict=True):
                clear_rows(tables.layout, bags, bits)
        self._last = self.number = None

    @property
    def nbytes(self) -> int:
        """Bytes of the bits."""
        return sum(bits.nbytes for bits in self._bits)
