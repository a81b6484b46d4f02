"""The best rows of each user, session or slate, of rows that come some at a time: `stratarec predict --top`."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

RANK = "rank"
_GROUP, _SCORE, _PLACE, _FIRST = "@group", "@score", "@place", "@first"
# Rows that are held at least before those that are not among the best go.
_PIECE = 1 << 18


class TopRows:
    """Keeps the `most` best rows of each group, of equal ones those that came first. Memory holds them twice.

    Parameters
    ----------
    most : int
        Rows of a group.
    """

    def __init__(self, most: int) -> None:
        self._most, self._held, self._kept = most, 0, 0
        self._parts: list[pl.DataFrame] = []
        self.seen = 0
        """Rows that were added."""
        self.ungrouped = 0
        """Rows that are in no group, and are left out."""

    def add(self, rows: pa.Table, group: pl.Series, score: NDArray[np.float32]) -> None:
        """Take more rows: the group of each, null for none, and what to order them by; of several scores the first."""
        frame = pl.DataFrame(rows).with_columns(
            group.alias(_GROUP),
            pl.Series(_SCORE, np.ascontiguousarray(score if score.ndim == 1 else score[:, 0])),
            pl.Series(_PLACE, np.arange(self.seen, self.seen + len(score))),
        )
        self.seen += len(frame)
        known = frame.filter(pl.col(_GROUP).is_not_null())
        self.ungrouped += len(frame) - len(known)
        self._parts.append(known.with_columns(pl.col(_PLACE).alias(_FIRST)))
        self._held += len(known)
        if self._held > max(2 * self._kept, _PIECE):
            self._forget()

    def _forget(self) -> None:
        frame = pl.concat(self._parts, how="vertical_relaxed").with_columns(pl.col(_FIRST).min().over(_GROUP))
        ordered = frame.sort(_SCORE, _PLACE, descending=[True, False])
        self._parts = [ordered.group_by(_GROUP, maintain_order=True).head(self._most)]
        self._held = self._kept = len(self._parts[0])

    def result(self) -> pa.Table:
        """All that is kept, and its `RANK` from 1 on: group after group as they first came, the best row first."""
        self._forget()
        frame = self._parts[0].with_columns(pl.int_range(1, pl.len() + 1).over(_GROUP).alias(RANK))
        return frame.sort(_FIRST, RANK).drop(_GROUP, _SCORE, _PLACE, _FIRST).to_arrow()
