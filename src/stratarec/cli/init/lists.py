"""Recognise columns of lists that are written as text."""

from __future__ import annotations

import polars as pl

from stratarec.data.columns.text_values import lists_from_text

_SEPARATORS = ("\x1d", "\x1e", "\x1f", "\x01", "\x02", "|", ";", "\t", "^", "~", ",", " ")
# Brackets around several values, or around one value in quotes.
LIKE_A_LIST = r"""(?s)^\s*[\[({].*[,"':].*[\])}]\s*$"""


def find_separator(column: pl.Series, distinct: int) -> str:
    """Return the character that separates the parts of the values; empty if there is none.

    Parts must repeat more often than values, or be whole numbers, and values must differ in their number of parts. A
    control character is always a separator.
    """
    text = column.drop_nulls()
    for mark in _SEPARATORS:
        rows = text.filter(text.str.contains(mark, literal=True))
        is_control = not mark.isprintable()
        if len(rows) < len(text) / 5 or (distinct < 10 and not is_control):
            continue
        lists = lists_from_text(text, mark)[0]
        parts = lists.explode().drop_nulls()
        is_uneven = lists.list.len().n_unique() > 1
        if is_control or parts.n_unique() < distinct or (is_uneven and parts.str.contains(r"^\d+$").all()):
            return mark
    return ""
