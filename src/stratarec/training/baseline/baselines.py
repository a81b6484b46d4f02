"""Metrics of simpler methods on the splits of a data set, and their comparison with a model.

The metrics are in ``baseline.json`` in the directory of the data set, and are deleted when it is prepared again.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import BASELINE
from stratarec.errors import DatasetError, StrataError
from stratarec.io.sealed import Count, Hash, Model, read_sealed, write_sealed

FORMAT: Literal[1] = 1
_ADVICE = "run `stratarec baseline` again, or remove it"
# Smaller differences of AUC are ignored.
_MIN_GAIN = 5e-4
_TRY = {
    "logistic regression": (
        "model.kind=lr or deepfm: the log may contain little more than the positive rate of each value",
        "more model.dropout, and more weight decay of network and rows",
    ),
    "LightGBM": ("model.kind=dcnv2 or finalmlp", "more train.epochs, with train.early_stopping"),
}
_Share = Annotated[float, pydantic.Field(ge=0, le=1)]


class MethodFigures(Model):
    """Metrics of one method on one split."""

    positives: Count
    samples: Count
    auc: _Share | None
    """None if the split has a single class."""
    log_loss: Annotated[float, pydantic.Field(ge=0)]

    @property
    def error(self) -> float:
        """Two standard errors of the AUC (Hanley and McNeil 1982)."""
        ones, zeros, area = self.positives, self.samples - self.positives, self.auc or 0.0
        first, second = area / (2 - area), 2 * area**2 / (1 + area)
        spread = area * (1 - area) + (ones - 1) * (first - area**2) + (zeros - 1) * (second - area**2)
        return 2 * sqrt(max(spread, 0.0) / max(ones * zeros, 1))


class Method(Model):
    """Metrics of one method on all splits, and its training time."""

    name: str
    seconds: Annotated[float, pydantic.Field(ge=0)]
    splits: dict[Literal["valid", "test"], MethodFigures]


class Baselines(Model):
    """Content of ``baseline.json``."""

    format: Literal[1] = FORMAT
    dataset: Hash
    """Fingerprint of the data set."""
    fitted: Count
    """Number of training samples that the methods were fitted to."""
    methods: tuple[Method, ...]


def write_baselines(dataset: Dataset, baselines: Baselines) -> None:
    """Write ``baseline.json`` into the data set."""
    write_sealed(Path(dataset.path) / BASELINE, baselines.to_dict())


def read_baselines(dataset: Dataset) -> Baselines | None:
    """Read ``baseline.json`` of a data set; None if there is none.

    Raises
    ------
    DatasetError
        If it is damaged, or belongs to other samples.
    """
    path = Path(dataset.path) / BASELINE
    if not path.exists():
        return None
    baselines = read_sealed(path, Baselines, _ADVICE)
    if baselines.dataset != dataset.fingerprint:
        raise DatasetError(f"{path} belongs to other samples than those of the data set; {_ADVICE}")
    return baselines


def compare_with_baselines(dataset: Dataset, split: str, metrics: Mapping[str, Any] | None) -> list[str]:
    """Return lines that compare the `metrics` of a model on a split with each method, and what to try.

    The list is empty if methods have no such metrics. A damaged ``baseline.json`` is reported, not raised.
    """
    if dataset.schema.labels or split == "train":
        return []
    try:
        baselines = read_baselines(dataset)
    except StrataError as error:
        return [f"baselines: {error}"]
    if baselines is None:
        hint = "none fitted yet; run `stratarec baseline` to compare with logistic regression and LightGBM"
        return [f"baselines: {hint}"] if dataset.samples("valid") else []
    methods = [(method, method.splits[split]) for method in baselines.methods if split in method.splits]
    lines = [f"baseline: {_describe(method, scores)}{_verdict(_gain(scores, metrics))}" for method, scores in methods]
    if baselines.fitted < dataset.samples("train"):
        total = dataset.samples("train")
        lines.append(f"  fitted to a random sample of {baselines.fitted:,} of {total:,} training samples")
    best = max(methods, key=lambda method: _gain(method[1], metrics) or 0.0, default=None)
    gain = None if best is None else _gain(best[1], metrics)
    if best is not None and gain is not None and gain > _MIN_GAIN:
        method, scores = best
        noise = f" (two standard errors of its AUC: {scores.error:.4f})" if gain < scores.error else ""
        lines.append(f"{method.name} is better than this model by {gain:.4f}{noise}. Try:")
        lines += [
            f"  {advice}" for advice in (*_TRY.get(method.name, ()), "stratarec tune, which uses validation only")
        ]
    return lines


def _describe(method: Method, scores: MethodFigures) -> str:
    auc = "-" if scores.auc is None else f"{scores.auc:.4f} +- {scores.error:.4f}"
    return f"{method.name} AUC {auc}, log loss {scores.log_loss:.4f}, {method.seconds:.1f} s"


def _verdict(gain: float | None) -> str:
    if gain is None:
        return ""
    return ": better" if gain > _MIN_GAIN else ": worse" if gain < -_MIN_GAIN else ": equal"


def _gain(scores: MethodFigures, metrics: Mapping[str, Any] | None) -> float | None:
    """Return how much better a method is than a model: in AUC, or in log loss if one of them has no AUC."""
    if metrics is None:
        return None
    if scores.auc is None or metrics["auc"] is None:
        return float(metrics["log_loss"]) - scores.log_loss
    return scores.auc - float(metrics["auc"])
