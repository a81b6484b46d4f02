"""The columns of Parquet files that are one log: there in every file, once, and of one kind in all of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from stratarec.errors import DataError

# What a value is taken for: text and numbers of one look are different values, and no integer type holds both numbers
# with a sign and those from 2^63.
_TEXT, _UNSIGNED, _OTHER = "text", "unsigned", "other"


class ColumnTypes:
    """What each wanted column is, by the first file in which it has a type.

    Parameters
    ----------
    names : sequence of str
        The wanted columns.
    schemas : callable
        From the index of a file, the path and schema of each file from there on; only asked for where a column holds
        nothing but nulls and so has no type of its own.
    """

    def __init__(self, names: Sequence[str], schemas: Callable[[int], Iterable[tuple[str, pa.Schema]]]) -> None:
        self._names, self._schemas = names, schemas
        self._known: dict[str, tuple[pa.DataType, str]] = {}

    def check(self, number: int, path: str, schema: pa.Schema) -> None:
        """Refuse a file that lacks a column, or has it twice or of another kind than the files before it."""
        for name in self._names:
            check_there(schema.names, name, path)
            kind = schema.field(name).type
            if _meaning(kind) is None:
                self._look_ahead(number + 1, name)
                continue
            expected, first_path = self._known.setdefault(name, (kind, path))
            if _meaning(kind) != _meaning(expected):
                raise DataError(
                    f"{path}: column {name!r} is {kind}, but {expected} in {first_path}; convert one of them"
                )

    def typed(self, table: pa.Table) -> pa.Table:
        """Columns of nulls take the type that they have in other files; lists of a fixed size become lists."""
        for name in self._names:
            # Polars cannot read a slice of a column of lists of a fixed size that has nulls.
            kind = _bare(table[name].type) if pa.types.is_fixed_size_list(table[name].type) else table[name].type
            if _meaning(kind) is None and name in self._known:
                kind = _bare(self._known[name][0])
            if kind != table[name].type:
                table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
        return table

    def _look_ahead(self, number: int, name: str) -> None:
        if name in self._known:
            return
        for path, schema in self._schemas(number):
            if name in schema.names and _meaning(schema.field(name).type) is not None:
                self._known[name] = (schema.field(name).type, path)
                return


def check_there(have: Sequence[str], name: str, path: str, advice: str = "") -> None:
    """Refuse a file that has the column `name` not at all, or several times; `advice` is added to the message."""
    if name not in have:
        close = difflib.get_close_matches(name, have, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise DataError(f"{path}: no column {name!r}{hint}; it has {', '.join(have)}{advice}")
    if have.count(name) > 1:
        raise DataError(f"{path}: column {name!r} stands there {have.count(name)} times, expected once")


def _meaning(kind: pa.DataType) -> str | None:
    """Whether values are text, 64 bits without a sign, or others; None for a column of nulls."""
    while hasattr(kind, "value_type"):  # dictionaries and lists
        kind = kind.value_type
    if pa.types.is_null(kind):
        return None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return _TEXT
    return _UNSIGNED if pa.types.is_uint64(kind) else _OTHER


def _bare(kind: pa.DataType) -> pa.DataType:
    """A type that nulls can be cast to."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_type)
    return kind
