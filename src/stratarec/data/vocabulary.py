"""Which id a value has: by frequency, the most frequent value of a feature first, or by its hash alone.

A vocabulary with a base begins with the values of an earlier one, whose ids they keep; those that are new follow by
frequency. A value that is evicted leaves a hole: its id is nobody's from then on, until `stratarec rebase` ranks all
anew. So only the ids behind the base's are ranked, and counts rise where a value of the base is rare by now.
Counts are lookups of the training split, those by histories included; ties go by value. Rare and unseen values share
the rows of the tail, which are the first ones, so that no row moves when there are more values; and a missing value is
an empty bag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
import xxhash
from numpy.typing import NDArray

from stratarec.data.hashing import HashRule, stable_hash
from stratarec.data.vocabulary_limits import VocabularyKind, VocabularyLimits
from stratarec.io.atomic import reading
from stratarec.io.sealed import Hash, Model

MISSING = -1
# Values that are hashed at a time.
_PIECE = 1 << 16
# Of one value on average, in a file that is read back; what a log may have is less.
_MOST_VALUE_BYTES = 1 << 16
_VALUE_TYPES = (pa.string(), pa.large_string(), pa.string_view(), pa.int64(), pa.uint64())
# Characters of a list of columns that a message repeats.
_LONGEST = 200
# Of a table, whose ids are int32.
Rows = Annotated[int, pydantic.Field(ge=0, le=1 << 31)]
StoredType = Literal["String", "Int64", "UInt64"]


class TailRule(HashRule):
    """The id of a value that has no row of its own: ``hash % buckets``. A missing value has no id."""

    hashed: Literal["values that are not in the vocabulary", "every value"]
    buckets: Rows

    @classmethod
    def tail_of(cls, kind: VocabularyKind, stored: StoredType, buckets: int) -> TailRule:
        """Of a vocabulary with so many tail buckets."""
        return cls(
            **vars(HashRule.of(stored)),
            hashed="every value" if kind == "hash" else "values that are not in the vocabulary",
            buckets=buckets,
        )


class Ids(Model):
    """What ids a vocabulary gives to which values."""

    kind: VocabularyKind
    """``count``: a value of the file has the id that stands beside it. ``hash``: the tail's rule holds for all."""
    type: StoredType
    """Of the values; values of another one are cast to it first."""
    values: Rows
    holes: Rows
    """Of them, how many are evicted or forgotten: null in the file."""
    inherited: Rows
    """Values, the first ones, that keep the ids of the data set that this one is based on; behind them ids are ranked
    by falling count."""
    first_rows: Rows
    """Of the first data set that this one goes on from: by their number all rows of its table begin."""
    tail_buckets: Annotated[Rows, pydantic.Field(ge=1)]
    """Rows before those of the values, for all others: by `stable_hash` modulo this. All there are of a ``hash``."""
    digest: Hash
    """xxh3_128 of the values in order of id; where there are holes, also of where those are."""
    tail: TailRule

    @pydantic.model_validator(mode="after")
    def _check_ids(self) -> Ids:
        if max(self.inherited, self.holes) > self.values or (self.kind == "hash" and self.values):
            raise ValueError(f"{self.values} values of a {self.kind}, {self.inherited} of its base, {self.holes} gone")
        if self.tail_buckets > self.first_rows:
            raise ValueError(f"{self.first_rows} first rows, {self.tail_buckets} of them tail buckets")
        if self.tail != TailRule.tail_of(self.kind, self.type, self.tail_buckets):
            raise ValueError("tail is not the rule that StrataRec gives ids by")
        return self


@dataclass(frozen=True, kw_only=True)
class Gone:
    """Which values have no row any more: see `Eviction`."""

    before: int | None = None
    """Those that were last seen before; None for none."""
    keep: int = 0
    """All but so many, by falling `recent` count; 0 for none."""

    def alive(self, values: pl.DataFrame) -> pl.Series:
        """``[N]`` which of some values, with `recent` and `last`, are to have a row."""
        there = values["count"].is_not_null()
        if self.before is not None:
            there &= (values["last"] >= self.before).fill_null(False)
        if self.keep:
            order = values.with_row_index("place").filter(there).sort(["recent", "value"], descending=[True, False])
            there &= pl.Series(np.isin(np.arange(len(values)), order["place"].head(self.keep).to_numpy()))
        return there


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Values in order of id, and their training counts."""

    values: pl.Series
    """``[V]`` String, Int64 or UInt64, null where a value is gone; the id is the place behind the tail buckets."""
    counts: NDArray[np.int64]
    """``[tail_buckets + V]`` lookups in the training split, and in those that it goes on from; falling over the
    values that are not of the base."""
    tail_buckets: int
    kind: VocabularyKind = "count"
    inherited: int = 0
    """How many values, the first ones, have the ids that they have in the base."""
    first_rows: int = 0
    """Of the first data set that it goes on from; 0 for its own."""
    counted: pl.DataFrame | None = None
    """What was counted of all values, where they are: those with a row first, the others by falling count."""

    @property
    def rows(self) -> int:
        """Rows that a table needs."""
        return len(self.values) + self.tail_buckets

    @classmethod
    def rank(
        cls, counted: pl.DataFrame, limits: VocabularyLimits, base: Vocabulary | None = None, gone: Gone | None = None
    ) -> Vocabulary:  # fmt: skip
        """From the columns `value` and `count`: the values of `base` first, then by falling count, ties by value.

        Of a base, what `gone` says by `recent` and `last` loses its row, or gets none.
        """
        known = counted["value"].clear() if base is None else base.values
        old = known.to_frame("value").join(counted, on="value", how="left", maintain_order="left")
        more = counted.join(known.to_frame("value"), on="value", how="anti")
        more = more.sort(["count", "value"], descending=[True, False])
        kept, few = more.filter(pl.col("count") >= limits.min_count), more.filter(pl.col("count") < limits.min_count)
        if gone is not None and base is not None:
            alive = gone.alive(pl.concat([old, kept]))
            stay, there = alive[: len(old)], alive[len(old) :]
            few = pl.concat([old.filter(~stay & old["count"].is_not_null()), kept.filter(~there), few])
            few = few.sort(["count", "value"], descending=[True, False])
            old = old.with_columns(pl.when(stay).then(pl.col(name)).alias(name) for name in old.columns)
            known, kept = old["value"], kept.filter(there)
        room = max(limits.max_rows - len(known), 0) if limits.max_rows else len(kept)
        rest = pl.concat([kept.slice(room), few])
        kept = kept.head(room)
        tail = np.zeros(limits.tail_buckets, dtype=np.int64)
        np.add.at(tail, buckets_of(rest["value"], limits.tail_buckets), rest["count"].to_numpy())
        counts = [tail, old["count"].fill_null(0).to_numpy(), kept["count"].to_numpy()]
        return cls(
            values=pl.concat([known, kept["value"]]).rename("value"),
            counts=np.concatenate([part.astype(np.int64) for part in counts]),
            tail_buckets=limits.tail_buckets,
            inherited=len(known),
            first_rows=0 if base is None else base.first_rows or base.rows,
            counted=pl.concat([old.drop_nulls("count"), kept, rest]),
        )

    @classmethod
    def hashed(cls, counted: pl.DataFrame, buckets: int, base: Vocabulary | None = None) -> Vocabulary:
        """Without a row of any value's own, from the columns `value` and `count`; counts of `base` are added."""
        counts = np.zeros(buckets, dtype=np.int64) if base is None else base.counts.copy()
        np.add.at(counts, buckets_of(counted["value"], buckets), counted["count"].to_numpy())
        return cls(values=counted["value"].clear(), counts=counts, tail_buckets=buckets, kind="hash")

    @classmethod
    def of(
        cls, counted: pl.DataFrame, limits: VocabularyLimits, base: Vocabulary | None = None, gone: Gone | None = None
    ) -> Vocabulary:  # fmt: skip
        """By the kind that `limits` ask for; the values of `base` keep their ids."""
        if limits.kind == "hash":
            return cls.hashed(counted, limits.buckets, base)
        return cls.rank(counted, limits, base, gone)

    @property
    def digest(self) -> str:
        """xxh3_128 of the values in order of id: what ids mean, counts aside."""
        return self.digest_of(len(self.values))

    def digest_of(self, first: int) -> str:
        """The digest of a vocabulary that has only the first so many values."""
        values = self.values[:first]
        found = xxhash.xxh3_128(str(values.dtype).encode())
        if values.null_count():
            found.update(np.packbits(values.is_null().to_numpy()).tobytes())
            values = values.drop_nulls()
        if values.dtype == pl.String:
            found.update(values.str.len_bytes().cast(pl.UInt64).to_numpy().tobytes())
            for begin in range(0, len(values), _PIECE):
                found.update("".join(values[begin : begin + _PIECE].to_list()).encode())
        else:
            found.update(values.to_numpy().tobytes())
        return found.hexdigest()

    def encode(self, values: pl.Series) -> NDArray[np.int32]:
        """``[N]`` ids; null becomes `MISSING`."""
        if values.dtype != self.values.dtype:
            values = values.cast(self.values.dtype)
        table = pl.DataFrame({"value": self.values, "id": np.arange(self.tail_buckets, self.rows, dtype=np.int32)})
        # One query: each costs Polars a third of a millisecond, and a small log has thousands of pieces of columns.
        joined = values.to_frame("value").lazy().join(table.lazy().drop_nulls(), "value", "left", maintain_order="left")
        known = pl.col("id").is_not_null() | pl.col("value").is_null()
        found = joined.select(pl.col("id").fill_null(MISSING), known=known).collect()
        ids = found["id"].to_numpy().copy()
        unknown = np.flatnonzero(~found["known"].to_numpy())
        if len(unknown):
            ids[unknown] = self.tail_ids(values[unknown])
        return ids.astype(np.int32, copy=False)

    def values_without(self, ids: NDArray[np.int64]) -> pl.Series:
        """Return the values with null at `ids`, which are not those of tail buckets. `values` does not change."""
        # Not Series.scatter: it writes into the series, which other threads may read.
        removed = np.zeros(len(self.values), dtype=np.bool_)
        removed[ids - self.tail_buckets] = True
        return self.values.set(pl.Series(removed), None)

    def tail_ids(self, values: pl.Series) -> NDArray[np.int64]:
        """``[N]`` ids of values that have no row of their own."""
        return buckets_of(values, self.tail_buckets)

    @property
    def ids(self) -> Ids:
        """What is to be said of it."""
        stored: StoredType = str(self.values.dtype)  # type: ignore[assignment]
        return Ids(
            kind=self.kind,
            type=stored,
            values=len(self.values),
            holes=self.values.null_count(),
            inherited=self.inherited,
            first_rows=self.first_rows or self.rows,
            tail_buckets=self.tail_buckets,
            digest=self.digest,
            tail=TailRule.tail_of(self.kind, stored, self.tail_buckets),
        )

    def frame(self) -> pl.DataFrame:
        """What is stored: value, id, count; tail buckets and holes have no value."""
        values = pl.concat([self.values.clear().extend_constant(None, self.tail_buckets), self.values])
        return pl.DataFrame({"value": values, "id": np.arange(self.rows, dtype=np.int32), "count": self.counts})


def read_vocabulary(file: str | Path | pa.BufferReader, expected: Ids, origin: str) -> Vocabulary:
    """The vocabulary in a Parquet file that may be anybody's.

    Raises
    ------
    DatasetError
        Where it is not what `Vocabulary.frame` gives, or of other values than `expected`; `origin` names the file.
    """
    with reading(Path(origin)):
        try:
            return _read_vocabulary(file, expected)
        except (MemoryError, pa.ArrowException, pl.exceptions.PanicException) as error:
            raise ValueError(f"it cannot be read: {error}") from error


def _read_vocabulary(file: str | Path | pa.BufferReader, expected: Ids) -> Vocabulary:
    rows = expected.values + expected.tail_buckets
    kind = _check_file(pq.ParquetFile(file), rows)
    # Texts stay behind their numbers until they are known to be distinct: repeats of a long one take a few bytes here.
    reader = pq.ParquetFile(file, read_dictionary=[] if pa.types.is_integer(kind) else ["value"])
    table = reader.read(use_threads=False)
    if table["id"].null_count or table["count"].null_count:
        raise ValueError("an id or a count is missing")
    for part in table["value"].chunks:
        if pa.types.is_dictionary(part.type) and len(part.dictionary) < len(part) - part.null_count:
            raise ValueError("its values are not distinct")
    values = pl.from_arrow(_plain(table["value"].slice(expected.tail_buckets)))
    assert isinstance(values, pl.Series)
    counts = table["count"].to_numpy()
    vocabulary = Vocabulary(
        values=values.rechunk(),
        counts=counts,
        tail_buckets=expected.tail_buckets,
        kind=expected.kind,
        inherited=expected.inherited,
        first_rows=expected.first_rows,
    )
    found = table["value"].slice(0, expected.tail_buckets).null_count, values.null_count()
    if found != (expected.tail_buckets, expected.holes):
        raise ValueError(
            f"expected {expected.tail_buckets} rows without a value, and {expected.holes} of {expected.values} behind"
        )
    if str(values.dtype) != expected.type:
        raise ValueError(f"its values are {values.dtype}, expected {expected.type}")
    if values.drop_nulls().n_unique() != len(values) - expected.holes:
        raise ValueError("its values are not distinct")
    if not np.array_equal(table["id"].to_numpy(), np.arange(rows)):
        raise ValueError("its ids do not count up from 0")
    ranked = counts[expected.tail_buckets + expected.inherited :]
    if counts.min(initial=0) < 0 or (np.diff(ranked) > 0).any():
        raise ValueError("its counts are negative, or rise behind the values of the base")
    if vocabulary.digest != expected.digest:
        raise ValueError("it has other values than its manifest says")
    return vocabulary


def _check_file(reader: pq.ParquetFile, rows: int) -> pa.DataType:
    """The columns, their types and how many rows there are, before any is read; gives the type of the values."""
    found = {field.name: field.type for field in reader.schema_arrow}
    names = [field.name for field in reader.schema_arrow]
    kind = found.get("value")
    kind = kind.value_type if kind is not None and pa.types.is_dictionary(kind) else kind
    if names != ["value", "id", "count"] or (found["id"], found["count"]) != (pa.int32(), pa.int64()):
        raise ValueError(f"its columns are {_named(found)}, expected value, id: int32 and count: int64")
    if kind not in _VALUE_TYPES:
        raise ValueError(f"its values are {kind}, expected text or integers of 64 bits")
    if reader.metadata.num_rows != rows:
        raise ValueError(f"it has {reader.metadata.num_rows} rows, expected {rows}")
    # Not by column: what is wrong with a column's metadata ends the process when pyarrow is asked for it.
    unfolded = sum(reader.metadata.row_group(place).total_byte_size for place in range(reader.metadata.num_row_groups))
    if unfolded > rows * _MOST_VALUE_BYTES + (1 << 20):
        raise ValueError(f"it unfolds to {unfolded:,} bytes, too much for {rows} rows")
    return kind


def _named(kinds: Mapping[str, pa.DataType]) -> str:
    text = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Dictionaries as what they stand for. Bytes that are no text would leave Polars with memory it must not have."""
    if pa.types.is_dictionary(column.type):
        text = not pa.types.is_integer(column.type.value_type)
        column = column.cast(pa.large_string() if text else column.type.value_type)
    column.validate(full=True)
    return column


def buckets_of(values: pl.Series, buckets: int) -> NDArray[np.int64]:
    """``[N]`` the bucket of each value."""
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    return (stable_hash(values) % np.uint64(buckets)).astype(np.int64)
