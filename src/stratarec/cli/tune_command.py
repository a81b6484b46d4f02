"""`stratarec tune`: many trainings of a recipe, and its best values by validation."""

from __future__ import annotations

import argparse
from pathlib import Path

from stratarec.cli.arguments import Subcommand, add_json, add_recipe, progress_of, say, say_json, whole_number
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
        help="what is searched: uniform(low,high), log(low,high) or choice(a,b,...); or a YAML file of such lines",
    )
    command.add_argument(
        "--trials",
        type=whole_number("trials", _MOST_TRIALS),
        default=20,
        metavar="N",
        help="in all, earlier ones too (default: 20)",
    )
    command.add_argument("-o", "--output", metavar="DIR", help="of the study (default: studies/<name of the recipe>)")


def tune(args: argparse.Namespace) -> None:
    """Many trainings of a recipe, and its best values by validation."""
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
        raise ConfigError(
            f"tune needs optuna, which is not installed ({error}): pip install 'stratarec[tune]'"
        ) from error
    device_of(recipe.train.device)  # before trials are counted that could not be trained
    folder = Path(args.output or Path("studies") / recipe.place)
    best = run(content, space, folder, args.trials, progress_of(args), args.recipe)
    if args.json:
        say_json(
            {
                "values": dict(best.values),
                "metric": best.metric,
                "value": best.value,
                "run": str(best.run),
                "recipe": str(best.recipe),
            }
        )
        return
    for field, value in best.values.items():
        say(f"{field}={value}")
    say(f"validation {METRICS[best.metric].label} {best.value:.6f}, of {best.run}")
    say(f"report {best.recipe.with_name('report.html')}")
    say(f"wrote {best.recipe}; to train and test it: stratarec train {shell_word(best.recipe)}")


COMMAND = Subcommand(
    name="tune",
    text="Search values of a recipe's fields by validation alone (needs stratarec[tune]): each trial is a training "
    "that is not tested. What was stopped goes on by the same command.",
    example="stratarec tune r.yaml --space 'train.dense.learning_rate=log(1e-4, 1e-2)'",
    options=_options,
    run=tune,
)
