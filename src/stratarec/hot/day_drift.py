"""How much changes from one day of a log to the next: values that the day before had not, and moments of numbers.

One pass over a split as it is stored. Uses are counted by row and day; of large tables some rows stand for others, as
in `kernels/reuse`. Histories are left out: they have what their users clicked before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stratarec.data.column_names import TIME
from stratarec.data.dataset.dataset import Dataset
from stratarec.kernels.reuse import DayTrace

Floats = NDArray[np.float64]
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY = 86_400
# Days that are told apart: longer logs are cut into as many periods of several days.
_MOST_DAYS = 32
# Rows that are followed, of one table and of all together: 128 bytes each.
_FOLLOWED, _FOLLOWED_IN_ALL, _LEAST_FOLLOWED = 1 << 15, 1 << 20, 1 << 8


@dataclass(frozen=True, kw_only=True, eq=False)
class DayDrift:
    """Changes from period to period."""

    days: int
    """Of a period."""
    starts: NDArray[np.int64]
    """``[P]`` days since 1970 on which periods begin, ascending; those without a sample are left out."""
    unseen: dict[str, Floats]
    """Vocabulary -> ``[P]`` share of lookups whose row the period before did not use; NaN of the first."""
    shift: dict[str, Floats]
    """Dense feature -> ``[P]`` by how many deviations, of all samples, its mean moved since the period before."""


def measure_drift(dataset: Dataset, split: str = "train") -> DayDrift | None:
    """Changes of a split from day to day; None where the data have no times, or all of one day."""
    bounds, unit = dataset.manifest.carried.times, _PER_SECOND[dataset.schema.time_unit] * _DAY
    if not dataset.schema.time or bounds is None or bounds[0] // unit == bounds[1] // unit:
        return None
    first, last = (each // unit for each in bounds)
    days = -(-(last - first + 1) // _MOST_DAYS)
    count = (last - first) // days + 1
    rows = dataset.table_rows()
    followed = max(min(_FOLLOWED, _FOLLOWED_IN_ALL // max(len(rows), 1)), _LEAST_FOLLOWED)
    tables = {
        name: [feature.name for feature in features if not feature.traits.derived]
        for name, features in dataset.schema.vocabularies().items()
    }
    traces = {name: DayTrace(rows[name], followed, count) for name, features in tables.items() if features}
    # Samples, sums and squares of each number.
    moments = {feature.name: np.zeros((3, count)) for feature in dataset.schema.dense}
    samples = np.zeros(count, np.int64)
    with dataset.reader(split) as reader:
        for shard, stored in enumerate(dataset.shards(split)):
            for group in range(len(stored.row_groups)):
                columns = reader.read(shard, group).expand(dataset.groups, ())
                # A data set that goes on from another one has no day before its own first.
                day = np.clip((columns[TIME].to_numpy() // unit - first) // days, 0, count - 1).astype(np.int32)
                samples += np.bincount(day, minlength=count)
                for name, trace in traces.items():
                    for feature in tables[name]:
                        trace.add(*_lookups(columns[feature], day))
                for name, found in moments.items():
                    _add_moments(found, columns[name].to_numpy().astype(np.float64), day)
    kept = np.flatnonzero(samples)
    if len(kept) < 2:
        return None
    return DayDrift(
        days=days,
        starts=first + kept * days,
        unseen={name: trace.unseen(kept) for name, trace in traces.items()},
        shift={name: _shift(found[:, kept]) for name, found in moments.items()},
    )


def _lookups(column: pa.Array, day: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Ids, and the day of each."""
    if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type):
        return column.to_numpy(), day
    return column.flatten().to_numpy(), np.repeat(day, column.value_lengths().to_numpy())


def _add_moments(found: Floats, values: Floats, day: NDArray[np.int32]) -> None:
    known = np.isfinite(values)
    for place, power in enumerate((None, values[known], values[known] ** 2)):
        found[place] += np.bincount(day[known], power, minlength=found.shape[1])


def _shift(moments: Floats) -> Floats:
    count, total, squares = moments
    mean = total.sum() / max(count.sum(), 1)
    deviation = np.sqrt(max(squares.sum() / max(count.sum(), 1) - mean**2, 0.0))
    each = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
    return np.diff(each, prepend=np.nan) / deviation if deviation > 0 else np.zeros(len(count))
