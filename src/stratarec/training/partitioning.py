"""Towers for a recipe: its features' interactions, from a run or a short probe, and the partition by them.

A probe trains the recipe's model without towers for some steps and leaves nothing behind: no run, no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np

from stratarec.batch import Batch
from stratarec.data.dataset import Dataset
from stratarec.data.loader import Loader, LoaderConfig
from stratarec.errors import ConfigError
from stratarec.models import CTRModel
from stratarec.models.base import build_tables
from stratarec.planning.interactions import Matrix, Measure, feature_keys, measure
from stratarec.planning.tables import describe_tables
from stratarec.planning.tower_bounds import Item, TowerBounds, check_bounds, tied_items
from stratarec.planning.towers import Method, TowerPlan, partition
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.pipeline import InOrder, Stages
from stratarec.training.run import new_plan, open_run, temporary_model
from stratarec.training.settings import torch_settings

# Interactions are of so many samples, fewer where the training split has fewer.
_SAMPLES, _BATCHES = 1024, 8


@dataclass(frozen=True, kw_only=True)
class TowerRequest:
    """What towers are asked for."""

    towers: int
    method: Method = "coherent"
    measure: Measure = "mixed"
    """How strongly two features interact."""
    run: str = ""
    """Directory of the run whose model is asked; empty for a probe."""
    steps: int = 200
    """Of a probe."""
    balance: float = 1.5
    """As `TowerBounds.ratio`."""
    ranks: int = 1
    """Processes that share the tables, each with the budgets of the recipe."""

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 1_000_000:
            raise ConfigError(f"--steps is {self.steps}, expected 1 to 1000000")

    @property
    def source(self) -> str:
        """What interactions are measured of, in words."""
        measured = "mixed differences of the logit" if self.measure == "mixed" else "cosines of vectors"
        return f"interactions are {measured}, " + (
            f"in {self.run}" if self.run else f"in a probe of {self.steps} steps"
        )


def make_towers(
    recipe: Recipe, dataset: Dataset, request: TowerRequest, progress: Progress | None = None
) -> TowerPlan:  # fmt: skip
    """Towers for the features of a recipe, a function of recipe, data and request alone.

    Raises
    ------
    ConfigError
        When the bounds cannot be met, or the run named has towers itself.
    CheckpointError, DatasetError
        When the run named is none, or is of other data.
    """
    progress = progress or SilentProgress()
    items, bounds = _items(recipe, dataset), _bounds(recipe, request)
    check_bounds(items, bounds)
    with torch_settings(threads=recipe.train.threads, seed=recipe.train.seed):
        matrix = _interactions(recipe, dataset, request, progress)
    keys, names = matrix.keys, [name for item in items for name in item.features]
    order = [keys.index(name) for name in names]
    return partition(
        items, matrix.values[np.ix_(order, order)], bounds, request.method,
        batch_size=recipe.train.batch_size, seed=recipe.train.seed,
    )  # fmt: skip


@dataclass(frozen=True)
class _Measured:
    keys: tuple[str, ...]
    values: Matrix


def _items(recipe: Recipe, dataset: Dataset) -> list[Item]:
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    train = recipe.train
    return tied_items(dataset.schema, describe_tables(tables, dataset, train.embedding, batch_size=train.batch_size))


def _bounds(recipe: Recipe, request: TowerRequest) -> TowerBounds:
    dram = recipe.memory.dram
    ranks = max(request.ranks // request.towers, 1) if request.towers > 0 else 1
    return TowerBounds(
        towers=request.towers, ratio=request.balance, bytes=None if dram is None else dram * ranks
    )  # fmt: skip


def _interactions(recipe: Recipe, dataset: Dataset, request: TowerRequest, progress: Progress) -> _Measured:
    batches = _samples(recipe, dataset)
    with _model(recipe, dataset, request, progress) as model:
        return _Measured(feature_keys(model), measure(model, batches, request.measure))


def _samples(recipe: Recipe, dataset: Dataset) -> list[Batch]:
    """Some training samples, each with ids of its own."""
    config = LoaderConfig(batch_size=_SAMPLES, seed=recipe.train.seed, shuffle_row_groups=1, expand=True)
    batches = Loader(dataset, "train", config).batches(0)
    found = list(islice(batches, _BATCHES))
    batches.close()  # type: ignore[attr-defined]
    return found


@contextmanager
def _model(recipe: Recipe, dataset: Dataset, request: TowerRequest, progress: Progress) -> Iterator[CTRModel]:
    if request.run:
        with open_run(request.run, dataset.path, same_samples=False) as trained:
            if trained.recipe.model.towers is not None:
                raise ConfigError(
                    f"{request.run} was trained with towers, which hide how features of different ones interact: name "
                    "a run without model.towers, or none"
                )
            yield trained.model
        return
    bare = replace(recipe, model=replace(recipe.model, towers=None))
    with temporary_model(bare, dataset, new_plan(bare, dataset)) as model:
        _probe(bare, dataset, model, request.steps, progress)
        yield model


def _probe(recipe: Recipe, dataset: Dataset, model: CTRModel, steps: int, progress: Progress) -> None:
    """Train a model for some steps."""
    train = recipe.train
    config = LoaderConfig(
        batch_size=train.batch_size, seed=train.seed, shuffle_row_groups=train.shuffle_row_groups, unit=train.shuffle
    )
    stages = Stages(model, train.dense.build(model.network), train, InOrder(Loader(dataset, "train", config)))
    progress.start("probe", steps, "steps")
    try:
        for step, batch in enumerate(islice(_endless(stages), steps)):
            trained = stages.train(step, batch)
            progress.advance(1, f"loss {trained.loss:.4f}")
    finally:
        progress.finish()


def _endless(stages: Stages) -> Iterator[Batch]:
    for epoch in count():
        yield from stages.read(epoch, 0)
