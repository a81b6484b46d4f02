"""The best rows of each user, session or slate, of rows that arrive in parts: `stratarec predict --top`."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

RANK = "rank"
# Rows that are buffered before those that are not among the best of their group are dropped.
_BUFFERED = 1 << 18


class TopRows:
    """Keeps the `most` best rows of each group, of equal ones those that came first. Memory holds them twice.

    Parameters
    ----------
    most : int
        Rows of a group.
    """

    def __init__(self, most: int) -> None:
        self._most, self._buffered, self._kept = most, 0, 0
        # The columns of a row are one struct, so that none has the name of one of ours.
        self._parts: list[pl.DataFrame] = []
        self.seen = 0
        """Number of rows added."""
        self.ungrouped = 0
        """Number of rows without a group, which are left out."""

    def add(self, rows: pa.Table, group: pl.Series, score: NDArray[np.float32]) -> None:
        """Add rows: the group of each, null for none, and the score to order them by; of several scores the first."""
        part = pl.DataFrame(
            {
                "row": pl.DataFrame(rows).to_struct(),
                "group": group,
                "score": np.ascontiguousarray(score if score.ndim == 1 else score[:, 0]),
                "place": np.arange(self.seen, self.seen + len(score)),
                "first": np.arange(self.seen, self.seen + len(score)),
            }
        )
        self.seen += len(part)
        grouped = part.filter(pl.col("group").is_not_null())
        self.ungrouped += len(part) - len(grouped)
        self._parts.append(grouped)
        self._buffered += len(grouped)
        if self._buffered > max(2 * self._kept, _BUFFERED):
            self._drop_others()

    def _drop_others(self) -> None:
        rows = pl.concat(self._parts, how="vertical_relaxed").with_columns(pl.col("first").min().over("group"))
        ordered = rows.sort("score", "place", descending=[True, False])
        # Not group_by().head(), which moves the column of the group to the front.
        self._parts = [ordered.filter(pl.int_range(pl.len()).over("group") < self._most)]
        self._buffered = self._kept = len(self._parts[0])

    def result(self) -> pa.Table:
        """Return the rows kept, and their `RANK` from 1: group after group as they first came, the best row first."""
        self._drop_others()
        ranked = self._parts[0].with_columns(pl.int_range(1, pl.len() + 1).over("group").alias("rank"))
        ranked = ranked.sort("first", "rank")
        return ranked["row"].struct.unnest().with_columns(ranked["rank"].alias(RANK)).to_arrow()
