"""State at the end of a click log, which a later log continues. The source `clicks` computes it; a
data set stores it.

It consists of clicks and not of counts, so that the clicks of a user or on an item can be removed.
The later log computes counts from these clicks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from stratarec.data.hashing import stable_hash
from stratarec.data.user_history import read_values
from stratarec.io.atomic import reporting_damage

ITEM, TIME = "item", "time"
PARTS = ("recent", "waiting", "first")


@dataclass(frozen=True, kw_only=True)
class ClickMemory:
    """State at the end of a log of clicks."""

    recent: pl.DataFrame
    """Clicks that are samples already and that counts of later samples may include, in order of
    time.
    """
    waiting: pl.DataFrame
    """Last clicks, in order of time. They are not samples yet, because not all clicks after them
    are known.
    """
    first: pl.DataFrame
    """``item`` (`item_keys`) and ``time`` of the first click of each item among all samples, sorted
    by item.
    """
    clicks: int
    """Number of clicks of all logs that became samples."""

    @property
    def frames(self) -> dict[str, pl.DataFrame]:
        """Part of the memory, one of `PARTS` -> its frame."""
        return {"recent": self.recent, "waiting": self.waiting, "first": self.first}


def item_keys(values: pl.Series) -> pl.Series:
    """Return the keys of items in `ClickMemory.first`."""
    return pl.Series(ITEM, stable_hash(values) | np.uint64(1))


def read_click_memory(paths: Mapping[str, Path], clicks: int, time: str) -> ClickMemory:
    """Read the click memory of a data set from Parquet files. Raises `DatasetError` if the files
    are invalid.
    """
    frames = {part: read_values(paths[part]) for part in PARTS}
    with reporting_damage(paths["first"]):
        kinds = dict(frames["first"].schema)
        if (
            kinds != {ITEM: pl.UInt64(), TIME: pl.Int64()}
            or frames["first"].null_count().sum_horizontal().item()
        ):
            raise ValueError(
                f"its columns are {kinds}, expected {ITEM}: UInt64 and {TIME}: Int64, without nulls"
            )
        if frames["first"][ITEM].n_unique() != len(frames["first"]):
            raise ValueError("an item occurs twice")
    for part in ("recent", "waiting"):
        frame = frames[part]
        with reporting_damage(paths[part]):
            if frame.schema != frames["recent"].schema or frame.schema.get(time) != pl.Int64():
                raise ValueError(
                    f"its columns are {dict(frame.schema)}, expected those of recent clicks and {time!r}"
                )
            if frame[time].null_count() or not frame[time].is_sorted():
                raise ValueError("its clicks are not in order of time")
    last, first = frames["recent"][time].max(), frames["waiting"][time].min()
    with reporting_damage(paths["waiting"]):
        if last is not None and first is not None and first < last:  # type: ignore[operator]
            raise ValueError("a waiting click is earlier than a recent one")
    return ClickMemory(**frames, clicks=clicks)
