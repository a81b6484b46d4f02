"""Vocabularies: which id each value has, when it gets a row or loses it, and the counts behind that.

Ids follow frequency, the most frequent value first, or the value's hash alone (kind ``hash``). Rare and unseen values
share the tail buckets, which are the first rows, so that no row moves when there are more values. A missing value is an
empty bag. Counts are lookups of the training split, those by histories included; ties are broken by value.

A vocabulary with a base begins with the values of an earlier data set, whose ids they keep; new values follow by
frequency. An evicted value leaves a hole: its id is not used again until `stratarec rebase` ranks all values. So only
ids after the base's are ranked, and counts of base values may rise.

A data set also stores the counts of values without a row, so that a data set based on it can give them one when they
are frequent enough in all logs together. `count` is over all logs, `recent` weights older lookups less, and `last` is
the time of the last row with the value. Counts dropped by a memory limit are reported.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
import xxhash
from numpy.typing import NDArray

from stratarec.data.durations import in_unit
from stratarec.data.hashing import HashRule, stable_hash
from stratarec.data.schema import Schema
from stratarec.errors import ConfigError
from stratarec.io.atomic import reporting_damage
from stratarec.io.sealed import Hash, Model

# Ids have 31 bits, and a table has a row for each bucket whether or not a value falls into it.
_RANGES = {
    "min_count": (1, 1 << 62), "tail_buckets": (1, 10**8), "max_rows": (0, 1 << 31), "candidates": (0, 1 << 40),
    "buckets": (1, 10**8),
}  # fmt: skip

VocabularyKind = Literal["count", "hash"]


@dataclass(frozen=True, kw_only=True)
class VocabularyOverride:
    """Limits of one vocabulary; null leaves the one that holds for all."""

    min_count: int | None = None
    """Rarer values share the tail buckets."""
    tail_buckets: int | None = None
    """Rows shared by rare and unseen values."""
    max_rows: int | None = None
    """Keep at most this many values; 0 for no limit."""
    candidates: int | None = None
    """Values without a row whose counts are kept."""
    kind: VocabularyKind | None = None
    """``count`` or ``hash``."""
    buckets: int | None = None
    """Rows of a ``hash``."""

    def check_kind(self, where: str, kind: VocabularyKind) -> None:
        """Refuse what vocabularies of `kind` make no use of."""
        for name in ("min_count", "tail_buckets", "max_rows", "candidates") if kind == "hash" else ("buckets",):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{where}.{name} is {getattr(self, name)}, which kind {kind} makes no use of; remove it"
                )


@dataclass(frozen=True, kw_only=True)
class VocabularyLimits:
    """Which values get a row of their own."""

    min_count: int = 2
    """Rarer values share the tail buckets."""
    tail_buckets: int = 16
    """Rows shared by rare and unseen values, by a hash of the value."""
    max_rows: int = 0
    """Keep at most this many values; 0 for no limit."""
    candidates: int = 10_000_000
    """Keep the counts of at most this many values that have no row, for a data set that goes on from this one and may
    give them one; the rarest are forgotten."""
    kind: VocabularyKind = "count"
    """``count`` gives frequent values rows of their own; ``hash`` gives every value one of `buckets` rows by its hash
    alone, so that memory does not grow with the values and new ones are like old ones."""
    buckets: int = 1 << 18
    """Rows of a ``hash``: values that share one cannot be told apart."""

    def __post_init__(self) -> None:
        _check_limits(self, "data.vocabulary")


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """When a value loses its row, in a data set that goes on from another; only as its first log ranks them, all stay.

    What is evicted is looked up as rare values are, and its row is not used again. A value that comes back gets a new
    one.
    """

    idle: str = ""
    """Such as ``3d``: where no row of the logs had it for so long, histories and lists aside."""
    keep: int = 0
    """All but so many values, by `half_life` counted; 0 for no limit."""

    def __post_init__(self) -> None:
        if not self.idle and not self.keep:
            raise ConfigError("data.vocabulary.evict: set idle, such as 3d, or keep, a number of values")
        if self.keep < 0:
            raise ConfigError(f"data.vocabulary.evict: keep is {self.keep}, expected at least 1")
        if self.idle:
            in_unit(self.idle, "s", "data.vocabulary.evict: idle")


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig(VocabularyLimits):
    """Limits for all vocabularies, and others for some."""

    overrides: Mapping[str, VocabularyOverride] = field(default_factory=dict)
    """Vocabulary name -> what is different for it."""
    evict: Mapping[str, Eviction] = field(default_factory=dict)
    """Vocabulary name -> when values lose their rows; none by default."""
    half_life: str = "7d"
    """By so much of the log's time ago a lookup counts half where values are ranked by what they are worth now: by
    ``keep``, and by `stratarec rebase`."""
    base: str = ""
    """An earlier data set of the same features: its values keep their ids, whatever their counts are now, new ones
    follow, and numbers are standardised by its moments. So `train --from` goes on with a run on it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        in_unit(self.half_life, "s", "data.vocabulary.half_life")
        for name, override in self.overrides.items():
            where = f"data.vocabulary.overrides.{name}"
            _check_limits(override, where)
            override.check_kind(where, override.kind or self.kind)

    def limits(self, name: str) -> VocabularyLimits:
        """What holds for the vocabulary `name`."""
        common = {entry.name: getattr(self, entry.name) for entry in fields(VocabularyLimits)}
        override = self.overrides.get(name, VocabularyOverride())
        return VocabularyLimits(**{**common, **{k: v for k, v in asdict(override).items() if v is not None}})

    def check(self, schema: Schema) -> None:
        """Refuse what is said of vocabularies that do not exist, and evictions that cannot be."""
        known = schema.vocabularies()
        users = {feature.name: feature.vocabulary for feature in schema.sparse}
        for part, name in (
            *(("overrides", name) for name in self.overrides),
            *(("evict", name) for name in self.evict),
        ):
            if name in known:
                continue
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known) or 'none'}"
            hint = f"the feature of that name uses {users[name]}" if name in users else hint
            raise ConfigError(f"data.vocabulary.{part}.{name}: no such vocabulary; {hint}")
        for name, rule in self.evict.items():
            if self.limits(name).kind == "hash":
                raise ConfigError(
                    f"data.vocabulary.evict.{name}: values of kind hash have no rows of their own; remove it"
                )
            if rule.idle and not schema.time:
                raise ConfigError(
                    f"data.vocabulary.evict.{name}.idle is {rule.idle!r}, and schema.time is not set: set it"
                )


def _check_limits(limits: VocabularyLimits | VocabularyOverride, where: str) -> None:
    for name, (least, most) in _RANGES.items():
        value = getattr(limits, name)
        if value is not None and value < least:
            raise ConfigError(f"{where}.{name} is {value}, expected at least {least}")
        if value is not None and value > most:
            raise ConfigError(f"{where}.{name} is {value}, expected at most {most}")


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
class EvictionFilter:
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
        cls,
        counted: pl.DataFrame,
        limits: VocabularyLimits,
        base: Vocabulary | None = None,
        eviction: EvictionFilter | None = None,
    ) -> Vocabulary:
        """From the columns `value` and `count`: the values of `base` first, then by falling count, ties by value.

        Of a base, what `eviction` says by `recent` and `last` loses its row, or gets none.
        """
        known = counted["value"].clear() if base is None else base.values
        old = known.to_frame("value").join(counted, on="value", how="left", maintain_order="left")
        more = counted.join(known.to_frame("value"), on="value", how="anti")
        more = more.sort(["count", "value"], descending=[True, False])
        kept, few = more.filter(pl.col("count") >= limits.min_count), more.filter(pl.col("count") < limits.min_count)
        if eviction is not None and base is not None:
            alive = eviction.alive(pl.concat([old, kept]))
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
        cls,
        counted: pl.DataFrame,
        limits: VocabularyLimits,
        base: Vocabulary | None = None,
        eviction: EvictionFilter | None = None,
    ) -> Vocabulary:
        """By the kind that `limits` ask for; the values of `base` keep their ids."""
        if limits.kind == "hash":
            return cls.hashed(counted, limits.buckets, base)
        return cls.rank(counted, limits, base, eviction)

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
    with reporting_damage(Path(origin)):
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


_BUCKET = "@bucket"


def merge_counts(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Columns `value` and `count`, and `recent` and `last` where there are, of all parts, a value once, in ascending
    order.

    Values of unlike types (text and numbers, numbers with a sign and without, which no integer type holds) become text.
    """
    kinds = {part["value"].dtype for part in parts}
    common = kinds.pop() if len(kinds) == 1 else pl.String()
    alike = [part.lazy().with_columns(pl.col("value").cast(common), pl.col("count").cast(pl.Int64)) for part in parts]
    sums = [pl.col(name).max() if name == "last" else pl.col(name).sum() for name in parts[0].columns[1:]]
    return pl.concat(alike).group_by("value").agg(sums).sort("value").collect()


def bounded(counted: pl.DataFrame, limits: VocabularyLimits) -> pl.DataFrame:
    """Reduce counts to what a vocabulary of `limits` needs: for kind ``hash`` one value a bucket, with the sum of the
    counts of its values."""
    if limits.kind == "count":
        return counted
    last = [pl.col("last").max()] if "last" in counted.columns else []
    bucket = pl.Series(_BUCKET, buckets_of(counted["value"], limits.buckets))
    found = counted.with_columns(bucket).group_by(_BUCKET).agg(pl.col("value").min(), pl.col("count").sum(), *last)
    return found.drop(_BUCKET).sort("value")


def read_counts(path: Path, expected: StoredType) -> pl.DataFrame:
    """Columns `value`, `count`, `recent` and `last` in a Parquet file that may be anybody's; `DatasetError` where it is
    another one."""
    with reporting_damage(path):
        kinds = {name: str(kind) for name, kind in zip(*_columns(path), strict=True)}
        value = {"String": "large_string"}.get(expected, expected.lower())
        if kinds != {"value": value, "count": "int64", "recent": "double", "last": "int64"}:
            raise ValueError(f"its columns are {kinds}, expected value: {expected}, count, recent and last")
        table = pq.read_table(path, use_threads=False)
        for column in table.columns:
            column.validate(full=True)
        found = pl.from_arrow(table)
        assert isinstance(found, pl.DataFrame)
        if found.drop("last").null_count().sum_horizontal().item() or (found["count"] < 1).any():
            raise ValueError("a value is missing, or a count is below 1")
        if not (found["recent"].is_finite() & (found["recent"] >= 0)).all():
            raise ValueError("a recent count is no number, or below 0")
        if found["value"].n_unique() != len(found):
            raise ValueError("its values are not distinct")
    return found


def _columns(path: Path) -> tuple[list[str], list[object]]:
    schema = pq.ParquetFile(path).schema_arrow
    return list(schema.names), list(schema.types)
