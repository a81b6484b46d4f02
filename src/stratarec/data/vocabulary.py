"""Frequency-ranked vocabularies: the most frequent value of a feature has id 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import polars as pl
import xxhash
from numpy.typing import NDArray

from stratarec.data.hashing import stable_hash
from stratarec.errors import ConfigError

MISSING = -1
# Values that are hashed at a time.
_PIECE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class VocabularyLimits:
    """Which values get a row of their own."""

    min_count: int = 2
    """Rarer values share the tail buckets."""
    tail_buckets: int = 16
    """Rows shared by rare and unseen values, by a hash of the value."""
    max_rows: int = 0
    """Keep at most this many values; 0 for no limit."""

    def __post_init__(self) -> None:
        for name, least in (("min_count", 1), ("tail_buckets", 1), ("max_rows", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"data.vocabulary.{name} is {getattr(self, name)}, expected at least {least}")


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig(VocabularyLimits):
    """Limits for all vocabularies, and others for some."""

    overrides: Mapping[str, VocabularyLimits] = field(default_factory=dict)
    """Vocabulary name -> its own limits."""

    def limits(self, name: str) -> VocabularyLimits:
        return self.overrides.get(name, self)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Values in order of id, and their training counts."""

    values: pl.Series
    """``[V]`` String or Int64; the place is the id."""
    counts: NDArray[np.int64]
    """``[V + tail_buckets]`` lookups in the training split; falling over the first V."""
    tail_buckets: int

    @property
    def rows(self) -> int:
        """Rows that a table needs."""
        return len(self.values) + self.tail_buckets

    @classmethod
    def rank(cls, counted: pl.DataFrame, limits: VocabularyLimits) -> Vocabulary:
        """From the columns `value` and `count`: by falling count, ties by value."""
        counted = counted.sort(["count", "value"], descending=[True, False])
        kept = counted.filter(pl.col("count") >= limits.min_count)
        kept = kept.head(limits.max_rows) if limits.max_rows else kept
        rest = counted.slice(len(kept))
        tail = np.zeros(limits.tail_buckets, dtype=np.int64)
        np.add.at(tail, _buckets(rest["value"], limits.tail_buckets), rest["count"].to_numpy())
        counts = np.concatenate([kept["count"].to_numpy().astype(np.int64), tail])
        return cls(values=kept["value"], counts=counts, tail_buckets=limits.tail_buckets)

    @property
    def digest(self) -> str:
        """xxh3_128 of the values in order of id: what ids mean, counts aside."""
        found = xxhash.xxh3_128(str(self.values.dtype).encode())
        if self.values.dtype == pl.String:
            found.update(self.values.str.len_bytes().cast(pl.UInt64).to_numpy().tobytes())
            for first in range(0, len(self.values), _PIECE):
                found.update("".join(self.values[first : first + _PIECE].to_list()).encode())
        else:
            found.update(self.values.to_numpy().tobytes())
        return found.hexdigest()

    def encode(self, values: pl.Series) -> NDArray[np.int32]:
        """``[N]`` ids; null becomes `MISSING`."""
        if values.dtype != self.values.dtype:
            values = values.cast(self.values.dtype)
        table = pl.DataFrame({"value": self.values, "id": np.arange(len(self.values), dtype=np.int32)})
        joined = values.to_frame("value").join(table, on="value", how="left", maintain_order="left")
        ids = joined["id"].fill_null(MISSING).to_numpy().copy()
        unknown = np.flatnonzero((ids == MISSING) & values.is_not_null().to_numpy())
        if len(unknown):
            ids[unknown] = len(self.values) + _buckets(values[unknown], self.tail_buckets)
        return ids.astype(np.int32, copy=False)

    def frame(self) -> pl.DataFrame:
        """What is stored: value, id, count; the tail buckets have no value."""
        values = self.values.extend_constant(None, self.tail_buckets)
        return pl.DataFrame({"value": values, "id": np.arange(self.rows, dtype=np.int32), "count": self.counts})


def _buckets(values: pl.Series, buckets: int) -> NDArray[np.int64]:
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    return (stable_hash(values) % np.uint64(buckets)).astype(np.int64)
