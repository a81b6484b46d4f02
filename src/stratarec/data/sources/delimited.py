"""Delimited text by the columns that are wanted: typed in one pass, and by record where something is wrong.

Polars parses; it is asked for text alone where a block does not fit the types. What it lets pass, such as a record that
ends early and that it fills with nothing, is found by counting, and read by record. A quote that never closes ends the
run even where bad rows are skipped: what it swallowed is not known.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.sources.blocks import BadRows, count_byte, no_utf8, unclosed, utf8_fault
from stratarec.errors import DataError
from stratarec.kernels import csv_records

# Of a header.
_LONGEST = 1 << 20
_FAULTS = {
    csv_records.STRAY: "a quote in the middle of a field; if quotes are text in this log, write them doubled in a "
    "quoted field, or set data.source.quote to ''",
    csv_records.RETURN: "a carriage return inside the line",
}

Kinds = Mapping[str, "pl.DataType | type[pl.DataType]"]
Parsed = tuple[pl.DataFrame, NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Delimited:
    """How one file is written."""

    path: str
    names: tuple[str, ...]
    """Of all fields of a record."""
    delimiter: str
    quote: str
    """Empty where nothing is quoted."""
    nulls: tuple[str, ...]
    """What stands for nothing, besides an empty field."""

    def parse(self, content: bytes, numbers: range, kinds: Kinds, bad: BadRows) -> Parsed:
        """The columns of `kinds` and the line of each row; text, where a value is none of its type.

        `numbers` are those of the lines in `content`.

        Records that are none are `bad`; empty lines are left out.
        """
        quoted = self._is_quoted(content)
        if not quoted and self._is_plain(content, len(numbers)):
            frame = self._read(content, kinds, quoted=False)
            if frame is not None and frame.height == len(numbers):
                return frame, np.arange(numbers.start, numbers.stop, dtype=np.int64)
        return self._parse_records(content, numbers.start, kinds, bad)

    def _is_plain(self, content: bytes, lines: int) -> bool:
        """Whether every line is a record with as many fields as it must have, as far as counting tells: Polars refuses
        what has more. Nothing is quoted."""
        if len(self.names) == 1 or b"\r" in content:
            return False
        return count_byte(content, self.delimiter) == lines * (len(self.names) - 1)

    def _is_quoted(self, content: bytes) -> bool:
        return bool(self.quote) and self.quote.encode() in content

    def _parse_records(self, content: bytes, first_line: int, kinds: Kinds, bad: BadRows) -> Parsed:
        records = self._split(content)
        lines = first_line + records.lines
        wrong = (records.fields != len(self.names)) & (records.fields > 0)
        keep = (records.fields > 0) & ~wrong & (records.faults == csv_records.WHOLE)
        for row in np.flatnonzero((records.fields > 0) & ~keep):
            problem = _FAULTS.get(int(records.faults[row])) or self._miscounted(int(records.fields[row]))
            bad.add(self.path, int(lines[row]), problem)
        whole = int(records.ends[-1]) if len(lines) else 0
        if whole < len(content):
            bad.settle()  # a stray quote in a line before may be what opened this one
            raise unclosed(self.path, first_line + content.count(b"\n", 0, whole), content[whole:], self.quote)
        content, lines = _chosen(content, records.ends, keep), lines[keep]
        quoted = self._is_quoted(content)
        for wanted in (kinds, dict.fromkeys(kinds, pl.String)):
            frame = self._read(content, wanted, quoted=quoted)
            if frame is not None and frame.height == len(lines):
                return frame, lines
        content, lines = self._decodable(content, lines, bad)
        frame = self._read(content, dict.fromkeys(kinds, pl.String), quoted=self._is_quoted(content))
        if frame is None or frame.height != len(lines):
            raise DataError(f"{self.path}, line {first_line} and after: cannot be read as delimited text")
        return frame, lines

    def _split(self, content: bytes) -> csv_records.Records:
        quote = ord(self.quote) if self.quote else -1
        return csv_records.split(np.frombuffer(content, dtype=np.uint8), ord(self.delimiter), quote)

    def _miscounted(self, found: int) -> str:
        return f"got {found} field{'s' * (found > 1)}, expected {len(self.names)}"

    def _decodable(self, content: bytes, lines: NDArray[np.int64], bad: BadRows) -> tuple[bytes, NDArray[np.int64]]:
        """Leave out records of bytes that are no UTF-8."""
        ends = self._split(content).ends
        keep = np.ones(len(ends), dtype=bool)
        for row, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if fault := utf8_fault(content[start:end]):
                keep[row] = False
                bad.add(self.path, int(lines[row]), fault)
        return _chosen(content, ends, keep), lines[keep]

    def _read(self, content: bytes, kinds: Kinds, *, quoted: bool) -> pl.DataFrame | None:
        """Some columns of well-formed records, none or some of them `quoted`; None where Polars refuses them."""
        if not content:
            return pl.DataFrame(schema=dict(kinds))
        given = {name: f"column_{place}" for place, name in enumerate(self.names, 1)}
        schema = {column: kinds.get(name, pl.String) for name, column in given.items()}
        try:
            frame = pl.read_csv(
                content,
                has_header=False,
                schema=schema,
                columns=[given[name] for name in kinds],
                separator=self.delimiter,
                quote_char=self.quote if quoted else None,
                null_values=list(self.nulls) or None,
            )
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
            return None
        frame = frame.select(pl.col(given[name]).alias(name) for name in kinds)
        if quoted:
            # An empty field is missing, whether or not it stands in quotes.
            frame = frame.with_columns(
                column.set(column == "", None) for column in frame.iter_columns() if column.dtype == pl.String
            )
        return frame


def read_header(content: bytes, path: str, delimiter: str, quote: str) -> tuple[list[str], int, int]:
    """Names in the first record, without spaces around them, and the bytes and lines that it takes."""
    front = content[:_LONGEST]
    records = csv_records.split(np.frombuffer(front, dtype=np.uint8), ord(delimiter), ord(quote) if quote else -1)
    if not len(records.ends):
        raise DataError(f"{path}, line 1: no header: its end is not found in {_LONGEST:,} bytes; check the format")
    end = int(records.ends[0])
    try:
        text = front[:end].decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line 1: {no_utf8(error)}") from error
    how = {"quotechar": quote} if quote else {"quoting": csv.QUOTE_NONE}
    try:
        names = next(csv.reader([text], delimiter=delimiter, **how), [])
    except csv.Error as error:
        raise DataError(f"{path}, line 1: no header ({error}); check the format") from error
    return [name.strip() for name in names], end, front[:end].count(b"\n")


def _chosen(content: bytes, ends: NDArray[np.int64], keep: NDArray[np.bool_]) -> bytes:
    """The records that are to be kept."""
    if keep.all():
        return content[: int(ends[-1]) if len(ends) else 0]
    starts = np.append(0, ends[:-1])
    return b"".join(content[start:end] for start, end in zip(starts[keep], ends[keep], strict=True))
