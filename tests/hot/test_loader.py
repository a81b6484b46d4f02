"""Hot batches hold every sample once, and only inputs whose rows are all hot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hot.popular import ROW_BYTES, prepared

from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.hot.hot_loader import HotLoader, NeedsReader, are_hot, bag_needs, classify
from stratarec.hot.selection import Counts, RowRange, hottest_rows, parts_of


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Six shards of a row group, the last one smaller."""
    return prepared(tmp_path_factory.mktemp("hot"), "auto", place=False)


@pytest.fixture(scope="module")
def rows(dataset: Dataset) -> tuple[list[RowRange], Counts]:
    parts = parts_of(dataset, dict.fromkeys(dataset.vocabularies, ROW_BYTES))
    return parts, hottest_rows(parts, 200 * ROW_BYTES)


def loader(dataset: Dataset, rows: tuple[list[RowRange], Counts], **config: object) -> HotLoader:
    options = {"batch_size": 64, "shuffle_row_groups": 2, "seed": 3, "expand": True, **config}
    counts = classify(dataset, *rows, "train")
    return HotLoader(dataset, "train", LoaderConfig(**options), *rows, counts)


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


@pytest.mark.parametrize(("size", "buffers"), [(64, 2), (700, 3), (64, 8), (5000, 1)])
def test_every_sample_is_in_one_batch_of_its_kind(dataset, rows, size, buffers) -> None:
    made = loader(dataset, rows, batch_size=size, shuffle_row_groups=buffers)
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


def test_an_epoch_is_resumed_at_any_batch(dataset, rows) -> None:
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


def part(rows: int, tail: int = 0) -> RowRange:
    """A table that nobody looks up."""
    return RowRange(table="t", rows=rows, row_bytes=4, tail=tail, counts=np.zeros(1, dtype=np.int64))


def expected(dataset: Dataset, parts: list[RowRange]) -> np.ndarray:
    """By expanding every sample."""
    found = []
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
                found.append(needs)
    return np.array(found)


@pytest.mark.parametrize("groups", ["auto", "none"])
def test_needs_are_those_of_a_loop_over_all_ids(tmp_path: Path, groups: str) -> None:
    dataset = prepared(tmp_path, groups, max_rows=800)
    parts = parts_of(dataset, dict.fromkeys(dataset.vocabularies, ROW_BYTES))
    assert len(parts) == 3
    reader = NeedsReader(dataset, parts)
    found = [
        reader.of(dataset.row_group("train", number, group))
        for number, shard in enumerate(dataset.shards("train"))
        for group in range(len(shard.row_groups))
    ]
    np.testing.assert_array_equal(np.concatenate(found), expected(dataset, parts))


def test_ids_beyond_two_to_the_24_are_distinguished() -> None:
    first = 1 << 24
    values = np.array([first - 1, first, first + 1, first + 2, 2**31 - 2, -1], dtype=np.int32)
    needs = bag_needs(values, None, None, part(2**31 - 1))[:, None]
    assert needs[:, 0].tolist() == [first, first + 1, first + 2, first + 3, 2**31 - 1, 0]
    hot = are_hot(needs, np.array([first + 2]))
    assert hot.tolist() == [True, True, True, False, False, True]
