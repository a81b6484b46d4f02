"""Batches are of one kind, every sample is in one of them once an epoch, and an epoch is taken up anywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hot.popular import ROW_BYTES, prepared

from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.hot.hot_loader import (
    HotLoader,
    classify,
    rate_after,
    validation_losses,
)
from stratarec.hot.selection import Counts, RowRange, hottest_rows, parts_of


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Six shards of a row group, the last one smaller."""
    return prepared(tmp_path_factory.mktemp("hot"), "auto", place=False)


@pytest.fixture(scope="module")
def rows(dataset: Dataset) -> tuple[list[RowRange], Counts]:
    parts = parts_of(dataset, dict.fromkeys(dataset.vocabularies, ROW_BYTES))
    return parts, hottest_rows(parts, 200 * ROW_BYTES)


def loader(
    dataset: Dataset, rows: tuple[list[RowRange], Counts], rate: float | None = None, **config: object
) -> HotLoader:
    options = {"batch_size": 64, "shuffle_row_groups": 2, "seed": 3, "expand": True, **config}
    counts = classify(dataset, *rows, "train").shards
    return HotLoader(dataset, "train", LoaderConfig(**options), *rows, counts, lambda epoch: rate)


def is_hot(batch: Batch, parts: list[RowRange], hot: Counts, dataset: Dataset) -> np.ndarray:
    """``[B]``, by a loop over its bags."""
    found = np.ones(batch.size, dtype=bool)
    for feature in dataset.schema.sparse:
        bag = batch.sparse[feature.name]
        values, offsets = bag.values.numpy(), bag.offsets.numpy()
        for part, number in zip(parts, hot, strict=True):
            if part.table == feature.vocabulary:
                cold = values >= number
                for sample in np.searchsorted(offsets, np.flatnonzero(cold), side="right") - 1:
                    found[sample] = False
    return found


def lines(batches: list[Batch]) -> list[tuple[object, ...]]:
    """Every sample."""
    found = []
    for batch in batches:
        columns = [
            (bag.values.tolist(), bag.offsets.tolist()) for bag in map(batch.sparse.__getitem__, batch.sparse.keys)
        ]
        for place in range(batch.size):
            bags = (tuple(values[offsets[place] : offsets[place + 1]]) for values, offsets in columns)
            found.append((float(batch.label[place]), *bags))
    return found


@pytest.mark.parametrize(("size", "buffers", "rate"), [(64, 2, None), (700, 3, None), (64, 8, 30.0), (5000, 1, 50.0)])
def test_every_sample_is_in_one_batch_of_its_kind(dataset, rows, size, buffers, rate) -> None:
    made = loader(dataset, rows, rate, batch_size=size, shuffle_row_groups=buffers)
    batches = list(made.batches(0))
    kinds = made.kinds(0)
    assert len(batches) == len(made) == len(kinds)
    found = [is_hot(batch, *rows, dataset) for batch in batches]
    for hot, kind in zip(found[:-1], kinds[:-1], strict=True):
        assert (hot == kind).all()
    assert found[-1].all() == kinds[-1]
    assert 0.1 < made.hot_samples / made.samples < 0.9
    partial = [batch.size for batch in batches if batch.size != size]
    assert len(partial) <= 2
    plain = Loader(dataset, "train", made.config)
    assert len(made) == len(plain)
    assert sorted(lines(batches)) == sorted(lines(list(plain.batches(0))))


def test_an_epoch_is_taken_up_at_any_batch(dataset, rows) -> None:
    made = loader(dataset, rows, shuffle_row_groups=1)
    whole = [lines([batch]) for batch in made.batches(1)]
    assert whole != [lines([batch]) for batch in made.batches(0)]
    for first in [*range(0, len(whole), 11), len(whole) - 1, len(whole)]:
        assert [lines([batch]) for batch in made.batches(1, first)] == whole[first:]


def test_buffers_before_the_first_batch_are_not_read(dataset, rows, monkeypatch) -> None:
    made = loader(dataset, rows, shuffle_row_groups=1)
    read: list[int] = []
    inner = HotLoader._classified
    monkeypatch.setattr(HotLoader, "_classified", lambda self, *given: read.append(given[3]) or inner(self, *given))
    list(made.batches(0, len(made) - 3))
    assert read == [5]


def test_the_rate_halves_when_the_loss_rises_and_doubles_after_four_falls() -> None:
    assert rate_after([]) == rate_after([0.5, 0.4, 0.3, 0.2]) == 50
    assert rate_after([0.5, 0.6]) == 25
    assert rate_after([0.5, 0.4, 0.3, 0.2, 0.1]) == 100
    assert rate_after([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]) == 100
    assert rate_after([0.1, 0.2, 0.15, 0.14, 0.13, 0.12]) == 50
    assert rate_after(list(range(20))) == 1
    entries = [{"step": 5, "log_loss": 1.0}, {"step": 9, "log_loss": None}, {"step": 10, "log_loss": 2.0}]
    closing = [{"step": 7, "log_loss": 3.0, "closing": True}]
    assert validation_losses([*entries, *closing], 10) == [1.0, 2.0]
    assert validation_losses(entries, 9) == [1.0]
