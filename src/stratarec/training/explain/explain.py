"""Explanations of a model: importance of features, partial dependence, and contributions to one
score.

*Contributions.* A feature's part is the logit minus the logit without that feature. The base is the
logit without any feature. If features interact, their parts do not add up to the difference between
logit and base; the remainder is reported as the interaction.

*Partial dependence* (Friedman 2001). A curve of the mean prediction if all samples had the same
value of a dense feature, computed at the quantiles of the feature. A histogram shows where values
are rare and the curve is uncertain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.schema import DenseFeature
from stratarec.data.vocabulary import Vocabulary
from stratarec.models import CTRModel
from stratarec.models.base import probabilities
from stratarec.progress import Progress, SilentProgress
from stratarec.training.explain.importance import importance
from stratarec.training.explain.probe import Column, Probe, columns_of, draw_samples, rows_of

REPEATS, SAMPLES = 5, 4096
# Limits for the report at the end of a run, where explaining must take only a few seconds.
_FEW_REPEATS, _FEW_SAMPLES, _MOST_SECONDS = 2, 2048, 6.0

Json = dict[str, Any]


def explain_columns(
    probe: Probe,
    names: Sequence[str],
    *,
    repeats: int,
    seed: int,
    progress: Progress,
    check: Callable[[], None],
) -> Json:
    """Return the importance of all features, or only of the features in `names`, as JSON data."""
    result = importance(
        probe,
        columns_of(probe.dataset.schema, names),
        repeats=repeats,
        seed=seed,
        progress=progress,
        check=check,
    )
    return {
        "repeats": repeats,
        "seed": seed,
        "samples": probe.batch.size,
        "labels": _plain(_of_labels(result)),
    }


def with_curves(result: Json, probe: Probe, names: Sequence[str], progress: Progress) -> Json:
    """Return an explanation with the partial dependence curves of dense features added."""
    curves = dependence(probe, columns_of(probe.dataset.schema, names), progress)
    return {**result, "numbers": [_plain(asdict(curve)) for curve in curves]}


def explain_row(probe: Probe, names: Sequence[str]) -> Json:
    """Return, as JSON data, the contributions of features to the score of the probe's only
    sample.
    """
    columns = columns_of(probe.dataset.schema, names)
    labels = probe.batch.label.reshape(-1).tolist()
    parts = _of_labels(contributions(probe, columns))
    for (_, item), label in zip(parts.items(), labels, strict=True):
        item["label"] = label
    result: Json = _plain({"values": values_of(probe, columns), "labels": parts})
    return result


def for_report(
    model: CTRModel, dataset: Dataset, split: str, precision: str, check: Callable[[], None]
) -> Json | str:
    """Return the result of `explain_columns` for a few samples, or, if it would take too long, a
    text that says so.
    """
    columns = columns_of(dataset.schema)
    probe = Probe(model, dataset, draw_samples(dataset, split, _FEW_SAMPLES, 0), precision)
    seconds = min(_seconds(probe, columns[-1]) for _ in range(2)) * len(columns) * _FEW_REPEATS
    if seconds > _MOST_SECONDS:
        return f"it takes about {seconds:,.0f} s"
    result = explain_columns(
        probe, (), repeats=_FEW_REPEATS, seed=0, progress=SilentProgress(), check=check
    )
    return {"split": split, **result}


def _seconds(probe: Probe, column: Column) -> float:
    """Return the seconds that it takes to permute one column and score all samples again."""
    began = time.perf_counter()
    probe.scores(probe.permuted(column, np.arange(probe.batch.size)))
    return time.perf_counter() - began


def _of_labels(result: dict[str, Any]) -> dict[str, Json]:
    return {name: asdict(item) for name, item in result.items()}


def _plain(value: Any) -> Any:
    """Return JSON data, with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Number of values that are shown if a feature has a list of them.
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Contributions:
    """Contributions of features to the logit of one sample, for one label."""

    logit: float
    base: float
    """Logit with all features missing."""
    parts: dict[str, float]
    """Feature -> its part of the logit, in order of falling absolute value."""
    together: float
    """Interaction: `logit` minus `base` minus the sum of all parts."""


def contributions(probe: Probe, columns: Sequence[Column]) -> dict[str, Contributions]:
    """Return the contributions of features to the score of the probe's only sample, for each
    label.
    """
    logit, base = probe.scores()[0], probe.scores(probe.without(columns))[0]
    without = np.stack([probe.scores(probe.without([column]))[0] for column in columns])
    result = {}
    for place, name in enumerate(probe.dataset.schema.label_columns):
        parts = {
            column.name: float(logit[place] - row[place])
            for column, row in zip(columns, without, strict=True)
        }
        result[name] = Contributions(
            logit=float(logit[place]),
            base=float(base[place]),
            parts=dict(sorted(parts.items(), key=lambda part: -abs(part[1]))),
            together=float(logit[place] - base[place]) - sum(parts.values()),
        )
    return result


def values_of(probe: Probe, columns: Sequence[Column]) -> dict[str, str]:
    """Return the values of the probe's only sample as text."""
    dataset, batch = probe.dataset, probe.batch
    vocabularies: dict[str, Vocabulary] = {}
    result = {}
    for column in columns:
        if column.dense is not None:
            result[column.name] = (
                f"{raw_number(dataset, column.dense, float(batch.dense[0, column.dense])):.6g}"
            )
            continue
        name = column.sparse[0]
        vocabulary = next(item.vocabulary for item in dataset.schema.sparse if item.name == name)
        if vocabulary not in vocabularies:
            vocabularies[vocabulary] = dataset.vocabulary(vocabulary)
        ids = batch.sparse[name].values.tolist()
        # The newest events of a history are last.
        shown = ids[-_SHOWN:] if name in dataset.schema.behaviours else ids[:_SHOWN]
        names, tail = vocabularies[vocabulary].values, vocabularies[vocabulary].tail_buckets
        words = [str(names[item - tail]) if item >= tail else "(rare)" for item in shown]
        more = f" and {len(ids) - len(shown)} more" if len(ids) > len(shown) else ""
        result[column.name] = ", ".join(words) + more if ids else "(nothing)"
    return result


def raw_number(dataset: Dataset, index: int, value: float) -> float:
    """Undo the transform of a dense feature's value, and return the number in the log, rounded to
    six digits.

    Parameters
    ----------
    dataset : Dataset
        Data set with the schema and the moments.
    index : int
        Index of the feature among the dense features.
    value : float
        Transformed value.
    """
    feature: DenseFeature = dataset.schema.dense[index]
    if feature.standardize:
        moments = dataset.about.moments[feature.name]
        # Rounding makes a value near 0 exactly 0.
        value = (
            round(value * moments.deviation + moments.mean, 5 - math.floor(math.log10(moments.deviation)))
            + 0.0
        )
    with np.errstate(over="ignore"):
        return float(
            f"{np.sign(value) * np.expm1(abs(value)) if feature.transform == 'log1p' else value:.6g}"
        )


_POINTS, _BINS = 21, 20
MOST_SAMPLES = 1024
"""Maximum number of samples that are used for a curve."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Partial dependence of one dense feature."""

    feature: str
    log_scale: bool
    """Whether the model uses the logarithm of the feature."""
    values: tuple[float, ...]
    """Distinct quantiles of the feature in ascending order, as raw values without a transform."""
    predictions: dict[str, tuple[float, ...]]
    """Label -> mean probability at each of `values`."""
    edges: tuple[float, ...]
    """Edges of the histogram's bins, which have equal widths after the feature's transform."""
    shares: tuple[float, ...]
    """Share of the samples in each bin."""


def dependence(probe: Probe, columns: Sequence[Column], progress: Progress) -> tuple[Curve, ...]:
    """Return the partial dependence curve of each dense feature among `columns`."""
    numbers = [column for column in columns if column.dense is not None]
    few = rows_of(probe.batch, torch.arange(min(probe.batch.size, MOST_SAMPLES)))
    probe = probe.of(few)
    progress.start("partial dependence", len(numbers), "features")
    try:
        result = []
        for column in numbers:
            result.append(_curve(probe, column))
            progress.advance(1)
        return tuple(result)
    finally:
        progress.finish()


def _curve(probe: Probe, column: Column) -> Curve:
    dataset, place = probe.dataset, column.dense
    assert place is not None
    numbers = probe.batch.dense[:, place].cpu().numpy()
    # Method "nearest" returns only values that occur, so quantiles of whole numbers are whole.
    points = np.unique(np.quantile(numbers, np.linspace(0, 1, _POINTS), method="nearest"))
    means = np.stack(
        [_mean(probe, probe.scores(probe.with_numbers(column, float(point)))) for point in points]
    )
    counts, edges = np.histogram(numbers.astype(np.float64), bins=_BINS if len(points) > 1 else 1)
    return Curve(
        feature=column.name,
        log_scale=dataset.schema.dense[place].transform == "log1p",
        values=tuple(raw_number(dataset, place, float(point)) for point in points),
        predictions={
            name: tuple(means[:, number].tolist())
            for number, name in enumerate(dataset.schema.label_columns)
        },
        edges=tuple(raw_number(dataset, place, float(edge)) for edge in edges),
        shares=tuple((counts / counts.sum()).tolist()),
    )


def _mean(probe: Probe, logits: NDArray[np.float32]) -> NDArray[np.float64]:
    weight = None if probe.batch.weight is None else probe.batch.weight.cpu().numpy()
    if weight is not None and not weight.any():
        weight = None
    result: NDArray[np.float64] = np.average(
        probabilities(logits).astype(np.float64), axis=0, weights=weight
    )
    return result
