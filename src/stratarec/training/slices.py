"""Metrics of raw logs, as a whole and by the values of a column."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from stratarec.progress import Progress
from stratarec.training.fresh import FreshLogs
from stratarec.training.metrics import Metrics, evaluate_labels


def evaluate_logs(
    logs: FreshLogs, progress: Progress
) -> tuple[dict[str, Metrics], dict[str, list[tuple[str, dict[str, Metrics]]]]]:
    """Metrics of each label on all rows; and, for each column that `logs` passes through, of each of its values, the
    most frequent first. Memory holds labels, logits and those columns of every row."""
    parts = list(logs.scored(progress))
    label = np.concatenate([part.label for part in parts if part.label is not None])
    logits = np.concatenate([part.logits for part in parts])
    weights = [part.weight for part in parts if part.weight is not None]
    weight = np.concatenate(weights) if weights else None
    users = [part.user for part in parts if part.user is not None]
    user = np.concatenate(users) if users else None
    whole = evaluate_labels(logs.labels, label, logits, user, weight)
    slices = {}
    for name in logs.keep:
        codes = pl.concat([part.kept[name].cast(pl.String) for part in parts], rechunk=True)
        rows = pl.DataFrame({"value": codes}).with_row_index("row").group_by("value").agg("row")
        rows = rows.sort([pl.col("row").list.len(), "value"], descending=[True, False], nulls_last=True)
        slices[name] = [
            ("(nothing)" if value is None else value, _of(np.asarray(chosen), logs.labels, label, logits, user, weight))
            for value, chosen in rows.iter_rows()
        ]
    return whole, slices


def _of(rows: np.ndarray, labels: Sequence[str], *columns: np.ndarray | None) -> dict[str, Metrics]:
    return evaluate_labels(labels, *(None if column is None else column[rows] for column in columns))  # type: ignore[arg-type]
