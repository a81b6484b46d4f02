"""What each column of a log may be for, by its name and its values, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import polars as pl

from stratarec.cli.init.sample import LogSample, growth
from stratarec.data.column_names import check_name
from stratarec.data.schema import LabelRule, TimeUnit
from stratarec.data.sources.parse import read_times
from stratarec.data.splits import Span
from stratarec.errors import ConfigError, DataError

Role = Literal["label", "time", "user", "session", "dense", "sparse", "list", "left out"]

_LABELS = {
    "label", "click", "clicked", "clicks", "target", "y", "converted", "conversion", "purchased", "purchase", "bought",
    "liked", "like", "response", "outcome",
}  # fmt: skip
_RATINGS = {"rating", "ratings", "score", "stars"}
_TIMES = {"time", "timestamp", "ts", "date", "datetime", "when", "created", "at", "hour", "day"}
# The likelier ones first.
_USERS = ("user", "userid", "uid", "customer", "visitor", "member", "client", "reader", "viewer")
_SESSIONS = ("session", "sessionid", "sid", "visit", "search", "query", "slate", "impression", "request")
_ITEMS = {"item", "itemid", "product", "article", "ad", "movie", "song", "track", "video", "hotel", "sku", "news"}
_AMOUNTS = {
    "price", "age", "count", "num", "n", "amount", "qty", "quantity", "duration", "size", "length", "rate", "days",
    "seconds", "hours", "minutes", "views", "distance", "weight", "height", "width", "total", "cost", "bid", "step",
}  # fmt: skip
_EARLIER = {
    "history", "hist", "recent", "recently", "last", "previous", "prev", "past", "earlier", "sequence", "seq", "viewed",
}  # fmt: skip
_SEPARATORS = ("|", ";", ",", " ")
_UNITS: tuple[TimeUnit, ...] = ("s", "ms", "us", "ns")
# Numbers of a column that has more distinct ones are amounts, where nothing says that they are names of something.
_FEW = 50
_LONG_TEXT = 60
# Share of a sequence's values that are values of the feature that it is of.
_MOST_OF = 0.5


@dataclass(frozen=True, kw_only=True)
class Guess:
    """One column."""

    name: str
    role: Role
    reason: str
    values: int = 0
    """Distinct ones in the whole log, estimated."""
    separator: str = ""
    """Of a list that is text."""
    integer: bool = False
    """Whether values that are text in the file are whole numbers."""
    of: str = ""
    """Of a list that seems to be a sequence of what the user did: the feature whose values are in it."""


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """All columns of a log."""

    columns: tuple[Guess, ...]
    label: str | LabelRule
    unit: TimeUnit = "s"
    span: Span | None = None
    """Of the rows that were looked at."""

    def of(self, role: Role) -> tuple[Guess, ...]:
        """The columns of a role, in their order."""
        return tuple(guess for guess in self.columns if guess.role == role)

    @property
    def item(self) -> Guess | None:
        """The feature whose earlier values may tell what a user likes."""
        named = [guess for guess in self.of("sparse") if _tokens(guess.name) & _ITEMS]
        return max(named, key=lambda guess: guess.values, default=None)


def guess(sample: LogSample, label: str = "") -> Guesses:
    """Roles of the columns of `sample`; `label` names the label's column where it is known.

    Raises
    ------
    DataError
        Where no column can be the label.
    """
    frame, found = sample.frame, {}
    rule, reason = _label(frame, label)
    name = rule if isinstance(rule, str) else rule.column
    found[name] = Guess(name=name, role="label", reason=reason)
    rest = [each for each in frame.columns if each != name]
    time = _time(frame, rest)
    unit, span = (time[1], time[2]) if time else ("s", None)
    if time:
        found[time[0].name] = time[0]
    keys: tuple[tuple[Role, Sequence[str]], ...] = (("user", _USERS), ("session", _SESSIONS))
    for role, words in keys:
        key = _key(frame, [each for each in rest if each not in found], words, role)
        if key:
            found[key.name] = key
    for each in rest:
        if each not in found:
            found[each] = _feature(frame[each], sample)
    for each in rest:
        found[each] = _as_sequence(found[each], frame, [other for other in rest if found[other].role == "sparse"])
    columns = tuple(found[each] for each in frame.columns)
    if not any(each.role in ("dense", "sparse", "list") for each in columns):
        raise DataError(
            f"no column can be a feature; beside the label {name!r} there are {', '.join(rest[:20]) or 'none'}"
        )
    return Guesses(columns=columns, label=rule, unit=unit, span=span)  # type: ignore[arg-type]


def _tokens(name: str) -> set[str]:
    """Words of a name: click_articleId is click, article, id, and articleid."""
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
    return {part.lower() for part in parts} | {name.lower()}


def _label(frame: pl.DataFrame, wanted: str) -> tuple[str | LabelRule, str]:
    if wanted:
        if wanted not in frame.columns:
            raise DataError(f"--label is {wanted!r}, which is no column; the log has {', '.join(frame.columns[:20])}")
        if _is_binary(frame[wanted]):
            return wanted, "named by --label"
        return _rule(frame[wanted], "named by --label")
    binary = [name for name in frame.columns if _is_binary(frame[name])]
    named = [name for name in binary if _tokens(name) & _LABELS]
    rated = [name for name in frame.columns if _tokens(name) & _RATINGS and frame[name].dtype.is_numeric()]
    if named:
        return named[0], "its name, and 0 and 1 alone in it"
    if rated:
        return _rule(frame[rated[0]], "its name")
    if len(binary) == 1:
        return binary[0], "the only column of 0 and 1"
    which = f"several columns are 0 and 1 ({', '.join(binary[:6])})" if binary else "no column is 0 and 1"
    raise DataError(
        f"no label is found: {which}, and none is called label, click, rating or the like; name it by --label COLUMN "
        "(a log of clicks alone is read by `kind: clicks`: stratarec init --recipe globo)"
    )


def _rule(column: pl.Series, reason: str) -> tuple[LabelRule, str]:
    """A threshold that leaves both classes, as near to the upper third of the scale as there is one."""
    if not column.dtype.is_numeric():
        raise DataError(f"--label is {column.name!r}, which is {column.dtype}, expected 0 and 1, or numbers to compare")
    values = column.drop_nulls().cast(pl.Float64).drop_nans().unique().sort()
    if len(values) < 2:
        raise DataError(f"--label is {column.name!r}, which has one value alone, expected two or more")
    least, most = float(values[0]), float(values[-1])
    above = values.filter(values >= least + 0.7 * (most - least))
    threshold = float(above[0])
    place = int(threshold) if threshold == int(threshold) else threshold
    return LabelRule(
        column=column.name, at_least=place
    ), f"{reason}; {place:g} is in the upper third of {least:g} to {most:g}"


def _is_binary(column: pl.Series) -> bool:
    if column.null_count():
        return False
    if column.dtype == pl.Boolean:
        return True
    return column.dtype.is_numeric() and column.n_unique() == 2 and set(column.unique().to_list()) == {0, 1}


def _time(frame: pl.DataFrame, names: Sequence[str]) -> tuple[Guess, TimeUnit, Span] | None:
    """The column of times: one whose values are, and whose name says so where that leaves a choice."""
    found = [(name, *times) for name in names if (times := _as_times(frame[name])) is not None]
    found.sort(key=lambda each: not _tokens(each[0]) & _TIMES)
    if not found:
        return None
    name, unit, span, how = found[0]
    if len(found) > 1 and not _tokens(name) & _TIMES:
        return None
    return Guess(name=name, role="time", reason=f"{how}, {span}"), unit, span


def _as_times(column: pl.Series) -> tuple[TimeUnit, Span, str] | None:
    """Unit and span of a column whose values are times between 1990 and 2100."""
    kind = column.dtype
    if column.null_count() or not (
        kind.is_integer() or kind in (pl.String, pl.Date) or kind.base_type() == pl.Datetime
    ):
        return None
    for unit in _UNITS:
        read = read_times(column, unit)
        if read is None or read[0].null_count():
            return None
        value, fault = read
        span = Span(first=int(value.min()), last=int(value.max()), unit=unit)  # type: ignore[arg-type]
        if not fault and "UTC" in str(span) and span.last > span.first:
            how = (
                f"integers in {unit} since 1970"
                if kind.is_integer()
                else "dates as text"
                if kind == pl.String
                else "timestamps"
            )
            return unit, span, how
    return None


def _key(frame: pl.DataFrame, names: Sequence[str], words: Sequence[str], role: Role) -> Guess | None:
    """The column that names users or sessions: by its name, where values repeat."""
    for word in words:
        for name in (name for name in names if word in _tokens(name)):
            column = frame[name]
            plain = column.dtype.is_integer() or column.dtype == pl.String
            if plain and not column.null_count() and 1 < column.n_unique() < len(column):
                rows = len(column) / column.n_unique()
                return Guess(name=name, role=role, reason=f"its name; {rows:.1f} rows each in the sample")
    return None


def _feature(column: pl.Series, sample: LogSample) -> Guess:
    rows, total = len(column), sample.total
    kind = column.dtype

    def made(role: Role, reason: str, **more: object) -> Guess:
        return Guess(name=column.name, role=role, reason=reason, **more)  # type: ignore[arg-type]

    if not _is_name(column.name):
        return made("left out", "features cannot have that name")
    if kind.base_type() == pl.List:
        inner = kind.inner  # type: ignore[attr-defined]
        if inner.is_integer() or inner == pl.String:
            flat = column.drop_nulls().explode().drop_nulls()
            return made(
                "list", f"lists, of {len(flat) / max(rows, 1):.1f} values on average", values=growth(flat, rows, total)
            )
        return made("left out", f"lists of {inner}")
    if not (kind.is_numeric() or kind in (pl.String, pl.Boolean, pl.Categorical, pl.Enum)):
        return made("left out", f"{kind}, which is neither a number nor a name of something")
    distinct = column.n_unique() - bool(column.null_count())
    if distinct < 2:
        return made("left out", "one value alone, or none")
    if kind.is_float() and not _is_whole(column):
        return made("dense", "numbers with fractions")
    if _tokens(column.name) & {*_SESSIONS, *_USERS} and distinct > _FEW:
        return made("left out", "names one visit or visitor by its name, which tells little of others")
    if kind == pl.String:
        return _text_feature(column, sample, distinct, made)
    if distinct == rows and rows > _FEW:
        return made("left out", "another value in every row, as a row's own number has")
    values, amount = growth(column, rows, total), bool(_tokens(column.name) & _AMOUNTS)
    if kind.is_numeric() and amount:
        return made("dense", "a number by its name")
    named = bool(_tokens(column.name) & {"id", *_ITEMS})
    if kind.is_numeric() and distinct > _FEW and not named and _is_spread(column, distinct):
        return made("dense", f"{distinct:,} different numbers, and no name of an id")
    return made(
        "sparse", f"about {values:,} values", values=values, integer=sample.kind == "csv" and kind != pl.Boolean
    )


def _text_feature(column: pl.Series, sample: LogSample, distinct: int, made: Callable[..., Guess]) -> Guess:
    rows = len(column)
    separator = _separator(column, distinct)
    if separator:
        flat = column.drop_nulls().str.split(separator).explode()
        return made(
            "list",
            f"text in parts, divided by {separator!r}",
            values=growth(flat, rows, sample.total),
            separator=separator,
        )
    if distinct == rows and rows > _FEW:
        return made("left out", "another value in every row, as a row's own number has")
    length = float(column.str.len_chars().mean() or 0)  # type: ignore[arg-type]
    if length > _LONG_TEXT and distinct > rows / 2:
        return made("left out", f"text of {length:.0f} characters, most of it once: no name of something")
    values = growth(column, rows, sample.total)
    return made("sparse", f"about {values:,} values", values=values)


def _separator(column: pl.Series, distinct: int) -> str:
    """The mark at which values fall into parts that repeat; empty where there is none."""
    text = column.drop_nulls()
    for mark in _SEPARATORS:
        many = text.filter(text.str.contains(mark, literal=True))
        if len(many) < len(text) / 5 or distinct < 10:
            continue
        parts = text.str.split(mark).explode()
        if parts.n_unique() < distinct:
            return mark
    return ""


def _as_sequence(each: Guess, frame: pl.DataFrame, features: Sequence[str]) -> Guess:
    """A list as a sequence, where its name says that it is of earlier events, and a feature has most of its values."""
    if each.role != "list" or not _tokens(each.name) & _EARLIER:
        return each
    column = frame[each.name].drop_nulls()
    lists = column.str.split(each.separator) if each.separator else column
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


def lines(guesses: Guesses) -> Iterator[tuple[str, str, str]]:
    """Name, role and reason of each column."""
    for each in guesses.columns:
        yield each.name, each.role, each.reason
