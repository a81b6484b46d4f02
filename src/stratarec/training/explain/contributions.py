"""What one score comes from, by leaving columns out: a column's part is the logit less that without the column.

Parts of columns that act together do not add up: what is left between the base, where nothing is known, their sum and
the logit is theirs together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.schema import DenseFeature
from stratarec.data.vocabulary import Vocabulary
from stratarec.training.explain.probe import Column, Probe

# Values of a list that are shown.
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Contributions:
    """Of one row, logits of one label."""

    logit: float
    base: float
    """Where nothing is known of any column."""
    parts: dict[str, float]
    """Column -> what its value adds, the largest first."""
    together: float
    """What is left."""


def contributions(probe: Probe, columns: Sequence[Column]) -> dict[str, Contributions]:
    """What the score of the one sample of a probe comes from, label by label."""
    logit, base = probe.scores()[0], probe.scores(probe.without(columns))[0]
    without = np.stack([probe.scores(probe.without([column]))[0] for column in columns])
    found = {}
    for place, name in enumerate(probe.dataset.schema.label_columns):
        parts = {column.name: float(logit[place] - row[place]) for column, row in zip(columns, without, strict=True)}
        found[name] = Contributions(
            logit=float(logit[place]),
            base=float(base[place]),
            parts=dict(sorted(parts.items(), key=lambda part: -abs(part[1]))),
            together=float(logit[place] - base[place]) - sum(parts.values()),
        )
    return found


def values_of(probe: Probe, columns: Sequence[Column]) -> dict[str, str]:
    """What the model sees of the one sample of a probe, in words."""
    dataset, batch = probe.dataset, probe.batch
    known: dict[str, Vocabulary] = {}
    found = {}
    for column in columns:
        if column.dense is not None:
            found[column.name] = f"{raw_number(dataset, column.dense, float(batch.dense[0, column.dense])):.6g}"
            continue
        name = column.sparse[0]
        vocabulary = next(each.vocabulary for each in dataset.schema.sparse if each.name == name)
        if vocabulary not in known:
            known[vocabulary] = dataset.vocabulary(vocabulary)
        ids = batch.sparse[name].values.tolist()
        # Of histories the last are the newest.
        shown = ids[-_SHOWN:] if name in dataset.schema.behaviours else ids[:_SHOWN]
        names, tail = known[vocabulary].values, known[vocabulary].tail_buckets
        words = [str(names[each - tail]) if each >= tail else "(rare)" for each in shown]
        more = f" and {len(ids) - len(shown)} more" if len(ids) > len(shown) else ""
        found[column.name] = ", ".join(words) + more if ids else "(nothing)"
    return found


def raw_number(dataset: Dataset, place: int, value: float) -> float:
    """The number of a log that becomes `value` for a model, in six digits: float32 has no more after standardising."""
    feature: DenseFeature = dataset.schema.dense[place]
    if feature.standardize:
        moments = dataset.about.moments[feature.name]
        # What would be near 0 is 0.
        value = round(value * moments.deviation + moments.mean, 5 - math.floor(math.log10(moments.deviation))) + 0.0
    with np.errstate(over="ignore"):
        return float(f"{np.sign(value) * np.expm1(abs(value)) if feature.transform == 'log1p' else value:.6g}")
