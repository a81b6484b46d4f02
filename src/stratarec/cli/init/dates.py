"""Choose the features that a drafted recipe computes from dates: by the span of the dates, and by
validation.

The rule proposes groups of features whose values repeat in later data. LightGBM is fitted on the
sampled rows with and without each group, as the recipe will split them. A group is kept if it
lowers the log loss of held-out rows by more than chance. If the sample is not the whole log, its
times are those of the beginning and the end, so that nothing can be tested; the hour and the
weekday of the event are then kept. `docs/log.md` has the measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.cli.init.date_columns import DateChoice, Dates, dates_of_time
from stratarec.cli.init.features import Guess
from stratarec.cli.init.guess import Guesses
from stratarec.cli.init.sample import LogSample
from stratarec.data.columns.dates import NO_DATE, Seconds, compute_dates
from stratarec.data.schema import DateColumn, DatePart

Floats: TypeAlias = NDArray[np.float64]
_DAY = 86_400
# Minimum spans in days: for weekdays, and for days and months with a random split and with a split
# by time.
_WEEKS, _MONTHS, _YEARS = 14, 62, 730
# A column is known only afterwards if more than this share of its dates is after the event.
_AFTER = 0.01
# Number of standard errors and share by which a group must lower the log loss, and fewest rows of a
# class for a test.
_ERRORS, _LEAST_GAIN, _MIN_CLASS_ROWS = 2.0, 0.001, 50
# Maximum number of rows and of columns of dates that are tested, which takes a few seconds.
_MOST_ROWS, _MOST_COLUMNS = 50_000, 5
_FOLDS = 3
_ROUNDS = 200
_PATIENCE = 20
_MOST_CODES = 255
_SETTINGS = {"objective": "binary", "learning_rate": 0.1, "num_threads": 1, "verbosity": -1, "seed": 0}


def choose_dates(guesses: Guesses, sample: LogSample, positive: pl.Series) -> Guesses:
    """Return the guesses with the chosen features of dates. A column of dates without features is
    ignored.

    Parameters
    ----------
    positive : Series
        Booleans of the label, null where it is missing.
    """
    dates = {guess.name: guess.dates for guess in guesses.columns if guess.dates is not None}
    times = [guess.name for guess in guesses.of("time")]
    if times and guesses.time is not None:
        dates = {times[0]: dates_of_time(sample.frame[times[0]], guesses.time), **dates}
    seconds = {name: dates[name].seconds(sample.frame[name]) for name in list(dates)[:_MOST_COLUMNS]}
    event, choices, leaks = times[0] if times else "", list[DateChoice](), dict[str, str]()
    for name in seconds:
        share = 0.0 if not event or name == event else _share_after(seconds[name], seconds[event])
        if share > _AFTER:
            leaks[name] = f"{share:.0%} of its dates are after {event}: known only afterwards?"
    usable = {name: dates[name] for name in seconds if name not in leaks}
    if usable:
        choices = list(_choices(guesses, sample, positive, usable, seconds))
    accepted = {
        choice.column.name: choice for choice in choices if choice.column.parts or choice.column.since
    }
    for name in {other for choice in accepted.values() for other in choice.column.since} - {
        event,
        *accepted,
    }:
        column = DateColumn(name=name, time_unit=dates[name].unit, time_format=dates[name].form)
        accepted[name] = DateChoice(column=column, reason="another column counts days from it")
    reasons = {**{choice.column.name: choice.reason for choice in choices}, **leaks}
    columns = tuple(
        _with_reason(
            guess, reasons.get(guess.name, ""), is_kept=guess.name in accepted, is_leak=guess.name in leaks
        )
        for guess in guesses.columns
    )
    return replace(
        guesses, columns=columns, dates=tuple(accepted[name] for name in seconds if name in accepted)
    )


def _with_reason(guess: Guess, reason: str, *, is_kept: bool, is_leak: bool) -> Guess:
    if guess.role not in ("time", "date") or (guess.role == "time" and is_kept):
        return guess
    reason = "; ".join(filter(None, (guess.reason, reason)))
    if guess.role == "time" or is_kept:
        return replace(guess, reason=reason)
    return Guess(name=guess.name, role="ignored", reason=reason, leak=guess if is_leak else None)


def _share_after(dates: Seconds, event: Seconds) -> float:
    """Return the share of dates after the event. Dates without a time of day are compared by
    day.
    """
    is_set = (dates != NO_DATE) & (event != NO_DATE)
    dates, event = dates[is_set], event[is_set]
    if not (dates % _DAY).any():
        event = event // _DAY * _DAY
    return float((dates > event).mean()) if len(dates) else 0.0


def _choices(
    guesses: Guesses,
    sample: LogSample,
    positive: pl.Series,
    dates: Mapping[str, Dates],
    seconds: Mapping[str, Seconds],
) -> Iterator[DateChoice]:
    """Yield the choice for each column of dates; a group is tested together with the groups that
    were kept before.
    """
    event = next((guess.name for guess in guesses.of("time")), "")
    test = _Test.make(guesses, sample, positive, seconds.get(event))
    for name, about in dates.items():
        is_event = name == event
        column = DateColumn(
            name=name,
            zone=about.zone,
            time_unit="s" if is_event else about.unit,
            time_format="" if is_event else about.form,
        )
        reasons = []
        others = (
            [event]
            if event and not is_event
            else [other for other in dates if other != name][:1]
            if not event
            else []
        )
        for parts, since in _groups(seconds[name], others, by_time=guesses.is_split_by_time):
            wider = replace(column, parts=(*column.parts, *parts), since=since or column.since)
            added = [*(f"{part}" for part in parts), *(f"days since {other}" for other in since)]
            if test is None:
                is_clock = bool(parts) and set(parts) <= {"hour", "weekday"}
                if is_event and is_clock and not sample.is_complete:
                    column = wider
                    reasons.append(
                        f"{' and '.join(added)}, not tested, because the sample is a part of the log"
                    )
                continue
            before, after, is_better = test.compare(
                _numbers(replace(wider, parts=parts, since=since), seconds)
            )
            if is_better:
                column = wider
            verb = "gives" if len(added) == 1 else "give"
            reasons.append(
                f"{' and '.join(added)} {verb} LightGBM a log loss of {after:.4f} instead of {before:.4f}"
            )
        if reasons:
            yield DateChoice(column=column, reason="; ".join(reasons))


def _groups(
    dates: Seconds, others: Sequence[str], *, by_time: bool
) -> Iterator[tuple[tuple[DatePart, ...], tuple[str, ...]]]:
    """Yield groups of parts, and other columns to count days from, whose values repeat in later
    data.
    """
    seconds = dates[dates != NO_DATE]
    if not len(seconds) or seconds.min() == seconds.max():
        return
    span = (seconds.max() - seconds.min()) / _DAY
    if others:
        yield (), tuple(others)
    clock: tuple[DatePart, ...] = ("hour",) if len(np.unique(seconds % _DAY // 3600)) > 1 else ()
    clock += ("weekday",) if span >= _WEEKS else ()
    if clock:
        yield clock, ()
    # With a split by time, validation rewards the effect of the month right before it, which says
    # nothing about other months unless training spans years.
    if span >= (_YEARS if by_time else _MONTHS):
        yield ("day", "month"), ()
    if not by_time and span >= 1:
        yield ("days",), ()


def _numbers(column: DateColumn, seconds: Mapping[str, Seconds]) -> Floats:
    """Return the features of one column of dates, ``[N, F]``."""
    return np.stack(list(compute_dates([column], seconds).values()), axis=1)


class _Test:
    """Comparison of LightGBM's losses with and without some columns.

    Parameters
    ----------
    columns : ndarray
        ``[N, F]`` numbers and codes of all features.
    label : ndarray
        ``[N]`` 0 or 1.
    rows : ndarray
        ``[N]`` indexes of these rows in the sample.
    folds : sequence of (ndarray, ndarray)
        Flags of training and held-out rows.
    groups : ndarray
        ``[N]`` rows with equal numbers, such as those of a user, are not independent.
    """

    def __init__(
        self,
        columns: Floats,
        label: Floats,
        rows: NDArray[np.int64],
        folds: Sequence[tuple[Any, Any]],
        groups: NDArray[np.int64],
    ) -> None:
        self._columns = columns
        self._label = label
        self._rows = rows
        self._folds = folds
        self._groups = groups
        self._losses = self._fit(columns)

    @classmethod
    def make(
        cls, guesses: Guesses, sample: LogSample, positive: pl.Series, event: Seconds | None
    ) -> _Test | None:
        """Return a test on the rows of the sample; None if it is not the whole log, or has too few
        rows of a class, or LightGBM cannot be imported.
        """
        if not sample.is_complete or not _has_lightgbm():
            return None
        draws = np.random.default_rng(0)
        rows = np.flatnonzero(positive.is_not_null().to_numpy())
        if len(rows) > _MOST_ROWS:
            rows = np.sort(draws.choice(rows, _MOST_ROWS, replace=False))
        label = positive.gather(rows).cast(pl.Float64).to_numpy()
        key = next((guess.name for role in ("user", "session") for guess in guesses.of(role)), "")
        groups = (
            np.arange(len(rows))
            if not key
            else sample.frame[key].gather(rows).rank("dense").to_numpy().astype(np.int64)
        )
        if guesses.is_split_by_time and event is not None:
            times, (valid, test) = event[rows], guesses.split_seconds
            last = times.max() - test
            first = last - valid
            folds = [(times <= first, (times > first) & (times <= last))]
            groups = groups if key else times // 3600
        else:
            drawn = np.arange(len(rows)) if guesses.users_return else groups
            fold = draws.integers(0, _FOLDS, drawn.max() + 1)[drawn]
            folds = [(fold != number, fold == number) for number in range(_FOLDS)]
        if any(
            min(label[part].sum(), (1 - label[part]).sum()) < _MIN_CLASS_ROWS
            for fold in folds
            for part in fold
        ):
            return None
        columns = [
            _codes(sample.frame[guess.name].gather(rows), guess)
            for guess in guesses.columns
            if guess.role in ("dense", "sparse")
        ]
        return cls(
            np.stack(columns, axis=1) if columns else np.zeros((len(rows), 0)), label, rows, folds, groups
        )

    def compare(self, added: Floats) -> tuple[float, float, bool]:
        """Return the log loss without and with the columns `added`, and whether they lower it by
        more than chance.

        If so, the columns are part of later comparisons.
        """
        columns = np.concatenate([self._columns, added[self._rows]], axis=1)
        losses, before = self._fit(columns), self._losses
        held_out = np.logical_or.reduce([part for _, part in self._folds])
        gain = np.bincount(self._groups[held_out], (before - losses)[held_out])
        least = max(_ERRORS * np.sqrt((gain**2).sum()), _LEAST_GAIN * before[held_out].sum())
        is_better = bool(gain.sum() > least)
        if is_better:
            self._columns = columns
            self._losses = losses
        return float(before[held_out].mean()), float(losses[held_out].mean()), is_better

    def _fit(self, columns: Floats) -> Floats:
        """Return the log loss of each held-out row."""
        import lightgbm

        losses = np.zeros(len(self._label))
        for train, valid in self._folds:
            rate = self._label[train].mean()
            scores = np.full(int(valid.sum()), np.log(rate / (1 - rate)))
            if columns.shape[1]:
                data = lightgbm.Dataset(columns[train], self._label[train])
                held_out = lightgbm.Dataset(columns[valid], self._label[valid], reference=data)
                stopping = lightgbm.early_stopping(_PATIENCE, verbose=False)
                model = lightgbm.train(
                    _SETTINGS, data, _ROUNDS, valid_sets=[held_out], callbacks=[stopping]
                )
                scores = np.asarray(model.predict(columns[valid], raw_score=True))
            losses[valid] = np.logaddexp(0, np.where(self._label[valid] > 0, -scores, scores))
        return losses


def _has_lightgbm() -> bool:
    try:
        import lightgbm  # noqa: F401
    except (ImportError, OSError):  # OSError: the system lacks OpenMP
        return False
    return True


def _codes(column: pl.Series, guess: Guess) -> Floats:
    """Return a number, or the rank of a category by frequency; NaN for a missing value and a rare
    category.
    """
    if guess.role == "dense":
        return column.cast(pl.Float64, strict=False).to_numpy()
    counts = column.drop_nulls().value_counts(sort=True).head(_MOST_CODES)[column.name]
    return column.replace_strict(
        counts, np.arange(len(counts)), default=None, return_dtype=pl.Float64
    ).to_numpy()
