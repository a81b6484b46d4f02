"""Sorting tables into groups that share kernel calls, and opening the store of each group's home."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stratarec.embedding.cache.directory import Directory
from stratarec.embedding.codecs import CodecConfig, RecordCodec
from stratarec.embedding.config import EmbeddingBagConfig
from stratarec.embedding.health import Health
from stratarec.embedding.optimizers import RowOptimizerConfig
from stratarec.embedding.slots import Level0
from stratarec.embedding.step_clock import StepClock
from stratarec.embedding.stores.base import RecordStore
from stratarec.embedding.stores.dram import DramRecords
from stratarec.embedding.stores.log import LogConfig, LogRecords
from stratarec.embedding.stores.log.layout import DEAD_BYTES, location_bytes, plan_layout
from stratarec.embedding.stores.mapped import MappedRecords
from stratarec.embedding.stores.victim_cache import VictimCache
from stratarec.embedding.tables.base import TableGroup
from stratarec.embedding.tables.cached import CachedTables
from stratarec.embedding.tables.resident import ResidentTables
from stratarec.embedding.tiers import HomeKind, TierConfig
from stratarec.errors import ConfigError

Configs = list[EmbeddingBagConfig]
Shared = tuple[int, HomeKind, CodecConfig]


def build_tables(
    configs: Sequence[EmbeddingBagConfig],
    columns: Mapping[str, int],
    step_clock: StepClock,
    seed: int,
    tiers: TierConfig,
    health: Health,
    level0: Level0,
) -> list[TableGroup]:
    """One group for each width of tables that lie whole in level 0, and for each width, home and codec of the others.

    Raises
    ------
    ConfigError
        For a tier of a table that does not exist, or a cached table that is too large.
    StorageError
        When a store cannot be opened; those opened before are closed.
    """
    unknown = sorted(set(tiers.tables) - {table.name for table in configs})
    if unknown:
        raise ConfigError(f"tiers names table {unknown[0]!r}; there are {', '.join(table.name for table in configs)}")
    resident: dict[int, Configs] = {}
    cached: dict[Shared, Configs] = {}
    for table in configs:
        tier = tiers.tables.get(table.name)
        if tier is None:
            resident.setdefault(table.embedding_dim, []).append(table)
        else:
            cached.setdefault((table.embedding_dim, tier.home, tier.codec), []).append(table)
    groups = [(key, mine) for key, all_of in cached.items() for mine in _sharing(key, all_of, step_clock.optimizer)]
    codecs = [RecordCodec.of(config, width, step_clock.optimizer) for (width, _, config), _ in groups]
    rows = [_rows(mine) for _, mine in groups]
    budgets = _share_budget(
        tiers.log_budget_bytes,
        {
            place: plan_layout(rows[place], codecs[place].record_bytes, LogConfig()).padded_bytes
            for place, (key, _) in enumerate(groups)
            if key[1] == "log"
        },
    )
    found: list[TableGroup] = [ResidentTables(mine, columns, step_clock, seed, level0) for mine in resident.values()]
    try:
        for place, (key, mine) in enumerate(groups):
            # Before the store takes memory or files: what is too large is refused here.
            directory = Directory(mine, tiers.tables, policy=tiers.policy, ways=tiers.ways, seed=seed)
            budget = budgets.get(place, 0)
            store = open_store(key[1], tiers, f"group-{place:02d}", rows[place], codecs[place].record_bytes, budget)
            level1 = sum(tiers.tables[table.name].level1_rows for table in mine)
            store = VictimCache(store, capacity_rows=level1) if level1 else store
            found.append(CachedTables(mine, columns, directory, codecs[place], store, step_clock, health, level0))
    except Exception:
        for tables in found:
            # Files and threads of the groups before: nobody will hold these to close them.
            tables.close()
        raise
    return found


def _share_budget(total: int | None, block_bytes: Mapping[int, int]) -> dict[int, int]:
    """What each log may take of `total`: what any log needs, as the planner counts, and of the rest by its blocks."""
    if total is None:
        return {}
    left, blocks = total - len(block_bytes) * DEAD_BYTES, max(sum(block_bytes.values()), 1)
    if left < 0:
        raise ConfigError(
            f"memory.block.budget is {total}, and {len(block_bytes)} logs (one for all tables of a width and "
            f"precision) need {DEAD_BYTES} bytes each beside their rows: raise it to more than "
            f"{len(block_bytes) * DEAD_BYTES}"
        )
    return {place: DEAD_BYTES + left * mine // blocks for place, mine in block_bytes.items()}


def _rows(configs: Sequence[EmbeddingBagConfig]) -> int:
    return sum(table.num_embeddings for table in configs)


def _sharing(key: Shared, configs: Configs, optimizer: RowOptimizerConfig) -> list[Configs]:
    """Tables that share a store: of a log as many as need no wider locations together than each needs alone."""
    width, home, codec = key
    if home != "log":
        return [configs]
    record_bytes, found = RecordCodec.of(codec, width, optimizer).record_bytes, [configs[:1]]
    for table in configs[1:]:
        together = [*found[-1], table]
        alone = sum(location_bytes(each.num_embeddings, record_bytes) for each in together)
        # Fewer logs have fewer open segments; wider locations would cost memory for every row.
        if location_bytes(_rows(together), record_bytes) <= alone:
            found[-1] = together
        else:
            found.append([table])
    return found


def open_store(
    home: HomeKind, tiers: TierConfig, name: str, rows: int, record_bytes: int, log_budget_bytes: int
) -> RecordStore:
    """An empty store of the kind."""
    if home == "dram":
        return DramRecords(rows=rows, record_bytes=record_bytes)
    path = tiers.mapped_path if home == "mapped" else tiers.log_path
    assert path is not None, "TierConfig checks that homes with files have a path"
    if home == "mapped":
        return MappedRecords(path / name, rows=rows, record_bytes=record_bytes)
    config = LogConfig(budget_bytes=log_budget_bytes)
    return LogRecords(path / name, rows=rows, record_bytes=record_bytes, config=config)
