"""Guess the label column, its positive value, and the column of sample weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from stratarec.cli.init.sample import LogSample
from stratarec.cli.init.words import tokens
from stratarec.data.schema import LabelRule
from stratarec.errors import DataError
from stratarec.io.names import shell_word

_LABELS = {
    "label", "click", "clicked", "clicks", "clk", "target", "y", "converted", "conversion", "purchased", "purchase",
    "bought", "liked", "like", "response", "outcome", "churn", "churned", "attributed", "redeemed", "subscribed",
    "survived", "fraud", "canceled", "cancelled", "refunded", "promoted", "booked", "gekauft", "klick", "achat",
}  # fmt: skip
# Words that the name of a label may have in addition.
_FLAGS = {"is", "has", "was", "flag", "flg", "bool", "float", "token", "in", "the", "ad", "item", "user"}
# Words for events, in the values of a column.
_EVENTS = {
    "click",
    "clicked",
    "purchase",
    "purchased",
    "buy",
    "bought",
    "transaction",
    "conversion",
    "converted",
}
_MANY_EVENTS = 20
_RATINGS = {"rating", "ratings", "score", "stars", "overall"}
_YES = {
    "yes",
    "y",
    "true",
    "t",
    "1",
    "positive",
    "pos",
    "success",
    "good",
    "click",
    "clicked",
    "buy",
    "won",
}
_NO = {"no", "n", "false", "f", "0", "negative", "neg", "failure", "bad", "none", "lost"}
_WEIGHTS = {"weight", "weights", "wt", "sampleweight", "sampleweights", "importance", "ipw"}
# Words that certainly name a sample weight. The word weight alone may also name the weight of a
# parcel.
_SAMPLE_WEIGHTS = {
    "sample",
    "samples",
    "sampling",
    "sampleweight",
    "sampleweights",
    "importance",
    "instance",
    "ipw",
}
# Minimum number of rows of each class for deciding that a weight is constant in a class.
_MIN_CLASS_ROWS = 20
# Maximum number of values that a message lists.
_SHOWN = 6
# Maximum number of values of a scale of ratings, and minimum share of rows of each class for other
# numbers.
_SCALE, _RARE = 20, 0.05


def find_label(sample: LogSample, name: str) -> tuple[str | LabelRule, str]:
    """Return the label and the reason. `name` is the label column, or ``COLUMN=WORD``; empty to
    search for a label.

    Raises
    ------
    DataError
        If no column can be the label, or the column `name` cannot.
    """
    frame = sample.frame
    if name:
        return _named_label(sample, name)
    with_gaps = [name for name in frame.columns if is_binary(frame[name])]
    binary = [name for name in with_gaps if not frame[name].null_count()]
    words = {name: _words(frame[name]) for name in frame.columns}
    two_words = [name for name in words if len(words[name]) == 2]
    named = [name for name in frame.columns if tokens(name) & _LABELS]
    plain = [name for name in named if _is_plain(name)]
    rated = any(tokens(name) & _RATINGS and frame[name].dtype.is_numeric() for name in frame.columns)
    # A rating is more probably the label than a column such as verified_purchase.
    for name in plain if rated else [*plain, *named]:
        if name in binary:
            return name, "its name, and its values are 0 and 1"
        if name in two_words:
            return _word_rule(frame[name], "its name")
        if _has_two_numbers(frame[name]):
            return _threshold_rule(frame[name], "its name")
    for name in plain if rated else [*plain, *named]:
        if name in with_gaps:
            return (
                name,
                "its name, and its values are 0 and 1; missing in "
                f"{frame[name].null_count():,} sampled rows",
            )
    ratings = [name for name in frame.columns if tokens(name) & _RATINGS and frame[name].dtype.is_numeric()]
    if ratings:
        return _threshold_rule(frame[ratings[0]], "its name")
    yes_no = [name for name in two_words if _positive_word(frame[name])[1]]
    events = _events(words)
    if len(binary) == 1 and not yes_no and not events:
        return binary[0], "the only column of 0 and 1"
    if len(yes_no) == 1 and not binary:
        return _word_rule(frame[yes_no[0]], "the only column of two words such as yes and no")
    raise DataError(_no_label(sample, binary, two_words, events))


def _is_plain(name: str) -> bool:
    """Whether a name says only that something was clicked, bought or similar: is_click, but not
    click_os.
    """
    return tokens(name) - {name.strip().lower()} <= _LABELS | _FLAGS


def positives(frame: pl.DataFrame, label: str | LabelRule) -> pl.Series:
    """Return a flag for each row: whether it is positive; null where the label is missing."""
    if isinstance(label, str):
        return frame[label].cast(pl.Boolean)
    column = frame[label.column]
    if label.at_least is not None:
        return column >= label.at_least
    return column.cast(pl.String).str.strip_chars() == label.equals


def find_weight(frame: pl.DataFrame, names: Sequence[str], positive: pl.Series) -> tuple[str, str] | None:
    """Return the column of sample weights and the reason, or None.

    Parameters
    ----------
    frame : DataFrame
        Sample rows of the log.
    names : sequence of str
        Columns that may be the weight.
    positive : Series
        Booleans of the label, null where it is missing.
    """
    for name in names:
        law = class_weights(frame[name], positive)
        if tokens(name) & _WEIGHTS and (law or tokens(name) & _SAMPLE_WEIGHTS) and _is_weight(frame[name]):
            return name, f"its name{f' and values, {law}' if law else ''}"
    return None


def class_weights(column: pl.Series, positive: pl.Series) -> str:
    """Describe a column with one value for all rows of a class, as weights of sampled negatives
    have; else empty.
    """
    if not _is_weight(column) or float(column.min()) <= 0:  # type: ignore[arg-type]
        return ""
    ones, zeros = column.filter(positive.fill_null(False)), column.filter(~positive.fill_null(True))
    if min(len(ones), len(zeros)) < _MIN_CLASS_ROWS or 1 not in (ones.n_unique(), zeros.n_unique()):
        return ""
    return f"{_range(ones)} where the label is 1 and {_range(zeros)} where it is 0"


def _is_weight(column: pl.Series) -> bool:
    """Whether the values are finite numbers of at least 0, and not all equal."""
    # Columns of decimals are no weights: they are wider than 64 bits, because narrower ones were
    # converted before.
    if (
        not (column.dtype.is_integer() or column.dtype.is_float())
        or column.null_count()
        or column.n_unique() < 2
    ):
        return False
    return bool(column.is_finite().all()) and float(column.min()) >= 0  # type: ignore[arg-type]


def _range(values: pl.Series) -> str:
    least, most = float(values.min()), float(values.max())  # type: ignore[arg-type]
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"


def _named_label(sample: LogSample, option: str) -> tuple[str | LabelRule, str]:
    """Return the label that --label names, and the reason."""
    frame = sample.frame
    name = next((name for name in frame.columns if option == name or option.startswith(f"{name}=")), "")
    if not name:
        raise DataError(
            f"--label {option!r} is not a column; the log has "
            f"{', '.join(frame.columns[:20])}{sample.incomplete_note}"
        )
    column, word, reason = frame[name], option[len(name) + 1 :].strip(), "named by --label"
    if word:
        return _given_word_rule(column, word)
    infinite = [text for text in sample.missing.get(name, ()) if "inf" in text.lower()]
    if infinite:
        raise _infinite(name, infinite[0])
    if is_binary(column):
        return name, reason
    if fault := _fault(column):
        raise DataError(f"--label is {name!r}, which {fault}")
    return _threshold_rule(column, reason) if column.dtype.is_numeric() else _word_rule(column, reason)


def _given_word_rule(column: pl.Series, word: str) -> tuple[LabelRule, str]:
    words = _words(column)
    share = float((_text(column) == word).mean() or 0) if words else 0.0  # type: ignore[arg-type]
    if not words:
        raise DataError(
            f"--label is {column.name}={word}, but the column is {column.dtype}; name only the column: its "
            "larger numbers are then positive"
        )
    if not 0 < share < 1:
        shown = ", ".join(map(repr, words[:_SHOWN]))
        raise DataError(
            f"--label is {column.name}={word}, which no row or every row has; its values are {shown}"
        )
    return LabelRule(column=column.name, equals=word), f"named by --label; {share:.1%} of rows are {word!r}"


def is_binary(column: pl.Series) -> bool:
    """Whether the column has both 0 and 1, or true and false, and no other values. Values may be
    missing.
    """
    if not (column.dtype.is_numeric() or column.dtype == pl.Boolean):
        return False
    values = column.drop_nulls().unique()
    return len(values) == 2 and set(values.to_list()) == {0, 1}


def _fault(column: pl.Series) -> str:
    """Return why a column cannot be a label until the log is changed, and how; empty if nothing is
    wrong.
    """
    values, gaps = column.drop_nulls(), column.null_count()
    if gaps and values.n_unique() == 1:
        return f"is {values[0]!r} or missing; if rows without a value ({gaps:,}) are negative, fill them, as with 0"
    if gaps and len(_words(column)) > _MANY_EVENTS:
        return "has many values; to predict whether there is a value, add a column of 0 and 1 to the log"
    # A total is at an end, and of many numbers: one of few counts may be as large as all others
    # together by chance.
    if column.dtype.is_numeric() and int((values != 0).sum()) >= _MIN_CLASS_ROWS:
        most = float(values.max())  # type: ignore[arg-type]
        if (
            most > 1
            and most in (values[0], values[-1])
            and abs(float(values.sum()) - 2 * most) < 1e-6 * most
        ):
            return f"is {most:g} in one row, as much as in all other rows: remove the row of totals from the log"
    return ""


def _has_two_numbers(column: pl.Series) -> bool:
    """Whether the column has exactly two distinct numbers."""
    if column.null_count() or not column.dtype.is_numeric():
        return False
    return bool(column.n_unique() == 2 and column.is_finite().all())


def _threshold_rule(column: pl.Series, reason: str) -> tuple[LabelRule, str]:
    """Return a rule with a threshold between the classes, and its reason.

    If the column counts events, every count above 0 is positive; otherwise the upper third of the
    scale. If hardly any row, or nearly every row, is in the upper third of the scale, it is the
    upper third of the rows.
    """
    values = column.drop_nulls().cast(pl.Float64).drop_nans().unique().sort()
    if values.is_infinite().any():
        raise _infinite(column.name, "inf")
    if len(values) < 2:
        raise DataError(f"--label is {column.name!r}, which has a single value; it must have at least two")
    least, most = float(values[0]), float(values[-1])
    if least == 0 and (values == values.round()).all() and _is_count(column):
        return _at_least(column, float(values[1]), f"{reason}; counts from 0 to {most:g}")
    threshold = float(values.filter(values >= least + 0.7 * (most - least))[0])
    scale = f"{least:g} to {most:g}"
    share = float((column >= threshold).mean() or 0)  # type: ignore[arg-type]
    if len(values) <= _SCALE or _RARE <= share <= 1 - _RARE:
        return _at_least(column, threshold, f"{reason}; the upper third of {scale}")
    rows = column.cast(pl.Float64).drop_nulls().drop_nans()
    threshold = max(float(rows.quantile(2 / 3, "nearest")), float(values[1]))  # type: ignore[arg-type]
    return _at_least(
        column, threshold, f"{reason}; the upper third of the rows, as {share:.2%} reach that of {scale}"
    )


def _infinite(name: str, value: str) -> DataError:
    return DataError(f"the label {name!r} contains {value}; name a column of finite numbers by --label")


def _at_least(column: pl.Series, threshold: float, reason: str) -> tuple[LabelRule, str]:
    """Return a rule with a threshold, and the reason with the share of positive rows."""
    rule = LabelRule(
        column=column.name, at_least=int(threshold) if threshold == int(threshold) else threshold
    )
    share = float((column >= threshold).mean() or 0)  # type: ignore[arg-type]
    return rule, f"{reason}: {threshold:g} or more is 1, {share:.1%} of rows"


def _is_count(column: pl.Series) -> bool:
    """Whether a column of whole numbers from 0 counts events: its name suggests it, or 0 is the
    most frequent value.
    """
    words = tokens(column.name)
    is_count = bool(words & _LABELS) or bool((column == 0).mean() >= 0.5)  # type: ignore[operator]
    return is_count and not words & _RATINGS


def _word_rule(column: pl.Series, reason: str) -> tuple[LabelRule, str]:
    words = _words(column)
    if len(words) != 2:
        shown = ", ".join(map(repr, words[:_SHOWN]))
        content = (
            f"text with {len(words) or 'no'} values ({shown})"
            if column.dtype == pl.String
            else str(column.dtype)
        )
        hint = f"; name the positive value, as in --label {column.name}={words[0]}" if words else ""
        raise DataError(
            f"--label is {column.name!r}, which is {content}; it must be 0 and 1, "
            f"numbers, or two values{hint}"
        )
    word, _ = _positive_word(column)
    other = next(candidate for candidate in words if candidate != word)
    share = float((_text(column) == word).mean())  # type: ignore[arg-type]
    rule = LabelRule(column=column.name, equals=word)
    return rule, f"{reason}; {word!r} ({share:.1%} of rows) is taken as 1, {other!r} as 0"


def _text(column: pl.Series) -> pl.Series:
    text = column.cast(pl.String).str.strip_chars()
    return text.set((text == "").fill_null(False), None).drop_nulls()


def _words(column: pl.Series) -> list[str]:
    """Return the distinct values of a text column, without surrounding spaces."""
    if column.dtype not in (pl.String, pl.Categorical, pl.Enum):
        return []
    words: list[str] = _text(column).unique().sort().to_list()
    return words


def _positive_word(column: pl.Series) -> tuple[str, bool]:
    """Return the word, of two, that is probably positive, and whether this is clear, as for yes and
    no.
    """
    words = _words(column)
    for word in words:
        other = next(candidate for candidate in words if candidate != word)
        if (word.lower() in _YES and other.lower() in _NO) or (word[0] == ">" and other[0] == "<"):
            return word, True
    for word in words:
        other = next(candidate for candidate in words if candidate != word)
        if word.lower() in _YES or other.lower() in _NO:
            return word, False
    text = _text(column)
    return min(words, key=lambda word: (text == word).sum()), False


def _events(words: Mapping[str, Sequence[str]]) -> tuple[str, str] | None:
    """Return a column whose values are kinds of events, such as view and purchase, and one of them;
    None if none is.

    Parameters
    ----------
    words : mapping
        Name of a column -> its distinct values, if it is text.
    """
    few = ((name, word) for name, values in words.items() if len(values) <= _MANY_EVENTS for word in values)
    return next(((name, word) for name, word in few if tokens(word) & _EVENTS), None)


def _no_label(
    sample: LogSample, binary: list[str], two_words: list[str], events: tuple[str, str] | None
) -> str:
    """Return the error message for a log without an obvious label."""
    frame = sample.frame
    named = [name for name in frame.columns if tokens(name) & _LABELS]
    candidates = ", ".join([*binary, *two_words][:_SHOWN])
    if len(binary) > 1:
        reason = f"several columns contain 0 and 1 ({candidates})"
    elif binary and events:
        column, event = events
        return (
            f"no label found: {binary[0]!r} is the only column of 0 and 1, but {column!r} has events such "
            f"as {event!r}; use --label {shell_word(f'{column}={event}')} or "
            f"--label {shell_word(binary[0])}"
        )
    elif binary:
        reason = f"several columns have two values, such as 0 and 1 or yes and no ({candidates})"
    else:
        reason = "no column is 0 and 1" + (f" (two values: {candidates})" if candidates else "")
    if named:
        content = _describe_values(frame[named[0]], sample.missing.get(named[0], ()))
        fault = _fault(frame[named[0]])
        reason += f", and {named[0]!r}, which is named like a label, {fault or f'contains {content}'}"
    else:
        reason += ", and none is named label, click, rating or similar"
    return (
        f"no label found: {reason}; use --label COLUMN or --label COLUMN=WORD (for a log that has only "
        f"clicks, use `kind: clicks`: stratarec init --recipe globo){sample.incomplete_note}"
    )


def _describe_values(column: pl.Series, markers: Sequence[str]) -> str:
    """List some values of a column that cannot be the label."""
    values = column.drop_nulls().unique().sort()
    shown = ", ".join(map(repr, values.head(_SHOWN).to_list()))
    more = f" and {len(values) - _SHOWN:,} other values" if len(values) > _SHOWN else ""
    missing = f", {column.null_count():,} rows without a value" if column.null_count() else ""
    marked = f" ({', '.join(map(repr, markers[:_SHOWN]))})" if markers else ""
    only = "only " if len(values) == 1 else ""
    return f"{only}{shown or 'nothing'}{more}{missing}{marked}"
