"""Test names of columns, groups and vocabularies: every name is allowed that StrataRec does not use
itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl

from recipes import log_config
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.vocabulary import VocabularyConfig


def test_a_history_uses_the_vocabulary_of_its_feature(tmp_path: Path) -> None:
    def make_schema(of: str, history: str) -> Schema:
        sparse = (
            SparseFeature(name="item", vocabulary=of),
            SparseFeature(name="history", kind="history", of="item", vocabulary=history),
        )
        return Schema(sparse=sparse, user="who", time="time")

    assert list(make_schema("", "").vocabularies()) == ["item"]
    assert list(make_schema("items", "").vocabularies()) == ["items"]
    assert list(make_schema("items", "own").vocabularies()) == ["items", "own"]
    columns = {name: [0, 1] * 10 for name in ("click", "item", "who", "time")}
    dataset = prepare(
        log_config(tmp_path, replace(make_schema("items", ""), label="click"), pl.DataFrame(columns))
    )
    assert list(dataset.table_rows()) == ["items"]
    assert dataset.schema.sparse[1].vocabulary == "items"


def test_names_are_not_patterns_for_other_names(tmp_path: Path) -> None:
    """Each column has its own values and counts."""
    names = ["C*", "C1", "C[1]", "C?", "*", "C/1", "C%2F1", "..", "C 1", "C-1", "é", "É", "C.1", "C"]
    frame = pl.DataFrame(
        {name: [f"{place}-{row % (place + 2)}" for row in range(60)] for place, name in enumerate(names)}
    ).with_columns(pl.Series("click", [row % 2 for row in range(60)]))
    schema = Schema(label="click", sparse=tuple(SparseFeature(name=name) for name in names))
    limits = VocabularyConfig(min_count=1)
    dataset = prepare(log_config(tmp_path, schema, frame, vocabulary=limits, shard_samples=25))
    table = dataset.read_row_group("train", 0, 0)
    for name in names:
        stored = pl.read_parquet(dataset.path / dataset.vocabularies[name].path)
        assert set(stored["value"].drop_nulls()) == set(frame[name])
        assert stored["count"].sum() == 60
        assert [stored["value"][int(each)] for each in table[name].to_pylist()] == frame[name].to_list()
    assert sorted(path.name for path in (dataset.path / "vocabulary").iterdir()) == sorted(
        f"{place:04d}{slug}.parquet"
        for place, slug in enumerate(
            ["-C", "-C1", "-C-1", "-C", "", "-C-1", "-C-2F1", "", "-C-1", "-C-1", "-e", "-E", "-C-1", "-C"]
        )
    )
