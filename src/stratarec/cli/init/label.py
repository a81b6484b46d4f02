"""Which column is the label, what of it is 1, and which column is the weight of samples."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from stratarec.cli.init.sample import LogSample
from stratarec.cli.init.words import tokens
from stratarec.data.schema import LabelRule
from stratarec.errors import DataError

_LABELS = {
    "label", "click", "clicked", "clicks", "target", "y", "converted", "conversion", "purchased", "purchase", "bought",
    "liked", "like", "response", "outcome", "churn", "churned", "attributed", "redeemed", "subscribed", "survived",
}  # fmt: skip
_RATINGS = {"rating", "ratings", "score", "stars"}
_YES = {"yes", "y", "true", "t", "1", "positive", "pos", "success", "good", "click", "clicked", "buy", "won"}
_NO = {"no", "n", "false", "f", "0", "negative", "neg", "failure", "bad", "none", "lost"}
_WEIGHTS = {"weight", "weights", "wt", "sampleweight", "sampleweights", "importance", "ipw"}
# Parts of a name with which a weight is one of samples, whatever its values are: a parcel has a weight, too.
_OF_SAMPLES = {"sample", "samples", "sampling", "sampleweight", "sampleweights", "importance", "instance", "ipw"}
# Rows of a class in which a column must be constant to be a weight.
_LEAST = 20
_SHOWN = 6


def find_label(sample: LogSample, wanted: str) -> tuple[str | LabelRule, str]:
    """The label and why; `wanted` names its column, or ``COLUMN=WORD``, where it is known.

    Raises
    ------
    DataError
        Where no column can be the label, or the one that is wanted cannot.
    """
    frame = sample.frame
    if wanted:
        return _named(sample, wanted)
    binary = [name for name in frame.columns if _is_binary(frame[name])]
    worded = [name for name in frame.columns if len(_words(frame[name])) == 2]
    for name in frame.columns:
        if tokens(name) & _LABELS and name in binary:
            return name, "its name, and 0 and 1 alone in it"
        if tokens(name) & _LABELS and name in worded:
            return _word_rule(frame[name], "its name")
        if tokens(name) & _LABELS and _is_two_numbers(frame[name]):
            return _rule(frame[name], "its name")
    rated = [name for name in frame.columns if tokens(name) & _RATINGS and frame[name].dtype.is_numeric()]
    if rated:
        return _rule(frame[rated[0]], "its name")
    sure = [name for name in worded if _positive(frame[name])[1]]
    if len(binary) == 1 and not sure:
        return binary[0], "the only column of 0 and 1"
    if len(sure) == 1 and not binary:
        return _word_rule(frame[sure[0]], "the only column of yes and no, or the like")
    raise DataError(_unfound(sample, binary, worded))


def positives(frame: pl.DataFrame, label: str | LabelRule) -> pl.Series:
    """Which rows are positive; null where it is not known."""
    if isinstance(label, str):
        return frame[label].cast(pl.Boolean)
    column = frame[label.column]
    if label.at_least is not None:
        return column >= label.at_least
    return column.cast(pl.String).str.strip_chars() == label.equals


def find_weight(frame: pl.DataFrame, names: Sequence[str], positive: pl.Series) -> tuple[str, str] | None:
    """Return the column of sample weights and why, or None: by its name and, where that may be another weight, by law.

    Parameters
    ----------
    frame : DataFrame
    names : sequence of str
        Columns that may be the weight.
    positive : Series
        Truth values of the label, null where it is unknown.
    """
    for name in names:
        law = class_weights(frame[name], positive)
        if tokens(name) & _WEIGHTS and (law or tokens(name) & _OF_SAMPLES) and _is_weight(frame[name]):
            return name, f"its name{f' and values, {law}' if law else ''}"
    return None


def class_weights(column: pl.Series, positive: pl.Series) -> str:
    """Describe a column that is constant in a class, as the weights of sampled negatives are; empty if it is not."""
    if not _is_weight(column) or float(column.min()) <= 0:  # type: ignore[arg-type]
        return ""
    ones, zeros = column.filter(positive.fill_null(False)), column.filter(~positive.fill_null(True))
    if min(len(ones), len(zeros)) < _LEAST or 1 not in (ones.n_unique(), zeros.n_unique()):
        return ""
    return f"{_extent(ones)} where the label is 1 and {_extent(zeros)} where it is 0"


def _is_weight(column: pl.Series) -> bool:
    """Whether values are finite numbers of 0 or more, and not all equal."""
    # Decimals that are left are wider than 64 bits.
    if not (column.dtype.is_integer() or column.dtype.is_float()) or column.null_count() or column.n_unique() < 2:
        return False
    return bool(column.is_finite().all()) and float(column.min()) >= 0  # type: ignore[arg-type]


def _extent(values: pl.Series) -> str:
    least, most = float(values.min()), float(values.max())  # type: ignore[arg-type]
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"


def _named(sample: LogSample, wanted: str) -> tuple[str | LabelRule, str]:
    frame = sample.frame
    name = next((name for name in frame.columns if wanted == name or wanted.startswith(f"{name}=")), "")
    if not name:
        raise DataError(
            f"--label is {wanted!r}, which is no column; the log has {', '.join(frame.columns[:20])}"
            f"{sample.incomplete_note}"
        )
    column, word = frame[name], wanted[len(name) + 1 :].strip()
    if word:
        return _given_word(column, word)
    infinite = [text for text in sample.missing.get(name, ()) if "inf" in text.lower()]
    if infinite or (column.dtype.is_float() and column.is_infinite().any()):
        raise DataError(
            f"--label is {name!r}, which holds {infinite[0] if infinite else 'inf'}, expected finite numbers"
        )
    if _is_binary(column):
        return name, "named by --label"
    return _rule(column, "named by --label") if column.dtype.is_numeric() else _word_rule(column, "named by --label")


def _given_word(column: pl.Series, word: str) -> tuple[LabelRule, str]:
    words = _words(column)
    share = float((_text(column) == word).mean() or 0) if words else 0.0  # type: ignore[arg-type]
    if not words:
        raise DataError(f"--label is {column.name}={word}, and the column is {column.dtype}; name it alone")
    if not 0 < share < 1:
        shown = ", ".join(map(repr, words[:_SHOWN]))
        raise DataError(f"--label is {column.name}={word}, and no row is so, or every row; there are {shown}")
    return LabelRule(column=column.name, equals=word), f"named by --label; {share:.1%} of rows are {word!r}"


def _is_binary(column: pl.Series) -> bool:
    if column.null_count():
        return False
    if column.dtype == pl.Boolean:
        return True
    return column.dtype.is_numeric() and column.n_unique() == 2 and set(column.unique().to_list()) == {0, 1}


def _is_two_numbers(column: pl.Series) -> bool:
    """Such as -1 and 1."""
    if column.null_count() or not column.dtype.is_numeric():
        return False
    return bool(column.n_unique() == 2 and column.is_finite().all())


def _rule(column: pl.Series, reason: str) -> tuple[LabelRule, str]:
    """A threshold that leaves both classes: 1 or more for counts, else the upper third of the scale."""
    values = column.drop_nulls().cast(pl.Float64).drop_nans().unique().sort()
    if len(values) < 2:
        raise DataError(f"--label is {column.name!r}, which has one value alone, expected two or more")
    least, most = float(values[0]), float(values[-1])
    if least == 0 and (values == values.round()).all() and _is_count(column):
        rule = LabelRule(column=column.name, at_least=int(values[1]))
        return rule, f"{reason}; counts from 0 to {most:g}, {values[1]:g} or more is 1"
    threshold = float(values.filter(values >= least + 0.7 * (most - least))[0])
    place = int(threshold) if threshold == int(threshold) else threshold
    return LabelRule(
        column=column.name, at_least=place
    ), f"{reason}; {place:g} is in the upper third of {least:g} to {most:g}"


def _is_count(column: pl.Series) -> bool:
    """Whether whole numbers from 0 count events, by the column's name or as 0 is the most frequent one."""
    named = tokens(column.name)
    counted = bool(named & _LABELS) or bool((column == 0).mean() >= 0.5)  # type: ignore[operator]
    return counted and not named & _RATINGS


def _word_rule(column: pl.Series, reason: str) -> tuple[LabelRule, str]:
    words = _words(column)
    if len(words) != 2:
        shown = ", ".join(map(repr, words[:_SHOWN]))
        what = f"text of {len(words) or 'no'} values ({shown})" if column.dtype == pl.String else str(column.dtype)
        hint = f"; say which is 1, as in --label {column.name}={words[0]}" if words else ""
        raise DataError(
            f"--label is {column.name!r}, which is {what}, expected 0 and 1, numbers to compare, or two values{hint}"
        )
    word, _ = _positive(column)
    other = next(each for each in words if each != word)
    share = float((_text(column) == word).mean())  # type: ignore[arg-type]
    return (
        LabelRule(column=column.name, equals=word),
        f"{reason}; {word!r} ({share:.1%} of rows) is taken as 1, {other!r} as 0",
    )


def _text(column: pl.Series) -> pl.Series:
    text = column.cast(pl.String).str.strip_chars()
    return text.set((text == "").fill_null(False), None).drop_nulls()


def _words(column: pl.Series) -> list[str]:
    """Values of a column of text, spaces around them aside."""
    if column.dtype not in (pl.String, pl.Categorical, pl.Enum):
        return []
    words: list[str] = _text(column).unique().sort().to_list()
    return words


def _positive(column: pl.Series) -> tuple[str, bool]:
    """Which of two words is likely the positive one, and whether the words themselves say so."""
    words = _words(column)
    for word in words:
        other = next(each for each in words if each != word)
        if (word.lower() in _YES and other.lower() in _NO) or (word[0] == ">" and other[0] == "<"):
            return word, True
    for word in words:
        other = next(each for each in words if each != word)
        if word.lower() in _YES or other.lower() in _NO:
            return word, False
    text = _text(column)
    return min(words, key=lambda word: (text == word).sum()), False


def _unfound(sample: LogSample, binary: list[str], worded: list[str]) -> str:
    frame = sample.frame
    called = [name for name in frame.columns if tokens(name) & _LABELS]
    two = ", ".join([*binary, *worded][:_SHOWN])
    if len(binary) > 1:
        which = f"several columns are 0 and 1 ({two})"
    elif binary:
        which = f"several columns are 0 and 1, or yes and no ({two})"
    else:
        which = "no column is 0 and 1" + (f" (of two values: {two})" if two else "")
    if called:
        held = _held(frame[called[0]], sample.missing.get(called[0], ()))
        which += f", and {called[0]!r}, which is called like one, holds {held}"
    else:
        which += ", and none is called label, click, rating or the like"
    return (
        f"no label is found: {which}; name it by --label COLUMN or --label COLUMN=WORD (a log of clicks alone is read "
        f"by `kind: clicks`: stratarec init --recipe globo){sample.incomplete_note}"
    )


def _held(column: pl.Series, markers: Sequence[str]) -> str:
    """What a column holds that is no label, by some of its values."""
    values = column.drop_nulls().unique().sort()
    shown = ", ".join(map(repr, values.head(_SHOWN).to_list()))
    more = f" and {len(values) - _SHOWN:,} other values" if len(values) > _SHOWN else ""
    missing = f", {column.null_count():,} rows without one" if column.null_count() else ""
    marked = f" ({', '.join(map(repr, markers[:_SHOWN]))})" if markers else ""
    alone = " alone" if len(values) == 1 else ""
    return f"{shown or 'nothing'}{alone}{more}{missing}{marked}"
