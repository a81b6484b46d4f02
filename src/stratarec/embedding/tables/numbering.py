"""Numbers of rows in files of tables that may grow: those of one table do not depend on how many rows others have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stratarec.embedding.tables.row_arrays import Indices
from stratarec.errors import CheckpointError

_BITS = 40


class TableNumbers:
    """Row r of the t-th table of a group is ``t << 40 | r`` in its files; in memory tables lie one behind the other.

    Parameters
    ----------
    sizes : sequence of int
        Rows of each table.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = np.array(sizes, dtype=np.int64)
        self._first = np.cumsum(self._sizes) - self._sizes
        self.end = len(self._sizes) << _BITS
        """Beyond all numbers."""

    def to_files(self, rows: Indices) -> Indices:
        """From rows of the group; what rises still does."""
        table = np.searchsorted(self._first, rows, side="right") - 1
        return (table << _BITS) + rows - self._first[table]

    def to_group(self, numbers: Indices) -> Indices:
        """From numbers below `end`; `CheckpointError` where a table has not so many rows."""
        table, row = numbers >> _BITS, numbers & ((1 << _BITS) - 1)
        if (row >= self._sizes[table]).any():
            raise CheckpointError("a checkpoint has rows beyond the end of their table; use another checkpoint")
        found: Indices = self._first[table] + row
        return found
