"""Count how often rows look up each value, for all vocabularies together.

Lookups of training rows are the `count` of a value, which decides its id. Lookups of validation and
test rows are counted apart, as `held_out`: they may give a value a row for `train.refit`.

The counts of all vocabularies whose values have the same type are rows of one frame. So thousands
of columns need only a few large group-bys, and one file per chunk. With a file for each vocabulary
and partition, each column took 25 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.column_names import SPLIT
from stratarec.data.prepare.partition import shortened
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.threads import map_threads
from stratarec.data.user_history import EventWindows
from stratarec.data.vocabulary import VocabularyConfig, VocabularyLimits, buckets_of

# Minimum number of rows that wait before they are added.
_FEW_ROWS = 1 << 18
# Number of values from which a group-by is faster than `value_counts`, by a third.
_FEW_VALUES = 1 << 16


def value_type(features: Sequence[SparseFeature], columns: Mapping[str, pl.DataType]) -> pl.DataType:
    """Return the type of the values of a vocabulary that `features` share.

    If features have different types (text and integers, or signed and unsigned integers), values
    become text.
    """
    kinds = {columns[feature.of if feature.traits.derived else feature.name] for feature in features}
    inner = {kind.inner if isinstance(kind, pl.List) else kind for kind in kinds}
    return inner.pop() if len(inner) == 1 else pl.String()  # type: ignore[return-value]


def count_values(frame: pl.DataFrame, schema: Schema, config: VocabularyConfig) -> list[pl.DataFrame]:
    """Count the values in the rows of `frame`, without histories.

    Returns
    -------
    list of DataFrame
        For each type of value, a frame with the number of the ``vocabulary``, the ``value``, its
        ``count`` in training rows, its count in ``held_out`` rows, and the time of the ``last`` row
        with the value. The time is null for values in lists, if the vocabulary is shared with a
        feature with single values. A value may occur in several rows. For kind ``hash``, values are
        bucket numbers, and held-out rows are not counted.
    """
    tasks = list(_tasks(frame, frame[SPLIT] == 0, schema, config))
    if (is_held_out := frame[SPLIT] > 0).any():
        tasks += _tasks(frame, is_held_out, schema, config, held_out=True)
    return _by_type(map_threads(lambda task: task(), tasks))


def _tasks(
    frame: pl.DataFrame,
    chosen: pl.Series,
    schema: Schema,
    config: VocabularyConfig,
    *,
    held_out: bool = False,
) -> Iterator[Callable[[], pl.DataFrame]]:
    """Yield, for each feature, a function that counts its values in the chosen rows, as ``count``
    or as ``held_out``.
    """
    columns, time = frame.schema, frame[schema.time].filter(chosen) if schema.time else None
    for number, (name, features) in enumerate(schema.vocabularies().items()):
        kind, limits = value_type(features, columns), config.limits(name)
        if held_out and limits.kind == "hash":
            continue
        single = any(feature.kind == "single" for feature in features)
        numbered = partial(_numbered, number, kind, limits)
        for feature in features:
            if not feature.traits.derived:
                timed = not (feature.traits.lists and single)
                values = frame[feature.name]
                yield partial(
                    _counted, values, chosen, time, feature, numbered, timed=timed, held_out=held_out
                )


def _counted(
    values: pl.Series,
    chosen: pl.Series,
    time: pl.Series | None,
    feature: SparseFeature,
    numbered: Callable[[pl.Series, pl.Series, pl.Series | None], pl.DataFrame],
    *,
    timed: bool,
    held_out: bool,
) -> pl.DataFrame:
    values = values.filter(chosen).alias("value")
    if feature.traits.lists:
        values = shortened(values, feature)
    if time is None or not timed:
        counted = _count((values.explode() if feature.traits.lists else values).drop_nulls())
        last = pl.Series(np.zeros(len(counted), dtype=np.int64)) if timed else None
    else:
        counted = _count_with_time(values, time, lists=feature.traits.lists)
        last = counted["last"]
    counts = numbered(counted["value"], counted["count"], last)
    if held_out:
        counts = counts.with_columns(count=pl.col("held_out"), held_out=pl.col("count"))
    return counts


def count_windows(
    windows: Mapping[str, EventWindows],
    training: NDArray[np.bool_],
    schema: Schema,
    columns: Mapping[str, pl.DataType],
    config: VocabularyConfig,
) -> list[pl.DataFrame]:
    """Count the values in the histories of training rows; returns frames like `count_values`."""
    parts = []
    for number, (name, features) in enumerate(schema.vocabularies().items()):
        for feature in features:
            if feature.traits.derived:
                values, counts = windows[feature.name].lookups(training)
                kind, limits = value_type(features, columns), config.limits(name)
                parts.append(_numbered(number, kind, limits, values, counts, None))
    return _by_type(parts)


def _count(values: pl.Series) -> pl.DataFrame:
    if len(values) < _FEW_VALUES:
        # For columns of a few thousand rows, this takes a tenth of the time of a group-by.
        return values.value_counts(name="count")
    return values.to_frame().lazy().group_by("value").len("count").collect()


def _count_with_time(values: pl.Series, time: pl.Series, *, lists: bool) -> pl.DataFrame:
    rows = pl.DataFrame([values, time.alias("last")]).lazy()
    rows = rows.explode("value") if lists else rows
    counts = rows.drop_nulls("value").group_by("value").agg(pl.len().alias("count"), pl.col("last").max())
    return counts.collect()


def _numbered(
    number: int,
    kind: pl.DataType,
    limits: VocabularyLimits,
    values: pl.Series,
    counts: pl.Series,
    last: pl.Series | None,
) -> pl.DataFrame:
    values = values.cast(kind)
    if limits.kind == "hash":
        values = pl.Series(buckets_of(values, limits.buckets))
    if last is None:
        last = pl.Series([None], dtype=pl.Int64).new_from_index(0, len(values))
    return pl.DataFrame(
        [
            pl.Series("vocabulary", np.full(len(values), number, dtype=np.int32)),
            values.alias("value"),
            counts.cast(pl.Int64).alias("count"),
            pl.Series("held_out", np.zeros(len(values), dtype=np.int64)),
            last.cast(pl.Int64).alias("last"),
        ]
    )


def _by_type(parts: Iterable[pl.DataFrame]) -> list[pl.DataFrame]:
    by_type: dict[pl.DataType, list[pl.DataFrame]] = {}
    for part in parts:
        by_type.setdefault(part["value"].dtype, []).append(part)
    return [pl.concat(group, rechunk=True) for group in by_type.values()]


class CountSum:
    """Sums of counts. Added rows wait until there are more of them than sums, so memory is at most
    twice the sums.
    """

    def __init__(self) -> None:
        self._sums: dict[pl.DataType, pl.DataFrame] = {}
        self._pending: dict[pl.DataType, list[pl.DataFrame]] = {}

    def add(self, counts: pl.DataFrame) -> None:
        """Add a frame that `count_values` returned."""
        kind = counts["value"].dtype
        pending = self._pending.setdefault(kind, [])
        pending.append(counts)
        sums = self._sums.get(kind)
        if sum(map(len, pending)) > max(_FEW_ROWS, 0 if sums is None else len(sums)):
            self._add_up(kind)

    def _add_up(self, kind: pl.DataType) -> None:
        parts = [*([self._sums[kind]] if kind in self._sums else []), *self._pending.pop(kind, [])]
        grouped = pl.concat(parts).lazy().group_by("vocabulary", "value")
        sums = grouped.agg(pl.col("count").sum(), pl.col("held_out").sum(), pl.col("last").max())
        self._sums[kind] = sums.collect()

    def by_vocabulary(self) -> dict[int, pl.DataFrame]:
        """Return vocabulary number -> `value`, `count`, `held_out` and `last` of its values, if it
        has values.
        """
        counts: dict[int, pl.DataFrame] = {}
        for kind in list(self._pending):
            self._add_up(kind)
        for sums in self._sums.values():
            for (number,), part in sums.partition_by("vocabulary", as_dict=True, include_key=False).items():
                counts[int(number)] = part
        return counts
