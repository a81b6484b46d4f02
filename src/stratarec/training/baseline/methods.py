"""Logistic regression and boosted trees, each as those who know it use it, on what the model is given too.

*Regression*: ids one-hot, those of lists with one over their number, numbers as they are, an L2 penalty. From a strong
one it is weakened as long as validation gets better, each fit from where the last one ended.

*Trees* (LightGBM): ids of small vocabularies as its own categories; of others the share of positives that training
samples with the id have, drawn to that of all, and how many they are. A training sample is told the share among the
samples of the four other fifths: its own label would tell itself. Of a list the mean share, and how many ids it has.
Validation says how many trees there are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stratarec.training.baseline.arrays import Arrays, Bags

Doubles = NDArray[np.float64]
Predict = Callable[[Arrays], Doubles]
"""Samples -> their probabilities, ``[N]``."""

# The strongest penalty, over how many times weaker the next one is, and how many there are.
_STRONGEST, _WEAKER, _PENALTIES, _ITERATIONS = 0.003, 4.0, 7, 150
# One-hot columns, each with twenty numbers of the solver.
_MOST_COLUMNS = 1 << 21
_TREES, _PATIENCE = 2000, 50
_SETTINGS = {
    "objective": "binary", "learning_rate": 0.05, "num_leaves": 31, "min_data_in_leaf": 20, "verbosity": -1,
    "deterministic": True, "force_row_wise": True,
}  # fmt: skip
# Ids and numbers of fewer samples are learned by one thread: on two busy cores two took 15 s in place of 0.5.
_SEVERAL_THREADS = 4_000_000
# Ids that are categories; and how many samples at the rate of all a share begins with.
_CATEGORIES, _PRIOR, _FOLDS = 255, 10.0, 5


class Settings(NamedTuple):
    """What methods are told beside samples."""

    rows: Mapping[str, int]
    """Feature -> how many ids it may have."""
    seed: int
    threads: int
    """0 for all cores."""


def regression(train: Arrays, valid: Arrays, settings: Settings) -> Predict:
    """Fit logistic regression."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    most = _MOST_COLUMNS
    while sum(min(rows, most) for rows in settings.rows.values()) > _MOST_COLUMNS:
        most //= 2
    columns = {key: min(rows, most) for key, rows in settings.rows.items()}
    known, seen = _one_hot(train, columns), _one_hot(valid, columns)
    model = LogisticRegression(max_iter=_ITERATIONS, warm_start=True, random_state=settings.seed)
    least, best = np.inf, (np.zeros(known.shape[1]), 0.0)
    for number in range(_PENALTIES):
        model.set_params(C=_STRONGEST * _WEAKER**number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(known, train.label, sample_weight=train.weight)
        loss = _log_loss(model.predict_proba(seen)[:, 1], valid)
        if loss >= least:
            break
        least, best = loss, (model.coef_[0].copy(), float(model.intercept_[0]))

    def predict(samples: Arrays) -> Doubles:
        weights, bias = best
        logit = _one_hot(samples, columns) @ weights + bias
        found: Doubles = 1 / (1 + np.exp(-np.clip(logit, -80, 80)))
        return found

    return predict


def trees(train: Arrays, valid: Arrays, settings: Settings) -> Predict:
    """Fit LightGBM."""
    import lightgbm

    fold = np.random.default_rng(settings.seed).integers(0, _FOLDS, len(train.label))
    native = [key for key, bag in train.bags.items() if settings.rows[key] <= _CATEGORIES and bag.single]
    shares = {key: _Shares(bag, train) for key, bag in train.bags.items() if key not in native}

    def table(samples: Arrays, fold: NDArray[np.int64] | None = None) -> Any:
        columns = [*samples.dense.T, *(samples.bags[key].ids for key in native)]
        for key, share in shares.items():
            columns += share.columns(samples.bags[key], None if fold is None else (fold, samples.label))
        return np.stack([column.astype(np.float32) for column in columns], axis=1)

    places = list(range(train.dense.shape[1], train.dense.shape[1] + len(native)))
    data = lightgbm.Dataset(table(train, fold), train.label, weight=train.weight, categorical_feature=places)
    seen = lightgbm.Dataset(table(valid), valid.label, weight=valid.weight, reference=data)
    threads = settings.threads if train.values >= _SEVERAL_THREADS else 1
    chosen = {**_SETTINGS, "seed": settings.seed, "num_threads": threads}
    stopping = lightgbm.early_stopping(_PATIENCE, verbose=False)
    model = lightgbm.train(chosen, data, _TREES, valid_sets=[seen], callbacks=[stopping])

    def predict(samples: Arrays) -> Doubles:
        return np.asarray(model.predict(table(samples), num_iteration=model.best_iteration))

    return predict


METHODS: Mapping[str, Callable[[Arrays, Arrays, Settings], Predict]] = {
    "logistic regression": regression,
    "LightGBM": trees,
}


class _Shares:
    """The share of positives of each id of a feature among training samples."""

    def __init__(self, bag: Bags, train: Arrays) -> None:
        self._ids, self._place = np.unique(bag.ids, return_inverse=True)
        self._rate = float(np.average(train.label, weights=train.weight)) if len(train.label) else 0.0
        label = np.repeat(train.label, bag.lengths)
        self._known = np.bincount(self._place, minlength=len(self._ids)).astype(np.float64)
        self._positive: Doubles = np.bincount(self._place, label, len(self._ids)).astype(np.float64)

    def columns(self, bag: Bags, training: tuple[NDArray[np.int64], NDArray[np.float32]] | None) -> list[Doubles]:
        """Of other samples, or with their folds and labels of the training samples, a number a sample in each."""
        if training is None:
            place = np.searchsorted(self._ids, bag.ids)
            place[place == len(self._ids)] = 0
            seen = self._ids[place] == bag.ids if len(self._ids) else np.zeros(len(bag.ids), dtype=bool)
            known, positive = (np.where(seen, column[place], 0.0) for column in (self._known, self._positive))
        else:
            known, positive = self._others(bag, *training)
        share = (positive + _PRIOR * self._rate) / (known + _PRIOR)
        if bag.single:
            return [share, np.log1p(known)]
        row, size = np.repeat(np.arange(len(bag.lengths)), bag.lengths), len(bag.lengths)
        mean = np.bincount(row, share, minlength=size) / np.maximum(bag.lengths, 1)
        return [np.where(bag.lengths > 0, mean, self._rate), bag.lengths.astype(np.float64)]

    def _others(self, bag: Bags, fold: NDArray[np.int64], label: NDArray[np.float32]) -> tuple[Doubles, Doubles]:
        """Samples, and positive ones, with each id that are in other folds than its sample."""
        fold, label = np.repeat(fold, bag.lengths), np.repeat(label, bag.lengths)
        known, positive = self._known[self._place], self._positive[self._place]
        for number in range(_FOLDS):
            mine = fold == number
            place = self._place[mine]
            known[mine] -= np.bincount(place, minlength=len(self._ids))[place]
            positive[mine] -= np.bincount(place, label[mine], minlength=len(self._ids))[place]
        return known, positive


def _one_hot(samples: Arrays, columns: Mapping[str, int]) -> Any:
    """``[N, F + sum of columns]`` numbers, and how often each id is in a sample's bag over the bag's length."""
    from scipy import sparse

    parts = [sparse.csr_matrix(samples.dense.astype(np.float64))] if samples.dense.shape[1] else []
    for key, (ids, lengths) in samples.bags.items():
        kept = ids < columns[key]
        ends = np.concatenate([[0], np.cumsum(kept)])[np.concatenate([[0], np.cumsum(lengths)])]
        share = np.repeat(1.0 / np.maximum(lengths, 1), lengths)
        parts.append(sparse.csr_matrix((share[kept], ids[kept], ends), shape=(len(lengths), columns[key])))
    return sparse.hstack(parts, format="csr")


def _log_loss(probability: Doubles, samples: Arrays) -> float:
    found = np.clip(probability, 1e-7, 1 - 1e-7)
    each = -np.where(samples.label > 0.5, np.log(found), np.log1p(-found))
    return float(np.average(each, weights=samples.weight))
