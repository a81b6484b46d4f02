"""The loader of a run whose hot inputs have batches of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import LoaderConfig
from stratarec.errors import ConfigError, StorageError
from stratarec.hot.hot_loader import HotLoader, beside, classify, rate_after, validation_losses
from stratarec.io.atomic import check_output
from stratarec.planning.hot_rows import hot_rows
from stratarec.planning.plan import Plan
from stratarec.progress import Progress
from stratarec.recipe import Recipe


def hot_loader(
    recipe: Recipe,
    dataset: Dataset,
    config: LoaderConfig,
    plan: Plan | None,
    evaluations: Callable[[], list[dict[str, object]]],
    progress: Progress,
) -> HotLoader:
    """Count the hot inputs of the training split, unless counts of these very rows are kept, and make the loader.

    Parameters
    ----------
    plan : Plan
        With the hot rows.
    evaluations : callable
        Those of the run so far.

    Raises
    ------
    ConfigError
        Where the plan has no hot rows, or the recipe asks for what cannot be with hot batches.
    """
    if plan is None or not any(placed.hot_rows for placed in plan.tables):
        raise ConfigError("hot.budget is set, and the plan has no hot rows: plan again with it, or set it to null")
    if recipe.hot.batches == "adaptive" and not dataset.samples("valid"):
        raise ConfigError(
            "hot.batches is adaptive and follows the validation loss, and there is no validation split; set "
            "data.split.valid, or hot.batches to proportional"
        )
    parts, hot = hot_rows(plan, dataset)
    counted = classify(dataset, parts, hot, "train", _place(dataset), progress)
    loader: HotLoader

    def rate(epoch: int) -> float | None:
        if recipe.hot.batches == "proportional":
            return None
        return rate_after(validation_losses(evaluations(), epoch * len(loader)))

    loader = HotLoader(dataset, "train", config, parts, hot, counted.shards, rate)
    samples = dataset.samples("train")
    progress.say(
        f"{loader.hot_samples:,} of {samples:,} inputs are hot, {loader.hot_samples / samples:.2%}: "
        f"{int(loader.kinds(0).sum()):,} of {len(loader):,} batches"
    )
    return loader


def _place(dataset: Dataset) -> Path | None:
    """Where counts are kept; None where nothing can be written beside the data."""
    place = beside(dataset, "train")
    try:
        check_output(place)
    except StorageError:
        return None
    return place
