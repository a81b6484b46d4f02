"""Resolve a recipe against its data set: fill in the values it leaves out, and check what the data set must provide.

Defaults depend on the number of training samples and on the model (its `default_overrides`). Batches grow with the
data, to twice their size for ten times as many samples: small data need steps, large data need speed. One pass is best,
because rows that are seen a second time are memorized; only with a few thousand samples a second pass helps, because
the network has learned little by then. After one pass the learning rate is still high, so the network is used with the
average of its weights over the last third of the steps. `docs/log.md` has the measurements. A value that the recipe
names is never changed, and does not change other values: with ``train.epochs=20`` a run is the run without it,
continued. Ensembles have their own rates, decay, members, and several passes; the more columns a log has, the smaller
are the members, as the time of a step is proportional to the weights, and the lower are the rates: a step of Adam
changes every weight by the rate, and a logit by the sum over all columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.row_group import SlateKey
from stratarec.distributed.mesh import Mesh
from stratarec.errors import CheckpointError, ConfigError
from stratarec.models.metrics import METRICS
from stratarec.models.registry import score_of
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe, leaves, with_values
from stratarec.recipe.train_section import TrainConfig
from stratarec.training import checkpoint
from stratarec.training.run.run_directory import read_recipe
from stratarec.training.steps.state import TrainingState
from stratarec.training.torch_setup import bf16_slowness

# Products in bf16 pay where they take less time; noise does not double a ratio.
_SLOW_BF16 = 2.0


def check_validation(config: TrainConfig, dataset: Dataset) -> None:
    """Refuse to heed, or to be calibrated by, a validation split that cannot tell better from worse."""
    _check_calibration(config, dataset)
    samples, first = dataset.samples("valid"), dataset.label_counts("valid")[dataset.schema.label_column]
    for name, asked in (("early_stopping", config.early_stopping), ("plateau", config.plateau)):
        known = first.known and (not METRICS[asked.metric].of_both_classes or 0 < first.positives < first.known)
        if asked.patience and METRICS[asked.metric].of_users and not dataset.schema.session_keys:
            raise ConfigError(
                f"train.{name}.metric is {asked.metric}, which is of each user's samples, but {dataset.path} has "
                "neither users nor sessions: name schema.user and prepare again, or choose another metric"
            )
        if asked.patience and not known:
            what = "samples of one class alone in its validation split" if samples else "no validation split"
            raise ConfigError(
                f"train.{name}.patience is {asked.patience}, but {dataset.path} has {what}: set data.split.valid and "
                "prepare again, or set patience to 0"
            )


def check_average(config: TrainConfig, mesh: Mesh) -> None:
    """Refuse an average of weights that no rank has all of."""
    if config.average.decay and mesh.between is not None:
        raise ConfigError(
            f"train.average.decay is {config.average.decay}, but each host trains a tower of its own: set it to 0, or "
            "distributed.exchange to flat"
        )


@dataclass(frozen=True, kw_only=True)
class Slates:
    """What the loss of a run is of."""

    by: SlateKey
    description: str


def find_slates(recipe: Recipe, dataset: Dataset, ranks: int) -> Slates | None:
    """The slates of a loss of slates, of which all training samples are counted; None for one of single samples.

    Raises
    ------
    ConfigError
        Where samples are of no such slates, or slates cannot be kept whole.
    """
    loss, schema = recipe.train.loss, dataset.schema
    if not loss.by:
        return None
    keys: dict[str, SlateKey] = {"user": "user", schema.user: "user", "session": "session", schema.session: "session"}
    by, where = keys.get(loss.by), f"train.loss.by is {loss.by}"
    if by is None or not getattr(schema, by):
        raise ConfigError(
            f"{where}, and samples are kept together by schema.session and schema.user alone: name the column of "
            "slates in schema.session and prepare again"
        )
    if by == "user" and schema.shard_key != schema.user:
        raise ConfigError(
            f"{where}, and without histories samples are kept together by schema.session, {schema.session}: name that, "
            "or leave out schema.session and prepare again"
        )
    if ranks > 1 or recipe.hot.separate_batches:
        cut = "ranks share batches: train in one process" if ranks > 1 else "hot.batches deals samples: set it to none"
        raise ConfigError(f"train.loss.kind is {loss.kind}, which needs whole slates in a batch, and {cut}")
    return Slates(by=by, description=_counted(recipe.train, dataset, by))


def _counted(train: TrainConfig, dataset: Dataset, by: SlateKey) -> str:
    """How many slates there are, and how many of them teach nothing."""
    slates = silent = single = largest = 0
    for label, starts in dataset.slates("train", by):
        sizes, clicks = np.diff(starts, append=len(label)), np.add.reduceat(label.astype(np.int64), starts)
        slates, largest = slates + len(sizes), max(largest, int(sizes.max()))
        single += int((sizes == 1).sum())
        silent += int(((sizes > 1) & ((clicks == 0) | (clicks == sizes))).sum())
    if largest > train.batch_size:
        raise ConfigError(
            f"train.batch_size is {train.batch_size}, and a slate (train.loss.by {train.loss.by}) has {largest} "
            "samples: make batches that large, or slates by another column"
        )
    if silent + single == slates:
        raise ConfigError(
            f"train.loss.by is {train.loss.by}: of {slates:,} slates none has both a click and a sample without one: "
            "nothing would be trained"
        )
    level = "" if train.calibration != "none" else "; scores have no level: train.calibration makes them probabilities"
    return (
        f"train.loss {train.loss.kind}: {slates:,} slates, of which {silent:,} without a click or of clicks alone, and "
        f"{single:,} of one sample, count nothing{level}"
    )


def _check_calibration(config: TrainConfig, dataset: Dataset) -> None:
    if config.calibration == "none":
        return
    for label, count in dataset.label_counts("valid").items():
        if not 0 < count.positives < count.known:
            what = f"samples of one class of {label!r} alone in its" if count.known else "no"
            raise ConfigError(
                f"train.calibration is {config.calibration}, which is fitted on the validation split, but "
                f"{dataset.path} has {what} validation split: set data.split.valid and prepare again, or set "
                "train.calibration to none"
            )


def remarks(config: TrainConfig, plan: Plan | None, dataset: Dataset, total_steps: int, ranks: int) -> Iterator[str]:
    """What a user may not have meant, and what a plan says."""
    if plan is not None:
        yield plan.summary
        yield from plan.notes
        if plan.batch_size < config.batch_size:
            yield (
                f"the plan is for batches of {plan.batch_size:,}; caches may be too small for batches of "
                f"{config.batch_size:,}: plan again, or lower train.batch_size"
            )
    if config.portions < ranks:
        yield (
            f"train.portions is {config.portions}: {ranks} ranks read the same row groups side by side; with "
            f"train.portions {ranks} each reads an equal part of them"
        )
    if config.precision == "bf16" and config.device == "cpu" and (slowness := bf16_slowness()) > _SLOW_BF16:
        yield (
            f"this processor takes {slowness:.0f} times as long for products in bf16 as in float32, having no "
            "instructions for them: train.precision float32 is faster here"
        )
    if not dataset.samples("valid"):
        yield f"{dataset.path} has no validation split: nothing is evaluated before the final test"
    for name, schedule in (("dense", config.dense.schedule), ("embedding", config.embedding.schedule)):
        if schedule.kind != "constant" and not schedule.final_factor and schedule.total_steps < total_steps:
            yield (
                f"train.{name}.schedule falls to 0 at step {schedule.total_steps:,} of {total_steps:,}: from there on "
                "it changes nothing"
            )


def exchange_remark(recipe: Recipe, mesh: Mesh) -> str:
    """How the ranks of a model with towers exchange rows, and why; empty where there are none."""
    towers = recipe.towers
    if not towers or mesh.ranks == 1:
        return ""
    if mesh.between is not None:
        return f"the exchange is by towers: the tables of each of {towers} are on a host of their own"
    if mesh.hosts != towers:
        return f"the exchange is flat: by towers it needs as many hosts as towers, {towers}, and there are {mesh.hosts}"
    if recipe.distributed.exchange == "flat":
        return "the exchange is flat, as distributed.exchange says"
    return "the exchange is flat: towers without modules (model.towers.compression 1) would send more by their own"


def load_training_state(run: Path, found: Path, recipe: Recipe, total_steps: int) -> TrainingState:
    """The position in the checkpoint `found`, as `recipe` goes on from it.

    Raises
    ------
    CheckpointError
        When the run has more steps than the recipe asks for, when it has ended and the recipe's other length asks for
        no more, or when it lacks the checkpoint that early stopping would return to.
    """
    stopping = recipe.train.early_stopping
    position = TrainingState(**checkpoint.read_state(found)["training"])
    position.resume(total_steps, stopping)
    if position.step > total_steps:
        raise CheckpointError(
            f"{run} has {position.step:,} steps already, and train.epochs and train.max_steps ask for {total_steps:,}: "
            "raise them, or start anew with --overwrite or another train.run"
        )
    if position.finished:
        _check_asks_for_no_more(run, recipe, position, total_steps)
    for step in position.needed_steps(stopping):
        if not checkpoint.step_path(found.parent, step).is_dir():
            raise CheckpointError(
                f"{run} no longer has the checkpoint of step {step:,}, its best by {stopping.metric}: resume with the "
                "train.early_stopping.metric that it was started with"
            )
    return position


def _check_asks_for_no_more(run: Path, recipe: Recipe, position: TrainingState, total_steps: int) -> None:
    """Refuse a recipe whose change of length would do nothing: it would be written down as if it had."""
    before, now = (each.to_dict()["train"] for each in (read_recipe(run), recipe))
    changed = [key for key in ("epochs", "max_steps", "early_stopping", "calibration") if before[key] != now[key]]
    if changed:
        ended = "has all its steps" if position.step >= total_steps else "was ended by train.early_stopping"
        raise CheckpointError(
            f"{run} {ended}, at step {position.step:,} of {total_steps:,}: train.{changed[0]} = {now[changed[0]]!r} "
            "asks for no more of it, so nothing was done"
        )


# A batch that was best, of how many training samples, and how it grows with them.
_BATCH, _SAMPLES, _GROWTH = 256, 80_000, 0.3
_SMALLEST, _LARGEST = 128, 4096
# With fewer samples there is a second epoch.
_FEW, _EPOCHS = 20_000, 2
_EVALUATIONS = 4
# Columns from which on an ensemble's rates fall, and its sizes by how many columns the log has at most.
_COLUMNS = 200
_SIZES: dict[float, dict[str, Any]] = {
    _COLUMNS: {},
    800: {"model.embedding_dim": 4, "model.member_mlp": [64, 32], "model.bins": 16},
    math.inf: {"model.members": 8, "model.embedding_dim": 2, "model.member_mlp": [64, 32], "model.bins": 8},
}
# Steps of a run over those that its average of weights remembers, and the most that it may keep of itself in a step.
_MEMORIES, _MOST_DECAY = 3, 0.9999


def chosen(
    samples: int, *, validated: bool, kind: str = "dlrm", batch_size: int = 0, columns: int = 0
) -> dict[str, Any]:
    """Return the value of each field for this number of training samples.

    Parameters
    ----------
    validated : bool
        Whether there is a validation split, which a second epoch needs: it may do harm.
    kind : str
        Of the model.
    batch_size : int
        Samples a step, which the fields that count steps follow; by default chosen, too.
    columns : int
        Number of features, numbers and others.
    """
    if kind == "ensemble":
        sizes = next(sizes for most, sizes in _SIZES.items() if columns <= most)
        return _of_ensemble(samples, validated, batch_size, columns) | sizes
    batch = batch_size or _power_of_two(_BATCH * (max(samples, 1) / _SAMPLES) ** _GROWTH, _SMALLEST, _LARGEST)
    several, default_overrides = validated and samples < _FEW, score_of(kind).config.default_overrides
    steps = max(samples // batch, 1) * (_EPOCHS if several else 1)
    return {
        "train.batch_size": batch,
        "train.epochs": _EPOCHS if several else 1,
        "train.eval_every": 0 if several else max(samples // (batch * _EVALUATIONS), 1),
        "train.early_stopping.patience": 2 if validated else 0,
        "train.average.decay": round(min(max(1 - _MEMORIES / steps, 0.0), _MOST_DECAY), 4),
        **{field: value for field, value in default_overrides.items() if validated or field != "train.epochs"},
    }


def _of_ensemble(samples: int, validated: bool, batch_size: int, columns: int) -> dict[str, Any]:
    """Few samples are seen in many passes, until validation is worse: some logs become better again after a while. Of
    more, or without validation, there are a few passes at a rate that begins high and falls, a tenth of the work."""
    several = validated and samples < _FEW
    batch = batch_size or _power_of_two(samples / (60 if several else 120), 32, 256)
    rate = round((0.001 if several else 0.004) * min(_COLUMNS / max(columns, 1), 1), 6)
    falling = {f"train.{part}.schedule.kind": "polynomial" for part in ("dense", "embedding")}
    return {
        "model.members": 16 if samples < _FEW else 8,
        "train.batch_size": batch,
        "train.epochs": 100 if several else 5,
        **({} if several else falling),
        "train.eval_every": 0 if samples < 100_000 else max(samples // (batch * _EVALUATIONS), 1),
        "train.early_stopping.patience": 8 if validated else 0,
        "train.dense.kind": "adamw",
        "train.dense.learning_rate": rate,
        "train.dense.weight_decay": 0.2,
        "train.embedding.kind": "adam",
        "train.embedding.learning_rate": rate,
        "train.embedding.weight_decay": 2.0,
        "train.embedding.decay": "decoupled",
        "train.embedding.rows": "all",
    }


def _power_of_two(wanted: float, least: int, most: int) -> int:
    return int(min(max(2 ** round(math.log2(max(wanted, 1))), least), most))


def sized(
    content: Mapping[str, Any], dataset: Dataset, earlier: Recipe | None = None
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """Return a copy of a recipe's content with the values that it leaves out, and a sentence that names them.

    The model and the kinds of optimizers are those of `earlier`, whose weights and state the run starts from.
    """
    samples, recipe, named = dataset.samples("train"), Recipe.from_dict(dict(content)), leaves(content)
    valid = dataset.label_counts("valid")[dataset.schema.label_column]
    batch_size = recipe.train.batch_size if "train.batch_size" in named else 0
    values = chosen(
        samples, validated=valid.known > 0, kind=recipe.model.kind, batch_size=batch_size,
        columns=len(dataset.schema.dense) + len(dataset.schema.sparse),
    )  # fmt: skip
    if recipe.train.loss.by and 0 < valid.positives < valid.known:
        # By order, as it is trained; scores have no level before they are calibrated.
        values["train.early_stopping.metric"] = "grouped_auc"
        values["train.calibration"] = "platt"
    if recipe.towers:  # on hosts of their own they have no average
        values.pop("train.average.decay", None)
    fixed = {} if earlier is None else leaves(earlier.to_dict())
    for field in values:
        if field in fixed and (field.startswith("model.") or field in ("train.dense.kind", "train.embedding.kind")):
            values[field] = fixed[field]
    values = {field: value for field, value in values.items() if field not in named}
    told = " ".join(f"{field}={json.dumps(value)}" for field, value in values.items())
    return with_values(
        content, values
    ), f"for {samples:,} training samples, as the recipe does not say: {told}" if values else ""
