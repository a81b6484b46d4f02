"""Compare the kernels that build batches with the plain reference; results must be equal."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratarec.kernels import collate

fast = settings(deadline=None, max_examples=30)
bag = st.lists(st.integers(0, 99), max_size=4)


def column(bags: list[list[int]]) -> collate.Lists:
    """Return the bags as a list column with values in reverse order, so that starts do not rise."""
    length = np.array([len(one) for one in bags], dtype=np.int64)
    values = np.array([one for bag in reversed(bags) for one in bag], dtype=np.int32)
    return collate.Lists(start=length.sum() - length.cumsum(), length=length, values=values)


def split(values: np.ndarray, offsets: np.ndarray) -> list[list[int]]:
    assert offsets[0] == 0
    assert offsets[-1] == len(values)
    return [values[first:last].tolist() for first, last in pairwise(offsets)]


@pytest.mark.interpreted
@fast
@given(st.lists(st.integers(0, 9), max_size=30))
def test_pointers_are_numbered_by_first_appearance(pointers: list[int]) -> None:
    place = np.full(10, -1, dtype=np.int32)
    for _ in range(2):  # the scratch memory must be cleared after each call
        numbers = np.array(pointers, dtype=np.int32)
        used = collate.number_pointers(numbers, place)
        assert (numbers.tolist(), used.tolist()) == collate.reference_number_pointers(pointers)
    assert (place == -1).all()


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_rows_are_scattered(kind: type) -> None:
    rows, places = np.array([3, 3, 0, 8], dtype=kind), np.array([2, 0])
    matrix, wide = np.arange(18, dtype=np.float32).reshape(9, 2), np.full((4, 3), np.nan, dtype=np.float32)
    collate.scatter_rows(matrix, rows, wide, places)
    assert wide[:, places].tolist() == matrix[rows].tolist()
    assert np.isnan(wide[:, 1]).all()


@pytest.mark.interpreted
@fast
@given(st.integers(2, 5), st.booleans(), st.integers(0, 3), st.lists(st.integers(0, 6), max_size=12))
def test_rows_are_spread_by_column(width: int, paired: bool, ids: int, rows: list[int]) -> None:
    words = np.random.default_rng(width).integers(-1, 4, (7, width)).astype(np.int32)
    ids = min(ids, width)
    spread, missing = collate.spread_rows(
        words, np.array(rows, dtype=np.int32), paired=paired, ids=ids, room=3
    )
    front = 2 if paired else 0
    assert len(spread) == width * len(rows) + 3
    assert spread[: front * len(rows)].tolist() == words[rows, :front].ravel().tolist()
    assert spread[front * len(rows) : -3].tolist() == words[rows, front:].T.ravel().tolist()
    assert missing == bool((words[rows, width - ids :] < 0).any())


@pytest.mark.interpreted
@fast
@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(0, 2), st.randoms())
def test_segments_are_filled_and_ordered(sizes: list[int], column: int, draws: Random) -> None:
    segments, total = list(range(len(sizes))), sum(sizes)
    words = np.full((total, 3), -7, dtype=np.int32)
    collate.fill_segments(
        words, column, np.array(segments, dtype=np.int32), np.array(sizes, dtype=np.int32)
    )
    expected = np.repeat(segments, sizes)
    assert words[:, column].tolist() == expected.tolist()
    assert (np.delete(words, column, axis=1) == -7).all()
    draws.shuffle(segments)
    starts = np.cumsum([0, *sizes[:-1]])
    order = collate.order_segments(starts, np.array(segments), total)
    assert order.tolist() == [
        place for segment in segments for place in range(starts[segment], starts[segment] + sizes[segment])
    ]


@pytest.mark.interpreted
@fast
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=12))
def test_joined_windows_keep_only_their_values(windows: list[tuple[int, int]]) -> None:
    start, length = (np.array([window[part] for window in windows], dtype=np.int64) for part in (0, 1))
    lists = collate.Lists(start=start, length=length, values=np.arange(18, dtype=np.int32))
    moved, sizes, values = collate.join_windows(lists, np.arange(len(windows)))
    assert values.tolist() == collate.reference_covered(windows)
    assert sizes.tolist() == length.tolist()
    for u in range(len(windows)):
        assert moved[u] >= 0
        if length[u]:
            assert values[moved[u] : moved[u] + length[u]].tolist() == list(
                range(start[u], start[u] + length[u])
            )


@pytest.mark.interpreted
@fast
@given(st.integers(0, 3), st.integers(0, 2), st.integers(1, 6), st.booleans(), st.data())
def test_bags_of_rows_match_the_reference(
    width: int, lists: int, size: int, missing: bool, data: st.DataObject
) -> None:
    ids = data.draw(
        st.lists(
            st.lists(st.integers(-1 if missing else 0, 9), min_size=width, max_size=width),
            min_size=size,
            max_size=size,
        )
    )
    bags = [data.draw(st.lists(bag, min_size=size, max_size=size)) for _ in range(lists)]
    rows = data.draw(st.lists(st.integers(0, size - 1), max_size=9))
    matrix = np.array(ids, dtype=np.int32).reshape(size, width)
    values, offsets = collate.take_bags(
        matrix, [column(actual) for actual in bags], np.array(rows, dtype=np.int64)
    )
    singles = [[[one for one in [ids[row][f]] if one >= 0] for row in rows] for f in range(width)]
    expected = collate.reference_join_bags(
        [[*singles, *([actual[row] for row in rows] for actual in bags)]], len(rows)
    )
    if offsets is None:
        assert all(len(actual) == 1 for actual in expected)
        offsets = np.arange(len(values) + 1)
    assert split(values, offsets) == expected


@pytest.mark.interpreted
@fast
@given(
    st.lists(
        st.tuples(
            st.lists(st.lists(bag, min_size=3, max_size=3), min_size=1, max_size=2),
            st.none() | st.lists(st.integers(0, 2), max_size=5),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_joined_bags_match_the_reference(
    parts: list[tuple[list[list[list[int]]], list[int] | None]],
) -> None:
    given_, expected = [], []
    for features, rows in parts:
        one = column([actual for bags in features for actual in bags])
        chosen = None if rows is None else np.array(rows, dtype=np.int32)
        given_.append(
            collate.FeatureBags(
                values=one.values,
                start=one.start,
                stop=one.start + one.length,
                features=len(features),
                bags=3,
                rows=chosen,
            )
        )
        expected.append([bags if rows is None else [bags[row] for row in rows] for bags in features])
    assert split(*collate.join_bags(given_, 6)) == collate.reference_join_bags(expected, 6)


@pytest.mark.interpreted
def test_positions_out_of_range_are_reported() -> None:
    assert collate.outside(np.array([0, 2, 1]), 3) == -1
    assert collate.outside(np.array([0, 3, -1]), 3) == 1
    assert collate.outside(np.array([0, -1, 3], dtype=np.int32), 3) == 1
    start, length = np.array([0, 2, 3]), np.array([3, 2, 0])
    assert collate.outside_windows(start, length, 4) == -1
    assert collate.outside_windows(start, length, 3) == 1
    assert collate.outside_windows(start, -length, 4) == 0
    assert collate.outside_windows(start - 1, length, 4) == 0
