"""Target encodings for boosted trees: what they are, and that a sample's own label is not in its own."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from benchmarks import trees
from benchmarks.registry import PeerMissing
from benchmarks.trees import FOLDS, STRENGTH, Encoder, Samples
from errors import refuses


def drawn(samples: int, seed: int) -> Samples:
    draws = np.random.default_rng(seed)
    label = (draws.random(samples) < 0.3).astype(np.float32)
    return Samples(label, draws.random((samples, 2), dtype=np.float32), draws.integers(-1, 4, (samples, 2), np.int32))


def test_others_are_encoded_by_all_training_samples() -> None:
    train, other = drawn(200, 1), drawn(50, 2)
    found = Encoder(train, [4, 6], seed=0).columns(other)
    assert found.shape == (50, 2 + 4)
    rate = train.label.mean()
    for sample in range(50):
        for feature in (0, 1):
            same = train.ids[:, feature] == other.ids[sample, feature]
            expected = (train.label[same].sum() + STRENGTH * rate) / (same.sum() + STRENGTH)
            assert found[sample, 2 + 2 * feature] == pytest.approx(expected)
            assert found[sample, 3 + 2 * feature] == pytest.approx(np.log1p(same.sum()))


def test_own_fold_is_not_in_the_encoding_of_training_samples() -> None:
    train = drawn(200, 1)
    encoder = Encoder(train, [4, 6], seed=0)
    before = encoder.columns(train)
    fold = np.random.default_rng(0).integers(0, FOLDS, 200) == 0
    rate = Encoder(Samples(train.label, train.dense, train.ids), [4, 6], seed=0)
    # The rate of all stays what it is where as many of the fold are clicks as before.
    label = train.label.copy()
    label[fold] = np.roll(label[fold], 1)
    after = Encoder(Samples(label, train.dense, train.ids), [4, 6], seed=0)
    moved = after.columns(after._train)
    assert np.array_equal(moved[fold], before[fold])
    assert not np.array_equal(moved[~fold], before[~fold])
    assert np.array_equal(rate.columns(rate._train), before)


def test_trees_on_encodings_find_what_a_value_says() -> None:
    pytest.importorskip("lightgbm")
    splits = {}
    for number, split in enumerate(("train", "valid", "test")):
        plain = drawn(3000, number)
        label = (np.random.default_rng(9 + number).random(3000) < 0.2 * plain.ids[:, 0].clip(0)).astype(np.float32)
        splits[split] = Samples(label, plain.dense, plain.ids)
    grown = trees.grow(splits, [4, 6], seed=1, threads=1, quick=True)
    truth = splits["test"].ids[:, 0].clip(0)
    means = [grown.test[truth == value].mean() for value in range(4)]
    assert sorted(means) == means
    blind = trees.grow(splits, [4, 6], seed=1, threads=1, quick=True, grid=[{**trees.GRID[0], "encoded": False}])
    assert abs(blind.test[truth == 3].mean() - blind.test[truth == 0].mean()) < 0.1 < means[3] - means[0]
    assert 0 < grown.seconds <= grown.search_seconds
    assert 1 <= grown.trees <= 20


def test_without_lightgbm_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with refuses(PeerMissing, "NAME="):
        trees.grow({}, [], seed=0, threads=1)
