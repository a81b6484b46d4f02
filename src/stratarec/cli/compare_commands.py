"""`stratarec compare` and `stratarec baseline`: compare runs with each other, and with simpler
methods.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from stratarec.cli.arguments import (
    add_json,
    add_recipe,
    print_findings,
    print_json,
    print_lines,
    progress_of,
    subcommand,
)

if TYPE_CHECKING:
    from stratarec.data.dataset.dataset import Dataset
    from stratarec.progress import Progress
    from stratarec.recipe import Recipe
    from stratarec.training.evaluate import ScoredSamples


def _compare_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "runs", nargs="+", metavar="run", help="directories of runs, as written by `train`"
    )
    add_json(command)


@subcommand(
    name="compare",
    text="Compare runs: metrics, steps, time, memory, and the recipe fields in which they differ.",
    example="stratarec compare runs/small runs/large",
    options=_compare_options,
)
def compare(args: argparse.Namespace) -> None:
    """Show runs side by side."""
    from stratarec.reporting.compare_tables import print_comparison
    from stratarec.training.compare import RunComparison

    comparison = RunComparison.read(args.runs).to_dict()
    if args.json:
        print_json(comparison)
    else:
        print_comparison(comparison)


@subcommand(
    name="baseline",
    text="Fit logistic regression and LightGBM on the prepared splits of a recipe, as a baseline for "
    "models (needs "
    "stratarec[baseline]). Reports of runs on this data set show the comparison. Data larger "
    "than 2 GiB is subsampled.",
    example="stratarec baseline clicks.yaml",
    options=add_recipe,
)
def baseline(args: argparse.Namespace) -> None:
    """Fit logistic regression and LightGBM on the prepared data of a recipe."""
    from stratarec.data.dataset.compatibility import check_prepared
    from stratarec.data.dataset.dataset import Dataset
    from stratarec.models.metrics import Samples
    from stratarec.recipe import Recipe
    from stratarec.training.baseline.baselines import compare_with_baselines
    from stratarec.training.baseline.fit_methods import check_installed, fit_methods

    check_installed()
    recipe, progress = Recipe.load(args.recipe, args.overrides), progress_of(args)
    dataset = Dataset.open(recipe.data.path)
    if warning := check_prepared(recipe.data, dataset):
        progress.say(warning)
    fit_methods(dataset, progress, seed=recipe.train.seed, threads=recipe.train.threads)
    split = "test" if dataset.samples("test") else "valid"
    scored = _scored(recipe, dataset, split, progress)
    if scored is not None:
        samples = Samples(scored.label, scored.logit, weight=scored.weight if len(scored.weight) else None)
        print_lines(f"{recipe.run}: {split} AUC {samples.auc:.4f}, log loss {samples.log_loss:.4f}")
    print_findings("baselines", compare_with_baselines(dataset, split, scored, recipe.model))
    print_lines(*dataset.suspicions)
    print_lines(f"wrote {dataset.path / 'baseline.json'}; `train` and `evaluate` compare models with it")


def _scored(recipe: Recipe, dataset: Dataset, split: str, progress: Progress) -> ScoredSamples | None:
    """Return a split with the scores of the recipe's run; None if there is no finished run on the
    same data.
    """
    from stratarec.training import checkpoint
    from stratarec.training.evaluate import score_split
    from stratarec.training.run import periods
    from stratarec.training.run.open_run import open_run
    from stratarec.training.run.run_directory import read_result

    result = read_result(recipe.run)
    if result is None or periods.latest(recipe.run):
        return None
    tested = checkpoint.read_state(result.tested(recipe.run))["identity"]["dataset"]
    if tested != dataset.fingerprint:
        return None
    with open_run(recipe.run, dataset.path, tested=True) as trained:
        return score_split(
            trained.model,
            trained.dataset,
            split,
            precision=trained.recipe.train.precision,
            progress=progress,
        )
