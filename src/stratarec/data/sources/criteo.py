"""Criteo display advertising logs (Kaggle and Terabyte): tab-separated label, 13 integers, 26 hashed categories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import polars as pl

from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.limits import Size, set_size
from stratarec.data.sources.text import RowChecks, TextFormat, TextSource

DENSE = tuple(f"I{i}" for i in range(1, 14))
SPARSE = tuple(f"C{i}" for i in range(1, 27))


@dataclass(frozen=True, kw_only=True)
class CriteoConfig:
    """Where the Criteo log lies."""

    kind: Literal["criteo"] = "criteo"
    paths: tuple[str, ...] = ()
    """Files, globs or URLs; .gz and .zst are decompressed."""
    max_line_bytes: Annotated[int, Size("data.source.max_line_bytes")] = 1 << 20
    """Longest line: memory holds a line."""

    def __post_init__(self) -> None:
        set_size(self, "max_line_bytes", "data.source.max_line_bytes")


class CriteoSource(TextSource):
    """Rows of a Criteo log in file order; it has no sessions, users or times."""

    kind = "criteo"
    layout = TextFormat(columns=("label", *DENSE, *SPARSE), delimiter="\t", header=False)
    schema = Schema(
        label="label",
        dense=tuple(DenseFeature(name=name) for name in DENSE),
        sparse=tuple(SparseFeature(name=name) for name in SPARSE),
    )

    def convert(self, frame: pl.DataFrame, checks: RowChecks) -> pl.DataFrame:
        label = [checks.label(frame["label"])] if "label" in frame.columns else []
        return frame.with_columns(*label, *(checks.number(frame[name]) for name in DENSE))
