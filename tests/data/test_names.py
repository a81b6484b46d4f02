"""What columns, groups and vocabularies may be called: anything that is no name of StrataRec's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from errors import refuses
from recipes import log_config
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.clicks_config import ClicksConfig
from stratarec.data.splits import SplitConfig
from stratarec.data.vocabulary import VocabularyConfig
from stratarec.errors import ConfigError

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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "that is not empty"),
        ("__metadata__", "that safetensors does not keep for itself"),
        ("a\x00b", "without control characters"),
        ("line\nbreak", "without control characters"),
        ("@sessions", "without '@' at its beginning"),
        ("@", "without '@' at its beginning"),
        ("x" * 201, "of at most 200 bytes"),
        ("é" * 101, "of at most 200 bytes"),
        ("^a.*$", "that is no pattern"),
        ("\x1b[31mred", "without control characters"),
    ],
)
def test_names_that_cannot_be_are_refused_with_their_field(name: str, expected: str) -> None:
    fine = SparseFeature(name="fine")
    for field, make in {
        "schema.dense[1].name": lambda: Schema(dense=(DenseFeature(name="d"), DenseFeature(name=name))),
        "schema.sparse[1].name": lambda: Schema(sparse=(fine, SparseFeature(name=name))),
        "schema.sparse[0].vocabulary": lambda: Schema(sparse=(SparseFeature(name="c", vocabulary=name or "@"),)),
        "schema.dense[0].group": lambda: Schema(dense=(DenseFeature(name="d", group=name or "@"),)),
        "schema.sparse[0].group": lambda: Schema(sparse=(SparseFeature(name="c", group=name or "@"),)),
    }.items():
        with pytest.raises(ConfigError) as caught:
            make()
        # An empty vocabulary or group is the usual one.
        shown, wanted = (name, expected) if name or field.endswith(".name") else ("@", "without '@'")
        assert str(caught.value).startswith(f"{field} is {shown!r}, expected a name {wanted}")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": ""}, "schema.label ''"),
        ({"time": "@row"}, "schema.time @row"),
        ({"user": "label"}, "schema.user label"),
        ({"session": "tags"}, "schema.session tags"),
        ({"session": "a\x1bb"}, r"schema.session a\x1bb"),
    ],
)
def test_keys_that_cannot_be_are_refused(options: dict[str, str], message: str) -> None:
    with refuses(ConfigError, message):
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


def test_a_click_log_may_have_columns_of_any_name(tmp_path: Path) -> None:
    rows = np.random.default_rng(0)
    frame = pl.DataFrame(
        {
            "[u]": rows.integers(0, 20, 500), "a/b": rows.integers(0, 30, 500),
            "t*": np.sort(rows.integers(0, 20_000, 500)), "*": rows.integers(0, 9, 500),
        }
    )  # fmt: skip
    found = {}
    for root, names in (("odd", frame.columns), ("plain", ["user", "item", "time", "ctx"])):
        (tmp_path / root).mkdir()
        renamed = frame.rename(dict(zip(frame.columns, names, strict=True)))
        renamed.write_parquet(tmp_path / root / "log.parquet")
        user, item, time, context = names
        paths = (str(tmp_path / root / "log.parquet"),)
        source = ClicksConfig(paths=paths, user=user, item=item, time=time, session="", contexts=(context,))
        dataset = prepare(
            PrepareConfig(source=source, path=str(tmp_path / root / "data"), split=SplitConfig(valid=0.0, test=0.0))
        )
        table = dataset.read_row_group("train", 0, 0)
        found[root] = [table[name].to_pylist() for name in table.column_names]
    assert found["odd"] == found["plain"]
