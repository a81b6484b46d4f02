"""What a log of clicks that goes on needs of the logs before it: `data.sources.clicks` makes it, a data set keeps it.

Clicks that later ones look back on lie here as they were in the log, and not as counts, so that a user or an item can
be taken out of them: who counts them again has the counts that the source had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from stratarec.data.hashing import stable_hash
from stratarec.io.atomic import reporting_damage

ITEM, TIME = "item", "time"
PARTS = ("recent", "waiting", "first")


@dataclass(frozen=True, kw_only=True)
class ClickMemory:
    """The state of a log of clicks at its end."""

    recent: pl.DataFrame
    """Clicks that were made samples, in order of time: those that a later one may look back on."""
    waiting: pl.DataFrame
    """The last clicks, in order of time, that were not: not all of what follows them is known."""
    first: pl.DataFrame
    """``item`` (`item_keys`) and ``time`` of the first click of each item among all that were made samples, by hash."""
    clicks: int
    """How many of all logs were made samples."""

    @property
    def frames(self) -> dict[str, pl.DataFrame]:
        """Of each of `PARTS`."""
        return {"recent": self.recent, "waiting": self.waiting, "first": self.first}


def item_keys(values: pl.Series) -> pl.Series:
    """What items are called in `ClickMemory.first`."""
    return pl.Series(ITEM, stable_hash(values) | np.uint64(1))


def read_click_memory(paths: Mapping[str, Path], clicks: int, time: str) -> ClickMemory:
    """What a data set keeps, in Parquet files that may be anybody's; `DatasetError` where they are something else."""
    found = {part: _read(paths[part]) for part in PARTS}
    with reporting_damage(paths["first"]):
        kinds = dict(found["first"].schema)
        if kinds != {ITEM: pl.UInt64(), TIME: pl.Int64()} or found["first"].null_count().sum_horizontal().item():
            raise ValueError(f"its columns are {kinds}, expected {ITEM}: UInt64 and {TIME}: Int64, none missing")
        if found["first"][ITEM].n_unique() != len(found["first"]):
            raise ValueError("an item is named twice")
    for part in ("recent", "waiting"):
        frame = found[part]
        with reporting_damage(paths[part]):
            if frame.schema != found["recent"].schema or frame.schema.get(time) != pl.Int64():
                raise ValueError(f"its columns are {dict(frame.schema)}, expected those of recent clicks and {time!r}")
            if frame[time].null_count() or not frame[time].is_sorted():
                raise ValueError("its clicks are not in order of time")
    last, first = found["recent"][time].max(), found["waiting"][time].min()
    with reporting_damage(paths["waiting"]):
        if last is not None and first is not None and first < last:  # type: ignore[operator]
            raise ValueError("a click that waits is earlier than one that does not")
    return ClickMemory(**found, clicks=clicks)


def _read(path: Path) -> pl.DataFrame:
    with reporting_damage(path):
        table = pq.read_table(path, use_threads=False)
        for column in table.columns:
            column.validate(full=True)
        found = pl.from_arrow(table)
        assert isinstance(found, pl.DataFrame)
        for name, kind in found.schema.items():
            if kind not in (pl.String, pl.Int64, pl.UInt64):
                raise ValueError(f"column {name!r} is {kind}, expected text or integers of 64 bits")
        return found
