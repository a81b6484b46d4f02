"""Names: those that StrataRec gives to columns and tables of its own, and which ones a schema may give.

What is StrataRec's own begins with ``@``, which no feature, group or vocabulary may, so neither is taken for the other
and a feature may be called ``label``, ``count`` or ``__row``. Tables of a shard have a ``/`` before the name that they
belong to, and their columns are stored as ``<table>/<column>``: names of features and groups have none.
"""

from __future__ import annotations

import unicodedata

from stratarec.errors import ConfigError

MARK = "@"

# Columns of samples.
LABEL, TIME, USER, SESSION, ROW = "@label", "@time", "@user", "@session", "@row"
# Columns of staged rows, beside those that the schema names.
FILE, SPLIT, PARTITION, PLACE = "@file", "@split", "@partition", "@place"
# The table of the sessions of a row group.
SESSIONS = "@sessions"

_OWN = (LABEL, TIME, USER, SESSION, ROW, FILE, SPLIT, PARTITION, PLACE, SESSIONS)
# A vocabulary's name is part of a file name, which may have 255 bytes.
_MOST_BYTES = 200


def pointer(name: str) -> str:
    """The table by which samples point at rows of the table `name`."""
    return f"@pointers/{name}"


def events(history: str) -> str:
    """The table of a history's events."""
    return f"@events/{history}"


def check_name(field: str, name: str) -> None:
    """Refuse what a feature, group or vocabulary cannot be called; `field` is named in the `ConfigError`."""
    if name.startswith(MARK):
        raise _refused(field, name, f"without {MARK!r} at its beginning, which marks columns of StrataRec's own")
    if "/" in name:
        raise _refused(field, name, "without '/'")
    if len(name.encode(errors="replace")) > _MOST_BYTES:
        raise _refused(field, name, f"of at most {_MOST_BYTES} bytes")
    _check_any(field, name)


def check_column(field: str, name: str) -> None:
    """Refuse what the label, time, session or user column cannot be called: it is read, but stored under another."""
    if name in _OWN:
        raise _refused(field, name, "that is none of StrataRec's own columns")
    _check_any(field, name)


def _check_any(field: str, name: str) -> None:
    if not name:
        raise _refused(field, name, "that is not empty")
    if any(unicodedata.category(mark) in ("Cc", "Cs") for mark in name):
        raise _refused(field, name, "without control characters")
    # Polars takes these for patterns over all columns.
    if name == "*" or (name.startswith("^") and name.endswith("$")):
        raise _refused(field, name, "that is no pattern")


def _refused(field: str, name: str, expected: str) -> ConfigError:
    return ConfigError(f"{field} is {name!r}, expected a name {expected}; rename it, a column in the log too")
