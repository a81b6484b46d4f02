"""Recognize columns of lists and of vectors, with types or as text."""

from __future__ import annotations

import polars as pl

from stratarec.data.columns.text_values import lists_from_text

_SEPARATORS = ("\x1d", "\x1e", "\x1f", "\x01", "\x02", "\x03", "|", ";", "\t", "^", "~", "&", ",", " ")
# Brackets around several values, or around one value in quotes.
LIKE_A_LIST = r"""(?s)^\s*[\[({].*[,"':].*[\])}]\s*$"""
_LIKE_AN_OBJECT = r"""(?s)^\s*\{\s*['"].*:.*\}\s*$"""
# The way to a category in a tree, such as Home > Garden tools. Its parts may contain blanks and
# commas.
_PATH = r"\s(?:>+|»|›|→|->|/|\\|::)\s|\S(?:>|»|›|→|::)\S"
_PAIR = r"^[^:=]+[:=]-?\d*\.\d+$"
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_FLAGS = {0, 1}


def text_fault(column: pl.Series) -> str:
    """Return why text in brackets, and text of numbers or pairs, is no feature; empty if it can be
    one.
    """
    text = column.drop_nulls()
    lists, fits = lists_from_text(text, "")
    if fits.all():
        return list_fault(lists)
    odd = text.filter(~fits)
    if odd.str.contains(_LIKE_AN_OBJECT).mean() > 0.5:  # type: ignore[operator]
        return "objects; write each of their fields as a separate column to use it"
    if odd.str.contains(r"^\s*[\[(]\s*[\[(]").mean() > 0.5:  # type: ignore[operator]
        return "lists of lists; write each inner list as a separate column to use it"
    for mark in _SEPARATORS:
        if not text.str.contains(mark, literal=True).mean() > 0.5:  # type: ignore[operator]
            continue
        parts, _ = lists_from_text(text, mark)
        fault = list_fault(parts)
        if fault or parts.explode().drop_nulls().str.contains(_PAIR).all():
            return (
                fault
                or "pairs of a value and its weight; write values and weights as two lists, "
                "see `weights` of kind multi"
            )
    return ""


def list_fault(lists: pl.Series) -> str:
    """Return why a column has no lists of ids, and how to write the log instead; empty if it may
    have.

    Numbers with fractions are vectors, as are lists of equal lengths whose whole numbers are
    negative, or 0 and 1.
    """
    inner = lists.dtype.inner  # type: ignore[attr-defined]
    if inner.base_type() in (pl.List, pl.Array):
        return "lists of lists; write each inner list as a separate column to use it"
    flat = lists.drop_nulls().explode().drop_nulls()
    if inner == pl.String:
        flat = flat.filter(flat != "")
        if not len(flat) or not flat.str.contains(_NUMBER).all():
            return ""
        flat = flat.cast(pl.Float64, strict=False).fill_null(0.0)
    elif not inner.is_numeric():
        return f"lists of {inner}, which are neither integers nor text"
    lengths = lists.drop_nulls().list.len().unique()
    size = int(lengths[0]) if len(lengths) == 1 else 0
    has_fractions = bool(inner.is_float() or inner == pl.String) and not bool((flat == flat.round()).all())
    is_coded = size > 1 and (bool((flat < 0).any()) or (size > 2 and set(flat.unique()) <= _FLAGS))
    if has_fractions or is_coded:
        advice = f"write each as a column, such as {lists.name}_1 to {lists.name}_{size}, to use them as dense features"
        return (
            f"vectors of {size} numbers; {advice}"
            if size
            else (
                "lists of numbers with fractions; write their length, mean or "
                "maximum as columns to use them"
            )
        )
    return "lists of floats; write them as integers or text to use them as ids" if inner.is_float() else ""


def find_separator(column: pl.Series, distinct: int) -> str:
    """Return the character that separates the parts of the values; empty if there is none.

    Parts must repeat more often than values, or be whole numbers, and values must differ in their
    number of parts. A control character is always a separator, and & only separates pairs such as
    k=1&j=2. Paths of categories are not split at commas and blanks, and words between which signs
    stand are not split at blanks.
    """
    text = column.drop_nulls()
    is_path = text.str.contains(_PATH).mean() >= 0.2  # type: ignore[operator]
    for mark in _SEPARATORS:
        rows = text.filter(text.str.contains(mark, literal=True))
        is_control = not mark.isprintable()
        if len(rows) < len(text) / 5 or (distinct < 10 and not is_control):
            continue
        lists = lists_from_text(text, mark)[0]
        parts = lists.explode().drop_nulls()
        has_signs = parts.str.contains(r"^[^\p{L}\p{N}]+$").mean() > 0.01  # type: ignore[operator]
        if (is_path and mark in (",", " ")) or (has_signs and mark == " "):
            continue
        is_uneven = lists.list.len().n_unique() > 1
        if mark == "&" and not parts.str.contains("=", literal=True).all():
            continue
        if is_control or parts.n_unique() < distinct or (is_uneven and parts.str.contains(r"^\d+$").all()):
            return mark
    return ""
