"""Test the loader: every sample once, the same order from any start, and threads that end."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratarec.batch.batch import Batch
from stratarec.data.dataset import writer as storage
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.row_group import RowGroup
from stratarec.data.dataset.row_group_reader import RowGroupReader
from stratarec.data.loading.loader import BatchShare, Loader, LoaderConfig
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.sources.synthetic import SyntheticConfig
from stratarec.errors import DatasetError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Return a data set with several shards of several small row groups."""
    patch = pytest.MonkeyPatch()
    patch.setattr(storage, "ROW_GROUP", 100)
    config = PrepareConfig(
        source=SyntheticConfig(samples=3000, scale=0.0005),
        path=str(tmp_path_factory.mktemp("loader") / "data"),
        shard_samples=700,
    )
    prepared = prepare(config)
    patch.undo()
    return prepared


def equal(one: Batch, other: Batch) -> bool:
    pairs = [(one.label, other.label), (one.dense, other.dense)]
    assert one.user is not None
    assert other.user is not None
    pairs.append((one.user, other.user))
    for left, right in [
        (one.sparse, other.sparse),
        *((a.bags(), b.bags()) for a, b in zip(one.groups, other.groups, strict=True)),
    ]:
        pairs += [(left.values, right.values), (left.bag_offsets(), right.bag_offsets())]
    pairs += [(a.inverse, b.inverse) for a, b in zip(one.groups, other.groups, strict=True)]
    return all(torch.equal(left, right) for left, right in pairs)


def expanded(batch: Batch) -> Batch:
    """Expand the groups and return the features in one order."""
    keys = [*batch.sparse.keys, *(key for group in batch.groups for key in group.keys)]
    return (
        batch.expanded(sorted(keys))
        if batch.groups
        else batch.replace(sparse=batch.sparse.select(sorted(keys)))
    )


def rows_of(batch: Batch) -> list[tuple[object, ...]]:
    """Return each sample as a tuple."""
    batch = expanded(batch)
    assert batch.user is not None or not batch.size
    bags = [batch.sparse[key].to_list() for key in batch.sparse.keys]
    users = [] if batch.user is None else batch.user.tolist()
    return [
        (label, user, *batch.dense[b].tolist(), *(tuple(bag[b]) for bag in bags))
        for b, (label, user) in enumerate(zip(batch.label.tolist(), users, strict=True))
    ]


def samples(batches: list[Batch]) -> list[tuple[object, ...]]:
    """Return every sample as a tuple, sorted."""
    return sorted(row for batch in batches for row in rows_of(batch))


@settings(deadline=None, max_examples=6)
@given(
    st.integers(0, 5),
    st.integers(60, 700),
    st.integers(1, 40),
    st.floats(0, 1),
    st.booleans(),
    st.integers(1, 5),
)
def test_any_start_gives_the_tail_of_the_epoch(
    data: Dataset, seed: int, size: int, window: int, start: float, shuffle: bool, portions: int
) -> None:
    config = LoaderConfig(
        batch_size=size,
        seed=seed,
        shuffle_row_groups=window,
        shuffle=shuffle,
        prefetch_batches=2,
        parallel_readers=portions,
    )
    loader = Loader(data, "train", config)
    all_batches = list(loader.epoch(1))
    assert len(all_batches) == len(loader)
    assert sum(batch.size for batch in all_batches) == loader.samples
    first = int(start * len(all_batches))
    tail = list(loader.epoch(1, first))
    assert len(tail) == len(all_batches) - first
    assert all(equal(one, other) for one, other in zip(all_batches[first:], tail, strict=True))


@pytest.mark.slow
@settings(deadline=None, max_examples=6)
@given(st.integers(7, 700), st.integers(1, 3), st.booleans(), st.integers(1, 7), st.integers(1, 7))
def test_shares_of_any_number_of_ranks_join_to_the_batches_of_one_process(
    data: Dataset, size: int, window: int, shuffle: bool, portions: int, ranks: int
) -> None:
    config = LoaderConfig(
        batch_size=size, shuffle_row_groups=window, shuffle=shuffle, parallel_readers=portions
    )
    all_batches = Loader(data, "train", config).batches(0)
    shares = [
        Loader(data, "train", config, BatchShare(rank=rank, ranks=ranks)).batches(0)
        for rank in range(ranks)
    ]
    for batch, *parts in itertools.islice(zip(all_batches, *shares, strict=True), 0, None, 3):
        assert [part.size for part in parts if part.size] or not batch.size
        assert rows_of(batch) == [row for part in parts for row in rows_of(part)]
    for each in (all_batches, *shares):
        each.close()  # type: ignore[attr-defined]


def test_ranks_with_as_many_readers_read_only_their_own_row_groups(
    data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, int]] = []
    original = RowGroupReader.read

    def record_read(self: RowGroupReader, shard: int, group: int) -> RowGroup:
        read.append((shard, group))
        return original(self, shard, group)

    monkeypatch.setattr(RowGroupReader, "read", record_read)
    groups = sum(len(shard.row_groups) for shard in data.shards("train"))
    assert groups > 4
    config = LoaderConfig(batch_size=64, parallel_readers=4)
    for rank in range(4):
        read.clear()
        list(Loader(data, "train", config, BatchShare(rank=rank, ranks=4)).batches(0))
        assert len(read) == len(set(read)) <= groups // 4 + 2, "its own, and those at the two cuts"


def test_every_sample_occurs_once_in_every_epoch(data: Dataset) -> None:
    shuffled = Loader(data, "train", LoaderConfig(batch_size=300, shuffle_row_groups=3, parallel_readers=3))
    stored = Loader(data, "train", LoaderConfig(batch_size=300, shuffle=False))
    one, two, plain = (
        list(loader.epoch(epoch)) for loader, epoch in ((shuffled, 0), (shuffled, 1), (stored, 0))
    )
    assert samples(one) == samples(two) == samples(plain)
    assert not equal(one[0], two[0])
    assert not equal(one[0], next(Loader(data, "train", LoaderConfig(batch_size=300, seed=9)).epoch(0)))


def test_a_shard_damaged_after_opening_is_named(data: Dataset, tmp_path: Path) -> None:
    loader = Loader(data, "train", LoaderConfig())
    path = data.path / data.shards("train")[0].path
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    try:
        with pytest.raises(DatasetError, match=path.name):
            list(loader.epoch(0))
    finally:
        path.write_bytes(content)
