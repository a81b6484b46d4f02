"""Vocabularies: the id of each value, when a value gets or loses a row, and the counts that decide
this.

With kind ``count``, ids are assigned by descending count (ties by value); with kind ``hash``, by
the hash of a value. The first rows of a table are the tail buckets, which rare and unseen values
share. A missing value is an empty bag. A count is the number of lookups of a value in the training
split, including lookups in histories. *Held-out* values have the last ids: they are frequent enough
only if lookups of validation and test rows are counted, too. Only the second phase of a run
(`train.refit`), which trains on these rows, uses their ids; before it, they are rare values.

A vocabulary with a base begins with the values of an earlier data set, which keep their ids. New
values follow, ranked by count. An evicted value leaves a hole: its id is not used again until
`stratarec rebase` ranks all values. So only the ids of new values are in the order of counts.

A data set also stores the counts of values without a row, so that a data set based on it can give
them a row when they are frequent enough in all logs together. `count` includes the lookups of all
logs with equal weight, `recent` weights older lookups less, and `last` is the time of the last row
with the value. If a limit of memory requires that counts are dropped, a message says so.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
import xxhash
from numpy.typing import NDArray

from stratarec.data.durations import Duration, in_unit
from stratarec.data.hashing import stable_hash
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.io.atomic import reporting_damage
from stratarec.io.sealed import Hash, Model

# Ids have 31 bits. A table has a row for each bucket, and with kind `count` a number in memory,
# even if none uses it.
_RANGES = {
    "min_count": (1, 1 << 62), "tail_buckets": (1, 10**8), "max_rows": (0, 1 << 31), "candidates": (0, 1 << 40),
    "buckets": (1, 2 * 10**9),
}  # fmt: skip

VocabularyKind = Literal["count", "hash"]


@dataclass(frozen=True, kw_only=True)
class VocabularyOverride:
    """Limits of one vocabulary; null means that the common limit applies."""

    min_count: int | None = None
    """Minimum count of a value to get a row; rarer values share the tail buckets."""
    tail_buckets: int | None = None
    """Number of rows that rare and unseen values share."""
    max_rows: int | None = None
    """Maximum number of values with a row; 0 for no limit."""
    candidates: int | None = None
    """Maximum number of values without a row whose counts are kept."""
    kind: VocabularyKind | None = None
    """``count`` or ``hash``."""
    buckets: int | None = None
    """Number of rows for kind ``hash``."""

    def check_kind(self, where: str, kind: VocabularyKind) -> None:
        """Raise `ConfigError` for limits that vocabularies of `kind` do not use."""
        for name in (
            ("min_count", "tail_buckets", "max_rows", "candidates") if kind == "hash" else ("buckets",)
        ):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{where}.{name} is {getattr(self, name)}, which kind {kind} does not use; remove it"
                )


@dataclass(frozen=True, kw_only=True)
class VocabularyLimits:
    """Limits that decide which values get a row."""

    min_count: int = 2
    """Minimum count of a value to get a row; rarer values share the tail buckets."""
    tail_buckets: int = 16
    """Number of rows that rare and unseen values share, chosen by the hash of the value."""
    max_rows: int = 0
    """Maximum number of values with a row, the most frequent ones; 0 for no limit."""
    candidates: int = 10_000_000
    """Maximum number of values without a row whose counts are kept, because a data set based on
    this one may give them a row. Counts of the rarest values are dropped."""
    kind: VocabularyKind = "count"
    """``count`` gives each frequent value a row. ``hash`` assigns every value to one of `buckets`
    rows by its hash, so that memory does not grow with the number of values."""
    buckets: int = 1 << 18
    """Number of rows for kind ``hash``. The model cannot distinguish values that share a row."""

    def __post_init__(self) -> None:
        _check_limits(self, "data.vocabulary")


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """Rule by which values lose their rows in a data set with a base.

    An evicted value is looked up in the tail buckets, and its row is not used again. A value that
    returns gets a new row.
    """

    idle: Duration = ""
    """Evict values whose last row in the logs is older than this, such as ``3d``; histories and
    lists do not count.
    """
    keep: int = 0
    """Keep this many values, ranked by lookups weighted by `half_life`, and evict the others; 0 for
    no limit.
    """

    def __post_init__(self) -> None:
        if not self.idle and not self.keep:
            raise ConfigError(
                "data.vocabulary.evict has no rule: set idle, such as 3d, or keep, a number of values"
            )
        if self.keep < 0:
            raise ConfigError(f"data.vocabulary.evict: keep is {self.keep}, expected at least 1")
        if self.idle:
            in_unit(self.idle, "s", "data.vocabulary.evict: idle")


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig(VocabularyLimits):
    """Limits for all vocabularies, and overrides for some."""

    overrides: Mapping[str, VocabularyOverride] = field(default_factory=dict)
    """Vocabulary name -> limits that replace the common limits."""
    evict: Mapping[str, Eviction] = field(default_factory=dict)
    """Vocabulary name -> eviction rule; other vocabularies evict no values."""
    half_life: Duration = "7d"
    """Age at which the weight of a lookup is one half, when values are ranked by recent lookups:
    for ``evict.*.keep`` and by `stratarec rebase`."""
    base: str = ""
    """Directory of an earlier data set with the same features. Its values keep their ids, new
    values follow, and numbers are standardized by its moments, so that `train --from` can continue
    a run on this data set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        in_unit(self.half_life, "s", "data.vocabulary.half_life")
        for name, override in self.overrides.items():
            where = f"data.vocabulary.overrides.{name}"
            _check_limits(override, where)
            override.check_kind(where, override.kind or self.kind)

    def limits(self, name: str) -> VocabularyLimits:
        """Return the limits of the vocabulary `name`."""
        common = {entry.name: getattr(self, entry.name) for entry in fields(VocabularyLimits)}
        override = self.overrides.get(name, VocabularyOverride())
        return VocabularyLimits(
            **{**common, **{k: v for k, v in asdict(override).items() if v is not None}}
        )

    def check(self, schema: Schema) -> None:
        """Raise `ConfigError` for limits of vocabularies that do not exist, and for evictions that
        cannot work.
        """
        names = schema.vocabularies()
        users = {feature.name: feature.vocabulary for feature in schema.sparse}
        for part, name in (
            *(("overrides", name) for name in self.overrides),
            *(("evict", name) for name in self.evict),
        ):
            if name in names:
                continue
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names) or 'none'}"
            hint = f"the feature of that name uses {users[name]}" if name in users else hint
            raise ConfigError(f"data.vocabulary.{part}.{name}: no such vocabulary; {hint}")
        for name, rule in self.evict.items():
            if self.limits(name).kind == "hash":
                raise ConfigError(
                    f"data.vocabulary.evict.{name}: the vocabulary is of kind hash, "
                    "expected kind count; remove it"
                )
            if rule.idle and not schema.time:
                raise ConfigError(
                    f"data.vocabulary.evict.{name}.idle is {rule.idle!r}, and "
                    "schema.time is not set: set it"
                )


def _check_limits(limits: VocabularyLimits | VocabularyOverride, where: str) -> None:
    for name, (least, most) in _RANGES.items():
        value = getattr(limits, name)
        if value is not None and value < least:
            raise ConfigError(f"{where}.{name} is {value}, expected at least {least}")
        if value is not None and value > most:
            raise ConfigError(f"{where}.{name} is {value}, expected at most {most}")


MISSING = -1
# Number of values that are hashed at a time.
_PIECE = 1 << 16
# Maximum average size of a value in a file that is read; values from logs are smaller.
_MOST_VALUE_BYTES = 1 << 16
_VALUE_TYPES = (pa.string(), pa.large_string(), pa.string_view(), pa.int64(), pa.uint64())
# Maximum number of characters for a list of columns in an error message.
_LONGEST = 200
# Ids are int32.
Rows = Annotated[int, pydantic.Field(ge=0, le=1 << 31)]
StoredType = Literal["String", "Int64", "UInt64"]


class Ids(Model):
    """Description of a vocabulary in a manifest. A value that is not in its file has the id
    `stable_hash` modulo `tail_buckets`.
    """

    kind: VocabularyKind
    """``count``: the file lists the id of each value. ``hash``: every value has a tail bucket."""
    type: StoredType
    """Type of the values. Values of other types are cast to it before they are looked up."""
    values: Rows
    holes: Rows
    """Number of values that were evicted or forgotten; they are null in the file."""
    inherited: Rows
    """Number of values inherited from the base. They come first and keep their ids; the others are
    ranked by count.
    """
    first_rows: Rows
    """Number of rows in the very first data set, before any that name it as `base`. The bound of
    all initial weights is computed from this number, unless the recipe sets it."""
    tail_buckets: Annotated[Rows, pydantic.Field(ge=1)]
    """Number of first rows, which all values without a row share. With kind ``hash``, the table has
    no other rows.
    """
    digest: Hash
    """xxh3_128 of the values in order of id, and of the positions of holes."""
    held_out: Annotated[Rows, pydantic.Field(exclude_if=operator.not_)] = 0
    """Number of held-out values, which are the last ones."""
    trained_digest: Annotated[Hash | None, pydantic.Field(exclude_if=operator.not_)] = None
    """`digest` of the values before the held-out ones; None if there are no held-out values."""

    @pydantic.model_validator(mode="after")
    def _check_ids(self) -> Ids:
        if max(self.inherited, self.holes) > self.values or (self.kind == "hash" and self.values):
            raise ValueError(
                f"kind {self.kind}: {self.values} values, {self.inherited} inherited, {self.holes} holes"
            )
        if self.tail_buckets > self.first_rows:
            raise ValueError(
                f"tail_buckets is {self.tail_buckets}, expected at most first_rows, {self.first_rows}"
            )
        if self.held_out > self.values - self.inherited or bool(self.held_out) != (
            self.trained_digest is not None
        ):
            raise ValueError(
                f"{self.held_out} held-out values of {self.values}, digest {self.trained_digest}"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class EvictionFilter:
    """An `Eviction` rule, applied at the end of a log."""

    before: int | None = None
    """Evict values that were last seen before this time; None for no limit."""
    keep: int = 0
    """Keep this many values with the largest `recent` counts, and evict the others; 0 for no
    limit.
    """

    def alive(self, values: pl.DataFrame) -> pl.Series:
        """Return ``[N]`` flags: whether each value may have a row, judged by its `recent` and
        `last`.
        """
        alive = values["count"].is_not_null()
        if self.before is not None:
            alive &= (values["last"] >= self.before).fill_null(False)
        if self.keep:
            order = (
                values.with_row_index("place")
                .filter(alive)
                .sort(["recent", "value"], descending=[True, False])
            )
            alive &= pl.Series(np.isin(np.arange(len(values)), order["place"].head(self.keep).to_numpy()))
        return alive


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The values with a row, in order of id, and their training counts."""

    values: pl.Series
    """``[V]`` String, Int64 or UInt64; null for an evicted value. The id of the first value is
    `tail_buckets`.
    """
    counts: NDArray[np.int64]
    """``[tail_buckets + V]`` number of lookups of each row in the training splits of all logs so
    far. For values that are not in the base, the order is descending. With `counted_ids`, the
    counts of these rows."""
    tail_buckets: int
    kind: VocabularyKind = "count"
    inherited: int = 0
    """Number of values inherited from the base; they come first."""
    first_rows: int = 0
    """Number of rows in the very first data set, before any that names a base; 0 without a base."""
    held_out: int = 0
    """Number of held-out values, which are the last ones."""
    counted: pl.DataFrame | None = None
    """Counts of all values: first the values with a row, then the others by descending count. None
    if not loaded.
    """
    counted_ids: NDArray[np.int32] | None = None
    """Kind ``hash``: the ascending ids of rows with lookups, so that rows without lookups cost
    nothing. Otherwise None, and `counts` has all rows."""

    @property
    def rows(self) -> int:
        """Number of rows of the table."""
        return len(self.values) + self.tail_buckets

    @classmethod
    def rank(
        cls,
        counted: pl.DataFrame,
        limits: VocabularyLimits,
        base: Vocabulary | None = None,
        eviction: EvictionFilter | None = None,
    ) -> Vocabulary:
        """Build a vocabulary: values of `base` first, then the others by descending count, with
        ties by value.

        Parameters
        ----------
        counted : DataFrame
            Columns `value`, `count`, `held_out` (the count in validation and test rows), `recent`
            and `last`.
        limits : VocabularyLimits
            Minimum counts and maximum numbers of rows.
        base : Vocabulary, optional
            Earlier vocabulary, whose values keep their ids.
        eviction : EvictionFilter, optional
            Decides which values of a vocabulary with a base lose their row or do not get one.
        """
        if base is None:
            inherited, new = counted.clear(), counted
        else:
            values = base.values.to_frame("value")
            inherited = values.join(counted, on="value", how="left", maintain_order="left")
            new = counted.join(values, on="value", how="anti")
        new = _by_count(new)
        frequent = new["count"] >= limits.min_count
        enough = ~frequent & (new["count"] + new["held_out"] >= limits.min_count)
        admitted, held_out, rare = new.filter(frequent), new.filter(enough), new.filter(~frequent & ~enough)
        if eviction is not None and base is not None:
            alive = eviction.alive(pl.concat([inherited, admitted]))
            stay, get_row = alive[: len(inherited)], alive[len(inherited) :]
            evicted = inherited.filter(~stay & inherited["count"].is_not_null())
            rare = pl.concat([evicted, admitted.filter(~get_row), held_out, rare])
            held_out = held_out.clear()
            inherited = inherited.with_columns(
                pl.when(stay).then(pl.col(name)).alias(name) for name in counted.columns
            )
            admitted = admitted.filter(get_row)
        room = max(limits.max_rows - len(inherited), 0) if limits.max_rows else len(new)
        rows = pl.concat(
            [admitted, held_out.sort("count", "held_out", "value", descending=[True, True, False])]
        )
        admitted, held_out = admitted.head(room), rows[len(admitted) : room]
        refused = _by_count(pl.concat([rows.slice(room), rare]))
        tail = np.zeros(limits.tail_buckets, dtype=np.int64)
        np.add.at(tail, buckets_of(refused["value"], limits.tail_buckets), refused["count"].to_numpy())
        counts = [tail, inherited["count"].fill_null(0).to_numpy(), admitted["count"], held_out["count"]]
        return cls(
            values=pl.concat([inherited["value"], admitted["value"], held_out["value"]]).rename("value"),
            counts=np.concatenate([np.asarray(part, dtype=np.int64) for part in counts]),
            tail_buckets=limits.tail_buckets,
            inherited=len(inherited),
            first_rows=0 if base is None else base.first_rows or base.rows,
            held_out=len(held_out),
            counted=pl.concat([inherited, admitted, held_out, refused])
            .filter(pl.col("count") > 0)
            .drop("held_out"),
        )

    @classmethod
    def hashed(
        cls, counted: pl.DataFrame, kind: pl.DataType, buckets: int, base: Vocabulary | None = None
    ) -> Vocabulary:
        """Return a vocabulary of kind ``hash``.

        Parameters
        ----------
        counted : DataFrame
            Columns `value` (a bucket number) and `count`.
        kind : DataType
            Type of the values that are hashed.
        buckets : int
            Number of hash buckets, which are the rows.
        base : Vocabulary, optional
            Earlier vocabulary, whose counts are added.
        """
        parts = [counted.select(pl.col("value").cast(pl.Int32), pl.col("count").cast(pl.Int64))]
        if base is not None:
            parts.append(pl.DataFrame({"value": base.counted_ids, "count": base.counts}))
        total = pl.concat(parts).group_by("value").agg(pl.col("count").sum()).sort("value")
        return cls(
            values=pl.Series("value", dtype=kind),
            counts=total["count"].to_numpy(),
            tail_buckets=buckets,
            kind="hash",
            counted_ids=total["value"].to_numpy(),
        )

    @property
    def digest(self) -> str:
        """xxh3_128 hash of the values in order of id, without counts."""
        return self.digest_of(len(self.values))

    def digest_of(self, first: int) -> str:
        """Return the digest of only the first `first` values."""
        values = self.values[:first]
        hasher = xxhash.xxh3_128(str(values.dtype).encode())
        if values.null_count():
            hasher.update(np.packbits(values.is_null().to_numpy()).tobytes())
            values = values.drop_nulls()
        if values.dtype == pl.String:
            hasher.update(values.str.len_bytes().cast(pl.UInt64).to_numpy().tobytes())
            for begin in range(0, len(values), _PIECE):
                hasher.update("".join(values[begin : begin + _PIECE].to_list()).encode())
        else:
            hasher.update(values.to_numpy().tobytes())
        return hasher.hexdigest()

    def without_held_out(self) -> Vocabulary:
        """Return the vocabulary in which the held-out values are rare values."""
        if not self.held_out:
            return self
        counts = lower_counts(self.counts, self.tail_ids(self.values.tail(self.held_out)))
        return replace(self, values=self.values.head(-self.held_out), counts=counts, held_out=0)

    def with_held_out(self, values: pl.Series) -> Vocabulary:
        """Return the vocabulary with held-out values, whose lookups are counted in their tail
        buckets.
        """
        counts = np.concatenate([self.counts, np.zeros(len(values), dtype=np.int64)])
        return replace(self, values=pl.concat([self.values, values]), counts=counts, held_out=len(values))

    def encode(self, values: pl.Series) -> NDArray[np.int32]:
        """Return the ``[N]`` ids of values; null becomes `MISSING`."""
        if values.dtype != self.values.dtype:
            values = values.cast(self.values.dtype)
        table = pl.DataFrame(
            {"value": self.values, "id": np.arange(self.tail_buckets, self.rows, dtype=np.int32)}
        )
        # One query, because each takes Polars a third of a millisecond, and a small log has
        # thousands of columns.
        joined = (
            values.to_frame("value")
            .lazy()
            .join(table.lazy().drop_nulls(), "value", "left", maintain_order="left")
        )
        is_known = pl.col("id").is_not_null() | pl.col("value").is_null()
        selected = joined.select(pl.col("id").fill_null(MISSING), known=is_known)
        # On several threads, the streaming engine takes twice the processor time for integers.
        rows = selected.collect(engine="in-memory")
        ids = rows["id"].to_numpy().copy()
        unknown = np.flatnonzero(~rows["known"].to_numpy())
        if len(unknown):
            ids[unknown] = self.tail_ids(values[unknown])
        return ids.astype(np.int32, copy=False)

    def values_without(self, ids: NDArray[np.int64]) -> pl.Series:
        """Return a copy of `values` with null at `ids`, which must not be ids of tail buckets."""
        # Series.scatter would write into the series, which other threads may read.
        removed = np.zeros(len(self.values), dtype=np.bool_)
        removed[ids - self.tail_buckets] = True
        return self.values.set(pl.Series(removed), None)

    def tail_ids(self, values: pl.Series) -> NDArray[np.int64]:
        """Return the ``[N]`` tail buckets that values have as ids if they have no row."""
        return buckets_of(values, self.tail_buckets)

    @property
    def ids(self) -> Ids:
        """Description of this vocabulary for a manifest."""
        stored: StoredType = str(self.values.dtype)  # type: ignore[assignment]
        return Ids(
            kind=self.kind,
            type=stored,
            values=len(self.values),
            holes=self.values.null_count(),
            inherited=self.inherited,
            first_rows=self.first_rows or self.rows - self.held_out,
            tail_buckets=self.tail_buckets,
            digest=self.digest,
            held_out=self.held_out,
            trained_digest=self.digest_of(len(self.values) - self.held_out) if self.held_out else None,
        )

    def frame(self) -> pl.DataFrame:
        """Return the columns value, id and count that are stored; the value of tail buckets and
        holes is null.

        Rows of kind ``hash`` without lookups are left out.
        """
        ids = np.arange(self.rows, dtype=np.int32) if self.counted_ids is None else self.counted_ids
        values = pl.concat(
            [self.values.clear().extend_constant(None, len(ids) - len(self.values)), self.values]
        )
        return pl.DataFrame({"value": values, "id": ids, "count": self.counts})


def read_vocabulary(file: str | Path | pa.BufferReader, expected: Ids, origin: str) -> Vocabulary:
    """Read and check the vocabulary in a Parquet file from any source.

    Raises
    ------
    DatasetError
        If the columns are not those of `Vocabulary.frame`, or the values differ from `expected`.
        The message names `origin`.
    """
    with reporting_damage(Path(origin)):
        try:
            return _read_vocabulary(file, expected)
        except (MemoryError, pa.ArrowException, pl.exceptions.PanicException) as error:
            raise ValueError(f"it cannot be read: {error}") from error


def _read_vocabulary(file: str | Path | pa.BufferReader, expected: Ids) -> Vocabulary:
    kind = _check_file(pq.ParquetFile(file), expected)
    # Texts stay dictionary-encoded until they are known to be distinct, because a repeated long
    # text takes only a few bytes in the file.
    reader = pq.ParquetFile(file, read_dictionary=[] if pa.types.is_integer(kind) else ["value"])
    table = reader.read(use_threads=False)
    if table["id"].null_count or table["count"].null_count:
        raise ValueError("an id or a count is missing")
    for part in table["value"].chunks:
        if pa.types.is_dictionary(part.type) and len(part.dictionary) < len(part) - part.null_count:
            raise ValueError("its values are not distinct")
    tail, ids = len(table) - expected.values, table["id"].to_numpy()
    values = pl.from_arrow(_plain(table["value"].slice(tail)))
    assert isinstance(values, pl.Series)
    counts = table["count"].to_numpy()
    vocabulary = Vocabulary(
        values=values.rechunk(),
        counts=counts,
        tail_buckets=expected.tail_buckets,
        kind=expected.kind,
        inherited=expected.inherited,
        first_rows=expected.first_rows,
        held_out=expected.held_out,
        counted_ids=ids if expected.kind == "hash" else None,
    )
    if (table["value"].slice(0, tail).null_count, values.null_count()) != (tail, expected.holes):
        raise ValueError(
            f"expected {tail} tail rows without a value, and {expected.holes} rows without one "
            f"among {expected.values} values"
        )
    if str(values.dtype) != expected.type:
        raise ValueError(f"its values are {values.dtype}, expected {expected.type}")
    if values.drop_nulls().n_unique() != len(values) - expected.holes:
        raise ValueError("its values are not distinct")
    if not _are_ids(ids, expected):
        raise ValueError("its ids do not count up from 0")
    ranked = counts[tail + expected.inherited :]
    if counts.min(initial=0) < 0 or (np.diff(ranked) > 0).any():
        raise ValueError("its counts are negative, or not descending after the values of the base")
    ids = vocabulary.ids
    if (ids.digest, ids.trained_digest) != (expected.digest, expected.trained_digest):
        raise ValueError("its values differ from those in its manifest")
    return vocabulary


def _are_ids(ids: NDArray[np.int32], expected: Ids) -> bool:
    if expected.kind == "count":
        return np.array_equal(ids, np.arange(expected.values + expected.tail_buckets))
    return bool((np.diff(ids, prepend=-1, append=expected.tail_buckets) > 0).all())


def _check_file(reader: pq.ParquetFile, expected: Ids) -> pa.DataType:
    """Check columns, types and number of rows before values are read; return the type of the
    values.
    """
    rows, stored = expected.values + expected.tail_buckets, reader.metadata.num_rows
    types = {field.name: field.type for field in reader.schema_arrow}
    names = [field.name for field in reader.schema_arrow]
    kind = types.get("value")
    kind = kind.value_type if kind is not None and pa.types.is_dictionary(kind) else kind
    if names != ["value", "id", "count"] or (types["id"], types["count"]) != (pa.int32(), pa.int64()):
        raise ValueError(f"its columns are {_named(types)}, expected value, id: int32 and count: int64")
    if kind not in _VALUE_TYPES:
        raise ValueError(f"its values are {kind}, expected text or integers of 64 bits")
    if stored > rows or (expected.kind == "count" and stored < rows):
        raise ValueError(f"it has {stored} rows, expected {rows}")
    # The metadata of columns is not read: pyarrow ends the process if it is damaged.
    unfolded = sum(
        reader.metadata.row_group(place).total_byte_size for place in range(reader.metadata.num_row_groups)
    )
    if unfolded > rows * _MOST_VALUE_BYTES + (1 << 20):
        raise ValueError(f"it decompresses to {unfolded:,} bytes, too much for {rows} rows")
    return kind


def _named(kinds: Mapping[str, pa.DataType]) -> str:
    text = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Decode dictionaries, and check that text is valid UTF-8, because Polars does not check it."""
    if pa.types.is_dictionary(column.type):
        text = not pa.types.is_integer(column.type.value_type)
        column = column.cast(pa.large_string() if text else column.type.value_type)
    column.validate(full=True)
    return column


def _by_count(counted: pl.DataFrame) -> pl.DataFrame:
    return counted.sort(["count", "value"], descending=[True, False])


def buckets_of(values: pl.Series, buckets: int) -> NDArray[np.int64]:
    """Return the ``[N]`` bucket of each value."""
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    return (stable_hash(values) % np.uint64(buckets)).astype(np.int64)


def lower_counts(counts: NDArray[np.int64], buckets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the counts of all rows but the last ones, whose counts are added to the tail
    `buckets`.
    """
    first = len(counts) - len(buckets)
    result = counts[:first].copy()
    np.add.at(result, buckets, counts[first:])
    return result


def read_held_out(path: Path, expected: Ids) -> pl.Series:
    """Read only the held-out values of a vocabulary, whose file was verified."""
    with reporting_damage(path):
        reader, groups, rows = pq.ParquetFile(path), list[int](), 0
        _check_file(reader, expected)
        while rows < expected.held_out:
            groups.insert(0, reader.num_row_groups - 1 - len(groups))
            rows += reader.metadata.row_group(groups[0]).num_rows
        column = reader.read_row_groups(groups, columns=["value"], use_threads=False)["value"]
        values = pl.from_arrow(_plain(column.slice(rows - expected.held_out)))
        assert isinstance(values, pl.Series)
        return values.rename("value")


def add_counts(earlier: pl.DataFrame, later: pl.DataFrame) -> pl.DataFrame:
    """Add the counts of equal values, and keep the later `last`."""
    counts = pl.concat([earlier, later.cast({"count": pl.Int64})], how="diagonal").lazy().group_by("value")
    return counts.agg(pl.exclude("value", "last").sum(), pl.col("last").max()).collect()


def read_counts(path: Path, expected: StoredType) -> pl.DataFrame:
    """Read and check the columns `value`, `count`, `recent` and `last` of a Parquet file from any
    source.
    """
    with reporting_damage(path):
        kinds = {name: str(kind) for name, kind in zip(*_columns(path), strict=True)}
        value = {"String": "large_string"}.get(expected, expected.lower())
        if kinds != {"value": value, "count": "int64", "recent": "double", "last": "int64"}:
            raise ValueError(f"its columns are {kinds}, expected value: {expected}, count, recent and last")
        table = pq.read_table(path, use_threads=False)
        for column in table.columns:
            column.validate(full=True)
        counts = pl.from_arrow(table)
        assert isinstance(counts, pl.DataFrame)
        if counts.drop("last").null_count().sum_horizontal().item() or (counts["count"] < 1).any():
            raise ValueError("a value is missing, or a count is below 1")
        if not (counts["recent"].is_finite() & (counts["recent"] >= 0)).all():
            raise ValueError("a recent count is not a number, or below 0")
        if counts["value"].n_unique() != len(counts):
            raise ValueError("its values are not distinct")
    return counts


def _columns(path: Path) -> tuple[list[str], list[object]]:
    schema = pq.ParquetFile(path).schema_arrow
    return list(schema.names), list(schema.types)
