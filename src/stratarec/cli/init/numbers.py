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
_THOUSANDS = r"^[+-]?\d{1,3}(,\d{3})+(\.\d+)?$"
_PLAIN = r"^[+-]?(\d+(\.\d*)?|\.\d+)$"
_COMMA = r"^[+-]?\d{1,3}((\.\d{3})*|\d*),\d+$"


def typed(text: pl.Series) -> tuple[pl.Series, tuple[str, ...]]:
    """Text as the numbers or truth values that all of it is, but for words that stand for nothing: these as the file
    has them. Whole numbers beyond 64 bits stay text: no float tells them apart."""
    text = text.set((text == "").fill_null(False), None)
    bare = text.str.strip_chars()
    number = bare.cast(pl.Float64, strict=False)
    odd = text.filter((number.is_null() | ~number.is_finite()) & text.is_not_null()).unique()
    words = tuple(sorted(odd.head(_MOST_SPELLINGS + 1).to_list()))
    if len(words) <= _MOST_SPELLINGS and all(word.strip().lower() in _NOTHING for word in words):
        known = bare.set(text.is_in(words).fill_null(False), None) if words else bare
        if known.null_count() == len(known):
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
    stripped = bare.str.replace_all(_SIGNS, "").str.replace_all(r"[\s\u00a0']", "")
    signs = (stripped != bare).any()
    plain, thousands = stripped.str.contains(_PLAIN), stripped.str.contains(_THOUSANDS)
    if (plain | thousands).all():
        # Lists of numbers of three digits look like thousands, but for the first part, which then has three, too.
        short = stripped.str.contains(r"^[+-]?\d{1,2},").any()
        if signs or (short and not (plain & (stripped.str.len_chars() > 5)).any()):
            return _example(bare, bare.filter(thousands | (stripped != bare)))
        return ""
    comma = stripped.str.contains(_COMMA)
    if delimiter in (";", "\t") and (comma | plain).all():
        return _example(bare, bare.filter(comma))
    return ""


def _example(bare: pl.Series, odd: pl.Series) -> str:
    shown = str(odd[0]) if len(odd) else str(bare[0])
    digits = re.sub(r"[^\d.,+-]", "", shown)
    decimal_comma = re.search(r",\d+$", digits) and not re.search(_THOUSANDS, digits)
    number = digits.replace(".", "").replace(",", ".") if decimal_comma else digits.replace(",", "")
    return f"numbers written as {shown!r}; write {number} in the log, and it is a dense feature"
