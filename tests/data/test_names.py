"""What columns, groups and vocabularies may be called: anything that is no name of StrataRec's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stratarec.data.dataset import Dataset
from stratarec.data.loader import Loader, LoaderConfig
from stratarec.data.prepare import PrepareConfig, prepare
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.parquet import ParquetConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.errors import ConfigError

ODD = [
    "label", "count", "value", "id", "__row", "__file", "__split", "__group", "__time", "__session", "__partition",
    "__place", "a.b", "samples", "session", "@", "x" * 200,
]  # fmt: skip


def log(path: Path, name: str) -> pl.DataFrame:
    rows = range(60)
    frame = pl.DataFrame(
        {
            "click": [row % 2 for row in rows],
            name: [f"v{row % 3}" for row in rows],
            "number": [row // 6 for row in rows],
            "time": list(rows),
            "visit": [row // 6 for row in rows],
            "who": [row // 12 for row in rows],
        }
    )
    frame.write_parquet(path)
    return frame


def prepared(root: Path, name: str, **options: Any) -> Dataset:
    feature = SparseFeature(name=name, group=options.pop("group", ""))
    history = SparseFeature(name="history", kind="history", of=name, max_length=3)
    schema = Schema(
        label="click",
        dense=(DenseFeature(name="number", transform="none", standardize=False),),
        sparse=(feature, history),
        session="visit",
        user="who",
        time="time",
    )
    config = PrepareConfig(
        source=ParquetConfig(paths=(str(root / "log.parquet"),), schema=schema),
        path=str(root / "data"),
        split=SplitConfig(valid=0.0, test=0.0),
        vocabulary=VocabularyConfig(min_count=1),
        shard_samples=20,
        **options,
    )
    return prepare(config)


def samples(dataset: Dataset, name: str) -> list[tuple[float, float, str]]:
    """Label, number and value of every sample."""
    values = pl.read_parquet(dataset.path / dataset.vocabularies[name].path)["value"].to_list()
    found = []
    for batch in Loader(dataset, "train", LoaderConfig(batch_size=7, shuffle=False, window_row_groups=1)).epoch(0):
        bags = batch.expanded([name, "history"]).sparse[name].to_list()
        found += list(zip(batch.label.tolist(), batch.dense[:, 0].tolist(), (values[b[0]] for b in bags), strict=True))
    return sorted(found)


@pytest.mark.parametrize("groups", ["auto", "none"])
@pytest.mark.parametrize("name", [name for name in ODD if name != "@"])
def test_a_feature_may_have_any_ordinary_name(tmp_path: Path, name: str, groups: str) -> None:
    frame = log(tmp_path / "log.parquet", name)
    dataset = prepared(tmp_path, name, groups=groups)
    expected = zip(frame["click"].cast(float), frame["number"].cast(float), frame[name], strict=True)
    assert samples(dataset, name) == sorted(expected)


@pytest.mark.parametrize("group", ["history.events", "sessions", "events", "found_1", "pointers"])
def test_a_group_may_have_any_ordinary_name(tmp_path: Path, group: str) -> None:
    frame = log(tmp_path / "log.parquet", "item")
    dataset = prepared(tmp_path, "item", group=group)
    assert dataset.groups[group] == ("item",)
    assert {name for names in dataset.groups.values() for name in names} == {"item", "number"}
    expected = zip(frame["click"].cast(float), frame["number"].cast(float), frame["item"], strict=True)
    assert samples(dataset, "item") == sorted(expected)


def test_key_columns_may_have_names_that_features_may_not(tmp_path: Path) -> None:
    frame = log(tmp_path / "log.parquet", "item").rename({"time": "@timestamp", "who": "user/id", "click": "@version"})
    frame.write_parquet(tmp_path / "log.parquet")
    schema = Schema(label="@version", sparse=(SparseFeature(name="item"),), time="@timestamp", user="user/id")
    source = ParquetConfig(paths=(str(tmp_path / "log.parquet"),), schema=schema)
    dataset = prepare(PrepareConfig(source=source, path=str(tmp_path / "data"), split=SplitConfig(valid=0.0, test=0.0)))
    assert dataset.samples("train") == len(frame)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "that is not empty"),
        ("a/b", "without '/'"),
        ("a\x00b", "without control characters"),
        ("line\nbreak", "without control characters"),
        ("@sessions", "without '@' at its beginning"),
        ("@", "without '@' at its beginning"),
        ("x" * 201, "of at most 200 bytes"),
        ("é" * 101, "of at most 200 bytes"),
        ("*", "that is no pattern"),
        ("^a.*$", "that is no pattern"),
    ],
)
def test_names_that_cannot_be_are_refused_with_their_field(name: str, expected: str) -> None:
    fine = SparseFeature(name="fine")
    for field, make in {
        "schema.dense[1].name": lambda: Schema(dense=(DenseFeature(name="d"), DenseFeature(name=name))),
        "schema.sparse[1].name": lambda: Schema(sparse=(fine, SparseFeature(name=name))),
        "schema.sparse[0].vocabulary": lambda: Schema(sparse=(SparseFeature(name="c", vocabulary=name or "/"),)),
        "schema.dense[0].group": lambda: Schema(dense=(DenseFeature(name="d", group=name or "/"),)),
        "schema.sparse[0].group": lambda: Schema(sparse=(SparseFeature(name="c", group=name or "/"),)),
    }.items():
        with pytest.raises(ConfigError) as caught:
            make()
        # An empty vocabulary or group is the usual one.
        shown, wanted = (name, expected) if name or field.endswith(".name") else ("/", "without '/'")
        assert str(caught.value).startswith(f"{field} is {shown!r}, expected a name {wanted}")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": ""}, r"schema\.label is '', expected a name that is not empty"),
        ({"time": "@row"}, r"schema\.time is '@row', expected a name that is none of StrataRec's own columns"),
        ({"user": "label"}, r"schema\.user is 'label', which is the label column"),
        ({"session": "tags"}, r"schema\.session is 'tags', a feature of several values"),
        ({"session": "*"}, r"schema\.session is '\*', expected a name that is no pattern"),
    ],
)
def test_keys_that_cannot_be_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schema(sparse=(SparseFeature(name="tags", kind="multi", separator="|"),), **options)  # type: ignore[arg-type]


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
    source = ParquetConfig(
        paths=(str(tmp_path / "log.parquet"),),
        schema=Schema(label="click", sparse=made("items", "").sparse, user="who", time="time"),
    )
    dataset = prepare(PrepareConfig(source=source, path=str(tmp_path / "data"), split=SplitConfig(valid=0.0, test=0.0)))
    assert list(dataset.table_rows()) == ["items"]
    assert dataset.schema.sparse[1].vocabulary == "items"
