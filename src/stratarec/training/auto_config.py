"""Values that a recipe leaves out, chosen by how many training samples there are.

Batches grow with the data, to twice their size where there are ten times as many samples: small data need steps, large
ones speed. One pass is best, as rows that are seen a second time are learned by heart, but for a few thousand samples,
which end before the network has begun. A network of one pass is left at a rate that does not fall, so it is used with
the average of its weights over the last third of the steps. `docs/log.md` has the measurements. A value that the recipe
names is never changed, and changes no other one: with ``train.epochs=20`` a run is the one without it, which goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from stratarec.data.dataset.dataset import Dataset
from stratarec.recipe import Recipe, leaves, with_values

# A batch that was best, of how many training samples, and how it grows with them.
_BATCH, _SAMPLES, _GROWTH = 256, 80_000, 0.3
_SMALLEST, _LARGEST = 128, 4096
# With fewer samples there is a second epoch.
_FEW, _EPOCHS = 20_000, 2
_EVALUATIONS = 4
# Steps of a run over those that its average of weights remembers, and the most that it may keep of itself in a step.
_MEMORIES, _MOST_DECAY = 3, 0.9999


def chosen(samples: int, *, validated: bool, batch_size: int = 0) -> dict[str, Any]:
    """Field -> value for so many training samples.

    Parameters
    ----------
    validated : bool
        Whether there is a validation split, which a second epoch needs: it may do harm.
    batch_size : int
        Samples a step, which the fields that count steps follow; by default chosen, too.
    """
    best = _BATCH * (max(samples, 1) / _SAMPLES) ** _GROWTH
    batch = batch_size or min(max(2 ** round(math.log2(best)), _SMALLEST), _LARGEST)
    several = validated and samples < _FEW
    steps = max(samples // batch, 1) * (_EPOCHS if several else 1)
    return {
        "train.batch_size": batch,
        "train.epochs": _EPOCHS if several else 1,
        "train.eval_every": 0 if several else max(samples // (batch * _EVALUATIONS), 1),
        "train.early_stopping.patience": 2 if validated else 0,
        "train.average.decay": round(min(max(1 - _MEMORIES / steps, 0.0), _MOST_DECAY), 4),
    }


def sized(content: Mapping[str, Any], dataset: Dataset) -> tuple[dict[str, Any], str]:
    """A copy of a recipe's content with the values that it leaves out, and what they are, in words; empty where there
    are none."""
    samples, recipe, named = dataset.samples("train"), Recipe.from_dict(dict(content)), leaves(content)
    valid = dataset.label_counts("valid")[dataset.schema.label_column]
    batch_size = recipe.train.batch_size if "train.batch_size" in named else 0
    values = chosen(samples, validated=valid.known > 0, batch_size=batch_size)
    if recipe.train.loss.by and 0 < valid.positives < valid.known:
        # By order, as it is trained; scores have no level before they are calibrated.
        values["train.early_stopping.metric"] = "grouped_auc"
        values["train.calibration"] = "platt"
    if recipe.towers:  # on hosts of their own they have no average
        del values["train.average.decay"]
    values = {field: value for field, value in values.items() if field not in named}
    told = " ".join(f"{field}={json.dumps(value)}" for field, value in values.items())
    return with_values(
        content, values
    ), f"for {samples:,} training samples, as the recipe does not say: {told}" if values else ""
