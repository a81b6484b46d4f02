"""Public click logs as column lists over the CSV source: Criteo and Avazu.

Criteo display advertising logs (Kaggle and Terabyte) are tab-separated without a header: label, 13 integers, 26 hashed
categories. Avazu click logs are CSV with a header, all columns categorical, the hour as YYMMDDHH.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import polars as pl

from stratarec.data.schema import DenseFeature, Schema, SparseFeature
from stratarec.data.sources.base import OnBadRow, Size, View, set_size
from stratarec.data.sources.blocks import BLOCK_BYTES
from stratarec.data.sources.csv import CsvConfig, CsvSource
from stratarec.data.sources.delimited import read_header
from stratarec.data.sources.parse import as_written
from stratarec.data.sources.typed import Converter

DENSE = tuple(f"I{i}" for i in range(1, 14))
SPARSE = tuple(f"C{i}" for i in range(1, 27))
CATEGORIES = (
    "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category", "device_id",
    "device_ip", "device_model", "device_type", "device_conn_type", "C14", "C15", "C16", "C17", "C18", "C19", "C20",
    "C21",
)  # fmt: skip

CRITEO = Schema(
    label="label",
    dense=tuple(DenseFeature(name=name) for name in DENSE),
    sparse=tuple(SparseFeature(name=name) for name in SPARSE),
)
AVAZU = Schema(
    label="click",
    sparse=tuple(SparseFeature(name=name) for name in (*CATEGORIES, "hour_of_day", "weekday")),
    time="time",
)
# What is read of an Avazu log, before the hour becomes two features and the time.
_AVAZU_COLUMNS = Schema(label="click", sparse=tuple(SparseFeature(name=name) for name in (*CATEGORIES, "hour")))


@dataclass(frozen=True, kw_only=True)
class _PublicConfig:
    kind: str
    paths: tuple[str, ...] = ()
    """Files, directories, globs or URLs; .gz, .zst and .bz2 are decompressed."""
    max_line_bytes: Annotated[int, Size("data.source.max_line_bytes")] = 1 << 20
    """Longest line: memory holds a line."""

    def __post_init__(self) -> None:
        set_size(self, "max_line_bytes", "data.source.max_line_bytes")


@dataclass(frozen=True, kw_only=True)
class CriteoConfig(_PublicConfig):
    """Where the Criteo log lies."""

    kind: Literal["criteo"] = "criteo"


@dataclass(frozen=True, kw_only=True)
class AvazuConfig(_PublicConfig):
    """Where the Avazu log lies."""

    kind: Literal["avazu"] = "avazu"


class CriteoSource(CsvSource):
    """Rows of a Criteo log in file order; it has no sessions, users or times."""

    kind = "criteo"

    def __init__(
        self, config: CriteoConfig, on_bad_row: OnBadRow, block_bytes: int = BLOCK_BYTES, view: View | None = None
    ) -> None:
        form = CsvConfig(
            paths=config.paths,
            schema=CRITEO,
            format="tsv",
            quote="",
            columns=("label", *DENSE, *SPARSE),
            max_line_bytes=config.max_line_bytes,
        )
        super().__init__(form, on_bad_row, block_bytes, view)
        # Rows that are to be scored may lack the label; there is no header to say so.
        if view is not None and len(read_header(self._front()[1], self.files[0], "\t", "")[0]) == len(form.columns) - 1:
            self._config = replace(form, columns=form.columns[1:])


class AvazuSource(CsvSource):
    """Rows of an Avazu log in file order, with the hour of the day and the weekday as features of their own."""

    kind = "avazu"

    def __init__(
        self, config: AvazuConfig, on_bad_row: OnBadRow, block_bytes: int = BLOCK_BYTES, view: View | None = None
    ) -> None:
        form = CsvConfig(
            paths=config.paths,
            schema=_AVAZU_COLUMNS,
            format="csv",
            quote="",
            max_line_bytes=config.max_line_bytes,
        )
        own = None if view is None else replace(view, schema=_AVAZU_COLUMNS)
        super().__init__(form, on_bad_row, block_bytes, own)
        self.schema = AVAZU

    def _columns(self, frame: pl.DataFrame, converter: Converter) -> dict[str, pl.Series]:
        columns = converter.columns(frame, _AVAZU_COLUMNS)
        text = columns.pop("hour")
        hour = as_written(text, "%y%m%d%H")
        converter.require(text, hour.is_not_null(), "an hour as YYMMDDHH")
        derived = {
            "hour_of_day": hour.dt.hour().cast(pl.Int64),
            "weekday": hour.dt.weekday().cast(pl.Int64),
            "time": hour.dt.epoch("s"),
        }
        return {**columns, **derived}
