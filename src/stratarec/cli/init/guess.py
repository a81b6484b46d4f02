"""Guess the role of each column of a log from its name and its values, and give the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import polars as pl

from stratarec.cli.init.date_columns import DateChoice
from stratarec.cli.init.features import FEW, Guess, Role, as_ids, as_sequence, guess_feature, is_name
from stratarec.cli.init.label import class_weights, find_label, find_weight, positives
from stratarec.cli.init.numbers import is_whole
from stratarec.cli.init.sample import LogSample
from stratarec.cli.init.times import Times, as_times
from stratarec.cli.init.words import BIRTHS, SESSIONS, TIMES, USERS, is_code, names_a, tokens
from stratarec.data.data_quality import Leak, find_leak
from stratarec.data.schema import LabelRule
from stratarec.errors import DataError

_FEATURES = ("dense", "sparse", "list")


class HistoryChoice(NamedTuple):
    """Whether a drafted recipe has a history of each user, and why."""

    of: str
    """Name of the feature whose earlier values the history contains."""
    drafted: bool
    reason: str

    @property
    def name(self) -> str:
        """Name of the history."""
        return f"{self.of}_history"


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """Guessed roles of all columns of a log."""

    columns: tuple[Guess, ...]
    label: str | LabelRule
    time: Times | None = None
    """Times of the sampled rows."""
    split_seconds: int = 0
    """Length of the test split by time, and of the validation split before it; 0 for a random split."""
    unlabelled: int = 0
    """Number of sampled rows without a label."""
    dates: tuple[DateChoice, ...] = ()
    """Features that are computed from dates."""
    date_categories: tuple[str, ...] = ()
    """Names of those features of dates that are categories."""
    history: HistoryChoice | None = None
    """Whether the recipe has a history of each user; None if the log has no users, times or items."""

    def of(self, role: Role) -> tuple[Guess, ...]:
        """Return the columns with a role, in the order of the log."""
        return tuple(guess for guess in self.columns if guess.role == role)


def guess(sample: LogSample, label: str = "") -> Guesses:
    """Guess the roles of the columns of `sample`; `label` names the label column if it is known.

    Raises
    ------
    DataError
        If no column can be the label, or a feature.
    """
    frame = sample.frame
    rule, reason = find_label(sample, label)
    name = rule if isinstance(rule, str) else rule.column
    guesses = {name: Guess(name=name, role="label", reason=reason)}
    positive = positives(frame, rule)
    if name in sample.written:
        raise DataError(
            f"the label {name!r} has numbers written as {sample.written[name].example!r}; a label must be plain "
            "numbers such as 1234.5: convert the column in the log"
        )
    excluded = {name, *sample.unnamed, *sample.written}
    usable = [column for column in frame.columns if column not in excluded and is_name(column)]
    weight = find_weight(frame, usable, positive)
    if weight:
        guesses[weight[0]] = Guess(name=weight[0], role="weight", reason=weight[1])
    others = [column for column in frame.columns if column not in guesses]
    leaks = {column: leak for column in others if (leak := find_leak(frame[column], positive, name)) is not None}
    candidates = [column for column in usable if column in others and not (column in leaks and leaks[column].certain)]
    time = _find_time(frame, candidates)
    if time:
        guesses[time[0]] = Guess(name=time[0], role="time", reason=f"{time[1].how}, {time[1].span}")
    keys: tuple[tuple[Role, Sequence[str]], ...] = (("user", USERS), ("session", SESSIONS))
    for role, words in keys:
        key = _find_key(frame, [column for column in candidates if column not in guesses], words, role)
        if key:
            guesses[key.name] = key
    for column in others:
        if column not in guesses:
            guesses[column] = guess_feature(frame[column], sample)
    for column in others:
        guesses[column] = as_ids(guesses[column], frame[column], positive, sample)
    for column in others:
        features = [other for other in others if guesses[other].role == "sparse"]
        guesses[column] = as_sequence(guesses[column], frame, features)
    has_features = any(
        guesses[column].role in (*_FEATURES, "user") and not (column in leaks and leaks[column].certain)
        for column in others
    )
    for column, leak in leaks.items():
        law = class_weights(frame[column], positive)
        if law and leak.certain:
            leak = replace(leak, text=f"{leak.text} If it is the sample weight ({law}), name it as `weight`")
        guesses[column] = _with_leak(guesses[column], leak, ignore=has_features)
    columns = tuple(guesses[column] for column in frame.columns)
    if not any(column.role in (*_FEATURES, "user") for column in columns):
        unusable = "; ".join(f"{column.name} ({column.reason})" for column in columns[:20] if column.name != name)
        raise DataError(
            f"no column can be a feature; other columns than the label {name!r}: {unusable or 'none'}"
            f"{sample.incomplete_note}"
        )
    columns += tuple(
        Guess(name=column, role="ignored", reason=f"missing in some files, such as {path}")
        for column, path in sorted(sample.incomplete.items())
    )
    return Guesses(
        columns=columns,
        label=rule,
        time=time[1] if time else None,
        split_seconds=time[1].split_seconds(is_complete=sample.is_complete) if time else 0,
        unlabelled=positive.null_count(),
    )


def _with_leak(guess: Guess, leak: Leak, *, ignore: bool) -> Guess:
    """Add a suspected leak to the reason of a column. If the leak is certain and `ignore` is set, drop the column."""
    if guess.role in (*_FEATURES, "date") and leak.certain and ignore:
        return Guess(name=guess.name, role="ignored", reason=leak.text, leak=guess)
    if guess.role not in (*_FEATURES, "ignored"):
        return guess
    reasons = (leak.text, guess.reason) if leak.certain else (guess.reason, leak.text)
    return replace(guess, reason="; ".join(reasons))


def _find_time(frame: pl.DataFrame, names: Sequence[str]) -> tuple[str, Times] | None:
    """Return the column of times: the first one that is named like times, or the only column with times."""
    columns = [(name, times) for name in names if _may_be_time(name) and (times := as_times(frame[name])) is not None]
    columns.sort(key=lambda column: not tokens(column[0]) & TIMES)
    if not columns or (len(columns) > 1 and not tokens(columns[0][0]) & TIMES):
        return None
    return columns[0]


def _may_be_time(name: str) -> bool:
    return bool(tokens(name) & TIMES) or not (tokens(name) & BIRTHS or is_code(name))


def _find_key(frame: pl.DataFrame, names: Sequence[str], words: Sequence[str], role: Role) -> Guess | None:
    """Return the column of users or sessions: its name has one of `words`, and it has many values that repeat."""
    for word in words:
        for name in (name for name in names if names_a(name, word)):
            column = frame[name]
            is_plain = (
                column.dtype.is_integer() or column.dtype == pl.String or (column.dtype.is_float() and is_whole(column))
            )
            if is_plain and not column.null_count() and FEW < column.n_unique() < len(column):
                rows = len(column) / column.n_unique()
                return Guess(name=name, role=role, reason=f"its name; {rows:.1f} rows each in the sample")
    return None
