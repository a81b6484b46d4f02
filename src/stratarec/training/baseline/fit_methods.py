"""Fits every method to the training split, and tests it on the others."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import BASELINE
from stratarec.errors import ConfigError, DatasetError
from stratarec.io.atomic import check_output
from stratarec.models.metrics import Samples, auc
from stratarec.progress import Progress
from stratarec.training.baseline.arrays import Arrays, blocks, read
from stratarec.training.baseline.beside import Baselines, Method, MethodFigures, write_baselines
from stratarec.training.baseline.methods import METHODS, Predict, Settings

# Ids and numbers of the samples that are held: some 2 GiB with the copies that methods make.
_MOST_VALUES = 40_000_000


def fit_methods(
    dataset: Dataset, progress: Progress, *, seed: int = 0, threads: int = 0, most_values: int = _MOST_VALUES
) -> Baselines:
    """Fit and test every method, and keep what that gives beside the data set.

    Parameters
    ----------
    most_values : int
        Ids and numbers of training samples that memory is to hold; of validation a quarter of that.

    Raises
    ------
    ConfigError
        Where the extra ``baseline`` is not installed, or the data have several labels or no features.
    DatasetError
        Where the validation or the test split has samples of one class alone.
    """
    check_installed()
    _check(dataset)
    check_output(Path(dataset.path) / BASELINE)
    with dataset.locked():
        train = read(dataset, "train", most_values, seed, progress)
        valid = read(dataset, "valid", most_values // 4, seed, progress)
        for split, part in (("train", train), ("valid", valid)):
            if not 0 < part.label.sum() < len(part.label):
                raise DatasetError(
                    f"{dataset.path}: of its {split} split {len(part.label)} samples of one class came up"
                )
        tables = dataset.table_rows()
        settings = Settings({each.name: tables[each.vocabulary] for each in dataset.schema.sparse}, seed, threads)
        fitted: dict[str, tuple[Predict, float]] = {}
        for name, fit in METHODS.items():
            progress.say(f"fitting {name} to {len(train.label):,} of {dataset.samples('train'):,} training samples")
            began = time.perf_counter()
            fitted[name] = fit(train, valid, settings), time.perf_counter() - began
        found = {split: _tested(dataset, split, fitted, progress) for split in ("valid", "test")}
        made = Baselines(
            dataset=dataset.fingerprint,
            fitted=len(train.label),
            methods=tuple(
                Method(
                    name=name,
                    seconds=round(seconds, 2),
                    splits={split: each[name] for split, each in found.items() if each},  # type: ignore[misc]
                )
                for name, (_, seconds) in fitted.items()
            ),
        )
        write_baselines(dataset, made)
    return made


def check_installed() -> None:
    """Refuse where what fits is not there."""
    try:
        import lightgbm  # noqa: F401
        import sklearn  # noqa: F401
    except (ImportError, OSError) as error:  # the latter: without its shared library for threads
        raise ConfigError(
            f"baseline needs lightgbm and scikit-learn, which are not installed ({error}): "
            "pip install 'stratarec[baseline]'"
        ) from error


def _check(dataset: Dataset) -> None:
    if dataset.schema.labels:
        raise ConfigError(
            f"{dataset.path} has several labels, and baseline is of one: name one as data.source.schema.label, and "
            "prepare it at another data.path"
        )
    if not dataset.schema.names:
        raise ConfigError(f"{dataset.path} has no features: name some in data.source.schema and prepare it again")
    for split in ("train", "valid", "test"):
        count = dataset.label_counts(split)[dataset.schema.label_column]
        if split == "test" and not count.known:
            continue
        if not 0 < count.positives < count.known:
            what = f"{count.known:,} samples of one class alone" if count.known else "no samples"
            raise DatasetError(
                f"{dataset.path} has {what} in its {split} split, and baseline needs both classes: set data.split and "
                "prepare it again"
            )


def _tested(
    dataset: Dataset, split: str, fitted: dict[str, tuple[Predict, float]], progress: Progress
) -> dict[str, MethodFigures]:
    """Each method on all samples of a split; nothing where there are none."""
    if not dataset.samples(split):
        return {}
    labels: list[NDArray[np.float32]] = []
    weights: list[NDArray[np.float32]] = []
    logits: dict[str, list[NDArray[np.float64]]] = {name: [] for name in fitted}
    for part in blocks(dataset, split, progress):
        labels.append(part.label)
        weights += [] if part.weight is None else [part.weight]
        for name, (predict, _) in fitted.items():
            logits[name].append(_logits(predict, part))
    label, weight = np.concatenate(labels), np.concatenate(weights) if weights else None
    return {name: _figures(label, np.concatenate(each), weight) for name, each in logits.items()}


def _logits(predict: Predict, samples: Arrays) -> NDArray[np.float64]:
    probability = np.clip(predict(samples), 1e-7, 1 - 1e-7)
    found: NDArray[np.float64] = np.log(probability) - np.log1p(-probability)
    return found


def _figures(
    label: NDArray[np.float32], logit: NDArray[np.float64], weight: NDArray[np.float32] | None
) -> MethodFigures:
    area = auc(label, logit, weight)
    return MethodFigures(
        positives=int(label.sum()),
        samples=len(label),
        auc=None if np.isnan(area) else area,
        log_loss=Samples(label, logit, weight=weight).log_loss,
    )
