"""Sorting tables into groups, and opening the store of each group's home."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stratarec.embedding.cache.row_cache import RowCache
from stratarec.embedding.codecs import CodecConfig, RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.groups import DenseGroup, TieredGroup
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.stores.base import RecordStore
from stratarec.embedding.stores.dram_records import DramRecords
from stratarec.embedding.stores.log import LogConfig, LogRecords
from stratarec.embedding.stores.mapped import MappedRecords
from stratarec.embedding.stores.victims import VictimCache
from stratarec.embedding.tiers import HomeKind, TierConfig
from stratarec.errors import ConfigError

Tables = list[EmbeddingBagConfig]
Shared = tuple[int, HomeKind, CodecConfig]


def build_groups(
    tables: Sequence[EmbeddingBagConfig],
    columns: Mapping[str, int],
    optimizer: RowOptimizerConfig,
    seed: int,
    tiers: TierConfig,
) -> list[DenseGroup | TieredGroup]:
    """One group for each width of tables that lie whole in level 0, and for each width, home and codec of the others.

    Raises
    ------
    ConfigError
        For a tier of a table that does not exist.
    StorageError
        When a store cannot be opened; those opened before are closed.
    """
    unknown = sorted(set(tiers.tables) - {table.name for table in tables})
    if unknown:
        raise ConfigError(f"tiers names table {unknown[0]!r}; there are {', '.join(table.name for table in tables)}")
    dense: dict[int, Tables] = {}
    tiered: dict[Shared, Tables] = {}
    for table in tables:
        tier = tiers.tables.get(table.name)
        if tier is None:
            dense.setdefault(table.embedding_dim, []).append(table)
        else:
            tiered.setdefault((table.embedding_dim, tier.home, tier.codec), []).append(table)
    groups: list[DenseGroup | TieredGroup] = [DenseGroup(mine, columns, optimizer, seed) for mine in dense.values()]
    return groups + _tiered_groups(tiered, columns, optimizer, seed, tiers)


def _tiered_groups(
    members: Mapping[Shared, Tables],
    columns: Mapping[str, int],
    optimizer: RowOptimizerConfig,
    seed: int,
    tiers: TierConfig,
) -> list[TieredGroup]:
    kept = {"row_state": bool(optimizer.row_state), "full_state": bool(optimizer.full_state)}
    codecs = [RecordCodec(config, width=width, **kept) for width, _, config in members]
    rows = [sum(table.num_embeddings for table in mine) for mine in members.values()]
    log_bytes = [
        codec.record_bytes * count if key[1] == "log" else 0
        for key, codec, count in zip(members, codecs, rows, strict=True)
    ]
    groups: list[TieredGroup] = []
    try:
        for place, (key, mine) in enumerate(members.items()):
            share = log_bytes[place] / max(sum(log_bytes), 1)
            store = open_store(key[1], tiers, f"group-{place:02d}", rows[place], codecs[place].record_bytes, share)
            store = _with_level1(store, sum(tiers.tables[table.name].level1_rows for table in mine))
            cache = RowCache(
                mine, tiers.tables, policy=tiers.policy, ways=tiers.ways, optimizer=optimizer, codec=codecs[place],
                store=store, seed=seed,
            )  # fmt: skip
            groups.append(TieredGroup(mine, columns, cache))
    except Exception:
        for group in groups:
            group.cache.store.close()
        raise
    return groups


def open_store(
    home: HomeKind, tiers: TierConfig, name: str, rows: int, record_bytes: int, budget_share: float
) -> RecordStore:
    """An empty store of the kind; `budget_share` is its share of what all logs may take."""
    if home == "dram":
        return DramRecords(rows=rows, record_bytes=record_bytes)
    path = tiers.mapped_path if home == "mapped" else tiers.log_path
    assert path is not None, "TierConfig checks that homes with files have a path"
    if home == "mapped":
        return MappedRecords(path / name, rows=rows, record_bytes=record_bytes)
    budget = int((tiers.log_budget_bytes or 0) * budget_share)
    return LogRecords(path / name, rows=rows, record_bytes=record_bytes, config=LogConfig(budget_bytes=budget))


def _with_level1(store: RecordStore, capacity_rows: int) -> RecordStore:
    return VictimCache(store, capacity_rows=capacity_rows) if capacity_rows else store
