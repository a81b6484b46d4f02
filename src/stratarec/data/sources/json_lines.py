"""JSON lines by the columns that are wanted: an object a line, its scalars and lists as text."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.sources.blocks import BadRows, no_utf8
from stratarec.data.sources.delimited import Parsed
from stratarec.data.sources.parse import lists_from_text
from stratarec.errors import DataError
from stratarec.io.names import shell_word

# Lines that are looked at for the names of columns.
_LINES = 1000


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """How one file is read."""

    path: str
    lists: frozenset[str]
    """The columns that may hold lists, which become text as JSON writes them."""
    nulls: tuple[str, ...]
    """Texts that stand for nothing, besides null and an empty one."""

    def parse(self, content: bytes, numbers: range, names: tuple[str, ...], bad: BadRows) -> Parsed:
        """The columns `names` as text and the line of each row. Lines that are no objects, or have a list or an object
        for a scalar, are `bad`; empty ones are left out. `numbers` are those of the lines in `content`."""
        lines = np.arange(numbers.start, numbers.stop, dtype=np.int64)
        frame = self._read(content, names)
        if frame is None or frame.height != len(lines) or self._has_nested(frame):
            content, lines = self._usable(content, lines, names, bad)
            frame = self._read(content, names)
        if frame is None or frame.height != len(lines):
            raise DataError(f"{self.path}, line {numbers.start} and after: cannot be read as JSON lines")
        return frame, lines

    def with_lists(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return the frame with its lists as lists: a separator of the schema is for other files, which have text."""
        for name in self.lists & set(frame.columns):
            lists, fits = lists_from_text(frame[name], "")
            if fits.fill_null(True).all():
                frame = frame.with_columns(lists)
        return frame

    def _has_nested(self, frame: pl.DataFrame) -> bool:
        """Whether some scalar may have been a list or an object, which Polars writes out as text."""
        return any(frame[name].str.contains(r"^[\[{]").any() for name in frame.columns if name not in self.lists)

    def _usable(
        self, content: bytes, lines: NDArray[np.int64], names: tuple[str, ...], bad: BadRows
    ) -> tuple[bytes, NDArray[np.int64]]:
        kept, numbers = [], []
        for number, text in zip(lines.tolist(), content.split(b"\n"), strict=False):
            if not text.strip():
                continue
            problem = self._problem(text, names)
            if problem:
                bad.add(self.path, number, problem)
            else:
                kept.append(text)
                numbers.append(number)
        bad.settle()
        return b"".join(text + b"\n" for text in kept), np.array(numbers, dtype=np.int64)

    def _problem(self, text: bytes, names: tuple[str, ...]) -> str:
        try:
            row = json.loads(text, parse_constant=_refuse)
        except UnicodeDecodeError as error:
            return no_utf8(error)
        except (ValueError, RecursionError) as error:
            return f"no JSON ({error})"
        if not isinstance(row, dict):
            return f"got {_kind(row)}, expected an object with names"
        for name in names:
            if isinstance(row.get(name), list | dict) and name not in self.lists:
                return f"column {name!r}: got {_kind(row[name])}, expected one value"
        return ""

    def _read(self, content: bytes, names: tuple[str, ...]) -> pl.DataFrame | None:
        schema = dict.fromkeys(names, pl.String())
        if not content.strip():
            return pl.DataFrame(schema=schema)
        try:
            frame = pl.read_ndjson(io.BytesIO(content), schema=schema)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
            return None
        nothing = ("", *self.nulls)
        return frame.select(column.set(column.is_in(nothing).fill_null(False), None) for column in frame.iter_columns())


def check_lines(content: bytes, path: str) -> None:
    """Refuse the beginning of a file that is one JSON array; `DataError` naming it."""
    if content.lstrip().startswith(b"["):
        raise DataError(
            f"{path}, line 1: a JSON array, expected an object on each line; write it as JSON lines, as by "
            f"jq -c '.[]' {shell_word(path)}"
        )


def first_values(content: bytes) -> dict[str, Any]:
    """Return the names in the first lines, in order of appearance, and the first value of each that is not null."""
    values: dict[str, Any] = {}
    for text in content.split(b"\n", _LINES)[:_LINES]:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            continue
        for name, value in row.items() if isinstance(row, dict) else ():
            if values.get(name) is None:
                values[name] = value
    return values


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _kind(value: object) -> str:
    return {list: "a list", dict: "an object", str: "text", bool: "a truth value", type(None): "null"}.get(
        type(value), "a number"
    )
