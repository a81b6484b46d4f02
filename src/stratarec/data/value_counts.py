"""How often values occur: counts of several logs added, those of values that have no row yet, too, kept in a file.

A data set has the counts of all values, also of those that its vocabularies leave out: a data set that is based on it
gives them a row once they are frequent enough in all logs together. Beside the `count` of all logs it has what that is
worth now (`recent`, where older lookups count less) and when a row of a log `last` had the value. What a limit on
memory forgets is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq

from stratarec.data.vocabulary import StoredType, buckets_of
from stratarec.data.vocabulary_limits import VocabularyLimits
from stratarec.io.atomic import reading

_BUCKET = "@bucket"


def merge_counts(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Columns `value` and `count`, and `recent` and `last` where there are, of all parts, a value once, in ascending
    order.

    Values of unlike types (text and numbers, numbers with a sign and without, which no integer type holds) become text.
    """
    kinds = {part["value"].dtype for part in parts}
    common = kinds.pop() if len(kinds) == 1 else pl.String()
    alike = [part.lazy().with_columns(pl.col("value").cast(common), pl.col("count").cast(pl.Int64)) for part in parts]
    sums = [pl.col(name).max() if name == "last" else pl.col(name).sum() for name in parts[0].columns[1:]]
    return pl.concat(alike).group_by("value").agg(sums).sort("value").collect()


def bounded(counted: pl.DataFrame, limits: VocabularyLimits) -> pl.DataFrame:
    """Counts as small as a vocabulary of `limits` lets them be: one value for each bucket of a hash, with the counts of
    all that share it."""
    if limits.kind == "count":
        return counted
    last = [pl.col("last").max()] if "last" in counted.columns else []
    bucket = pl.Series(_BUCKET, buckets_of(counted["value"], limits.buckets))
    found = counted.with_columns(bucket).group_by(_BUCKET).agg(pl.col("value").min(), pl.col("count").sum(), *last)
    return found.drop(_BUCKET).sort("value")


def read_counts(path: Path, expected: StoredType) -> pl.DataFrame:
    """Columns `value`, `count`, `recent` and `last` in a Parquet file that may be anybody's; `DatasetError` where it is
    another one."""
    with reading(path):
        kinds = {name: str(kind) for name, kind in zip(*_columns(path), strict=True)}
        value = {"String": "large_string"}.get(expected, expected.lower())
        if kinds != {"value": value, "count": "int64", "recent": "double", "last": "int64"}:
            raise ValueError(f"its columns are {kinds}, expected value: {expected}, count, recent and last")
        table = pq.read_table(path, use_threads=False)
        for column in table.columns:
            column.validate(full=True)
        found = pl.from_arrow(table)
        assert isinstance(found, pl.DataFrame)
        if found.drop("last").null_count().sum_horizontal().item() or (found["count"] < 1).any():
            raise ValueError("a value is missing, or a count is below 1")
        if not (found["recent"].is_finite() & (found["recent"] >= 0)).all():
            raise ValueError("a recent count is no number, or below 0")
        if found["value"].n_unique() != len(found):
            raise ValueError("its values are not distinct")
    return found


def _columns(path: Path) -> tuple[list[str], list[object]]:
    schema = pq.ParquetFile(path).schema_arrow
    return list(schema.names), list(schema.types)
