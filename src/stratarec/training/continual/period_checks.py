"""Times of a period: they follow those of the period before, and no few rows lie far behind all others.

A single wrong year would otherwise be committed as the end of the period, and no later file could follow it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
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


KINDS = ("known", "tail", "new")
"""A sample is of the last of these that one of its values is: with a row of its own, counted before, neither."""


class Novelty:
    """Looks at the values of features of one value; lists nearly always have a rare one.

    Parameters
    ----------
    dataset : Dataset
        Whose vocabularies the model has.
    """

    def __init__(self, dataset: Dataset) -> None:
        counted = {name: info for name, info in dataset.vocabularies.items() if info.kind == "count"}
        self._features = {
            feature.name: feature.vocabulary
            for feature in dataset.schema.sparse
            if feature.kind == "single" and feature.vocabulary in counted
        }
        self._kinds = {name: _kinds(dataset, name) for name in set(self._features.values())}
        self.lookups: dict[str, Counter[str]] = {name: Counter() for name in counted}
        """Vocabulary -> how many lookups there were of each kind."""

    def of(self, frame: pl.DataFrame) -> NDArray[np.int8]:
        """``[N, F]`` the place of the kind of each value in `KINDS`; see `kinds_of`."""
        found = np.zeros((len(frame), len(self._features)), dtype=np.int8)
        for place, (feature, name) in enumerate(self._features.items()):
            known, column = self._kinds[name], frame[feature]
            values = column.cast(known["value"].dtype, strict=False).to_frame("value")
            kind = values.join(known, on="value", how="left", maintain_order="left")["kind"].fill_null(len(KINDS) - 1)
            there = column.is_not_null().to_numpy()
            kinds = kind.to_numpy()[there]
            self.lookups[name].update(dict(zip(KINDS, np.bincount(kinds, minlength=len(KINDS)).tolist(), strict=True)))
            found[there, place] = kinds
        return found


def kinds_of(values: NDArray[np.int8]) -> NDArray[np.int8]:
    """``[N]`` kinds of samples, of those of their values ``[N, F]``.

    A feature of one kind in all samples, as the day of the week is on a first Monday, tells none from another.
    """
    apart = (values != values[:1]).any(axis=0)
    kinds: NDArray[np.int8] = (values[:, apart] if apart.any() else values).max(axis=1, initial=0)
    return kinds


def _kinds(dataset: Dataset, name: str) -> pl.DataFrame:
    """Columns `value` and `kind` of all values that are known of."""
    parts = [dataset.vocabulary(name).values.drop_nulls(), dataset.carried_counts(name)["value"]]
    every = [
        pl.DataFrame({"value": part, "kind": np.full(len(part), kind, np.int8)}) for kind, part in enumerate(parts)
    ]
    return pl.concat(every).unique("value", keep="first")


_PERIODS = 7
# Of a normal distribution: 95 % lie within.
_WITHIN = 1.96
# Deviations by which the mean of a feature has moved that are worth a line.
_MOVED = 0.5


def dense_drift(dataset: Dataset) -> dict[str, dict[str, float]]:
    """Of each dense feature, after its transform: how many deviations of the run's first log its mean has moved, its
    deviation over that one's, and the share of samples that have it."""
    samples, found = dataset.samples("train"), {}
    for name, first in dataset.about.moments.items():
        now = dataset.about.observed[name]
        found[name] = {
            "shift": (now.mean - first.mean) / first.deviation if now.count else 0.0,
            "spread": now.deviation / first.deviation,
            "known": now.count / max(samples, 1),
        }
    return found


def auc_drift(scores: Mapping[str, Any], earlier: Sequence[float | None]) -> dict[str, float | None]:
    """The interval that holds an AUC of these samples with a chance of 95 % (Hanley and McNeil 1982, as if samples were
    drawn independently), and the mean AUC of the last seven periods before; None where there is none."""
    area, positives = scores["auc"], scores["positives"]
    negatives, known = scores["samples"] - positives, [each for each in earlier[-_PERIODS:] if each is not None]
    if area is None:
        return {"low": None, "high": None, "before": None}
    one, two = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (positives - 1) * (one - area**2) + (negatives - 1) * (two - area**2)
    half = _WITHIN * math.sqrt(max(spread, 0.0) / (positives * negatives))
    before = sum(known) / len(known) if known else None
    return {"low": max(area - half, 0.0), "high": min(area + half, 1.0), "before": before}


def alarms(period: Mapping[str, Any]) -> list[str]:
    """What is not as it was: an AUC below that of the periods before by more than chance gives, means that moved."""
    auc, found = period["auc"], []
    if auc["before"] is not None and auc["high"] is not None and auc["high"] < auc["before"]:
        area = period["scores"]["all"]["auc"]
        found.append(
            f"AUC is {area:.5f} and was {auc['before']:.5f} in the periods before; by chance it is {auc['low']:.5f} to "
            f"{auc['high']:.5f} here"
        )
    for name, drift in period["dense"].items():
        if abs(drift["shift"]) > _MOVED:
            found.append(f"{name}: its mean has moved by {drift['shift']:+.1f} deviations since the run's first log")
    return found
