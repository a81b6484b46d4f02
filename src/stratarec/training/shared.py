"""One run by several processes: tables over ranks, a part of every batch each, and all decisions taken together."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stratarec.batch import Batch
from stratarec.data.dataset import Dataset
from stratarec.distributed.collection import ShardedCollection
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.planning import ShardingPlan, TableLoad, plan_sharding
from stratarec.distributed.reduction import reduce_gradients
from stratarec.distributed.sharding import Sharding
from stratarec.embedding import EmbeddingBagConfig, Handle
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.models.outputs import autocast
from stratarec.models.request import Request
from stratarec.planning.apply import tier_config
from stratarec.planning.bytes import in_memory
from stratarec.planning.plan import Plan
from stratarec.planning.tables import describe_tables
from stratarec.recipe import Recipe
from stratarec.training.cadence import Seen
from stratarec.training.memory import peak_rss_bytes
from stratarec.training.pipeline import Stages, Trained, refuse_loss


def sharding_plan(
    recipe: Recipe, dataset: Dataset, tables: Sequence[EmbeddingBagConfig], plan: Plan | None, ranks: int
) -> ShardingPlan:
    """Where the tables of a recipe lie among so many ranks; `plan` says their bytes where they were placed."""
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
                bytes=spec.rows * spec.shape.slot_bytes if plan is None else in_memory(plan[table.name].bytes, "dram"),
                lookups=spec.lookups,
                bags=batch * pooled + spec.lookups * (features - pooled) / features,
                distinct=spec.popularity.distinct(spec.lookups / ranks),
            )
        )
    return plan_sharding(loads, ranks, recipe.distributed.sharding, recipe.memory.dram)


def shared_collection(
    recipe: Recipe,
    dataset: Dataset,
    plan: Plan | None,
    workspace: str,
    mesh: Mesh,
    tables: Sequence[EmbeddingBagConfig],
) -> ShardedCollection:
    """The tables of a recipe over the ranks of a mesh; stores with files have the directory `workspace` of this one."""
    places = sharding_plan(recipe, dataset, tables, plan, mesh.ranks).places
    tiers = TierConfig()
    if plan is not None:
        tiers = tier_config(plan, recipe.memory, workspace)
        shares = {name: places[name].ranks for name in tiers.tables}
        tiers = replace(tiers, tables={name: _part(tier, shares[name]) for name, tier in tiers.tables.items()})
    train = recipe.train
    return ShardedCollection(
        Sharding(tables, places, mesh.ranks), mesh, optimizer=train.embedding, seed=train.seed, tiers=tiers,
        config=recipe.distributed,
    )  # fmt: skip


def _part(tier: TableTier, ranks: int) -> TableTier:
    """What one of so many ranks caches of a table that they share."""
    return replace(tier, cache_rows=-(-tier.cache_rows // ranks), level1_rows=-(-tier.level1_rows // ranks))


class SharedStages(Stages):
    """The stages of a step of one rank of a mesh: its samples count as much as those of the others."""

    def __init__(self, mesh: Mesh, *stages: Any, **others: Any) -> None:
        super().__init__(*stages, **others)
        self.mesh = mesh
        self.exposed_seconds = self.step_seconds = 0.0

    def forward(self, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Tensor:
        """The sum of the losses of this rank's samples."""
        if not batch.size:
            return self._nothing(batch, request, prepared)
        with autocast(self._config.precision):
            logits = self.model(batch, request, prepared)
        return functional.binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")

    def _nothing(self, batch: Batch, request: Request | None, prepared: Handle | None) -> Tensor:
        """A loss of zero that depends on what was looked up: this rank's rows are asked for all the same."""
        found = self.model.embeddings(prepared or (request or self.request(batch)).features)
        total: Tensor = found.pooled.sum() + sum(bags.values.sum() for bags in found.sequences.values())
        return total

    def train(self, step: int, batch: Batch, request: Request | None = None, prepared: Handle | None = None) -> Trained:
        """See `Stages.train`; loss and samples are those of all ranks."""
        waited, began = self.mesh.rows.wait_seconds, time.perf_counter()
        loss = self.forward(batch, request, prepared)
        parts = self.mesh.rows.figures([loss.item(), batch.size])
        samples = sum(int(size) for _, size in parts)
        value = sum(part for part, _ in parts) / samples
        if not math.isfinite(value):
            refuse_loss(value, step)
        self.backward(loss / samples)
        self.update(step)
        self.exposed_seconds += self.mesh.rows.wait_seconds - waited
        self.step_seconds += time.perf_counter() - began
        return Trained(value, samples)

    def figures(self) -> list[dict[str, float]]:
        """`RankFigures` of all ranks."""
        mesh = self.mesh
        sent = sum(channel.sent_bytes for channel in (mesh.ids, mesh.rows, mesh.files))
        mine = (self.exposed_seconds, self.step_seconds, sent, self.model.embeddings.nbytes, peak_rss_bytes())
        names = ("exposed_seconds", "step_seconds", "sent_bytes", "table_bytes", "peak_rss_bytes")
        return [
            {
                name: value if name.endswith("seconds") else round(value)
                for name, value in zip(names, found, strict=True)
            }
            for found in mesh.rows.figures(mine)
        ]


class Together:
    """The `Reduction` and the `Agreement` of several processes: sums in the order of ranks, one stops all."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def reduce(self, weights: Iterable[torch.nn.Parameter]) -> None:
        """See `Reduction.reduce`."""
        reduce_gradients(self._mesh.rows, list(weights))

    def agree(self, seen: Seen) -> Seen:
        """Rank 0 has the clock; whoever was asked to stop stops all."""
        found = self._mesh.rows.figures([seen.checkpoint_age_seconds, seen.stop])
        return Seen(checkpoint_age_seconds=found[0][0], stop=any(stop for _, stop in found))
