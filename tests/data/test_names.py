"""What columns, groups and vocabularies may be called: anything that is no name of StrataRec's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from recipes import log_config
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.vocabulary import VocabularyConfig

ODD = [
    "label", "count", "value", "id", "__row", "__file", "__split", "__group", "__time", "__session", "__partition",
    "__place", "a.b", "samples", "session", "@", "x" * 200, "*", "c*", "^c", "c$", "[", "[/x]", "a/b", "/", "..", "%2F",
    "a%2Fb", "../../../evil", "/etc/passwd", "~", " ", "-rf", "$HOME", "<script>", "{}", "\\", "汉", "é" * 100,
    "pa\u202eth",
]  # fmt: skip


def log(path: Path, *names: str) -> pl.DataFrame:
    rows = range(60)
    frame = pl.DataFrame(
        {
            "click": [row % 2 for row in rows],
            **{name: [f"v{place}-{row % 3}" for row in rows] for place, name in enumerate(names)},
            "number": [row // 6 for row in rows],
            "time": list(rows),
            "visit": [row // 6 for row in rows],
            "who": [row // 12 for row in rows],
        }
    )
    frame.write_parquet(path)
    return frame


def prepared(root: Path, named: dict[str, str], **options: Any) -> Dataset:
    """Features by name with their groups, and a history of each."""
    features = [SparseFeature(name=name, group=group) for name, group in named.items()]
    histories = [
        SparseFeature(name=f"history {place}", kind="history", of=name, max_length=3)
        for place, name in enumerate(named)
    ]
    schema = Schema(
        label="click",
        dense=(DenseFeature(name="number", transform="none", standardize=False),),
        sparse=(*features, *histories),
        session="visit",
        user="who",
        time="time",
    )
    return prepare(log_config(root, schema, vocabulary=VocabularyConfig(min_count=1), shard_samples=20, **options))


def check_samples(dataset: Dataset, frame: pl.DataFrame, names: Sequence[str]) -> None:
    """Label, number and values of every sample are those of the log."""
    tables = [pl.read_parquet(dataset.path / dataset.vocabularies[name].path)["value"].to_list() for name in names]
    found = []
    for batch in Loader(dataset, "train", LoaderConfig(batch_size=7, shuffle=False, shuffle_row_groups=1)).epoch(0):
        sparse = batch.expanded([feature.name for feature in dataset.schema.sparse]).sparse
        columns = [[table[bag[0]] for bag in sparse[name].to_list()] for table, name in zip(tables, names, strict=True)]
        found += list(zip(batch.label.tolist(), batch.dense[:, 0].tolist(), *columns, strict=True))
    expected = zip(frame["click"].cast(float), frame["number"].cast(float), *(frame[n] for n in names), strict=True)
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("groups", ["auto", "none"])
def test_a_feature_may_have_any_ordinary_name(tmp_path: Path, groups: str) -> None:
    names = [name for name in ODD if name != "@"]
    frame = log(tmp_path / "log.parquet", *names)
    check_samples(prepared(tmp_path, dict.fromkeys(names, ""), groups=groups), frame, names)


def test_a_history_uses_the_vocabulary_of_what_it_is_a_history_of(tmp_path: Path) -> None:
    def made(of: str, history: str) -> Schema:
        sparse = (
            SparseFeature(name="item", vocabulary=of),
            SparseFeature(name="history", kind="history", of="item", vocabulary=history),
        )
        return Schema(sparse=sparse, user="who", time="time")

    assert list(made("", "").vocabularies()) == ["item"]
    assert list(made("items", "").vocabularies()) == ["items"]
    assert list(made("items", "own").vocabularies()) == ["items", "own"]
    log(tmp_path / "log.parquet", "item")
    dataset = prepare(log_config(tmp_path, replace(made("items", ""), label="click")))
    assert list(dataset.table_rows()) == ["items"]
    assert dataset.schema.sparse[1].vocabulary == "items"


def test_names_are_no_patterns_over_other_names(tmp_path: Path) -> None:
    """The values of each column are its own, and so are the counts."""
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
