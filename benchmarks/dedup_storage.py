"""Bytes of a data set with groups compared with the same samples as plain Parquet, shuffled and in
order of arrival.

Such data are usually stored shuffled, as samples are joined from logs in no order of users; arrival
is the order of time. The plain files have the same columns (user and session as 64-bit hashes,
time), row groups of the same size, the same codec and level, and PyArrow's default encodings. The
ratios named ``same_encodings`` compare with files that use the encodings of the data set, so that
only deduplication and clustering differ.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.sessions import pair
from stratarec.data.column_names import TIME
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.dataset.manifest import ROW_GROUP
from stratarec.data.dataset.writer import LEVEL, parquet_options

Partition = Callable[[pa.Table], NDArray[np.int64]]
_BUCKET = 12 * ROW_GROUP


def checksum(dataset: Dataset) -> tuple[int, int, int]:
    """Return the number of samples, and the sum and exclusive or of their hashes; equal multisets
    of samples agree.
    """
    count, total, both = 0, 0, 0
    for table in tables(dataset):
        hashes = pl.from_arrow(table).hash_rows(7).to_numpy()  # type: ignore[union-attr]
        count, total = count + len(hashes), (total + int(hashes.sum(dtype=np.uint64))) % 2**64
        both ^= int(np.bitwise_xor.reduce(hashes))
    return count, total, both


def tables(dataset: Dataset) -> Any:
    """Yield every row group of every split, expanded."""
    for split in dataset.splits:
        for number, shard in enumerate(dataset.shards(split)):
            for group in range(len(shard.row_groups)):
                yield dataset.read_row_group(split, number, group)


def stored_bytes(dataset: Dataset) -> int:
    """Return the bytes of the samples and group tables of all splits."""
    shards = [shard for shards in dataset.splits.values() for shard in shards]
    return sum(shard.bytes + (shard.tables.bytes if shard.tables else 0) for shard in shards)


def plain_bytes(
    dataset: Dataset, partition: Partition, order: Callable[[pa.Table], NDArray[np.int64]]
) -> tuple[int, int]:
    """Return the bytes of all samples as plain Parquet, partitioned into buckets that are ordered
    before writing.

    Returns
    -------
    tuple of int
        Bytes with PyArrow's default encodings, and with those of the data set.
    """
    with tempfile.TemporaryDirectory(dir=dataset.path.parent) as folder:
        writers: dict[int, pq.ParquetWriter] = {}
        for table in tables(dataset):
            buckets = partition(table)
            for bucket in np.unique(buckets):
                if int(bucket) not in writers:
                    path = f"{folder}/{bucket:05d}.tmp"
                    writers[int(bucket)] = pq.ParquetWriter(path, table.schema, compression="lz4")
                writers[int(bucket)].write_table(table.filter(pa.array(buckets == bucket)))
        default, same = 0, 0
        for bucket, writer in sorted(writers.items()):
            writer.close()
            source = Path(folder) / f"{bucket:05d}.tmp"
            table = pq.read_table(source)
            table = table.take(pa.array(order(table)))
            default += _written(table, {"compression": "zstd", "compression_level": LEVEL}, folder)
            same += _written(table, parquet_options(table.slice(0, ROW_GROUP)), folder)
            source.unlink()
        return default, same


def _written(table: pa.Table, options: dict[str, Any], folder: str) -> int:
    path = Path(folder, "out.parquet")
    pq.write_table(table, path, row_group_size=ROW_GROUP, **options)
    return path.stat().st_size


def cell(name: str) -> dict[str, Any]:
    """Measure one log."""
    grouped, plain = pair(name)
    if checksum(grouped) != checksum(plain):
        raise AssertionError(f"{name}: the data sets with and without groups differ in their samples")
    samples = sum(grouped.samples(split) for split in grouped.splits)
    buckets = max(round(samples / _BUCKET), 1)
    draws = np.random.default_rng(1)
    times = np.concatenate([table[TIME].to_numpy()[::64] for table in tables(plain)])
    edges = np.quantile(times, np.linspace(0, 1, buckets + 1)[1:-1])
    shuffled = plain_bytes(
        plain,
        lambda table: draws.integers(0, buckets, table.num_rows),
        lambda table: draws.permutation(table.num_rows),
    )
    arrival = plain_bytes(
        plain,
        lambda table: np.searchsorted(edges, table[TIME].to_numpy(), side="right"),
        lambda table: np.argsort(table[TIME].to_numpy(), kind="stable"),
    )
    ours, clustered = stored_bytes(grouped), stored_bytes(plain)
    return {
        "log": name,
        "samples": samples,
        "bytes": ours / samples,
        "shuffled": shuffled[0] / samples,
        "arrival": arrival[0] / samples,
        "clustered": clustered / samples,
        "ratio_shuffled": shuffled[0] / ours,
        "ratio_arrival": arrival[0] / ours,
        "ratio_shuffled_same_encodings": shuffled[1] / ours,
        "ratio_arrival_same_encodings": arrival[1] / ours,
        "ratio_clustered": clustered / ours,
    }


def run(quick: bool) -> dict[str, Any]:
    """Measure Globo's log for the metrics, then the whole recipe and Trivago; `quick` measures only
    Trivago.
    """
    rows = [cell(name) for name in (("trivago",) if quick else ("globo_bare", "globo", "trivago"))]
    names = [name for name in rows[0] if name.startswith("ratio_")]
    others = {f"{row['log']}_{name}": row[name] for row in rows[1:] for name in names}
    return {
        "config": {
            "row_group": ROW_GROUP,
            "codec": "zstd",
            "level": LEVEL,
            "history_length": 50,
            "negatives": 4,
        },
        "metrics": {**{name: rows[0][name] for name in names}, **others},
        "samples": {"rows": rows},
    }
