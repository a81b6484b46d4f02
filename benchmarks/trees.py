"""LightGBM on dense columns and out-of-fold target encodings, the usual choice for small click
logs.

Each categorical feature becomes two columns. The first is the click rate of its value, shrunk
towards the overall rate,

    (P_v + a p) / (N_v + a),

with P_v of N_v training samples positive, overall rate p, and a = 20 (Micci-Barreca 2001). Training
samples are encoded out of fold, so that their own label is not in their columns (target leakage,
Prokhorenkova et al. 2018). The second column is log(1 + N_v). A history is represented by its last
value. Legend: N samples, F dense columns, S features.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.registry import import_peer
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig

FOLDS, STRENGTH, RATE = 5, 20.0, 0.05
GRID: tuple[dict[str, Any], ...] = (
    {"num_leaves": 15, "feature_fraction": 0.5, "encoded": True},
    {"num_leaves": 63, "feature_fraction": 0.5, "encoded": True},
    {"num_leaves": 255, "feature_fraction": 0.5, "encoded": True},
)
"""Settings that validation chooses from; without `encoded`, trees use only the dense columns."""
FIXED = {
    "objective": "binary", "metric": "binary_logloss", "min_data_in_leaf": 50,
    "bagging_fraction": 0.8, "bagging_freq": 1, "lambda_l2": 1.0, "verbosity": -1, "deterministic": True,
}  # fmt: skip
MOST_TREES, PATIENCE = 2000, 50
# Above this number of samples, trees use twice the learning rate, so that half as many are grown.
_MANY = 1_000_000


@dataclass(frozen=True)
class Samples:
    """Columns of a split.

    Parameters
    ----------
    label : ndarray
        ``[N]`` float32.
    dense : ndarray
        ``[N, F]`` float32.
    ids : ndarray
        ``[N, S]`` int32; -1 where a feature has no value.
    """

    label: NDArray[np.float32]
    dense: NDArray[np.float32]
    ids: NDArray[np.int32]


def read(dataset: Dataset, split: str, most: int = 0, seed: int = 0) -> Samples:
    """Read a split in its order, or about `most` of its samples, drawn in runs."""
    size = 65_536
    config = LoaderConfig(batch_size=size, shuffle=most > 0, expand=True, seed=seed, shuffle_row_groups=32)
    label, dense, ids = [], [], []
    for batch in islice(Loader(dataset, split, config).epoch(0), -(-most // size) if most else None):
        offsets, values = batch.sparse.bag_offsets().numpy(), batch.sparse.values.numpy()
        last = np.where(np.diff(offsets) > 0, values[np.maximum(offsets[1:] - 1, 0)], -1)
        label.append(batch.label.numpy().copy())
        dense.append(batch.dense.numpy().copy())
        ids.append(last.reshape(-1, batch.size).T.astype(np.int32))
    return Samples(np.concatenate(label), np.concatenate(dense), np.concatenate(ids))


class Encoder:
    """Click rates and counts of values.

    Parameters
    ----------
    train : Samples
        Samples that rates and counts are computed from.
    rows : Sequence[int]
        Number of ids of each feature.
    """

    def __init__(self, train: Samples, rows: Sequence[int], seed: int) -> None:
        self._rows = rows
        self._rate = float(train.label.mean())
        self._fold = np.random.default_rng(seed).integers(0, FOLDS, len(train.label))
        self._train = train

    def columns(self, samples: Samples) -> NDArray[np.float32]:
        """Return ``[N, F + 2 S]`` columns; the training samples themselves are encoded out of
        fold.
        """
        parts = [samples.dense]
        for feature, rows in enumerate(self._rows):
            out_of_fold = samples is self._train
            parts.append(self._encode(samples.ids[:, feature], feature, rows, out_of_fold=out_of_fold))
        return np.concatenate(parts, axis=1)

    def _encode(
        self, ids: NDArray[np.int32], feature: int, rows: int, *, out_of_fold: bool
    ) -> NDArray[np.float32]:
        # Value 0 stands for samples without a value.
        known = self._train.ids[:, feature].astype(np.int64) + 1
        cell = ids.astype(np.int64) + 1
        if out_of_fold:
            known, cell = (each * FOLDS + self._fold for each in (known, cell))
        cells = (rows + 1) * (FOLDS if out_of_fold else 1)
        count = np.bincount(known, minlength=cells).astype(np.float64)
        clicks = np.bincount(known, weights=self._train.label, minlength=cells)
        total = count
        if out_of_fold:
            total = count.reshape(-1, FOLDS).sum(1).repeat(FOLDS)
            clicks = clicks.reshape(-1, FOLDS).sum(1).repeat(FOLDS) - clicks
            count = total - count
        rate = (clicks + STRENGTH * self._rate) / (count + STRENGTH)
        return np.stack([rate[cell], np.log1p(total[cell])], axis=1).astype(np.float32)


@dataclass(frozen=True)
class Grown:
    """Trees that validation chose.

    `seconds` is the time of encoding and of growing the chosen trees, without the search.
    """

    settings: Mapping[str, Any]
    trees: int
    seconds: float
    search_seconds: float
    valid: NDArray[np.float64]
    test: NDArray[np.float64]
    """``[N]`` logits."""


def grow(
    splits: Mapping[str, Samples],
    rows: Sequence[int],
    *,
    seed: int,
    threads: int,
    quick: bool = False,
    grid: Sequence[Mapping[str, Any]] = GRID,
) -> Grown:
    """Grow trees on ``train``, stop and choose by the log loss of ``valid``, and score ``valid``
    and ``test``.

    `quick` grows twenty trees with the first settings.
    """
    lightgbm = import_peer("lightgbm")
    began = time.perf_counter()
    encoder = Encoder(splits["train"], rows, seed)
    columns = {split: encoder.columns(samples) for split, samples in splits.items()}
    encoded = time.perf_counter() - began
    rate = RATE * (2 if len(splits["train"].label) > _MANY else 1)
    candidates = []
    for settings in grid[:1] if quick else grid:
        start = time.perf_counter()
        tuned = {name: value for name, value in settings.items() if name != "encoded"}
        chosen_columns = (
            columns if settings["encoded"] else {split: samples.dense for split, samples in splits.items()}
        )
        bins = lightgbm.Dataset(chosen_columns["train"], label=splits["train"].label)
        booster = lightgbm.train(
            {**FIXED, **tuned, "learning_rate": rate, "seed": seed, "num_threads": threads}, bins,
            20 if quick else MOST_TREES,
            valid_sets=[lightgbm.Dataset(chosen_columns["valid"], label=splits["valid"].label, reference=bins)],
            callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)],
        )  # fmt: skip
        loss = booster.best_score["valid_0"]["binary_logloss"]
        candidates.append(
            (
                loss,
                len(candidates),
                settings,
                booster,
                time.perf_counter() - start + encoded,
                chosen_columns,
            )
        )
    _, _, settings, booster, seconds, chosen_columns = min(candidates, key=lambda each: each[:2])
    scores = {
        split: booster.predict(chosen_columns[split], raw_score=True, num_threads=threads)
        for split in ("valid", "test")
    }
    total = time.perf_counter() - began
    return Grown(settings, booster.best_iteration, seconds, total, scores["valid"], scores["test"])
