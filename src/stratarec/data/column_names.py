"""Names: those that StrataRec gives to columns and tables of its own, and which ones a schema may give.

What is StrataRec's own begins with ``@``, which no feature, group or vocabulary may, so neither is taken for the other
and a feature may be called ``label``, ``count`` or ``__row``. A name is a name: no pattern, no path, and no part of one
(`stratarec.io.names` makes file names). Columns of a shard's tables are stored as ``<table>/<column>``, where a ``/``
in the column's own name is written as in URLs.
"""

from __future__ import annotations

import unicodedata

import polars as pl
from polars import selectors

from stratarec.errors import ConfigError

MARK = "@"

# Columns of samples.
LABEL, WEIGHT, TIME, USER, SESSION, ROW = "@label", "@weight", "@time", "@user", "@session", "@row"
# Columns of spilled rows, beside those that the schema names.
FILE, SPLIT, PARTITION, PLACE = "@file", "@split", "@partition", "@place"
# The table of the sessions of a row group.
SESSIONS = "@sessions"
# Column of that table -> column of samples, where there are no tables.
SESSION_KEYS = {"user": USER, "session": SESSION}

# Before the name of the feature that they are of.
_WEIGHTS = "@weights/"
_OWN = (LABEL, WEIGHT, TIME, USER, SESSION, ROW, FILE, SPLIT, PARTITION, PLACE, SESSIONS)
# safetensors keeps a name for itself.
_TAKEN = "__metadata__"
_MOST_BYTES = 200


def label_names(labels: int) -> tuple[str, ...]:
    """The columns of so many labels, the first label's first."""
    return tuple(f"{LABEL}/{place}" if place else LABEL for place in range(labels))


def pointer(name: str) -> str:
    """The table by which samples point at rows of the table `name`."""
    return f"@pointers/{name}"


def events(history: str) -> str:
    """The table of a history's events."""
    return f"@events/{history}"


def weights_of(feature: str) -> str:
    """The column of the weights of a feature's values."""
    return f"{_WEIGHTS}{feature}"


def column(name: str) -> pl.Expr:
    """The column of that name; `pl.col` would take ``*`` for all of them."""
    return selectors.by_name(name).as_expr()


def stored_name(table: str, name: str) -> str:
    """What the column `name` of a shard's table is called in its file."""
    return f"{table}/{name.replace('%', '%25').replace('/', '%2F')}"


def from_stored(stored: str) -> tuple[str, str]:
    """Table and column of a `stored_name`."""
    table, _, name = stored.rpartition("/")
    return table, name.replace("%2F", "/").replace("%25", "%")


def check_name(field: str, name: str) -> None:
    """Refuse what a feature, group or vocabulary cannot be called; `field` is named in the `ConfigError`."""
    if name.startswith(MARK):
        raise _refused(field, name, f"without {MARK!r} at its beginning, which marks columns of StrataRec's own")
    if name == _TAKEN:
        raise _refused(field, name, "that safetensors does not keep for itself")
    if len(name.encode(errors="replace")) > _MOST_BYTES:
        raise _refused(field, name, f"of at most {_MOST_BYTES} bytes")
    _check_any(field, name)


def check_column(field: str, name: str) -> None:
    """Refuse what the label, time, session or user column cannot be called: it is read, but stored under another."""
    if name in _OWN or name.startswith((f"{LABEL}/", _WEIGHTS)):
        raise _refused(field, name, "that is none of StrataRec's own columns")
    _check_any(field, name)


def _check_any(field: str, name: str) -> None:
    if not name:
        raise _refused(field, name, "that is not empty")
    if any(unicodedata.category(mark) in ("Cc", "Cs") for mark in name):
        raise _refused(field, name, "without control characters")
    if name.startswith("^") and name.endswith("$"):
        # Polars takes it for a pattern wherever a series of that name goes.
        raise _refused(field, name, "that is no pattern")


def _refused(field: str, name: str, expected: str) -> ConfigError:
    return ConfigError(f"{field} is {name!r}, expected a name {expected}; rename it, a column in the log too")
