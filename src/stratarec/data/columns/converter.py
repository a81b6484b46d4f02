"""Conversion of raw columns to the types that a `Source` yields. Errors name file, row and column.

In each row, the lists in all columns of a sequence must have the same length, as must the lists of
a feature and its weights. An event that lacks a value in one of these columns is removed from all
of them. The lists are then cut to `max_length`.
"""

from __future__ import annotations

import difflib
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from stratarec.data.column_names import column, weights_of
from stratarec.data.columns.dates import (
    FIRST_SECOND,
    LAST_SECOND,
    NO_DATE,
    Seconds,
    compute_dates,
    to_seconds,
)
from stratarec.data.columns.text_values import (
    TEXT_TYPES,
    drop_incomplete,
    integers_from_numbers,
    integers_from_text,
    lists_from_text,
    map_values,
    numbers_from_text,
    read_times,
)
from stratarec.data.durations import TimeUnit
from stratarec.data.schema import UNKNOWN, DateColumn, Decimal, LabelRule, Schema, SparseFeature, ValueType
from stratarec.errors import DataError

OnBadRow = Literal["error", "skip"]

BOOLEANS = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false"}
"""Other spelling of a boolean, such as ``True`` of pandas -> the category that it means."""
_BOOLEAN_BYTES = min(map(len, BOOLEANS)), max(map(len, BOOLEANS))
MAX_NUMBER = 3.0e38
"""Maximum absolute value of a number, slightly less than the maximum of float32."""
_EXAMPLES, _MOST_NAMES = 5, 10
_INTEGER = ", without leading zeros, because its type is integer; set type to text to keep them"


@dataclass
class BadRows:
    """Count of bad rows in one chunk, and error messages for the first of them.

    Columns are checked one after another, so the first bad row is known only when all are checked.
    Then call `raise_first`.
    """

    on_bad_row: OnBadRow | None
    """The recipe's `on_bad_row`; None if a bad row is always an error."""
    count: int = 0
    _first: list[tuple[int, str]] = field(default_factory=list)

    @property
    def examples(self) -> list[str]:
        """Error messages for the first bad rows, in the order of the file."""
        return [message for _, message in self._first]

    def add(self, file: str, line: int, problem: str, unit: str = "line") -> None:
        """Record a bad row."""
        self.count += 1
        insort(self._first, (line, f"{file}, {unit} {line}: {problem}"))
        del self._first[_EXAMPLES:]

    def raise_first(self, rows: int = 0) -> None:
        """Raise `DataError` for the first bad row, unless bad rows are skipped. `rows` is the
        number of rows checked.
        """
        if not self.count or self.on_bad_row == "skip":
            return
        if self.on_bad_row is None:
            raise DataError(self.examples[0])
        advice = "set data.on_bad_row=skip to leave out bad rows"
        if self.count * 2 > rows > 1:
            advice = (
                f"{self.count:,} of {max(rows, self.count):,} rows around it are bad: check data.source"
            )
        elif self.count > 1:
            advice = f"{self.count:,} rows around it are bad; {advice}"
        raise DataError(f"{self.examples[0]}; {advice}")


def check_present(names: Sequence[Any], required: Sequence[str], path: str, advice: str = "") -> None:
    """Raise `DataError` unless each of `required` occurs exactly once in `names`; the message ends
    with `advice`.
    """
    for name in required:
        if names.count(name) > 1:
            raise DataError(
                f"{path}: {names.count(name)} columns are named {name!r}; rename or drop all but one"
            )
    present = [str(other) for other in names]
    missing = [name for name in dict.fromkeys(required) if name not in names]
    close = difflib.get_close_matches(missing[0], present, 1) if len(missing) == 1 else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    if missing:
        columns = f"column{'s' * (len(missing) > 1)} {', '.join(map(repr, missing[:_MOST_NAMES]))}"
        columns += f" and {len(missing) - _MOST_NAMES:,} more" if len(missing) > _MOST_NAMES else ""
        raise DataError(f"{path}: no {columns}{hint}; it has {', '.join(present) or 'none'}{advice}")


@contextmanager
def naming_column(path: str, name: str) -> Iterator[None]:
    """Raise errors of Polars, Arrow or Python as a `DataError` that names the column."""
    try:
        yield
    except DataError:
        raise
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
        RuntimeError,
        pl.exceptions.PolarsError,
        pl.exceptions.PanicException,
        pa.ArrowException,
    ) as error:
        text = " ".join(str(error).split())[:200]
        raise DataError(f"{path}: column {name!r} cannot be read: {text}") from error


class Converter:
    """Converter for the columns of one frame.

    Parameters
    ----------
    path : str
        File of the rows, for error messages.
    numbers : ndarray
        ``[N]`` row number or line number of each row in the file.
    bad : BadRows
        Collects the rows that cannot be used.
    from_text : bool
        Whether the file is text without types. Numbers are then parsed from text, and messages
        count lines.
    optional_user : bool
        Whether a row without a user is a good row.
    optional_label : bool
        Whether a row without a label is a good row, whose label is `UNKNOWN`.
    """

    def __init__(
        self,
        path: str,
        numbers: NDArray[np.int64],
        bad: BadRows,
        *,
        from_text: bool = False,
        optional_user: bool = False,
        optional_label: bool = False,
    ) -> None:
        self._path = path
        self._numbers = numbers
        self._bad = bad
        self._from_text = from_text
        self._optional_user = optional_user
        self._optional_label = optional_label
        self._is_good = np.ones(len(numbers), dtype=bool)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Row numbers of the good rows."""
        return self._numbers[self._is_good]

    def convert(self, frame: pl.DataFrame, schema: Schema) -> pl.DataFrame:
        """Return all columns of `schema` for the good rows. Labels are left out if `frame` has
        none.
        """
        return self.good_rows(pl.DataFrame(self.columns(frame, schema)))

    def good_rows(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return the good rows of a frame, or raise the first error if bad rows are not skipped."""
        self._bad.raise_first(len(self._numbers))
        return frame if self._is_good.all() else frame.filter(pl.Series(self._is_good))

    def columns(self, frame: pl.DataFrame, schema: Schema) -> dict[str, pl.Series]:
        """Return the columns of `schema` for all rows, and record the bad rows."""
        columns: dict[str, pl.Series] = {}
        if schema.label_column in frame.columns:
            columns |= self._labels(frame, schema)
        if schema.weight:
            columns[schema.weight] = self.weight(frame[schema.weight])
        time = self.time(frame[schema.time], schema.time_unit, schema.time_format) if schema.time else None
        if schema.dates:
            read_before = {} if time is None else {schema.time: to_seconds(time, schema.time_unit)}
            numbers = compute_dates(schema.dates, self.dates(frame, schema.dates, read_before))
            frame = frame.with_columns(pl.Series(name, column) for name, column in numbers.items())
        for dense in schema.dense:
            with naming_column(self._path, dense.source):
                columns[dense.name] = self.number(frame[dense.source], dense.decimal).alias(dense.name)
        for sparse in schema.sparse:
            with naming_column(self._path, sparse.name):
                if not sparse.traits.lists:
                    columns[sparse.name] = self.category(frame[sparse.name], sparse.type)
                elif sparse.weights:
                    columns |= self._weighted(frame[sparse.name], frame[sparse.weights], sparse)
                elif sparse.kind == "multi":
                    columns[sparse.name] = self._values(frame[sparse.name], sparse)
        for name, features in schema.sequences.items():
            with naming_column(self._path, name):
                columns |= self._sequence([frame[feature.name] for feature in features], features)
        types = {feature.name: feature.type for feature in schema.sparse if not feature.traits.lists}
        if time is not None:
            columns[schema.time] = time
        for name in filter(None, (schema.session, schema.user)):
            is_optional = self._optional_user and name == schema.user != schema.session
            columns[name] = (self.category if is_optional else self.key)(
                frame[name], types.get(name, "auto")
            )
        return columns

    def require(self, raw: pl.Series, fits: pl.Series, expected: str) -> None:
        """Record as bad the rows of `raw` for which `fits` is not true."""
        if not fits.null_count() and fits.all():
            return
        for row in np.flatnonzero(~fits.fill_null(False).to_numpy() & self._is_good):
            value = "nothing" if raw[int(row)] is None else repr(raw[int(row)])
            self._mark_bad(row, raw.name, f"{value}, expected {expected}")

    def _mark_bad(self, row: np.intp, name: str, problem: str) -> None:
        unit = "line" if self._from_text else "row"
        self._bad.add(self._path, int(self._numbers[row]), f"column {name!r}: got {problem}", unit)
        self._is_good[row] = False

    def _type_error(self, raw: pl.Series, expected: str) -> DataError:
        return DataError(f"{self._path}: column {raw.name!r} is {raw.dtype}, expected {expected}")

    def _labels(self, frame: pl.DataFrame, schema: Schema) -> dict[str, pl.Series]:
        """Return every label. If there are several, missing labels are `UNKNOWN`, and a row must
        have at least one.
        """
        if not schema.labels:
            raw = frame[schema.label_column]
            return {schema.label_column: self._label(raw, schema.label, optional=self._optional_label)}
        names = schema.label_columns
        labels = {
            name: self._label(frame[name], rule, optional=True)
            for name, rule in zip(names, schema.labels, strict=True)
        }
        if self._optional_label:
            return labels
        has_label = np.logical_or.reduce([(label != UNKNOWN).to_numpy() for label in labels.values()])
        self.require(frame[names[0]], pl.Series(has_label), f"a label here or in {', '.join(names[1:])}")
        return labels

    def _label(self, raw: pl.Series, rule: str | LabelRule, *, optional: bool = False) -> pl.Series:
        """Return a label as ``UInt8`` 0 or 1; with `optional`, a missing label is `UNKNOWN`."""
        if isinstance(rule, LabelRule) and rule.equals:
            return self._label_by_word(raw, rule.equals, optional=optional)
        threshold = None if isinstance(rule, str) else rule.at_least
        if optional and raw.dtype.is_float():
            raw = raw.fill_nan(None)
        if threshold is None:
            value = self._numeric(
                raw,
                "0 and 1, or booleans; for words set schema.label to {column: NAME, equals: WORD}",
                booleans=True,
            )
            fits, positive = (value == 0) | (value == 1), value == 1
            expected = "0 or 1"
            if self._from_text:
                setting = f"{{column: {raw.name}, equals: WORD}}"
                expected += f", or true or false; for other words set schema.label to {setting}"
        else:
            value = self._numeric(raw, "numbers for a label", booleans=True)
            fits, positive, expected = value.is_finite(), value >= threshold, "a number"
        self.require(raw, fits | raw.is_null() if optional else fits, expected)
        label = positive.fill_null(False).cast(pl.UInt8)
        return label.set(raw.is_null(), UNKNOWN) if optional else label

    def _label_by_word(self, raw: pl.Series, word: str, *, optional: bool) -> pl.Series:
        """Return a label that is 1 if the text is `word`, else 0."""
        if raw.dtype not in (*TEXT_TYPES, pl.Null):
            raise self._type_error(
                raw, f"text, because its rule is equals {word!r}; at_least is for numbers"
            )
        text = raw.cast(pl.String).str.strip_chars()
        missing = text.is_null() | (text == "").fill_null(False)
        if not optional:
            self.require(raw, ~missing, f"{word!r} or another text")
        return (
            (text == word).fill_null(False).cast(pl.UInt8).set(missing & optional, UNKNOWN).alias(raw.name)
        )

    def _numeric(self, raw: pl.Series, expected: str, *, booleans: bool = False) -> pl.Series:
        """Return ``Float64``, null for values that are not numbers; with `booleans`, true and false
        are numbers.
        """
        if self._from_text and raw.dtype == pl.String:
            value = _parse_numbers(raw)
            if not booleans:
                return value
            text, words = raw.str.strip_chars().str.to_lowercase(), {"true": 1.0, "false": 0.0}
            return value.fill_null(text.replace_strict(words, default=None, return_dtype=pl.Float64))
        if not (raw.dtype.is_numeric() or raw.dtype in (pl.Boolean, pl.Null)):
            raise self._type_error(raw, expected)
        return raw.cast(pl.Float64)

    def number(self, raw: pl.Series, decimal: Decimal = "") -> pl.Series:
        """Return a dense column as ``Float64``, null for missing values. `decimal` is the decimal
        mark of its text.
        """
        if decimal and raw.dtype in TEXT_TYPES:
            text = raw.cast(pl.String)
            value = numbers_from_text(text, decimal)
            missing = text.is_null() | (text.str.strip_chars() == "").fill_null(False)
            self.require(
                raw, missing | value.is_finite(), f"a number with decimal mark {decimal!r}, or nothing"
            )
            return value
        # All columns of CSV files are text, and some of frames that were made from JSON.
        is_text = raw.dtype in TEXT_TYPES
        value = _parse_numbers(raw) if is_text else self._numeric(raw, "numbers for a dense feature")
        # Most columns have no missing values and need no further work.
        if not value.null_count() and np.abs(value.to_numpy()).max(initial=0.0) <= MAX_NUMBER:
            return value
        # In a column of floats, NaN is a missing value. In a column that had to be read as text, it
        # is an error.
        value = value.fill_nan(None)
        missing = raw.is_null() | (raw.cast(pl.String) == "") if is_text else value.is_null()
        self.require(
            raw,
            missing | (value.abs() <= MAX_NUMBER),
            f"a finite number of at most {MAX_NUMBER:g}, or nothing",
        )
        return value

    def weight(self, raw: pl.Series) -> pl.Series:
        """Return sample weights as ``Float64``; a negative weight is bad."""
        value = self._numeric(raw, "numbers for a weight")
        self.require(raw, value.is_between(0.0, MAX_NUMBER), "a finite number of 0 or more")
        return value

    def key(self, raw: pl.Series, type: ValueType = "auto") -> pl.Series:
        """Convert a column such as the user, as `category` does; a row without a value is bad."""
        value = self.category(raw, type)
        # Nulls of `value` are tested, because NaN is missing too and is not null in `raw`.
        self.require(raw, value.is_not_null(), "a value")
        return value

    def category(self, raw: pl.Series, type: ValueType = "auto") -> pl.Series:
        """Return categories as ``Int64`` or ``String``, or as ``UInt64`` if the raw column is; null
        where missing.

        An empty text is missing in every format, because text files cannot tell the two apart.
        Booleans are the texts ``true`` and ``false``, as in JSON, however a file writes them,
        unless the type is ``integer``.
        """
        if type == "text":
            return self.category(raw).cast(pl.String)
        if raw.dtype in TEXT_TYPES:
            text = raw.cast(pl.String)
            lengths = text.str.len_bytes()
            if (lengths == 0).any():
                text = text.to_frame().select(pl.when(pl.first() != "").then(pl.first())).to_series()
            # is_in takes up to four times as long as the comparisons.
            may_be_boolean = type == "auto" and lengths.is_between(*_BOOLEAN_BYTES).any()
            if may_be_boolean and any((text == word).any() for word in BOOLEANS):
                text = text.replace(BOOLEANS)
            return (
                text
                if type == "auto"
                else self._integers(raw, integers_from_text(text), text.is_null(), _INTEGER)
            )
        if raw.dtype == pl.Boolean and type == "auto":
            return raw.cast(pl.String)
        if raw.dtype == pl.UInt64:
            return raw
        if raw.dtype.is_float() or raw.dtype.is_decimal():
            # Integers may be stored as decimals, or as floats because some are missing, as pandas
            # does.
            missing = raw.fill_nan(None).is_null() if raw.dtype.is_float() else raw.is_null()
            return self._integers(raw, integers_from_numbers(raw), missing)
        if raw.dtype.is_integer() or raw.dtype in (pl.Boolean, pl.Null):
            return raw.cast(pl.Int64)
        raise self._type_error(raw, "integers or text for a category")

    def _integers(
        self, raw: pl.Series, value: pl.Series, missing: pl.Series, detail: str = ""
    ) -> pl.Series:
        self.require(raw, missing | value.is_not_null(), f"a whole number or nothing{detail}")
        return value

    def _values(self, raw: pl.Series, feature: SparseFeature) -> pl.Series:
        """Return lists of categories without missing values, the first `max_length` of each row."""
        lists = self._lists(raw, feature.separator).list.drop_nulls()
        return self._typed_lists(raw, lists, feature.type).list.head(feature.max_length)

    def _sequence(
        self, raw: Sequence[pl.Series], features: Sequence[SparseFeature]
    ) -> dict[str, pl.Series]:
        """Return the lists of the columns of one sequence: the last `max_length` complete events of
        each row.
        """
        lists = [
            self._typed_lists(part, self._lists(part, feature.separator), feature.type)
            for part, feature in zip(raw, features, strict=True)
        ]
        for feature, part in zip(features[1:], lists[1:], strict=True):
            self._require_same_length(
                feature.name, part, features[0].name, lists[0], "whose events it describes"
            )
        complete = drop_incomplete(self._without_bad(lists))
        return {f.name: part.list.tail(f.max_length) for f, part in zip(features, complete, strict=True)}

    def _weighted(self, raw: pl.Series, weights: pl.Series, feature: SparseFeature) -> dict[str, pl.Series]:
        """Return lists as `_values` does, and the column `weights_of` with the weight of each value
        (``List(Float32)``).
        """
        values = self._typed_lists(raw, self._lists(raw, feature.separator), feature.type)
        numbers = self._weight_lists(weights, feature.separator)
        self._require_same_length(feature.weights, numbers, feature.name, values, "whose weights they are")
        self._require_weights(feature.weights, *self._without_bad([values, numbers]))
        values, numbers = (
            part.list.head(feature.max_length)
            for part in drop_incomplete(self._without_bad([values, numbers]))
        )
        return {feature.name: values, weights_of(feature.name): numbers.cast(pl.List(pl.Float32))}

    def _weight_lists(self, raw: pl.Series, separator: str) -> pl.Series:
        """Return ``List(Float64)``; a missing weight, or one that is not a number, is null."""
        lists = self._raw_lists(raw, separator, "lists of numbers, or text")
        inner = lists.dtype.inner  # type: ignore[attr-defined]
        if not (inner.is_numeric() or inner in (pl.String, pl.Null)):
            raise self._type_error(raw, "lists of numbers, or text")
        if inner == pl.String:
            lists = lists.list.eval(pl.element().str.strip_chars())
        return lists.cast(pl.List(pl.Float64), strict=False)

    def _require_weights(self, name: str, values: pl.Series, weights: pl.Series) -> None:
        """Record as bad the rows in which a value has no weight. The lists of a row must have the
        same length.
        """
        lengths = _lengths(values)
        flat_values, flat_weights = (
            part.drop_nulls().explode(empty_as_null=False) for part in (values, weights)
        )
        fits = flat_weights.is_between(0.0, MAX_NUMBER).fill_null(False)
        places = np.flatnonzero((flat_values.is_not_null() & ~fits).to_numpy())
        rows, first = np.unique(np.repeat(np.arange(len(lengths)), lengths)[places], return_index=True)
        for row, place in zip(rows, places[first], strict=True):
            weight = flat_weights[int(place)]
            value = "no number" if weight is None else repr(weight)
            self._mark_bad(row, name, f"{value}, expected finite numbers of 0 or more, one for each value")

    def _without_bad(self, lists: Sequence[pl.Series]) -> list[pl.Series]:
        """Return lists with null in bad rows. Otherwise their unequal lengths would shift the
        values of later rows.
        """
        return pl.DataFrame(lists).select(pl.when(pl.Series(self._is_good)).then(pl.all())).get_columns()

    def _require_same_length(
        self, name: str, lists: pl.Series, main: str, expected: pl.Series, relation: str
    ) -> None:
        length, expected_length = _lengths(lists), _lengths(expected)
        for row in np.flatnonzero((length != expected_length) & self._is_good):
            size = f"{expected_length[row]} values, as many as {main!r} has, {relation}"
            self._mark_bad(row, name, f"a list of {length[row]}, expected {size}")

    def _raw_lists(self, raw: pl.Series, separator: str, expected: str) -> pl.Series:
        """Return a column of lists of any type; an empty part of a text is null in its list."""
        if raw.dtype in TEXT_TYPES or (separator and raw.dtype == pl.Null):
            lists, is_list = lists_from_text(raw.cast(pl.String), separator)
            form = f"values separated by {separator!r}; to read lists in brackets leave out `separator`"
            if not separator:
                form = 'a list such as [1, 2] or ["a", "b"]; for separated values set `separator`'
            self.require(raw, is_list.fill_null(True), form)
            return lists
        if raw.dtype == pl.Null:
            return raw.cast(pl.List(pl.Int64))
        if isinstance(raw.dtype, pl.Array):
            return raw.arr.to_list()
        if raw.dtype.base_type() != pl.List:
            raise self._type_error(raw, expected)
        return raw

    def _lists(self, raw: pl.Series, separator: str) -> pl.Series:
        """Return lists of ``Int64``, ``UInt64`` or ``String``; a missing value is null in its
        list.
        """
        lists = self._raw_lists(raw, separator, "lists, or text")
        if raw.dtype.base_type() not in (pl.List, pl.Array):
            return lists
        inner = lists.dtype.inner  # type: ignore[attr-defined]
        if inner.is_decimal():
            return self._integer_lists(raw, lists, integers_from_numbers, "whole numbers")
        if not (inner.is_integer() or inner in (pl.String, pl.Categorical, pl.Null)):
            raise self._type_error(raw, "lists of integers or text")
        is_text = inner in (pl.String, pl.Categorical)
        if inner != pl.UInt64:
            lists = lists.cast(pl.List(pl.String if is_text else pl.Int64))
        # An empty text in a list is a missing value, like an empty part of a text that is split.
        if is_text and separator:
            return lists.list.eval(pl.when(pl.element() != "").then(pl.element()))
        return lists

    def _typed_lists(self, raw: pl.Series, lists: pl.Series, type: ValueType) -> pl.Series:
        is_text = lists.dtype.inner == pl.String  # type: ignore[attr-defined]
        if type == "text" and not is_text:
            return lists.cast(pl.List(pl.String))
        if type != "integer" or not is_text:
            return lists
        return self._integer_lists(raw, lists, integers_from_text, f"whole numbers{_INTEGER}")

    def _integer_lists(
        self, raw: pl.Series, lists: pl.Series, read: Callable[[pl.Series], pl.Series], expected: str
    ) -> pl.Series:
        """Return lists of ``Int64``; a row with a value that is not an integer is bad."""
        integers = map_values(lists, read)
        count, total = (part.list.drop_nulls().list.len() for part in (integers, lists))
        self.require(raw, raw.is_null() | (count == total).fill_null(True), expected)
        return integers

    def time(self, raw: pl.Series, unit: TimeUnit, form: str = "") -> pl.Series:
        """Return times as ``Int64`` in `unit`.

        Raises
        ------
        DataError
            If different times would become equal in `unit`, or if numbers are dates in another unit
            but not in `unit`.
        """
        times = read_times(raw, unit, form)
        if times is None:
            raise self._type_error(raw, "numbers, timestamps or text for the time")
        value, fault = times
        if fault:
            raise DataError(f"{self._path}: column {raw.name!r} {fault}")
        plain = "a whole number, seconds since 1970 with a fraction, or 2024-05-31 23:59:59"
        expected = f"a time as {form}" if form else f"a time: {plain}; other forms need schema.time_format"
        self.require(raw, value.is_not_null(), expected)
        return value

    def dates(
        self, frame: pl.DataFrame, dates: Sequence[DateColumn], read_before: Mapping[str, pl.Series]
    ) -> dict[str, Seconds]:
        """Return the seconds since 1970 of every column of dates, `NO_DATE` where a date is
        missing.

        Columns in `read_before` were read before.
        """
        seconds = dict(read_before)
        for date in dates:
            if date.name not in seconds:
                with naming_column(self._path, date.name):
                    seconds[date.name] = self._date(frame[date.name], date)
        return {name: times.fill_null(NO_DATE).to_numpy() for name, times in seconds.items()}

    def _date(self, raw: pl.Series, date: DateColumn) -> pl.Series:
        dates = read_times(raw, date.time_unit, date.time_format, exact=False)
        if dates is None:
            raise self._type_error(raw, "numbers, timestamps or text for a date")
        value, fault = dates
        if fault:
            raise DataError(f"{self._path}: column {raw.name!r} {fault} in schema.dates")
        seconds = to_seconds(value, date.time_unit)
        form = (
            f"as {date.time_format}"
            if date.time_format
            else "such as 2024-05-31; other forms need time_format"
        )
        missing = raw.fill_nan(None).is_null() if raw.dtype.is_float() else raw.is_null()
        fits = missing | seconds.is_between(FIRST_SECOND, LAST_SECOND).fill_null(False)
        self.require(raw, fits, f"a date from the year 1 to 9999, or nothing, {form}")
        return seconds.set(missing | ~fits, None)

    def passed_through(self, frame: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame | None:
        """Return the raw columns `names` of the good rows; None if there are no names."""
        return self.good_rows(frame.select(column(name) for name in names)) if names else None


def _lengths(lists: pl.Series) -> NDArray[Any]:
    return lists.list.len().fill_null(0).to_numpy()


def _parse_numbers(raw: pl.Series) -> pl.Series:
    """Return ``Float64``, null for text that is not a number such as 12, -0.5 or 1e3."""
    return raw.cast(pl.String).str.strip_chars().cast(pl.Float64, strict=False)
