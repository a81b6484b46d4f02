"""The ways in which a table can be placed, with the bytes and seconds of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.schema import SparseFeature
from stratarec.embedding.codecs import CodecConfig
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.tiers import slots_for_batch
from stratarec.kernels.codec.kinds import KINDS
from stratarec.planning.bytes import MEMORIES, BatchDemand, Home, RowShape, SlotSplit, cached_bytes, in_memory
from stratarec.planning.bytes import level0_bytes as whole_bytes
from stratarec.planning.config import MemoryConfig
from stratarec.planning.machine import Tiers
from stratarec.planning.plan import Log, TablePlacement
from stratarec.planning.popularity import CacheDemand, Popularity, expected_misses
from stratarec.planning.step_model import PENALTY, TableWork, table_seconds

PIN_MARGIN = 1.25
"""Slots over the rows that the batches in flight are expected to pin.

At a load of 1 / 1.25 a set of 32 ways gets 25.6 pinned rows on average, and 1.5 % of the rows find their set full: the
overflow of 1/16 holds four times that."""

_DEVIATIONS = 6

AUTO_KINDS = tuple(name for name, kind in KINDS.items() if kind.automatic)
"""What ``precision: auto`` chooses from."""

DEFAULT_FRACTION = 0.05
"""Of a cache for which there is neither a budget nor a fraction; as in arXiv 2010.11305."""

_GRID = 24
_LARGEST_FRACTION = 0.75


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """A table to place."""

    name: str
    rows: int
    shape: RowShape
    lookups: float
    """Ids of a batch, all features of the table together."""
    popularity: Popularity
    """Of its rows."""
    outputs: float = 0.0
    """float32 values that a batch's look-up gives: pooled ones and those of histories."""

    @property
    def distinct(self) -> float:
        """Expected distinct rows of a batch."""
        return self.popularity.distinct(self.lookups)

    @property
    def work(self) -> TableWork:
        """Work of a batch on the table where all of it is in level 0."""
        return TableWork(shape=self.shape, lookups=self.lookups, distinct=self.distinct)

    @property
    def largest_batch(self) -> int:
        """Distinct rows that hardly any batch exceeds: their variance is at most their mean."""
        mean = self.distinct
        return min(self.rows, math.ceil(mean + _DEVIATIONS * math.sqrt(mean)))

    def pinned(self, lookahead: int) -> int:
        """Rows that the batches in flight may pin at once, with `PIN_MARGIN`; no more than the table has.

        lookahead + 1 batches pin their distinct rows together, which popular rows make fewer than that many times the
        distinct rows of one.
        """
        expected = self.popularity.distinct(self.lookups * (lookahead + 1))
        return min(self.rows, math.ceil(PIN_MARGIN * expected))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to place a table."""

    placement: TablePlacement
    cost: float
    """Seconds of a step, with the penalty of a lower precision."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes in each of `MEMORIES`."""
        return tuple(in_memory(self.placement.bytes, memory) for memory in MEMORIES)


def candidates(table: TableSpec, memory: MemoryConfig, tiers: Tiers) -> list[Candidate]:
    """All ways to place `table` that `memory` allows, best first among equals; never empty.

    A cache holds at least the pinned rows, whatever `memory.cache.fraction` says; a table for which that saves no DRAM
    is whole in level 0.
    """
    precision = memory.table_precision(table.name)
    kinds = AUTO_KINDS if precision == "auto" else (precision,)
    sizes = cache_sizes(table, memory)
    whole, found = _whole(table, memory, tiers), []
    for slots in sizes:
        misses = _misses(table, memory, slots)
        for home in _homes(memory):
            found += [_cached(table, memory, tiers, home, memory.codec(kind), slots, misses) for kind in kinds]
    smaller = [each for each in found if each.sizes[0] < whole.sizes[0]]
    return _undominated([whole, *smaller] if "fp32" in kinds or not smaller else smaller)


def cache_sizes(table: TableSpec, memory: MemoryConfig) -> list[SlotSplit]:
    """Cache sizes to try, ascending: from the least that works to three quarters of the table, in equal ratios.

    The least cache holds the pinned rows, and a batch wherever its rows fall. Empty where that is no smaller than the
    table.
    """
    ways = memory.cache.ways
    # Few ways fill unevenly: what holds the pinned rows on average may not hold a batch.
    one_batch = SlotSplit.within(slots_for_batch(table.largest_batch, ways), ways)
    least = max(SlotSplit.holding(table.pinned(memory.lookahead), ways), one_batch, key=lambda slots: slots.total)
    fraction = memory.cache.fraction
    if fraction is None and memory.dram is None:
        fraction = DEFAULT_FRACTION
    if least.total >= table.rows:
        return []
    if fraction is not None:
        asked = SlotSplit.within(max(least.total, round(fraction * table.rows)), ways)
        return [asked] if asked.total < table.rows else []
    largest = max(least.total, _LARGEST_FRACTION * table.rows)
    grid = {SlotSplit.within(round(total), ways) for total in np.geomspace(least.total, largest, _GRID)}
    return sorted({least, *grid}, key=lambda slots: slots.total)


def _homes(memory: MemoryConfig) -> Iterator[Home]:
    yield "dram"
    if memory.mapped is not None:
        yield "mapped"
    if memory.block is not None:
        yield "log"


def _misses(table: TableSpec, memory: MemoryConfig, slots: SlotSplit) -> float:
    """Return the distinct rows of a batch that a cache lacks."""
    demand = CacheDemand(
        lookups=table.lookups, slots=slots.in_sets, policy=memory.cache.policy, lookahead=memory.lookahead
    )
    return expected_misses(table.popularity, demand)


def _whole(table: TableSpec, memory: MemoryConfig, tiers: Tiers) -> Candidate:
    seconds = table_seconds(table.work, tiers)
    placement = TablePlacement(
        table=table.name, rows=table.rows, width=table.shape.width, tier="level0", codec=CodecConfig(),
        cache_rows=table.rows, ways=0, bytes=whole_bytes(table.shape, table.rows),
        lookups=table.lookups, distinct=table.distinct, pinned=table.pinned(memory.lookahead), misses=0.0,
        seconds=seconds,
    )  # fmt: skip
    return Candidate(placement=placement, cost=seconds.total)


def _cached(
    table: TableSpec,
    memory: MemoryConfig,
    tiers: Tiers,
    home: Home,
    codec: CodecConfig,
    slots: SlotSplit,
    misses: float,
) -> Candidate:
    work = replace(table.work, home=home, codec=codec, ways=slots.ways, misses=misses)
    seconds = table_seconds(work, tiers)
    traffic = BatchDemand(
        lookups=table.lookups,
        distinct=min(table.rows, PIN_MARGIN * table.distinct),
        batches=memory.lookahead + 1,
    )
    parts = cached_bytes(
        table.shape, table.rows, home=home, codec=codec, slots=slots.total,
        counters=memory.cache.policy == "lfu", traffic=traffic,
    )  # fmt: skip
    placement = TablePlacement(
        table=table.name, rows=table.rows, width=table.shape.width, tier=home, codec=codec,
        cache_rows=slots.total, ways=slots.ways, bytes=parts,
        lookups=table.lookups, distinct=table.distinct, pinned=table.pinned(memory.lookahead),
        misses=misses, seconds=seconds,
    )  # fmt: skip
    return Candidate(placement=placement, cost=seconds.total + PENALTY[codec.kind] * seconds.compute)


def _undominated(found: list[Candidate]) -> list[Candidate]:
    """Without those that another one beats or equals in cost and in every memory; no optimum is lost.

    Only a candidate in a log that is there already, or in none, beats another: a log has bytes of its own.
    """
    points = np.array([(each.cost, *each.sizes) for each in found])
    order = np.lexsort(points.T[::-1])
    kept: dict[Log | None, list[int]] = {None: []}
    for index in order:
        log = found[index].placement.log
        rivals = kept[None] + (kept.setdefault(log, []) if log else [])
        if not rivals or not (points[rivals] <= points[index]).all(axis=1).any():
            kept[log].append(int(index))
    return sorted((found[index] for each in kept.values() for index in each), key=lambda each: each.cost)


def describe_tables(
    tables: Sequence[EmbeddingBagConfig],
    dataset: Dataset,
    optimizer: RowOptimizerConfig,
    *,
    batch_size: int,
    hot: Mapping[str, int] | None = None,
) -> list[TableSpec]:
    """The tables of a model on `dataset`, with the counts of its training split, and of those that it goes on from.

    `hot` are tables whose so many first rows no cache is asked for.

    A table's name is its vocabulary's. Where a vocabulary has no counts (ids that came from outside), every row is
    taken to be as popular as the next, and a bag to be as long as it may be.
    """
    samples = dataset.manifest.carried.samples
    features = dataset.schema.vocabularies()
    found = []
    for table in tables:
        counts = dataset.access_counts(table.name)
        total = int(counts.sum())
        each = total / samples if total else float(sum(_longest(feature) for feature in features[table.name]))
        # Counts do not tell histories from the other features of their vocabulary: at most, all are of histories.
        unpooled = batch_size * each if table.sequence_features else 0.0
        found.append(
            TableSpec(
                name=table.name,
                rows=table.num_embeddings,
                shape=RowShape.of(table.embedding_dim, optimizer),
                lookups=batch_size * each,
                popularity=cold_popularity(counts, (hot or {}).get(table.name, 0)),
                outputs=table.embedding_dim * (batch_size * len(table.feature_names) + unpooled),
            )
        )
    return found


def cold_popularity(counts: NDArray[np.int64], hot: int) -> Popularity:
    """Of the rows behind the first, as shares of all lookups."""
    if not hot:
        return Popularity.from_counts(counts)
    cold = counts.copy()
    cold[:hot] = 0
    return Popularity.from_counts(cold).times(float(cold.sum() / max(counts.sum(), 1)))


def _longest(feature: SparseFeature) -> int:
    return 1 if feature.kind == "single" else feature.max_length
