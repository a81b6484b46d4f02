"""Guess which columns are features, and of which kind: numbers, categories or lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import polars as pl

from stratarec.cli.init.date_columns import Dates, find_dates
from stratarec.cli.init.lists import LIKE_A_LIST, find_separator, list_fault, text_fault
from stratarec.cli.init.numbers import (
    WrittenNumbers,
    has_long_tail,
    is_ordered,
    is_spread,
    is_whole,
    number_fault,
    predicts_by_value,
    written_numbers,
)
from stratarec.cli.init.sample import LogSample, growth
from stratarec.cli.init.words import AMOUNTS, EARLIER, ITEMS, TIMES, is_code, names_amount, tokens
from stratarec.data.column_names import check_name
from stratarec.data.columns.text_values import lists_from_text
from stratarec.data.schema import Decimal
from stratarec.errors import ConfigError

Role = Literal[
    "label", "weight", "time", "user", "session", "split", "dense", "sparse", "list", "date", "ignored"
]

# Columns of whole numbers with more distinct values are amounts, unless something suggests ids. A
# user column must also have more distinct values.
FEW = 50
# An index column increases by one at _MOSTLY_ONE of the rows. A sequence belongs to a feature that
# has _MOSTLY_SAME of its values.
_MOSTLY_ONE, _MOSTLY_SAME = 0.99, 0.5
# A list has values of a feature only if the feature has at least this share of the list's number of
# values.
_LEAST_SHARED = 0.3
_LONG_TEXT = 60
# Maximum number of characters of a value in a reason.
_SHOWN = 40
# A category of whole numbers is a number, too, if it has more than _FEWEST values and floats
# represent them exactly.
_FEWEST, _EXACT = 3, 1 << 53
_UNIQUE = "a different value in every row, like a row number"


@dataclass(frozen=True, kw_only=True)
class Guess:
    """Guessed role of one column."""

    name: str
    role: Role
    reason: str
    values: int = 0
    """Estimated number of distinct values in the whole log."""
    separator: str = ""
    """Character between the values of a list written as text; empty for lists in brackets."""
    decimal: Decimal = ""
    """Decimal mark of a dense feature whose numbers are text as people write them."""
    integer: bool = False
    """Whether values that are text in the file are whole numbers."""
    ordered: bool = False
    """Whether the sparse feature has few values that are numbers, which could also be amounts."""
    number: str = ""
    """Name of the dense feature with the numbers of this sparse feature; empty for none."""
    of: str = ""
    """Name of the feature whose values a list contains, if the list seems to be a sequence of user
    actions.
    """
    dates: Dates | None = None
    """Format of the dates, for the role ``date``."""
    leak: Guess | None = None
    """Guess for the column if its suspected leak is ignored; set for a column that is left out
    because of the leak.
    """


def guess_feature(column: pl.Series, sample: LogSample) -> Guess:
    """Guess the role of a column that is not the label, a key or the time."""
    kind = column.dtype
    if column.name in sample.unnamed:
        is_index = kind.is_integer() and float((column.diff() == 1).mean() or 0) > _MOSTLY_ONE  # type: ignore[arg-type]
        advice = "numbers the rows like an index" if is_index else "rename it in the log to use it"
        return _ignored(column, f"no usable name in the header; {advice}")
    if not is_name(column.name):
        return _ignored(
            column,
            "features cannot have that name (over 200 bytes, control characters, @ in front); rename it",
        )
    if kind.base_type() == pl.Array:
        return guess_feature(column.arr.to_list(), sample)
    if kind.base_type() == pl.List:
        fault = list_fault(column)
        return _ignored(column, fault) if fault else _list_feature(column, "lists", sample)
    if kind.is_decimal():
        return _ignored(column, "whole numbers of more than 64 bits; write them as text to use them")
    if kind.is_temporal() and (dates := find_dates(column)[0]) is not None:
        return Guess(name=column.name, role="date", reason=dates.how, dates=dates)
    if not (kind.is_numeric() or kind in (pl.String, pl.Boolean, pl.Categorical, pl.Enum)):
        return _ignored(column, f"{kind}, which is neither a number nor a category")
    distinct = column.n_unique() - bool(column.null_count())
    if distinct < 2:
        return _ignored(column, "a single value, or none")
    if column.name in sample.written:
        return _written_feature(column, sample.written[column.name], sample)
    if kind == pl.String or tokens(column.name) & TIMES:
        dates, reason = find_dates(column)
        if dates is not None and dates.words and sample.kind != "csv":
            return _ignored(column, f"{dates.how}; {dates.words[0]!r} is not a date")
        if dates is not None:
            return Guess(name=column.name, role="date", reason=dates.how, dates=dates)
        if reason:
            return _ignored(column, reason)
    if kind.is_float() and not is_whole(column):
        return Guess(
            name=column.name, role="dense", reason=f"numbers with fractions{_missing(column, sample)}"
        )
    if kind == pl.String:
        return _text_feature(column, sample, distinct)
    if distinct == len(column) and len(column) > FEW and (is_code(column.name) or _numbers_rows(column)):
        return _ignored(column, _UNIQUE)
    return _integer_feature(column, sample, distinct)


def _written_feature(column: pl.Series, written: WrittenNumbers, sample: LogSample) -> Guess:
    """Return a dense feature, unless its amounts are in several currencies."""
    if len(written.units) > 1:
        units = ", ".join(map(repr, written.units))
        return _ignored(
            column, f"amounts in several currencies ({units}); write them in one currency to use them"
        )
    reason = f"numbers written as {written.example!r}{_missing(column, sample)}"
    return Guess(name=column.name, role="dense", reason=reason, decimal=written.decimal)


def _numbers_rows(column: pl.Series) -> bool:
    """Whether different numbers number rows: they rise, fill their range, or have such a name."""
    rises = bool((column.diff().drop_nulls() > 0).all())
    dense = int(column.max()) - int(column.min()) < 1.01 * len(column)  # type: ignore[arg-type]
    return rises or dense or bool(tokens(column.name) & {"number", "no", "nr", "index", "row", "serial"})


def _ignored(column: pl.Series, reason: str) -> Guess:
    return Guess(name=column.name, role="ignored", reason=reason)


def _missing(column: pl.Series, sample: LogSample) -> str:
    """Return the words that mean a missing value, as the end of a reason."""
    words = sample.missing.get(column.name)
    return f"; {', '.join(map(repr, words))}: missing" if words else ""


def _list_feature(lists: pl.Series, what: str, sample: LogSample, separator: str = "") -> Guess:
    flat, rows = lists.drop_nulls().explode().drop_nulls(), len(lists)
    reason = f"{what}, {len(flat) / max(rows, 1):.1f} values on average"
    values = growth(flat, rows, sample.total)
    return Guess(name=lists.name, role="list", reason=reason, values=values, separator=separator)


def _integer_feature(column: pl.Series, sample: LogSample, distinct: int) -> Guess:
    """Decide whether whole numbers or booleans are amounts or ids."""
    kind = column.dtype
    values = growth(column, len(column), sample.total)
    missing = _missing(column, sample)
    code = is_code(column.name)
    if kind.is_numeric() and not code and names_amount(column.name):
        return Guess(name=column.name, role="dense", reason=f"a number by its name{missing}")
    reason = f"about {values:,} values"
    if kind.is_numeric() and code and distinct > FEW:
        reason += ", codes by its name"
    elif kind.is_numeric() and distinct > FEW:
        ordered, spread = is_ordered(column), is_spread(column, distinct)
        if ordered or (ordered is None and spread) or has_long_tail(column):
            reason = f"{distinct:,} different numbers, not named like an id{missing}"
            return Guess(name=column.name, role="dense", reason=reason)
        if not spread and distinct > len(column) / 2:
            reason = f"{distinct:,} different numbers, most of them once{missing}"
            return Guess(name=column.name, role="dense", reason=reason)
        reason += ", without apparent order"
    integer = sample.kind == "csv" and kind != pl.Boolean
    ordered = kind.is_numeric() and not code and 2 < distinct <= FEW and not tokens(column.name) & {*ITEMS}
    return Guess(
        name=column.name,
        role="sparse",
        reason=f"{reason}{missing}",
        values=values,
        integer=integer,
        ordered=ordered,
    )


def as_ids(guess: Guess, column: pl.Series, positive: pl.Series, sample: LogSample) -> Guess:
    """Turn whole numbers (such as student numbers) into ids if single values predict the label
    better than order.
    """
    is_number = guess.role == "dense" and column.dtype.is_integer() and not tokens(guess.name) & AMOUNTS
    if not is_number or column.n_unique() <= FEW or not predicts_by_value(column, positive):
        return guess
    values = growth(column, len(column), sample.total)
    reason = f"about {values:,} values, which predict better as categories than as numbers{_missing(column, sample)}"
    return Guess(name=guess.name, role="sparse", reason=reason, values=values, integer=sample.kind == "csv")


def _text_feature(column: pl.Series, sample: LogSample, distinct: int) -> Guess:
    rows = len(column)
    fault = text_fault(column)
    if fault:
        return _ignored(column, fault)
    lists, fits = lists_from_text(column, "")
    if fits.mean() == 1:
        return _list_feature(lists, "lists as text", sample)
    odd = column.filter(~fits)
    if odd.str.contains(LIKE_A_LIST).mean() > 0.5 or fits.mean() > 0.5:  # type: ignore[operator]
        return _ignored(
            column, f'lists written as {odd[0][:_SHOWN]!r}; write them as [1, 2] or ["a", "b"] to use them'
        )
    fault = "" if is_code(column.name) else number_fault(column)
    if fault:
        return _ignored(column, fault)
    # Ids may be written with separators of thousands.
    are_numbers = written_numbers(column, delimiter=sample.options.get("delimiter", ",")) is not None
    separator = "" if are_numbers else find_separator(column, distinct)
    length = float(column.str.len_chars().mean() or 0)  # type: ignore[arg-type]
    is_prose = separator == " " and column.str.contains(r"\p{L} \p{L}+ \p{L}").mean() > 0.5  # type: ignore[operator]
    if is_prose and length > _LONG_TEXT:
        return _ignored(column, f"text of {length:.0f} characters, not a list of values")
    if separator:
        parts = lists_from_text(column, separator)[0]
        return _list_feature(parts, f"text split at {separator!r}", sample, separator)
    if distinct == rows and rows > FEW:
        return _ignored(column, _UNIQUE)
    if length > _LONG_TEXT and distinct > rows / 2:
        return _ignored(column, f"text of {length:.0f} characters that rarely repeats: not a category")
    values = growth(column, rows, sample.total)
    return Guess(name=column.name, role="sparse", reason=f"about {values:,} values", values=values)


def as_sequence(guess: Guess, frame: pl.DataFrame, features: Sequence[str]) -> Guess:
    """Turn a list into a sequence if its name suggests earlier events, and a feature has most of
    the list's values.
    """
    if guess.role != "list" or not tokens(guess.name) & EARLIER:
        return guess
    column = frame[guess.name].drop_nulls()
    lists = lists_from_text(column, guess.separator)[0] if column.dtype == pl.String else column
    values = lists.explode().drop_nulls().cast(pl.String)
    # A feature with a few small numbers has the most frequent values of many lists.
    enough = values.n_unique() * _LEAST_SHARED
    distinct = {name: frame[name].cast(pl.String).unique() for name in features}
    values_by_feature = {
        name: others.implode() for name, others in distinct.items() if len(others) >= enough
    }
    shares = {
        name: values.is_in(others).sum() / max(len(values), 1) for name, others in values_by_feature.items()
    }
    name = max(shares, key=lambda name: shares[name], default="")
    if not name or shares[name] < _MOSTLY_SAME:
        return guess
    return replace(
        guess, of=name, reason=f"{guess.reason}; its name, and values of {name}; expected oldest first"
    )


def with_number(guess: Guess, frame: pl.DataFrame) -> Guess:
    """Let a category of whole numbers be a number, too, unless it has two or three values, or
    numbers like hashes.
    """
    name = f"{guess.name}.number"
    if (
        guess.role != "sparse"
        or not frame[guess.name].dtype.is_numeric()
        or name in frame.columns
        or not is_name(name)
    ):
        return guess
    column = frame[guess.name]
    is_exact = float(column.cast(pl.Float64).abs().max() or 0) < _EXACT  # type: ignore[arg-type]
    return replace(guess, number=name) if is_exact and column.n_unique() > _FEWEST else guess


def is_name(name: str) -> bool:
    try:
        check_name("name", name)
    except ConfigError:
        return False
    return True
