"""`stratarec tune`: search hyperparameters of a recipe by validation."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratarec.cli.arguments import (
    add_json,
    add_recipe,
    print_json,
    print_lines,
    progress_of,
    subcommand,
    whole_number,
)
from stratarec.errors import ConfigError
from stratarec.io.names import shell_word

_MOST_TRIALS = 100_000


def _options(command: argparse.ArgumentParser) -> None:
    add_recipe(command)
    add_json(command)
    command.add_argument(
        "--space",
        nargs="+",
        action="extend",
        required=True,
        metavar="FIELD=VALUES",
        help="search space of a recipe field: uniform(low,high), log(low,high) or choice(a,b,...); or a "
        "YAML file with such lines",
    )
    command.add_argument(
        "--trials",
        type=whole_number("trials", _MOST_TRIALS),
        default=20,
        metavar="N",
        help="total number of trials, including completed ones (default: 20)",
    )
    command.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="directory of the study (default: studies/NAME, the name of the recipe)",
    )


@subcommand(
    name="tune",
    text="Search hyperparameters of a recipe by validation (needs stratarec[tune]). Each trial trains a "
    "model and never uses the test split. Run the same command again to resume.",
    example="stratarec tune r.yaml --space 'train.dense.learning_rate=log(1e-4, 1e-2)'",
    options=_options,
    resumable=True,
)
def tune(args: argparse.Namespace) -> None:
    """Search hyperparameters of a recipe by validation."""
    from stratarec.cli.tune.space import Space
    from stratarec.models.metrics import METRICS
    from stratarec.recipe import Recipe, read_content
    from stratarec.training.torch_setup import device_of

    content = read_content(args.recipe, args.overrides)
    recipe = Recipe.from_dict(content, args.recipe)
    space = Space.read(args.space, content, args.recipe)
    try:
        from stratarec.cli.tune.study import tune as run
    except ImportError as error:
        raise ConfigError(f"tune needs optuna ({error}): pip install 'stratarec[tune]'") from error
    device_of(recipe.train.device)  # refuse a missing device before a trial is counted
    folder = Path(args.output or Path("studies") / recipe.place)
    best = run(content, space, folder, args.trials, progress_of(args), args.recipe)
    if args.json:
        print_json(
            {
                "values": dict(best.values),
                "metric": best.metric,
                "value": best.value,
                "run": str(best.run),
                "recipe": str(best.recipe),
            }
        )
        return
    print_lines(
        *(f"{field}={value}" for field, value in best.values.items()),
        f"validation {METRICS[best.metric].label} {best.value:.6f} in {best.run}",
        f"trials {best.recipe.with_name('trials.csv')}",
        f"wrote {best.recipe}; to train and test it: stratarec train {shell_word(best.recipe)}",
    )
