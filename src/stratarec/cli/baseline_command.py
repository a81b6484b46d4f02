"""`stratarec baseline`: what other methods make of the same prepared splits."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from stratarec.cli.arguments import Subcommand, add_recipe, progress_of, say

if TYPE_CHECKING:
    from stratarec.data.dataset.dataset import Dataset
    from stratarec.recipe import Recipe


def baseline(args: argparse.Namespace) -> None:
    """Fit logistic regression and LightGBM on a recipe's prepared data."""
    from stratarec.data.dataset.compatibility import check_prepared
    from stratarec.data.dataset.dataset import Dataset
    from stratarec.recipe import Recipe
    from stratarec.training.baseline.beside import beside
    from stratarec.training.baseline.fit_methods import check_installed, fit_methods

    check_installed()
    recipe, progress = Recipe.load(args.recipe, args.overrides), progress_of(args)
    dataset = Dataset.open(recipe.data.path)
    uncompared = check_prepared(recipe.data, dataset)
    if uncompared:
        progress.say(uncompared)
    fit_methods(dataset, progress, seed=recipe.train.seed, threads=recipe.train.threads)
    split = "test" if dataset.samples("test") else "valid"
    figures = _of_run(recipe, dataset) if split == "test" else None
    if figures is not None:
        say(f"{recipe.run}: test AUC {figures['auc']:.4f}, log loss {figures['log_loss']:.4f}")
    say(*beside(dataset, split, figures), *dataset.suspicions)
    say(f"wrote {dataset.path / 'baseline.json'}; `train` and `evaluate` tell it beside a model's own figures")


def _of_run(recipe: Recipe, dataset: Dataset) -> dict[str, Any] | None:
    """What the recipe's run had in the test of the same data; None where it has not ended."""
    from stratarec.training import checkpoint
    from stratarec.training.run.run_directory import read_result

    result = read_result(recipe.run)
    if result is None or result.test is None or result.test["auc"] is None:
        return None
    tested = checkpoint.read_state(recipe.run / "checkpoints" / result.checkpoint)["identity"]["dataset"]
    return dict(result.test) if tested == dataset.fingerprint else None


COMMAND = Subcommand(
    name="baseline",
    text="Fit logistic regression and LightGBM on a recipe's prepared splits, to compare models with (needs "
    "stratarec[baseline]). Reports of runs on these data tell it. What 2 GiB do not hold is sampled.",
    example="stratarec baseline clicks.yaml",
    options=add_recipe,
    run=baseline,
)
