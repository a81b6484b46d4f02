"""Towers for a recipe: its features' interactions, from a run or a short probe, and the partition by them.

A probe trains the recipe's model without towers for some steps and leaves nothing behind: no run, no checkpoint. It is
asked about samples of the validation split, which it does not know by heart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count, islice

import numpy as np

from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.errors import ConfigError
from stratarec.models import CTRModel
from stratarec.models.base import build_tables
from stratarec.planning.candidates import describe_tables
from stratarec.planning.interaction import feature_keys, measure
from stratarec.planning.towers import Item, TowerBounds, TowerPlan, check_bounds, partition, tied_items
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.build import new_plan, of_data, run_steps, temporary_model
from stratarec.training.run.open_run import open_run
from stratarec.training.steps.step import Stages
from stratarec.training.torch_setup import build_optimizer, torch_settings


@dataclass(frozen=True, kw_only=True)
class TowerRequest:
    """What towers are asked for."""

    towers: int
    run: str = ""
    """Directory of the run whose model is asked; empty for a probe."""
    steps: int | None = None
    """Of a probe; None for 200, or as many as a run by the recipe has where these are fewer: a model that knows its
    samples by heart tells little of its features."""
    balance: float = 1.5
    """As `TowerBounds.ratio`."""
    ranks: int = 1
    """Processes that share the tables, each with the budgets of the recipe."""

    def __post_init__(self) -> None:
        if self.steps is not None and not 1 <= self.steps <= 1_000_000:
            raise ConfigError(f"--steps is {self.steps}, expected 1 to 1000000")

    def on(self, recipe: Recipe, dataset: Dataset) -> TowerRequest:
        """The same with the steps that a probe of this recipe has."""
        if self.steps is not None:
            return self
        return replace(self, steps=min(200, run_steps(recipe.train, dataset)))

    @property
    def source(self) -> str:
        """What interactions are measured of, in words; of a request for a recipe, see `on`."""
        asked = self.run or f"a probe of {self.steps} steps"
        return f"interactions are mixed differences of the logit, in {asked}"


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
    progress, request = progress or SilentProgress(), request.on(recipe, dataset)
    items, bounds = items_of(recipe, dataset), bounds_of(recipe, request)
    check_bounds(items, bounds)
    assert request.steps is not None
    with torch_settings(threads=recipe.train.threads, seed=recipe.train.seed):
        batches = samples(recipe, dataset)
        with interaction_model(recipe, dataset, request.run, request.steps, progress) as model:
            keys, matrix = feature_keys(model), measure(model, batches)
    order = [keys.index(name) for item in items for name in item.features]
    return partition(
        items, matrix[np.ix_(order, order)], bounds, batch_size=recipe.train.batch_size, seed=recipe.train.seed
    )


def items_of(recipe: Recipe, dataset: Dataset) -> list[Item]:
    """What the towers of a recipe are made of."""
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    train = recipe.train
    return tied_items(dataset.schema, describe_tables(tables, dataset, train.embedding, batch_size=train.batch_size))


def bounds_of(recipe: Recipe, request: TowerRequest) -> TowerBounds:
    """Return the limits of each tower."""
    ranks = max(request.ranks // request.towers, 1) if request.towers > 0 else 1
    return TowerBounds(towers=request.towers, ratio=request.balance, dram=recipe.memory.dram, ranks=ranks)


# Interactions are of so many samples, fewer where the split has fewer.
_SAMPLES, _BATCHES = 1024, 8


def samples(recipe: Recipe, dataset: Dataset) -> list[Batch]:
    """Some samples, each with ids of its own: of the validation split, which no model knows by heart, or without one
    of the training split.
    """
    config = LoaderConfig(batch_size=_SAMPLES, seed=recipe.train.seed, shuffle_row_groups=1, expand=True)
    split = "valid" if "valid" in dataset.splits and dataset.samples("valid") else "train"
    batches = Loader(dataset, split, config).batches(0)
    found = list(islice(batches, _BATCHES))
    batches.close()  # type: ignore[attr-defined]
    return found


@contextmanager
def interaction_model(recipe: Recipe, dataset: Dataset, run: str, steps: int, progress: Progress) -> Iterator[CTRModel]:
    """The model of a run, or without one of a probe of so many steps."""
    if run:
        with open_run(run, dataset.path, same_samples=False) as trained:
            if trained.recipe.model.towers is not None:
                raise ConfigError(
                    f"{run} was trained with towers, which hide how features of different ones interact: name "
                    "a run without model.towers, or none"
                )
            yield trained.model
        return
    bare = of_data(replace(recipe, model=replace(recipe.model, towers=None)), dataset, steps)
    with temporary_model(bare, dataset, new_plan(bare, dataset)) as model:
        _probe(bare, dataset, model, steps, progress)
        yield model


def _probe(recipe: Recipe, dataset: Dataset, model: CTRModel, steps: int, progress: Progress) -> None:
    """Train a model for some steps."""
    train = recipe.train
    config = LoaderConfig(
        batch_size=train.batch_size, seed=train.seed, shuffle_row_groups=train.shuffle_row_groups, unit=train.shuffle
    )
    stages = Stages(model, build_optimizer(train.dense, model.network), train, Loader(dataset, "train", config))
    progress.start("probe", steps, "steps")
    try:
        endless = chain.from_iterable(stages.read(epoch, 0) for epoch in count())
        for step, batch in enumerate(islice(endless, steps)):
            trained = stages.train(step, batch)
            progress.advance(1, f"loss {trained.loss:.4f}")
    finally:
        progress.finish()
