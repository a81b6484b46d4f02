"""Partition the features of a recipe into towers by their interactions.

Interactions are measured by an online probe (`planning.interaction`) in at most one pass over the
training split. Every sample is measured before the probe learns from it, so no sample is set aside.
Measurements begin again each time the number of samples has doubled, because the first ones are of
a probe that has learned little. The probe ends early if the interactions of two halves of the
samples agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.errors import ConfigError
from stratarec.models.base import build_tables
from stratarec.planning.candidates import describe_tables
from stratarec.planning.interaction import InteractionProbe, Matrix, rank_correlation
from stratarec.planning.towers import Item, TowerBounds, TowerPlan, check_bounds, partition, tied_items
from stratarec.progress import Progress, SilentProgress
from stratarec.recipe import Recipe

# Largest number of terms of pairs, one for each pair in each sample: about a minute of one core.
_MOST_TERMS = 1 << 29
# Parts of the steps in which pairs do not take part yet, and after which the halves are compared.
_VALUES_ONLY, _CHECKS = 1 / 16, (1 / 4, 1 / 2, 1)
# Rank correlation of the halves above which more samples do not change the towers.
_STABLE = 0.9


@dataclass(frozen=True, kw_only=True)
class TowerRequest:
    """Number of towers, and settings for measuring interactions."""

    towers: int
    steps: int | None = None
    """Largest number of batches for the probe. None means one pass over the training split, or
    fewer batches if there are so many samples and pairs of features that a pass would take
    minutes."""
    balance: float = 1.5
    """Allowed ratio between a tower's number of features and the mean, as in
    `TowerBounds.ratio`.
    """
    ranks: int = 1
    """Number of processes that share the tables. The budgets of the recipe apply to each
    process.
    """

    def __post_init__(self) -> None:
        if self.steps is not None and not 1 <= self.steps <= 1_000_000:
            raise ConfigError(f"--steps is {self.steps}, expected 1 to 1000000")

    def on(self, recipe: Recipe, dataset: Dataset) -> TowerRequest:
        """Return a copy in which `steps` is set for this recipe, at most the batches of one
        pass.
        """
        batch, features = recipe.train.batch_size, len(dataset.schema.sparse)
        terms = batch * max(features * (features - 1) // 2, 1)
        steps = self.steps or max(_MOST_TERMS // terms, 1)
        return replace(self, steps=min(steps, max(-(-dataset.samples("train") // batch), 1)))


def make_towers(
    recipe: Recipe, dataset: Dataset, request: TowerRequest, progress: Progress | None = None
) -> TowerPlan:
    """Partition the features of a recipe into towers. Equal recipes, data and requests give equal
    towers.

    Raises
    ------
    ConfigError
        If the bounds cannot be met.
    TrainingError
        If the loss of the probe is not finite.
    """
    progress, request = progress or SilentProgress(), request.on(recipe, dataset)
    items, bounds = items_of(recipe, dataset), bounds_of(recipe, request)
    check_bounds(items, bounds)
    assert request.steps is not None
    features = [name for item in items for name in item.features]
    halves, samples = _measure(recipe, dataset, features, request.steps, progress)
    return partition(
        items, halves, bounds, batch_size=recipe.train.batch_size, samples=samples, seed=recipe.train.seed
    )


def _measure(
    recipe: Recipe, dataset: Dataset, features: list[str], steps: int, progress: Progress
) -> tuple[tuple[Matrix, Matrix], int]:
    """Return the interactions of `features` in two halves of the measured samples, and the number
    of these samples.
    """
    train, probe = recipe.train, InteractionProbe(features, len(dataset.schema.dense))
    config = LoaderConfig(
        batch_size=train.batch_size,
        seed=train.seed,
        shuffle_row_groups=train.shuffle_row_groups,
        expand=True,
    )
    checks = {max(int(part * steps), 1) for part in _CHECKS}
    batches = Loader(dataset, "train", config).batches(0)
    progress.start("probe", steps, "steps")
    try:
        for step, batch in enumerate(islice(batches, steps), 1):
            loss = probe.learn(batch, pairs=step > steps * _VALUES_ONLY)
            progress.advance(1, f"loss {loss:.4f}")
            if step in checks and step < steps:
                if rank_correlation(*probe.halves()) >= _STABLE:
                    break
                probe.restart()
    finally:
        batches.close()  # type: ignore[attr-defined]
        progress.finish()
    return probe.halves(), probe.samples


def items_of(recipe: Recipe, dataset: Dataset) -> list[Item]:
    """Return the items to partition. Features that cannot be in different towers form one item
    (`tied_items`).
    """
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    train = recipe.train
    return tied_items(
        dataset.schema, describe_tables(tables, dataset, train.embedding, batch_size=train.batch_size)
    )


def bounds_of(recipe: Recipe, request: TowerRequest) -> TowerBounds:
    """Return the limits of each tower, from a recipe and a request."""
    ranks = max(request.ranks // request.towers, 1) if request.towers > 0 else 1
    return TowerBounds(towers=request.towers, ratio=request.balance, dram=recipe.memory.dram, ranks=ranks)
