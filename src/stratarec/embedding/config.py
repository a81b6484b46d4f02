"""Configuration of tables, with TorchRec's names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from stratarec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """Part of a larger table: row r of the part is row ``first + r * stride`` of the complete table."""

    first: int
    stride: int
    rows: int
    """Rows of the complete table."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingBagConfig:
    """One table and the features that look it up."""

    name: str
    """Name of the table, unique in a collection."""
    num_embeddings: int
    """Number of rows."""
    embedding_dim: int
    """D, floats per row."""
    feature_names: tuple[str, ...] = ()
    """Features that are pooled from this table."""
    pooling: Literal["sum", "mean"] = "sum"
    """How the rows of a bag are combined; an empty bag gives zeros."""
    sequence_features: tuple[str, ...] = ()
    """Features without pooling: one row for each id."""
    initial: float = 0.0
    """Initial weights are uniform in plus or minus this value; 0 means 1 / sqrt(rows of the complete table)."""
    part: RowPart | None = None
    """Set if the table is a part of a larger table of the same name, whose initial values and noise it uses."""

    def __post_init__(self) -> None:
        if self.num_embeddings < 1:
            raise ConfigError(f"table {self.name!r}: num_embeddings is {self.num_embeddings}, expected at least 1")
        if self.embedding_dim < 1:
            raise ConfigError(f"table {self.name!r}: embedding_dim is {self.embedding_dim}, expected at least 1")
        if not 0 <= self.initial < math.inf:
            raise ConfigError(f"table {self.name!r}: initial is {self.initial}, expected a finite number of 0 or more")
        if self.pooling not in ("sum", "mean"):
            raise ConfigError(f"table {self.name!r}: pooling is {self.pooling!r}, expected 'sum' or 'mean'")
        if self.part is not None:
            last = self.part.first + (self.num_embeddings - 1) * self.part.stride
            if not 0 <= self.part.first <= last < self.part.rows:
                raise ConfigError(
                    f"table {self.name!r}: part is rows {self.part.first} to {last} of the complete table, expected "
                    f"0 to {self.part.rows - 1}"
                )
        if not self.feature_names and not self.sequence_features:
            raise ConfigError(f"table {self.name!r}: no feature uses it; set feature_names or sequence_features")

    @property
    def numbering(self) -> RowPart:
        """The part of the complete table; all rows if `part` is None."""
        return self.part or RowPart(first=0, stride=1, rows=self.num_embeddings)

    @property
    def bound(self) -> float:
        """Initial weights are uniform in plus or minus this value."""
        # Computed from the rows of the complete table, because its parts have the same initial values.
        return self.initial or float(self.numbering.rows**-0.5)


def check_tables(tables: tuple[EmbeddingBagConfig, ...]) -> None:
    """Raise a `ConfigError` for repeated names of tables or features."""
    for what, names in (
        ("table", [table.name for table in tables]),
        ("feature", [name for table in tables for name in (*table.feature_names, *table.sequence_features)]),
    ):
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"{what} names must be distinct, repeated: {', '.join(repeated)}")
