"""Choose hot rows for a budget in bytes.

Ids are ranked by frequency, so the hot rows of a table are its first rows, and a hot set is the
number of hot rows of each table. Tail buckets come before the values. A hash distributes lookups
among them, so they are either all hot or all cold. A table of kind ``hash`` has only tail buckets.
There are two methods.

`choose_by_lookups` takes the rows with the most lookups, as FAE's authors do. They sort the rows of
all tables together and keep the first rows that fit; their rows have one width and no optimizer
state. Here rows of several widths are ranked by lookups per byte, and each table contributes its
first rows.

`choose_by_inputs` takes the rows that make the most inputs hot. An input is hot only if *all* its
lookups are hot. So the popular rows of one table are worth nothing if the same inputs need cold
rows of another table. For this reason, rows are removed instead of added. At first, every row that
the sampled inputs need is hot. Each step removes the rows that cost the fewest inputs per byte,
until the rest fits. Once an input is lost, its rows in other tables can be removed at no cost.
(This is the peeling of densest subgraphs, Charikar 2000, with first rows of tables as vertices.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset

Counts = NDArray[np.int64]
Needs = NDArray[np.int32]
"""``[N, parts]`` number of first rows of each part that contain all lookups of a sample."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowRange:
    """The rows of one table, with their counts."""

    table: str
    rows: int
    row_bytes: int
    """Bytes of weights and optimizer state of a row."""
    tail: int
    """Number of tail buckets, which are its first rows, and are either all hot or all cold."""
    counts: Counts
    """``[rows]`` training lookups, descending from row `tail` on unless ids continue a base's."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows together."""
        return self.rows * self.row_bytes


def parts_of(dataset: Dataset, row_bytes: Mapping[str, int]) -> list[RowRange]:
    """Return one `RowRange` for each table of a data set, which has all rows of the table.

    Parameters
    ----------
    dataset : Dataset
        Its vocabularies have the numbers of rows and of training lookups.
    row_bytes : mapping of str to int
        Bytes of weights and optimizer state of a row, by vocabulary.
    """
    return [
        RowRange(
            table=name,
            rows=info.rows,
            row_bytes=row_bytes[name],
            tail=info.tail_buckets,
            counts=dataset.access_counts(name),
        )
        for name, info in dataset.vocabularies.items()
    ]


def used_bytes(parts: Sequence[RowRange], hot: Counts) -> int:
    """Return the bytes of all hot rows together.

    Parameters
    ----------
    parts : sequence of RowRange
        Rows of each table.
    hot : ndarray
        ``[parts]`` int64 number of hot rows of each part, which are its first rows.
    """
    return sum(part.row_bytes * int(rows) for part, rows in zip(parts, hot, strict=True))


def share_of_accesses(parts: Sequence[RowRange], hot: Counts) -> float:
    """Return the share of all training lookups that use hot rows, from 0 to 1.

    Parameters
    ----------
    parts, hot
        Rows of each table and numbers of hot rows, as for `used_bytes`.
    """
    total = sum(int(part.counts.sum()) for part in parts)
    hot_lookups = sum(int(part.counts[: int(rows)].sum()) for part, rows in zip(parts, hot, strict=True))
    return hot_lookups / total if total else 0.0


# Number of bisection steps on the lookups per byte, which is enough to separate any two counts.
_HALVINGS = 100


def choose_by_lookups(parts: Sequence[RowRange], budget_bytes: int, floor: Counts | None = None) -> Counts:
    """Choose the rows with the most lookups per byte. Return the number of hot rows of each part,
    ``[parts]`` int64.

    Parameters
    ----------
    parts : sequence of RowRange
        Rows of each table. Rows that take no bytes are always hot.
    budget_bytes : int
        Maximum bytes of all hot rows together.
    floor : ndarray, optional
        ``[parts]`` int64 minimum number of hot rows of each part; these rows must fit the budget.
        By default 0.
    """
    least = np.zeros(len(parts), dtype=np.int64) if floor is None else floor
    falling = [_falling(part) for part in parts]

    def hot(rate: float) -> Counts:
        rows = [
            len(counts) - int(np.searchsorted(counts[::-1], rate * part.row_bytes))
            if part.row_bytes
            else part.rows
            for part, counts in zip(parts, falling, strict=True)
        ]
        return np.maximum(np.array(rows, dtype=np.int64), least)

    low = 0.0
    high = 1 + max(
        float(counts[0]) / max(part.row_bytes, 1) for part, counts in zip(parts, falling, strict=True)
    )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if used_bytes(parts, hot(middle)) <= budget_bytes else (middle, high)
    return _fill(parts, hot(high), budget_bytes)


def _falling(part: RowRange) -> Counts:
    """Return counts that never rise: each row gets the maximum of its count and all later counts.

    Before that, every tail bucket gets the mean count of all tail buckets.
    """
    falling = part.counts.copy()
    falling[: part.tail] = -(-int(falling[: part.tail].sum()) // part.tail)
    return np.maximum.accumulate(falling[::-1])[::-1]


def _fill(parts: Sequence[RowRange], hot: Counts, budget_bytes: int) -> Counts:
    """Spend the remaining budget on further rows; parts that lack the fewest bytes to be completely
    hot are first.
    """
    filled = hot.copy()
    spare = budget_bytes - used_bytes(parts, filled)
    missing = [part.nbytes - int(rows) * part.row_bytes for part, rows in zip(parts, filled, strict=True)]
    for place in sorted(
        (place for place, size in enumerate(missing) if size), key=lambda place: missing[place]
    ):
        part = parts[place]
        more = min(part.rows - int(filled[place]), spare // part.row_bytes)
        if int(filled[place]) + more < part.tail:
            continue
        filled[place] += more
        spare -= more * part.row_bytes
    return filled


# Ratio of neighbouring thresholds of a part; they differ by at least one row.
_STEP = 1.04
# Share of the budget for small tables, which are completely hot.
_SMALL_SHARE = 0.01


def thresholds(part: RowRange) -> Counts:
    """Return the numbers of hot rows of a part to choose from, ascending from 0 to all rows."""
    values = part.rows - part.tail
    steps = int(np.log(max(values, 1)) / np.log(_STEP)) + 1
    wide = np.round(values / _STEP ** np.arange(steps)).astype(np.int64)
    return np.unique(np.concatenate([[0, part.tail, part.rows], part.tail + wide]))


def choose_by_inputs(parts: Sequence[RowRange], budget_bytes: int, needs: Needs) -> Counts:
    """Choose the rows that make many inputs hot. Return the number of hot rows of each part,
    ``[parts]`` int64.

    The search starts with all rows hot. Again and again, it removes the rows that make the fewest
    inputs cold per freed byte, until the rest fits the budget.

    Parameters
    ----------
    parts : sequence of RowRange
        Rows of each table.
    budget_bytes : int
        Maximum bytes of all hot rows together.
    needs : ndarray
        ``[N, parts]`` int32: number of first rows of each part that a sampled input needs.

    Notes
    -----
    An input becomes cold at most once, so the time is proportional to N * parts, plus some thousand
    steps over all thresholds.
    """
    hot = np.zeros(len(parts), dtype=np.int64)
    small = fitting_whole(parts, budget_bytes)
    hot[small] = [parts[place].rows for place in small]
    large = [place for place in range(len(parts)) if place not in small]
    if large:
        remaining = budget_bytes - used_bytes(parts, hot)
        hot[large] = _lower_thresholds([parts[place] for place in large], remaining, needs[:, large])
    return choose_by_lookups(parts, budget_bytes, hot)


def fitting_whole(parts: Sequence[RowRange], budget_bytes: int) -> list[int]:
    """Return the indices of the smallest parts that fit 1 % of the budget: not worth cutting."""
    order = sorted(range(len(parts)), key=lambda place: parts[place].nbytes)
    total = np.cumsum([parts[place].nbytes for place in order])
    return order[: int(np.searchsorted(total, budget_bytes * _SMALL_SHARE, side="right"))]


def _lower_thresholds(parts: Sequence[RowRange], budget_bytes: int, needs: Needs) -> Counts:
    cuts = [thresholds(part) for part in parts]
    levels = np.stack([np.searchsorted(cut, needs[:, place]) for place, cut in enumerate(cuts)], axis=1)
    search = _ThresholdSearch(parts, cuts, levels.astype(np.int16))
    while search.used > budget_bytes:
        search.step(search.used - budget_bytes)
    return np.array([cut[level] for cut, level in zip(cuts, search.level, strict=True)], dtype=np.int64)


class _ThresholdSearch:
    """Thresholds of all parts, which are lowered step by step.

    Parameters
    ----------
    parts : sequence of RowRange
        Rows of each table.
    cuts : sequence of ndarray
        Possible numbers of hot rows of each part, ascending (`thresholds`).
    levels : ndarray
        ``[N, parts]`` int16: index in `cuts` of the smallest number of hot rows that an input
        needs.
    """

    def __init__(
        self, parts: Sequence[RowRange], cuts: Sequence[Counts], levels: NDArray[np.int16]
    ) -> None:
        widest = max(map(len, cuts))
        self._levels = levels
        # Bytes up to each threshold; they are constant after the last threshold.
        padded = [np.pad(cut, (0, widest - len(cut)), mode="edge") for cut in cuts]
        self._bytes = np.stack([cut * part.row_bytes for part, cut in zip(parts, padded, strict=True)])
        self.level = np.array([len(cut) - 1 for cut in cuts])
        self._inputs = np.stack([np.bincount(column, minlength=widest) for column in levels.T])
        # Inputs of each part in ascending order of their level, so that the inputs above a
        # threshold are contiguous.
        self._order = np.argsort(levels, axis=0, kind="stable").astype(np.int32).T.copy()
        self._first = np.pad(np.cumsum(self._inputs, axis=1), ((0, 0), (1, 0)))
        self._is_hot = np.ones(len(levels), dtype=bool)

    @property
    def used(self) -> int:
        """Bytes of all hot rows."""
        return int(self._bytes[np.arange(len(self.level)), self.level].sum())

    def step(self, excess: int) -> None:
        """Lower the threshold that loses the fewest inputs per freed byte; freed bytes beyond
        `excess` do not count.
        """
        above = self._inputs[:, ::-1].cumsum(axis=1)[:, ::-1]
        lost = np.pad(above[:, 1:], ((0, 0), (0, 1)))
        freed = np.minimum(
            self._bytes[np.arange(len(self.level)), self.level][:, None] - self._bytes, excess
        )
        # If several steps lose no input, the step that frees the most bytes is chosen.
        cost = np.where(freed > 0, (lost + 1e-9) / np.maximum(freed, 1), np.inf)
        place, level = np.unravel_index(np.argmin(cost), cost.shape)
        self._lower(int(place), int(level))

    def _lower(self, place: int, level: int) -> None:
        """Lower part number `place` to threshold number `level`; inputs that need more of its rows
        become cold.
        """
        inputs = self._order[
            place, self._first[place, level + 1] : self._first[place, self.level[place] + 1]
        ]
        inputs = inputs[self._is_hot[inputs]]
        self._is_hot[inputs] = False
        self.level[place] = level
        if len(inputs):
            for part, column in enumerate(self._levels[inputs].T):
                self._inputs[part] -= np.bincount(column, minlength=self._inputs.shape[1])
