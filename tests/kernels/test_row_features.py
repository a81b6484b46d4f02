"""Compare features of a few rows with plain loops over features, rows and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash

from stratarec.kernels.random import HASH_SEED, mix_array
from stratarec.kernels.raw_values.row_features import RowPlan, RowValues, compute_features
from stratarec.kernels.raw_values.value_index import TextValues, ValueIndex, VocabularyKeys

# Hashes are products modulo 2^64, about which the interpreter warns.
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

WIDTHS, BUCKETS, COLUMNS = (3, 16, 3, 0), 2, 25
"""Widths of the tables of four features: two of integers, then two of texts. The last one is not
pooled.
"""
WORDS = ["a", "bc", "é", "", "x" * 300]
LARGEST = np.finfo(np.float32).max


def joined(words: list[str]) -> TextValues:
    encoded = [word.encode() for word in words]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return TextValues(np.frombuffer(b"".join(encoded) + b"\0", dtype=np.uint8), offsets)


def hash_of(value: int | str) -> int:
    if isinstance(value, str):
        return xxhash.xxh3_64_intdigest(value.encode())
    return int(mix_array(np.array([value + HASH_SEED], dtype=np.int64).view(np.uint64))[0])


def vocabulary(values: list[Any]) -> VocabularyKeys:
    hashes = [hash_of(value) for value in values]
    order = sorted(range(len(values)), key=hashes.__getitem__)
    texts = joined([values[place] for place in order]) if isinstance(values[0], str) else None
    return VocabularyKeys(np.array(sorted(hashes), np.uint64), np.array(order, np.int32), BUCKETS, texts)


@pytest.mark.parametrize("rows", [1, 2, 60])
@pytest.mark.parametrize("lists", [False, True])
def test_features_match_loops(rows: int, lists: bool) -> None:
    draws = np.random.default_rng(rows)
    known: list[list[Any]] = [[7, -3, 2**62], [5], WORDS, WORDS[:2]]
    asked = [[*known[0], 9], [5, 6, -(2**63)], [*WORDS, "z", "ab" * 70], [*WORDS[:2], "a\0"]]
    # Place p of the values has feature 3 - p.
    firsts, sizes = [0, 60, 600, 0], [len(values) + BUCKETS for values in known]
    starts = {0: 20, 1: 4, 2: 0, 3: 0}
    plan = RowPlan(
        sparse=np.array(
            [(3 - p, p, firsts[p], WIDTHS[p], starts[p], p == 1) for p in range(4)], dtype=np.int64
        ),
        dense=np.array([(1, 0.5, 2.0), (0, 1.0, 1e-30), (0, 0.0, 1.0)]),
        vocabularies=ValueIndex([vocabulary(values) for values in known]).arrays,
        weights=draws.normal(size=700).astype(np.float32),
        columns=COLUMNS,
    )
    lengths = draws.integers(0, 4, (4, rows)) if lists else np.ones((4, rows), int)
    bags = [
        [[draws.choice(np.array(asked[p], object)) for _ in range(n)] for n in lengths[p]] for p in range(4)
    ]
    numbers = draws.normal(size=(3, rows)) * 100
    numbers[:, 0] = -3.0, 1e20, -0.0
    numbers[0, -1] = np.nan if rows > 1 else 0.0
    flat = [value for feature in bags for bag in feature for value in bag]
    integers, words = ([value for value in flat if isinstance(value, kind)] for kind in (int, str))
    texts = joined(words)
    parts = [integers, np.diff(texts.offsets), lengths.reshape(-1) if lists else []]
    values = RowValues(
        rows,
        numbers.reshape(-1),
        np.log1p(np.abs(numbers)).reshape(-1),
        1e20,
        len(integers),
        len(words),
        np.concatenate([np.array(part, dtype=np.int64) for part in parts]),
        texts.content,
    )
    features = compute_features(plan, values)
    assert features is not None
    raw = numbers.copy()
    raw[0] = np.sign(raw[0]) * np.log1p(np.abs(raw[0]))
    expected = np.nan_to_num(((raw.T - plan.dense[:, 1]) / plan.dense[:, 2]), nan=0.0).clip(
        -LARGEST, LARGEST
    )
    np.testing.assert_array_equal(features.dense.view(np.int32), expected.astype(np.float32).view(np.int32))
    pooled, ids = np.full((rows, COLUMNS), np.nan, np.float32), []
    for p in (3, 2, 1, 0):  # in the order of features
        codes = {value: BUCKETS + place for place, value in enumerate(known[p])}
        for row, bag in enumerate(bags[p]):
            found = [codes.get(value, hash_of(value) % BUCKETS) for value in bag]
            assert all(0 <= code < sizes[p] for code in found)
            ids.append(found)
            total = np.zeros(WIDTHS[p], np.float32)
            for code in found:
                total = total + plan.weights[firsts[p] + code * WIDTHS[p] :][: WIDTHS[p]]
            if p == 1 and len(found) > 1:
                total = total * (np.float32(1) / np.float32(len(found)))
            pooled[row, starts[p] : starts[p] + WIDTHS[p]] = total
    assert features.ids.tolist() == [code for bag in ids for code in bag]
    assert features.offsets.tolist() == [0, *np.cumsum(list(map(len, ids))).tolist()]
    filled = ~np.isnan(pooled)
    np.testing.assert_array_equal(features.pooled[filled], pooled[filled])
    assert compute_features(plan, values._replace(limit=9e19)) is None
