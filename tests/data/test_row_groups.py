"""Row groups and footers of Parquet files are bounded before they are read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import python

from errors import missing, refuses
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.parquet import ParquetConfig, ParquetSource, footer_columns
from stratarec.errors import DataError

ROWS = 100_000


def source(path: Path, most: Any = "16MiB", **kinds: str) -> ParquetSource:
    sparse = tuple(SparseFeature(name=name, kind=kind) for name, kind in kinds.items())  # type: ignore[arg-type]
    schema = Schema(label="y", sparse=sparse)
    return ParquetSource(ParquetConfig(paths=(str(path),), schema=schema, max_row_group_bytes=most), "error")


def repeated(value: pa.Array, rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), value)


def crafted(path: Path, rows: int = ROWS) -> dict[str, str]:
    """A few kilobytes: a long text in every row, lists of them, and a long list of numbers in every row."""
    long = pa.array(["x" * 500_000])
    numbers = pa.array(np.arange(rows) % 7)
    lists = pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32)), repeated(long, rows))
    table = pa.table(
        {"y": pa.array(np.arange(rows) % 2), "text": repeated(long, rows), "texts": lists, "number": numbers}
    )
    pq.write_table(table, path, compression="zstd", store_schema=False)
    return {"text": "single", "texts": "multi"}


CHILD = """
import os, sys, pyarrow as pa
sys.path[:0] = [sys.argv[3], sys.argv[3] + "/.."]
from pathlib import Path
from test_row_groups import source
from stratarec.errors import DataError
try:
    for chunk in source(Path(sys.argv[1]), "1GiB", **{sys.argv[2]: sys.argv[4]}).chunks(Path()):
        pass
except DataError as error:
    print(error)
print(pa.default_memory_pool().max_memory(), flush=True)
os._exit(0)  # what is asked is what it took, not how libraries end
"""


@pytest.mark.parametrize("column", ["text", "texts"])
def test_a_text_in_every_row_is_counted_before_it_is_written_out(tmp_path: Path, column: str) -> None:
    kinds = crafted(tmp_path / "log.parquet")
    assert (tmp_path / "log.parquet").stat().st_size < 50_000
    command = [sys.executable, "-c", CHILD, str(tmp_path / "log.parquet"), column, str(Path(__file__).parent)]
    done = subprocess.run([*command, kinds[column]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    message, peak = done.stdout.splitlines()
    assert not missing("log.parquet row group 0 46.6 GiB 1.0 data.source.max_row_group_bytes", message)
    assert int(peak) < 200 << 20


@pytest.mark.parametrize(("kind", "values"), [("single", 1), ("multi", 40)])
def test_repeated_numbers_are_counted_by_the_footer(tmp_path: Path, kind: str, values: int) -> None:
    offsets = pa.array(np.arange(ROWS + 1, dtype=np.int32) * values)
    zeros = pa.array(np.zeros(ROWS * values, np.int64))
    column = zeros if kind == "single" else pa.ListArray.from_arrays(offsets, zeros)
    pq.write_table(pa.table({"y": pa.array(np.zeros(ROWS, np.int8)), "c": column}), tmp_path / "log.parquet")
    assert (tmp_path / "log.parquet").stat().st_size < 50_000
    needed = 8 * ROWS * (1 + values)
    with refuses(DataError, "group 0 max_row_group_bytes"):
        list(source(tmp_path / "log.parquet", needed, c=kind).chunks(tmp_path))
    before = pa.total_allocated_bytes()
    assert sum(chunk.frame.height for chunk in source(tmp_path / "log.parquet", 2 * needed, c=kind).chunks(tmp_path))
    assert pa.total_allocated_bytes() - before < needed


def test_columns_that_are_not_wanted_do_not_count(tmp_path: Path) -> None:
    crafted(tmp_path / "log.parquet", rows=1000)
    found = next(iter(source(tmp_path / "log.parquet", number="single").chunks(tmp_path)), None)
    assert found is not None
    assert found.frame.height == 1000


@pytest.mark.parametrize("dictionary", [True, False, ["text"], ["texts.list.element"]])
@pytest.mark.parametrize("schema", [True, False])
def test_what_is_read_is_what_was_written(tmp_path: Path, dictionary: Any, schema: bool) -> None:
    draws = np.random.default_rng(0)
    texts = [None if n == 0 else f"v{n}" if n < 7 else "" for n in draws.integers(0, 9, 5000)]
    lists = [None if n == 0 else texts[place : place + n - 1] for place, n in enumerate(draws.integers(0, 5, 5000))]
    table = pa.table(
        {
            "y": pa.array(np.arange(5000) % 2),
            "text": pa.array(texts),
            "large": pa.array(texts, pa.large_string()),
            "category": pa.array(texts).dictionary_encode(),
            "texts": pa.array(lists),
            "larges": pa.array(lists, pa.large_list(pa.large_string())),
            "number": pa.array(draws.integers(0, 3, 5000)),
        }
    )
    pq.write_table(
        table, tmp_path / "log.parquet", use_dictionary=dictionary, store_schema=schema, row_group_size=1700,
        dictionary_pagesize_limit=1024 if dictionary is True else 1 << 20,
    )  # fmt: skip
    kinds = {name: "multi" if name in ("texts", "larges") else "single" for name in table.column_names[1:]}
    rows = [row for chunk in source(tmp_path / "log.parquet", **kinds).chunks(tmp_path) for row in chunk.frame.rows()]
    expected = [
        tuple([each for each in value if each is not None] if isinstance(value, list) else value for value in row)
        for row in zip(*table.to_pydict().values(), strict=True)
    ]
    assert [tuple(row) for row in rows] == expected


def zigzag(number: int) -> bytes:
    """An integer as Parquet's footers and headers have it."""
    left, found = number << 1, b""
    while left > 127:
        found, left = found + bytes([left & 127 | 128]), left >> 7
    return found + bytes([left])


def lie(path: Path, truth: int, claim: int) -> None:
    """Change a number in the footer at every place."""
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    assert zigzag(truth) in content[start:]
    assert len(zigzag(truth)) == len(zigzag(claim))
    path.write_bytes(content[:start] + content[start:].replace(zigzag(truth), zigzag(claim)))


def test_a_footer_that_counts_other_rows_is_damaged(tmp_path: Path) -> None:
    table = pa.table({"y": pa.array(np.zeros(ROWS, np.int8)), "c": pa.array(np.zeros(ROWS, np.int8))})
    for claim in (9_000, 1_000_000):
        pq.write_table(table, tmp_path / "log.parquet", row_group_size=ROWS // 2)
        lie(tmp_path / "log.parquet", ROWS, claim)
        with refuses(DataError, "damaged counts"):
            list(source(tmp_path / "log.parquet", c="single").chunks(tmp_path))
        pq.write_table(table, tmp_path / "log.parquet")
        lie(tmp_path / "log.parquet", ROWS, claim)
        if claim > ROWS:
            with refuses(DataError, "group 0 100,000 rows 1,000,000"):
                list(source(tmp_path / "log.parquet", c="single").chunks(tmp_path))


WRITERS: dict[str, dict[str, Any]] = {
    "plain": {"use_dictionary": False, "write_page_index": True, "data_page_version": "2.0"},
    "groups": {"row_group_size": 7, "compression": "zstd", "write_page_index": True},
    "early": {"version": "1.0"},
}


def write(path: Path, **options: Any) -> None:
    rows = range(40)
    log = {
        "y": [row % 2 for row in rows],
        "city": [f"c{row % 5}" for row in rows],
        "tags": [["a"] * (row % 3) for row in rows],
    }
    pq.write_table(pl.DataFrame(log).to_arrow(), path, **options)


@pytest.mark.parametrize("writer", WRITERS)
def test_columns_are_what_pyarrow_reports_of_whole_files(tmp_path: Path, writer: str) -> None:
    path = tmp_path / "log.parquet"
    write(path, **WRITERS[writer])
    metadata = pq.read_metadata(path)
    expected = [
        (c.num_values, c.total_uncompressed_size, c.has_dictionary_page)
        for group in range(metadata.num_row_groups)
        for c in map(metadata.row_group(group).column, (2, 0))
    ]
    with path.open("rb") as raw:
        found = footer_columns(raw, str(path), (2, 0))
    np.testing.assert_array_equal(found.reshape(-1, 3), expected)


READ = """
import sys
from pathlib import Path
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.parquet import ParquetConfig, ParquetSource
from stratarec.cli.init.sample import read_sample
from stratarec.errors import DataError
schema = Schema(label="y", sparse=(SparseFeature(name="city"), SparseFeature(name="tags", kind="multi")))
for path in sys.argv[1:]:
    source = ParquetSource(ParquetConfig(paths=(path,), schema=schema), "error")
    for read in (lambda: list(source.chunks(Path())), lambda: read_sample((path,))):
        try:
            read()
            print("read")
        except DataError as error:
            assert path in str(error), error
            print("refused")
"""


@pytest.mark.parametrize(
    ("writer", "step"), [("plain", 59), *(pytest.param(each, 11, marks=pytest.mark.slow) for each in WRITERS)]
)
def test_a_flipped_bit_of_a_footer_gives_rows_or_one_error(tmp_path: Path, writer: str, step: int) -> None:
    """In a process, since pyarrow ends the one that asks for a column of a damaged schema."""
    write(tmp_path / "log.parquet", **WRITERS[writer])
    content = (tmp_path / "log.parquet").read_bytes()
    first, paths = len(content) - 8 - int.from_bytes(content[-8:-4], "little"), []
    for bit in range(8 * first, 8 * (len(content) - 4), step):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        paths.append(str(tmp_path / f"{bit}.parquet"))
        Path(paths[-1]).write_bytes(damaged)
    done = python(READ, paths)
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()) == {"read", "refused"}
