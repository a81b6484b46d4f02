"""The hot rows that take most lookups: all rows ranked by lookups per byte, as FAE's authors do.

They sort the rows of all tables together and keep the first of them that fit; rows of one width, without optimizer
state. Here rows of several widths are ranked by lookups per byte, and a part of a table is taken from its front.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stratarec.hot.parts import Counts, Part, used_bytes

# Halvings of the least lookups per byte; enough to tell any two counts apart.
_HALVINGS = 100


def hottest_rows(parts: Sequence[Part], budget: int, floor: Counts | None = None) -> Counts:
    """``[parts]`` first rows of each part with most lookups per byte that fit into `budget` bytes together.

    Parameters
    ----------
        Rows that take no bytes are hot, too.
    floor : ndarray
        ``[parts]`` rows that are hot in any case, and fit.
    """
    least = np.zeros(len(parts), dtype=np.int64) if floor is None else floor
    falling = [_falling(part) for part in parts]

    def hot(rate: float) -> Counts:
        taken = [
            len(counts) - int(np.searchsorted(counts[::-1], rate * part.row_bytes)) if part.row_bytes else part.rows
            for part, counts in zip(parts, falling, strict=True)
        ]
        return np.maximum(np.array(taken, dtype=np.int64), least)

    low, high = (
        0.0,
        max(float(counts[0]) / max(part.row_bytes, 1) for part, counts in zip(parts, falling, strict=True)) + 1,
    )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if used_bytes(parts, hot(middle)) <= budget else (middle, high)
    return _fill(parts, hot(high), budget)


def _falling(part: Part) -> Counts:
    """Counts that fall with the row: a row in front of a popular one goes with it, a part that is whole is one mean."""
    if part.whole:
        return np.full(part.rows, -(-int(part.counts.sum()) // part.rows), dtype=np.int64)
    return np.maximum.accumulate(part.counts[::-1])[::-1] if part.inherited else part.counts


def _fill(parts: Sequence[Part], hot: Counts, budget: int) -> Counts:
    """Rows as popular as those that just fitted, then any, part by part where they fit; smallest rest first."""
    found = hot.copy()
    spare = budget - used_bytes(parts, found)
    lacking = [part.nbytes - int(rows) * part.row_bytes for part, rows in zip(parts, found, strict=True)]
    for place in sorted((place for place, size in enumerate(lacking) if size), key=lambda place: lacking[place]):
        part = parts[place]
        more = min(part.rows - int(found[place]), spare // part.row_bytes)
        if part.whole and more < part.rows:
            continue
        found[place] += more
        spare -= more * part.row_bytes
    return found
