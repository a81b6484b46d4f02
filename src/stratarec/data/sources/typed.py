"""Raw columns -> the types that a `Source` promises, with the file and row of what does not fit.

Lists that belong together (a sequence and what is beside it, values and their weights) must be as long as each other;
an event that lacks a value in one of them is left out of all, before they are cut to their length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.column_names import column, weights_of
from stratarec.data.schema import UNKNOWN, LabelRule, Schema, SparseFeature, TimeUnit, ValueType
from stratarec.data.sources.blocks import BadRows
from stratarec.data.sources.parse import (
    complete,
    from_floats,
    from_text,
    lists_from_text,
    map_values,
    read_times,
)
from stratarec.errors import DataError

# Float32 holds a little more.
_MOST = 3.0e38
_TEXT = (pl.String, pl.Categorical, pl.Enum)
_INTEGER = ", without leading zeros, as its type is integer; type text keeps them"


class Converter:
    """The rows of one frame.

    Parameters
    ----------
    path : str
        File that they are of, for messages.
    numbers : ndarray
        ``[N]`` number of each row in it, or line.
    bad : BadRows
        Told of rows that cannot be used.
    """

    _unit = "row"
    """What numbers count."""

    def __init__(self, path: str, numbers: NDArray[np.int64], bad: BadRows) -> None:
        self._path, self._numbers, self._bad = path, numbers, bad
        self._good = np.ones(len(numbers), dtype=bool)

    @property
    def rows(self) -> NDArray[np.int64]:
        """The numbers of the rows that nothing was wrong with."""
        return self._numbers[self._good]

    def good(self, columns: dict[str, pl.Series]) -> pl.DataFrame:
        """The rows that nothing was wrong with; raises what is wrong with the first bad one, if there may be none."""
        self._bad.settle(len(self._numbers))
        frame = pl.DataFrame(columns)
        return frame if self._good.all() else frame.filter(pl.Series(self._good))

    def kept(self, frame: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
        """Columns of the good rows as they are."""
        chosen = frame.select(column(name) for name in names)
        return chosen if self._good.all() else chosen.filter(pl.Series(self._good))

    def convert(self, frame: pl.DataFrame, schema: Schema) -> pl.DataFrame:
        """The good rows of every column of `schema`, labels where there are some."""
        return self.good(self.columns(frame, schema))

    def columns(self, frame: pl.DataFrame, schema: Schema) -> dict[str, pl.Series]:
        """The same with the bad rows, which are noted."""
        columns: dict[str, pl.Series] = {}
        if schema.label_column in frame.columns:
            columns |= self.labels(frame, schema)
        if schema.weight:
            columns[schema.weight] = self.weight(frame[schema.weight])
        for dense in schema.dense:
            columns[dense.name] = self.number(frame[dense.name])
        for sparse in schema.sparse:
            if not sparse.traits.lists:
                columns[sparse.name] = self.category(frame[sparse.name], sparse.type)
            elif sparse.weights:
                columns |= self.weighted(frame[sparse.name], frame[sparse.weights], sparse)
            elif sparse.kind == "multi":
                columns[sparse.name] = self.values(frame[sparse.name], sparse)
        for features in schema.sequences.values():
            columns |= self.sequence([frame[feature.name] for feature in features], features)
        kinds = {feature.name: feature.type for feature in schema.sparse if not feature.traits.lists}
        if schema.time:
            columns[schema.time] = self.time(frame[schema.time], schema.time_unit, schema.time_format)
        for name in (schema.session, schema.user):
            if name:
                columns[name] = self.category(frame[name], kinds.get(name, "auto"))
                # Of the converted: what is missing may be written as NaN, which is not null.
                self.require(frame[name], columns[name].is_not_null(), "a value")
        return columns

    def require(self, raw: pl.Series, fine: pl.Series, expected: str) -> None:
        """Every row of `raw` must be `fine`."""
        if not fine.null_count() and fine.all():
            return
        wrong = ~fine.fill_null(False).to_numpy() & self._good
        for row in np.flatnonzero(wrong):
            got = "nothing" if raw[int(row)] is None else repr(raw[int(row)])
            self._leave_out(row, raw.name, f"{got}, expected {expected}")

    def _leave_out(self, row: np.intp, name: str, got: str) -> None:
        """Note a row as bad, by one column of it."""
        self._bad.add(self._path, int(self._numbers[row]), f"column {name!r}: got {got}", self._unit)
        self._good[row] = False

    def _type_error(self, raw: pl.Series, expected: str) -> DataError:
        return DataError(f"{self._path}: column {raw.name!r} is {raw.dtype}, expected {expected}")

    def labels(self, frame: pl.DataFrame, schema: Schema) -> dict[str, pl.Series]:
        """Every label; of several, those that are missing are `UNKNOWN`, but not all of a row."""
        if not schema.labels:
            return {schema.label_column: self.label(frame[schema.label_column], schema.label)}
        names = schema.label_columns
        found = {
            name: self.label(frame[name], rule, optional=True) for name, rule in zip(names, schema.labels, strict=True)
        }
        known = np.logical_or.reduce([(column != UNKNOWN).to_numpy() for column in found.values()])
        self.require(frame[names[0]], pl.Series(known), f"a label here or in {', '.join(names[1:])}")
        return found

    def label(self, raw: pl.Series, rule: str | LabelRule, *, optional: bool = False) -> pl.Series:
        """``UInt8`` 0 or 1; `UNKNOWN` where it may be missing and is."""
        if isinstance(rule, LabelRule) and rule.equals:
            return self._worded(raw, rule.equals, optional=optional)
        threshold = None if isinstance(rule, str) else rule.at_least
        if optional and raw.dtype.is_float():
            raw = raw.fill_nan(None)
        kind = "0 and 1, or booleans; for words let schema.label be {column: NAME, equals: WORD}"
        value = self._numeric(raw, kind if threshold is None else "numbers for a label", truth=True)
        fine = value.is_finite() if threshold is not None else (value == 0) | (value == 1)
        expected = "a number" if threshold is not None else self._expected_label(raw)
        self.require(raw, fine | raw.is_null() if optional else fine, expected)
        positive = value >= threshold if threshold is not None else value == 1
        found = positive.fill_null(False).cast(pl.UInt8)
        return found.set(raw.is_null(), UNKNOWN) if optional else found

    def _worded(self, raw: pl.Series, word: str, *, optional: bool) -> pl.Series:
        """A label that is 1 where the text is `word`."""
        if raw.dtype not in (*_TEXT, pl.Null):
            raise self._type_error(raw, f"text, as its rule is equals {word!r}; at_least is for numbers")
        text = raw.cast(pl.String).str.strip_chars()
        missing = text.is_null() | (text == "").fill_null(False)
        if not optional:
            self.require(raw, ~missing, f"{word!r} or another text")
        return (text == word).fill_null(False).cast(pl.UInt8).set(missing & optional, UNKNOWN).alias(raw.name)

    def _expected_label(self, raw: pl.Series) -> str:
        return "0 or 1"

    def _numeric(self, raw: pl.Series, expected: str, *, truth: bool = False) -> pl.Series:
        """``Float64``, null where there is no number; with `truth` a label, which may be a word."""
        if not _is_number(raw.dtype):
            raise self._type_error(raw, expected)
        return raw.cast(pl.Float64)

    def number(self, raw: pl.Series) -> pl.Series:
        """``Float64``; null where missing."""
        value = self._numeric(raw, "numbers for a dense feature")
        if not value.null_count() and np.abs(value.to_numpy()).max(initial=0.0) <= 3.0e38:  # as most columns are
            return value
        # NaN is missing here; in a block that stayed text, as another value is no number, it is a fault of its row.
        value = value.fill_nan(None)
        missing = raw.is_null() if raw.dtype in _TEXT else value.is_null()
        self.require(raw, missing | (value.abs() <= _MOST), "a finite number or nothing")
        return value

    def weight(self, raw: pl.Series) -> pl.Series:
        """``Float64``, 0 or more."""
        value = self._numeric(raw, "numbers for a weight")
        self.require(raw, value.is_between(0.0, _MOST), "a finite number of 0 or more")
        return value

    def category(self, raw: pl.Series, type: ValueType = "auto") -> pl.Series:
        """``Int64``, ``UInt64`` where the column is that, or ``String``; null where missing."""
        if type == "text":
            return self.category(raw).cast(pl.String)
        if raw.dtype in _TEXT:
            return self._whole_text(raw.cast(pl.String)) if type == "integer" else raw.cast(pl.String)
        if raw.dtype == pl.UInt64:
            return raw
        if raw.dtype.is_float() or raw.dtype.is_decimal():
            return self._whole(raw)
        if raw.dtype.is_integer() or raw.dtype in (pl.Boolean, pl.Null):
            return raw.cast(pl.Int64)
        raise self._type_error(raw, "integers or text for a category")

    def _whole(self, raw: pl.Series) -> pl.Series:
        """Integers stored as decimals, or as floats because some of them are missing, as pandas writes them."""
        value = from_floats(raw)
        missing = raw.fill_nan(None).is_null() if raw.dtype.is_float() else raw.is_null()
        self.require(raw, missing | value.is_not_null(), "a whole number or nothing")
        return value

    def _whole_text(self, raw: pl.Series) -> pl.Series:
        value = from_text(raw)
        self.require(raw, raw.is_null() | value.is_not_null(), f"a whole number or nothing{_INTEGER}")
        return value

    def values(self, raw: pl.Series, feature: SparseFeature) -> pl.Series:
        """Lists of what `category` gives, none of it missing; the first `max_length` of each."""
        found = self._lists(raw, feature).list.drop_nulls()
        return self._typed_lists(raw, found, feature.type).list.head(feature.max_length)

    def sequence(self, raw: Sequence[pl.Series], features: Sequence[SparseFeature]) -> dict[str, pl.Series]:
        """Lists of the columns of one sequence, as long as each other, none of it missing; the last `max_length`."""
        lists = [
            self._typed_lists(part, self._lists(part, feature), feature.type)
            for part, feature in zip(raw, features, strict=True)
        ]
        lengths = [part.list.len().fill_null(0).to_numpy() for part in lists]
        for feature, length in zip(features[1:], lengths[1:], strict=True):
            self._require_as_long(feature.name, length, features[0].name, lengths[0], "which it is beside")
        # Of bad rows nothing is used, and those of unequal lists would put all others out of step.
        found = complete(self._of_good(lists))
        return {feature.name: part.list.tail(feature.max_length) for feature, part in zip(features, found, strict=True)}

    def weighted(self, raw: pl.Series, weights: pl.Series, feature: SparseFeature) -> dict[str, pl.Series]:
        """Lists as those of `values`, and as ``List(Float32)`` by `weights_of` the weight of each of their values."""
        values = self._typed_lists(raw, self._lists(raw, feature), feature.type)
        numbers = self._weight_lists(weights, feature)
        length, expected = (part.list.len().fill_null(0).to_numpy() for part in (numbers, values))
        self._require_as_long(feature.weights, length, feature.name, expected, "whose weights they are")
        self._require_weights(feature.weights, *self._of_good([values, numbers]))
        values, numbers = (part.list.head(feature.max_length) for part in complete(self._of_good([values, numbers])))
        return {feature.name: values, weights_of(feature.name): numbers.cast(pl.List(pl.Float32))}

    def _weight_lists(self, raw: pl.Series, feature: SparseFeature) -> pl.Series:
        """``List(Float64)``; null in them is what is missing, or no number."""
        if raw.dtype in _TEXT or (feature.separator and raw.dtype == pl.Null):
            lists = self._from_text(raw, feature.separator)
        else:
            lists = raw.cast(pl.List(pl.Float64)) if raw.dtype == pl.Null else raw
            inner = getattr(lists.dtype, "inner", pl.Object())
            if lists.dtype.base_type() != pl.List or not (inner.is_numeric() or inner in (pl.String, pl.Null)):
                raise self._type_error(raw, "lists of numbers, or text")
        if lists.dtype.inner == pl.String:  # type: ignore[attr-defined]
            lists = lists.list.eval(pl.element().str.strip_chars())
        return lists.cast(pl.List(pl.Float64), strict=False)

    def _require_weights(self, name: str, values: pl.Series, weights: pl.Series) -> None:
        """Every value must have a weight; lists are as long as each other."""
        lengths = values.list.len().fill_null(0).to_numpy()
        known, given = (part.drop_nulls().explode(empty_as_null=False) for part in (values, weights))
        wrong = (known.is_not_null() & ~given.is_between(0.0, _MOST).fill_null(False)).to_numpy()
        places = np.flatnonzero(wrong)
        rows, first = np.unique(np.repeat(np.arange(len(lengths)), lengths)[places], return_index=True)
        for row, place in zip(rows, places[first], strict=True):
            got = "no number" if given[int(place)] is None else repr(given[int(place)])
            self._leave_out(row, name, f"{got}, expected finite numbers of 0 or more, one for each value")

    def _of_good(self, lists: Sequence[pl.Series]) -> list[pl.Series]:
        return pl.DataFrame(lists).select(pl.when(pl.Series(self._good)).then(pl.all())).get_columns()

    def _require_as_long(
        self, name: str, length: NDArray[Any], main: str, expected: NDArray[Any], relation: str
    ) -> None:
        wrong = (length != expected) & self._good
        for row in np.flatnonzero(wrong):
            wanted = f"{expected[row]} values, as many as {main!r} has, {relation}"
            self._leave_out(row, name, f"a list of {length[row]}, expected {wanted}")

    def _from_text(self, raw: pl.Series, separator: str) -> pl.Series:
        """Lists that a column of text holds."""
        lists, fits = lists_from_text(raw.cast(pl.String), separator)
        plain = f"values divided by {separator!r}; to read lists in brackets leave out `separator`"
        bare = 'a list such as [1, 2] or ["a", "b"]; for values divided by a mark set `separator`'
        self.require(raw, fits.fill_null(True), plain if separator else bare)
        return lists

    def _lists(self, raw: pl.Series, feature: SparseFeature) -> pl.Series:
        """Return a column of lists; null in them is what is missing."""
        if raw.dtype in _TEXT or (feature.separator and raw.dtype == pl.Null):
            return self._from_text(raw, feature.separator)
        if raw.dtype == pl.Null:
            raw = raw.cast(pl.List(pl.Int64))
        if raw.dtype.base_type() != pl.List:
            raise self._type_error(raw, "lists, or text")
        inner = raw.dtype.inner  # type: ignore[attr-defined]
        if inner.is_decimal():
            return self._whole_lists(raw, raw, from_floats, "whole numbers")
        if not (inner.is_integer() or inner in (pl.String, pl.Categorical, pl.Null)):
            raise self._type_error(raw, "lists of integers or text")
        text, kept = inner in (pl.String, pl.Categorical), inner == pl.UInt64
        lists = raw if kept else raw.cast(pl.List(pl.String if text else pl.Int64))
        # Text that is split has no empty values either.
        if text and feature.separator:
            return lists.list.eval(pl.when(pl.element() != "").then(pl.element()))
        return lists

    def _typed_lists(self, raw: pl.Series, lists: pl.Series, type: ValueType) -> pl.Series:
        inner = lists.dtype.inner  # type: ignore[attr-defined]
        if type == "text" and inner != pl.String:
            return lists.cast(pl.List(pl.String))
        if type != "integer" or inner != pl.String:
            return lists
        return self._whole_lists(raw, lists, from_text, f"whole numbers{_INTEGER}")

    def _whole_lists(
        self, raw: pl.Series, lists: pl.Series, read: Callable[[pl.Series], pl.Series], expected: str
    ) -> pl.Series:
        """Lists of ``Int64``, null where a value is; every other value must be a whole number."""
        whole = map_values(lists, read)
        kept, given = (each.list.drop_nulls().list.len() for each in (whole, lists))
        self.require(raw, raw.is_null() | (kept == given).fill_null(True), expected)
        return whole

    def time(self, raw: pl.Series, unit: TimeUnit, form: str = "") -> pl.Series:
        """``Int64`` in `unit`.

        Raises
        ------
        DataError
            Where `unit` loses what tells times apart, or makes no dates of numbers of which another unit does.
        """
        found = read_times(raw, unit, form)
        if found is None:
            raise self._type_error(raw, "numbers, timestamps or text for the time")
        value, fault = found
        if fault:
            raise DataError(f"{self._path}: column {raw.name!r} {fault}")
        self.require(raw, value.is_not_null(), _written(form))
        return value


class TextConverter(Converter):
    """The same where numbers are read as text, too: from files that know no types."""

    _unit = "line"

    def _expected_label(self, raw: pl.Series) -> str:
        return f"0 or 1, or true or false; for other words let schema.label be {{column: {raw.name}, equals: WORD}}"

    def _numeric(self, raw: pl.Series, expected: str, *, truth: bool = False) -> pl.Series:
        if raw.dtype != pl.String:
            return super()._numeric(raw, expected)
        text = raw.str.strip_chars()
        value = text.cast(pl.Float64, strict=False)
        if not truth:
            return value
        words = {"true": 1.0, "false": 0.0}
        return value.fill_null(text.str.to_lowercase().replace_strict(words, default=None, return_dtype=pl.Float64))


def _written(form: str) -> str:
    plain = "a whole number, seconds since 1970 with a fraction, or 2024-05-31 23:59:59"
    return f"a time as {form}" if form else f"a time: {plain}; other forms need schema.time_format"


def _is_number(kind: pl.DataType) -> bool:
    """Numbers, truth values, or nothing at all."""
    return kind.is_numeric() or kind in (pl.Boolean, pl.Null)
