"""Reuse of the rows of a split, which shows what caches can achieve.

`measure_reuse` gives the hit rate of caches of every size in one pass over a split, in the order of training. A cache
works on batches: the hit rate is the share of a batch's distinct rows that are in the cache when the batch is staged.
The first use of a row is always a miss. LRU hits follow from reuse distances (`kernels/reuse`). A cache with policy
``rank`` keeps the smallest ids; the other rows of the batches in flight take the rest of its slots. Policy ``lfu``,
which counts uses, is not modelled: its measured hit rate was between the rates of ``lru`` and ``rank``.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from stratarec.batch.jagged import KeyedJagged
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.errors import ConfigError
from stratarec.kernels.reuse import ReuseTrace
from stratarec.kernels.runtime.cores import cores
from stratarec.progress import Progress, SilentProgress

Floats = NDArray[np.float64]
# Largest number of rows that are tracked, of one table and of all tables together; a row takes about 60 bytes.
_FOLLOWED, _FOLLOWED_IN_ALL = 1 << 16, 1 << 22
_LEAST_FOLLOWED = 1 << 10
_SIZES = 40
# Number of batches in flight: the batch that trains, and by default one batch that is prepared ahead.
_IN_FLIGHT = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class TableReuse:
    """How the rows of a table are reused."""

    table: str
    features: tuple[str, ...]
    """Features that use the table."""
    rows: int
    used: float
    """Number of rows that are used at least once."""
    lookups: float
    uses: float
    """Number of uses: a batch uses each of its distinct rows once."""
    again: float
    """Share of uses that are not the first use of their row."""
    distance: float
    """Median number of other rows used between two uses of a row; NaN if no row is used twice."""
    top: Mapping[float, float]
    """Share of the used rows, starting with the most frequent -> share of the lookups that use these rows."""
    sizes: NDArray[np.int64]
    """``[M]`` cache sizes in rows, ascending up to the number of rows of the table."""
    hits: Mapping[str, Floats]
    """Policy -> ``[M]`` share of uses whose row is in a cache of each size."""
    exact: bool
    """Whether all rows were tracked."""

    def rate(self, policy: str, share: float) -> float:
        """Return the hit rate of a cache that holds the given share of all rows."""
        return float(np.interp(share * self.rows, self.sizes, self.hits[policy]))


def measure_reuse(
    dataset: Dataset, split: str = "train", *, batch_size: int = 4096, progress: Progress | None = None
) -> list[TableReuse]:
    """Measure the reuse of rows in an epoch; return one result per table, the largest table first.

    Raises
    ------
    ConfigError
        For a batch size below 1.

    Notes
    -----
    At most `_FOLLOWED_IN_ALL` rows are tracked, which bounds the memory.
    """
    if batch_size < 1:
        raise ConfigError(f"batch size is {batch_size}, expected at least 1")
    rows, features = dataset.table_rows(), dataset.schema.vocabularies()
    followed = max(min(_FOLLOWED, _FOLLOWED_IN_ALL // max(len(features), 1)), _LEAST_FOLLOWED)
    traces = {name: _trace(rows[name], followed) for name in features}
    loader = Loader(dataset, split, LoaderConfig(batch_size=batch_size, expand=True))
    progress = progress or SilentProgress()
    progress.start("reuse", len(loader), "batches")

    def add(name: str, bags: KeyedJagged) -> None:
        traces[name].add(np.concatenate([bags[column.name].values.numpy() for column in features[name]]))

    with ThreadPoolExecutor(cores(), thread_name_prefix="stratarec-reuse") as threads:
        for batch in loader.epoch(0):
            for _ in threads.map(partial(add, bags=batch.sparse), features):
                pass
            progress.advance(1)
    progress.finish()
    tables = [
        _reuse_of(name, tuple(column.name for column in features[name]), rows[name], trace)
        for name, trace in traces.items()
    ]
    return sorted((table for table in tables if table.uses), key=lambda table: -table.rows)


def _trace(rows: int, followed: int) -> ReuseTrace:
    return ReuseTrace(rows, followed, _sizes(rows), _IN_FLIGHT)


def _sizes(rows: int) -> NDArray[np.int64]:
    return np.unique(np.geomspace(1, rows, _SIZES).astype(np.int64)) if rows > _SIZES else np.arange(1, rows + 1)


def _reuse_of(name: str, features: tuple[str, ...], rows: int, trace: ReuseTrace) -> TableReuse:
    weights = trace.weights
    used, uses = float(weights @ (trace.uses > 0)), float(weights @ trace.uses)
    hits = {name: counts / max(uses, 1) for name, counts in (("lru", trace.lru_hits), ("rank", _ranked(trace)))}
    by_lookups = np.argsort(-trace.lookups, kind="stable")
    below, lookups = np.cumsum(weights[by_lookups]), np.cumsum((weights * trace.lookups)[by_lookups])
    return TableReuse(
        table=name,
        features=features,
        rows=rows,
        used=used,
        lookups=float(lookups[-1]),
        uses=uses,
        again=1 - used / uses if uses else 0.0,
        distance=float(np.interp((uses - used) / 2, trace.near, trace.sizes)) if uses > used else float("nan"),
        top={share: float(np.interp(share * used, below, lookups)) / max(lookups[-1], 1) for share in (0.01, 0.1)},
        sizes=trace.sizes,
        hits=hits,
        exact=trace.exact,
    )


def _ranked(trace: ReuseTrace) -> Floats:
    """Return the hits of caches that keep the first rows in addition to the rows of batches in flight, ``[M]``."""
    weights = trace.weights
    again = np.where(trace.uses > 0, trace.uses - 1, 0)
    resident, passing = (np.concatenate([[0], np.cumsum(weights * counts)]) for counts in (again, trace.soon))
    occupied = np.concatenate([[0.0], np.cumsum(weights * trace.residency)])
    # If the first k rows are permanent, the cache needs k slots, plus the slots that other rows occupy temporarily.
    slots = np.concatenate([[0], np.cumsum(weights)]) + occupied[-1] - occupied
    hits: Floats = np.interp(trace.sizes, slots, resident + passing[-1] - passing)
    return hits
