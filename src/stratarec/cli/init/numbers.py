"""Numbers that a text column holds: among words for nothing, and as people write amounts."""

from __future__ import annotations

import re

import polars as pl

# As they stand, but for spaces around them and case.
_NOTHING = {
    "", "na", "n/a", "#n/a", "<na>", "nan", "nil", "null", "none", "missing", "unknown", "\\n", "-", "--", "?", ".",
    "inf", "-inf", "+inf", "infinity", "-infinity",
}  # fmt: skip
_MOST_SPELLINGS = 8
_WHOLE = r"^[+-]?\d+$"
_SIGNS = r"[$€£¥₹%]|\b(USD|EUR|GBP)\b"
_THOUSANDS = r"^[+-]?[1-9]\d{0,2}([, ]\d{3})+(\.\d+)?$"
_PLAIN = r"^[+-]?(\d+(\.\d*)?|\.\d+)$"
_COMMA = r"^[+-]?\d{1,3}(([. ]\d{3})*|\d*),\d+$"
# What no list of ids has: a number from 0 to 1, or a sign.
_DECIMAL = r"^([+-]?0|[+-]\d+),\d+$"
_PADDED = r"^[+-]?0\d"


def typed(text: pl.Series) -> tuple[pl.Series, tuple[str, ...]]:
    """Text as the numbers or truth values that all of it is, but for words that stand for nothing: these as the file
    has them. Whole numbers beyond 64 bits, and numbers with leading zeros, stay text."""
    text = text.set((text == "").fill_null(False), None)
    bare = text.str.strip_chars()
    number = bare.cast(pl.Float64, strict=False)
    odd = text.filter((number.is_null() | ~number.is_finite()) & text.is_not_null()).unique()
    words = tuple(sorted(odd.head(_MOST_SPELLINGS + 1).to_list()))
    if len(words) <= _MOST_SPELLINGS and all(word.strip().lower() in _NOTHING for word in words):
        known = bare.set(text.is_in(words).fill_null(False), None) if words else bare
        if known.null_count() == len(known) or known.str.contains(_PADDED).any():
            return text, ()
        whole = known.cast(pl.Int64, strict=False)
        if whole.null_count() == known.null_count():
            return whole, words
        if not known.drop_nulls().str.contains(_WHOLE).all():
            return known.cast(pl.Float64), words
        return text, ()
    lower = bare.str.to_lowercase()
    truth = lower.drop_nulls().is_in(["true", "false"]).all()
    return ((lower == "true").alias(text.name) if truth else text), ()


def amounts(text: pl.Series, delimiter: str) -> str:
    """How numbers are written that are text for a sign or for commas, with an example; empty where they are none."""
    bare = text.drop_nulls().str.strip_chars()
    if not len(bare):
        return ""
    digits = bare.str.replace_all(_SIGNS, "").str.strip_chars().str.replace_all(r"[\s']", " ")
    signs = (digits != bare).any()
    plain, thousands = digits.str.contains(_PLAIN), digits.str.contains(_THOUSANDS)
    if (plain | thousands).all():
        # Lists of numbers of three digits look like thousands, but for the first part, which then has three, too.
        short = digits.str.contains(r"^[+-]?\d{1,2}[, ]").any()
        if signs or (short and not (plain & (digits.str.len_chars() > 5)).any()):
            return _example(bare.filter(thousands | (digits != bare)), {",": ""})
        return ""
    comma = digits.str.contains(_COMMA)
    if (comma | plain).all() and (delimiter in (";", "\t") or digits.str.contains(_DECIMAL).any()):
        return _example(bare.filter(comma), {".": "", ",": "."})
    return ""


def _example(odd: pl.Series, marks: dict[str, str | int | None]) -> str:
    number = re.sub(r"[^\d.,+-]", "", str(odd[0])).translate(str.maketrans(marks))
    return f"numbers written as {str(odd[0])!r}; write {number} in the log, and it is a dense feature"
