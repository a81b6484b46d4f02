"""Resolve a recipe for its data set: fill in values that the recipe leaves out, and check what the
data set provides.

Defaults depend on the number of training samples and on the model (its `default_overrides`);
`docs/log.md` has the measurements behind them.

- *Batch size*: Batches are twice as large for ten times as many samples, because small data need
  more steps and large data need speed.
- *Epochs*: One pass is best, because the network memorizes rows that it sees a second time. A
  second pass helps only with a few thousand samples, because the network has learned little in the
  first.
- *Average*: After one pass the learning rate is still high, so the weights are averaged over the
  last third of the steps.
- *Ensembles* have other learning rates, weight decay and sizes, and several passes. The more
  columns a log has, the smaller are the members, because the time of a step is proportional to the
  number of weights. The learning rates are also lower, because a step of Adam changes every weight
  by the learning rate, and so a logit by the sum over all columns.

A value that the recipe names is never changed, and it does not change the defaults of other fields.
So a run with ``train.epochs=20`` is the same as the run without this setting, only longer.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stratarec.data.dataset.compatibility import check_prepared
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import batches
from stratarec.data.splits import SPLITS
from stratarec.distributed.mesh import Mesh
from stratarec.errors import CheckpointError, ConfigError, StrataError
from stratarec.models.metrics import METRICS
from stratarec.models.registry import score_of
from stratarec.models.zoo.config import MOST_TREES, EnsembleConfig
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe, leaves
from stratarec.recipe.train_section import TrainConfig
from stratarec.reporting.curve_writers import check_installed
from stratarec.training import checkpoint
from stratarec.training.evaluate import LEAST_OF_CLASS
from stratarec.training.forecast import resolve_exchange
from stratarec.training.run.run_directory import read_recipe
from stratarec.training.steps.state import TrainingState
from stratarec.training.torch_setup import bf16_slowness, device_of

# bf16 is reported as slow if it takes more than this many times as long as float32. Noise alone
# does not double a time.
_SLOW_BF16 = 2.0


def check_validation(config: TrainConfig, dataset: Dataset) -> None:
    """Raise `ConfigError` if the validation split cannot be used for the recipe's early stopping,
    plateaus or calibration.
    """
    _check_calibration(config, dataset)
    samples, first = dataset.samples("valid"), dataset.label_counts("valid")[dataset.schema.label_column]
    for name, asked in (("early_stopping", config.early_stopping), ("plateau", config.plateau)):
        is_usable = 0 < first.positives < first.known
        if asked.patience and METRICS[asked.metric].of_users and not dataset.schema.session_keys:
            raise ConfigError(
                f"train.{name}.metric is {asked.metric}, which needs users, but {dataset.path} has "
                "neither users nor sessions: name schema.user and prepare again, or choose another metric"
            )
        if asked.patience and not is_usable:
            what = "samples of a single class in its validation split" if samples else "no validation split"
            raise ConfigError(
                f"train.{name}.patience is {asked.patience}, but {dataset.path} has {what}: set "
                "data.split.valid and prepare again, or set patience to 0"
            )


def check_average(config: TrainConfig, mesh: Mesh) -> None:
    """Raise `ConfigError` if the recipe asks for an average of weights, but no rank has all
    weights.
    """
    if config.average.decay and mesh.between is not None:
        raise ConfigError(
            f"train.average.decay is {config.average.decay}, but a host only has the weights of its tower: "
            "set it to 0, or distributed.exchange to flat"
        )


def _check_calibration(config: TrainConfig, dataset: Dataset) -> None:
    if config.has_log_odds and config.calibration in ("auto", "none"):
        return
    for label, count in dataset.label_counts("valid").items():
        smaller = min(count.positives, count.known - count.positives)
        if not config.has_log_odds and smaller < LEAST_OF_CLASS:
            raise ConfigError(
                f"train.loss.kind is {config.loss.kind}, whose scores are calibrated on the validation "
                f"split, but {dataset.path} has {smaller} samples of a class of {label!r} there, expected "
                f"at least {LEAST_OF_CLASS}: enlarge data.split.valid and prepare again, or set "
                "train.loss.kind to cross_entropy"
            )
        if not smaller:
            what = f"a single class of {label!r} in its" if count.known else "no"
            raise ConfigError(
                f"train.calibration is {config.calibration}, which is fitted on the validation split, but "
                f"{dataset.path} has {what} validation split: set data.split.valid and prepare again, or "
                "set train.calibration to none"
            )


def remarks(
    config: TrainConfig, plan: Plan | None, dataset: Dataset, total_steps: int, ranks: int
) -> Iterator[str]:
    """Yield lines for the user: the summary of the plan, and warnings about settings that are
    probably unintended.
    """
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
            f"train.portions is {config.portions}: {ranks} ranks read the same row groups; set it to "
            f"{ranks} so that each rank reads its own part"
        )
    if config.precision == "bf16" and config.device == "cpu" and (slowness := bf16_slowness()) > _SLOW_BF16:
        yield (
            f"matrix products in bf16 take {slowness:.0f} times as long as in float32 on this processor: "
            "set train.precision to float32"
        )
    if not dataset.samples("valid"):
        yield f"{dataset.path} has no validation split: nothing is evaluated before the final test"
    for label, count in dataset.label_counts("valid").items():
        if count.known and not 0 < count.positives < count.known:
            yield (
                f"the validation split has {count.known:,} samples of a single class of {label!r}: it "
                "cannot choose a step or a calibration, and the last step is tested; "
                "enlarge data.split.valid"
            )
    for name, schedule in (("dense", config.dense.schedule), ("embedding", config.embedding.schedule)):
        if schedule.kind != "constant" and not schedule.final_factor and schedule.total_steps < total_steps:
            yield (
                f"train.{name}.schedule falls to 0 at step {schedule.total_steps:,} of {total_steps:,}: "
                "later steps train nothing"
            )


def check_refit(recipe: Recipe, dataset: Dataset) -> None:
    """Raise `ConfigError` if the recipe asks for a refit that is not possible with this data
    set.
    """
    if not recipe.train.refit:
        return
    if not any(map(dataset.samples, SPLITS[1:])):
        raise ConfigError(
            f"train.refit is true, but {dataset.path} has neither validation nor test samples, so all "
            "samples are trained anyway: set it to false, or set data.split.valid and "
            "data.split.test and prepare again"
        )
    if recipe.data.split.negatives < 1:
        raise ConfigError(
            f"train.refit is true, but data.split.negatives is {recipe.data.split.negatives:g}: validation "
            "and test "
            "have all negatives, so they cannot be trained like the training split; "
            "set train.refit to false"
        )


def exchange_remark(recipe: Recipe, mesh: Mesh) -> str:
    """Return a text that says how ranks exchange the rows of a model with towers, and why; empty
    without towers.
    """
    towers = recipe.towers
    if not towers or mesh.ranks == 1:
        return ""
    if mesh.between is not None:
        return f"the exchange is by towers: each of {towers} hosts has the tables of one tower"
    if mesh.hosts != towers:
        return f"the exchange is flat: SPTT needs one host for each of {towers} towers, but there are {mesh.hosts}"
    return "the exchange is flat: distributed.exchange is flat, or auto predicted longer steps with SPTT"


def resume_state(run: Path, path: Path, recipe: Recipe, state: TrainingState, total_steps: int) -> None:
    """Prepare `state`, the training state of the checkpoint `path`, for a run of `recipe` that
    resumes from it.

    Raises
    ------
    CheckpointError
        If the run has more steps than the recipe asks for; if it is finished, and a changed length
        needs no more steps; or if the checkpoint that is best on the validation split is missing.
    """
    stopping = recipe.train.early_stopping
    state.resume(total_steps, stopping)
    if state.step > total_steps:
        raise CheckpointError(
            f"{run} has {state.step:,} steps already, but train.epochs and train.max_steps ask for "
            f"{total_steps:,}: raise them, or start again with --overwrite or another train.run"
        )
    if state.finished:
        _check_asks_for_no_more(run, recipe, state, total_steps)
    for step in state.needed_steps(stopping):
        if not checkpoint.step_path(path.parent, step).is_dir():
            raise CheckpointError(
                f"{run} no longer has the checkpoint of step {step:,}, its best by {stopping.metric}: "
                "resume with the train.early_stopping.metric that it was started with"
            )


def _check_asks_for_no_more(run: Path, recipe: Recipe, state: TrainingState, total_steps: int) -> None:
    """Raise `CheckpointError` if the length of a finished run was changed without asking for more
    steps.

    Otherwise the run would be stored with settings with which it was not trained.
    """
    before, now = (version.to_dict()["train"] for version in (read_recipe(run), recipe))
    changed = [
        key for key in ("epochs", "max_steps", "early_stopping", "calibration") if before[key] != now[key]
    ]
    if changed:
        ended = "has all its steps" if state.step >= total_steps else "was ended by train.early_stopping"
        raise CheckpointError(
            f"{run} {ended}, at step {state.step:,} of {total_steps:,}: train.{changed[0]} = "
            f"{now[changed[0]]!r} does not ask for more steps; nothing was done"
        )


# The best batch size is _BATCH for _SAMPLES training samples, and grows with their number to the
# power of _GROWTH.
_BATCH, _SAMPLES, _GROWTH = 256, 80_000, 0.3
_SMALLEST, _LARGEST = 128, 4096
# With fewer training samples than _FEW, a run has _EPOCHS epochs. With fewer than _MEDIUM, an
# ensemble has ten.
_FEW, _EPOCHS, _MEDIUM = 20_000, 2, 50_000
_EVALUATIONS = 4
# By default, trees are fitted to at most _MOST_OF_TREES training samples. From _FOUR_NETWORKS
# samples on, four networks in addition to trees are as good as six.
_MOST_OF_TREES, _FOUR_NETWORKS = 300_000, 10_000
# With more than _COLUMNS columns, an ensemble has lower learning rates. _SIZES: maximum number of
# columns -> fields.
_COLUMNS = 200
_SIZES: dict[float, dict[str, Any]] = {
    _COLUMNS: {},
    800: {"model.embedding_dim": 4, "model.member_mlp": [64, 32], "model.bins": 16},
    math.inf: {"model.embedding_dim": 2, "model.member_mlp": [64, 32], "model.bins": 8},
}
# The average of weights covers this fraction of a run's steps (1 / _MEMORIES), unless the decay
# exceeds its maximum.
_MEMORIES, _MOST_DECAY = 3, 0.9999


def defaults_by_size(
    samples: int, *, validated: bool, kind: str = "dlrm", batch_size: int = 0, columns: int = 0
) -> dict[str, Any]:
    """Return the default value of each field that depends on the number of training samples.

    Parameters
    ----------
    samples : int
        Number of training samples.
    validated : bool
        Whether there is a usable validation split. More than one epoch needs it, because the model
        may become worse.
    kind : str
        Kind of the model.
    batch_size : int
        Samples per step if the recipe names it, because fields that count steps depend on it; 0 to
        choose it.
    columns : int
        Number of features.
    """
    if kind == "ensemble":
        sizes = next(sizes for most, sizes in _SIZES.items() if columns <= most)
        return _of_ensemble(samples, validated, batch_size, columns) | sizes
    batch = batch_size or _power_of_two(
        _BATCH * (max(samples, 1) / _SAMPLES) ** _GROWTH, _SMALLEST, _LARGEST
    )
    several, default_overrides = validated and samples < _FEW, score_of(kind).config.default_overrides
    steps = max(samples // batch, 1) * (_EPOCHS if several else 1)
    return {
        "train.batch_size": batch,
        "train.epochs": _EPOCHS if several else 1,
        "train.eval_every": 0 if several else max(samples // (batch * _EVALUATIONS), 1),
        "train.early_stopping.patience": 2 if validated else 0,
        "train.average.decay": round(min(max(1 - _MEMORIES / steps, 0.0), _MOST_DECAY), 4),
        **{
            field: value
            for field, value in default_overrides.items()
            if validated or field != "train.epochs"
        },
    }


def _of_ensemble(samples: int, validated: bool, batch_size: int, columns: int) -> dict[str, Any]:
    """Return the defaults of an ensemble.

    With few samples, it is trained for many epochs until the validation metric gets worse, with
    patience, because on some logs it improves again. With many samples, or without validation, it
    is trained for a few epochs with a falling learning rate, which takes a tenth of the work. With
    a medium number of samples, five epochs are too few on logs with sharp effects, and ten do
    little harm on others. While the rate falls, three evaluations without improvement are enough to
    stop.
    """
    several = validated and samples < _FEW
    has_trees = validated and samples <= _MOST_OF_TREES
    batch = batch_size or _power_of_two(samples / (60 if several else 120), 32, 256)
    rate = round((0.001 if several else 0.004) * min(_COLUMNS / max(columns, 1), 1), 6)
    falling = {f"train.{part}.schedule.kind": "polynomial" for part in ("dense", "embedding")}
    return {
        "model.members": 4 if has_trees and samples >= _FOUR_NETWORKS else 6 if samples < _FEW else 8,
        "model.trees": MOST_TREES if has_trees else 0,
        "train.batch_size": batch,
        "train.epochs": 100 if several else 10 if validated and samples < _MEDIUM else 5,
        **({} if several else falling),
        "train.eval_every": 0 if samples < 100_000 else max(samples // (batch * _EVALUATIONS), 1),
        "train.early_stopping.patience": (5 if several else 3) if validated else 0,
        "train.dense.kind": "adamw",
        "train.dense.learning_rate": rate,
        "train.dense.weight_decay": 0.2,
        "train.embedding.kind": "adam",
        "train.embedding.learning_rate": rate,
        "train.embedding.weight_decay": 2.0,
        "train.embedding.decay": "decoupled",
        "train.embedding.rows": "all",
    }


def _power_of_two(value: float, least: int, most: int) -> int:
    return int(min(max(2 ** round(math.log2(max(value, 1))), least), most))


def choose_defaults(
    recipe: Recipe, named: Mapping[str, Any], dataset: Dataset, earlier: Recipe | None = None
) -> dict[str, Any]:
    """Return the default values, by field, of the fields that a recipe leaves out.

    Parameters
    ----------
    named : mapping
        Fields that the recipe names, such as ``train.batch_size``, as `leaves` returns them.
    earlier : Recipe or None
        Recipe of the run from whose weights and optimizer state the new run starts. Defaults of the
        model, and of the kinds of optimizers, are taken from it.
    """
    valid = dataset.label_counts("valid")[dataset.schema.label_column]
    values = defaults_by_size(
        dataset.samples("train"),
        validated=0 < valid.positives < valid.known,
        kind=recipe.model.kind,
        batch_size=recipe.train.batch_size if "train.batch_size" in named else 0,
        columns=len(dataset.schema.dense) + len(dataset.schema.sparse),
    )
    if recipe.towers:  # no rank has all weights to average
        values.pop("train.average.decay", None)
    fixed = {} if earlier is None else leaves(earlier.to_dict())
    for field in values:
        if field in fixed and (
            field.startswith("model.") or field in ("train.dense.kind", "train.embedding.kind")
        ):
            values[field] = fixed[field]
    return {field: value for field, value in values.items() if field not in named}


# Width of a line of defaults, without its indentation.
_LINE_WIDTH = 76


def describe_defaults(values: Mapping[str, Any], dataset: Dataset) -> list[str]:
    """Return lines with the values that `choose_defaults` chose; none if it chose none."""
    text = " ".join(
        f"{field}={json.dumps(value, separators=(',', ':'))}" for field, value in values.items()
    )
    head = f"defaults for {dataset.samples('train'):,} training samples:"
    lines = textwrap.wrap(text, _LINE_WIDTH, break_long_words=False, break_on_hyphens=False)
    return [head, *(f"  {line}" for line in lines)] if lines else []


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A recipe that was checked for one data set and has a value for every field."""

    recipe: Recipe
    """The recipe that is trained and written into the run."""
    dataset: Dataset
    mesh: Mesh
    """The mesh of the run. It has parts for towers if rows are exchanged by towers."""
    device: torch.device
    """Device of the network."""
    remarks: tuple[str, ...]
    """Lines that are shown to the user when training begins."""


def resolve(
    recipe: Recipe,
    dataset: Dataset,
    mesh: Mesh,
    *,
    named: Mapping[str, Any] | None = None,
    earlier: Recipe | None = None,
) -> ResolvedRun:
    """Fill in the values that depend on the data set, and check that the data set provides what the
    recipe needs.

    Parameters
    ----------
    named, earlier
        As in `choose_defaults`. If `named` is None, no field of the recipe is changed.

    Raises
    ------
    ConfigError
        If a check fails. The message names the field, its value, and what the data set or the mesh
        does not have.
    """
    values = {} if named is None else choose_defaults(recipe, named, dataset, earlier)
    if mesh.ranks > 1 and values.get("model.trees"):
        values["model.trees"] = 0
    recipe = in_numbers(recipe.with_fields(values), dataset)
    mesh.check_same({"recipe": recipe.to_dict(), "data": dataset.fingerprint})
    not_compared = check_prepared(recipe.data, dataset)
    recipe = with_exchange(recipe, dataset, mesh)
    if mesh.between is not None and not recipe.distributed.by_towers(recipe.towers, mesh.hosts):
        mesh = replace(mesh, inside=None, between=None)
    check_validation(recipe.train, dataset)
    check_refit(recipe, dataset)
    check_installed(recipe.train.curves)
    check_average(recipe.train, mesh)
    if isinstance(recipe.model, EnsembleConfig) and not recipe.train.has_log_odds:
        raise ConfigError(
            f"train.loss.kind is {recipe.train.loss.kind}, but an ensemble weights its members by log "
            "loss: set it to cross_entropy, or model.kind to another model"
        )
    if mesh.ranks > 1 and isinstance(recipe.model, EnsembleConfig) and recipe.model.trees:
        raise ConfigError(
            f"model.trees is {recipe.model.trees:,}, and {mesh.ranks} ranks train the model: set it to 0"
        )
    lines = (*describe_defaults(values, dataset), not_compared, exchange_remark(recipe, mesh))
    return ResolvedRun(
        recipe=recipe,
        dataset=dataset,
        mesh=mesh,
        device=device_of(recipe.train.device, mesh.ranks),
        remarks=tuple(filter(None, lines)),
    )


def with_exchange(recipe: Recipe, dataset: Dataset, mesh: Mesh) -> Recipe:
    """Return the recipe with ``flat`` or ``sptt`` in place of ``auto``, if the ranks of `mesh` can
    exchange by towers.

    A run resumes with the exchange in its stored recipe, because the other one has other bits.
    """
    if mesh.between is None or recipe.distributed.exchange != "auto":
        return recipe

    def stored() -> str:
        with suppress(StrataError):
            earlier = read_recipe(Path(recipe.run))
            same = replace(earlier.distributed, exchange="auto") == recipe.distributed
            if same and (earlier.model, earlier.train.batch_size) == (
                recipe.model,
                recipe.train.batch_size,
            ):
                return earlier.distributed.exchange
        return "auto"

    chosen = recipe.with_fields({"distributed.exchange": mesh.first(stored)})
    return resolve_exchange(chosen, dataset, mesh.hosts, mesh.ranks, mesh)


def run_steps(train: TrainConfig, dataset: Dataset) -> int:
    """Return the number of steps of a whole run on this data set, if it does not stop early."""
    return train.steps(batches(dataset.samples("train"), train.batch_size, train.portions))


def in_numbers(recipe: Recipe, dataset: Dataset) -> Recipe:
    """Return the recipe with schedules and class weights as numbers, for a whole run."""
    odds = {
        label: count.positives / (count.known - count.positives)
        for label, count in dataset.label_counts("train").items()
        if 0 < count.positives < count.known
    }
    return replace(recipe, train=recipe.train.of_run(run_steps(recipe.train, dataset), odds))
