"""`stratarec baseline`: what other methods make of the same prepared splits."""

from __future__ import annotations

import argparse

from stratarec.cli.arguments import Subcommand, add_recipe, say


def _options(command: argparse.ArgumentParser) -> None:
    add_recipe(command)


def baseline(args: argparse.Namespace) -> None:
    """Fit logistic regression and LightGBM on a recipe's prepared data."""
    from stratarec.data.dataset.dataset import Dataset
    from stratarec.recipe import Recipe
    from stratarec.reporting.progress_bar import make_progress
    from stratarec.training.baseline import baselines, beside
    from stratarec.training.run.run_directory import read_result

    recipe = Recipe.load(args.recipe, args.overrides)
    dataset = Dataset.open(recipe.data.path)
    found = baselines(dataset, make_progress(quiet=args.quiet), seed=recipe.train.seed)
    result = read_result(recipe.run)
    auc = None if result is None else (result.test or {}).get("auc")
    if auc is not None:
        say(f"{recipe.run}: AUC {auc:.4f}")
    for line in beside(found, auc):
        say(line)


COMMAND = Subcommand(
    name="baseline",
    text="Fit logistic regression and LightGBM on the same prepared splits, to compare with (needs stratarec[baseline]).",
    example="stratarec baseline clicks.yaml",
    options=_options,
    run=baseline,
)
