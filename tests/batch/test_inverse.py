"""Test inverse jagged tensors: every operation gives the same result as expanding first, for any
bags.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import refuses
from stratarec.batch.batch import Batch
from stratarec.batch.jagged import InverseJagged, JaggedTensor, JaggedWindows, KeyedJagged
from stratarec.errors import ConfigError

Samples = list[list[list[int]]]
IDS = st.lists(st.integers(0, 3), max_size=3)


def samples_of(features: KeyedJagged) -> Samples:
    """Return the bags of each sample, by feature."""
    bags = [features[key].to_list() for key in features.keys]
    return [[bag[b] for bag in bags] for b in range(features.batch_size)]  # type: ignore[misc]


def keyed(samples: Samples, keys: tuple[str, ...]) -> KeyedJagged:
    def bags(lists: list[list[int]]) -> JaggedTensor:
        offsets = torch.tensor([0, *(len(bag) for bag in lists)]).cumsum(0)
        return JaggedTensor(
            values=torch.tensor([i for bag in lists for i in bag], dtype=torch.int32), offsets=offsets
        )

    return KeyedJagged.from_features(
        {key: bags([sample[f] for sample in samples]) for f, key in enumerate(keys)}
    )


@st.composite
def groups(draw: st.DrawFn, keys: tuple[str, ...] = ("a", "b"), size: int | None = None) -> InverseJagged:
    """Draw groups with repeated and unused distinct values, for `size` samples."""
    unique = draw(st.lists(st.lists(IDS, min_size=len(keys), max_size=len(keys)), min_size=1, max_size=5))
    count = draw(st.integers(0, 9)) if size is None else size
    inverse = draw(st.lists(st.integers(0, len(unique) - 1), min_size=count, max_size=count))
    return InverseJagged(unique=keyed(unique, keys), inverse=torch.tensor(inverse, dtype=torch.int32))


@st.composite
def windows(draw: st.DrawFn) -> InverseJagged:
    """Draw overlapping windows into one list of events."""
    events = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    ends = st.integers(0, len(events))
    pairs = draw(st.lists(st.tuples(ends, ends), min_size=1, max_size=5))
    inverse = draw(st.lists(st.integers(0, len(pairs) - 1), max_size=7))
    unique = JaggedWindows(
        key="h",
        values=torch.tensor(events),
        start=torch.tensor([min(pair) for pair in pairs]),
        length=torch.tensor([abs(one - other) for one, other in pairs]),
    )
    return InverseJagged(unique=unique, inverse=torch.tensor(inverse, dtype=torch.int32))


EITHER = st.one_of(groups(), windows())
fast = settings(deadline=None, max_examples=30)


@fast
@given(EITHER)
def test_expanding_gives_each_sample_the_bags_of_its_inverse_index(group: InverseJagged) -> None:
    unique = samples_of(group.bags())  # type: ignore[arg-type]
    assert samples_of(group.expand()) == [unique[int(place)] for place in group.inverse]
    assert group.expand().keys == group.keys


@fast
@given(EITHER, st.integers(0, 9), st.integers(0, 9))
def test_a_slice_expands_to_the_slice_of_the_expanded_samples(
    group: InverseJagged, one: int, other: int
) -> None:
    first, last = sorted((min(one, group.batch_size), min(other, group.batch_size)))
    part = group.slice(first, last)
    assert samples_of(part.expand()) == samples_of(group.expand())[first:last]
    assert part.unique.batch_size == len(set(group.inverse[first:last].tolist()))


@fast
@given(EITHER)
def test_compacting_numbers_values_by_first_appearance(group: InverseJagged) -> None:
    compact = group.compact()
    assert samples_of(compact.expand()) == samples_of(group.expand())
    assert list(dict.fromkeys(compact.inverse.tolist())) == list(range(compact.unique.batch_size))


@fast
@given(st.one_of(st.lists(groups(), min_size=1, max_size=3), st.lists(windows(), min_size=1, max_size=3)))
def test_concatenating_expands_to_the_concatenated_samples(parts: list[InverseJagged]) -> None:
    joined = InverseJagged.concatenate(parts)
    assert samples_of(joined.expand()) == [sample for part in parts for sample in samples_of(part.expand())]
    plain = KeyedJagged.concatenate([part.expand() for part in parts])
    assert samples_of(plain) == samples_of(joined.expand())


def test_a_batch_expands_in_the_requested_order() -> None:
    group = InverseJagged(
        unique=keyed([[[1]], [[2, 3]]], ("h",)), inverse=torch.tensor([1, 0, 1], dtype=torch.int32)
    )
    sparse = keyed([[[5]], [[6]], [[]]], ("item",))
    batch = Batch(label=torch.zeros(3), dense=torch.zeros(3, 0), sparse=sparse, groups=(group,))
    plain = batch.expanded(("h", "item"))
    assert plain.groups == ()
    assert plain.sparse.keys == ("h", "item")
    assert samples_of(plain.sparse) == [[[2, 3], [5]], [[1], [6]], [[2, 3], []]]


def test_invalid_groups_are_refused() -> None:
    unique = keyed([[[1]], [[2]]], ("a",))
    with refuses(ConfigError, "sample 1 2"):
        InverseJagged(unique=unique, inverse=torch.tensor([0, 2]))
    with refuses(ConfigError, "sample 1 -1"):
        InverseJagged(unique=unique, inverse=torch.tensor([0, -1]))
    with refuses(ConfigError, "float32 1 int32 int64"):
        InverseJagged(unique=unique, inverse=torch.tensor([0.0]))
    with refuses(ConfigError, "positions 0 2"):
        JaggedWindows(key="h", values=torch.arange(2), start=torch.tensor([1]), length=torch.tensor([2]))
    window = JaggedWindows(
        key="a", values=torch.arange(2), start=torch.tensor([0]), length=torch.tensor([2])
    )
    mixed = [InverseJagged(unique=part, inverse=torch.tensor([0])) for part in (unique, window)]
    with refuses(ConfigError, "concatenate windows bags"):
        InverseJagged.concatenate(mixed)
