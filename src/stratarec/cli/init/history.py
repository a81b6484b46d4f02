"""Decide whether a drafted recipe has a history of each user: by a rule, and for small logs by
validation.

The rule requires enough positive rows per user, and enough per value of the feature: if most values
are seen only a few times, a model cannot learn what they predict. A history that passes the rule
can still make the model worse. If the log is small enough for two short trainings, the history is
kept only if it lowers the validation log loss by more than two standard errors. `docs/log.md` has
the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from stratarec.cli.init.guess import Guesses, HistoryChoice
from stratarec.cli.init.sample import LogSample, growth
from stratarec.errors import DatasetError, Interrupted, StrataError
from stratarec.io.scratch import temporary_directory

# Minimum average number of positive rows per user, and per value.
_USER_ROWS, _VALUE_ROWS = 3.0, 10.0
# Maximum number of rows of a log for two short trainings, which then take up to a minute on two
# cores.
_MOST_ROWS = 200_000
# A short training has four networks and no trees, and ends at the second worse epoch. With networks
# that drop fields instead of plain ones, it did not find a history that helps
# (`tests/cli/init/test_histories.py`). It uses the learning rates of the run: with one epoch at a
# rate that falls to 0, a history helped in the short training, not in the run.
_SHORT = {
    "train.early_stopping.patience": 2, "model.members": 4, "model.member_kinds": ["plain", "dropout"],
    "model.trees": 0, "train.report": False, "train.curves": [], "train.refit": False,
}  # fmt: skip


def choose_history(guesses: Guesses, sample: LogSample, positive: pl.Series) -> HistoryChoice | None:
    """Return the choice that the rule makes; None if the log lacks the users, times or items that a
    history needs.
    """
    item, users = guesses.item, guesses.of("user")
    if item is None or not users or not guesses.of("time"):
        return None
    if f"{item.name}_history" in sample.frame.columns:
        return None
    clicks = float(positive.mean() or 0.0) * sample.total  # type: ignore[arg-type]
    by_user = clicks / max(growth(sample.frame[users[0].name], sample.frame.height, sample.total), 1)
    by_value = clicks / max(item.values, 1)
    counts = f"{by_user:.1f} positive rows per user, {by_value:.1f} per value"
    if by_user < _USER_ROWS or by_value < _VALUE_ROWS:
        return HistoryChoice(
            item.name, False, f"{counts}; a history needs {_USER_ROWS:g} and {_VALUE_ROWS:g}"
        )
    return HistoryChoice(item.name, True, f"earlier choices of the user; {counts}")


def validate_history(
    choice: HistoryChoice, sample: LogSample, content: Mapping[str, Any], say: Callable[[str], None]
) -> HistoryChoice:
    """Return the choice after two short trainings with and without the history, if the log is small
    enough.

    Parameters
    ----------
    content : mapping
        The drafted recipe with the history.
    say : callable
        Receives a line before the trainings.
    """
    if not choice.drafted or sample.total > _MOST_ROWS or content["model"]["kind"] != "ensemble":
        return choice
    # Imported here, because a recipe imports torch, which takes seconds.
    from stratarec.recipe import with_values

    say(f"two short trainings show whether {choice.name} helps ...")
    try:
        with temporary_directory() as folder:
            having = _losses(content, folder / "with")
            source = content["data"]["source"]
            sparse = [feature for feature in source["schema"]["sparse"] if feature["name"] != choice.name]
            bare = with_values(content, {"data.source.schema": {**source["schema"], "sparse": sparse}})
            joined = having.join(_losses(bare, folder / "without"), on="row", suffix="_without")
    except Interrupted as error:
        raise Interrupted(
            "stopped; nothing was written; run the same command again", error.signal
        ) from error
    except StrataError as error:
        return choice._replace(reason=f"{choice.reason}; not tested: {error}")
    # Gains are summed by user, because the losses of a user's samples are correlated.
    by_user = (
        joined.group_by("user").agg(gain=(pl.col("loss_without") - pl.col("loss")).sum())["gain"].to_numpy()
    )
    having_it, lacking_it = (joined[name].to_numpy().mean() for name in ("loss", "loss_without"))
    means = f"{having_it:.4f} with it, {lacking_it:.4f} without it"
    is_better = bool(by_user.sum() > 2 * np.sqrt((by_user**2).sum()))
    return choice._replace(
        drafted=is_better, reason=f"in two short trainings the validation log loss is {means}"
    )


def _losses(content: Mapping[str, Any], folder: Path) -> pl.DataFrame:
    """Train a recipe below `folder`, and return row, user and log loss of each validation
    sample.
    """
    from stratarec.data.prepare.prepare import prepare
    from stratarec.models.metrics import Samples
    from stratarec.progress import SilentProgress
    from stratarec.recipe import Recipe, leaves, with_values
    from stratarec.training.evaluate import score_split
    from stratarec.training.run.open_run import open_run
    from stratarec.training.trainer import Trainer

    places = {"data.path": str(folder / "data"), "train.run": str(folder / "run")}
    short = with_values(content, {**places, **_SHORT})
    recipe, silent = Recipe.from_dict(short), SilentProgress()
    dataset = prepare(recipe.data, progress=silent)
    if not dataset.samples("valid"):
        raise DatasetError("the log has no validation split")
    Trainer(recipe, dataset, silent, named=leaves(short)).train()
    with open_run(recipe.run) as trained:
        scored = score_split(trained.model, dataset, "valid", precision="float32", progress=silent)
    weight = scored.weight if len(scored.weight) else 1.0
    return pl.DataFrame(
        {
            "row": np.concatenate(list(dataset.row_numbers("valid"))),
            "user": scored.user,
            "loss": Samples(scored.label, scored.logit).losses * weight,
        }
    )
