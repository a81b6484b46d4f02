"""Delimited text of any size: blocks of whole lines, columns of strings, and the line of every error.

Lines are counted from 1. A row that cannot be used is either the `DataError` that ends the run or, with
``on_bad_row="skip"``, left out and counted. Damage to the file itself (a truncated gzip) always ends the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from stratarec.data.names import column
from stratarec.data.schema import Schema
from stratarec.data.sources.base import WHOLE, Chunk, OnBadRow, Share, chunk_index
from stratarec.data.sources.files import InputFile, expand, fingerprint
from stratarec.data.sources.view import View
from stratarec.errors import DataError

BLOCK_BYTES = 16 << 20
CODECS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}
_EXAMPLES = 5
# Bytes that are compared at a time: what comes of it stays in the processor's cache.
_PIECE = 1 << 18
# Bytes in which the last line end of a block is looked for.
_SEARCHED = 1 << 16


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How a text log is laid out."""

    columns: tuple[str, ...]
    delimiter: str
    header: bool
    """The first line of each file names the columns, and must name these."""


@dataclass
class BadRows:
    """Rows of one block that cannot be used: how many, and what is wrong with the first ones.

    Rows are checked column by column, so which bad row is the first is known when all columns were: `settle` says so.
    """

    on_bad_row: OnBadRow
    count: int = 0
    _first: list[tuple[int, str]] = field(default_factory=list)

    @property
    def examples(self) -> list[str]:
        """Messages for the first bad rows, in the order of the file."""
        return [message for _, message in self._first]

    def add(self, file: str, line: int, problem: str, unit: str = "line") -> None:
        """Record a bad row."""
        self.count += 1
        insort(self._first, (line, f"{file}, {unit} {line}: {problem}"))
        del self._first[_EXAMPLES:]

    def settle(self) -> None:
        """Raise the first one, unless bad rows are skipped."""
        if self.count and self.on_bad_row == "error":
            raise DataError(self.examples[0])


@dataclass(frozen=True, kw_only=True)
class Block:
    """Whole lines of one file."""

    file: int
    first_line: int
    content: bytes
    bytes_done: int
    """Stored bytes of all files consumed so far."""
    lines: int
    """Line ends in `content`."""


def blocks(files: tuple[InputFile, ...], block_bytes: int, max_line_bytes: int, quote: bytes = b"") -> Iterator[Block]:
    """Cut every file into blocks that end at line ends, those inside a pair of quotes aside.

    Raises
    ------
    DataError
        For a file that is damaged or empty, and for a line that is too long, before more than that of it is held.
    """
    before = 0
    for index, file in enumerate(files):
        # Pieces of a line whose end has not come yet; adding each to the ones before would copy them again and again.
        line, rest, held, quoted = 1, [b""], 0, False
        with file.open() as raw:
            for data in _decompressed(raw, file, block_bytes):
                cut, quoted = _last_end(data, quote, quoted)
                if cut:
                    whole = not held and cut == len(data)
                    content = data if whole else b"".join([*rest, memoryview(data)[:cut]])
                    _check_lines(content, file.path, line, max_line_bytes)
                    done, lines = before + min(raw.tell(), file.size), count_byte(content, "\n")
                    yield Block(file=index, first_line=line, content=content, bytes_done=done, lines=lines)
                    line += lines
                    rest, held = [], 0
                rest.append(data[cut:])
                held += len(data) - cut
                if held > max_line_bytes:
                    if quoted:
                        raise unclosed(file.path, line, quote.decode())
                    raise _too_long(file.path, line, max_line_bytes)
        before += file.size
        if held:
            content = b"".join([*rest, b"\n"])
            yield Block(
                file=index, first_line=line, content=content, bytes_done=before, lines=count_byte(content, "\n")
            )
        elif line == 1:
            raise DataError(f"{file.path}: the file is empty, expected at least one row")


def count_byte(content: bytes, mark: str) -> int:
    """How often an ASCII character stands in `content`; `bytes.count` takes ten times as long where it does often."""
    data, same, found = np.frombuffer(content, dtype=np.uint8), np.empty(_PIECE, dtype=bool), 0
    for first in range(0, len(data), _PIECE):
        piece = data[first : first + _PIECE]
        found += int(np.count_nonzero(np.equal(piece, ord(mark), out=same[: len(piece)])))
    return found


def estimate_rows(files: tuple[InputFile, ...], max_line_bytes: int) -> int:
    """From the first block of the first file; compressed text is taken to shrink fourfold."""
    first = next(blocks(files[:1], 1 << 20, max_line_bytes))
    bytes_a_row = len(first.content) / max(first.content.count(b"\n"), 1)
    grown = sum(file.size * (4 if file.path.endswith(tuple(CODECS)) else 1) for file in files)
    return max(int(grown / bytes_a_row), 1)


def _last_end(data: bytes, quote: bytes, quoted: bool) -> tuple[int, bool]:
    """Behind the last line end of `data` that is in no quotes, and whether what follows ends in them.

    `quoted` is whether `data` begins in them.
    """
    end = data.rfind(b"\n") + 1
    if not quote or not (quoted or quote in data):  # looking is ten times as fast as counting
        return end, False
    inside = (data.count(quote, 0, end) + quoted) % 2 == 1
    at_last = inside
    last = end
    while inside and end:
        before = data.rfind(b"\n", 0, end - 1) + 1
        inside ^= data.count(quote, before, end) % 2 == 1
        end = before
    after = (data.count(quote, last) + at_last) % 2 == 1
    return end, after


def _check_lines(content: bytes, path: str, first_line: int, most: int) -> None:
    """Refuse a line of more than `most` bytes, looking at a few ends of lines alone."""
    start = 0
    while start < len(content):
        end = content.rfind(b"\n", start, start + most + 1)
        if end < 0:
            raise _too_long(path, first_line + content.count(b"\n", 0, start), most)
        start = end + 1


def unclosed(path: str, line: int, quote: str) -> DataError:
    """What ends in quotes is no rows: where they should have ended is not known."""
    return DataError(
        f"{path}, line {line}: a quote is not closed in any line that follows; if {quote} is text in "
        "this log, set data.source.quote to ''"
    )


def _too_long(path: str, line: int, most: int) -> DataError:
    return DataError(
        f"{path}, line {line}: longer than {most:,} bytes; if that is a line of this log, raise "
        "data.source.max_line_bytes"
    )


def _decompressed(raw: IO[bytes], file: InputFile, block_bytes: int) -> Iterator[bytes]:
    suffix = next((codec for ending, codec in CODECS.items() if file.path.endswith(ending)), None)
    try:
        if suffix is None and "://" not in file.path:
            yield from _by_lines(raw, block_bytes)
            return
        stream = raw if suffix is None else pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), suffix)
        while data := stream.read(block_bytes):
            yield data
    except (OSError, pa.ArrowException, EOFError) as error:
        what = f"damaged or truncated {suffix}" if suffix else "unreadable"
        raise DataError(f"{file.path}: {what} ({error})") from error


def _by_lines(raw: IO[bytes], block_bytes: int) -> Iterator[bytes]:
    """What lies before each multiple of `block_bytes`, up to the last line end: whole lines are then never copied to
    cut them. Where lines are long, a piece may end in one."""
    place, goal = 0, block_bytes
    while True:
        raw.seek(max(place, goal - _SEARCHED))
        start, tail = raw.tell(), raw.read(min(goal - place, _SEARCHED))
        found = tail.rfind(b"\n") + 1
        raw.seek(place)
        data = raw.read((start + found if found else goal) - place)
        if not data:
            return
        yield data
        place, goal = place + len(data), goal + block_bytes


def read_block(block: Block, file: str, layout: TextFormat, bad: BadRows) -> tuple[pl.DataFrame, NDArray[np.int64]]:
    """The usable rows of a block as string columns (null where empty), and the line number of each."""
    content = block.content.replace(b"\r\n", b"\n") if b"\r" in block.content else block.content
    first_line = block.first_line
    if layout.header and first_line == 1:
        head, _, content = content.partition(b"\n")
        _check_header(head, file, layout)
        first_line = 2
    content, lines = _usable_lines(content, first_line, file, layout, bad)
    if not len(lines):
        return pl.DataFrame(schema=dict.fromkeys(layout.columns, pl.String)), lines
    table = pa_csv.read_csv(
        pa.BufferReader(content),
        read_options=pa_csv.ReadOptions(
            column_names=list(layout.columns), use_threads=False, block_size=len(content) + 1
        ),
        parse_options=pa_csv.ParseOptions(delimiter=layout.delimiter, quote_char=False, ignore_empty_lines=False),
        convert_options=pa_csv.ConvertOptions(
            column_types=dict.fromkeys(layout.columns, pa.string()), null_values=[""], strings_can_be_null=True
        ),
    )
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    assert frame.height == len(lines)
    return frame, lines


def _check_header(head: bytes, file: str, layout: TextFormat) -> None:
    names = head.decode("utf-8", "replace").split(layout.delimiter)
    if tuple(names) == layout.columns:
        return
    missing = [name for name in layout.columns if name not in names]
    detail = f"missing {', '.join(missing)}" if missing else f"got {', '.join(names)[:200]}"
    raise DataError(f"{file}, line 1: the header does not name the expected columns ({detail})")


def _usable_lines(
    content: bytes, first_line: int, file: str, layout: TextFormat, bad: BadRows
) -> tuple[bytes, NDArray[np.int64]]:
    """Leave out lines with a wrong number of fields, a stray carriage return, or bytes that are not UTF-8."""
    data = np.frombuffer(content, dtype=np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    fields = 1 + np.diff(np.searchsorted(np.flatnonzero(data == ord(layout.delimiter)), ends), prepend=0)
    lines = first_line + np.arange(len(ends), dtype=np.int64)
    expected = len(layout.columns)
    wrong = fields != expected
    if wrong.any() or b"\r" in content or not is_utf8(content):
        split = content.split(b"\n")[: len(ends)]
        keep = np.zeros(len(ends), dtype=bool)
        for i, text in enumerate(split):
            if problem := _line_problem(text, int(fields[i]), expected):
                bad.add(file, int(lines[i]), problem)
            else:
                keep[i] = True
        content = b"".join(text + b"\n" for text, good in zip(split, keep, strict=True) if good)
        lines = lines[keep]
    return content, lines


def is_utf8(content: bytes) -> bool:
    """Whether bytes are text."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _line_problem(text: bytes, fields: int, expected: int) -> str:
    if not text:
        return f"an empty line, expected {expected} fields"
    if fields != expected:
        return f"got {fields} fields, expected {expected}"
    if b"\r" in text:
        return "a carriage return inside the line"
    return "" if is_utf8(text) else "bytes that are not UTF-8"


class RowChecks:
    """Marks rows of a frame whose fields are not what they should be."""

    def __init__(self, file: str, lines: NDArray[np.int64], bad: BadRows) -> None:
        self._file, self._lines, self._bad = file, lines, bad
        self._good = np.ones(len(lines), dtype=bool)

    @property
    def lines(self) -> NDArray[np.int64]:
        """The lines of the rows that passed."""
        return self._lines[self._good]

    def require(self, raw: pl.Series, fine: pl.Series, expected: str) -> None:
        """Every row of the column `raw` must be `fine`; the message quotes what was got."""
        wrong = ~fine.fill_null(False).to_numpy() & self._good
        for row in np.flatnonzero(wrong):
            got = "nothing" if raw[int(row)] is None else repr(raw[int(row)])
            self._bad.add(self._file, int(self._lines[row]), f"field {raw.name!r}: got {got}, expected {expected}")
        self._good &= ~wrong

    def label(self, raw: pl.Series) -> pl.Series:
        """``UInt8`` 0 or 1."""
        self.require(raw, raw.is_in(["0", "1"]), "0 or 1")
        return (raw == "1").cast(pl.UInt8)

    def number(self, raw: pl.Series) -> pl.Series:
        """``Float64``, null where the field is empty; anything but a finite number is bad."""
        value = raw.str.strip_chars().cast(pl.Float64, strict=False)
        fits = value.is_finite() & (value.abs() <= 3.0e38)
        self.require(raw, raw.is_null() | fits.fill_null(False), "a number or nothing")
        return value

    def good(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The rows of `frame` that passed; raises what is wrong with the first one that did not, if it may not."""
        self._bad.settle()
        return frame if self._good.all() else frame.filter(pl.Series(self._good))


class TextConfig(Protocol):
    """The configuration of a text source."""

    @property
    def paths(self) -> tuple[str, ...]: ...
    @property
    def max_line_bytes(self) -> int: ...


class TextSource(ABC):
    """Rows of delimited text in file order; a subclass says what the log looks like."""

    divisible = True
    kind: str
    layout: TextFormat
    schema: Schema

    def __init__(
        self,
        config: TextConfig,
        on_bad_row: OnBadRow,
        block_bytes: int = BLOCK_BYTES,
        view: View | None = None,
    ) -> None:
        self._files, self._view = expand(config.paths), view
        self._on_bad_row = on_bad_row
        self._block_bytes, self._max_line_bytes = block_bytes, config.max_line_bytes
        self.files = tuple(file.path for file in self._files)
        self.total_bytes = sum(file.size for file in self._files)
        if view is not None:
            self.layout = self._found_layout()

    @abstractmethod
    def convert(self, frame: pl.DataFrame, checks: RowChecks) -> pl.DataFrame:
        """Columns of text as `Source` promises them, the label where there is one."""

    def _found_layout(self) -> TextFormat:
        """The layout, without the label where the first line has none: rows that are to be scored may lack it."""
        bare = tuple(name for name in self.layout.columns if name != self.schema.label_column)
        block = next(blocks(self._files[:1], _PIECE, self._max_line_bytes), None)
        first = block.content.partition(b"\n")[0] if block is not None else b""
        fields = first.rstrip(b"\r").decode("utf-8", "replace").split(self.layout.delimiter)
        lacks = tuple(fields) == bare if self.layout.header else len(fields) == len(bare)
        return replace(self.layout, columns=bare) if lacks else self.layout

    def column_names(self) -> list[str]:
        """Of the first file."""
        return list(self.layout.columns)

    def estimate_rows(self) -> int:
        return estimate_rows(self._files, self._max_line_bytes)

    def fingerprint(self) -> dict[str, object]:
        return {"kind": self.kind, "files": fingerprint(self._files), "block_bytes": self._block_bytes}

    def chunks(self, workspace: Path, share: Share = WHOLE) -> Iterator[Chunk]:
        """A chunk a block; of files in the share, blocks that are not wanted are read but not parsed."""
        before = 0
        for number, file in enumerate(self._files):
            if share.has_file(number):
                for piece, block in enumerate(blocks((file,), self._block_bytes, self._max_line_bytes)):
                    index = chunk_index(number, piece)
                    if share.has(index, number, piece):
                        yield self._chunk(index, number, block, before)
            before += file.size

    def _chunk(self, index: int, file: int, block: Block, before: int) -> Chunk:
        bad = BadRows(self._on_bad_row)
        path = self.files[file]
        frame, lines = read_block(block, path, self.layout, bad)
        checks = RowChecks(path, lines, bad)
        converted = checks.good(self.convert(frame, checks))
        keep = self._view.keep if self._view else ()
        return Chunk(
            index=index,
            file=file,
            frame=converted,
            kept=checks.good(frame.select(column(name) for name in keep)) if keep else None,
            rows=checks.lines,
            bytes_done=before + block.bytes_done,
            bad_rows=bad.count,
            bad_examples=tuple(bad.examples),
        )
