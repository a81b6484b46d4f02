"""What a table is, in TorchRec's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stratarec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EmbeddingBagConfig:
    """One table and the features that look it up."""

    name: str
    """Name of the table; distinct in a collection."""
    num_embeddings: int
    """Rows."""
    embedding_dim: int
    """D, floats a row."""
    feature_names: tuple[str, ...] = ()
    """Features that are pooled from this table."""
    pooling: Literal["sum", "mean"] = "sum"
    """How the rows of a bag become one; an empty bag gives zeros."""
    sequence_features: tuple[str, ...] = ()
    """Features that look this table up without pooling: one row for each id."""

    def __post_init__(self) -> None:
        if self.num_embeddings < 1:
            raise ConfigError(f"table {self.name!r}: num_embeddings is {self.num_embeddings}, expected at least 1")
        if self.embedding_dim < 1:
            raise ConfigError(f"table {self.name!r}: embedding_dim is {self.embedding_dim}, expected at least 1")
        if self.pooling not in ("sum", "mean"):
            raise ConfigError(f"table {self.name!r}: pooling is {self.pooling!r}, expected 'sum' or 'mean'")
        if not self.feature_names and not self.sequence_features:
            raise ConfigError(f"table {self.name!r}: no feature looks it up; name some in feature_names")


def check_tables(tables: tuple[EmbeddingBagConfig, ...]) -> None:
    """Refuse repeated table names and features of two tables."""
    if not tables:
        raise ConfigError("a collection needs at least one table")
    for what, names in (
        ("table", [table.name for table in tables]),
        ("feature", [name for table in tables for name in (*table.feature_names, *table.sequence_features)]),
    ):
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"{what} names must be distinct, repeated: {', '.join(repeated)}")
