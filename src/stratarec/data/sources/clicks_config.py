"""The options of a log of clicks: `data.sources.clicks` reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from stratarec.config.validate import check_seed
from stratarec.data.durations import in_unit
from stratarec.data.schema import TimeUnit
from stratarec.data.sources.base import Size, set_size
from stratarec.errors import ConfigError
from stratarec.kernels.click_counts import FEATURES

# Features that are made of a click, beside its own columns.
_DERIVED = ("hour_of_day", "weekday", "history")


@dataclass(frozen=True, kw_only=True)
class ClicksConfig:
    """Where a click log lies, and how samples are made of it."""

    kind: Literal["clicks"] = "clicks"
    paths: tuple[str, ...] = ()
    """Parquet files, globs or URLs."""
    user: str = "user_id"
    """Column of the user."""
    session: str = "session_id"
    """Column of the session; empty when there is none."""
    item: str = "item_id"
    """Column of the clicked item."""
    time: str = "timestamp"
    """Column of the time of the click."""
    time_unit: TimeUnit = "s"
    """Unit of the time column, where it is an integer."""
    contexts: tuple[str, ...] = ()
    """Categorical columns that describe the moment of the click."""
    negatives: int = 4
    """K, negatives for each click."""
    negative_window: str = "1h"
    """How far behind a click the clicks of other users lie whose items are its negatives."""
    last_window: Literal["cut", "wait"] = field(default="cut", repr=False)
    """Of the clicks of the log's last `negative_window`, whose negatives are not all known yet: ``cut`` makes samples
    of them by what there is, ``wait`` leaves them to a data set that has this one for its base, as `stratarec
    continue` does."""
    popularity_window: str = "1h"
    """How far back the `popularity` feature looks; `recent_popularity` looks back a sixth of it."""
    memory: str = "1d"
    """How far back moves between items, the user's clicks, the session and `long_popularity` are counted."""
    history_length: int = 50
    """L, how many of the user's earlier clicks make the `history` feature; 0 for no history."""
    dense: tuple[str, ...] | None = None
    """Which of the numbers that are counted from earlier clicks a sample holds; null for all of them."""
    seed: int = 0
    """Of the negatives."""
    max_row_group_bytes: Annotated[int, Size("data.source.max_row_group_bytes")] = 2 << 30
    """Largest row group, its columns that are used in memory: memory holds a row group."""

    def __post_init__(self) -> None:
        if self.negatives < 1:
            raise ConfigError(f"data.source.negatives is {self.negatives}, expected at least 1")
        if self.history_length < 0:
            raise ConfigError(f"data.source.history_length is {self.history_length}, expected 0 or more")
        check_seed(self.seed, "data.source.seed")
        set_size(self, "max_row_group_bytes", "data.source.max_row_group_bytes")
        taken = (self.item, *_DERIVED)
        for place, name in enumerate(self.contexts):
            if name in taken or name in self.contexts[:place]:
                raise ConfigError(f"data.source.contexts names {name!r}, which is a feature already; leave it out")
        strange = sorted(set(self.dense or ()) - set(self.countable))
        if strange:
            raise ConfigError(
                f"data.source.dense names {strange[0]!r}, which is not counted; there are {', '.join(self.countable)}"
            )
        in_unit(self.negative_window, self.time_unit, "data.source.negative_window")
        window = in_unit(self.popularity_window, self.time_unit, "data.source.popularity_window")
        if in_unit(self.memory, self.time_unit, "data.source.memory") < window:
            raise ConfigError(
                f"data.source.memory is {self.memory}, expected at least popularity_window ({self.popularity_window})"
            )

    @property
    def countable(self) -> tuple[str, ...]:
        """The numbers that `dense` chooses from."""
        return (*FEATURES, *(f"{name}_popularity" for name in self.contexts))

    @property
    def counted(self) -> tuple[str, ...]:
        """Those that it chooses, in the order of `countable`."""
        return tuple(name for name in self.countable if self.dense is None or name in self.dense)
