"""Values that a recipe leaves out, chosen by how many training samples there are, and by the model (its `suits`).

Batches grow with the data, to twice their size where there are ten times as many samples: small data need steps, large
ones speed. One pass is best, as rows that are seen a second time are learned by heart, but for a few thousand samples,
which end before the network has begun. A network of one pass is left at a rate that does not fall, so it is used with
the average of its weights over the last third of the steps. `docs/log.md` has the measurements. A value that the recipe
names is never changed, and changes no other one: with ``train.epochs=20`` a run is the one without it, which goes on.
Ensembles have rates, decay and members of their own, and several passes: where their rates fall, over the whole run.
The more columns a log has, the smaller are the members, as the time of a step is in proportion to the weights, and the
lower are the rates: a step of Adam changes every weight by the rate, and a logit by the sum over all columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from stratarec.data.dataset.dataset import Dataset
from stratarec.models.registry import score_of
from stratarec.recipe import Recipe, leaves, with_values

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
    several, suits = validated and samples < _FEW, score_of(kind).config.suits
    steps = max(samples // batch, 1) * (_EPOCHS if several else 1)
    return {
        "train.batch_size": batch,
        "train.epochs": _EPOCHS if several else 1,
        "train.eval_every": 0 if several else max(samples // (batch * _EVALUATIONS), 1),
        "train.early_stopping.patience": 2 if validated else 0,
        "train.average.decay": round(min(max(1 - _MEMORIES / steps, 0.0), _MOST_DECAY), 4),
        **{field: value for field, value in suits.items() if validated or field != "train.epochs"},
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
