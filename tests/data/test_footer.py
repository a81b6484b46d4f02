"""Parquet footers: what is read of them is what pyarrow says, and no damaged one ends the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from stratarec.data.sources.footer import footer_columns

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
