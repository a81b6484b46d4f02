"""Avazu click logs: CSV with a header, all columns categorical, the hour as YYMMDDHH."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import polars as pl

from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.limits import Size, set_size
from stratarec.data.sources.text import RowChecks, TextFormat, TextSource

CATEGORIES = (
    "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category", "device_id",
    "device_ip", "device_model", "device_type", "device_conn_type", "C14", "C15", "C16", "C17", "C18", "C19", "C20",
    "C21",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AvazuConfig:
    """Where the Avazu log lies."""

    kind: Literal["avazu"] = "avazu"
    paths: tuple[str, ...] = ()
    """Files, globs or URLs; .gz and .zst are decompressed."""
    max_line_bytes: Annotated[int, Size("data.source.max_line_bytes")] = 1 << 20
    """Longest line: memory holds a line."""

    def __post_init__(self) -> None:
        set_size(self, "max_line_bytes", "data.source.max_line_bytes")


class AvazuSource(TextSource):
    """Rows of an Avazu log in file order, with the hour of the day and the weekday as features of their own."""

    kind = "avazu"
    layout = TextFormat(columns=("id", "click", "hour", *CATEGORIES), delimiter=",", header=True)
    schema = Schema(
        label="click",
        sparse=tuple(SparseFeature(name=name) for name in (*CATEGORIES, "hour_of_day", "weekday")),
        time="time",
    )

    def convert(self, frame: pl.DataFrame, checks: RowChecks) -> pl.DataFrame:
        label = [checks.label(frame["click"])] if "click" in frame.columns else []
        hour = ("20" + frame["hour"] + "00").str.to_datetime("%Y%m%d%H%M", strict=False)
        checks.require(frame["hour"], hour.is_not_null() & (frame["hour"].str.len_bytes() == 8), "an hour as YYMMDDHH")
        return frame.select(
            *label,
            *CATEGORIES,
            hour.dt.hour().cast(pl.Int64).alias("hour_of_day"),
            hour.dt.weekday().cast(pl.Int64).alias("weekday"),
            hour.dt.epoch("s").alias("time"),
        )
