"""A model to ask about its features, and samples to ask about: of a run, or of a probe.

A probe trains the recipe's model without towers for some steps and leaves nothing behind: no run, no checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice

from stratarec.batch import Batch
from stratarec.data.dataset import Dataset
from stratarec.data.loader import Loader, LoaderConfig
from stratarec.errors import ConfigError
from stratarec.models import CTRModel
from stratarec.progress import Progress
from stratarec.recipe import Recipe
from stratarec.training.pipeline import InOrder, Stages
from stratarec.training.run import new_plan, open_run, temporary_model

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
def asked_model(recipe: Recipe, dataset: Dataset, run: str, steps: int, progress: Progress) -> Iterator[CTRModel]:
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
    bare = replace(recipe, model=replace(recipe.model, towers=None), train=recipe.train.of_run(steps))
    with temporary_model(bare, dataset, new_plan(bare, dataset)) as model:
        _probe(bare, dataset, model, steps, progress)
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
