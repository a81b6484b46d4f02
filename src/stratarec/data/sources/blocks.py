"""Text of any size: blocks of whole lines, and the line of every error.

Delimited text is cut at line ends outside of quotes (an even number of them before), JSON lines at every one. A longest
line bounds memory, and changes nothing of what is read.
Lines are counted from 1. A row that cannot be used is either the `DataError` that ends the run or, with
``on_bad_row="skip"``, left out and counted. Damage to the file itself (a truncated gzip) always ends the run.
"""

from __future__ import annotations

import codecs
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import IO

import numpy as np
import pyarrow as pa

from stratarec.data.sources.base import OnBadRow
from stratarec.data.sources.files import InputFile
from stratarec.errors import DataError
from stratarec.io.names import shell_word

BLOCK_BYTES = 16 << 20
CODECS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}
_EXAMPLES = 5
# Bytes that are compared at a time: what comes of it stays in the processor's cache.
_PIECE = 1 << 18
# Bytes in which the last line end of a block is looked for.
_SEARCHED = 1 << 16
# What files of wide characters begin with; the longer ones first.
_WIDE = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


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


def blocks(
    files: tuple[InputFile, ...], block_bytes: int, max_line_bytes: int, quote: bytes = b"", encoding: str = "utf-8"
) -> Iterator[Block]:
    """Cut every file into one or more blocks that end at line ends outside of quotes, with their content in UTF-8.

    Raises
    ------
    DataError
        If a file is damaged or not in `encoding`, and if a line is too long, before more than that of it is in memory.
    """
    before = 0
    for index, file in enumerate(files):
        # Pieces of a line whose end has not come yet; adding each to the ones before would copy them again and again.
        line, rest, held, quoted = 1, [b""], 0, False
        with file.open() as raw:
            for data in _text(raw, file, block_bytes, encoding):
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
                        raise unclosed(file.path, line, b"".join(rest), quote.decode())
                    raise _too_long(file.path, line, max_line_bytes)
        before += file.size
        if held:
            content = b"".join([*rest, b"\n"])
            yield Block(
                file=index, first_line=line, content=content, bytes_done=before, lines=count_byte(content, "\n")
            )
        elif line == 1:
            yield Block(file=index, first_line=line, content=b"", bytes_done=before, lines=0)


def count_byte(content: bytes, mark: str) -> int:
    """How often an ASCII character stands in `content`; `bytes.count` takes ten times as long where it does often."""
    data, same, found = np.frombuffer(content, dtype=np.uint8), np.empty(_PIECE, dtype=bool), 0
    for first in range(0, len(data), _PIECE):
        piece = data[first : first + _PIECE]
        found += int(np.count_nonzero(np.equal(piece, ord(mark), out=same[: len(piece)])))
    return found


def estimate_rows(files: tuple[InputFile, ...], max_line_bytes: int, encoding: str = "utf-8") -> int:
    """From the first block of the first file; compressed text is taken to shrink fourfold."""
    fronts = (next(blocks((file,), 1 << 20, max_line_bytes, encoding=encoding)) for file in files)
    first = next((front for front in fronts if front.content), None)
    if first is None:
        return 1
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
    after = inside ^ (data.count(quote, end) % 2 == 1)
    while inside and end:
        # No line end behind the last quote is outside of quotes either.
        last = data.rfind(quote, 0, end)
        before = data.rfind(b"\n", 0, max(last, 0)) + 1
        inside ^= data.count(quote, before, end) % 2 == 1
        end = before
    return end, after


def _check_lines(content: bytes, path: str, first_line: int, most: int) -> None:
    """Refuse a line of more than `most` bytes, looking at a few ends of lines alone."""
    start = 0
    while start < len(content):
        end = content.rfind(b"\n", start, start + most + 1)
        if end < 0:
            raise _too_long(path, first_line + content.count(b"\n", 0, start), most)
        start = end + 1


def unclosed(path: str, line: int, content: bytes, quote: str) -> DataError:
    """What ends in quotes is no rows: where they should have ended is not known. `content` is all from `line` on."""
    opened = line + content.count(b"\n", 0, _opened(content, quote.encode()))
    return DataError(
        f"{path}, line {opened}: a quote is not closed in any line that follows; if {quote} is text in "
        "this log, write it doubled in a quoted field, or set data.source.quote to ''"
    )


def _opened(content: bytes, quote: bytes) -> int:
    """Place of the quote that should have been closed: of the first whose end a field goes on behind, or the last."""
    ends, opened, place = (quote, b"", *(bytes([mark]) for mark in b",;|\t\r\n")), 0, content.find(quote)
    while place >= 0:
        opened = opened if place and content[place - 1 : place] == quote else place
        close = content.find(quote, place + 1)
        if close < 0 or content[close + 1 : close + 2] not in ends:
            break
        place = content.find(quote, close + 1)
    return opened


def _too_long(path: str, line: int, most: int) -> DataError:
    return DataError(
        f"{path}, line {line}: longer than {most:,} bytes; if that is a line of this log, raise "
        "data.source.max_line_bytes"
    )


def _text(raw: IO[bytes], file: InputFile, block_bytes: int, encoding: str) -> Iterator[bytes]:
    """What is stored, decompressed and in UTF-8."""
    pieces = _decompressed(raw, file, block_bytes)
    first = next(pieces, b"")
    _check_front(first, file.path, encoding)
    pieces = chain([first], pieces)
    yield from pieces if encoding == "utf-8" else _transcoded(pieces, file.path, encoding)


def _check_front(front: bytes, path: str, encoding: str) -> None:
    """Refuse what is no text, or text that no line end divides, by the beginning of a file."""
    if front.startswith(b"PAR1"):
        raise DataError(f"{path}: a Parquet file, expected text; write it as text")
    if encoding != "utf-8":
        return
    wide = next((name for mark, name in _WIDE if front.startswith(mark)), "")
    zero = front.find(b"\0", 0, _SEARCHED)
    zeros = [front[parity:_SEARCHED:2].count(0) * 3 for parity in (0, 1)]
    if not wide and min(zeros) < len(front[:_SEARCHED]) // 2 < max(zeros):
        wide = "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"
    if wide:
        raise DataError(f"{path}, {place_in(front, zero)}: {wide.upper()} text, expected UTF-8; {reencode(wide)}")
    if zero >= 0:
        raise DataError(f"{path}, {place_in(front, zero)}: a zero byte, expected text in UTF-8; write the log without")
    if b"\r" in front and b"\n" not in front:
        raise DataError(
            f"{path}, line 1: lines end in a carriage return alone, expected a line feed; write the log anew, as by "
            f"tr '\\r' '\\n' < {shell_word(path)}"
        )


def _transcoded(pieces: Iterator[bytes], path: str, encoding: str) -> Iterator[bytes]:
    decoder, line = codecs.getincrementaldecoder(encoding)(), 1
    for piece in chain(pieces, [b""]):
        try:
            text = decoder.decode(piece, not piece)
        except UnicodeError as error:
            before = getattr(error, "object", b"")[: getattr(error, "start", 0)].decode(encoding, "ignore")
            where = line + before.count("\n")
            raise DataError(f"{path}, line {where}: no {encoding} ({error}); check data.source.encoding") from error
        line += text.count("\n")
        yield text.encode("utf-8", "replace")


def place_in(content: bytes, at: int) -> str:
    """Where a byte is, in words; lines and bytes are counted from 1."""
    start = content.rfind(b"\n", 0, at) + 1
    return f"line {content.count(10, 0, at) + 1}, byte {at - start + 1}"


def no_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with bytes, and what to do."""
    found = error.object[error.start]
    return f"byte {error.start + 1} is 0x{found:02x}, which is not UTF-8; {reencode('latin-1')}"


def utf8_fault(content: bytes) -> str:
    """What is wrong with a record where it is no text; else nothing."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return no_utf8(error)
    return ""


def check_utf8(content: bytes, path: str) -> None:
    """Refuse the beginning of a file that is no text."""
    for line, record in enumerate([] if is_utf8(content) else content.split(b"\n"), 1):
        if fault := utf8_fault(record):
            raise DataError(f"{path}, line {line}: {fault}")


def reencode(encoding: str) -> str:
    """What to do about text of another encoding."""
    return f"set data.source.encoding, such as {encoding}, or convert the file (iconv -f {encoding} -t utf-8)"


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
    return not utf8_fault(content)
