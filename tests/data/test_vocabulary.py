"""Limits of vocabularies: what an override leaves out holds as for all, and one of no vocabulary is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from recipes import tiny
from stratarec.data.prepare import PrepareConfig, prepare
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.parquet import ParquetConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig, VocabularyLimits, VocabularyOverride
from stratarec.errors import ConfigError
from stratarec.recipe import Recipe


def recipe(root: Path, **vocabulary: Any) -> Recipe:
    content = tiny(root)
    content["data"]["vocabulary"] = vocabulary
    return Recipe.from_dict(content)


def test_an_override_changes_what_it_names_alone(tmp_path: Path) -> None:
    made = recipe(tmp_path, min_count=5, tail_buckets=3, overrides={"C3": {"tail_buckets": 7}, "C1": {"max_rows": 2}})
    limits = made.data.vocabulary.limits
    assert limits("C3") == VocabularyLimits(min_count=5, tail_buckets=7)
    assert limits("C1") == VocabularyLimits(min_count=5, tail_buckets=3, max_rows=2)
    assert limits("C2") == VocabularyLimits(min_count=5, tail_buckets=3)
    assert Recipe.from_dict(made.to_dict()) == made
    infos = prepare(made.data).vocabularies
    assert {name: infos[name].tail_buckets for name in ("C1", "C2", "C3")} == {"C1": 3, "C2": 3, "C3": 7}
    assert infos["C1"].values == 2


@pytest.mark.parametrize(("name", "hint"), [("colour", r"there are C1, .*"), ("C33", "did you mean C3")])
def test_an_override_of_no_vocabulary_is_refused_before_any_work(tmp_path: Path, name: str, hint: str) -> None:
    made = recipe(tmp_path, overrides={name: {"min_count": 3}})
    with pytest.raises(ConfigError, match=rf"data\.vocabulary\.overrides\.{name}: no such vocabulary; {hint}"):
        prepare(made.data)
    assert not list(tmp_path.glob("data*"))


def test_a_feature_of_another_vocabulary_is_told_so(tmp_path: Path) -> None:
    pl.DataFrame({"label": [0, 1], "item": [1, 2]}).write_parquet(tmp_path / "log.parquet")
    source = ParquetConfig(
        paths=(str(tmp_path / "log.parquet"),),
        schema=Schema(sparse=(SparseFeature(name="item", vocabulary="items"),)),
    )
    limits = VocabularyConfig(overrides={"item": VocabularyOverride(min_count=3)})
    with pytest.raises(ConfigError, match=r"overrides\.item: no such vocabulary; the feature of that name uses items"):
        prepare(PrepareConfig(source=source, path=str(tmp_path / "data"), vocabulary=limits))


@pytest.mark.parametrize("name", ["min_count", "tail_buckets", "max_rows"])
def test_limits_out_of_range_name_their_field(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.vocabulary\.{name} is -1, expected at least"):
        VocabularyConfig(**{name: -1})
    with pytest.raises(ConfigError, match=rf"data\.vocabulary\.overrides\.C1\.{name} is -1, expected at least"):
        VocabularyConfig(overrides={"C1": VocabularyOverride(**{name: -1})})


def test_a_table_has_an_end() -> None:
    with pytest.raises(ConfigError, match=r"data\.vocabulary\.tail_buckets is 1000000000000, expected at most"):
        VocabularyConfig(tail_buckets=10**12)


def test_ids_of_64_bits_without_a_sign_share_a_vocabulary_with_others_as_text(tmp_path: Path) -> None:
    signed, unsigned = [-1, 5, 7, -1] * 10, [2**64 - 1, 5, 2**63, 2**64 - 1] * 10
    columns = {"a": pl.Series(signed, dtype=pl.Int64), "b": pl.Series(unsigned, dtype=pl.UInt64)}
    pl.DataFrame({"label": [0, 1] * 20, **columns}).write_parquet(tmp_path / "log.parquet")
    schema = Schema(sparse=tuple(SparseFeature(name=name, vocabulary="ids") for name in "ab"))
    source = ParquetConfig(paths=(str(tmp_path / "log.parquet"),), schema=schema)
    dataset = prepare(PrepareConfig(source=source, path=str(tmp_path / "data"), split=SplitConfig(valid=0.0, test=0.0)))
    table = pl.read_parquet(dataset.path / dataset.vocabularies["ids"].path)
    assert dict(zip(table["value"][:5], table["count"][:5], strict=True)) == {
        "-1": 20, "5": 20, "18446744073709551615": 20, "7": 10, "9223372036854775808": 10,
    }  # fmt: skip
