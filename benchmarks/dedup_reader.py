"""Loader throughput on a data set with groups, compared with the same loader on a data set without.

With groups, batches stay deduplicated. The batch size is that of the recipe. Both sides alternate,
with a cold page cache (files are dropped before each pass) and with a warm one.
"""

from __future__ import annotations

import os
import time
from itertools import islice
from statistics import median
from typing import Any

from benchmarks.sessions import pair, recipe
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.data.loading.shuffle_buffer import Unit


def batch_size(name: str) -> int:
    """Return the batch size of the log's recipe."""
    return recipe(name, "auto").train.batch_size


def drop_from_cache(dataset: Dataset) -> None:
    """Drop the data set's files from the page cache."""
    os.sync()
    for path in dataset.path.rglob("*.parquet"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def throughput(dataset: Dataset, size: int, epoch: int) -> float:
    """Return samples per second over a whole epoch, including start-up."""
    began, samples = time.perf_counter(), 0
    for batch in Loader(dataset, "train", LoaderConfig(batch_size=size)).epoch(epoch):
        samples += batch.size
    return samples / (time.perf_counter() - began)


def gate(grouped: Dataset, plain: Dataset, size: int) -> None:
    """Check that counts, labels and ids of a whole epoch agree in sum after expansion."""
    sums = []
    for dataset in (grouped, plain):
        total = [0, 0, 0, 0]
        for batch in Loader(dataset, "train", LoaderConfig(batch_size=size, expand=True)).epoch(0):
            ids = batch.sparse.values.long()
            sums_of_batch = (batch.size, int(batch.label.sum()), int(ids.sum()), int((ids * ids).sum()))
            total = [one + other for one, other in zip(total, sums_of_batch, strict=True)]
        sums.append(total)
    if sums[0] != sums[1]:
        raise AssertionError(f"batches differ: {sums[0]} with groups, {sums[1]} without")


def factors(dataset: Dataset, size: int, batches: int = 20) -> dict[str, dict[str, float]]:
    """Return the samples per distinct value of each group, in runs and in whole sessions."""
    runs, sessions = (median_factors(dataset, size, unit, batches) for unit in ("run", "session"))
    return {key: {"runs": runs[key], "sessions": sessions[key]} for key in runs}


def median_factors(dataset: Dataset, size: int, unit: Unit, batches: int) -> dict[str, float]:
    """Return the median deduplication factor of each group over some batches."""
    factors_of: dict[str, list[float]] = {}
    stream = Loader(dataset, "train", LoaderConfig(batch_size=size, unit=unit)).epoch(0)
    for batch in islice(stream, batches):
        for group in batch.groups:
            factors_of.setdefault(group.keys[0], []).append(group.factor)
    stream.close()  # type: ignore[attr-defined]
    return {key: median(values) for key, values in factors_of.items()}


def cell(name: str, rounds: int) -> dict[str, Any]:
    """Measure one log."""
    (grouped, plain), size = pair(name), batch_size(name)
    gate(grouped, plain, size)
    sides = {"ours": grouped, "plain": plain}
    speeds: dict[tuple[str, str], list[float]] = {}
    for round_ in range(-1, rounds):
        for cache in ("cold", "warm"):
            for side in list(sides) if round_ % 2 else list(reversed(sides)):
                if cache == "cold":
                    drop_from_cache(sides[side])
                speed = throughput(sides[side], size, max(round_, 0))
                if round_ >= 0:
                    speeds.setdefault((side, cache), []).append(speed)
    middle = {key: median(values) for key, values in speeds.items()}
    return {
        "log": name,
        "batch": size,
        **{f"{side}_{cache}": middle[side, cache] for side, cache in middle},
        "ratio_cold": median(
            a / b for a, b in zip(speeds["ours", "cold"], speeds["plain", "cold"], strict=True)
        ),
        "ratio_warm": median(
            a / b for a, b in zip(speeds["ours", "warm"], speeds["plain", "warm"], strict=True)
        ),
    }


def run(quick: bool) -> dict[str, Any]:
    """Measure Globo's log for the metrics, then the whole recipe and Trivago; `quick` measures only
    Trivago.
    """
    rows = (
        [cell("trivago", 3)] if quick else [cell("globo_bare", 15), cell("globo", 7), cell("trivago", 15)]
    )
    names = ("ratio_cold", "ratio_warm")
    others = {f"{row['log']}_{name}": row[name] for row in rows[1:] for name in names}
    return {
        "config": {"cold": "posix_fadvise(DONTNEED) before each pass"},
        "metrics": {**{name: rows[0][name] for name in names}, **others},
        "samples": {
            "rows": rows,
            "factors": {row["log"]: factors(pair(row["log"])[0], row["batch"]) for row in rows},
        },
    }
