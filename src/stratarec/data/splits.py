"""Splits of samples: by time, by fraction, by file or by a column.

A split by fraction keeps all samples of a user, or else of a session, in one split, so that a model
is tested on users on whom it was not trained; with ``of: rows`` it is tested on known users. A
split by time is refused if its durations leave no training samples.

Negatives of the training split can be left out, chosen by the hash of their row. Outside training,
the network then adds the logarithm of the kept share to its logits. In an export, the last bias
includes this logarithm.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import polars as pl
import pydantic
from numpy.typing import NDArray

from stratarec.config.validate import check_ranges, check_seed
from stratarec.data.column_names import FILE, ROW, SPLIT, check_column
from stratarec.data.durations import PER_SECOND, TimeUnit, as_text, in_unit
from stratarec.data.hashing import stable_hash, unit_interval
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError, DataError

SPLITS = ("train", "valid", "test")


_TIME = r"\d{4}-\d\d-\d\d( \d\d:\d\d:\d\d)?"


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Assignment of samples to training, validation and test."""

    by: Literal["time", "fraction", "file", "column"] = "fraction"
    """``time``: the last periods of the log are for validation and test. ``fraction``: random users
    if the schema has users, else random sessions or samples (see `of`). ``file``: by input file.
    ``column``: by the values of `column`.
    """
    column: Annotated[str, pydantic.Field(exclude_if=operator.not_)] = field(default="", repr=False)
    """For ``column``: name of the column with the split of each row, which is not a feature. Rows
    whose value matches neither `valid` nor `test` are for training; a row without a value is an
    error."""
    of: Literal["", "rows"] = ""
    """``rows``: where rows are drawn, they are drawn one by one, so that users of the test split
    were seen in training. By default all rows of a user, or else of a session, are in the same
    split."""
    valid: float | str | tuple[str, ...] = 0.1
    """Validation split: a duration such as 1d for ``time``, a share for ``fraction``, name patterns
    for ``file``, patterns of values for ``column`` (such as ``[valid, dev*]``, in any case), where
    it may also be a share of the rows that are not for the test."""
    test: float | str | tuple[str, ...] = 0.1
    """Test split, in the same form as `valid`; by time it is the last period, after validation. 0
    or empty for none.
    """
    last: str = ""
    """Last time of the log for a split by time, such as 2023-11-14 22:13:20 (UTC). Later rows are
    in no split, because their times must be wrong. Empty for the latest time of any row."""
    negatives: float = 1.0
    """Share of the training split's negative samples that are kept, chosen at random. Outside
    training, the model adds the logarithm of this share to its logits, so that probabilities match
    the complete log."""
    seed: int = 0
    """Seed of the random choices."""

    def __post_init__(self) -> None:
        for name in ("valid", "test"):
            value = getattr(self, name)
            if self.by == "fraction" and not (isinstance(value, float | int) and 0 <= value < 1):
                raise ConfigError(f"data.split.{name} is {value!r}, expected a share from 0 to below 1")
            if self.by == "time" and value:
                in_unit(value, "s", f"data.split.{name}")
            if self.by == "file" and value and isinstance(value, float | int):
                raise ConfigError(f"data.split.{name} is {value!r}, expected file name patterns")
            if (
                self.by == "column"
                and isinstance(value, float | int)
                and (name == "test" or not 0 <= value < 1)
            ):
                share = ", or a share from 0 to below 1" if name == "valid" else ""
                raise ConfigError(
                    f"data.split.{name} is {value!r}, expected values of data.split.column{share}"
                )
        if self.by == "fraction" and float(self.valid) + float(self.test) >= 1:  # type: ignore[arg-type]
            raise ConfigError(
                "data.split.valid and data.split.test leave nothing to train on; lower one of them"
            )
        if self.last and (self.by != "time" or not re.fullmatch(_TIME, self.last)):
            raise ConfigError(
                f"data.split.last is {self.last!r}, expected a time such as 2023-11-14 22:13:20, "
                "and data.split.by time"
            )
        if bool(self.column) != (self.by == "column"):
            raise ConfigError(
                f"data.split.column is {self.column!r} and data.split.by is {self.by}; set the column for "
                "by: column only"
            )
        if self.column:
            check_column("data.split.column", self.column)
        if self.of and self.by not in ("fraction", "column"):
            raise ConfigError(
                f"data.split.of is {self.of}, which only by: fraction and by: column use, not by: {self.by}"
            )
        check_ranges(self, "data.split.", negatives="(0, 1]")
        check_seed(self.seed, "data.split.seed")

    def asks_for(self, split: str) -> bool:
        """Whether the configuration assigns samples to a split."""
        return split == "train" or bool(getattr(self, split))


class Splitter:
    """Assigns 0 (train), 1 (valid) or 2 (test) to samples.

    Raises
    ------
    ConfigError
        If the split is by time and the schema has no time, if file patterns match no file or all
        files, or if the schema uses the column of the splits.
    """

    def __init__(self, config: SplitConfig, schema: Schema, files: tuple[str, ...]) -> None:
        self._config = config
        self._schema = schema
        self._files = files
        self._last: int | None = None
        roles = (
            *schema.label_columns,
            *schema.scored_columns,
            schema.weight,
            schema.session,
            schema.user,
            schema.time,
        )
        if config.column and config.column in roles:
            raise ConfigError(
                f"data.split.column is {config.column!r}, which has a role in data.source.schema"
            )
        if config.last:
            seconds = int(np.datetime64(config.last.replace(" ", "T"), "s").astype(np.int64))
            self._last = (seconds + 1) * PER_SECOND[schema.time_unit] - 1
        self.file_split: NDArray[np.int8] | None = None
        """Split of each input file; None unless the split is by file."""
        if config.by == "time" and not schema.time:
            raise ConfigError(
                "data.split.by is time, but schema.time is not set; set it, or split by fraction"
            )
        if config.by == "file":
            self.file_split = np.array(
                [self._of_name(path.rsplit("/", 1)[-1], path) for path in files], dtype=np.int8
            )
            for number, name in ((1, "valid"), (2, "test")):
                if config.asks_for(name) and not (self.file_split == number).any():
                    raise ConfigError(f"data.split.{name} matches none of the {len(files)} input files")
            if self.file_split.all():
                raise ConfigError(
                    "data.split.valid and data.split.test match every input file: none is left to train on"
                )

    def _duration(self, name: str) -> int:
        length = getattr(self._config, name)
        return in_unit(str(length), self._schema.time_unit, f"data.split.{name}") if length else 0

    def last_time(self, latest: int) -> int:
        """Return the time at which the test split ends; `latest` is the latest time of any row."""
        return latest if self._last is None else min(latest, self._last)

    def assign(self, frame: pl.DataFrame, last_time: int) -> NDArray[np.int8]:
        """Return the ``[N]`` split of each row; `last_time` is the last time of the log."""
        config, schema = self._config, self._schema
        if config.by == "file":
            assert self.file_split is not None
            numbers: NDArray[np.int8] = self.file_split[frame[FILE].to_numpy()]
            return numbers
        if config.by == "time":
            times = frame[schema.time].to_numpy()
            last_valid = last_time - self._duration("test")
            last_train = last_valid - self._duration("valid")
            return ((times > last_train).astype(np.int8) + (times > last_valid)).astype(np.int8)
        key = ROW if config.of == "rows" else schema.user or schema.session or ROW
        if config.by == "column":
            split = self._of_values(frame)
            if isinstance(config.valid, float | int):
                split[(split == 0) & (self._place(frame[key], config.seed) < config.valid)] = 1
            return split
        place = self._place(frame[key], config.seed)
        test, valid = float(config.test), float(config.valid)  # type: ignore[arg-type]
        return np.where(place < test, 2, np.where(place < test + valid, 1, 0)).astype(np.int8)

    def _of_values(self, frame: pl.DataFrame) -> NDArray[np.int8]:
        """Return the split of each row, which column `SPLIT` (`SplitConfig.column`) has as text."""
        values = frame[SPLIT].str.strip_chars().str.to_lowercase()
        missing = values.is_null() | (values == "").fill_null(False)
        if missing.any():
            row = int(missing.arg_max() or 0)
            place = f"{self._files[frame[FILE][row]]}, row {frame[ROW][row]}: " if self._files else ""
            raise DataError(
                f"{place}column {self._config.column!r} is empty, expected the split of the row"
            )
        splits = {value: self._of_name(value) for value in values.unique()}
        return values.replace_strict(splits, return_dtype=pl.Int8).to_numpy(writable=True)

    def _of_name(self, *names: str) -> int:
        """Return the split whose patterns match one of the names; 0 for the training split."""
        fold = str.lower if self._config.column else str
        for number, patterns in ((2, self._config.test), (1, self._config.valid)):
            globs = (
                [patterns]
                if isinstance(patterns, str)
                else patterns
                if isinstance(patterns, Iterable)
                else []
            )
            if any(fnmatch.fnmatchcase(name, fold(glob)) for name in names for glob in globs):
                return number
        return 0

    @property
    def needs_last_time(self) -> bool:
        """Whether the split of a row depends on the last time of the log."""
        return self._config.by == "time"

    def split(self, frame: pl.DataFrame, last_time: int = 0) -> NDArray[np.int8]:
        """Return the ``[N]`` split of each spilled row.

        The split is -1 for events that are not samples, and for negatives that are left out.
        """
        split = self.assign(frame, last_time)
        if self._last is not None:
            split = np.where(frame[self._schema.time].to_numpy() > last_time, np.int8(-1), split)
        label = frame[self._schema.label_column]
        if self._config.negatives < 1:
            negative = (label == 0).fill_null(False).to_numpy() & (split == 0)
            # The choice of negatives has another seed than the splits.
            place = self._place(frame[ROW], ~self._config.seed)
            split = np.where(negative & (place >= self._config.negatives), np.int8(-1), split)
        return np.where(label.is_null().to_numpy(), np.int8(-1), split)

    @staticmethod
    def _place(key: pl.Series, seed: int) -> NDArray[np.float64]:
        """Return ``[N]`` pseudo-random numbers in [0, 1) that depend on key and seed only."""
        mixed = stable_hash(key) ^ np.uint64(seed % (1 << 64))
        return unit_interval(stable_hash(pl.Series(mixed).reinterpret(signed=True)))


# The years 1990 to 2100 in seconds since 1970. A number of ticks is in these years in at most one
# time unit.
FIRST_DATE, LAST_DATE = 631_152_000, 4_102_444_800


@dataclass(frozen=True, kw_only=True)
class Span:
    """First and last time of a log."""

    first: int
    last: int
    unit: TimeUnit

    def __str__(self) -> str:
        length = as_text(self.last - self.first, self.unit)
        if not _in_these_years(self.last, self.unit):
            return f"{length} ({self.first} to {self.last} in {self.unit})"
        return f"{length} ({_date(self.first, self.unit)} to {_date(self.last, self.unit)} UTC)"

    def check_split(self, split: SplitConfig) -> None:
        """Raise `DataError` if a split by time leaves no training samples."""
        if split.by != "time":
            return
        lengths = {name: getattr(split, name) for name in ("valid", "test") if split.asks_for(name)}
        asked = sum(
            in_unit(str(length), self.unit, f"data.split.{name}") for name, length in lengths.items()
        )
        if asked > self.last - self.first:
            raise DataError(
                f"the training split has 0 samples: data.split.valid ({split.valid}) and data.split.test "
                f"({split.test}) cover the whole log, which spans {self}; shorten them, or check time_unit"
            )


def unlikely_unit(times: pl.Series, unit: TimeUnit) -> str:
    """Return an error text if integers are dates between 1990 and 2100 in another unit, but not in
    `unit`; else empty.

    Times that count from another epoch are before 1990 in every unit, and are accepted.
    """
    least, most = times.min(), times.max()
    if not (isinstance(least, int) and isinstance(most, int)):
        return ""
    scale = PER_SECOND[unit]
    if most >= FIRST_DATE * scale and least < LAST_DATE * scale:
        return ""
    for other in PER_SECOND:
        if _in_these_years(least, other) and _in_these_years(most, other):
            return (
                f"holds {least} to {most}, which are the years {_year(least, unit)} to {_year(most, unit)} "
                "if in "
                f"{unit}, and {_date(least, other)} to {_date(most, other)} if in {other}; set time_unit "
                f"to {other}, or convert the column to {unit}"
            )
    return ""


def too_coarse(times: pl.Series, unit: TimeUnit) -> str:
    """Return advice if timestamps are finer than `unit`, so that different timestamps would become
    equal; else empty.
    """
    ticks, per_second = times.to_physical(), PER_SECOND[times.dtype.time_unit]  # type: ignore[attr-defined]
    fitting = [name for name, scale in PER_SECOND.items() if not _loses(ticks, per_second, scale).any()]
    if unit in fitting:
        return ""
    example = times.filter(_loses(ticks, per_second, PER_SECOND[unit]))[0]
    return (
        f"has times finer than time_unit {unit}, such as {example}; set time_unit to {fitting[0]}, or "
        f"round the column to {unit}"
    )


def _loses(ticks: pl.Series, per_second: int, scale: int) -> pl.Series:
    """Return flags: whether a time, in ticks of 1 / `per_second` seconds, is not a multiple of 1 /
    `scale` seconds.
    """
    return (ticks % max(per_second // scale, 1)).fill_null(0) != 0


def _in_these_years(time: int, unit: TimeUnit) -> bool:
    return FIRST_DATE * PER_SECOND[unit] <= time < LAST_DATE * PER_SECOND[unit]


def _date(time: int, unit: TimeUnit) -> str:
    return str(np.datetime64(time // PER_SECOND[unit], "s")).replace("T", " ")


def time_text(time: int, unit: TimeUnit) -> str:
    """Format a stored time as a number, followed by its date if it is a date."""
    return f"{time} {unit}" + (
        f" ({_date(time, unit)} UTC)" if time >= FIRST_DATE * PER_SECOND[unit] else ""
    )


def _year(time: int, unit: TimeUnit) -> str:
    return str(np.datetime64(time // PER_SECOND[unit], "s").astype("datetime64[Y]"))
