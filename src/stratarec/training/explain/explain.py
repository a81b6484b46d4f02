"""What `stratarec explain` tells of a run, and what the report at the end of one shows of it."""

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
# At the end of every run: a few seconds, or nothing.
_FEW_REPEATS, _FEW_SAMPLES, _MOST_SECONDS = 2, 2048, 6.0

Json = dict[str, Any]


def explain_columns(
    probe: Probe, names: Sequence[str], *, repeats: int, seed: int, progress: Progress, check: Callable[[], None]
) -> Json:
    """Importance of columns, as JSON data: those of these names, or all."""
    found = importance(
        probe, columns_of(probe.dataset.schema, names), repeats=repeats, seed=seed, progress=progress, check=check
    )
    return {"repeats": repeats, "seed": seed, "samples": probe.batch.size, "labels": _plain(_of_labels(found))}


def with_curves(found: Json, probe: Probe, names: Sequence[str], progress: Progress) -> Json:
    """The same with the curves of the numbers among them."""
    curves = dependence(probe, columns_of(probe.dataset.schema, names), progress)
    return {**found, "numbers": [_plain(asdict(curve)) for curve in curves]}


def explain_row(probe: Probe, names: Sequence[str]) -> Json:
    """What the score of a probe's one sample comes from, as JSON data."""
    columns = columns_of(probe.dataset.schema, names)
    labels = probe.batch.label.reshape(-1).tolist()
    parts = _of_labels(contributions(probe, columns))
    for (_, each), label in zip(parts.items(), labels, strict=True):
        each["label"] = label
    found: Json = _plain({"values": values_of(probe, columns), "labels": parts})
    return found


def for_report(model: CTRModel, dataset: Dataset, split: str, precision: str, check: Callable[[], None]) -> Json | str:
    """As `explain_columns`, of some samples; or why there is none."""
    columns = columns_of(dataset.schema)
    probe = Probe(model, dataset, draw_samples(dataset, split, _FEW_SAMPLES, 0), precision)
    seconds = min(_seconds(probe, columns[-1]) for _ in range(2)) * len(columns) * _FEW_REPEATS
    if seconds > _MOST_SECONDS:
        return f"it takes some {seconds:,.0f} s"
    found = explain_columns(probe, (), repeats=_FEW_REPEATS, seed=0, progress=SilentProgress(), check=check)
    return {"split": split, **found}


def _seconds(probe: Probe, column: Column) -> float:
    """That changing a column and scoring take."""
    began = time.perf_counter()
    probe.scores(probe.permuted(column, np.arange(probe.batch.size)))
    return time.perf_counter() - began


def _of_labels(found: dict[str, Any]) -> dict[str, Json]:
    return {name: asdict(each) for name, each in found.items()}


def _plain(value: Any) -> Any:
    """JSON data: None where a figure is not defined, or infinite."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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


_POINTS, _BINS = 21, 20
MOST_SAMPLES = 1024
"""Of a curve."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Of one number."""

    feature: str
    log_scale: bool
    """Whether the model takes its logarithm."""
    values: tuple[float, ...]
    """Rising, as in the log: its quantiles, each once."""
    predictions: dict[str, tuple[float, ...]]
    """Label -> mean probability at each of them."""
    edges: tuple[float, ...]
    """Of bins of values, as wide as each other where the model takes them."""
    shares: tuple[float, ...]
    """Of the samples in each bin."""


def dependence(probe: Probe, columns: Sequence[Column], progress: Progress) -> tuple[Curve, ...]:
    """The curve of each number among some columns."""
    numbers = [column for column in columns if column.dense is not None]
    few = rows_of(probe.batch, torch.arange(min(probe.batch.size, MOST_SAMPLES)))
    probe = probe.of(few)
    progress.start("bend", len(numbers), "numbers")
    try:
        found = []
        for column in numbers:
            found.append(_curve(probe, column))
            progress.advance(1)
        return tuple(found)
    finally:
        progress.finish()


def _curve(probe: Probe, column: Column) -> Curve:
    dataset, place = probe.dataset, column.dense
    assert place is not None
    known = probe.batch.dense[:, place].cpu().numpy()
    # Values that there are, so that none lies between whole numbers.
    points = np.unique(np.quantile(known, np.linspace(0, 1, _POINTS), method="nearest"))
    means = np.stack([_mean(probe, probe.scores(probe.with_numbers(column, float(point)))) for point in points])
    counts, edges = np.histogram(known.astype(np.float64), bins=_BINS if len(points) > 1 else 1)
    return Curve(
        feature=column.name,
        log_scale=dataset.schema.dense[place].transform == "log1p",
        values=tuple(raw_number(dataset, place, float(point)) for point in points),
        predictions={
            name: tuple(means[:, number].tolist()) for number, name in enumerate(dataset.schema.label_columns)
        },
        edges=tuple(raw_number(dataset, place, float(edge)) for edge in edges),
        shares=tuple((counts / counts.sum()).tolist()),
    )


def _mean(probe: Probe, logits: NDArray[np.float32]) -> NDArray[np.float64]:
    weight = None if probe.batch.weight is None else probe.batch.weight.cpu().numpy()
    if weight is not None and not weight.any():
        weight = None
    found: NDArray[np.float64] = np.average(probabilities(logits).astype(np.float64), axis=0, weights=weight)
    return found
