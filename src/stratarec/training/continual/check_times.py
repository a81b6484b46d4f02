"""Times of a period: they follow those of the period before, and no few rows lie far behind all others.

A single wrong year would otherwise be committed as the end of the period, and no later file could follow it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.row_group import split_rows
from stratarec.data.durations import PER_SECOND, as_text
from stratarec.data.splits import time_text
from stratarec.errors import DataError
from stratarec.training.run import periods

# Rows are outliers if they are at most this share of a log (or one row), and the gap before them is longer than a day
# and than so many times the span of all rows before it.
_SHARE, _SPANS, _DAY = 0.01, 10, 86_400
# A log of fewer rows says nothing of how dense its times are.
_ROWS = 20


def check_times(run: Path, file: str, dataset: Dataset, before: Dataset) -> None:
    """Refuse a log that begins before the last period ended, or that has outliers behind all other times.

    Parameters
    ----------
    dataset : Dataset
        The log, prepared with `before` as its base.

    Raises
    ------
    DataError
        Names the file, the row if samples are rows of a file, and the time.
    """
    last, span = before.manifest.carried.times, dataset.manifest.carried.times
    unit, column = dataset.schema.time_unit, dataset.schema.time
    if span is None:
        return
    times, rows = _times(dataset)
    if last is not None and span[0] < last[1]:
        more = f"; if that end is wrong, `stratarec revert {run}` takes the period back" if periods.latest(run) else ""
        raise DataError(
            f"{_place(file, times, rows, span[0])}: column {column!r} is {time_text(span[0], unit)}, and the last "
            f"period ended at {time_text(last[1], unit)}: give files in the order of their times, and none twice{more}"
        )
    # Clicks that wait for the next period are no samples yet.
    ordered = np.sort(np.append(times, span[1]) if span[1] > times.max(initial=span[0]) else times)
    if len(ordered) < _ROWS:
        return
    late = max(1, int(len(ordered) * _SHARE))
    place = len(ordered) - late + int(np.diff(ordered)[-late:].argmax())
    gap, first = int(ordered[place] - ordered[place - 1]), int(ordered[place])
    if gap > max(_DAY * PER_SECOND[unit], _SPANS * int(ordered[place - 1] - ordered[0])):
        raise DataError(
            f"{_place(file, times, rows, first)}: column {column!r} is {time_text(first, unit)}, {as_text(gap, unit)} "
            f"after all but {len(ordered) - place:,} of {len(ordered):,} rows, so no later file could follow; correct "
            "or remove such rows, or give them as a file of their own"
        )


def _times(dataset: Dataset) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return ``[N]`` times of all samples, and the rows of the file that they are, if they are rows of one."""
    kept, times, rows = dataset.about.rows.kept, [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    with dataset.reader("train") as reader:
        for shard, whole in enumerate(dataset.shards("train")):
            for group in range(len(whole.row_groups)):
                times.append(reader.times(shard, group))
                if kept:
                    rows.append(split_rows(reader.row_numbers(shard, group))[1])
    return np.concatenate(times), np.concatenate(rows) if kept else None


def _place(file: str, times: NDArray[np.int64], rows: NDArray[np.int64] | None, time: int) -> str:
    if rows is None or not (times == time).any():
        return file
    return f"{file}, row {rows[times == time].min():,}"
