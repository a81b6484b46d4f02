"""The tables of a recipe over ranks: who holds what, and the collection of one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharded_engine import ShardedCollection
from stratarec.distributed.sharding import Sharding
from stratarec.distributed.table_placement import ShardingPlan, TableLoad, beside, plan_sharding
from stratarec.embedding import EmbeddingBagConfig
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import ConfigError
from stratarec.models.towers.tower_config import check_plan
from stratarec.planning.bytes import in_memory
from stratarec.planning.plan import Plan, TablePlacement, tier_config
from stratarec.planning.table_load import describe_tables
from stratarec.recipe import Recipe


def sharding_plan(
    recipe: Recipe,
    dataset: Dataset,
    tables: Sequence[EmbeddingBagConfig],
    plan: Plan | None,
    ranks: int,
    *,
    by_towers: bool = False,
) -> ShardingPlan:
    """Where the tables of a recipe lie among so many ranks; `plan` says their bytes where they were placed.

    `by_towers`, the tables of a tower lie on its host.
    """
    loads = table_loads(recipe, dataset, tables, plan, ranks)
    kind, budget = recipe.distributed.sharding, recipe.hot.leave(recipe.memory.dram, ranks)
    if not by_towers:
        return plan_sharding(loads, ranks, kind, budget)
    towers = _loads_by_tower(recipe, dataset, loads)
    if ranks % len(towers):
        raise ConfigError(f"{ranks} ranks on {len(towers)} hosts, expected as many ranks on every host")

    def of_host(host: int) -> ShardingPlan:
        try:
            return plan_sharding(towers[host], ranks // len(towers), kind, budget)
        except ConfigError as error:
            raise ConfigError(f"host {host}, which has the tables of tower {host}: {error}") from error

    return beside([of_host(host) for host in range(len(towers))], [table.name for table in tables])


def table_loads(
    recipe: Recipe, dataset: Dataset, tables: Sequence[EmbeddingBagConfig], plan: Plan | None, ranks: int
) -> list[TableLoad]:  # fmt: skip
    """What a batch of all ranks asks of each table."""
    batch = recipe.train.batch_size
    loads = []
    for spec, table in zip(
        describe_tables(tables, dataset, recipe.train.embedding, batch_size=batch), tables, strict=True
    ):
        pooled = len(table.feature_names)
        features = pooled + len(table.sequence_features)
        loads.append(
            TableLoad(
                name=table.name,
                width=table.embedding_dim,
                bytes=spec.rows * spec.shape.slot_bytes if plan is None else _owned_bytes(plan[table.name]),
                lookups=spec.lookups,
                bags=batch * pooled + spec.lookups * (features - pooled) / features,
                distinct=spec.popularity.distinct(spec.lookups / ranks),
            )
        )
    return loads


def _loads_by_tower(recipe: Recipe, dataset: Dataset, loads: Sequence[TableLoad]) -> list[list[TableLoad]]:
    towers = recipe.model.towers
    assert towers is not None
    check_plan(towers, dataset.schema)
    tower_of = {name: number for number, features in enumerate(towers.plan) for name in features}
    found: list[list[TableLoad]] = [[] for _ in towers.plan]
    features = dataset.schema.vocabularies()
    for load in loads:
        found[tower_of[features[load.name][0].name]].append(load)
    return found


def shared_collection(
    recipe: Recipe,
    dataset: Dataset,
    plan: Plan | None,
    workspace: str,
    mesh: Mesh,
    tables: Sequence[EmbeddingBagConfig],
) -> ShardedCollection:
    """The tables of a recipe over the ranks of a mesh; stores with files have the directory `workspace` of this one."""
    for feature in dataset.schema.weighted:
        raise ConfigError(
            f"sparse feature {feature.name!r} has weights: per-sample weights do not travel between ranks; leave them "
            "out, or use one process"
        )
    by_towers = mesh.between is not None
    places = dict(sharding_plan(recipe, dataset, tables, plan, mesh.ranks, by_towers=by_towers).places)
    tiers, hot = TierConfig(), dict[str, int]()
    if plan is not None:
        hot = {each.table: each.copied_rows for each in plan.tables if each.copied_rows}
        places = {name: replace(place, travel="rows") if name in hot else place for name, place in places.items()}
        tiers = tier_config(plan, recipe.memory, workspace)
        shares = {name: places[name].ranks for name in tiers.tables}
        tiers = replace(tiers, tables={name: _part(tier, shares[name]) for name, tier in tiers.tables.items()})
    train = recipe.train
    return ShardedCollection(
        Sharding(tables, places, mesh.ranks), mesh, optimizer=train.embedding, seed=train.seed, tiers=tiers,
        config=recipe.distributed, hot=hot,
    )  # fmt: skip


def _owned_bytes(placed: TablePlacement) -> int:
    """Of a table, without the copies that have a budget of their own."""
    return in_memory(placed.bytes, "dram") - placed.bytes["dram"].get("copies", 0)


def _part(tier: TableTier, ranks: int) -> TableTier:
    """What one of so many ranks caches of a table that they share."""
    return replace(tier, cache_rows=-(-tier.cache_rows // ranks), level1_rows=-(-tier.level1_rows // ranks))
