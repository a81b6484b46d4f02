"""Names of StrataRec's internal columns and tables, and checks of the names in a schema.

Internal names begin with ``@``. Names of features, groups and vocabularies must not, so a feature
may be called ``label``, ``count`` or ``__row``. Names are never used as patterns or paths
(`stratarec.io.names` converts them to file names). Columns of a shard's tables are stored as
``<table>/<column>``; a ``/`` in a column's name is escaped as in URLs."""

from __future__ import annotations

import unicodedata

import polars as pl
from polars import selectors

from stratarec.errors import ConfigError

MARK = "@"

# Columns of samples.
LABEL = "@label"
WEIGHT = "@weight"
TIME = "@time"
USER = "@user"
SESSION = "@session"
ROW = "@row"
# Internal columns that spilled rows have in addition to the schema's columns.
FILE = "@file"
SPLIT = "@split"
PARTITION = "@partition"
PLACE = "@place"
# The table of the sessions of a row group.
SESSIONS = "@sessions"
# Column of the table of sessions -> column of samples that replaces it if there are no tables.
SESSION_KEYS = {"user": USER, "session": SESSION}

# Prefix of the feature's name.
_WEIGHTS = "@weights/"
_OWN = (LABEL, WEIGHT, TIME, USER, SESSION, ROW, FILE, SPLIT, PARTITION, PLACE, SESSIONS)
# A name reserved by safetensors.
_TAKEN = "__metadata__"
_MOST_BYTES = 200


def label_names(labels: int) -> tuple[str, ...]:
    """Return the names of the columns for `labels` labels, in order."""
    return tuple(f"{LABEL}/{place}" if place else LABEL for place in range(labels))


def pointer(name: str) -> str:
    """Return the name of the table of pointers from samples to rows of the table `name`."""
    return f"@pointers/{name}"


def events(history: str) -> str:
    """Return the name of the table with a history's events."""
    return f"@events/{history}"


def weights_of(feature: str) -> str:
    """Return the name of the column with the weights of a feature's values."""
    return f"{_WEIGHTS}{feature}"


def column(name: str) -> pl.Expr:
    """Select the column with this name. `pl.col` would interpret ``*`` as all columns."""
    return selectors.by_name(name).as_expr()


def stored_name(table: str, name: str) -> str:
    """Return the name of a table's column in the shard's file."""
    return f"{table}/{name.replace('%', '%25').replace('/', '%2F')}"


def from_stored(stored: str) -> tuple[str, str]:
    """Return table and column of a `stored_name`."""
    table, _, name = stored.rpartition("/")
    return table, name.replace("%2F", "/").replace("%25", "%")


def check_name(field: str, name: str) -> None:
    """Raise `ConfigError` if a feature, group or vocabulary cannot have this name. The message
    names `field`.
    """
    if name.startswith(MARK):
        raise _refused(field, name, f"without {MARK!r} at its beginning, which marks internal columns")
    if name == _TAKEN:
        raise _refused(field, name, "that safetensors does not reserve")
    if len(name.encode(errors="replace")) > _MOST_BYTES:
        raise _refused(field, name, f"of at most {_MOST_BYTES} bytes")
    _check_any(field, name)


def check_column(field: str, name: str) -> None:
    """Raise `ConfigError` if a label, time, session or user column cannot have this name."""
    if name in _OWN or name.startswith((f"{LABEL}/", _WEIGHTS)):
        raise _refused(field, name, "that is not an internal column of StrataRec")
    _check_any(field, name)


def _check_any(field: str, name: str) -> None:
    if not name:
        raise _refused(field, name, "that is not empty")
    if any(unicodedata.category(mark) in ("Cc", "Cs") for mark in name):
        raise _refused(field, name, "without control characters")
    if name.startswith("^") and name.endswith("$"):
        # Polars interprets the name of a series as a pattern in many places.
        raise _refused(field, name, "that is not a pattern")


def _refused(field: str, name: str, expected: str) -> ConfigError:
    return ConfigError(
        f"{field} is {name!r}, expected a name {expected}; rename it (a column also in the log)"
    )
