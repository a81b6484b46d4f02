"""Which split a sample belongs to: by time, by fraction or by file."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.durations import in_unit
from stratarec.data.hashing import stable_hash, unit_interval
from stratarec.data.names import FILE, ROW
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.explaining import check_seed

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
    """As `valid`; by time the test split is the last and validation lies before it."""
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
            if self.by == "time":
                in_unit(value, "s", f"data.split.{name}")
            if self.by == "file" and isinstance(value, float | int):
                raise ConfigError(f"data.split.{name} is {value!r}, expected file name patterns")
        if self.by == "fraction" and float(self.valid) + float(self.test) >= 1:  # type: ignore[arg-type]
            raise ConfigError("data.split.valid and data.split.test leave nothing to train on")
        if not 0 < self.negatives <= 1:
            raise ConfigError(f"data.split.negatives is {self.negatives}, expected a share above 0 and at most 1")
        check_seed(self.seed, "data.split.seed")

    def asks_for(self, split: str) -> bool:
        """Whether a split should get samples: all do but a share of 0."""
        return self.by != "fraction" or bool(getattr(self, split))


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
                if not (self.file_split == number).any():
                    raise ConfigError(f"data.split.{name} matches none of the {len(files)} input files")
            if self.file_split.all():
                raise ConfigError(
                    "data.split.valid and data.split.test match every input file: none is left to train on"
                )

    def _of_file(self, path: str) -> int:
        name = path.rsplit("/", 1)[-1]
        for number, patterns in ((2, self._config.test), (1, self._config.valid)):
            wanted = (patterns,) if isinstance(patterns, str) else patterns
            assert not isinstance(wanted, float)
            if any(fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(path, pattern) for pattern in wanted):
                return number
        return 0

    def _duration(self, name: str) -> int:
        return in_unit(str(getattr(self._config, name)), self._schema.time_unit, f"data.split.{name}")

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
