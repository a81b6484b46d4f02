"""Guess the role of each column of a log from its name and its values, and give the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import polars as pl

from stratarec.cli.init.date_columns import DateChoice
from stratarec.cli.init.events import (
    advise_user,
    date_parts,
    does_not_return,
    find_session,
    find_time,
    find_user,
    other_times,
    returns,
)
from stratarec.cli.init.features import Guess, Role, as_ids, as_sequence, guess_feature, is_name
from stratarec.cli.init.label import class_weights, find_label, find_weight, is_binary, positives
from stratarec.cli.init.sample import LogSample
from stratarec.cli.init.split_column import SplitColumn, find_folds, find_splits
from stratarec.cli.init.times import Times
from stratarec.cli.init.words import ITEMS, names_a, tokens
from stratarec.data.data_quality import Leak, find_leak
from stratarec.data.schema import LabelRule
from stratarec.errors import DataError
from stratarec.io.names import shell_word

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
    split_seconds: tuple[int, int] = (0, 0)
    """Lengths of the validation split by time and of the test split after it; both are 0 for a
    random split.
    """
    split: SplitColumn | None = None
    """Column with the split of each row; None if the log has none."""
    bad_rows: str = ""
    """Text about sampled rows that `prepare` cannot read; empty if there are none."""
    dates: tuple[DateChoice, ...] = ()
    """Features that are computed from dates."""
    date_categories: tuple[str, ...] = ()
    """Names of those features of dates that are categories."""
    history: HistoryChoice | None = None
    """Whether the recipe has a history of each user; None if the log has no users, times or
    items.
    """
    users_return: bool = False
    """Whether the log is not split by time, and many users of its later rows are also in earlier
    rows. If a column names the splits: whether many users of rows that are not for training are in
    training rows, too."""

    @property
    def is_split_by_time(self) -> bool:
        """Whether validation and test are the last periods of the log."""
        return all(self.split_seconds)

    @property
    def known_users(self) -> tuple[Guess, ...]:
        """The user column, if many tested users were seen in training; else empty, because their
        ids have no learned rows.
        """
        return self.of("user") if self.is_split_by_time or self.users_return else ()

    @property
    def item(self) -> Guess | None:
        """Feature with the item of a row. Of several categories with a name for items, the one with
        the most values.
        """
        return find_item(self.columns)

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
            f"the label {name!r} has numbers written as {sample.written[name].example!r}; a label must be "
            "plain numbers such as 1234.5: convert the column in the log"
        )
    excluded = {name, *sample.unnamed, *sample.written}
    usable = [column for column in frame.columns if column not in excluded and is_name(column)]
    weight = find_weight(frame, usable, positive)
    if weight:
        guesses[weight[0]] = Guess(name=weight[0], role="weight", reason=weight[1])
    others = [column for column in frame.columns if column not in guesses]
    leaks = {
        column: leak for column in others if (leak := find_leak(frame[column], positive, name)) is not None
    }
    candidates = [
        column for column in usable if column in others and not (column in leaks and leaks[column].certain)
    ]
    user = find_user(frame, candidates)
    time = find_time(frame, [column for column in candidates if user is None or column != user.name], user)
    guesses |= {key.name: key for key in (user, time.guess) if key is not None}
    splits = find_splits(
        frame, [column for column in candidates if column not in guesses], positive, time.times
    )
    split = next((each for each in splits if not each.missing), None)
    for each in splits:
        why = f"{each.missing:,} sampled rows have no value: fill them to split by it"
        if split is not None:
            why = f"{split.name!r} names more splits, or is the first such column; to use this one, set data.split"
        role: Role = "split" if each is split else "ignored"
        reason = each.reason if each is split else f"{each.reason}; {why}"
        guesses[each.name] = Guess(name=each.name, role=role, reason=reason)
    folds = find_folds(frame, [column for column in candidates if column not in guesses])
    guesses |= {
        column: Guess(name=column, role="ignored", reason=reason) for column, reason in folds.items()
    }
    session = find_session(frame, [column for column in candidates if column not in guesses], time.times)
    if session is not None:
        guesses[session.name] = session
    for column in others:
        if column in guesses:
            continue
        reason = time.others.get(column, "") if column in candidates else other_times(frame[column])
        feature = guess_feature(frame[column], sample)
        reason = reason or does_not_return(feature, frame, time.times)
        if feature.role == "date":
            feature = replace(feature, reason=reason or feature.reason)
        elif reason:
            feature = Guess(name=column, role="ignored", reason=reason)
        guesses[column] = feature
    for column in others:
        guesses[column] = as_ids(guesses[column], frame[column], positive, sample)
    for column in others:
        features = [other for other in others if guesses[other].role == "sparse"]
        guesses[column] = as_sequence(guesses[column], frame, features)
    if time.times is None and (parts := date_parts(frame, others)):
        year, month, day = parts
        advice = (
            f"a date with {year!r} and {month!r}: write the three as one column, such as 2024-05-31, and "
            "`init` splits by time"
        )
        guesses[day] = replace(guesses[day], reason=f"{guesses[day].reason}; {advice}")
    if positive.null_count():
        for column in [column for column in others if guesses[column].role in _FEATURES]:
            reason = _known_with_label(frame[column], positive.is_not_null(), name)
            if reason:
                guesses[column] = Guess(name=column, role="ignored", reason=reason)
    if user is None:
        item = find_item(list(guesses.values()))
        for column, advice in advise_user(guesses, frame, item.name if item else "").items():
            guesses[column] = replace(guesses[column], reason=f"{guesses[column].reason}; {advice}")
    has_features = any(
        guesses[column].role in (*_FEATURES, "user") and not (column in leaks and leaks[column].certain)
        for column in others
    )
    for column, leak in leaks.items():
        law = class_weights(frame[column], positive)
        if law and leak.certain:
            leak = replace(
                leak, text=f"{leak.text} If it is the sample weight ({law}), name it as `weight`"
            )
        guesses[column] = _with_leak(guesses[column], leak, ignore=has_features)
    stages = [column for column, leak in leaks.items() if leak.is_stage and is_binary(frame[column])]
    if stages and not label:
        advice = f"for an earlier stage use --label {shell_word(stages[0])}"
        guesses[name] = replace(guesses[name], reason=f"{guesses[name].reason}; {advice}")
    bad = {"label": positive.null_count(), "time": time.times.unread if time.times else 0}
    columns = tuple(guesses[column] for column in frame.columns)
    if not any(column.role in (*_FEATURES, "user") for column in columns):
        unusable = "; ".join(
            f"{column.name} ({column.reason})" for column in columns[:20] if column.name != name
        )
        raise DataError(
            f"no column can be a feature; other columns than the label {name!r}: {unusable or 'none'}"
            f"{sample.incomplete_note}"
        )
    columns += tuple(
        Guess(name=column, role="ignored", reason=f"missing in some files, such as {path}")
        for column, path in sorted(sample.incomplete.items())
    )
    lengths = (0, 0)
    if time.times is not None and split is None:
        lengths = time.times.split_seconds(is_complete=sample.is_complete)
    return Guesses(
        columns=columns,
        label=rule,
        time=time.times,
        split_seconds=lengths,
        split=split,
        users_return=(
            user is not None
            and session is None
            and not all(lengths)
            and returns(frame, user.name, time.times, None if split is None else split.held_out)
        ),
        bad_rows=", ".join(
            [
                *(f"sampled rows without a {what}: {count:,}" for what, count in bad.items() if count),
                *(f"lines {what}: {count:,}" for what, count in sample.skipped_lines.items()),
            ]
        ),
    )


def _known_with_label(column: pl.Series, known: pl.Series, label: str) -> str:
    """Return why a column is no feature of a log in which some rows have no label; empty if it may
    be one.
    """
    if column.filter(known).drop_nulls().n_unique() < 2:
        return f"a single value, or none, in rows with a value of {label}"
    if (column.is_not_null() == known).all():
        return f"filled only in rows with a value of {label}: known only afterwards?"
    return ""


def find_item(guesses: Sequence[Guess]) -> Guess | None:
    """Return the category whose name is an id of items; else the one with the most values that has
    such a word.
    """
    items = [guess for guess in guesses if guess.role == "sparse" and tokens(guess.name) & {*ITEMS}]
    ids = [guess for word in ITEMS for guess in items if names_a(guess.name, word)]
    return ids[0] if ids else max(items, key=lambda guess: guess.values, default=None)


def _with_leak(guess: Guess, leak: Leak, *, ignore: bool) -> Guess:
    """Add a suspected leak to the reason of a column. If the leak is certain and `ignore` is set,
    drop the column.
    """
    if guess.role in (*_FEATURES, "date") and leak.certain and ignore:
        return Guess(name=guess.name, role="ignored", reason=leak.text, leak=guess)
    if guess.role not in (*_FEATURES, "ignored"):
        return guess
    reasons = (leak.text, guess.reason) if leak.certain else (guess.reason, leak.text)
    return replace(guess, reason="; ".join(reasons))
