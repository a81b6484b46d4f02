"""Fit logistic regression and boosted trees to the training split, and test them on the other
splits.

*Logistic regression.* Ids are one-hot columns; the ids of a list are weighted by one over their
number. Dense features are unchanged. The L2 penalty is first strong and then weakened as long as
the validation loss improves. Each fit starts from the previous one.

*Trees* (LightGBM). Ids of small vocabularies are categorical features. Ids of large ones are, too,
or each is replaced by two numbers, whichever has the lower validation loss: the positive rate of
the training samples with this id, smoothed towards the mean, and their count. For a training
sample, only the four other folds are counted, so that its own label is not included. A list is
replaced by its mean rate and its length. Validation determines the number of trees.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import BASELINE
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.errors import ConfigError, DatasetError
from stratarec.io.atomic import check_output
from stratarec.models.metrics import Samples
from stratarec.progress import Progress
from stratarec.training.baseline.baselines import Baselines, Method, MethodFigures, write_baselines
from stratarec.training.steps.pair_rates import sums_of_other_parts

# Maximum number of ids and numbers of samples in memory; with the copies that methods make, about 2
# GiB.
_MOST_VALUES = 40_000_000


def fit_methods(
    dataset: Dataset,
    progress: Progress,
    *,
    seed: int = 0,
    threads: int = 0,
    most_values: int = _MOST_VALUES,
) -> Baselines:
    """Fit and test every method, and write metrics and scores into the data set.

    Parameters
    ----------
    most_values : int
        Maximum number of ids and numbers of training samples in memory. For validation it is a
        quarter of that.

    Raises
    ------
    ConfigError
        If the extra ``baseline`` is not installed, or the data set has several labels or no
        features.
    DatasetError
        If the samples of a split all have the same class. Only the test split may be empty.
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
                    f"{dataset.path}: {len(part.label)} samples drawn from its {split} "
                    "split have a single class"
                )
        tables = dataset.table_rows()
        settings = Settings(
            {item.name: tables[item.vocabulary] for item in dataset.schema.sparse}, seed, threads
        )
        fitted: dict[str, tuple[Predict, float]] = {}
        for name, fit in METHODS.items():
            progress.say(
                f"fitting {name} to {len(train.label):,} of {dataset.samples('train'):,} training samples"
            )
            began = time.perf_counter()
            fitted[name] = fit(train, valid, settings), time.perf_counter() - began
        splits = [split for split in ("valid", "test") if dataset.samples(split)]
        result = {split: _tested(dataset, split, fitted, progress) for split in splits}
        methods = tuple(
            Method(
                name=name,
                seconds=round(seconds, 2),
                splits={split: figures[name] for split, (figures, _) in result.items()},  # type: ignore[misc]
            )
            for name, (_, seconds) in fitted.items()
        )
        scores = np.concatenate([scores for _, scores in result.values()], axis=1)
        return write_baselines(dataset, len(train.label), methods, scores)


def check_installed() -> None:
    """Raise `ConfigError` if the libraries that fit the methods are not installed."""
    try:
        import lightgbm  # noqa: F401
        import sklearn  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: the shared library for threads is missing
        raise ConfigError(
            f"baseline needs lightgbm and scikit-learn ({error}): pip install 'stratarec[baseline]'"
        ) from error


def _check(dataset: Dataset) -> None:
    if dataset.schema.labels:
        raise ConfigError(
            f"{dataset.path} has several labels, and baseline supports one: name it as "
            "data.source.schema.label, and prepare it at another data.path"
        )
    if not dataset.schema.names:
        raise ConfigError(
            f"{dataset.path} has no features: name some in data.source.schema and prepare it again"
        )
    for split in ("train", "valid", "test"):
        count = dataset.label_counts(split)[dataset.schema.label_column]
        if split == "test" and not count.known:
            continue
        if not 0 < count.positives < count.known:
            content = f"{count.known:,} samples of a single class" if count.known else "no samples"
            raise DatasetError(
                f"{dataset.path} has {content} in its {split} split, and baseline needs both classes: set "
                "data.split and prepare it again"
            )


def _tested(
    dataset: Dataset, split: str, fitted: dict[str, tuple[Predict, float]], progress: Progress
) -> tuple[dict[str, MethodFigures], NDArray[np.float32]]:
    """Return each method's metrics on a split, by name, and the logits of all methods, ``[methods,
    N]``.
    """
    labels: list[NDArray[np.float32]] = []
    weights: list[NDArray[np.float32]] = []
    logits: dict[str, list[NDArray[np.float32]]] = {name: [] for name in fitted}
    for part in blocks(dataset, split, progress):
        labels.append(part.label)
        weights += [] if part.weight is None else [part.weight]
        for name, (predict, _) in fitted.items():
            logits[name].append(predict(part).astype(np.float32))
    label, weight = np.concatenate(labels), np.concatenate(weights) if weights else None
    scores = np.stack([np.concatenate(item) for item in logits.values()])
    figures = (_figures(Samples(label, score, weight=weight)) for score in scores)
    return dict(zip(logits, figures, strict=True)), scores


def _figures(samples: Samples) -> MethodFigures:
    return MethodFigures(
        positives=int(samples.truth.sum()),
        samples=len(samples.truth),
        auc=None if np.isnan(samples.auc) else samples.auc,
        log_loss=samples.log_loss,
    )


Doubles = NDArray[np.float64]
Predict = Callable[["Arrays"], Doubles]
"""Function from samples to their logits, ``[N]``."""

# Strongest penalty (smallest C), ratio between the C of two successive penalties, number of
# penalties, and maximum number of iterations of a fit.
_STRONGEST = 0.003
_WEAKER = 4.0
_PENALTIES = 7
_ITERATIONS = 150
# Maximum number of one-hot columns; the solver stores twenty numbers for each.
_MOST_COLUMNS = 1 << 21
_TREES, _PATIENCE = 2000, 50
_SETTINGS = {
    "objective": "binary", "learning_rate": 0.05, "num_leaves": 31, "min_data_in_leaf": 20, "verbosity": -1,
    "deterministic": True, "force_row_wise": True,
}  # fmt: skip
# With fewer ids and numbers than this, LightGBM uses one thread: on two busy cores, two threads
# took 15 s instead of 0.5 s.
_SEVERAL_THREADS = 4_000_000
# Number of rows of the largest vocabulary that is used as a categorical feature, weight of the mean
# rate in samples, and number of folds.
_CATEGORIES, _PRIOR, _FOLDS = 255, 10.0, 5


class Settings(NamedTuple):
    """Settings of all methods."""

    rows: Mapping[str, int]
    """Feature -> number of rows of the feature's table."""
    seed: int
    threads: int
    """Maximum number of threads; 0 for all cores."""


def regression(train: Arrays, valid: Arrays, settings: Settings) -> Predict:
    """Fit logistic regression, and return a function that predicts with it."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    most = _MOST_COLUMNS
    while sum(min(rows, most) for rows in settings.rows.values()) > _MOST_COLUMNS:
        most //= 2
    columns = {key: min(rows, most) for key, rows in settings.rows.items()}
    design, seen = _one_hot(train, columns), _one_hot(valid, columns)
    model = LogisticRegression(max_iter=_ITERATIONS, warm_start=True, random_state=settings.seed)
    least, best = np.inf, (np.zeros(design.shape[1]), 0.0)
    for number in range(_PENALTIES):
        model.set_params(C=_STRONGEST * _WEAKER**number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(design, train.label, sample_weight=train.weight)
        loss = Samples(
            valid.label, model.decision_function(seen).astype(np.float32), weight=valid.weight
        ).log_loss
        if loss >= least:
            break
        least, best = loss, (model.coef_[0].copy(), float(model.intercept_[0]))

    weights, bias = best
    return lambda samples: np.asarray(_one_hot(samples, columns) @ weights + bias)


def trees(train: Arrays, valid: Arrays, settings: Settings) -> Predict:
    """Fit LightGBM's boosted trees, and return a function that predicts with them.

    If there are large vocabularies, trees are fitted twice: with their ids as categories, and with
    rates in place of the ids. Validation decides.
    """
    single = [key for key, bag in train.bags.items() if not bag.is_list]
    small = [key for key in single if settings.rows[key] <= _CATEGORIES]
    choices = [small] if small == single else [small, single]
    return min(
        (_fit_trees(train, valid, settings, native) for native in choices), key=lambda fitted: fitted[0]
    )[1]


def _fit_trees(
    train: Arrays, valid: Arrays, settings: Settings, native: list[str]
) -> tuple[float, Predict]:
    """Return the validation loss of trees, and their predictions. Ids of the features `native` are
    categories.
    """
    import lightgbm

    fold = np.random.default_rng(settings.seed).integers(0, _FOLDS, len(train.label))
    shares = {key: _Shares(bag, train) for key, bag in train.bags.items() if key not in native}

    def table(samples: Arrays, fold: NDArray[np.int64] | None = None) -> Any:
        columns = [
            *samples.dense.T,
            *(samples.bags[key].filled(samples.bags[key].ids, -1) for key in native),
        ]
        for key, share in shares.items():
            columns += share.columns(samples.bags[key], None if fold is None else (fold, samples.label))
        return np.stack([column.astype(np.float32) for column in columns], axis=1)

    places = list(range(train.dense.shape[1], train.dense.shape[1] + len(native)))
    data = lightgbm.Dataset(
        table(train, fold), train.label, weight=train.weight, categorical_feature=places
    )
    seen = lightgbm.Dataset(table(valid), valid.label, weight=valid.weight, reference=data)
    threads = settings.threads if train.values >= _SEVERAL_THREADS else 1
    chosen = {**_SETTINGS, "seed": settings.seed, "num_threads": threads}
    stopping = lightgbm.early_stopping(_PATIENCE, verbose=False)
    model = lightgbm.train(chosen, data, _TREES, valid_sets=[seen], callbacks=[stopping])

    def predict(samples: Arrays) -> Doubles:
        return np.asarray(model.predict(table(samples), num_iteration=model.best_iteration, raw_score=True))

    return model.best_score["valid_0"]["binary_logloss"], predict


METHODS: Mapping[str, Callable[[Arrays, Arrays, Settings], Predict]] = {
    "logistic regression": regression,
    "LightGBM": trees,
}


class _Shares:
    """Counts of training samples and of positive ones for each id of a feature, and columns that
    follow from them.
    """

    def __init__(self, bag: Bags, train: Arrays) -> None:
        self._ids, self._place = np.unique(bag.ids, return_inverse=True)
        self._rate = float(np.average(train.label, weights=train.weight)) if len(train.label) else 0.0
        label = np.repeat(train.label, bag.lengths)
        self._is_list = bag.is_list
        self._known = np.bincount(self._place, minlength=len(self._ids)).astype(np.float64)
        self._positive: Doubles = np.bincount(self._place, label, len(self._ids)).astype(np.float64)

    def columns(
        self, bag: Bags, training: tuple[NDArray[np.int64], NDArray[np.float32]] | None
    ) -> list[Doubles]:
        """Return columns that replace the ids of a feature, with one number per sample.

        `training` has the folds and labels of the samples if they are the training samples;
        otherwise it is None.
        """
        if training is None:
            place = np.searchsorted(self._ids, bag.ids)
            place[place == len(self._ids)] = 0
            seen = self._ids[place] == bag.ids if len(self._ids) else np.zeros(len(bag.ids), dtype=bool)
            total, positive = (
                np.where(seen, column[place], 0.0) for column in (self._known, self._positive)
            )
        else:
            fold, label = (np.repeat(column, bag.lengths) for column in training)
            total = sums_of_other_parts(self._place, fold, np.ones_like(label))
            positive = sums_of_other_parts(self._place, fold, label)
        share = (positive + _PRIOR * self._rate) / (total + _PRIOR)
        if not self._is_list:
            return [bag.filled(share, self._rate), bag.filled(np.log1p(total), 0)]
        row, size = np.repeat(np.arange(len(bag.lengths)), bag.lengths), len(bag.lengths)
        mean = np.bincount(row, share, minlength=size) / np.maximum(bag.lengths, 1)
        return [np.where(bag.lengths > 0, mean, self._rate), bag.lengths.astype(np.float64)]


def _one_hot(samples: Arrays, columns: Mapping[str, int]) -> Any:
    """Return a sparse matrix ``[N, F + sum of columns]`` with the dense features, and the share of
    each id in a sample's list.
    """
    from scipy import sparse

    parts = [sparse.csr_matrix(samples.dense.astype(np.float64))] if samples.dense.shape[1] else []
    for key, (ids, lengths) in samples.bags.items():
        is_known = ids < columns[key]
        ends = np.concatenate([[0], np.cumsum(is_known)])[np.concatenate([[0], np.cumsum(lengths)])]
        share = np.repeat(1.0 / np.maximum(lengths, 1), lengths)
        parts.append(
            sparse.csr_matrix((share[is_known], ids[is_known], ends), shape=(len(lengths), columns[key]))
        )
    return sparse.hstack(parts, format="csr")


_BATCH = 1 << 16


class Bags(NamedTuple):
    """Ids of one feature for all samples."""

    ids: NDArray[np.int64]
    """Ids of all samples, one sample after another, ``[sum of lengths]``."""
    lengths: NDArray[np.int64]
    """Number of ids of each sample, ``[N]``."""

    @property
    def is_list(self) -> bool:
        """Whether a sample has several ids."""
        return bool((self.lengths > 1).any())

    def filled(self, values: NDArray[Any], missing: float) -> Doubles:
        """Return, for each sample, the number of its first id, or `missing` if it has no ids."""
        ends = np.cumsum(self.lengths)
        column = np.full(len(ends), missing, dtype=np.float64)
        column[self.lengths > 0] = values[(ends - self.lengths)[self.lengths > 0]]
        return column


class Arrays(NamedTuple):
    """N samples as arrays."""

    label: NDArray[np.float32]
    """Labels, ``[N]``."""
    weight: NDArray[np.float32] | None
    """Sample weights, ``[N]``; None if there are none."""
    dense: NDArray[np.float32]
    """Dense features, ``[N, F]``."""
    bags: dict[str, Bags]

    @property
    def values(self) -> int:
        """Total number of ids and dense values."""
        return self.dense.size + sum(len(bag.ids) for bag in self.bags.values())


def read(dataset: Dataset, split: str, most: int, seed: int, progress: Progress) -> Arrays:
    """Read a split in random order, until it ends or the samples have at least `most` ids and dense
    values.
    """
    parts, values = [], 0
    for part in blocks(dataset, split, progress, seed=seed):
        parts.append(part)
        values += part.values
        if values >= most:
            break
    return _joined(parts)


def blocks(
    dataset: Dataset, split: str, progress: Progress, *, seed: int | None = None
) -> Iterator[Arrays]:
    """Yield the samples of a split in parts: in the stored order, or with a `seed` in random
    order.
    """
    config = LoaderConfig(
        batch_size=_BATCH, shuffle=seed is not None, seed=seed or 0, unit="sample", expand=True
    )
    loader = Loader(dataset, split, config)
    progress.start(f"read {split}", loader.samples, "samples")
    try:
        for batch in loader.epoch(0):
            yield _arrays(batch)
            progress.advance(batch.size)
    finally:
        progress.finish()


def _arrays(batch: Batch) -> Arrays:
    bags = {key: batch.sparse[key] for key in batch.sparse.keys}
    return Arrays(
        label=batch.label.cpu().numpy(),
        weight=None if batch.weight is None else batch.weight.cpu().numpy(),
        dense=batch.dense.cpu().numpy(),
        bags={
            key: Bags(bag.values.cpu().numpy(), bag.lengths().cpu().numpy()) for key, bag in bags.items()
        },
    )


def _joined(parts: list[Arrays]) -> Arrays:
    weights = [part.weight for part in parts if part.weight is not None]
    return Arrays(
        label=np.concatenate([part.label for part in parts]),
        weight=np.concatenate(weights) if weights else None,
        dense=np.concatenate([part.dense for part in parts]),
        bags={
            key: Bags(
                *(
                    np.concatenate(column)
                    for column in zip(*(part.bags[key] for part in parts), strict=True)
                )
            )
            for key in parts[0].bags
        },
    )
