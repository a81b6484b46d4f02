"""Reading a CSV log: the `csv` source compared with Polars' own scan of the same file.

The file has two million rows of eight columns, of which seven are read with the types of the
schema. Polars scans the file with these types and collects it. The source returns the same columns
in chunks; in addition it knows the line of each row, detects records of wrong length and values of
wrong type, and bounds memory. Both use Polars' threads, and the file is in the page cache. The
frames are compared once before the timing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from polars.testing import assert_frame_equal

from benchmarks.timing import alternate, spread
from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.csv import CsvConfig, CsvSource

ROWS, QUICK_ROWS, ROUNDS = 2_000_000, 100_000, 15
TARGET = 0.7
SCHEMA = Schema(
    label="clicked",
    dense=(DenseFeature(name="price"), DenseFeature(name="age")),
    sparse=(SparseFeature(name="item", type="integer"), SparseFeature(name="shop")),
    time="time",
    user="user",
)
# Types that the source returns for these columns.
KINDS = {
    "clicked": pl.UInt8, "price": pl.Float64, "age": pl.Float64, "item": pl.Int64, "shop": pl.String,
    "time": pl.Int64, "user": pl.String,
}  # fmt: skip


def write_log(path: Path, rows: int) -> None:
    """Write a log of eight columns, of which `note` is not read."""
    random = np.random.default_rng(0)
    pl.DataFrame(
        {
            "time": 1_700_000_000 + np.arange(rows) // 20,
            "user": pl.Series(random.integers(0, rows // 10, rows)).cast(pl.String).str.zfill(7),
            "item": random.zipf(1.3, rows) % 100_000,
            "shop": pl.Series(random.integers(0, 500, rows)).cast(pl.String).str.pad_start(4, "s"),
            "price": random.gamma(2.0, 20.0, rows).round(2),
            "age": random.integers(0, 400, rows) / 10,
            "note": pl.Series(random.integers(0, 9, rows)).cast(pl.String),
            "clicked": random.integers(0, 2, rows),
        }
    ).write_csv(path)


def scan(path: Path) -> pl.DataFrame:
    """Read the file by Polars alone."""
    return pl.scan_csv(path, schema_overrides=KINDS).select(list(KINDS)).collect(engine="streaming")


def read(path: Path) -> list[pl.DataFrame]:
    """Read the file by the `csv` source."""
    source = CsvSource(CsvConfig(paths=(str(path),), schema=SCHEMA), "error")
    return [chunk.frame for chunk in source.chunks(path.parent)]


def gate(path: Path) -> None:
    """Check that both readers return the same rows, columns and types."""
    assert_frame_equal(pl.concat(read(path)).select(list(KINDS)), scan(path))


def processor_seconds(read_all: Callable[[int], object], rounds: int) -> float:
    """Return the least processor seconds of several calls, over all threads.

    Other work on the machine changes processor time less than the clock.
    """
    seconds = []
    for number in range(rounds):
        began = time.process_time()
        read_all(number)
        seconds.append(time.process_time() - began)
    return min(seconds)


def run(quick: bool) -> dict[str, Any]:
    """Measure on one file; `quick` uses a small one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.csv"
        write_log(path, QUICK_ROWS if quick else ROWS)
        gate(path)
        contenders: dict[str, Callable[[int], object]] = {
            "polars": lambda _: scan(path),
            "ours": lambda _: read(path),
        }
        seconds = alternate(contenders, 3 if quick else ROUNDS)
        processor = {
            name: processor_seconds(each, 3 if quick else ROUNDS) for name, each in contenders.items()
        }
        size = path.stat().st_size
    ratios = sorted(other / own for other, own in zip(seconds["polars"], seconds["ours"], strict=True))
    rows = [
        {"reader": name, **spread(each), "cpu_ms": 1e3 * processor[name]} for name, each in seconds.items()
    ]
    medians = {row["reader"]: row["median_ms"] for row in rows}
    return {
        "config": {
            "rows": QUICK_ROWS if quick else ROWS,
            "bytes": size,
            "columns": len(KINDS),
            "polars_threads": pl.thread_pool_size(),
            "targets": {"ratio_polars": TARGET},
        },
        "metrics": {
            "ratio_polars": medians["polars"] / medians["ours"],
            "ratio_polars_median_round": ratios[len(ratios) // 2],
            "ratio_polars_processor": processor["polars"] / processor["ours"],
            "megabytes_s": size / 1e3 / medians["ours"],
        },
        "samples": {"rows": rows},
    }
