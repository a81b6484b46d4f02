"""A hot profile: which rows are hot, of which data set, and what they are worth. A sealed JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic

from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import ConfigError
from stratarec.hot.table_parts import Counts, RowRange
from stratarec.io.sealed import Count, Hash, Model, read_sealed, write_sealed

ADVICE = "make it anew with `stratarec profile DATASET --hot BYTES`"
Method = Literal["inputs", "accesses"]
Share = Annotated[float, pydantic.Field(ge=0, le=1)]


class HotTable(Model):
    """The hot rows of one table, which are its first ones."""

    name: str
    rows: Count
    row_bytes: Count
    """Weights and optimizer state."""
    hot: Count
    """How many: all tail buckets, and the most frequent values."""
    accesses: Share
    """Share of the table's training lookups that go to them."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> HotTable:
        if self.hot > self.rows:
            raise ValueError(f"{self.name}: {self.hot} hot rows of {self.rows}")
        return self


class InputShare(Model):
    """Share of inputs all of whose lookups are hot, and the interval that holds it with a chance of 99 %."""

    share: Share
    low: Share
    high: Share


class Point(Model):
    """What a budget is worth."""

    budget_bytes: Count
    row_share: Share
    """Of all bytes of the model's tables."""
    accesses: Share
    """Share of training lookups that go to hot rows."""
    inputs: InputShare
    counted: InputShare
    """The same by the rows with most lookups per byte."""


class HotProfile(Model):
    """Which rows are hot."""

    format: Literal[2] = 2
    dataset: str
    fingerprint: Hash
    """Of the data set that it is of."""
    split: Literal["train"] = "train"
    method: Method
    """Chosen to make most inputs hot, or, where that was no better, to have most lookups per byte."""
    chosen: Point
    curve: tuple[Point, ...]
    """For other budgets."""
    tables: tuple[HotTable, ...]
    seconds: Annotated[float, pydantic.Field(ge=0)]
    """That calibration took."""

    def write(self, path: Path) -> None:
        """Write it as a sealed file."""
        write_sealed(path, self.to_dict())

    @classmethod
    def read(cls, path: Path, dataset: Dataset | None = None) -> HotProfile:
        """Read a file.

        Parameters
        ----------
        dataset : Dataset
            That it must be of.

        Raises
        ------
        ConfigError
            When the file is damaged, or of another data set.
        """
        found = read_sealed(path, cls, ADVICE, ConfigError)
        if dataset is not None and found.fingerprint != dataset.fingerprint:
            raise ConfigError(
                f"{path} is a hot profile of another data set ({found.dataset}, {found.fingerprint[:8]}) than "
                f"{dataset.path} ({dataset.fingerprint[:8]}): its ids mean other values; {ADVICE}"
            )
        rows = [(table.name, table.rows) for table in found.tables]
        if dataset is not None and sorted(rows) != sorted(dataset.table_rows().items()):
            raise ConfigError(f"{path} has other tables or rows than {dataset.path}, which it is of; {ADVICE}")
        return found

    @property
    def points(self) -> list[Point]:
        """The chosen budget among the others."""
        return sorted((self.chosen, *self.curve), key=lambda point: point.budget_bytes)

    @property
    def row_bytes(self) -> dict[str, int]:
        """Table -> weights and optimizer state of a row."""
        return {table.name: table.row_bytes for table in self.tables}

    def hot(self, parts: Sequence[RowRange]) -> Counts:
        """``[parts]`` hot rows of each of the data set's tables."""
        tables = {table.name: table.hot for table in self.tables}
        return np.array([tables[part.table] for part in parts], dtype=np.int64)
