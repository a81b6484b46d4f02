"""The loader: every sample once, the same order at any start, and threads that end."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratarec.batch import Batch
from stratarec.data import writing as storage
from stratarec.data.dataset import Dataset
from stratarec.data.loader import Loader, LoaderConfig
from stratarec.data.prepare import PrepareConfig, prepare
from stratarec.data.sources.synthetic import SyntheticConfig
from stratarec.data.splits import SplitConfig
from stratarec.errors import DatasetError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Several shards of several small row groups."""
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
    """Without groups, the features in one order."""
    keys = [*batch.sparse.keys, *(key for group in batch.groups for key in group.keys)]
    return batch.expanded(sorted(keys)) if batch.groups else batch.replace(sparse=batch.sparse.select(sorted(keys)))


def samples(batches: list[Batch]) -> list[tuple[object, ...]]:
    """Every sample as a tuple, in any order."""
    found: list[tuple[object, ...]] = []
    for batch in (expanded(batch) for batch in batches):
        assert batch.user is not None
        bags = [batch.sparse[key].to_list() for key in batch.sparse.keys]
        found += [
            (label, group, *batch.dense[b].tolist(), *(tuple(bag[b]) for bag in bags))
            for b, (label, group) in enumerate(zip(batch.label.tolist(), batch.user.tolist(), strict=True))
        ]
    return sorted(found)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 5), st.integers(20, 700), st.integers(1, 40), st.floats(0, 1), st.booleans())
def test_any_start_gives_the_tail_of_the_epoch(
    data: Dataset, seed: int, size: int, window: int, start: float, shuffle: bool
) -> None:
    config = LoaderConfig(batch_size=size, seed=seed, shuffle_row_groups=window, shuffle=shuffle, prefetch_batches=2)
    loader = Loader(data, "train", config)
    whole = list(loader.epoch(1))
    assert len(whole) == len(loader)
    assert sum(batch.size for batch in whole) == loader.samples
    first = int(start * len(whole))
    tail = list(loader.epoch(1, first))
    assert len(tail) == len(whole) - first
    assert all(equal(one, other) for one, other in zip(whole[first:], tail, strict=True))


def test_every_sample_comes_once_in_every_epoch(data: Dataset) -> None:
    shuffled = Loader(data, "train", LoaderConfig(batch_size=300, shuffle_row_groups=3))
    stored = Loader(data, "train", LoaderConfig(batch_size=300, shuffle=False))
    one, two, plain = (list(loader.epoch(epoch)) for loader, epoch in ((shuffled, 0), (shuffled, 1), (stored, 0)))
    assert samples(one) == samples(two) == samples(plain)
    assert not equal(one[0], two[0])
    assert not equal(one[0], next(Loader(data, "train", LoaderConfig(batch_size=300, seed=9)).epoch(0)))


def test_missing_values_are_empty_bags(data: Dataset) -> None:
    batch = next(Loader(data, "train", LoaderConfig(batch_size=2000)).epoch(0)).expanded()
    lengths = batch.sparse["C3"].lengths()
    assert set(lengths.tolist()) == {0, 1}
    assert batch.sparse["C1"].lengths().eq(1).all()
    assert batch.sparse.values.dtype == torch.int32


def test_no_thread_outlives_its_iterator(data: Dataset) -> None:
    before = set(threading.enumerate())
    for batch in itertools.islice(Loader(data, "train", LoaderConfig(batch_size=10)).epoch(0), 3):
        assert batch.size == 10
    iterator = Loader(data, "train", LoaderConfig(batch_size=10)).epoch(0)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert set(threading.enumerate()) <= before


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


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    config = PrepareConfig(
        source=SyntheticConfig(samples=300, scale=0.0005),
        path=str(tmp_path / "d"),
        split=SplitConfig(valid=0.0, test=0.0),
    )
    with pytest.raises(DatasetError, match="'test' has no samples"):
        Loader(prepare(config), "test", LoaderConfig())
