"""What each column of a log may be for, by its name and its values, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import polars as pl

from stratarec.cli.init.by_value import tells_by_value
from stratarec.cli.init.label import class_weights, find_label, find_weight, positives
from stratarec.cli.init.numbers import amounts
from stratarec.cli.init.sample import LogSample, growth
from stratarec.cli.init.times import Times, as_times
from stratarec.cli.init.words import AMOUNTS, BIRTHS, EARLIER, ITEMS, SESSIONS, TIMES, USERS, is_code, names_a, tokens
from stratarec.data.column_names import check_name
from stratarec.data.data_quality import Leak, find_leak
from stratarec.data.schema import LabelRule
from stratarec.data.sources.parse import lists_from_text
from stratarec.errors import ConfigError, DataError

Role = Literal["label", "weight", "time", "user", "session", "dense", "sparse", "list", "left out"]

_SEPARATORS = ("\x1d", "\x1e", "\x1f", "\x01", "\x02", "|", ";", "\t", "^", "~", ",", " ")
# Numbers of a column that has more distinct ones are amounts, where nothing says that they are names of something; and
# users are more than so many.
_FEW = 50
# Share of values from which a column of times with some other values is one.
_MOSTLY = 0.9
# Of the most frequent values that are looked at, so many rows each at least; see `_is_scattered`.
_OFTEN = 5
_LONG_TEXT = 60
# Share of rows by which an index goes up by one.
_MOSTLY = 0.99
_FEATURES = ("dense", "sparse", "list")
# Share of a sequence's values that are values of the feature that it is of.
_MOST_OF = 0.5
# Several values, or one in quotes, in brackets.
_LIKE_A_LIST = r"""(?s)^\s*[\[({].*[,"':].*[\])}]\s*$"""
_SHOWN = 40


@dataclass(frozen=True, kw_only=True)
class Guess:
    """One column."""

    name: str
    role: Role
    reason: str
    values: int = 0
    """Distinct ones in the whole log, estimated."""
    separator: str = ""
    """Mark that divides a list written as text; empty for lists in brackets."""
    integer: bool = False
    """Whether values that are text in the file are whole numbers."""
    ordered: bool = False
    """Of a sparse feature: whether its values are numbers that may be amounts, few as they are."""
    of: str = ""
    """Of a list that seems to be a sequence of what the user did: the feature whose values are in it."""
    leak: Guess | None = None
    """The feature that it would be, if it did not seem to know the label."""


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """All columns of a log."""

    columns: tuple[Guess, ...]
    label: str | LabelRule
    time: Times | None = None
    """Of the rows that were looked at."""
    split_seconds: int = 0
    """Length of the test split by time, and of validation before it; 0 for a split at random."""
    unlabelled: int = 0
    """Rows whose label is missing."""

    def of(self, role: Role) -> tuple[Guess, ...]:
        """The columns of a role, in their order."""
        return tuple(guess for guess in self.columns if guess.role == role)

    @property
    def item(self) -> Guess | None:
        """The feature whose earlier values may tell what a user likes."""
        named = [guess for guess in self.of("sparse") if tokens(guess.name) & ITEMS]
        return max(named, key=lambda guess: guess.values, default=None)


def guess(sample: LogSample, label: str = "") -> Guesses:
    """Roles of the columns of `sample`; `label` names the label's column where it is known.

    Raises
    ------
    DataError
        Where no column can be the label, or a feature.
    """
    frame, found = sample.frame, {}
    rule, reason = find_label(sample, label)
    name = rule if isinstance(rule, str) else rule.column
    found[name] = Guess(name=name, role="label", reason=reason)
    positive = positives(frame, rule)
    usable = [each for each in frame.columns if each != name and each not in sample.unnamed and _is_name(each)]
    weight = find_weight(frame, usable, positive)
    if weight:
        found[weight[0]] = Guess(name=weight[0], role="weight", reason=weight[1])
    rest = [each for each in frame.columns if each not in found]
    leaks = {each: leak for each in rest if (leak := find_leak(frame[each], positive, name)) is not None}
    free = [each for each in usable if each in rest and not (each in leaks and leaks[each].certain)]
    time = _time(frame, free)
    if time:
        found[time[0]] = Guess(name=time[0], role="time", reason=f"{time[1].how}, {time[1].span}")
    keys: tuple[tuple[Role, Sequence[str]], ...] = (("user", USERS), ("session", SESSIONS))
    for role, words in keys:
        key = _key(frame, [each for each in free if each not in found], words, role)
        if key:
            found[key.name] = key
    for each in rest:
        if each not in found:
            found[each] = _feature(frame[each], sample)
    for each in rest:
        found[each] = _as_names(found[each], frame[each], positive, sample)
    for each in rest:
        found[each] = _as_sequence(found[each], frame, [other for other in rest if found[other].role == "sparse"])
    others = any(
        found[each].role in (*_FEATURES, "user") and not (each in leaks and leaks[each].certain) for each in rest
    )
    for each, leak in leaks.items():
        law = class_weights(frame[each], positive)
        if law and leak.certain:
            leak = replace(leak, text=f"{leak.text} If a weight of samples ({law}), name it as `weight`")
        found[each] = _suspected(found[each], leak, leave_out=others)
    columns = tuple(found[each] for each in frame.columns)
    if not any(each.role in (*_FEATURES, "user") for each in columns):
        raise DataError(
            f"no column can be a feature; beside the label {name!r} there are "
            f"{'; '.join(f'{each.name} ({each.reason})' for each in columns[:20] if each.name != name) or 'none'}"
            f"{sample.incomplete_note}"
        )
    columns += tuple(
        Guess(name=each, role="left out", reason=f"not in every file, such as {path}")
        for each, path in sorted(sample.incomplete.items())
    )
    return Guesses(
        columns=columns,
        label=rule,
        time=time[1] if time else None,
        split_seconds=time[1].split_seconds(whole=sample.whole) if time else 0,
        unlabelled=positive.null_count(),
    )


def _suspected(guess: Guess, leak: Leak, *, leave_out: bool) -> Guess:
    """What is said of a column that seems to know the label; left out where that is certain and there are others."""
    if guess.role in _FEATURES and leak.certain and leave_out:
        return Guess(name=guess.name, role="left out", reason=leak.text, leak=guess)
    if guess.role not in (*_FEATURES, "left out"):
        return guess
    reasons = (leak.text, guess.reason) if leak.certain else (guess.reason, leak.text)
    return replace(guess, reason="; ".join(reasons))


def _time(frame: pl.DataFrame, names: Sequence[str]) -> tuple[str, Times] | None:
    """The column of times: one whose values are, and whose name says so where that leaves a choice."""
    found = [(name, times) for name in names if _may_be_time(name) and (times := as_times(frame[name])) is not None]
    found.sort(key=lambda each: not tokens(each[0]) & TIMES)
    if not found or (len(found) > 1 and not tokens(found[0][0]) & TIMES):
        return None
    return found[0]


def _may_be_time(name: str) -> bool:
    return bool(tokens(name) & TIMES) or not (tokens(name) & BIRTHS or is_code(name))


def _key(frame: pl.DataFrame, names: Sequence[str], words: Sequence[str], role: Role) -> Guess | None:
    """The column that names users or sessions: by its name, where there are many and values repeat."""
    for word in words:
        for name in (name for name in names if names_a(name, word)):
            column = frame[name]
            plain = column.dtype.is_integer() or column.dtype == pl.String
            if plain and not column.null_count() and _FEW < column.n_unique() < len(column):
                rows = len(column) / column.n_unique()
                return Guess(name=name, role=role, reason=f"its name; {rows:.1f} rows each in the sample")
    return None


def _feature(column: pl.Series, sample: LogSample) -> Guess:
    """What a column is that is neither label nor key nor the time."""
    kind = column.dtype
    if column.name in sample.unnamed:
        counts = kind.is_integer() and float((column.diff() == 1).mean() or 0) > _MOSTLY  # type: ignore[arg-type]
        what = "counts the rows, as an index does" if counts else "rename it in the log to use it"
        return _out(column, f"no usable name in the header; {what}")
    if not _is_name(column.name):
        return _out(column, "features cannot have that name")
    if kind.base_type() == pl.List:
        return _list_feature(column, sample)
    if kind.is_decimal():
        return _out(column, "whole numbers of more than 64 bits; write them as text to use them")
    if not (kind.is_numeric() or kind in (pl.String, pl.Boolean, pl.Categorical, pl.Enum)):
        return _out(column, f"{kind}, which is neither a number nor a name of something")
    distinct = column.n_unique() - bool(column.null_count())
    if distinct < 2:
        return _out(column, "one value alone, or none")
    if kind == pl.String or tokens(column.name) & TIMES:
        written, gaps = column.drop_nulls(), column.null_count()
        dates = written.filter(written.str.contains(r"\d")) if kind == pl.String else written
        times = as_times(dates) if len(dates) > _MOSTLY * len(written) else None
        if times:
            odd: pl.Series = written.filter(~written.is_in(dates.implode()))
            fault = f"missing in {gaps:,} rows" if gaps else "a recipe has one time"
            return _out(column, f"{times.how}; " + (f"{odd[0][:_SHOWN]!r} is none" if len(odd) else fault))
    if kind.is_float() and not _is_whole(column):
        return Guess(name=column.name, role="dense", reason=f"numbers with fractions{_missing(column, sample)}")
    if distinct > _FEW and any(names_a(column.name, word) for word in (*SESSIONS, *USERS)):
        return _out(column, "names one visit or visitor by its name, which tells little of others")
    if kind == pl.String:
        return _text_feature(column, sample, distinct)
    if distinct == len(column) and len(column) > _FEW:
        return _out(column, "another value in every row, as a row's own number has")
    return _whole_feature(column, sample, distinct)


def _out(column: pl.Series, reason: str) -> Guess:
    return Guess(name=column.name, role="left out", reason=reason)


def _missing(column: pl.Series, sample: LogSample) -> str:
    """What is said of words that stand for nothing."""
    words = sample.missing.get(column.name)
    return f"; {', '.join(map(repr, words))}: nothing" if words else ""


def _list_feature(column: pl.Series, sample: LogSample) -> Guess:
    inner = column.dtype.inner  # type: ignore[attr-defined]
    if not (inner.is_integer() or inner == pl.String):
        return _out(column, f"lists of {inner}")
    return _of_lists(column, "lists", sample)


def _of_lists(lists: pl.Series, what: str, sample: LogSample, separator: str = "") -> Guess:
    flat, rows = lists.drop_nulls().explode().drop_nulls(), len(lists)
    reason = f"{what}, of {len(flat) / max(rows, 1):.1f} values on average"
    values = growth(flat, rows, sample.total)
    return Guess(name=lists.name, role="list", reason=reason, values=values, separator=separator)


def _whole_feature(column: pl.Series, sample: LogSample, distinct: int) -> Guess:
    """Whole numbers or truth values: amounts, or names of something."""
    kind, values, missing = column.dtype, growth(column, len(column), sample.total), _missing(column, sample)
    code = is_code(column.name)
    if kind.is_numeric() and not code and tokens(column.name) & AMOUNTS:
        return Guess(name=column.name, role="dense", reason=f"a number by its name{missing}")
    reason = f"about {values:,} values"
    if kind.is_numeric() and not code and distinct > _FEW and _is_spread(column, distinct):
        if not _is_scattered(column):
            reason = f"{distinct:,} different numbers, and no name of an id{missing}"
            return Guess(name=column.name, role="dense", reason=reason)
        reason += ", in no order as it seems"
    elif kind.is_numeric() and code and distinct > _FEW:
        reason += ", codes by its name"
    elif kind.is_numeric() and distinct > max(_FEW, len(column) / 2):
        reason = f"{distinct:,} different numbers, most of them once{missing}"
        return Guess(name=column.name, role="dense", reason=reason)
    integer = sample.kind == "csv" and kind != pl.Boolean
    ordered = kind.is_numeric() and not code and 2 < distinct <= _FEW and not tokens(column.name) & ITEMS
    return Guess(
        name=column.name, role="sparse", reason=f"{reason}{missing}", values=values, integer=integer, ordered=ordered
    )


def _as_names(each: Guess, column: pl.Series, positive: pl.Series, sample: LogSample) -> Guess:
    """Whole numbers as ids, where each value tells more of the label than its order does, as students' numbers do."""
    spread = each.role == "dense" and column.dtype.is_integer() and not tokens(each.name) & AMOUNTS
    if not spread or column.n_unique() <= _FEW or not tells_by_value(column, positive):
        return each
    values = growth(column, len(column), sample.total)
    reason = f"about {values:,} values, each of which tells more than its order{_missing(column, sample)}"
    return Guess(name=each.name, role="sparse", reason=reason, values=values, integer=sample.kind == "csv")


def _text_feature(column: pl.Series, sample: LogSample, distinct: int) -> Guess:
    rows = len(column)
    lists, fits = lists_from_text(column, "")
    if fits.mean() == 1:
        return _of_lists(lists, "lists as text", sample)
    odd = column.filter(~fits)
    if odd.str.contains(_LIKE_A_LIST).mean() > 0.5 or fits.mean() > 0.5:  # type: ignore[operator]
        return _out(column, f'lists written as {odd[0][:_SHOWN]!r}; write them as [1, 2] or ["a", "b"] to use them')
    written = amounts(column, sample.options.get("delimiter", ",")) if distinct > _FEW else ""
    if written:
        return _out(column, written)
    separator = _separator(column, distinct)
    if separator:
        parts = lists_from_text(column, separator)[0]
        return _of_lists(parts, f"text in parts, divided by {separator!r}", sample, separator)
    if distinct == rows and rows > _FEW:
        return _out(column, "another value in every row, as a row's own number has")
    length = float(column.str.len_chars().mean() or 0)  # type: ignore[arg-type]
    if length > _LONG_TEXT and distinct > rows / 2:
        return _out(column, f"text of {length:.0f} characters, most of it once: no name of something")
    values = growth(column, rows, sample.total)
    return Guess(name=column.name, role="sparse", reason=f"about {values:,} values", values=values)


def _separator(column: pl.Series, distinct: int) -> str:
    """Return the mark that divides the values into parts, or nothing.

    Parts repeat more often than whole values do, or are whole numbers, more in some rows than in others. A control
    character divides whatever it stands between.
    """
    text = column.drop_nulls()
    for mark in _SEPARATORS:
        many = text.filter(text.str.contains(mark, literal=True))
        sure = not mark.isprintable()
        if len(many) < len(text) / 5 or (distinct < 10 and not sure):
            continue
        lists = lists_from_text(text, mark)[0]
        parts = lists.explode().drop_nulls()
        uneven = lists.list.len().n_unique() > 1
        if sure or parts.n_unique() < distinct or (uneven and parts.str.contains(r"^\d+$").all()):
            return mark
    return ""


def _as_sequence(each: Guess, frame: pl.DataFrame, features: Sequence[str]) -> Guess:
    """A list as a sequence, where its name says that it is of earlier events, and a feature has most of its values."""
    if each.role != "list" or not tokens(each.name) & EARLIER:
        return each
    column = frame[each.name].drop_nulls()
    lists = lists_from_text(column, each.separator)[0] if column.dtype == pl.String else column
    values = lists.explode().drop_nulls().cast(pl.String)
    known = {name: frame[name].cast(pl.String).unique().implode() for name in features}
    shares = {name: values.is_in(there).sum() / max(len(values), 1) for name, there in known.items()}
    name = max(shares, key=lambda name: shares[name], default="")
    if not name or shares[name] < _MOST_OF:
        return each
    reason = f"its name, and values of {name}; expected oldest first"
    return replace(each, of=name, reason=f"{each.reason}; {reason}")


def _is_name(name: str) -> bool:
    try:
        check_name("name", name)
    except ConfigError:
        return False
    return True


def _is_whole(column: pl.Series) -> bool:
    values = column.drop_nulls().drop_nans()
    return bool(((values.round() == values) & (values.abs() < float(1 << 53))).all())


def _is_spread(column: pl.Series, distinct: int) -> bool:
    """Whether numbers fill the room between the least and the most as amounts do, and ids of something do not."""
    values = column.drop_nulls()
    least, most = float(values.min()), float(values.max())  # type: ignore[arg-type]
    return most - least < 20 * distinct and least > -1e9 and most < 1e6


def _is_scattered(column: pl.Series) -> bool:
    """Whether frequent numbers stand among rare ones, as names of things do: the neighbours of a frequent amount are
    frequent, too, unless it is a round one."""
    counts = column.drop_nulls().cast(pl.Int64).alias("value").value_counts(sort=True, name="rows")
    half = int((counts["rows"].cum_sum() * 2 <= len(column)).sum())
    top = counts.head(max(half, _OFTEN)).filter(pl.col("rows") >= _OFTEN)
    if top.height < _OFTEN or (top["value"] % 10).is_in([0, 5, 9]).mean() > 0.6:  # type: ignore[operator]
        return False
    for step, name in ((-1, "before"), (1, "after")):
        near = counts.select(pl.col("value") - step, pl.col("rows").alias(name))
        top = top.join(near, on="value", how="left")
    near_rows = (top["before"].fill_null(0) + top["after"].fill_null(0)) / 2
    return float((near_rows / top["rows"]).median()) < 0.5  # type: ignore[arg-type]
