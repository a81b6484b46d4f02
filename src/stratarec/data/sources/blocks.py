"""Text of any size: blocks of whole lines, and the line of every error.

Delimited text is cut at line ends outside of quotes (an even number of them before), JSON lines at every one. A longest
line bounds memory, and changes nothing of what is read.
Lines are counted from 1. A row that cannot be used is either the `DataError` that ends the run or, with
``on_bad_row="skip"``, left out and counted. Damage to the file itself (a truncated gzip) always ends the run.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

import numpy as np
import pyarrow as pa

from stratarec.data.sources.base import OnBadRow
from stratarec.data.sources.files import InputFile
from stratarec.errors import DataError

BLOCK_BYTES = 16 << 20
CODECS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}
_EXAMPLES = 5
# Bytes that are compared at a time: what comes of it stays in the processor's cache.
_PIECE = 1 << 18
# Bytes in which the last line end of a block is looked for.
_SEARCHED = 1 << 16


@dataclass
class BadRows:
    """Rows of one block that cannot be used: how many, and what is wrong with the first ones.

    Rows are checked column by column, so which bad row is the first is known when all columns were: `settle` says so.
    """

    on_bad_row: OnBadRow | None
    """None where rows must be good, and no setting leaves others out."""
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

    def settle(self, rows: int = 0) -> None:
        """Raise the first one, unless bad rows are skipped; where most of `rows` are good, with what leaves it out."""
        if not self.count or self.on_bad_row == "skip":
            return
        if self.on_bad_row is None:
            raise DataError(self.examples[0])
        advice = "data.on_bad_row=skip leaves bad rows out"
        if self.count * 2 > rows > 1:
            advice = f"{self.count:,} of {max(rows, self.count):,} rows around it are bad: check data.source"
        elif self.count > 1:
            advice = f"{self.count:,} rows around it are bad; {advice}"
        raise DataError(f"{self.examples[0]}; {advice}")


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


def is_utf8(content: bytes) -> bool:
    """Whether bytes are text."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
