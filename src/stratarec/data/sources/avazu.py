"""Avazu click logs: CSV with a header, all columns categorical, the hour as YYMMDDHH."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import polars as pl

from stratarec.data.schema import Schema, SparseFeature
from stratarec.data.sources.base import Chunk, OnBadRow
from stratarec.data.sources.files import expand, fingerprint
from stratarec.data.sources.text import BLOCK_BYTES, RowChecks, TextFormat, estimate_rows, text_chunks

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


class AvazuSource:
    """Rows of an Avazu log in file order, with the hour of the day and the weekday as features of their own."""

    def __init__(self, config: AvazuConfig, on_bad_row: OnBadRow, block_bytes: int = BLOCK_BYTES) -> None:
        self._files = expand(config.paths)
        self._on_bad_row = on_bad_row
        self._block_bytes = block_bytes
        self.files = tuple(file.path for file in self._files)
        self.total_bytes = sum(file.size for file in self._files)
        self.schema = Schema(
            label="click",
            sparse=tuple(SparseFeature(name=name) for name in (*CATEGORIES, "hour_of_day", "weekday")),
            time="time",
        )

    def estimate_rows(self) -> int:
        return estimate_rows(self._files)

    def fingerprint(self) -> dict[str, object]:
        return {"kind": "avazu", "files": fingerprint(self._files), "block_bytes": self._block_bytes}

    def chunks(self, workspace: Path, start: int = 0) -> Iterator[Chunk]:
        layout = TextFormat(columns=("id", "click", "hour", *CATEGORIES), delimiter=",", header=True)
        return text_chunks(self._files, layout, self._on_bad_row, _convert, start, self._block_bytes)


def _convert(frame: pl.DataFrame, checks: RowChecks) -> pl.DataFrame:
    label = checks.label(frame["click"])
    hour = ("20" + frame["hour"] + "00").str.to_datetime("%Y%m%d%H%M", strict=False)
    checks.require(frame["hour"], hour.is_not_null() & (frame["hour"].str.len_bytes() == 8), "an hour as YYMMDDHH")
    return frame.select(
        label.alias("click"),
        *CATEGORIES,
        hour.dt.hour().cast(pl.Int64).alias("hour_of_day"),
        hour.dt.weekday().cast(pl.Int64).alias("weekday"),
        hour.dt.epoch("s").alias("time"),
    )
