"""What `stratarec explain` tells of a run, and what the report at the end of one shows of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from stratarec.data.dataset.dataset import Dataset
from stratarec.models import CTRModel
from stratarec.progress import Progress, SilentProgress
from stratarec.training.explain.contributions import contributions, values_of
from stratarec.training.explain.dependence import dependence
from stratarec.training.explain.importance import importance
from stratarec.training.explain.probe import Column, Probe, columns_of, drawn

REPEATS, SAMPLES = 5, 4096
# At the end of every run: a few seconds, or nothing.
_FEW_REPEATS, _FEW_SAMPLES, _MOST_SECONDS = 2, 2048, 6.0

Json = dict[str, Any]


def explained(
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


def explained_row(probe: Probe, names: Sequence[str]) -> Json:
    """What the score of a probe's one sample comes from, as JSON data."""
    columns = columns_of(probe.dataset.schema, names)
    labels = probe.batch.label.reshape(-1).tolist()
    parts = _of_labels(contributions(probe, columns))
    for (_, each), label in zip(parts.items(), labels, strict=True):
        each["label"] = label
    found: Json = _plain({"values": values_of(probe, columns), "labels": parts})
    return found


def for_report(model: CTRModel, dataset: Dataset, split: str, precision: str, check: Callable[[], None]) -> Json | str:
    """As `explained`, of some samples; or why there is none."""
    columns = columns_of(dataset.schema)
    probe = Probe(model, dataset, drawn(dataset, split, _FEW_SAMPLES, 0), precision)
    seconds = min(_seconds(probe, columns[-1]) for _ in range(2)) * len(columns) * _FEW_REPEATS
    if seconds > _MOST_SECONDS:
        return f"it takes some {seconds:,.0f} s"
    found = explained(probe, (), repeats=_FEW_REPEATS, seed=0, progress=SilentProgress(), check=check)
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
