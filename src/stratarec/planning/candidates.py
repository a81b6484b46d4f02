"""Tables to place, and the candidate placements of each with their bytes and seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stratarec.data.dataset.dataset import Dataset
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.tiers import slots_for_batch
from stratarec.errors import ConfigError
from stratarec.kernels.codec.kinds import KINDS
from stratarec.planning.bytes import (
    MEMORIES,
    BatchDemand,
    Home,
    RowShape,
    SlotSplit,
    cached_bytes,
    in_memory,
    level0_bytes,
)
from stratarec.planning.config import MemoryConfig
from stratarec.planning.machine import Tiers
from stratarec.planning.plan import SsdStore, TablePlacement
from stratarec.planning.popularity import CacheDemand, Popularity, expected_misses
from stratarec.planning.step_model import TableWork, table_seconds

PIN_MARGIN = 1.25
"""Slots of a cache, per row that the batches in flight are expected to pin.

With this ratio a set of 32 ways has 25.6 pinned rows on average, and for 1.5 % of the rows the set
is full. The overflow, 1/16 of the slots, has room for four times as many rows."""

_DEVIATIONS = 6

DEFAULT_FRACTION = 0.05
"""Cache rows as a share of table rows if neither a budget nor a fraction is configured; as in arXiv
2010.11305.
"""

_GRID = 24
_LARGEST_FRACTION = 0.75
_DRAM_SHARES = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of a table's rows, the most frequent ones, whose records may be in DRAM although its home
is an SSD store.
"""


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """A table that the planner places: its size and the lookups of a batch."""

    name: str
    rows: int
    shape: RowShape
    lookups: float
    """Ids per batch, of all features of the table together."""
    popularity: Popularity
    is_ranked: bool = False
    """Whether ids are in descending order of frequency, apart from a few first rows that rare
    values share.
    """
    outputs: float = 0.0
    """Number of float32 activations per batch: pooled vectors, and the unpooled vectors of
    histories.
    """

    @property
    def distinct(self) -> float:
        """Expected number of distinct rows per batch."""
        return self.popularity.distinct(self.lookups)

    @property
    def work(self) -> TableWork:
        """Work of one batch on the table, if the table is entirely in level 0."""
        return TableWork(shape=self.shape, lookups=self.lookups, distinct=self.distinct)

    @property
    def largest_batch(self) -> int:
        """Number of distinct rows that hardly any batch exceeds: 6 standard deviations above the
        mean.

        The variance of that number is at most its mean.
        """
        mean = self.distinct
        return min(self.rows, math.ceil(mean + _DEVIATIONS * math.sqrt(mean)))

    def pinned(self, lookahead: int) -> int:
        """Return the number of slots to provide for rows that the batches in flight pin at once,
        with `PIN_MARGIN`.

        lookahead + 1 batches are in flight. They share popular rows, so they pin fewer than
        lookahead + 1 times the distinct rows of one batch. The result is at most the number of rows
        in the table.
        """
        expected = self.popularity.distinct(self.lookups * (lookahead + 1))
        return min(self.rows, math.ceil(PIN_MARGIN * expected))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One placement of a table, and its cost."""

    placement: TablePlacement
    cost: float
    """Seconds of table work per step, plus a penalty for a lower precision."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of bytes in each of `MEMORIES`."""
        return tuple(in_memory(self.placement.bytes, memory) for memory in MEMORIES)


def resolve_policy(memory: MemoryConfig, tables: Sequence[TableSpec]) -> MemoryConfig:
    """Return `memory` with the eviction policy for `tables` in place of ``auto``."""
    if memory.cache.policy != "auto":
        return memory
    policy = "rank" if all(table.is_ranked for table in tables) else "lru"
    return replace(memory, cache=replace(memory.cache, policy=policy))


def candidates(table: TableSpec, memory: MemoryConfig, tiers: Tiers) -> list[Candidate]:
    """Return the placements of `table` that `memory` allows on a machine with `tiers`, cheapest
    first; never empty.

    `memory` has an eviction policy (`resolve_policy`).

    A placement is left out if another one needs no more time and no more bytes in any memory. A
    cache holds at least the pinned rows, whatever `memory.cache.fraction` says. If no cache saves
    bytes of level 0, the only placement is entirely in level 0.
    """
    precision = memory.table_precision(table.name)
    kinds = [name for name, kind in KINDS.items() if kind.automatic] if precision == "auto" else [precision]
    kinds = [kind for kind in kinds if memory.level0 != "hbm" or KINDS[kind].on_gpu]
    if not kinds:
        raise ConfigError(
            f"memory.precision of table {table.name!r} is {precision}, which GPUs cannot encode: set "
            "memory.hbm to 0, or another precision"
        )
    sizes = cache_sizes(table, memory)
    level0 = _candidate(table, memory, tiers, table.work, None)
    cached = []
    for slots in sizes:
        demand = CacheDemand(
            lookups=table.lookups,
            slots=slots.in_sets,
            policy=memory.cache.policy,
            lookahead=memory.lookahead,
        )
        by_bin = expected_misses(table.popularity, demand)
        misses = float(by_bin.sum())
        work = replace(table.work, ways=slots.ways, misses=misses)
        for home in _homes(memory, chosen=precision != "auto"):
            shares = _DRAM_SHARES if home == "log" and misses and table.popularity.by_id else (0.0,)
            for dram_rows in [int(share * table.rows) for share in shares]:
                on_device = (
                    float(by_bin @ table.popularity.from_row(dram_rows)) / misses if dram_rows else 1.0
                )
                for kind in kinds:
                    placed = replace(work, home=home, codec=memory.codec(kind), dram_share=1 - on_device)
                    cached.append(_candidate(table, memory, tiers, placed, slots, dram_rows))
    place = MEMORIES.index(memory.level0)
    smaller = [option for option in cached if option.sizes[place] < level0.sizes[place]]
    return _undominated([level0, *smaller] if "fp32" in kinds or not smaller else smaller)


def cache_sizes(table: TableSpec, memory: MemoryConfig) -> list[SlotSplit]:
    """Return the cache sizes to try, in ascending order.

    The smallest cache holds the pinned rows, and the rows of any one batch. The largest has three
    quarters of the table's rows, and the sizes between have equal ratios. With a configured or
    default fraction, there is only one size. The list is empty if even the smallest cache is no
    smaller than the table.
    """
    ways = memory.cache.ways
    # With few ways, sets fill unevenly: a cache that holds the pinned rows on average may not hold
    # every batch.
    one_batch = SlotSplit.within(slots_for_batch(table.largest_batch, ways), ways)
    least = max(
        SlotSplit.holding(table.pinned(memory.lookahead), ways), one_batch, key=lambda slots: slots.total
    )
    fraction = memory.cache.fraction
    if fraction is None and memory.level0_budget is None:
        fraction = DEFAULT_FRACTION
    if least.total >= table.rows:
        return []
    if fraction is not None:
        asked = SlotSplit.within(max(least.total, round(fraction * table.rows)), ways)
        return [asked] if asked.total < table.rows else []
    largest = max(least.total, _LARGEST_FRACTION * table.rows)
    grid = {SlotSplit.within(round(total), ways) for total in np.geomspace(least.total, largest, _GRID)}
    return sorted({least, *grid}, key=lambda slots: slots.total)


def _homes(memory: MemoryConfig, *, chosen: bool) -> tuple[Home, ...]:
    """Return the homes that `memory` allows.

    Encoded rows are in GPU memory only if their precision was `chosen`: ``auto`` lowers it to save
    memory, not time.
    """
    paths: dict[Home, object] = {"mapped": memory.mapped, "log": memory.block}
    on_gpu: tuple[Home, ...] = ("hbm",) if memory.level0 == "hbm" and chosen else ()
    return (*on_gpu, "dram", *(home for home, config in paths.items() if config is not None))


def _candidate(
    table: TableSpec,
    memory: MemoryConfig,
    tiers: Tiers,
    work: TableWork,
    slots: SlotSplit | None,
    dram_rows: int = 0,
) -> Candidate:
    """Return the placement of `table` under a cache of `slots`, or entirely in level 0 if `slots`
    is None.
    """
    if slots is None:
        parts = level0_bytes(table.shape, table.rows, memory.level0)
    else:
        traffic = BatchDemand(
            lookups=work.lookups,
            distinct=min(table.rows, PIN_MARGIN * work.distinct),
            batches=memory.lookahead + 1,
        )
        parts = cached_bytes(
            table.shape,
            table.rows,
            home=work.home,
            codec=work.codec,
            slots=slots.total,
            traffic=traffic,
            level0=memory.level0,
            dram_rows=dram_rows,
        )
    seconds = table_seconds(work, tiers)
    placement = TablePlacement(
        table=table.name,
        rows=table.rows,
        width=table.shape.width,
        tier=work.home,
        codec=work.codec,
        cache_rows=slots.total if slots else table.rows,
        ways=work.ways,
        bytes=parts,
        lookups=work.lookups,
        distinct=work.distinct,
        pinned=table.pinned(memory.lookahead),
        misses=work.misses,
        seconds=seconds,
        dram_rows=dram_rows,
    )
    # The penalty is a share of the time in DRAM. On a GPU this time is so short that the cost of
    # the bus alone would outweigh the penalty and lower the precision.
    penalty = (
        KINDS[work.codec.kind].penalty * table_seconds(table.work, replace(tiers, hbm=None)).compute
        if slots
        else 0.0
    )
    return Candidate(placement=placement, cost=seconds.total + penalty)


def _undominated(options: list[Candidate]) -> list[Candidate]:
    """Return the candidates by rising cost, without superfluous ones.

    A candidate is superfluous if another one needs no more time and no more bytes in any memory; an
    optimum always remains. A candidate in an SSD store is compared only with candidates in the same
    store, because each further store needs additional bytes.
    """
    points = np.array([(option.cost, *option.sizes) for option in options])
    order = np.lexsort(points.T[::-1])
    indices: dict[SsdStore | None, list[int]] = {None: []}
    for index in order:
        store = options[index].placement.ssd
        rivals = indices[None] + (indices.setdefault(store, []) if store else [])
        if not rivals or not (points[rivals] <= points[index]).all(axis=1).any():
            indices[store].append(int(index))
    return sorted(
        (options[index] for some in indices.values() for index in some), key=lambda option: option.cost
    )


def describe_tables(
    tables: Sequence[EmbeddingBagConfig],
    dataset: Dataset,
    optimizer: RowOptimizerConfig,
    *,
    batch_size: int,
    hot: Mapping[str, int] | None = None,
) -> list[TableSpec]:
    """Return the `TableSpec` of each table of a model, from value counts of the training data.

    Counts include the training splits of the data sets that this one continues. A table has the
    name of its vocabulary. If a vocabulary has no counts (for example because its ids came from
    outside), every row is assumed to be equally popular, and every bag to have its maximum length.

    Parameters
    ----------
    tables : sequence of EmbeddingBagConfig
        Tables of the model.
    dataset : Dataset
        Data set with the vocabularies of the tables.
    optimizer : RowOptimizerConfig
        Row optimizer, which determines the state of a row.
    batch_size : int
        Samples of a batch.
    hot : mapping of str to int, optional
        Number of hot rows of each table, which are its first rows; the cache is not used for them.
    """
    samples = dataset.manifest.carried.samples
    features = dataset.schema.vocabularies()
    specs = []
    for table in tables:
        popularity, total = cold_popularity(dataset, table.name, (hot or {}).get(table.name, 0))
        vocabulary = dataset.vocabularies[table.name]
        longest = (
            1 if feature.kind == "single" else feature.max_length for feature in features[table.name]
        )
        lookups = batch_size * (total / samples if total else float(sum(longest)))
        # Counts do not tell histories from other features with the same vocabulary, so all lookups
        # are assumed to be of histories.
        unpooled = lookups if table.sequence_features else 0.0
        specs.append(
            TableSpec(
                name=table.name,
                rows=table.num_embeddings,
                shape=RowShape.of(table.embedding_dim, optimizer),
                lookups=lookups,
                popularity=popularity,
                is_ranked=popularity.by_id and vocabulary.kind == "count" and not vocabulary.inherited,
                outputs=table.embedding_dim * (batch_size * len(table.feature_names) + unpooled),
            )
        )
    return specs


def cold_popularity(dataset: Dataset, table: str, hot: int) -> tuple[Popularity, int]:
    """Return the popularity of the rows that are not hot, as shares of the lookups of all rows.

    Also return the number of lookups of all rows.

    Parameters
    ----------
    dataset : Dataset
        Data set with the counts.
    table : str
        Vocabulary.
    hot : int
        Number of hot rows, which are the first rows.
    """
    (ids, counts), rows = dataset.counted_ids(table), dataset.vocabularies[table].rows
    total = int(counts.sum())
    if not hot:
        return Popularity.from_counts(counts, ids, rows), total
    cold = counts.copy()
    cold[: hot if ids is None else np.searchsorted(ids, hot)] = 0
    return Popularity.from_counts(cold, ids, rows).times(float(cold.sum() / max(total, 1))), total
