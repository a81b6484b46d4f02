"""Test data sets of other writers: every hash is right, but `prepare` never writes such content."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from errors import refuses
from stratarec.cli.checks.artifacts import check
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.prepare.config import PrepareConfig
from stratarec.data.prepare.prepare import prepare
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.parquet import ParquetConfig
from stratarec.data.splits import SPLITS, SplitConfig
from stratarec.errors import DatasetError
from stratarec.io.atomic import file_hash
from stratarec.io.sealed import content_hash, write_sealed

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare small data sets with and without groups."""
    root = tmp_path_factory.mktemp("crafted")
    draws, rows = np.random.default_rng(0), 600
    pl.DataFrame(
        {
            "label": draws.integers(0, 2, rows),
            "user": np.repeat(np.arange(60), 10),
            "time": np.arange(rows),
            "item": draws.integers(0, 30, rows),
            "city": np.repeat(draws.integers(0, 9, 60), 10),
            "tags": [list(range(row % 3)) for row in range(rows)],
            "price": draws.random(rows),
        }
    ).write_parquet(root / "log.parquet")
    schema = Schema(
        sparse=(
            SparseFeature(name="item"),
            SparseFeature(name="city", group="where"),
            SparseFeature(name="tags", kind="multi"),
            SparseFeature(name="seen", kind="history", of="item"),
        ),
        dense=(DenseFeature(name="price"),),
        user="user",
        time="time",
    )
    for groups in ("auto", "none"):
        source = ParquetConfig(paths=(str(root / "log.parquet"),), schema=schema)
        split = SplitConfig(valid=0.2, test=0.2)
        prepare(PrepareConfig(source=source, path=str(root / groups), split=split, groups=groups))  # type: ignore[arg-type]
    return root


def manifest(root: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((root / "dataset.json").read_text())
    return content


def seal(root: Path, content: dict[str, Any]) -> None:
    """Write a manifest with a correct hash of itself."""
    write_sealed(root / "dataset.json", {key: content[key] for key in content if key != "hash"})


def rewrite(root: Path, file: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Change a file of the first training shard and update every hash."""
    content = manifest(root)
    entry = content["splits"]["train"][0]
    entry = entry["tables"] if file == "tables" else entry
    path = root / entry["path"]
    pq.write_table(change(pq.read_table(path)), path, row_group_size=1 if file == "tables" else None)
    entry.update(bytes=path.stat().st_size, hash=file_hash(path))
    seal(root, content)


def replace_column(
    column: str, values: Callable[[list[Any]], list[Any]], kind: pa.DataType
) -> Callable[[pa.Table], pa.Table]:
    """Replace the values of a column and their type."""

    def change(table: pa.Table) -> pa.Table:
        changed = pa.array(values(table[column].to_pylist()), kind)
        return table.set_column(table.column_names.index(column), column, changed)

    return change


def with_first(value: Any) -> Callable[[list[Any]], list[Any]]:
    """Replace the first value, or the first value of the list if the column has one row."""
    return lambda values: [[value, *values[0][1:]]] if isinstance(values[0], list) else [value, *values[1:]]


def read_all(path: Path) -> None:
    """Read everything that training, profiles and predictions read."""
    dataset = Dataset.open(path)
    for split in SPLITS:
        list(dataset.row_numbers(split))
        for number, shard in enumerate(dataset.shards(split)):
            for group in range(len(shard.row_groups)):
                dataset.read_row_group(split, number, group)
        list(Loader(dataset, split, LoaderConfig(batch_size=64)).epoch(0))
    for name in dataset.vocabularies:
        dataset.access_counts(name)


WRAPS = 1 << 62
SAMPLES = [
    ("none", "@label", with_first(7), pa.uint8(), "label 7 0 1"),
    ("none", "@label", with_first(-1), pa.int8(), "@label int8 uint8"),
    ("none", "@label", with_first(0.5), pa.float32(), "@label uint8"),
    ("none", "@label", with_first(None), pa.uint8(), "@label"),
    ("none", "item", with_first(10**6), pa.int32(), "item ids 1000000 -1"),
    ("none", "item", with_first(-2), pa.int32(), "item ids -2"),
    ("none", "item", with_first(1.5), pa.float64(), "item int32"),
    ("none", "item", with_first((1 << 32) + 1), pa.int64(), "item int64 int32"),
    ("none", "item", with_first(None), pa.int32(), "item"),
    ("none", "tags", lambda v: [[99], *v[1:]], pa.list_(pa.int32()), "tags ids 99"),
    ("none", "tags", lambda v: [[None], *v[1:]], pa.list_(pa.int32()), "tags"),
    ("none", "seen", lambda v: [[-9], *v[1:]], pa.list_(pa.int32()), "seen ids -9"),
    ("none", "price", with_first(float("nan")), pa.float32(), "price"),
    ("none", "price", with_first(float("inf")), pa.float32(), "price"),
    ("none", "price", with_first(1.0), pa.float64(), "price"),
    ("none", "@row", lambda v: [v[0], 0, *v[2:]], pa.int64(), "rows log"),
    ("none", "@row", with_first(-5), pa.int64(), "rows log"),
    ("none", "@row", with_first(1 << 50), pa.int64(), "file 1024 log 0"),
    ("none", "@user", lambda v: [0.5] * len(v), pa.float64(), "@user int64"),
]
LIST32, LIST64 = pa.list_(pa.int32()), pa.list_(pa.int64())
TABLES = [
    ("auto", "@pointers/where/samples", lambda v: [[WRAPS] * 4 + v[0]], LIST64, "int64>"),
    ("auto", "@sessions/samples", lambda v: [[WRAPS] * 4 + v[0]], LIST64, "int64>"),
    ("auto", "@sessions/samples", with_first(0), LIST32, "sessions samples 0"),
    ("auto", "@sessions/samples", with_first(7_000), LIST32, "sessions samples"),
    ("auto", "@pointers/where/samples", with_first(7_000), LIST32, "@pointers/where"),
    ("auto", "@pointers/where/row", with_first(-1), LIST32, "@pointers/where -1"),
    ("auto", "@pointers/seen/row", with_first(10_000), LIST32, "@pointers/seen 10000 0"),
    ("auto", "seen/start", with_first(2**31 - 1), LIST32, "2147483647"),
    ("auto", "seen/start", with_first(float("nan")), pa.list_(pa.float32()), "type"),
    ("auto", "seen/length", with_first(2**31 - 1), LIST32, "2147483647"),
    ("auto", "seen/length", with_first(-5), LIST32, "-5"),
    ("auto", "@events/seen/id", with_first(10**6), LIST32, "@events/seen ids 1000000"),
    ("auto", "where/city", with_first(-2), LIST32, "city ids -2"),
    ("auto", "where/city", lambda v: [None], LIST32, "where/city"),
    ("auto", "seen/length", lambda v: [v[0] + [0]], LIST32, "damaged"),
    ("auto", "where/city", lambda v: [v[0] * 1000], LIST32, "rows samples"),
    ("auto", "seen/start", lambda v: [v[0] * 1000], LIST32, "damaged"),
]


@pytest.mark.parametrize(
    ("name", "column", "values", "kind", "message"), [*SAMPLES, *TABLES], ids=lambda value: str(value)[:20]
)
def test_content_that_prepare_never_writes_is_named(
    data_sets: Path, tmp_path: Path, name: str, column: str, values: Any, kind: pa.DataType, message: str
) -> None:
    shutil.copytree(data_sets / name, tmp_path / "data")
    rewrite(
        tmp_path / "data", "tables" if name == "auto" else "samples", replace_column(column, values, kind)
    )
    with refuses(DatasetError, message) as caught:
        read_all(tmp_path / "data")
    assert "shard-00000" in str(caught.value)
    # Errors of pyarrow itself have no advice.
    assert message == "damaged" or str(caught.value).endswith("prepare the data again with --overwrite")
    assert "\n" not in str(caught.value)


def test_columns_and_row_groups_not_in_the_manifest_are_refused(data_sets: Path, tmp_path: Path) -> None:
    changes: list[tuple[str, Callable[[pa.Table], pa.Table], str]] = [
        (
            "samples",
            lambda table: table.append_column("more", table["item"]),
            "column 'more' is of int32 type",
        ),
        (
            "samples",
            lambda table: table.drop_columns(["item"]),
            "column 'item' is of no type, expected int32",
        ),
        ("samples", lambda table: table.slice(1), "row groups of .* rows, expected 1 with"),
        (
            "tables",
            lambda table: pa.concat_tables([table, table]),
            "row groups of .* rows, expected 1 with",
        ),
    ]
    for place, (file, change, message) in enumerate(changes):
        path = tmp_path / str(place)
        shutil.copytree(data_sets / "auto", path)
        rewrite(path, file, change)
        with pytest.raises(DatasetError, match=message):
            read_all(path)


def shard(content: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = content["splits"]["train"][0]
    return entry


MANIFESTS: list[tuple[Change, str]] = [
    (lambda c: c["positives"].update(train=float("nan")), "number NaN"),
    (lambda c: c["positives"].update(train=10**6), "1000000"),
    (lambda c: c["positives"].update(train=-1), "positives.train 0"),
    (lambda c: c["positives"].pop("train"), "valid"),
    (lambda c: shard(c).update(row_groups=[0]), "row_groups.0 1 0"),
    (lambda c: shard(c).update(row_groups=[10**9], samples=10**9), "row_groups.0"),
    (lambda c: shard(c).update(samples=10**12), "1000000000000"),
    (lambda c: shard(c).update(path="/etc/passwd"), "path"),
    (lambda c: shard(c).update(path="train/../../x.parquet"), "path"),
    (lambda c: shard(c)["tables"].update(path="../x.tables.parquet"), "path"),
    (lambda c: shard(c).update(tables=None), "file tables"),
    (lambda c: c["splits"]["train"].append(shard(c)), "named"),
    (lambda c: c["splits"].update(test=c["splits"]["train"]), "test split"),
    (lambda c: c["vocabularies"]["item"].update(rows=2**31), "item"),
    (lambda c: c["vocabularies"]["item"].update(rows=10**6), "1000000"),
    (lambda c: c["vocabularies"]["item"].update(values=1.5), "values valid 1.5"),
    (lambda c: c["vocabularies"]["item"].update(values="7"), "values valid '7'"),
    (lambda c: c["vocabularies"].pop("item"), "vocabularies"),
    (lambda c: c["about"]["moments"]["price"].update(deviation=0.0), "0"),
    (lambda c: c["about"]["moments"].clear(), "moments"),
    (lambda c: c["groups"]["where"].append("item"), "item int32"),
    (lambda c: c["groups"]["where"].append("nobody"), "groups nobody"),
    (lambda c: c["schema"]["sparse"][0].update(kind="triple"), "single"),
    (lambda c: c["schema"].update(more=1), "schema.more"),
    (lambda c: c.update(more=1), "more"),
    (lambda c: c.update(format=4), "4 11 --overwrite"),
    (lambda c: c.pop("about"), "about"),
]


@pytest.mark.parametrize(("change", "message"), MANIFESTS, ids=[message[:40] for _, message in MANIFESTS])
def test_invalid_values_in_a_sealed_manifest_are_named(
    data_sets: Path, tmp_path: Path, change: Change, message: str
) -> None:
    shutil.copytree(data_sets / "auto", tmp_path / "data")
    content = manifest(tmp_path / "data")
    change(content)
    del content["hash"]
    (tmp_path / "data" / "dataset.json").write_text(json.dumps({**content, "hash": content_hash(content)}))
    with refuses(DatasetError, message) as caught:
        read_all(tmp_path / "data")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "folder"])
def test_files_behind_links_are_refused(data_sets: Path, tmp_path: Path, is_file: bool) -> None:
    shutil.copytree(data_sets / "auto", tmp_path / "data")
    entry = shard(manifest(tmp_path / "data"))
    path = tmp_path / "data" / entry["path"]
    path = path if is_file else path.parent
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with refuses(DatasetError, "link"):
        Dataset.open(tmp_path / "data")


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()]
)
def test_a_manifest_that_is_not_a_file_is_refused_at_once(
    data_sets: Path, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    shutil.copytree(data_sets / "auto", tmp_path / "data")
    (tmp_path / "data" / "dataset.json").unlink()
    make(tmp_path / "data" / "dataset.json")
    with refuses(DatasetError, "dataset.json"):
        Dataset.open(tmp_path / "data")


def change_vocabulary(
    name: str, change: Callable[[pa.Table], pa.Table], data_sets: Path, place: Path
) -> Path:
    """Copy a data set with a changed vocabulary file and update every hash."""
    shutil.copytree(data_sets / "auto", place)
    content = manifest(place)
    entry = content["vocabularies"][name]
    path = place / entry["path"]
    pq.write_table(change(pq.read_table(path)), path)
    entry.update(bytes=path.stat().st_size, hash=file_hash(path))
    seal(place, content)
    return path


def repeat_last(values: list[Any]) -> list[Any]:
    return [*values[:-2], values[-1], values[-1]]


def with_last(value: Any) -> Callable[[list[Any]], list[Any]]:
    """Replace the last value."""
    return lambda values: [*values[:-1], value]


VOCABULARIES: list[tuple[Callable[[pa.Table], pa.Table], str]] = [
    (replace_column("value", repeat_last, pa.int64()), "values"),
    (replace_column("id", repeat_last, pa.int32()), "count 0"),
    (replace_column("id", lambda values: values[::-1], pa.int32()), "count 0"),
    (replace_column("id", lambda values: values, pa.int16()), "int32 int64"),
    (replace_column("id", lambda values: values, pa.float32()), "int32 int64"),
    (replace_column("id", with_first(None), pa.int32()), "id count"),
    (replace_column("count", with_first(-1), pa.int64()), "counts"),
    (replace_column("count", lambda values: values, pa.float64()), "int32 int64"),
    (replace_column("value", with_last(10**9), pa.int64()), "values"),
    (replace_column("value", with_last(None), pa.int64()), "rows"),
    (lambda table: table.slice(1), "rows"),
    (lambda table: pa.concat_tables([table, table]), "rows"),
]


@pytest.mark.parametrize(
    ("change", "message"), VOCABULARIES, ids=[message[:30] for _, message in VOCABULARIES]
)
def test_invalid_vocabularies_are_named(
    data_sets: Path, tmp_path: Path, change: Callable[[pa.Table], pa.Table], message: str
) -> None:
    path = change_vocabulary("item", change, data_sets, tmp_path / "data")
    with refuses(DatasetError, message) as caught:
        list(check(tmp_path / "data"))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
