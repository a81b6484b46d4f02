"""Which split a sample belongs to: by time, by fraction or by file.

By fraction users are whole where the schema names them, else sessions: a user on both sides would be tested on what was
learnt of them. By time, durations that leave nothing to train on are refused with the log's span. Negatives of the
training split can be left out by the hash of their row; a network adds the logarithm of the share that is kept to its
logits wherever it is not trained, and an export has it in its last bias.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.config.validate import check_seed
from stratarec.data.column_names import FILE, ROW
from stratarec.data.durations import PER_SECOND, as_text, in_unit
from stratarec.data.hashing import stable_hash, unit_interval
from stratarec.data.schema import Schema, TimeUnit
from stratarec.errors import ConfigError, DataError

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """How samples are dealt to training, validation and test."""

    by: Literal["time", "fraction", "file"] = "fraction"
    """``time``: the last stretches; ``fraction``: at random, whole users together where the schema names them, else
    whole sessions; ``file``: whole input files."""
    valid: float | str | tuple[str, ...] = 0.1
    """A duration such as 1d for ``time``, a share for ``fraction``, file name patterns for ``file``."""
    test: float | str | tuple[str, ...] = 0.1
    """As `valid`; by time the test split is the last and validation lies before it. Of either, 0 or nothing at all is
    for none."""
    negatives: float = 1.0
    """Share of the training split's negative samples that are kept, at random; the model adds the logarithm of it to
    its logits wherever it is not trained, so that its probabilities are those of the whole log."""
    seed: int = 0
    """Of the random fractions."""

    def __post_init__(self) -> None:
        for name in ("valid", "test"):
            value = getattr(self, name)
            if self.by == "fraction" and not (isinstance(value, float | int) and 0 <= value < 1):
                raise ConfigError(f"data.split.{name} is {value!r}, expected a share from 0 to below 1")
            if self.by == "time" and value:
                in_unit(value, "s", f"data.split.{name}")
            if self.by == "file" and value and isinstance(value, float | int):
                raise ConfigError(f"data.split.{name} is {value!r}, expected file name patterns")
        if self.by == "fraction" and float(self.valid) + float(self.test) >= 1:  # type: ignore[arg-type]
            raise ConfigError("data.split.valid and data.split.test leave nothing to train on")
        if not 0 < self.negatives <= 1:
            raise ConfigError(f"data.split.negatives is {self.negatives}, expected a share above 0 and at most 1")
        check_seed(self.seed, "data.split.seed")

    def asks_for(self, split: str) -> bool:
        """Whether a split should get samples."""
        return split == "train" or bool(getattr(self, split))


class Splitter:
    """Assigns 0 (train), 1 (valid) or 2 (test) to samples.

    Raises
    ------
    ConfigError
        For a split by time of data without times, and for file patterns that match nothing or everything.
    """

    def __init__(self, config: SplitConfig, schema: Schema, files: tuple[str, ...]) -> None:
        self._config, self._schema = config, schema
        self.file_split: NDArray[np.int8] | None = None
        """Split of each input file; only for a split by file."""
        if config.by == "time" and not schema.time:
            raise ConfigError("data.split.by is time, but this data has no time column")
        if config.by == "file":
            self.file_split = np.array([self._of_file(path) for path in files], dtype=np.int8)
            for number, name in ((1, "valid"), (2, "test")):
                if config.asks_for(name) and not (self.file_split == number).any():
                    raise ConfigError(f"data.split.{name} matches none of the {len(files)} input files")
            if self.file_split.all():
                raise ConfigError(
                    "data.split.valid and data.split.test match every input file: none is left to train on"
                )

    def _of_file(self, path: str) -> int:
        name = path.rsplit("/", 1)[-1]
        for number, patterns in ((2, self._config.test), (1, self._config.valid)):
            if not patterns:
                continue
            wanted = (patterns,) if isinstance(patterns, str) else patterns
            assert not isinstance(wanted, float)
            if any(fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(path, pattern) for pattern in wanted):
                return number
        return 0

    def _duration(self, name: str) -> int:
        length = getattr(self._config, name)
        return in_unit(str(length), self._schema.time_unit, f"data.split.{name}") if length else 0

    def assign(self, frame: pl.DataFrame, last_time: int) -> NDArray[np.int8]:
        """``[N]`` split numbers of spilled rows; `last_time` is the largest time of all samples."""
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
        # A user on both sides would be tested on what was learnt of them.
        place = self._place(frame[schema.user or schema.session or ROW], config.seed)
        test, valid = float(config.test), float(config.valid)  # type: ignore[arg-type]
        return np.where(place < test, 2, np.where(place < test + valid, 1, 0)).astype(np.int8)

    def thin(self, frame: pl.DataFrame, split: NDArray[np.int8]) -> NDArray[np.int8]:
        """`split` with -1, no split, for the negatives of the training split that are not kept."""
        if self._config.negatives == 1:
            return split
        negative = (frame[self._schema.label_column] == 0).fill_null(False).to_numpy() & (split == 0)
        # Other draws than those of the splits.
        place = self._place(frame[ROW], ~self._config.seed)
        return np.where(negative & (place >= self._config.negatives), np.int8(-1), split)

    @staticmethod
    def _place(key: pl.Series, seed: int) -> NDArray[np.float64]:
        """``[N]`` numbers from 0 to 1, by `key` and seed."""
        mixed = stable_hash(key) ^ np.uint64(seed % (1 << 64))
        return unit_interval(stable_hash(pl.Series(mixed).reinterpret(signed=True)))


# 1990 to 2100 in seconds since 1970. Units are so far apart that a number is in these years by one unit at most.
FIRST_DATE, LAST_DATE = 631_152_000, 4_102_444_800


@dataclass(frozen=True, kw_only=True)
class Span:
    """From the first to the last time of a log."""

    first: int
    last: int
    unit: TimeUnit

    def __str__(self) -> str:
        length = as_text(self.last - self.first, self.unit)
        if not _in_these_years(self.last, self.unit):
            return f"{length} ({self.first} to {self.last} in {self.unit})"
        return f"{length} ({_date(self.first, self.unit)} to {_date(self.last, self.unit)} UTC)"

    def check_split(self, split: SplitConfig) -> None:
        """Refuse a split by time that leaves nothing to train on."""
        if split.by != "time":
            return
        lengths = {name: getattr(split, name) for name in ("valid", "test") if split.asks_for(name)}
        asked = sum(in_unit(str(length), self.unit, f"data.split.{name}") for name, length in lengths.items())
        if asked > self.last - self.first:
            raise DataError(
                f"the training split has 0 samples: data.split.valid ({split.valid}) and data.split.test "
                f"({split.test}) take all of the log, which spans {self}; shorten them, or check time_unit"
            )


def unlikely_unit(times: pl.Series, unit: TimeUnit) -> str:
    """What is odd about integers as times in `unit`: all before 1990 or after 2100, but not so in another unit.

    Empty where nothing is; times that count from another beginning are before 1990 in every unit.
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
                f"holds {least} to {most}, which are the years {_year(least, unit)} to {_year(most, unit)} if in "
                f"{unit}, and {_date(least, other)} to {_date(most, other)} if in {other}; set time_unit to "
                f"{other}, or convert the column to {unit}"
            )
    return ""


def too_coarse(times: pl.Series, unit: TimeUnit) -> str:
    """Where timestamps are finer than `unit`, so that different ones would become equal: what to do; else empty."""
    ticks, own = times.to_physical(), PER_SECOND[times.dtype.time_unit]  # type: ignore[attr-defined]
    fitting = [wanted for wanted, scale in PER_SECOND.items() if not _loses(ticks, own, scale).any()]
    if unit in fitting:
        return ""
    such = times.filter(_loses(ticks, own, PER_SECOND[unit]))[0]
    return (
        f"has times finer than time_unit {unit}, such as {such}; set time_unit to {fitting[0]}, or "
        f"round the column to {unit}"
    )


def _loses(ticks: pl.Series, own: int, scale: int) -> pl.Series:
    """Where ticks, `own` of them a second, are no whole number of ticks of `scale` a second."""
    return (ticks % max(own // scale, 1)).fill_null(0) != 0


def _in_these_years(time: int, unit: TimeUnit) -> bool:
    return FIRST_DATE * PER_SECOND[unit] <= time < LAST_DATE * PER_SECOND[unit]


def _date(time: int, unit: TimeUnit) -> str:
    return str(np.datetime64(time // PER_SECOND[unit], "s")).replace("T", " ")


def time_text(time: int, unit: TimeUnit) -> str:
    """Return a time as it is stored, and as a date where it is one."""
    return f"{time} {unit}" + (f" ({_date(time, unit)} UTC)" if time >= FIRST_DATE * PER_SECOND[unit] else "")


def _year(time: int, unit: TimeUnit) -> str:
    return str(np.datetime64(time // PER_SECOND[unit], "s").astype("datetime64[Y]"))
