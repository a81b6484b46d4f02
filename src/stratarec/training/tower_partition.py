"""Partition the features of a recipe into towers by their interactions in a trained model.

The model is taken from a run, or it is a *probe*: the recipe's model without towers, which is trained for some steps,
measured and discarded. Interactions are measured on the validation split, because the model was not trained on it.
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
from stratarec.training.build import new_plan, temporary_model
from stratarec.training.resolve import in_numbers, run_steps
from stratarec.training.run.open_run import open_run
from stratarec.training.steps.step import Stages
from stratarec.training.torch_setup import build_optimizer, torch_settings


@dataclass(frozen=True, kw_only=True)
class TowerRequest:
    """Number of towers, and settings for measuring interactions."""

    towers: int
    run: str = ""
    """Directory of the run whose model is measured; empty for a probe."""
    steps: int | None = None
    """Number of steps of a probe. None means 200, or the steps of the recipe if these are fewer, because a model that
    has memorized its samples says little about its features."""
    balance: float = 1.5
    """Allowed ratio between a tower's number of features and the mean, as in `TowerBounds.ratio`."""
    ranks: int = 1
    """Number of processes that share the tables. The budgets of the recipe apply to each process."""

    def __post_init__(self) -> None:
        if self.steps is not None and not 1 <= self.steps <= 1_000_000:
            raise ConfigError(f"--steps is {self.steps}, expected 1 to 1000000")

    def on(self, recipe: Recipe, dataset: Dataset) -> TowerRequest:
        """Return a copy in which `steps` is set for a probe of this recipe."""
        if self.steps is not None:
            return self
        return replace(self, steps=min(200, run_steps(recipe.train, dataset)))

    @property
    def source(self) -> str:
        """Text that describes how interactions are measured. For a probe, `steps` must be set; `on` sets it."""
        asked = self.run or f"a probe of {self.steps} steps"
        return f"interaction: how much changing one feature alters the effect of the other on the logit, in {asked}"


def make_towers(
    recipe: Recipe, dataset: Dataset, request: TowerRequest, progress: Progress | None = None
) -> TowerPlan:  # fmt: skip
    """Partition the features of a recipe into towers. Equal recipes, data and requests give equal towers.

    Raises
    ------
    ConfigError
        If the bounds cannot be met, or the run was trained with towers.
    CheckpointError, DatasetError
        If the run does not exist, or was trained on other data.
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
    """Return the items to partition. Features that cannot be in different towers form one item (`tied_items`)."""
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    train = recipe.train
    return tied_items(dataset.schema, describe_tables(tables, dataset, train.embedding, batch_size=train.batch_size))


def bounds_of(recipe: Recipe, request: TowerRequest) -> TowerBounds:
    """Return the limits of each tower, from a recipe and a request."""
    ranks = max(request.ranks // request.towers, 1) if request.towers > 0 else 1
    return TowerBounds(towers=request.towers, ratio=request.balance, dram=recipe.memory.dram, ranks=ranks)


# Size and maximum number of the batches on which interactions are measured.
_SAMPLES, _BATCHES = 1024, 8


def samples(recipe: Recipe, dataset: Dataset) -> list[Batch]:
    """Return batches without groups from the validation split, or from the training split if there is no other."""
    config = LoaderConfig(batch_size=_SAMPLES, seed=recipe.train.seed, shuffle_row_groups=1, expand=True)
    split = "valid" if "valid" in dataset.splits and dataset.samples("valid") else "train"
    batches = Loader(dataset, split, config).batches(0)
    first = list(islice(batches, _BATCHES))
    batches.close()  # type: ignore[attr-defined]
    return first


@contextmanager
def interaction_model(recipe: Recipe, dataset: Dataset, run: str, steps: int, progress: Progress) -> Iterator[CTRModel]:
    """Yield the model of a run, or, if `run` is empty, a probe that is trained for `steps` steps."""
    if run:
        with open_run(run, dataset.path, same_samples=False) as trained:
            if trained.recipe.model.towers is not None:
                raise ConfigError(
                    f"{run} was trained with towers, so interactions between towers cannot be measured: name "
                    "a run without model.towers, or none"
                )
            yield trained.model
        return
    bare = in_numbers(replace(recipe, model=replace(recipe.model, towers=None)), dataset, steps)
    with temporary_model(bare, dataset, new_plan(bare, dataset)) as model:
        _probe(bare, dataset, model, steps, progress)
        yield model


def _probe(recipe: Recipe, dataset: Dataset, model: CTRModel, steps: int, progress: Progress) -> None:
    """Train `model`, a probe, for `steps` steps."""
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
