"""Jobs that ranks run in tests: train a collection on a rank's samples of batches that are the same
in every test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratarec.batch.jagged import KeyedJagged
from stratarec.distributed.config import DistributedConfig
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharded_engine import ShardedCollection
from stratarec.distributed.sharding import Place, Sharding
from stratarec.embedding import (
    EmbeddingBagConfig,
    Prefetcher,
    RowOptimizerConfig,
    TieredEmbeddingBagCollection,
)
from stratarec.embedding.config import CodecConfig
from stratarec.embedding.tiers import TableTier, TierConfig

TABLES = (
    EmbeddingBagConfig(
        name="item",
        num_embeddings=300,
        embedding_dim=8,
        feature_names=("item",),
        sequence_features=("history",),
    ),
    EmbeddingBagConfig(
        name="user", num_embeddings=500, embedding_dim=8, feature_names=("user", "friend"), pooling="mean"
    ),
    EmbeddingBagConfig(name="page", num_embeddings=40, embedding_dim=4, feature_names=("page",)),
    EmbeddingBagConfig(name="tiny", num_embeddings=2, embedding_dim=8, feature_names=("tiny",)),
)
# not the order of the tables
KEYS = {"page": 40, "item": 300, "user": 500, "history": 300, "friend": 500, "tiny": 2}
SAMPLES = 24


@dataclass(frozen=True)
class Setup:
    """Collection, layout and batches of a training job."""

    layout: str
    """``whole``: each table is pooled by its owner. ``rows``: each table is on one rank and its
    rows are exchanged. ``split``: tables are sharded by row over all ranks. ``mixed``: some of
    each. ``one``: all tables are on the first rank."""
    home: str = ""
    codec: str = "fp32"
    singles: bool = False
    """Whether every bag has one id."""
    steps: int = 20
    optimizer: str = "rowwise_adagrad"
    """Kind of the optimizer; ``<kind> of all rows`` changes all rows at every step."""
    exchange: DistributedConfig = field(default_factory=DistributedConfig)
    uneven: bool = False
    """Whether ranks have batches of different sizes, some of them empty."""


def places(layout: str, ranks: int) -> dict[str, Place]:
    if layout == "one":
        return {table.name: Place(first=0) for table in TABLES}
    kinds = {
        "whole": ("whole",) * 4, "rows": ("rows",) * 4, "split": ("split",) * 4,
        "mixed": ("split", "whole", "rows", "whole"),
    }[layout]  # fmt: skip
    places_by_table = {}
    for number, (table, kind) in enumerate(zip(TABLES, kinds, strict=True)):
        if kind == "split":
            places_by_table[table.name] = Place(first=0, ranks=ranks, travel="rows")
        else:
            places_by_table[table.name] = Place(
                first=number % ranks, travel="pooled" if kind == "whole" else "rows"
            )
    return places_by_table


def batch(step: int, singles: bool) -> KeyedJagged:
    """Return the batch of all ranks together, with bags of 0 to 3 ids from a skewed
    distribution.
    """
    draws = np.random.default_rng(step)
    low, high = (1, 2) if singles else (0, 4)
    lengths = draws.integers(low, high, (len(KEYS), SAMPLES))
    ids = [
        (rows * draws.random(int(count)) ** 3).astype(np.int32)
        for rows, count in zip(KEYS.values(), lengths.sum(1), strict=True)
    ]
    offsets = None if singles else torch.from_numpy(np.cumsum([0, *lengths.reshape(-1)]).astype(np.int64))
    values = torch.from_numpy(np.concatenate(ids))
    return KeyedJagged(keys=tuple(KEYS), values=values, offsets=offsets, batch_size=SAMPLES)


def rank_samples(step: int, rank: int, ranks: int, uneven: bool) -> slice:
    """Return the samples of one rank.

    If `uneven`, the second rank has none at every third step and the last rank has the rest.
    """
    if not uneven:
        return slice(SAMPLES * rank // ranks, SAMPLES * (rank + 1) // ranks)
    ends = [0] * (ranks + 1)
    ends[-1] = SAMPLES
    for place in range(1, ranks):
        ends[place] = ends[place - 1] + (0 if place == 2 and step % 3 == 0 else (step + 5 * place) % 9)
    return slice(min(ends[rank], SAMPLES), min(ends[rank + 1], SAMPLES))


def tiers(setup: Setup, path: Path | None, rank_samples: int = 1) -> TierConfig:
    """Return caches of the two large tables that are small enough for rows to move at every
    step.
    """
    if not setup.home:
        return TierConfig()
    tier = TableTier(home=setup.home, codec=CodecConfig(kind=setup.codec), cache_rows=192 // rank_samples)  # type: ignore[arg-type]
    paths = {f"{setup.home}_path": path} if setup.home in ("log", "mapped") else {}
    return TierConfig(tables={"item": tier, "user": tier}, ways=16, **paths)  # type: ignore[arg-type]


def loss(outputs: Any, features: KeyedJagged) -> Tensor:
    """Return a sum of a different function of every output, so that gradients do not mix samples
    and bits can be compared.
    """
    return (outputs.pooled.pow(2) * 0.5 + outputs.pooled).sum() + sum(
        (bags.values.pow(2) * 0.25).sum() for bags in outputs.sequences.values()
    )


def row_optimizer(setup: Setup) -> RowOptimizerConfig:
    kind, _, rows = setup.optimizer.partition(" of ")
    changed = {"rows": "all", "weight_decay": 0.02} if rows else {}
    return RowOptimizerConfig(kind=kind, learning_rate=0.05, **changed)  # type: ignore[arg-type]


def train_single(setup: Setup, path: Path) -> dict[str, Any]:
    """Train in one process on the batches of all ranks."""
    collection = TieredEmbeddingBagCollection(
        TABLES, optimizer=row_optimizer(setup), seed=7, tiers=tiers(setup, path / "single")
    )
    return train(collection, setup, 0, 1)


def train_sharded(mesh: Mesh, setup: Setup, path: Path) -> dict[str, Any]:
    """Train on the samples of one rank."""
    sharding = Sharding(TABLES, places(setup.layout, mesh.ranks), mesh.ranks)
    collection = ShardedCollection(
        sharding,
        mesh,
        optimizer=row_optimizer(setup),
        seed=7,
        tiers=tiers(setup, path / f"rank-{mesh.rank}"),
        config=setup.exchange,
    )
    return train(collection, setup, mesh.rank, mesh.ranks)


def train(collection: Any, setup: Setup, rank: int, ranks: int) -> dict[str, Any]:
    """Train and return the outputs of every step and the final tables."""
    pooled, rows = [], []
    for step in range(setup.steps):
        mine = rank_samples(step, rank, ranks, setup.uneven)
        features = batch(step, setup.singles).take(torch.arange(mine.start, mine.stop))
        outputs = collection(features)
        pooled.append(outputs.pooled.detach().clone())
        rows.append(outputs.sequences["history"].values.detach().clone())
        loss(outputs, features).backward()
    with torch.no_grad():
        mine = rank_samples(0, rank, ranks, setup.uneven)
        read = collection(batch(0, setup.singles).take(torch.arange(mine.start, mine.stop))).pooled.clone()
    tables = {
        table.name: {k: v.clone() for k, v in collection.table(table.name).items()} for table in TABLES
    }
    collection.close()
    return {"pooled": pooled, "rows": rows, "read": read, "tables": tables, "step": collection.step}


def join_ranks(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the results of all ranks into the result of one process."""
    steps = len(results[0]["pooled"])
    for other in results[1:]:
        for name, parts in results[0]["tables"].items():
            assert all(torch.equal(parts[part], other["tables"][name][part]) for part in parts), (
                "ranks disagree"
            )
    return {
        **{
            key: [torch.cat([rank[key][step] for rank in results]) for step in range(steps)]
            for key in ("pooled", "rows")
        },
        "read": torch.cat([rank["read"] for rank in results]),
        "tables": results[0]["tables"],
        "step": results[0]["step"],
    }


def train_ahead(mesh: Mesh, setup: Setup, path: Path, depth: int, bad_step: int = -1) -> dict[str, Any]:
    """Train with `depth` batches of lookahead. With several ranks, rank 1 has a bad id in the batch
    of `bad_step`.
    """
    share_of = 1 if mesh.ranks == 1 else mesh.rank
    options: dict[str, Any] = {
        "optimizer": RowOptimizerConfig(learning_rate=0.05),
        "seed": 7,
        "tiers": replace(tiers(setup, path / f"rank-{share_of}"), lookahead=depth),
    }
    if mesh.ranks == 1:
        collection: Any = TieredEmbeddingBagCollection(TABLES, **options)
    else:
        sharding = Sharding(TABLES, places(setup.layout, mesh.ranks), mesh.ranks)
        collection = ShardedCollection(sharding, mesh, config=setup.exchange, **options)

    def batches() -> Iterator[KeyedJagged]:
        for step in range(setup.steps):
            mine = rank_samples(step, mesh.rank, mesh.ranks, setup.uneven)
            features = batch(step, setup.singles).take(torch.arange(mine.start, mine.stop))
            if step == bad_step and mesh.rank == 1:
                features.values[0] = 40
            yield features

    pooled, rows = [], []
    with Prefetcher(collection.engine, batches(), lambda item, _: item, depth=depth) as source:
        for features, handle in source:
            outputs = collection(handle)
            pooled.append(outputs.pooled.detach().clone())
            rows.append(outputs.sequences["history"].values.detach().clone())
            loss(outputs, features).backward()
    tables = {
        table.name: {k: v.clone() for k, v in collection.table(table.name).items()} for table in TABLES
    }
    collection.close()
    return {
        "pooled": pooled,
        "rows": rows,
        "read": torch.zeros(0),
        "tables": tables,
        "step": collection.step,
    }


def train_with_small_cache(mesh: Mesh, setup: Setup, path: Path) -> None:
    """Train with a cache on rank 1 that holds the rows of only one batch."""
    given = tiers(setup, path)
    if mesh.rank == 1:
        given = replace(
            given, tables={name: replace(tier, cache_rows=2) for name, tier in given.tables.items()}, ways=1
        )
    sharding = Sharding(TABLES, places(setup.layout, mesh.ranks), mesh.ranks)
    train(ShardedCollection(sharding, mesh, tiers=given), setup, mesh.rank, mesh.ranks)
