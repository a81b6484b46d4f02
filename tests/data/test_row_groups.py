"""Test that large row groups of Parquet files are read in pieces and small ones together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import python

from errors import refuses
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.base import ChunkShare
from stratarec.data.sources.parquet import ParquetConfig, ParquetSource
from stratarec.errors import DataError

ROWS = 100_000


def source(path: Path, **kinds: str) -> ParquetSource:
    sparse = tuple(SparseFeature(name=name, kind=kind) for name, kind in kinds.items())  # type: ignore[arg-type]
    return ParquetSource(
        ParquetConfig(paths=(str(path),), schema=Schema(label="y", sparse=sparse)), "error"
    )


@pytest.mark.parametrize("sizes", [[700_000], [300_000, 5, 6, 0, 262_144, 200_000, 90_000, 7]])
def test_large_row_groups_are_split_and_small_ones_joined(tmp_path: Path, sizes: list[int]) -> None:
    path, places = tmp_path / "log.parquet", np.arange(sum(sizes))
    table = pa.table({"y": pa.array(places % 2, pa.int8()), "c": pa.array(places)})
    with pq.ParquetWriter(path, table.schema) as writer:
        for first, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
            writer.write_table(table.slice(int(first), size))
    chunks = list(source(path, c="single").chunks(tmp_path))
    assert len(chunks) <= len(sizes) + 2
    assert max(chunk.frame.height for chunk in chunks) <= 1 << 18
    for chunk in chunks:
        np.testing.assert_array_equal(chunk.frame["c"].to_numpy() + 1, chunk.rows)
    np.testing.assert_array_equal(np.concatenate([chunk.rows for chunk in chunks]), places + 1)
    assert [chunk.index for chunk in chunks] == sorted({chunk.index for chunk in chunks})
    # Each chunk is the same, no matter which chunks were read before.
    for chunk in chunks:
        done = frozenset(other.index for other in chunks if other is not chunk)
        (again,) = source(path, c="single").chunks(tmp_path, ChunkShare(done=done))
        assert again.frame.equals(chunk.frame)
        np.testing.assert_array_equal(again.rows, chunk.rows)


def test_only_a_piece_of_a_row_group_is_in_memory(tmp_path: Path) -> None:
    rows, values = 1 << 20, 16
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * values)
    column = pa.ListArray.from_arrays(offsets, pa.array(np.arange(rows * values) % 99))
    pq.write_table(
        pa.table({"y": pa.array(np.zeros(rows, np.int8)), "c": column}), tmp_path / "log.parquet"
    )
    before, most = pa.total_allocated_bytes(), 0
    for _ in source(tmp_path / "log.parquet", c="multi").chunks(tmp_path):
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < column.nbytes


@pytest.mark.parametrize("dictionary", [True, False, ["text"], ["texts.list.element"]])
@pytest.mark.parametrize("schema", [True, False])
def test_reading_returns_what_was_written(tmp_path: Path, dictionary: Any, schema: bool) -> None:
    draws = np.random.default_rng(0)
    texts = [None if n == 0 else f"v{n}" if n < 7 else "" for n in draws.integers(0, 9, 5000)]
    lists = [
        None if n == 0 else texts[place : place + n - 1]
        for place, n in enumerate(draws.integers(0, 5, 5000))
    ]
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
        table,
        tmp_path / "log.parquet",
        use_dictionary=dictionary,
        store_schema=schema,
        row_group_size=1700,
        dictionary_pagesize_limit=1024 if dictionary is True else 1 << 20,
    )
    kinds = {name: "multi" if name in ("texts", "larges") else "single" for name in table.column_names[1:]}
    rows = [
        row
        for chunk in source(tmp_path / "log.parquet", **kinds).chunks(tmp_path)
        for row in chunk.frame.rows()
    ]
    expected = [
        tuple(
            [each for each in value if each is not None]
            if isinstance(value, list)
            else None
            if value == ""
            else value
            for value in row
        )
        for row in zip(*table.to_pydict().values(), strict=True)
    ]
    assert [tuple(row) for row in rows] == expected


def zigzag(number: int) -> bytes:
    """Encode an integer as Parquet's footers and headers do."""
    left, encoded = number << 1, b""
    while left > 127:
        encoded, left = encoded + bytes([left & 127 | 128]), left >> 7
    return encoded + bytes([left])


def falsify_footer(path: Path, truth: int, claim: int) -> None:
    """Replace a number everywhere in the footer."""
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    assert zigzag(truth) in content[start:]
    assert len(zigzag(truth)) == len(zigzag(claim))
    path.write_bytes(content[:start] + content[start:].replace(zigzag(truth), zigzag(claim)))


def test_a_footer_with_a_wrong_row_count_is_damaged(tmp_path: Path) -> None:
    table = pa.table({"y": pa.array(np.zeros(ROWS, np.int8)), "c": pa.array(np.zeros(ROWS, np.int8))})
    for claim in (9_000, 1_000_000):
        pq.write_table(table, tmp_path / "log.parquet", row_group_size=ROWS // 2)
        falsify_footer(tmp_path / "log.parquet", ROWS, claim)
        with refuses(DataError, "damaged counts"):
            list(source(tmp_path / "log.parquet", c="single").chunks(tmp_path))
        pq.write_table(table, tmp_path / "log.parquet")
        falsify_footer(tmp_path / "log.parquet", ROWS, claim)
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
    ("writer", "step"),
    [("plain", 59), *(pytest.param(each, 23, marks=pytest.mark.slow) for each in WRITERS)],
)
def test_a_flipped_bit_of_a_footer_gives_rows_or_one_error(tmp_path: Path, writer: str, step: int) -> None:
    """Run in a child process, because pyarrow aborts the process when a column of a damaged schema
    is read.
    """
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
