"""What samples need of each part is what a loop over all their ids finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hot.popular import ROW_BYTES, prepared

from stratarec.data.dataset.dataset import Dataset
from stratarec.hot.hot_loader import NeedsReader, are_hot, bag_needs
from stratarec.hot.selection import RowRange, parts_of


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


def test_ids_beyond_two_to_the_24_are_told_apart() -> None:
    first = 1 << 24
    values = np.array([first - 1, first, first + 1, first + 2, 2**31 - 2, -1], dtype=np.int32)
    needs = bag_needs(values, None, None, part(2**31 - 1))[:, None]
    assert needs[:, 0].tolist() == [first, first + 1, first + 2, first + 3, 2**31 - 1, 0]
    hot = are_hot(needs, np.array([first + 2]))
    assert hot.tolist() == [True, True, True, False, False, True]
