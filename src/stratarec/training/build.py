"""Build the parts of a run from its recipe and data set: plan, model, sharded tables, and the
loader of hot batches.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.config.units import format_bytes
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import LoaderConfig
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.sharded_engine import ShardedCollection
from stratarec.distributed.sharding import Sharding, ShardingPlan, TableLoad, join_plans, plan_sharding
from stratarec.distributed.towers import DisaggregatedModel
from stratarec.embedding import EmbeddingBagConfig
from stratarec.embedding.slots import MEMORIES
from stratarec.embedding.tiers import TableTier, TierConfig
from stratarec.errors import ConfigError, TrainingError
from stratarec.hot.hot_loader import HotLoader, classify
from stratarec.io.scratch import ScratchDirectory
from stratarec.kernels.runtime.accelerator import CPU
from stratarec.models import CTRModel, build_model
from stratarec.models.base import Network, build_tables
from stratarec.models.losses import CrossEntropyConfig
from stratarec.models.tower_config import check_plan
from stratarec.models.zoo.ensemble import EnsembleScore
from stratarec.planning.bytes import in_memory
from stratarec.planning.candidates import describe_tables
from stratarec.planning.config import MemoryConfig
from stratarec.planning.machine import Tiers, measure_tiers
from stratarec.planning.placement import hot_rows, make_hot_plan
from stratarec.planning.plan import Plan, tier_config
from stratarec.progress import Progress
from stratarec.recipe import Recipe
from stratarec.training.gpu_memory import on_gpu, rows_memory
from stratarec.training.torch_setup import measured_rates


def identity(recipe: Recipe, dataset: Dataset) -> dict[str, Any]:
    """Return the model, optimizer and data settings that a checkpoint must match to be resumed."""
    content = recipe.to_dict()
    free = (
        "run", "epochs", "max_steps", "threads", "checkpoint", "mirror", "log_every", "report", "curves", "trace",
        "eval_every", "early_stopping", "calibration", "device", "refit", "loss",
    )  # fmt: skip
    train = {key: value for key, value in content["train"].items() if key not in free}
    if recipe.train.loss != CrossEntropyConfig():  # the default is left out: older checkpoints have no loss
        train["loss"] = content["train"]["loss"]
    if recipe.hot.separate_batches:  # they change the order of samples
        train["hot"] = content["hot"]
    return {
        "model": content["model"],
        "train": train,
        "inputs": dataset.inputs(),
        "dataset": dataset.fingerprint,
    }


def new_plan(recipe: Recipe, dataset: Dataset, ranks: int = 1, device: torch.device = CPU) -> Plan | None:
    """Plan the placement of a recipe's tables on this machine; None if all tables are simply
    float32 in DRAM.

    The budgets of the recipe apply to each rank. Rows are in the memory of `device` if it is a GPU
    that can train them.
    """
    if not dataset.table_rows():
        return None
    if recipe.memory.is_identity and not on_gpu(recipe, device):
        if ranks == 1 and recipe.hot.budget is not None:
            raise ConfigError(
                "hot.budget is set, but every table fits in DRAM: set memory.dram below the size of the "
                "tables, or hot.budget to null"
            )
        return None
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    train = recipe.train
    memory, tiers = measured_memory(recipe, dataset, device)
    return make_hot_plan(
        tables,
        dataset,
        train.embedding,
        memory,
        recipe.hot,
        batch_size=train.batch_size,
        ranks=ranks,
        tiers=tiers,
    )


def measured_memory(
    recipe: Recipe, dataset: Dataset, device: torch.device, *, again: bool = False
) -> tuple[MemoryConfig, Tiers]:
    """Return the memory section for training on `device`, with `hbm` as a number of bytes, and the
    measured rates.

    If rows are not trained in GPU memory, `hbm` is None. `again` measures even if cached
    measurements exist.
    """
    rates = measured_rates(device) if on_gpu(recipe, device) else None
    memory = replace(recipe.memory, hbm=None) if rates is None else rows_memory(recipe, dataset, rates)
    return memory, measure_tiers(memory, rates=rates, again=again)


def new_model(
    recipe: Recipe,
    dataset: Dataset,
    plan: Plan | None,
    workspace: str,
    mesh: Mesh | None = None,
    device: torch.device = CPU,
) -> CTRModel:
    """Build the untrained model of a recipe.

    Stores with files create a directory `workspace` in the paths of their memories. With a mesh of
    several ranks, the tables are sharded, and each rank needs a different `workspace`. The network
    is moved to `device`. Rows are in GPU memory if `plan` places them there and `device` is a GPU,
    otherwise in DRAM.

    Raises
    ------
    ConfigError
        If `plan` was made for other tables.
    TrainingError
        If the GPU has too little memory.
    """
    if plan is not None:
        _check_plan(plan, recipe, dataset)
    collection, weights = None, recipe.train.class_weights(dataset.schema.label_columns)
    if mesh is not None and mesh.ranks > 1:
        collection = partial(sharded_collection, recipe, dataset, plan, workspace, mesh)
    try:
        model = build_model(
            recipe.model,
            dataset.schema,
            dataset.table_rows(),
            dataset.first_rows(),
            optimizer=recipe.train.embedding,
            seed=recipe.train.seed,
            click_rates=[
                weight * count.positives / max(count.known + (weight - 1) * count.positives, 1)
                for weight, count in zip(weights, dataset.label_counts("train").values(), strict=True)
            ],
            tiers=None
            if plan is None
            else tier_config(plan, recipe.memory, workspace, _rows_device(device)),
            collection=collection,
        )
    except torch.OutOfMemoryError as error:
        assert plan is not None
        raise TrainingError(
            f"{device} has too little free memory for the rows that the plan places there, "
            f"{format_bytes(plan.used('hbm'))}: end other programs on the GPU, or lower memory.hbm"
        ) from error
    model.place(device)
    model.network.correction = tuple(
        math.log(recipe.data.split.negatives) - math.log(weight) if recipe.train.has_log_odds else 0.0
        for weight in weights
    )
    if mesh is not None and mesh.between is not None:
        return DisaggregatedModel(model, mesh, recipe.distributed, recipe.train.seed)
    return model


def _rows_device(device: torch.device) -> str:
    return str(device) if device.type in MEMORIES else "cpu"


def _check_plan(plan: Plan, recipe: Recipe, dataset: Dataset) -> None:
    planned = {placed.table: f"{placed.rows:,} rows of {placed.width}" for placed in plan.tables}
    actual = {
        name: f"{rows:,} rows of {recipe.model.table_width(name)}"
        for name, rows in dataset.table_rows().items()
    }
    for table in sorted({*planned, *actual}):
        if planned.get(table) != actual.get(table):
            raise ConfigError(
                f"the plan is for other tables: {table!r} has {planned.get(table, 'no place')} in it and "
                f"{actual.get(table, 'no place')} in this recipe's data; plan again"
            )


@contextmanager
def temporary_model(
    recipe: Recipe,
    dataset: Dataset,
    plan: Plan | None,
    mesh: Mesh | None = None,
    device: torch.device = CPU,
) -> Iterator[CTRModel]:
    """Build a model as `new_model` does, and close it at the end of the context.

    Its stores have directories that only this process uses, so a run of the same recipe may train
    at the same time.
    """
    prefix, token = recipe.scratch_prefix, uuid.uuid4().hex[:12]
    with ExitStack() as stack:
        for place in _store_paths(recipe, plan):
            stack.enter_context(ScratchDirectory(place, prefix, token))
        model = new_model(recipe, dataset, plan, prefix + token, mesh, device)
        stack.callback(model.embeddings.close)
        yield model


def _store_paths(recipe: Recipe, plan: Plan | None) -> list[Path]:
    """Return the directories in which the stores of a plan keep their files."""
    homes = {placed.tier for placed in plan.tables} if plan is not None else set()
    memories = (("mapped", recipe.memory.mapped), ("log", recipe.memory.block))
    return [Path(memory.path) for home, memory in memories if home in homes and memory is not None]


def hot_loader(dataset: Dataset, config: LoaderConfig, plan: Plan | None, progress: Progress) -> HotLoader:
    """Build the loader of a run in which hot inputs (samples with only hot rows) have separate
    batches.

    Hot inputs are counted first, unless their counts are cached.

    Parameters
    ----------
    plan : Plan
        Plan that says which rows are hot.

    Raises
    ------
    ConfigError
        If the plan has no hot rows.
    """
    if plan is None or not any(placed.hot_rows for placed in plan.tables):
        raise ConfigError(
            "hot.budget is set, but the plan has no hot rows: plan again, or set hot.budget to null"
        )
    parts, hot = hot_rows(plan, dataset)
    counted = classify(dataset, parts, hot, "train", progress)
    loader = HotLoader(dataset, "train", config, parts, hot, counted)
    samples = dataset.samples("train")
    progress.say(
        f"{loader.hot_samples:,} of {samples:,} inputs are hot, {loader.hot_samples / samples:.2%}: "
        f"{int(loader.kinds(0).sum()):,} of {len(loader):,} batches"
    )
    return loader


def sharding_plan(
    recipe: Recipe,
    dataset: Dataset,
    tables: Sequence[EmbeddingBagConfig],
    plan: Plan | None,
    ranks: int,
    *,
    by_towers: bool = False,
) -> ShardingPlan:
    """Assign the tables of a recipe to ranks. The sizes of tables are taken from `plan`, if there
    is one.

    With `by_towers`, the tables of a tower are assigned to the ranks of one host.
    """
    loads = table_loads(recipe, dataset, tables, plan, ranks)
    kind, budget = recipe.distributed.sharding, recipe.memory.dram
    if not by_towers:
        return plan_sharding(loads, ranks, kind, budget)
    towers = _loads_by_tower(recipe, dataset, loads)
    if ranks % len(towers):
        raise ConfigError(
            f"{ranks} ranks on {len(towers)} hosts, expected the same number of ranks on every host"
        )

    def of_host(host: int) -> ShardingPlan:
        try:
            return plan_sharding(towers[host], ranks // len(towers), kind, budget)
        except ConfigError as error:
            raise ConfigError(f"host {host}, which has the tables of tower {host}: {error}") from error

    return join_plans([of_host(host) for host in range(len(towers))], [table.name for table in tables])


def table_loads(
    recipe: Recipe, dataset: Dataset, tables: Sequence[EmbeddingBagConfig], plan: Plan | None, ranks: int
) -> list[TableLoad]:
    """Return the load of each table: its bytes, and the lookups of one batch of all ranks
    together.
    """
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
                bytes=spec.rows * spec.shape.slot_bytes
                if plan is None
                else in_memory(plan[table.name].bytes, "dram"),
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
    by_tower: list[list[TableLoad]] = [[] for _ in towers.plan]
    features = dataset.schema.vocabularies()
    for load in loads:
        by_tower[tower_of[features[load.name][0].name]].append(load)
    return by_tower


def sharded_collection(
    recipe: Recipe,
    dataset: Dataset,
    plan: Plan | None,
    workspace: str,
    mesh: Mesh,
    tables: Sequence[EmbeddingBagConfig],
) -> ShardedCollection:
    """Build the tables of a recipe, sharded over the ranks of a mesh.

    `workspace` is the name of this rank's directories in the paths of the memories.
    """
    for feature in dataset.schema.weighted:
        raise ConfigError(
            f"sparse feature {feature.name!r} has weights: per-sample weights are not sent between ranks; "
            "leave them out, or use one process"
        )
    by_towers = mesh.between is not None
    places = dict(sharding_plan(recipe, dataset, tables, plan, mesh.ranks, by_towers=by_towers).places)
    tiers = TierConfig()
    if plan is not None:
        tiers = tier_config(plan, recipe.memory, workspace)
        shares = {name: places[name].ranks for name in tiers.tables}
        tiers = replace(
            tiers, tables={name: _part(tier, shares[name]) for name, tier in tiers.tables.items()}
        )
    train = recipe.train
    return ShardedCollection(
        Sharding(tables, places, mesh.ranks),
        mesh,
        optimizer=train.embedding,
        seed=train.seed,
        tiers=tiers,
        config=recipe.distributed,
    )


def _part(tier: TableTier, ranks: int) -> TableTier:
    """Return the tier of one rank's part of a table, if `ranks` ranks divide the table's cache."""
    return replace(tier, cache_rows=-(-tier.cache_rows // ranks), dram_rows=-(-tier.dram_rows // ranks))


# Number of samples from which quantiles are computed. The rank of a quantile is then wrong by less
# than 0.2 %.
_SAMPLES = 100_000


def set_quantiles(network: Network, dataset: Dataset) -> None:
    """Set the quantiles of dense features in a new model, if the model divides them into bins.

    The row groups that are read are evenly spaced in the training split, because a log may be
    sorted by time. Equal data give equal quantiles in every process.
    """
    score, names = network.score, [feature.name for feature in dataset.schema.dense]
    if not isinstance(score, EnsembleScore) or not names:
        return
    groups = [
        (number, group)
        for number, shard in enumerate(dataset.shards("train"))
        for group in range(len(shard.row_groups))
    ]
    mean = dataset.samples("train") / len(groups)
    count = min(max(int(_SAMPLES / mean), 1), len(groups))
    chosen = [groups[place * len(groups) // count] for place in range(count)]
    tables = [dataset.read_row_group("train", *place).select(names) for place in chosen]
    numbers = np.stack([np.concatenate([table[name].to_numpy() for table in tables]) for name in names])
    edges = np.stack([_edges(column, score.bins) for column in numbers])
    score.set_quantiles(torch.from_numpy(edges))


def _edges(column: NDArray[np.float32], bins: int) -> NDArray[np.float32]:
    """Return the edges of the bins of a column, ``[bins + 1]``.

    They are quantiles, or, if there are at most bins + 1 distinct values, these values, with the
    last one repeated.
    """
    values = np.unique(column)
    if len(values) <= bins + 1:
        return np.pad(values, (0, bins + 1 - len(values)), mode="edge")
    return np.quantile(column, np.linspace(0, 1, bins + 1)).astype(np.float32)
