"""Metrics of simpler methods on the splits of a data set, and their comparison with a model.

Metrics are stored in ``baseline.json`` in the directory of the data set, and the scores of all
samples next to it. Both files are deleted when the data set is prepared again. A model and a method
are compared sample by sample, on the loss and on the sample's rank among samples of the other class
(`Samples.placements`). These values are correlated between the two, so the errors of their
differences are much smaller than the errors of the metrics.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import pydantic
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import BASELINE, BASELINE_SCORES
from stratarec.errors import DatasetError, StrataError
from stratarec.io.atomic import file_hash, write_atomic
from stratarec.io.sealed import Count, Hash, Model, read_sealed, regular_file_below, write_sealed
from stratarec.models import ModelConfig
from stratarec.models.metrics import Z95, Samples, mean_and_error
from stratarec.models.zoo.config import MOST_TREES, EnsembleConfig
from stratarec.training.evaluate import ScoredSamples

FORMAT: Literal[1] = 1
_ADVICE = "run `stratarec baseline` again, or remove it"
# Smaller differences of AUC, and smaller relative differences of log loss, are ignored.
_MIN_GAIN = 5e-4
_Share = Annotated[float, pydantic.Field(ge=0, le=1)]


class MethodFigures(Model):
    """Metrics of one method on one split."""

    positives: Count
    samples: Count
    auc: _Share | None
    """AUC; None if all samples of the split have the same class."""
    log_loss: Annotated[float, pydantic.Field(ge=0)]


class Method(Model):
    """Metrics of one method on the validation and test splits, and the seconds that fitting it
    took.
    """

    name: str
    seconds: Annotated[float, pydantic.Field(ge=0)]
    splits: dict[Literal["valid", "test"], MethodFigures]


class Baselines(Model):
    """Content of ``baseline.json``."""

    format: Literal[1] = FORMAT
    dataset: Hash
    """Fingerprint of the data set."""
    fitted: Count
    """Number of training samples to which the methods were fitted."""
    methods: tuple[Method, ...]
    scores: Hash
    """Hash of the file with the methods' scores."""


def write_baselines(
    dataset: Dataset, fitted: int, methods: tuple[Method, ...], scores: NDArray[np.float32]
) -> Baselines:
    """Write ``baseline.json`` and the scores into the data set.

    Parameters
    ----------
    scores : array
        ``[methods, N]`` logits of the validation samples and then of the test samples, in the order
        in which the data set stores them.
    """
    path = Path(dataset.path)
    write_atomic(path / BASELINE_SCORES, lambda file: np.save(file, scores, allow_pickle=False))
    content = Baselines(
        dataset=dataset.fingerprint,
        fitted=fitted,
        methods=methods,
        scores=file_hash(path / BASELINE_SCORES),
    )
    write_sealed(path / BASELINE, content.to_dict())
    return content


def read_baselines(dataset: Dataset) -> Baselines | None:
    """Read ``baseline.json`` of a data set; None if the file does not exist.

    Raises
    ------
    DatasetError
        If the file is damaged, or belongs to other samples than those of the data set.
    """
    path = Path(dataset.path) / BASELINE
    if not path.exists():
        return None
    baselines = read_sealed(path, Baselines, _ADVICE)
    if baselines.dataset != dataset.fingerprint:
        raise DatasetError(f"{path} belongs to other samples than those of the data set; {_ADVICE}")
    return baselines


def read_scores(dataset: Dataset, baselines: Baselines) -> dict[str, NDArray[np.float32]]:
    """Return the logits of all methods for each split, ``[methods, N]``; `DatasetError` if their
    file is damaged.
    """
    valid = dataset.samples("valid")
    shape = (len(baselines.methods), dataset.samples("valid") + dataset.samples("test"))
    try:
        path = regular_file_below(Path(dataset.path), BASELINE_SCORES)
        if file_hash(path) != baselines.scores:
            raise ValueError(f"{path} was changed after it was written: its hash does not match")
        scores = np.load(path, allow_pickle=False)
        if scores.shape != shape or scores.dtype != np.float32:
            raise ValueError(
                f"{path} has {scores.dtype} of shape {scores.shape}, expected float32 of shape {shape}"
            )
    except (OSError, ValueError, EOFError) as error:
        raise DatasetError(f"{error}; {_ADVICE}") from error
    return {"valid": scores[:, :valid], "test": scores[:, valid:]}


def compare_with_baselines(
    dataset: Dataset, split: str, scored: ScoredSamples | None, model: ModelConfig
) -> list[str]:
    """Return sentences that compare a model's scores on a split with each method, and that say what
    to try.

    The advice is for a model of the configuration `model`. Whether more epochs help, the verdict on
    a run says. The list is empty if the methods have no metrics for the split. If a file is
    damaged, the list contains the error message, and no error is raised.
    """
    if dataset.schema.labels or split == "train":
        return []
    try:
        baselines = read_baselines(dataset)
        scores = None if baselines is None else read_scores(dataset, baselines)[split]
    except StrataError as error:
        return [str(error)]
    if baselines is None or scores is None:
        hint = "none fitted yet; run `stratarec baseline` to compare with logistic regression and LightGBM"
        return [hint] if dataset.samples("valid") else []
    if not scores.shape[1]:
        return []
    sentences, better = [], list[str]()
    for method, logit in zip(baselines.methods, scores, strict=True):
        differences = [] if scored is None else _differences(scored, logit)
        described = " and ".join(difference.description for difference in differences)
        sentences.append(f"{_describe(method, split)}{described and f'; this model: {described}'}")
        signs = {difference.sign for difference in differences}
        better += [method.name] if -1 in signs and 1 not in signs else []
    if baselines.fitted < dataset.samples("train"):
        total = dataset.samples("train")
        sentences.append(
            f"they were fitted to a random sample of {baselines.fitted:,} of {total:,} training samples"
        )
    if better:
        advice = (*_advice(better[-1], model), "stratarec tune, which uses validation only")
        sentences.append(f"better than this model: {' and '.join(better)}. Try {'; or '.join(advice)}")
    return sentences


def _advice(better: str, model: ModelConfig) -> list[str]:
    """Return what to change in a model, if the method `better` is better than it.

    An ensemble has the networks of other kinds as members, so it is never replaced by a single
    network.
    """
    is_ensemble = isinstance(model, EnsembleConfig)
    if better == "LightGBM" and isinstance(model, EnsembleConfig):
        return [] if model.trees else [f"model.trees={MOST_TREES}, boosted trees as further members"]
    kinds = () if is_ensemble else ("lr", "deepfm") if better != "LightGBM" else ("dcnv2", "finalmlp")
    others = " or ".join(kind for kind in kinds if kind != model.kind)
    if better == "LightGBM":
        return ["model.kind=ensemble, which boosted trees can join (model.trees)", f"model.kind={others}"]
    less = ["more model.dropout, and more weight decay of network and rows"] if model.kind != "lr" else []
    few = f"model.kind={others}: the log may contain little more than the positive rate of each value"
    return [few, *less] if others else less


class _Difference(NamedTuple):
    """Difference between a model's metric and a method's metric on the same samples."""

    name: str
    value: float
    error: float
    """Half the width of the 95 % interval of the difference."""
    sign: int
    """1 if the model is significantly better, -1 if it is significantly worse, otherwise 0."""

    @property
    def description(self) -> str:
        words = ("equal within chance", "better", "worse")
        return f"{self.name} {self.value:+.4f} +- {self.error:.4f} ({words[self.sign]})"


def _differences(scored: ScoredSamples, logit: NDArray[np.float32]) -> list[_Difference]:
    """Return the differences of AUC and log loss between a model and a method; no AUC if there is
    only one class.
    """
    weight, user = scored.weight if len(scored.weight) else None, scored.user if len(scored.user) else None
    mine, other = (Samples(scored.label, score, user, weight) for score in (scored.logit, logit))
    gain, error = mean_and_error(mine.losses - other.losses, mine.scale, mine.user)
    figures = [
        ("AUC", mine.auc - other.auc, mine.auc_error(mine.placements - other.placements), 1, _MIN_GAIN),
        ("log loss", gain, error, -1, _MIN_GAIN * other.log_loss),
    ]
    return [
        _Difference(
            name, value, Z95 * error, sign * int(np.sign(value)) * (abs(value) > max(Z95 * error, least))
        )
        for name, value, error, sign, least in figures
        if not np.isnan(value)
    ]


def _describe(method: Method, split: str) -> str:
    figures = method.splits[split]  # type: ignore[index]
    auc = "" if figures.auc is None else f"AUC {figures.auc:.4f}, "
    return f"{method.name}: {auc}log loss {figures.log_loss:.4f}, {method.seconds:.1f} s"
