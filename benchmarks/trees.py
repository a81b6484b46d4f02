"""LightGBM on dense columns and out-of-fold target encodings: what a user of small click logs would take instead.

Two columns stand for each categorical feature. One is the click rate of its value, drawn towards the rate of all,

    (P_v + a p) / (N_v + a),

with P_v of N_v training samples positive, rate p of all, and a = 20 (Micci-Barreca 2001). A training sample is encoded
by the folds that it is not in, so that its own label is not in its columns (Prokhorenkova et al. 2018 on that leak).
The other is log(1 + N_v). Histories stand for their last value. Legend: N samples, F dense columns, S features.
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
"""What validation chooses among; without `encoded` trees have the dense columns alone."""
FIXED = {
    "objective": "binary", "metric": "binary_logloss", "min_data_in_leaf": 50,
    "bagging_fraction": 0.8, "bagging_freq": 1, "lambda_l2": 1.0, "verbosity": -1, "deterministic": True,
}  # fmt: skip
MOST_TREES, PATIENCE = 2000, 50
# Above so many samples trees learn twice as fast, so that half as many are grown.
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
    """A split in its order, or about so many of its samples, drawn in runs."""
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
        What they are counted over.
    rows : Sequence[int]
        Ids of each feature.
    """

    def __init__(self, train: Samples, rows: Sequence[int], seed: int) -> None:
        self._rows, self._rate = rows, float(train.label.mean())
        self._fold = np.random.default_rng(seed).integers(0, FOLDS, len(train.label))
        self._train = train

    def columns(self, samples: Samples) -> NDArray[np.float32]:
        """``[N, F + 2 S]``; those of the training samples themselves are out of fold."""
        parts = [samples.dense]
        for feature, rows in enumerate(self._rows):
            own = samples is self._train
            parts.append(self._encode(samples.ids[:, feature], feature, rows, own=own))
        return np.concatenate(parts, axis=1)

    def _encode(self, ids: NDArray[np.int32], feature: int, rows: int, *, own: bool) -> NDArray[np.float32]:
        # Row 0 is that of samples without a value.
        known = self._train.ids[:, feature].astype(np.int64) + 1
        place = ids.astype(np.int64) + 1
        if own:
            known, place = (each * FOLDS + self._fold for each in (known, place))
        cells = (rows + 1) * (FOLDS if own else 1)
        count = np.bincount(known, minlength=cells).astype(np.float64)
        clicks = np.bincount(known, weights=self._train.label, minlength=cells)
        total = count
        if own:
            total = count.reshape(-1, FOLDS).sum(1).repeat(FOLDS)
            clicks = clicks.reshape(-1, FOLDS).sum(1).repeat(FOLDS) - clicks
            count = total - count
        rate = (clicks + STRENGTH * self._rate) / (count + STRENGTH)
        return np.stack([rate[place], np.log1p(total[place])], axis=1).astype(np.float32)


@dataclass(frozen=True)
class Grown:
    """Trees that validation chose.

    `seconds` are of the chosen ones alone, with encoding: what it takes who knows what to choose.
    """

    settings: Mapping[str, Any]
    trees: int
    seconds: float
    search_seconds: float
    valid: NDArray[np.float64]
    test: NDArray[np.float64]
    """``[N]`` logits."""


def grow(
    splits: Mapping[str, Samples], rows: Sequence[int], *, seed: int, threads: int, quick: bool = False,
    grid: Sequence[Mapping[str, Any]] = GRID,
) -> Grown:  # fmt: skip
    """Grow trees on ``train``, stop and choose by the log loss of ``valid``, and score ``valid`` and ``test``.

    `quick` grows twenty trees of the first settings.
    """
    lightgbm = import_peer("lightgbm")
    began = time.perf_counter()
    encoder = Encoder(splits["train"], rows, seed)
    columns = {split: encoder.columns(samples) for split, samples in splits.items()}
    encoded = time.perf_counter() - began
    rate = RATE * (2 if len(splits["train"].label) > _MANY else 1)
    found = []
    for settings in grid[:1] if quick else grid:
        start = time.perf_counter()
        asked = {name: value for name, value in settings.items() if name != "encoded"}
        taken = columns if settings["encoded"] else {split: samples.dense for split, samples in splits.items()}
        bins = lightgbm.Dataset(taken["train"], label=splits["train"].label)
        booster = lightgbm.train(
            {**FIXED, **asked, "learning_rate": rate, "seed": seed, "num_threads": threads}, bins,
            20 if quick else MOST_TREES,
            valid_sets=[lightgbm.Dataset(taken["valid"], label=splits["valid"].label, reference=bins)],
            callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)],
        )  # fmt: skip
        loss = booster.best_score["valid_0"]["binary_logloss"]
        found.append((loss, len(found), settings, booster, time.perf_counter() - start + encoded, taken))
    _, _, settings, booster, seconds, taken = min(found, key=lambda each: each[:2])
    scores = {split: booster.predict(taken[split], raw_score=True, num_threads=threads) for split in ("valid", "test")}
    total = time.perf_counter() - began
    return Grown(settings, booster.best_iteration, seconds, total, scores["valid"], scores["test"])
