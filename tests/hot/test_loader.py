"""Test that hot batches contain every sample once, and only samples whose rows are all hot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hot.popular import ROW_BYTES, prepared

from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.hot.hot_loader import HotLoader, NeedsReader, are_hot, bag_needs, classify
from stratarec.hot.selection import Counts, RowRange, choose_by_lookups, parts_of


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Return a data set of six shards with one row group each; the last one is smaller."""
    return prepared(tmp_path_factory.mktemp("hot"), "auto", place=False)


@pytest.fixture(scope="module")
def rows(dataset: Dataset) -> tuple[list[RowRange], Counts]:
    parts = parts_of(dataset, dict.fromkeys(dataset.vocabularies, ROW_BYTES))
    return parts, choose_by_lookups(parts, 200 * ROW_BYTES)


def loader(dataset: Dataset, rows: tuple[list[RowRange], Counts], **config: object) -> HotLoader:
    options = {"batch_size": 64, "shuffle_row_groups": 2, "seed": 3, "expand": True, **config}
    counts = classify(dataset, *rows, "train")
    return HotLoader(dataset, "train", LoaderConfig(**options), *rows, counts)


def is_hot(batch: Batch, parts: list[RowRange], hot: Counts, dataset: Dataset) -> np.ndarray:
    """Return whether each sample is hot (``[B]``), computed by a loop over its bags."""
    hot_samples = np.ones(batch.size, dtype=bool)
    for feature in dataset.schema.sparse:
        bag = batch.sparse[feature.name]
        values, offsets = bag.values.numpy(), bag.offsets.numpy()
        for part, number in zip(parts, hot, strict=True):
            if part.table == feature.vocabulary:
                cold = values >= number
                for sample in np.searchsorted(offsets, np.flatnonzero(cold), side="right") - 1:
                    hot_samples[sample] = False
    return hot_samples


def samples_of(batches: list[Batch]) -> list[tuple[object, ...]]:
    """Return every sample of the batches."""
    samples = []
    for batch in batches:
        columns = [
            (bag.values.tolist(), bag.offsets.tolist())
            for bag in map(batch.sparse.__getitem__, batch.sparse.keys)
        ]
        for place in range(batch.size):
            bags = (tuple(values[offsets[place] : offsets[place + 1]]) for values, offsets in columns)
            samples.append((float(batch.label[place]), *bags))
    return samples


@pytest.mark.parametrize(("size", "buffers"), [(64, 2), (700, 3), (64, 8), (5000, 1)])
def test_every_sample_is_in_one_batch_of_its_kind(dataset, rows, size, buffers) -> None:
    hot_loader = loader(dataset, rows, batch_size=size, shuffle_row_groups=buffers)
    batches = list(hot_loader.batches(0))
    kinds = hot_loader.kinds(0)
    assert len(batches) == len(hot_loader) == len(kinds)
    hot_flags = [is_hot(batch, *rows, dataset) for batch in batches]
    for hot, kind in zip(hot_flags[:-1], kinds[:-1], strict=True):
        assert (hot == kind).all()
    assert hot_flags[-1].all() == kinds[-1]
    assert 0.1 < hot_loader.hot_samples / hot_loader.samples < 0.9
    partial = [batch.size for batch in batches if batch.size != size]
    assert len(partial) <= 2
    plain = Loader(dataset, "train", hot_loader.config)
    assert len(hot_loader) == len(plain)
    assert sorted(samples_of(batches)) == sorted(samples_of(list(plain.batches(0))))


def test_an_epoch_resumes_at_any_batch(dataset, rows) -> None:
    hot_loader = loader(dataset, rows, shuffle_row_groups=1)
    all_batches = [samples_of([batch]) for batch in hot_loader.batches(1)]
    assert all_batches != [samples_of([batch]) for batch in hot_loader.batches(0)]
    for first in [*range(0, len(all_batches), 11), len(all_batches) - 1, len(all_batches)]:
        assert [samples_of([batch]) for batch in hot_loader.batches(1, first)] == all_batches[first:]


def test_buffers_before_the_first_batch_are_not_read(dataset, rows, monkeypatch) -> None:
    hot_loader = loader(dataset, rows, shuffle_row_groups=1)
    read: list[int] = []
    inner = HotLoader._classified
    monkeypatch.setattr(
        HotLoader, "_classified", lambda self, *given: read.append(given[3]) or inner(self, *given)
    )
    list(hot_loader.batches(0, len(hot_loader) - 3))
    assert read == [5]


def part(rows: int, tail: int = 0) -> RowRange:
    """Return a table without lookups."""
    return RowRange(table="t", rows=rows, row_bytes=4, tail=tail, counts=np.zeros(1, dtype=np.int64))


def expected_needs(dataset: Dataset, parts: list[RowRange]) -> np.ndarray:
    """Compute the needs from every expanded sample."""
    rows = []
    for number, shard in enumerate(dataset.shards("train")):
        for group in range(len(shard.row_groups)):
            for row in dataset.read_row_group("train", number, group).to_pylist():
                needs = [0] * len(parts)
                for feature in dataset.schema.sparse:
                    value = row[feature.name]
                    for identity in value if isinstance(value, list) else [value]:
                        for place, each in enumerate(parts):
                            if identity >= 0 and each.table == feature.vocabulary:
                                needs[place] = max(needs[place], each.tail, identity + 1)
                rows.append(needs)
    return np.array(rows)


@pytest.mark.parametrize("groups", ["auto", "none"])
def test_needs_match_a_loop_over_all_ids(tmp_path: Path, groups: str) -> None:
    dataset = prepared(tmp_path, groups, max_rows=800)
    parts = parts_of(dataset, dict.fromkeys(dataset.vocabularies, ROW_BYTES))
    assert len(parts) == 3
    reader = NeedsReader(dataset, parts)
    needs = [
        reader.of(dataset.row_group("train", number, group))
        for number, shard in enumerate(dataset.shards("train"))
        for group in range(len(shard.row_groups))
    ]
    np.testing.assert_array_equal(np.concatenate(needs), expected_needs(dataset, parts))


def test_ids_beyond_two_to_the_24_are_distinguished() -> None:
    first = 1 << 24
    values = np.array([first - 1, first, first + 1, first + 2, 2**31 - 2, -1], dtype=np.int32)
    needs = bag_needs(values, None, None, part(2**31 - 1))[:, None]
    assert needs[:, 0].tolist() == [first, first + 1, first + 2, first + 3, 2**31 - 1, 0]
    hot = are_hot(needs, np.array([first + 2]))
    assert hot.tolist() == [True, True, True, False, False, True]
