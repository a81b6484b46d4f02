"""Whole numbers, as logs write them: digits, and floats that are so only because some value is missing."""

from __future__ import annotations

import polars as pl

# What a float holds without rounding.
_EXACT = float(1 << 53)


def from_floats(raw: pl.Series) -> pl.Series:
    """``Int64``; null where a value is no whole number, or none that a float tells from its neighbours."""
    value = raw.cast(pl.Float64)
    return value.to_frame("").select(_rounded(pl.col(""))).to_series().alias(raw.name)


def from_text(raw: pl.Series) -> pl.Series:
    """``Int64`` of text such as 12 and 12.0; null where it is no whole number."""
    return raw.to_frame("").select(from_text_expr(pl.col(""))).to_series().alias(raw.name)


def from_text_expr(text: pl.Expr) -> pl.Expr:
    """The same inside of lists."""
    bare = text.str.strip_chars()
    return pl.coalesce(bare.cast(pl.Int64, strict=False), _rounded(bare.cast(pl.Float64, strict=False)))


def _rounded(number: pl.Expr) -> pl.Expr:
    whole = (number.round() == number) & (number.abs() < _EXACT)
    return pl.when(whole).then(number).cast(pl.Int64, strict=False)
