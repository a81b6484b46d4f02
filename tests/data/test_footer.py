"""Parquet footers: what is read of them is what pyarrow says, and no damaged one ends the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from forked import python

from stratarec.data.sources.footer import footer_columns

WRITERS: dict[str, dict[str, Any]] = {
    "plain": {"use_dictionary": False, "write_page_index": True, "data_page_version": "2.0"},
    "groups": {"row_group_size": 7, "compression": "zstd", "write_page_index": True},
    "early": {"version": "1.0"},
}
_READ = """
import sys, tempfile
from pathlib import Path
from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.parquet import ParquetConfig, ParquetSource
from stratarec.cli.init.sample import read_sample
from stratarec.errors import DataError
schema = Schema(label="y", sparse=(SparseFeature(name="city"), SparseFeature(name="tags", kind="multi")))
for path in sys.argv[1:]:
    for read in (
        lambda: list(ParquetSource(ParquetConfig(paths=(path,), schema=schema), "error").chunks(Path())),
        lambda: read_sample((path,)),
    ):
        try:
            read()
            print("read")
        except DataError as error:
            assert path in str(error), error
            print("refused")
"""


def write(path: Path, **options: Any) -> None:
    rows = range(40)
    log = {
        "y": [row % 2 for row in rows],
        "city": [f"c{row % 5}" for row in rows],
        "tags": [["a"] * (row % 3) for row in rows],
    }
    pq.write_table(pl.DataFrame(log).to_arrow(), path, **options)


@pytest.mark.parametrize("writer", WRITERS)
def test_columns_are_what_pyarrow_says_of_whole_files(tmp_path: Path, writer: str) -> None:
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


# Bits of the schema, which is first, make pyarrow end a process that asks for a column.
@pytest.mark.parametrize(
    ("writer", "bits"),
    [
        ("plain", range(0, 240, 4)),
        *(pytest.param(each, range(0, 10**6, 11), marks=pytest.mark.slow) for each in WRITERS),
    ],
)
def test_a_flipped_bit_of_a_footer_is_rows_or_one_error(tmp_path: Path, writer: str, bits: range) -> None:
    write(tmp_path / "log.parquet", **WRITERS[writer])
    whole = (tmp_path / "log.parquet").read_bytes()
    first = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    paths = []
    for bit in bits[: 8 * (len(whole) - 4 - first) // bits.step]:
        content = bytearray(whole)
        content[first + bit // 8] ^= 1 << bit % 8
        path = tmp_path / f"{bit}.parquet"
        path.write_bytes(content)
        paths.append(str(path))
    ended = python(_READ, paths)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert set(ended.stdout.split()) == {"read", "refused"}
