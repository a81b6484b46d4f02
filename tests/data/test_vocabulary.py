"""Test limits of vocabularies: an override changes only the fields it names, and an override of no
vocabulary is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from errors import refuses
from recipes import log_config, tiny
from stratarec.data.column_names import SPLIT
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.hashing import stable_hash
from stratarec.data.prepare.prepare import prepare
from stratarec.data.prepare.value_counts import CountSum, count_values
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.vocabulary import (
    Vocabulary,
    VocabularyConfig,
    VocabularyLimits,
    VocabularyOverride,
    buckets_of,
)
from stratarec.errors import ConfigError
from stratarec.recipe import Recipe
from stratarec.serving.scorer import Scorer
from stratarec.training.export.export import export
from stratarec.training.run.open_run import open_run
from stratarec.training.trainer import Trainer


def make_recipe(root: Path, **vocabulary: Any) -> Recipe:
    content = tiny(root)
    content["data"]["vocabulary"] = vocabulary
    return Recipe.from_dict(content)


def test_an_override_changes_only_the_named_fields(tmp_path: Path) -> None:
    recipe = make_recipe(
        tmp_path, min_count=5, tail_buckets=3, overrides={"C3": {"tail_buckets": 7}, "C1": {"max_rows": 2}}
    )
    limits = recipe.data.vocabulary.limits
    assert limits("C3") == VocabularyLimits(min_count=5, tail_buckets=7)
    assert limits("C1") == VocabularyLimits(min_count=5, tail_buckets=3, max_rows=2)
    assert limits("C2") == VocabularyLimits(min_count=5, tail_buckets=3)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    infos = prepare(recipe.data).vocabularies
    assert {name: infos[name].tail_buckets for name in ("C1", "C2", "C3")} == {"C1": 3, "C2": 3, "C3": 7}
    assert infos["C1"].values == 2


@pytest.mark.parametrize("name", ["min_count", "tail_buckets", "max_rows"])
def test_limits_out_of_range_name_their_field(name: str) -> None:
    with refuses(ConfigError, f"data.vocabulary.{name} -1"):
        VocabularyConfig(**{name: -1})
    with refuses(ConfigError, f"data.vocabulary.overrides.C1.{name} -1"):
        VocabularyConfig(overrides={"C1": VocabularyOverride(**{name: -1})})


def test_unsigned_64_bit_ids_share_a_vocabulary_with_others_as_text(tmp_path: Path) -> None:
    signed, unsigned = [-1, 5, 7, -1] * 10, [2**64 - 1, 5, 2**63, 2**64 - 1] * 10
    columns = {"a": pl.Series(signed, dtype=pl.Int64), "b": pl.Series(unsigned, dtype=pl.UInt64)}
    schema = Schema(sparse=tuple(SparseFeature(name=name, vocabulary="ids") for name in "ab"))
    dataset = prepare(log_config(tmp_path, schema, pl.DataFrame({"label": [0, 1] * 20, **columns})))
    table = pl.read_parquet(dataset.path / dataset.vocabularies["ids"].path)
    assert dict(zip(table["value"][-5:], table["count"][-5:], strict=True)) == {
        "-1": 20,
        "5": 20,
        "18446744073709551615": 20,
        "7": 10,
        "9223372036854775808": 10,
    }


def prepare_items(root: Path, items: list[object], **vocabulary: Any) -> Dataset:
    frame = pl.DataFrame({"label": [row % 2 for row in range(len(items))], "item": items})
    schema = Schema(sparse=(SparseFeature(name="item"),))
    path = str(root / f"data-{len(list(root.iterdir()))}")
    return prepare(log_config(root, schema, frame, path=path, vocabulary=VocabularyConfig(**vocabulary)))


@pytest.mark.parametrize(
    "items", [[*range(500)] * 2, [f"i{number}" for number in range(500)] * 2, [2**63 + 5] * 1000]
)
def test_a_hash_vocabulary_computes_rows_from_the_hash_alone(tmp_path: Path, items: list[object]) -> None:
    dataset = prepare_items(tmp_path, items, kind="hash", buckets=64)
    info = dataset.vocabularies["item"]
    assert (info.rows, info.values, info.tail_buckets) == (64, 0, 64)
    actual = pl.concat([pl.from_arrow(dataset.read_row_group("train", 0, 0))])["item"].to_numpy()  # type: ignore[list-item]
    expected = (stable_hash(pl.Series(items)) % np.uint64(64)).astype(np.int64)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(dataset.access_counts("item"), np.bincount(expected, minlength=64))
    # The ids do not depend on the rest of the log.
    again = prepare_items(tmp_path, [*items[:10], *items[:10][::-1]], kind="hash", buckets=64)
    ids = pl.concat([pl.from_arrow(again.read_row_group("train", 0, 0))])["item"].to_list()  # type: ignore[list-item]
    assert ids[:10] == expected[:10].tolist()


def test_buckets_without_lookups_take_no_space(tmp_path: Path) -> None:
    base = prepare_items(tmp_path, [*range(500)] * 2, kind="hash", buckets=10**9)
    dataset = prepare_items(
        tmp_path, [*range(250, 750)] * 2, kind="hash", buckets=10**9, base=str(base.path)
    )
    ids, counts = dataset.counted_ids("item")
    expected = np.unique(
        stable_hash(pl.Series([*range(500), *range(250, 750)] * 2)) % np.uint64(10**9), return_counts=True
    )
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_array_equal(counts, expected[1])
    assert dataset.vocabularies["item"].bytes < 20_000


def test_counts_of_a_hash_do_not_grow_with_the_values() -> None:
    config = VocabularyConfig(kind="hash", buckets=32)
    schema, values = Schema(sparse=(SparseFeature(name="item"),)), pl.Series("item", range(200_000))
    total = CountSum()
    for begin in range(0, len(values), 20_000):
        part = values[begin : begin + 20_000]
        for counts in count_values(pl.DataFrame({"item": part, SPLIT: [0] * len(part)}), schema, config):
            total.add(counts)
    (sums,) = total.by_vocabulary().values()
    assert len(sums) == 32
    expected = np.bincount(buckets_of(values, 32), minlength=32)
    np.testing.assert_array_equal(Vocabulary.hashed(sums, pl.Int64(), 32).counts, expected)


def test_a_hash_vocabulary_next_to_counted_ones_trains_and_scores(tmp_path: Path) -> None:
    content = tiny(tmp_path, max_steps=4)
    content["data"]["vocabulary"] = {"overrides": {"C1": {"kind": "hash", "buckets": 50}}}
    recipe = Recipe.from_dict(content)
    dataset = prepare(recipe.data)
    assert dataset.table_rows()["C1"] == 50
    assert dataset.vocabularies["C2"].values > 0
    Trainer(recipe, dataset).train()
    with open_run(recipe.run) as trained:
        export(trained, tmp_path / "export")
    assert Scorer.open(tmp_path / "export").manifest.vocabularies["C1"].values == 0
