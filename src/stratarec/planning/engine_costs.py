"""What the engine takes beside the bytes that it moves: for a step, a table, an id, a row.

Tables of a few shapes are trained for some steps, whole in level 0 and under a cache, and what is left of their seconds
when bytes over the bandwidth of memory are taken away is divided among counts by least squares of relative errors, no
cost below nothing. With batches of a few hundred samples these are most of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stratarec.planning.bytes import STAMP_BYTES, TAG_BYTES, RowShape

if TYPE_CHECKING:
    from stratarec.batch.jagged import KeyedJagged
    from stratarec.planning.memories import DramTier

SHAPES = (
    (3, 12, 320, 4), (3, 12, 3000, 12), (3, 48, 320, 12), (3, 48, 3000, 4), (30, 12, 320, 12), (30, 12, 3000, 4),
    (30, 48, 320, 4), (30, 48, 3000, 12), (12, 24, 1200, 2), (12, 24, 1200, 12), (30, 12, 3000, 12),
)  # fmt: skip
"""Tables, floats of a row, samples of a batch, and skew: the row of table size R is ``R * u ** skew``, u uniform."""
_TABLE_BYTES, _CACHE_SHARE, _WAYS = 96 << 20, 0.2, 32
_WARM_SAMPLES, _STEPS, _BATCHES = 40_000, 6, 6
_SWEPT_BYTES = 24 << 20


@dataclass(frozen=True, kw_only=True)
class WorkCosts:
    """Seconds of a kind of work: so many bytes moved, and so many of each thing."""

    bytes_factor: float = 1.0
    """Of bytes over the bandwidth of memory by rows."""
    step: float = 0.0
    """Of a step, for each group of tables that are alike."""
    table: float = 0.0
    lookup: float = 0.0
    row: float = 0.0
    """Of a distinct row, or of one that comes in."""

    def seconds(self, moved: float, lookups: float, rows: float) -> float:
        """Of one table, where its bytes take `moved` seconds; `step` is left out."""
        return self.bytes_factor * moved + self.table + self.lookup * lookups + self.row * rows


@dataclass(frozen=True, kw_only=True)
class EngineCosts:
    """Of both kinds of work on tables. By default bytes alone count."""

    compute: WorkCosts = field(default_factory=WorkCosts)
    """Looking up and updating rows of level 0."""
    staging: WorkCosts = field(default_factory=WorkCosts)
    """Bringing rows into level 0."""


def moved_in_level0(shape: RowShape, lookups: float, distinct: float, dram: DramTier) -> float:
    """Seconds of bytes: pooled vectors and their gradients pass by; of each distinct row the weights are read, and its
    slot is read and written."""
    passing = 2 * lookups * 4 * shape.width / dram.sequential_bytes_per_second
    return passing + distinct * (4 * shape.width + 2 * shape.slot_bytes) / dram.row_bytes_per_second


def moved_by_staging(
    shape: RowShape, record: int, ways: int, distinct: float, misses: float, dram: DramTier
) -> float:  # fmt: skip
    """Seconds of bytes: tags of a set for each distinct row; of a missing row and of its victim, slot and record."""
    moved = distinct * ways * (TAG_BYTES + STAMP_BYTES) + 2 * misses * (shape.slot_bytes + record)
    return moved / dram.row_bytes_per_second


def measure_engine(dram: DramTier) -> dict[str, Any]:
    """The fields of `EngineCosts`, measured in a few seconds on tables of 96 MiB."""
    found: dict[str, list[tuple[float, ...]]] = {"compute": [], "staging": []}
    for tables, width, batch, skew in SHAPES:
        for name, line in _lines(tables, width, batch, skew, dram):
            found[name].append(line)
    return {name: _fitted(np.array(lines)) for name, lines in found.items()}


def _lines(
    tables: int, width: int, batch: int, skew: float, dram: DramTier
) -> Iterator[tuple[str, tuple[float, ...]]]:  # fmt: skip
    """Of both kinds of work: seconds of bytes, groups, tables, lookups, rows; and seconds of a step."""
    # What plans without measuring does not wait for the engine.
    import torch

    from stratarec.batch.jagged import KeyedJagged
    from stratarec.embedding.config import EmbeddingBagConfig
    from stratarec.embedding.engine import Engine
    from stratarec.embedding.optimizers import RowOptimizerConfig
    from stratarec.embedding.tiers import TableTier, TierConfig

    optimizer = RowOptimizerConfig()
    shape, names = RowShape.of(width, optimizer), tuple(f"t{number}" for number in range(tables))
    rows = max(_TABLE_BYTES // (tables * shape.slot_bytes), 1)
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=width, feature_names=(name,)) for name in names
    ]
    slots = max(int(_CACHE_SHARE * rows), 2 * _WAYS)
    draws, lookups = np.random.default_rng(0), tables * batch

    def draw(count: int) -> NDArray[np.int64]:
        """Ids of so many batches, a row each."""
        ids: NDArray[np.int64] = (rows * draws.random((count, lookups)) ** skew).astype(np.int64)
        return ids

    def batches(ids: NDArray[np.int64]) -> list[KeyedJagged]:
        values = map(torch.from_numpy, ids)
        return [KeyedJagged(keys=names, values=each, offsets=None, batch_size=batch) for each in values]

    trained = draw(_BATCHES)
    distinct = sum(len(np.unique(ids)) for ids in trained.reshape(-1, batch)) / _BATCHES
    gradient = torch.full((batch, tables * width), 1e-3)
    with torch.no_grad():
        engine = Engine(configs, optimizer, 0, TierConfig())

        def train(features: KeyedJagged) -> None:
            prepared = engine.prepare(features)
            engine.look_up(prepared)
            engine.update(prepared, gradient, (), None)

        def seconds(work: Callable[[KeyedJagged], None], batches: Sequence[KeyedJagged]) -> float:
            left = cycle(batches)
            return cold_seconds(lambda: work(next(left)), _STEPS)

        moved = moved_in_level0(shape, lookups, distinct, dram)
        yield "compute", (moved, 1, tables, lookups, distinct, seconds(train, batches(trained)))
        engine.close()
        cached = {name: TableTier(cache_rows=slots) for name in names}
        engine = Engine(configs, optimizer, 0, TierConfig(tables=cached, ways=_WAYS))
        for features in batches(draw(max(_WARM_SAMPLES // batch, 2))):
            engine.prepare(features).release()
        (group,), fresh = engine.tables, batches(draw(_STEPS + 1))
        before = group.traffic.rows_in
        took = seconds(lambda features: engine.prepare(features).release(), fresh)
        misses = (group.traffic.rows_in - before) / len(fresh)
        moved = moved_by_staging(shape, shape.slot_bytes, _WAYS, distinct, misses, dram)
        yield "staging", (moved, 1, tables, lookups, misses, took)
        engine.close()


def cold_seconds(work: Callable[[], object], rounds: int, seconds: float = 0.0) -> float:
    """The median of so many times, and of more until `seconds` have passed, after a first one.

    Other memory is walked through in between: where a network trains between two look-ups, or tables between two passes
    of a network, neither finds its rows and code in the caches.
    """
    between = np.zeros(_SWEPT_BYTES, np.uint8)
    work()
    found, first = list[float](), time.perf_counter()
    while len(found) < rounds or time.perf_counter() - first < seconds:
        between += 1
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return median(found)


def _fitted(lines: NDArray[np.float64]) -> dict[str, float]:
    """Costs of at least nothing whose seconds are nearest to those of `lines`, by relative error.

    Noise must not decide that bytes cost nothing: that they take what the bandwidth says counts as a line, too.
    """
    from scipy.optimize import nnls  # loaded here: what measures nothing would wait for it

    counts, seconds = lines[:, :-1] / lines[:, -1:], np.ones(len(lines))
    counts = np.vstack([counts, np.eye(1, counts.shape[1])])
    scale = counts.max(axis=0)
    costs, _ = nnls(counts / scale, np.append(seconds, 1.0))
    names = ("bytes_factor", "step", "table", "lookup", "row")
    return dict(zip(names, (costs / scale).tolist(), strict=True))
