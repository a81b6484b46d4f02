"""Compiles what a training run will call, before its clock starts.

Kernels are compiled when they are first called with arguments of a type, once on a machine; later processes load them
from disk. A few steps of a throw-away model do that: the same network, optimizers, codecs and homes, over tables of few
rows, on batches of the run's own data with other ids. Nothing of the run is touched, torch's
random state included, so that its bits are those of a run without this.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from scipy.special import pdtrc
from torch import Tensor

from stratarec.batch import Batch
from stratarec.data.dataset import Dataset
from stratarec.data.loader import Loader
from stratarec.embedding.tiers import TierConfig, cache_sets
from stratarec.errors import StrataError
from stratarec.inverse import InverseJagged
from stratarec.kernels.compiling import watch_compiling
from stratarec.models import CTRModel, build_model
from stratarec.models.base import autocast
from stratarec.planning.plan import Plan, tier_config
from stratarec.progress import Progress
from stratarec.recipe import Recipe
from stratarec.training.pipeline import InOrder, Stages

# Slots of a cache, and rows of a second level before a log.
_SLOTS, _SECOND_LEVEL = 1024, 256
_SAMPLES = 1024
# Batches looked at for forms that call other kernels: a bag without an id, or runs too short to be worth it.
_BATCHES = 16
# Batches that share no row: enough of them that some rows go home. The rows of one more are never written.
_TURNS = 4
_TABLE_ROWS = (_TURNS + 1) * _SLOTS


def warm_up(recipe: Recipe, loader: Loader, plan: Plan | None, progress: Progress) -> None:
    """Compile or load the kernels of steps, evaluations and checkpoints; says so when something is compiled.

    Parameters
    ----------
    loader : Loader
        Of the training split; batches of its first row groups are used.
    plan : Plan or None
        Where the run's tables live.
    """

    def tell() -> None:
        progress.say("compiling kernels for this machine, once: some 20 seconds")

    with watch_compiling(tell), torch.random.fork_rng(devices=[]), _scratch(recipe, plan) as (folder, tiers):
        try:
            model = _small_model(recipe, loader.dataset, tiers)
            try:
                _exercise(model, recipe, loader, folder)
            finally:
                model.embeddings.close()
        except StrataError:
            # What ran is compiled. If the run itself meets the same it will say so, with a checkpoint behind it.
            return


@contextmanager
def _scratch(recipe: Recipe, plan: Plan | None) -> Iterator[tuple[Path, TierConfig | None]]:
    """A directory, and the run's tiers with few slots and with files in directories of their own."""
    tiers = None if plan is None else _small_tiers(recipe, plan)
    try:
        with tempfile.TemporaryDirectory(prefix="stratarec-") as folder:
            yield Path(folder), tiers
    finally:
        for path in (tiers.mapped_path, tiers.log_path) if tiers else ():
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)


def _small_tiers(recipe: Recipe, plan: Plan) -> TierConfig:
    tiers = tier_config(plan, recipe.memory, f"{recipe.place}-warm-up-{uuid.uuid4().hex[:12]}")
    tables = {
        name: replace(tier, cache_rows=_SLOTS, level1_rows=min(tier.level1_rows, _SECOND_LEVEL), hot_head=0, hot_tail=0)
        for name, tier in tiers.tables.items()
    }
    return replace(tiers, tables=tables, log_budget_bytes=None)


def _rows(ways: int) -> int:
    """Rows a batch may use: as many as fill the overflow area to a quarter, so that every row still finds a slot."""
    sets, overflow = cache_sets(_SLOTS, ways)

    def spilled(rows: int) -> float:
        # Of a set with Poisson many rows, those beyond its ways.
        mean = rows / sets
        return float(sets * (mean * pdtrc(ways - 1, mean) - ways * pdtrc(ways, mean)))

    return max(rows for rows in range(1, _SLOTS) if spilled(rows) <= overflow * ways / 4)


def _small_model(recipe: Recipe, dataset: Dataset, tiers: TierConfig | None) -> CTRModel:
    rows = dict.fromkeys(dataset.table_rows(), _TABLE_ROWS)
    return build_model(recipe.model, dataset.schema, rows, optimizer=recipe.train.embedding, tiers=tiers)


def _exercise(model: CTRModel, recipe: Recipe, loader: Loader, folder: Path) -> None:
    """Steps, evaluations and two checkpoints."""
    optimizer = recipe.train.dense.build(model.network)
    stages = Stages(model, optimizer, recipe.train, InOrder(loader))
    size = _rows(model.embeddings.tiers.ways)
    # In no order: neighbouring ids would spread over the sets of a cache too evenly to fill any.
    order = torch.randperm(_TABLE_ROWS, generator=torch.Generator().manual_seed(0))
    rows = [order[turn * size : (turn + 1) * size] for turn in range(_TURNS + 1)]
    tiered = not model.embeddings.engine.resident
    saved: Path | None = None
    for batch in _forms(model, loader):
        for turn in range(_TURNS if tiered else 1):
            stages.train(0, _of_rows(batch, rows[turn]))
        # From the first checkpoint on, rows that change are noted, and rows may be read from files.
        if saved is None:
            saved = folder / "first"
            model.embeddings.save(saved)
        stages.train(0, _of_rows(batch, rows[0]))
        with torch.no_grad(), autocast(recipe.train.precision):
            # Rows in level 0, at home, and never written.
            for turn in (0, 1, _TURNS) if tiered else (0,):
                model(_of_rows(batch, rows[turn]))
    model.embeddings.save(folder / "second", saved)


def _forms(model: CTRModel, loader: Loader) -> list[Batch]:
    """A batch of each form among the first ones of the run's size, and of one that is large enough to fill a cache."""
    found: dict[tuple[object, ...], Batch] = {}
    for size in sorted({_SAMPLES, min(loader.config.batch_size, _SAMPLES)}, reverse=True):
        config = replace(loader.config, batch_size=size, shuffle_row_groups=1, portions=1)
        small = Loader(loader.dataset, loader.split, config)
        batches = small.batches(0)
        for batch in islice(batches, _BATCHES):
            request = model.request(batch)
            # Vectors that a history looks at are expanded where samples share them.
            expanded = any(
                model.embeddings.pooled_keys[place] in request.shared
                for targets in model.network.targets
                for place in targets
            )
            found.setdefault((request.features.offsets is None, request.starts is None, expanded), batch)
        batches.close()  # type: ignore[attr-defined]
    return list(found.values())


def _of_rows(batch: Batch, rows: Tensor) -> Batch:
    """The batch with the ids `rows`, over and over, in place of its own."""

    def ids(values: Tensor) -> Tensor:
        return rows[torch.arange(values.numel()) % len(rows)].to(values.dtype)

    groups = (
        InverseJagged(unique=replace(group.unique, values=ids(group.unique.values)), inverse=group.inverse)
        for group in batch.groups
    )
    return replace(batch, sparse=replace(batch.sparse, values=ids(batch.sparse.values)), groups=tuple(groups))
