"""``baseline.json`` beside a data set: how well other methods do on its splits, and what is said of that of a model.

It lies in the directory of the data set, and goes with it when that is prepared anew.
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
# What is less is no difference.
_LEAST = 5e-4
_TRY = {
    "logistic regression": (
        "model.kind=lr or deepfm: the log may say little beyond each value's own share",
        "more of model.dropout and of both decays",
    ),
    "LightGBM": ("model.kind=dcnv2 or finalmlp", "more train.epochs, with train.early_stopping"),
}
_Share = Annotated[float, pydantic.Field(ge=0, le=1)]


class MethodFigures(Model):
    """One method on one split."""

    positives: Count
    samples: Count
    auc: _Share | None
    """None where the split has one class."""
    log_loss: Annotated[float, pydantic.Field(ge=0)]

    @property
    def error(self) -> float:
        """Two standard errors of the AUC (Hanley and McNeil 1982)."""
        ones, zeros, area = self.positives, self.samples - self.positives, self.auc or 0.0
        first, second = area / (2 - area), 2 * area**2 / (1 + area)
        spread = area * (1 - area) + (ones - 1) * (first - area**2) + (zeros - 1) * (second - area**2)
        return 2 * sqrt(max(spread, 0.0) / max(ones * zeros, 1))


class Method(Model):
    """What a method came to."""

    name: str
    seconds: Annotated[float, pydantic.Field(ge=0)]
    splits: dict[Literal["valid", "test"], MethodFigures]


class Baselines(Model):
    """All of ``baseline.json`` but its seal."""

    format: Literal[1] = FORMAT
    dataset: Hash
    """Fingerprint of the data set."""
    fitted: Count
    """Training samples that methods were fitted to."""
    methods: tuple[Method, ...]


def write_baselines(dataset: Dataset, found: Baselines) -> None:
    """Keep it beside the data set."""
    write_sealed(Path(dataset.path) / BASELINE, found.to_dict())


def read_baselines(dataset: Dataset) -> Baselines | None:
    """What is kept beside a data set; None where nothing is.

    Raises
    ------
    DatasetError
        Where it is damaged, or of other samples.
    """
    path = Path(dataset.path) / BASELINE
    if not path.exists():
        return None
    found = read_sealed(path, Baselines, _ADVICE)
    if found.dataset != dataset.fingerprint:
        raise DatasetError(f"{path} is of other samples than those of the data set; {_ADVICE}")
    return found


def compare_with_baselines(dataset: Dataset, split: str, figures: Mapping[str, Any] | None) -> list[str]:
    """Lines for whoever reads a model's `figures` of a split: a method each, whether it is better, and what to try.

    Nothing where methods have no such figures; what is wrong with ``baseline.json`` is said and ends nothing.
    """
    if dataset.schema.labels or split == "train":
        return []
    try:
        found = read_baselines(dataset)
    except StrataError as error:
        return [f"beside it: {error}"]
    if found is None:
        hint = "not known; `stratarec baseline` fits logistic regression and LightGBM on the same splits"
        return [f"beside it: {hint}"] if dataset.samples("valid") else []
    methods = [(method, method.splits[split]) for method in found.methods if split in method.splits]
    lines = [f"beside it: {_told(method, each)}{_compared(_gain(each, figures))}" for method, each in methods]
    if found.fitted < dataset.samples("train"):
        lines.append(f"  fitted to {found.fitted:,} of {dataset.samples('train'):,} training samples, drawn at random")
    best = max(methods, key=lambda each: _gain(each[1], figures) or 0.0, default=None)
    gain = None if best is None else _gain(best[1], figures)
    if best is not None and gain is not None and gain > _LEAST:
        method, each = best
        noise = f"; one AUC of so few samples is known to {each.error:.4f}" if gain < each.error else ""
        lines.append(f"{method.name} is better than this model, by {gain:.4f}{noise}. To try:")
        lines += [f"  {each}" for each in (*_TRY.get(method.name, ()), "stratarec tune, by validation alone")]
    return lines


def _told(method: Method, each: MethodFigures) -> str:
    area = "-" if each.auc is None else f"{each.auc:.4f} +- {each.error:.4f}"
    return f"{method.name} AUC {area}, log loss {each.log_loss:.4f}, {method.seconds:.1f} s"


def _compared(gain: float | None) -> str:
    if gain is None:
        return ""
    return ": better" if gain > _LEAST else ": worse" if gain < -_LEAST else ": alike"


def _gain(each: MethodFigures, figures: Mapping[str, Any] | None) -> float | None:
    """By how much a method is better than a model: in AUC, or where there is none in log loss."""
    if figures is None:
        return None
    if each.auc is None or figures["auc"] is None:
        return float(figures["log_loss"]) - each.log_loss
    return each.auc - float(figures["auc"])
