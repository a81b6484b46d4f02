"""Checks and measurements of the log of a period: its times, new values, and drift.

All times must be later than the period before, and the latest ones must not be outliers. Otherwise
a single wrong year would become the end of the period, and no later file could follow.
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

# The latest rows are outliers if there are few of them (at most this share of the log, or one row),
# and if the gap before them is longer than a day and longer than _SPANS times the span of all
# earlier rows.
_SHARE, _SPANS, _DAY = 0.01, 10, 86_400
# A log with fewer rows is not checked for outliers, because the usual distance between its times is
# not known.
_ROWS = 20


def check_times(run: Path, file: str, dataset: Dataset, before: Dataset) -> None:
    """Check that a log begins after the last period ended, and that its latest times are not
    outliers.

    Parameters
    ----------
    dataset : Dataset
        Data set that was prepared from the log, with `before` as its base.

    Raises
    ------
    DataError
        If a check fails. The message names the file, the row (if samples are rows of a file) and
        the time.
    """
    last, span = before.manifest.carried.times, dataset.manifest.carried.times
    unit, column = dataset.schema.time_unit, dataset.schema.time
    if span is None:
        return
    times, rows = _times(dataset)
    if last is not None and span[0] < last[1]:
        more = (
            f"; if that end is wrong, `stratarec revert {run}` removes the period"
            if periods.latest(run)
            else ""
        )
        raise DataError(
            f"{_place(file, times, rows, span[0])}: column {column!r} is {time_text(span[0], unit)}, and "
            "the last "
            f"period ended at {time_text(last[1], unit)}: give files in the order of their "
            f"times, each only once{more}"
        )
    # The last clicks of a log become samples only in the next period, so the end of the log is
    # added as a time.
    ordered = np.sort(np.append(times, span[1]) if span[1] > times.max(initial=span[0]) else times)
    if len(ordered) < _ROWS:
        return
    late = max(1, int(len(ordered) * _SHARE))
    place = len(ordered) - late + int(np.diff(ordered)[-late:].argmax())
    gap, first = int(ordered[place] - ordered[place - 1]), int(ordered[place])
    if gap > max(_DAY * PER_SECOND[unit], _SPANS * int(ordered[place - 1] - ordered[0])):
        raise DataError(
            f"{_place(file, times, rows, first)}: column {column!r} is {time_text(first, unit)}, "
            f"{as_text(gap, unit)} "
            f"after all but {len(ordered) - place:,} of {len(ordered):,} rows, so no later file could "
            "follow; correct or remove such rows, or put them in a separate file"
        )


def _times(dataset: Dataset) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return the times of all samples, ``[N]``, and their row numbers in the file (None if samples
    are not rows of a file).
    """
    has_rows, times, rows = dataset.about.rows.kept, [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    with dataset.reader("train") as reader:
        for shard, shard_info in enumerate(dataset.shards("train")):
            for group in range(len(shard_info.row_groups)):
                times.append(reader.times(shard, group))
                if has_rows:
                    rows.append(split_rows(reader.row_numbers(shard, group))[1])
    return np.concatenate(times), np.concatenate(rows) if has_rows else None


def _place(file: str, times: NDArray[np.int64], rows: NDArray[np.int64] | None, time: int) -> str:
    if rows is None or not (times == time).any():
        return file
    return f"{file}, row {rows[times == time].min():,}"


KINDS = ("known", "tail", "new")
"""Kinds of values: ``known`` has a row, ``tail`` was counted but has no row, ``new`` never
occurred. The kind of a sample is the one of its values that comes last in this order."""


class Novelty:
    """Finds the kind (`KINDS`) of each value of single-valued features.

    Lists are left out, because nearly every list contains a rare value.

    Parameters
    ----------
    dataset : Dataset
        Data set with the vocabularies of the model.
    only : str
        Examine only this feature; by default all.
    """

    def __init__(self, dataset: Dataset, only: str = "") -> None:
        counted = {name: info for name, info in dataset.vocabularies.items() if info.kind == "count"}
        self.features = {
            feature.name: feature.vocabulary
            for feature in dataset.schema.sparse
            if feature.kind == "single" and feature.vocabulary in counted and only in ("", feature.name)
        }
        """Examined feature -> its vocabulary."""
        self._kinds = {name: _kinds(dataset, name) for name in set(self.features.values())}
        self.lookups: dict[str, Counter[str]] = {name: Counter() for name in counted}
        """Vocabulary -> number of lookups of each kind."""

    def of(self, frame: pl.DataFrame) -> NDArray[np.int8]:
        """Return the kind of each value, as an index in `KINDS`, ``[N, F]``, and count the kinds in
        `lookups`.
        """
        result = np.zeros((len(frame), len(self.features)), dtype=np.int8)
        for place, (feature, name) in enumerate(self.features.items()):
            kind_of, column = self._kinds[name], frame[feature]
            values = column.cast(kind_of["value"].dtype, strict=False).to_frame("value")
            kind = values.join(kind_of, on="value", how="left", maintain_order="left")["kind"].fill_null(
                len(KINDS) - 1
            )
            there = column.is_not_null().to_numpy()
            kinds = kind.to_numpy()[there]
            self.lookups[name].update(
                dict(zip(KINDS, np.bincount(kinds, minlength=len(KINDS)).tolist(), strict=True))
            )
            result[there, place] = kinds
        return result


def kinds_of(values: NDArray[np.int8]) -> NDArray[np.int8]:
    """Return the kinds of samples, ``[N]``, from the kinds of their values, ``[N, F]``.

    A feature is ignored if its values have the same kind in all samples, such as the day of the
    week in a log of one day.
    """
    apart = (values != values[:1]).any(axis=0)
    kinds: NDArray[np.int8] = (values[:, apart] if apart.any() else values).max(axis=1, initial=0)
    return kinds


def _kinds(dataset: Dataset, name: str) -> pl.DataFrame:
    """Return a frame of all values that occurred before, with the columns `value` and `kind`."""
    parts = [dataset.vocabulary(name).values.drop_nulls(), dataset.carried_counts(name)["value"]]
    every = [
        pl.DataFrame({"value": part, "kind": np.full(len(part), kind, np.int8)})
        for kind, part in enumerate(parts)
    ]
    return pl.concat(every).unique("value", keep="first")


_PERIODS = 7
# Half the width of an interval that contains 95 % of a normal distribution, in standard deviations.
_WITHIN = 1.96
# An alarm is raised if a mean moves by more than this many standard deviations.
_MOVED = 0.5


def dense_drift(dataset: Dataset) -> dict[str, dict[str, float]]:
    """Measure how the values of each dense feature, after its transform, differ from the first log
    of the run.

    Returns for each feature: ``shift``, the change of the mean in standard deviations; ``spread``,
    the ratio of standard deviations; and ``known``, the share of samples that have a value.
    """
    samples, result = dataset.samples("train"), {}
    for name, first in dataset.about.moments.items():
        now = dataset.about.observed[name]
        result[name] = {
            "shift": (now.mean - first.mean) / first.deviation if now.count else 0.0,
            "spread": now.deviation / first.deviation,
            "known": now.count / max(samples, 1),
        }
    return result


def auc_drift(scores: Mapping[str, Any], earlier: Sequence[float | None]) -> dict[str, float | None]:
    """Return a 95 % interval of the AUC (``low``, ``high``), and the mean AUC of up to seven
    earlier periods (``before``); None for undefined numbers.

    The interval is computed as in Hanley and McNeil (1982), for independent samples.
    """
    area, positives = scores["auc"], scores["positives"]
    negatives = scores["samples"] - positives
    previous = [period for period in earlier[-_PERIODS:] if period is not None]
    if area is None:
        return {"low": None, "high": None, "before": None}
    one, two = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (positives - 1) * (one - area**2) + (negatives - 1) * (two - area**2)
    half = _WITHIN * math.sqrt(max(spread, 0.0) / (positives * negatives))
    before = sum(previous) / len(previous) if previous else None
    return {"low": max(area - half, 0.0), "high": min(area + half, 1.0), "before": before}


def alarms(period: Mapping[str, Any]) -> list[str]:
    """Return a message if the AUC is significantly lower than in earlier periods, and one for each
    feature with a large shift of its mean.
    """
    auc, result = period["auc"], []
    if auc["before"] is not None and auc["high"] is not None and auc["high"] < auc["before"]:
        area = period["scores"]["all"]["auc"]
        result.append(
            f"AUC {area:.5f} is below {auc['before']:.5f}, the mean of earlier periods; its 95 % interval "
            f"is {auc['low']:.5f} to {auc['high']:.5f}"
        )
    for name, drift in period["dense"].items():
        if abs(drift["shift"]) > _MOVED:
            result.append(
                f"{name}: its mean has moved by {drift['shift']:+.1f} standard deviations since the first "
                "log of the run"
            )
    return result
