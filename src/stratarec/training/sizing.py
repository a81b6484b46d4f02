"""Values that a recipe leaves out, chosen by how many training samples there are.

Few samples want small batches, or the network has had a few dozen steps when they are used up, and a second pass, which
validation may take back; many want large batches, which are fast. `docs/log.md` has what this is derived from. A value
that the recipe names is never changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from stratarec.data.dataset import Dataset
from stratarec.recipe import with_values

# Steps of an epoch that small data should have, and the batches that are taken for it.
_STEPS, _SMALLEST, _LARGEST = 120, 256, 4096
# Up to so many samples there are two epochs.
_TWICE = 3_000_000
_EVALUATIONS = 4


def chosen(samples: int, *, validated: bool) -> dict[str, Any]:
    """Field -> value for so many training samples.

    Parameters
    ----------
    validated : bool
        Whether there is a validation split, which a second epoch needs: it may do harm.
    """
    batch = 2 ** math.floor(math.log2(max(samples / _STEPS, 1)))
    batch = min(max(batch, _SMALLEST), _LARGEST)
    twice = validated and samples <= _TWICE
    often = max(samples // (batch * _EVALUATIONS), 1)
    return {
        "train.batch_size": batch,
        "train.epochs": 2 if twice else 1,
        "train.eval_every": 0 if twice else often,
        "train.early_stopping.patience": 2 if validated else 0,
    }


# Who says how long a run is has these in mind.
_LENGTH = ("train.epochs", "train.max_steps")


def sized(content: Mapping[str, Any], dataset: Dataset) -> tuple[dict[str, Any], str]:
    """A copy of a recipe's content with the values that it leaves out, and what they are, in words; empty where there
    are none. Of a recipe that says how long it trains, the size of batches alone is chosen."""
    samples = dataset.samples("train")
    values = chosen(samples, validated=dataset.samples("valid") > 0)
    named = _leaves(content)
    if any(field in named for field in _LENGTH):
        values = {"train.batch_size": values["train.batch_size"]}
    values = {field: value for field, value in values.items() if field not in named}
    told = " ".join(f"{field}={json.dumps(value)}" for field, value in values.items())
    return with_values(
        content, values
    ), f"for {samples:,} training samples, as the recipe does not say: {told}" if values else ""


def _leaves(content: Mapping[str, Any], prefix: str = "") -> set[str]:
    """Paths of everything that a recipe names."""
    found: set[str] = set()
    for key, value in content.items():
        found |= {f"{prefix}{key}"} | (_leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else set())
    return found
