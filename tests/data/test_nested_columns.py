"""Test fields of objects: structs of Parquet and Arrow files, and objects in JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pyarrow import feather

from stratarec.cli import main
from stratarec.cli.init import sample
from stratarec.cli.init.guess import guess
from stratarec.cli.init.sample import read_sample
from stratarec.data.columns.frames import flattened, read_columns
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources import open_rows
from stratarec.data.sources.csv import CsvConfig
from stratarec.errors import DataError

SCHEMA = Schema(
    label="clicked",
    dense=(DenseFeature(name="user.age"),),
    sparse=(
        SparseFeature(name="user.id"),
        SparseFeature(name="item.id", type="integer"),
        SparseFeature(name="item.tags", kind="multi"),
        SparseFeature(name="device.os.name"),
    ),
)
FORMATS: dict[str, Callable[[pl.DataFrame, Path], object]] = {
    "jsonl": pl.DataFrame.write_ndjson,
    "parquet": pl.DataFrame.write_parquet,
    "arrow": pl.DataFrame.write_ipc,
}


def rows(count: int = 400) -> list[dict[str, Any]]:
    """Return rows in which objects, and fields of them, are missing in places."""
    draws = np.random.default_rng(0)
    return [
        {
            "clicked": int(draws.integers(2)),
            "user": {"id": f"u{draws.integers(30)}", "age": float(row % 50)} if row % 7 != 3 else None,
            "item": {"id": int(draws.integers(20)), "tags": ["a", "b", "c"][: row % 4]},
            "device": {"os": {"name": ("ios", "android", None)[row % 3]}} if row % 5 else None,
        }
        for row in range(count)
    ]


def read(path: Path, on_bad_row: Any = None) -> pl.DataFrame:
    config = CsvConfig(paths=(str(path),), schema=SCHEMA)
    return pl.concat([chunk.frame for chunk in open_rows(config, on_bad_row).chunks(path.parent)])


@pytest.mark.parametrize("suffix", FORMATS)
def test_fields_of_objects_equal_flat_columns(tmp_path: Path, suffix: str) -> None:
    frame = pl.DataFrame(rows())
    for name, part in (("nested", frame), ("flat", flattened(frame, "log"))):
        FORMATS[suffix](part, tmp_path / f"{name}.{suffix}")
    nested = read(tmp_path / f"nested.{suffix}")
    assert nested.equals(read(tmp_path / f"flat.{suffix}"))
    assert nested["user.id"].null_count() == nested["user.age"].null_count() == len(range(3, 400, 7))


@pytest.mark.parametrize("suffix", FORMATS)
def test_init_drafts_fields_of_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """A list of objects is ignored."""
    monkeypatch.chdir(tmp_path)
    given = [row | {"cart": [{"sku": "x"}] * (place % 3)} for place, row in enumerate(rows())]
    FORMATS[suffix](pl.DataFrame(given), tmp_path / f"log.{suffix}")
    assert main(["init", f"log.{suffix}"]) == 0
    schema = yaml.safe_load(Path("log.yaml").read_text())["data"]["source"]["schema"]
    names = {feature["name"] for role in ("dense", "sparse") for feature in schema[role]}
    assert names >= {"user.id", "user.age", "item.id", "device.os.name"}
    assert "cart" not in names
    assert main(["prepare", "-q", "log.yaml"]) == 0


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"user": "u1"}, r"column 'user\.age': got text, expected an object with 'age'"),
        ({"user": 5}, r"column 'user\.age': got a number, expected an object with 'age'"),
        ({"user": [{"id": "u1"}]}, r"column 'user\.age': got a list, expected an object with 'age'"),
        ({"device": {"os": "ios"}}, r"column 'device\.os\.name': got text, expected an object"),
        ({"user": {"id": {"a": 1}}}, r"column 'user\.id': got an object, expected one value"),
    ],
)
def test_a_value_in_place_of_an_object_is_named_with_its_line(
    tmp_path: Path, line: dict[str, Any], problem: str
) -> None:
    path, lines = tmp_path / "log.jsonl", rows(20)
    lines[11] |= line
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(DataError, match=rf"log\.jsonl, line 12: {problem}"):
        read(path)
    assert read(path, "skip").height == 19


def test_a_key_may_have_a_point(tmp_path: Path) -> None:
    lines = [{"clicked": row["clicked"], "user.id": "flat", "user": {"age": 3}} for row in rows(20)]
    lines = [line | {"item": {"id": 1, "tags": []}, "device": {"os.name": "x"}} for line in lines]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    frame = read(path)
    assert set(frame["user.id"]) == {"flat"}
    assert set(frame["user.age"]) == {3.0}
    assert set(frame["device.os.name"]) == {"x"}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_types_that_are_no_features_are_ignored_by_init(tmp_path: Path, suffix: str) -> None:
    """Raw bytes, maps, JSON and ids of other libraries."""
    count, path = 400, tmp_path / f"log.{suffix}"
    columns: dict[str, Any] = {
        "clicked": [row % 3 % 2 for row in range(count)],
        "item": [f"i{row % 9}" for row in range(count)],
        "bytes": pa.array([bytes([255, row % 200]) for row in range(count)]),
        "uuid": pa.ExtensionArray.from_storage(
            pa.uuid(),
            pa.array([bytes(range(row % 200, row % 200 + 16)) for row in range(count)], pa.binary(16)),
        ),
        "map": pa.array([[("a", row)] for row in range(count)], pa.map_(pa.string(), pa.int64())),
        "struct": pa.array(
            [{"map": [("a", row)]} for row in range(count)],
            pa.struct([("map", pa.map_(pa.string(), pa.int64()))]),
        ),
    }
    table = pa.table(columns)
    pq.write_table(table, path) if suffix == "parquet" else feather.write_feather(table, path)
    roles = {column.name: column.role for column in guess(read_sample((str(path),))).columns}
    assert roles == {"clicked": "label", "item": "sparse"} | dict.fromkeys(
        ["bytes", "uuid", "map", "struct.map"], "ignored"
    )


def test_a_type_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    values = pa.UnionArray.from_sparse(pa.array([0] * 9, pa.int8()), [pa.array(range(9))])
    feather.write_feather(pa.table({"clicked": [0] * 9, "x": values}), tmp_path / "log.arrow")
    with pytest.raises(DataError, match=r"log\.arrow: column 'x' is sparse_union.*convert it"):
        read_sample((str(tmp_path / "log.arrow"),))


def test_frames_may_have_structs() -> None:
    nested = pl.DataFrame(rows(40)).drop("clicked")
    for frame in (nested, nested.to_arrow(), nested.to_arrow().to_batches()[0]):
        assert {name: column.to_list() for name, column in read_columns(frame).items()} == flattened(
            nested, "log"
        ).to_dict(as_series=False)


def test_fields_of_a_missing_struct_are_missing() -> None:
    """Also if the memory of the fields has values."""
    struct = pa.StructArray.from_arrays([pa.array([1, 2])], ["id"], mask=pa.array([True, False]))
    for frame in (pl.from_arrow(pa.table({"user": struct})), pa.table({"user": struct})):
        assert read_columns(frame)["user.id"].to_list() == [None, 2]


@pytest.mark.parametrize("kind", [pl.DataFrame, pa.table])
def test_a_field_with_the_name_of_a_column_is_refused(kind: Callable[[Any], Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the frame: 2 columns are named 'user\.id'"):
        read_columns(kind({"user.id": [1], "user": [{"id": 2}]}))
    path = tmp_path / "log.jsonl"
    for text in ('{"user.id": 1, "user": {"id": 2}}\n', '{"user.id": 1}\n{"user": {"id": 2}}\n'):
        path.write_text(text * 9)
        for read_log in (read, lambda path: read_sample((str(path),))):
            with pytest.raises(DataError, match=r"log\.jsonl: 2 columns are named 'user\.id'"):
                read_log(path)
    lines = [row | ({"x": {"y": 1}} if place % 2 else {"x.y": 1}) for place, row in enumerate(rows())]
    path.write_text("\n".join(map(json.dumps, lines)))  # the schema does not have it
    assert read(path).height == 400


@pytest.mark.parametrize("suffix", FORMATS)
def test_names_that_look_like_patterns(tmp_path: Path, suffix: str) -> None:
    """Polars reads * and ^...$ as patterns in expressions."""
    values: dict[str, Any] = {
        "clicked": 1,
        "*": "a",
        "^i.*$": "b",
        "item": {"*": "c", "^.*$": "d", "id": "e"},
    }
    path = tmp_path / f"log.{suffix}"
    FORMATS[suffix](
        pl.DataFrame([values, values | {"clicked": 0, "item": values["item"] | {"id": "x"}}] * 9), path
    )
    names = ("*", "item.*", "item.^.*$", "item.id")
    schema = Schema(label="clicked", sparse=tuple(SparseFeature(name=name) for name in names))
    (chunk,) = open_rows(CsvConfig(paths=(str(path),), schema=schema), None).chunks(tmp_path)
    assert chunk.frame.select(pl.exclude("clicked")).row(0) == ("a", "c", "d", "e")
    guesses = {column.name: column.role for column in guess(read_sample((str(path),))).columns}
    roles = {"clicked": "label", "(column 3)": "ignored", "item.id": "sparse"}
    assert guesses == dict.fromkeys(names, "ignored") | roles


def test_init_refuses_very_deep_objects(tmp_path: Path) -> None:
    path, lines = tmp_path / "log.jsonl", [json.dumps(row) for row in rows(40)]
    for levels in (60, 500, 100_000):
        lines[7] = '{"clicked": 1, "a": ' + '{"a": ' * levels + "1" + "}" * levels + "}"
        path.write_text("\n".join(lines))
        if levels < 64:
            assert read_sample((str(path),)).frame.height == 40
        else:
            problem = rf"log\.jsonl, line 8: objects and lists in {levels + 1} levels"
            with pytest.raises(DataError, match=problem):
                read_sample((str(path),))


def test_init_refuses_very_deep_objects_at_the_end_of_a_large_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "_HEAD_BYTES", 1 << 12)
    path, lines = tmp_path / "log.jsonl", [json.dumps(row) for row in rows(400)]
    lines[-3] = '{"clicked": 1, "a": ' + '{"a": ' * 500 + "1" + "}" * 501
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(DataError, match=r"log\.jsonl, one of the last lines: .* in 501 levels"):
        read_sample((str(path),))


def test_a_field_that_begins_late_is_found(tmp_path: Path) -> None:
    lines = rows(1500)
    for line in lines[:-1]:
        line["device"] = None
    path = tmp_path / "log.jsonl"
    for late in ({"os": {"name": "late"}}, {"os.name": "late"}):
        lines[-1]["device"] = late
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        assert read(path)["device.os.name"].drop_nulls().to_list() == ["late"]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("missing", [None, {}])
def test_an_object_may_be_missing_in_all_rows_of_a_file(tmp_path: Path, suffix: str, missing: Any) -> None:
    log = tmp_path / "log"
    log.mkdir()
    for name, given in (("a", rows()), ("b", [row | {"device": missing} for row in rows()])):
        frame = pl.DataFrame(given, schema=pl.DataFrame(rows()).schema)
        FORMATS[suffix](frame, log / f"{name}.{suffix}")
        if suffix == "jsonl":
            (log / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in given))
    names = read(log)["device.os.name"]
    assert names[:400].null_count() < names[400:].null_count() == 400
    assert "device.os.name" in read_sample((str(log),)).frame.columns
