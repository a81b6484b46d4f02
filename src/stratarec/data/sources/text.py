"""Text logs of any size: files are cut into chunks of whole lines, which are parsed as delimited
text or JSON lines.

Delimited text is cut at line ends outside of quotes (after an even number of quotes), JSON lines at
every line end. Memory is limited by the longest allowed line. Lines are counted from 1. Damage to a
file itself, such as a truncated gzip, is always an error.

Polars parses the chunks. If a value does not fit the type of its column, the chunk is read again as
text. Polars also accepts records that end early, and fills them with nulls. Such records are
detected by counting delimiters, and the chunk is then split by record. A quote that is never closed
is an error even if bad rows are skipped, because it is unknown how many rows it covers.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from stratarec.data.columns.converter import BadRows
from stratarec.data.columns.frames import flattened
from stratarec.data.columns.text_values import lists_from_text
from stratarec.data.sources.files import InputFile
from stratarec.data.sources.formats import DAMAGE, compression_of, decompressed_stream, refuse_packed
from stratarec.errors import DataError
from stratarec.io.names import shell_word

if TYPE_CHECKING:
    from stratarec.kernels.csv_records import Records

CHUNK_BYTES = 16 << 20
BOM = b"\xef\xbb\xbf"
# Number of bytes that are compared at a time, so that the result stays in the processor's cache.
_COMPARE_BYTES = 1 << 18
# Number of bytes that are searched at a time for the last line end of a chunk.
_SEARCH_BYTES = 1 << 16
_MAX_HEADER_BYTES = 1 << 20
# Number of JSON lines that are searched for the names of columns.
_NAME_LINES = 1000
# Maximum number of records, and of their bytes, that show whether a file has a header and labels.
_RECORDS, _RECORD_BYTES = 100, 1 << 20
# Byte order marks of UTF-16 and UTF-32. The longer marks are first, because they begin like the
# shorter ones.
_WIDE = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Bytes that text has in no encoding of one byte. Hive separates fields by bytes 1 to 3, and DOS
# ends files with 26.
_BINARY = re.compile(rb"[\x00\x04-\x08\x0e-\x19]")
_HIGH_BYTES = re.compile(rb"[\x80-\xff]+")
# Text of each fault of `kernels.csv_records`.
_FAULTS = (
    "",
    "a quote in the middle of a field; if quotes are text in this log, write them doubled in a quoted "
    "field, or set data.source.quote to ''",
    "a carriage return inside the line",
)
_JSON_TYPES = {list: "a list", dict: "an object", str: "text", bool: "a truth value", type(None): "null"}

ColumnTypes = Mapping[str, "pl.DataType | type[pl.DataType]"]
Parsed = tuple[pl.DataFrame, NDArray[np.int64]]
"""Columns, and the line number of each row."""


@dataclass(frozen=True, kw_only=True)
class TextChunk:
    """Whole lines of one file."""

    first_line: int
    content: bytes
    bytes_done: int
    """Number of bytes of the file, as stored, up to the end of the chunk."""
    lines: int
    """Number of line ends in `content`."""


def read_chunks(
    file: InputFile, chunk_bytes: int, max_line_bytes: int, quote: bytes = b"", encoding: str = "utf-8"
) -> Iterator[TextChunk]:
    """Yield the content of a file, converted to UTF-8, as chunks that end at line ends outside of
    quotes.

    Raises
    ------
    DataError
        If the file is damaged or not in `encoding`, or if a line is longer than `max_line_bytes`.
    """
    # Pieces of a line whose end was not read yet. They are joined once, because joining each piece
    # would copy all earlier pieces again.
    line = 1
    pending = [b""]
    pending_bytes = 0
    in_quotes = False
    with file.open() as raw:
        for data in _text(raw, file, chunk_bytes, encoding):
            cut, in_quotes = _last_line_end(data, quote, in_quotes)
            if cut:
                is_whole = not pending_bytes and cut == len(data)
                content = data if is_whole else b"".join([*pending, memoryview(data)[:cut]])
                _check_line_lengths(content, file.path, line, max_line_bytes)
                lines = _count_byte(content, "\n")
                yield TextChunk(
                    first_line=line, content=content, bytes_done=min(raw.tell(), file.size), lines=lines
                )
                line += lines
                pending, pending_bytes = [], 0
            pending.append(data[cut:])
            pending_bytes += len(data) - cut
            if pending_bytes > max_line_bytes:
                if in_quotes:
                    raise _unclosed_quote(file.path, line, b"".join(pending), quote.decode())
                raise _line_too_long(file.path, line, max_line_bytes)
    if pending_bytes or line == 1:
        content = b"".join([*pending, b"\n"]) if pending_bytes else b""
        yield TextChunk(
            first_line=line, content=content, bytes_done=file.size, lines=_count_byte(content, "\n")
        )


def _count_byte(content: bytes, mark: str) -> int:
    """Count an ASCII character in `content`. For frequent characters, `bytes.count` would take ten
    times as long.
    """
    data, equal, count = np.frombuffer(content, dtype=np.uint8), np.empty(_COMPARE_BYTES, dtype=bool), 0
    for first in range(0, len(data), _COMPARE_BYTES):
        piece = data[first : first + _COMPARE_BYTES]
        count += int(np.count_nonzero(np.equal(piece, ord(mark), out=equal[: len(piece)])))
    return count


def estimate_rows(files: tuple[InputFile, ...], max_line_bytes: int, encoding: str = "utf-8") -> int:
    """Estimate the number of rows of all files from the first chunk. Compressed text is assumed to
    be four times as large when decompressed."""
    for file in files:
        front = next(read_chunks(file, 1 << 20, max_line_bytes, encoding=encoding)).content
        if front:
            text_bytes = sum(file.size for file in files) * (
                4 if compression_of(file.front(), file.path) else 1
            )
            return max(int(text_bytes / (len(front) / max(front.count(b"\n"), 1))), 1)
    return 1


def _last_line_end(data: bytes, quote: bytes, in_quotes: bool) -> tuple[int, bool]:
    """Return the position after the last line end outside of quotes, and whether `data` ends inside
    quotes.

    `in_quotes` says whether `data` begins inside quotes.
    """
    end = data.rfind(b"\n") + 1
    if not quote or not (in_quotes or quote in data):  # the search is ten times as fast as counting
        return end, False
    inside = (data.count(quote, 0, end) + in_quotes) % 2 == 1
    ends_inside = inside ^ (data.count(quote, end) % 2 == 1)
    while inside and end:
        # The text after the last quote is inside quotes too, so its line ends do not count.
        last = data.rfind(quote, 0, end)
        before = data.rfind(b"\n", 0, max(last, 0)) + 1
        inside ^= data.count(quote, before, end) % 2 == 1
        end = before
    return end, ends_inside


def _check_line_lengths(content: bytes, path: str, first_line: int, max_bytes: int) -> None:
    """Raise `DataError` for a line of more than `max_bytes`, without searching every line end."""
    start = 0
    while start < len(content):
        end = content.rfind(b"\n", start, start + max_bytes + 1)
        if end < 0:
            raise _line_too_long(path, first_line + content.count(b"\n", 0, start), max_bytes)
        start = end + 1


def _unclosed_quote(path: str, line: int, content: bytes, quote: str) -> DataError:
    """Return the error for a quote that is not closed in `content`, which begins at `line`."""
    opening = line + content.count(b"\n", 0, _opening_quote(content, quote.encode()))
    return DataError(
        f"{path}, line {opening}: a quote is not closed in any line that follows; if {quote} is text in "
        "this log, write it doubled in a quoted field, or set data.source.quote to ''"
    )


def _opening_quote(content: bytes, quote: bytes) -> int:
    """Return the position of the quote that is not closed.

    Quotes are paired in order. If text follows a closing quote inside the same field, the pair's
    first quote is returned; otherwise the quote without a partner.
    """
    ends, opening, place = (quote, b"", *(bytes([mark]) for mark in b",;|\t\r\n")), 0, content.find(quote)
    while place >= 0:
        opening = opening if place and content[place - 1 : place] == quote else place
        close = content.find(quote, place + 1)
        if close < 0 or content[close + 1 : close + 2] not in ends:
            break
        place = content.find(quote, close + 1)
    return opening


def _line_too_long(path: str, line: int, max_bytes: int) -> DataError:
    return DataError(
        f"{path}, line {line}: longer than {max_bytes:,} bytes; if that is a line of this log, raise "
        "data.source.max_line_bytes"
    )


def _text(raw: IO[bytes], file: InputFile, chunk_bytes: int, encoding: str) -> Iterator[bytes]:
    """Yield the content of a file, decompressed and converted to UTF-8."""
    codec = compression_of(file.front(), file.path)
    pieces = _decompressed(raw, file.path, codec, chunk_bytes)
    first = next(pieces, b"")
    refuse_packed(first, file.path, codec)
    _check_front(first, file.path, encoding)
    pieces = chain([first], pieces)
    yield from pieces if encoding == "utf-8" else _transcoded(pieces, file.path, encoding)


def _check_front(front: bytes, path: str, encoding: str) -> None:
    """Refuse a file whose first bytes show that it is not text in `encoding` with lines that end in
    a line feed.
    """
    if encoding != "utf-8":
        return
    wide, zero = _wide_encoding(front), front.find(b"\0", 0, _SEARCH_BYTES)
    start = front.rfind(b"\n", 0, max(zero, 0)) + 1
    place = f"line {front.count(10, 0, max(zero, 0)) + 1}, byte {max(zero, 0) - start + 1}"
    if wide:
        raise DataError(f"{path}, {place}: {wide.upper()} text, expected UTF-8; {_reencode(wide)}")
    if zero >= 0:
        raise DataError(
            f"{path}, {place}: a zero byte, expected text in UTF-8; write the log without zero bytes"
        )
    if b"\r" in front and b"\n" not in front:
        raise DataError(
            f"{path}, line 1: lines end in a carriage return alone, expected a line feed; convert the log: "
            f"tr '\\r' '\\n' < {shell_word(path)}"
        )


def _wide_encoding(front: bytes) -> str:
    """Return the encoding of text in UTF-16 or UTF-32, given its first bytes; an empty string for
    other text.
    """
    wide = next((name for mark, name in _WIDE if front.startswith(mark)), "")
    zeros = [front[parity:_SEARCH_BYTES:2].count(0) * 3 for parity in (0, 1)]
    if not wide and min(zeros) < len(front[:_SEARCH_BYTES]) // 2 < max(zeros):
        wide = "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"
    return wide


def wide_encoding(file: InputFile) -> str:
    """Return the encoding of a file in UTF-16 or UTF-32; an empty string for other files."""
    with file.open() as raw:
        codec = compression_of(file.front(), file.path)
        return _wide_encoding(next(_decompressed(raw, file.path, codec, _SEARCH_BYTES), b""))


def narrow_encoding(content: bytes) -> str:
    """Return the encoding of text: UTF-8, or a western European one if the bytes show it.

    Text in UTF-8 with some damaged bytes is still UTF-8. Bytes above 127 are single letters in
    western European words, and adjacent in other alphabets, whose encoding the bytes do not show.
    """
    if (
        not utf8_fault(content)
        or not content.decode("utf-8", "ignore").isascii()
        or _BINARY.search(content)
    ):
        return "utf-8"
    lengths = list(map(len, _HIGH_BYTES.findall(content)))
    if 2 * sum(length for length in lengths if length > 1) > sum(lengths):
        return "utf-8"
    try:
        content.decode("cp1252")
    except UnicodeDecodeError:
        return "latin-1"
    return "cp1252"


def _transcoded(pieces: Iterator[bytes], path: str, encoding: str) -> Iterator[bytes]:
    decoder, line = codecs.getincrementaldecoder(encoding)(), 1
    for piece in chain(pieces, [b""]):
        try:
            text = decoder.decode(piece, not piece)
        except UnicodeError as error:
            before = getattr(error, "object", b"")[: getattr(error, "start", 0)].decode(encoding, "ignore")
            error_line = line + before.count("\n")
            raise DataError(
                f"{path}, line {error_line}: not {encoding} ({error}); check data.source.encoding"
            ) from error
        line += text.count("\n")
        yield text.encode("utf-8", "replace")


def utf8_fault(content: bytes) -> str:
    """Return an error text with advice if `content` is not valid UTF-8, else an empty string."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return _no_utf8(error)
    return ""


def _no_utf8(error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"byte {error.start + 1} is 0x{byte:02x}, which is not UTF-8; {_reencode('latin-1')}"


def check_utf8(content: bytes, path: str) -> None:
    """Raise `DataError`, which names the line, if the first bytes of a file are not valid UTF-8."""
    for line, record in enumerate(content.split(b"\n") if utf8_fault(content) else [], 1):
        if fault := utf8_fault(record):
            raise DataError(f"{path}, line {line}: {fault}")


def _reencode(encoding: str) -> str:
    name = encoding.replace("latin-1", "latin1")  # the name that iconv knows
    return f"set data.source.encoding, such as {encoding}, or convert the file (iconv -f {name} -t utf-8)"


def _decompressed(raw: IO[bytes], path: str, codec: str, chunk_bytes: int) -> Iterator[bytes]:
    try:
        stream = decompressed_stream(raw, path, codec)
        while data := stream.read(chunk_bytes):
            yield data
    except DAMAGE as error:
        fault = f"damaged or truncated {codec}" if codec else "unreadable"
        raise DataError(f"{path}: {fault} ({error})") from error


@dataclass(frozen=True, kw_only=True)
class Delimited:
    """Format of one file of delimited text."""

    path: str
    names: tuple[str, ...]
    """Names of all fields of a record, in order."""
    delimiter: str
    quote: str
    """Quotation character; empty for none."""
    nulls: tuple[str, ...]
    """Texts that mean a missing value, in addition to an empty field."""

    def parse(self, content: bytes, numbers: range, types: ColumnTypes, bad: BadRows) -> Parsed:
        """Parse a chunk. Return its columns, and the line number of each row.

        Columns have the `types`, or are all text if a value does not fit its type. `numbers` are
        the numbers of the lines in `content`. Malformed records are added to `bad`; empty lines are
        ignored.
        """
        if self._is_plain(content, len(numbers)):
            frame = self._read_rows(content, types, len(numbers))
            if frame is not None:
                return frame, np.arange(numbers.start, numbers.stop, dtype=np.int64)
        return self._parse_records(content, numbers.start, types, bad)

    def has_leading_zeros(self, content: bytes) -> bool:
        """Whether a field may have leading zeros, such as 007, which Polars would read as the
        integer 7.
        """
        return has_leading_zeros(content, self.delimiter, self.quote)

    def _is_plain(self, content: bytes, lines: int) -> bool:
        """Whether nothing is quoted and there are enough delimiters. (Polars refuses records with
        too many fields.)
        """
        if len(self.names) == 1 or b"\r" in content or self._is_quoted(content):
            return False
        return _count_byte(content, self.delimiter) == lines * (len(self.names) - 1)

    def _is_quoted(self, content: bytes) -> bool:
        return bool(self.quote) and self.quote.encode() in content

    def _parse_records(self, content: bytes, first_line: int, types: ColumnTypes, bad: BadRows) -> Parsed:
        records = self._split(content)
        lines = first_line + records.lines
        has_all = records.fields == len(self.names)
        is_good = (records.fields > 0) & has_all & (records.faults == 0)
        for row in np.flatnonzero((records.fields > 0) & ~is_good):
            count = int(records.fields[row])
            problem = f"got {count} field{'s' * (count > 1)}, expected {len(self.names)}"
            bad.add(self.path, int(lines[row]), _FAULTS[records.faults[row]] or problem)
        end = int(records.ends[-1]) if len(lines) else 0
        if end < len(content):
            bad.raise_first()  # a stray quote in an earlier line may have opened this one
            raise _unclosed_quote(
                self.path, first_line + content.count(b"\n", 0, end), content[end:], self.quote
            )
        content, lines = _select_records(content, records.ends, is_good), lines[is_good]
        frame = self._read_rows(content, types, len(lines))
        if frame is not None:
            return frame, lines
        content, lines = self._decodable(content, lines, bad)
        frame = self._read_rows(content, dict.fromkeys(types, pl.String), len(lines))
        if frame is None:
            raise DataError(f"{self.path}, line {first_line} and after: cannot be read as delimited text")
        return frame, lines

    def _split(self, content: bytes) -> Records:
        # Numba takes a second to load, and most logs do not need it
        from stratarec.kernels.csv_records import split

        quote = ord(self.quote) if self.quote else -1
        return split(np.frombuffer(content, dtype=np.uint8), ord(self.delimiter), quote)

    def _decodable(
        self, content: bytes, lines: NDArray[np.int64], bad: BadRows
    ) -> tuple[bytes, NDArray[np.int64]]:
        """Remove records that are not valid UTF-8, and add them to `bad`."""
        ends = self._split(content).ends
        is_good = np.ones(len(ends), dtype=bool)
        for row, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if fault := utf8_fault(content[start:end]):
                is_good[row] = False
                bad.add(self.path, int(lines[row]), fault)
        return _select_records(content, ends, is_good), lines[is_good]

    def _read_rows(self, content: bytes, types: ColumnTypes, rows: int) -> pl.DataFrame | None:
        """Parse `rows` records; None if Polars reads another number of records.

        If a value does not fit its type, all columns are text.
        """
        for column_types in (types, dict.fromkeys(types, pl.String)):
            frame = self._read(content, column_types)
            if frame is not None and frame.height == rows:
                return frame
        return None

    def _read(self, content: bytes, types: ColumnTypes) -> pl.DataFrame | None:
        """Parse well-formed records with Polars; None if Polars refuses them."""
        if not content:
            return pl.DataFrame(schema=dict(types))
        is_quoted = self._is_quoted(content)
        places = {name: f"column_{place}" for place, name in enumerate(self.names, 1)}
        try:
            frame = pl.read_csv(
                content,
                has_header=False,
                schema={place: types.get(name, pl.String) for name, place in places.items()},
                columns=[places[name] for name in types],
                separator=self.delimiter,
                quote_char=self.quote if is_quoted else None,
                null_values=list(self.nulls) or None,
            )
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
            return None
        frame = frame.select(pl.col(places[name]).alias(name) for name in types)
        if is_quoted:
            # An empty field is missing, whether or not it is in quotes.
            frame = frame.with_columns(
                column.set(column == "", None)
                for column in frame.iter_columns()
                if column.dtype == pl.String
            )
        return frame


def read_header(content: bytes, path: str, delimiter: str, quote: str) -> tuple[list[str], int, int]:
    """Return the field names in the first record, stripped, and the numbers of bytes and lines of
    the record.
    """
    front = content[:_MAX_HEADER_BYTES]
    end = _first_record_end(front, quote.encode())
    if not end:
        raise DataError(
            f"{path}, line 1: the first record exceeds {_MAX_HEADER_BYTES:,} bytes; check the format"
        )
    try:
        text = front[:end].decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line 1: {_no_utf8(error)}") from error
    try:
        names = next(csv.reader([text], delimiter=delimiter, **_quoting(quote)), [])
    except csv.Error as error:
        raise DataError(f"{path}, line 1: no header ({error}); check the format") from error
    return [name.strip() for name in names], end, front[:end].count(b"\n")


def first_records(content: bytes, delimiter: str, quote: str = '"') -> list[list[str]]:
    """Return the fields of the first records, stripped; fewer if one cannot be read, such as a very
    long one.
    """
    lines, records = io.StringIO(content[:_RECORD_BYTES].decode("utf-8", "replace")), list[list[str]]()
    with suppress(csv.Error):
        for record in islice(csv.reader(lines, delimiter=delimiter, **_quoting(quote)), _RECORDS):
            records.append([field.strip() for field in record])
    return records


def _quoting(quote: str) -> dict[str, Any]:
    return {"quotechar": quote} if quote else {"quoting": csv.QUOTE_NONE}


def _first_record_end(content: bytes, quote: bytes) -> int:
    """Return the position after the first line end outside of quotes; 0 if there is none."""
    end = content.find(b"\n") + 1
    inside = bool(quote) and content.count(quote, 0, end) % 2 == 1
    while end and inside:
        start, end = end, content.find(b"\n", end) + 1
        inside ^= content.count(quote, start, end) % 2 == 1
    return end


def has_leading_zeros(content: bytes, delimiter: str, quote: str) -> bool:
    """Whether a field may start with a zero and another digit, such as 007 or -07; blanks may come
    first.

    May also be true for other text, because every byte up to ``-`` (45) before the zero counts as a
    blank or a sign.
    """
    # The first field is treated as if a line end preceded it.
    front = np.frombuffer(b"\n\n" + content[:3], dtype=np.uint8)
    data, edges = np.frombuffer(content, dtype=np.uint8), np.zeros(256, dtype=bool)
    edges[[ord("\n"), ord(delimiter), ord(quote or delimiter)]] = True
    pieces = (data[first : first + _COMPARE_BYTES + 3] for first in range(0, len(data), _COMPARE_BYTES))
    return any(_has_leading_zeros(piece, edges) for piece in chain([front], pieces))


def _has_leading_zeros(data: NDArray[np.uint8], edges: NDArray[np.bool_]) -> bool:
    zeros = np.flatnonzero((data[2:-1] == ord("0")) & (data[3:] - np.uint8(ord("0")) <= 9))
    near, far = data[1:][zeros], data[zeros]
    return bool((edges[near] | ((near <= 45) & (edges[far] | (far <= 45)))).any())


def reference_has_leading_zeros(content: bytes, delimiter: bytes, quote: bytes) -> bool:
    """Compute `has_leading_zeros` with a regular expression."""
    begin = rb"(?:^|[\n" + re.escape(delimiter + quote) + b"]"
    return re.search(begin + rb"|" + begin + rb"|[\x00-\x2d])[\x00-\x2d])0[0-9]", content) is not None


def _select_records(content: bytes, ends: NDArray[np.int64], is_selected: NDArray[np.bool_]) -> bytes:
    if is_selected.all():
        return content[: int(ends[-1]) if len(ends) else 0]
    starts = np.append(0, ends[:-1])[is_selected]
    return b"".join(content[start:end] for start, end in zip(starts, ends[is_selected], strict=True))


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """Format of one file with a JSON object per line."""

    path: str
    lists: frozenset[str]
    """Names of the columns that may contain lists; a list becomes its JSON text."""
    nulls: tuple[str, ...]
    """Texts that mean a missing value, in addition to null and an empty text."""
    paths: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a column -> keys of the objects in which it is, and its own; columns that are left
    out are fields of the line's object.
    """

    def parse(self, content: bytes, numbers: range, names: tuple[str, ...], bad: BadRows) -> Parsed:
        """Parse a chunk. Return the columns `names` as text, and the line number of each row.

        `numbers` are the numbers of the lines in `content`. A line is added to `bad` if it is not a
        JSON object, or has a list or an object in place of a single value. Empty lines are ignored.
        """
        lines = np.arange(numbers.start, numbers.stop, dtype=np.int64)
        frame = self._read(content, names)
        if frame is None or frame.height != len(lines) or self._may_have_nested(frame):
            content, lines = self._good_lines(content, lines, names, bad)
            frame = self._read(content, names)
        if frame is None or frame.height != len(lines):
            raise DataError(f"{self.path}, line {numbers.start} and after: cannot be read as JSON lines")
        return frame, lines

    def with_lists(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return the frame with lists instead of their JSON text. Separators of the schema are not
        used for them.
        """
        for name in self.lists & set(frame.columns):
            lists, is_list = lists_from_text(frame[name], "")
            if is_list.fill_null(True).all():
                frame = frame.with_columns(lists)
        return frame

    def _may_have_nested(self, frame: pl.DataFrame) -> bool:
        """Whether some text may be a list or an object of the file that Polars converted to
        text.
        """
        return any(
            frame[name].str.contains(r"^[\[{]").any() for name in frame.columns if name not in self.lists
        )

    def _good_lines(
        self, content: bytes, lines: NDArray[np.int64], names: tuple[str, ...], bad: BadRows
    ) -> tuple[bytes, NDArray[np.int64]]:
        texts, numbers = [], []
        for number, text in zip(lines.tolist(), content.split(b"\n"), strict=False):
            if not text.strip():
                continue
            if problem := self._problem(text, names):
                bad.add(self.path, number, problem)
            else:
                texts.append(text + b"\n")
                numbers.append(number)
        bad.raise_first()
        return b"".join(texts), np.array(numbers, dtype=np.int64)

    def _problem(self, text: bytes, names: tuple[str, ...]) -> str:
        try:
            row = json.loads(text, parse_constant=_refuse_constant)
        except UnicodeDecodeError as error:
            return _no_utf8(error)
        except (ValueError, RecursionError) as error:
            return f"not JSON ({error})"
        if not isinstance(row, dict):
            return f"got {_JSON_TYPES.get(type(row), 'a number')}, expected an object with names"
        for name in names:
            value: Any = row
            for key in self.paths.get(name, (name,)):
                if not isinstance(value, dict | None):
                    got = _JSON_TYPES.get(type(value), "a number")
                    return f"column {name!r}: got {got}, expected an object with {key!r}"
                value = None if value is None else value.get(key)
            if isinstance(value, list | dict) and name not in self.lists:
                return f"column {name!r}: got {_JSON_TYPES[type(value)]}, expected one value"
        return ""

    def _read(self, content: bytes, names: tuple[str, ...]) -> pl.DataFrame | None:
        paths = [self.paths.get(name, (name,)) for name in names]
        if not content.strip():
            return pl.DataFrame(schema=dict.fromkeys(names, pl.String()))
        try:
            objects = pl.read_ndjson(io.BytesIO(content), schema=_objects(paths))
            frame = flattened(objects, self.path)[list(names)]
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
            return None
        nulls = ("", *self.nulls)
        return frame.select(
            column.set(column.is_in(nulls).fill_null(False), None) for column in frame.iter_columns()
        )


def _objects(paths: Iterable[tuple[str, ...]]) -> dict[str, pl.DataType]:
    """Return the type of each key of an object whose values at `paths` are text."""
    inner: dict[str, list[tuple[str, ...]]] = {}
    for key, *rest in paths:
        inner.setdefault(key, []).append(tuple(rest))
    return {key: pl.String() if () in rest else pl.Struct(_objects(rest)) for key, rest in inner.items()}


def check_json_lines(content: bytes, path: str) -> None:
    """Raise `DataError` if a file is a JSON array instead of JSON lines."""
    if content.lstrip().startswith(b"["):
        raise DataError(
            f"{path}, line 1: a JSON array, expected an object on each line; write it as JSON lines: "
            f"jq -c '.[]' {shell_word(path)}"
        )


class JsonField(NamedTuple):
    """A field of JSON lines: its keys, one in another, and its first value that is not null."""

    path: tuple[str, ...]
    value: Any
    is_repeated: bool = False
    """Whether fields with other keys have the same name."""


def first_json_fields(content: bytes, names: Sequence[str] = ()) -> dict[str, JsonField]:
    """Return the fields in the first lines by name, in order of appearance. A field of an object in
    a line is named by all keys, such as ``user.id``.

    Fields of `names` that the first lines lack are searched in all lines.
    """
    fields: dict[str, JsonField] = {}
    parts = content.split(b"\n", _NAME_LINES)
    for text in parts[:_NAME_LINES]:
        add_json_fields(fields, text)
    rare = [name for name in names if name not in fields]
    later_lines = parts[-1].split(b"\n") if rare and len(parts) > _NAME_LINES else []
    for name in rare:
        key = json.dumps(name.rpartition(".")[2], ensure_ascii=False).encode()[1:]  # may follow a point
        for text in later_lines:
            if key in text:
                add_json_fields(fields, text)
            if name in fields:
                break
    for name in rare:
        if name not in fields:
            _add_field_of_null(fields, name)
    return without_objects(fields)


def _add_field_of_null(fields: dict[str, JsonField], name: str) -> None:
    """Add the field `name` if one of `fields` is always null or empty, and may be its object."""
    for outer, (path, value, _) in list(fields.items()):
        if value is None and name.startswith(f"{outer}."):
            fields[name] = JsonField((*path, *name.removeprefix(f"{outer}.").split(".")), None)


def add_json_fields(fields: dict[str, JsonField], text: bytes) -> None:
    """Add the fields of a JSON line that `fields` lacks or has as null."""
    with suppress(ValueError, RecursionError):
        _add_fields(fields, json.loads(text), ())


def without_objects(fields: Mapping[str, JsonField]) -> dict[str, JsonField]:
    """Return the fields without those that are always null or objects."""
    objects = {field.path[:end] for field in fields.values() for end in range(1, len(field.path))}
    return {
        name: field
        for name, field in fields.items()
        if field.value is not None or field.path not in objects
    }


def _add_fields(fields: dict[str, JsonField], row: object, path: tuple[str, ...]) -> None:
    for key, value in row.items() if isinstance(row, dict) else ():
        inner = (*path, key)
        name = ".".join(inner)
        if isinstance(value, dict) and value:
            _add_fields(fields, value, inner)
        elif name not in fields or fields[name].value is None:
            fields[name] = JsonField(inner, None if value == {} else value)
        elif fields[name].path != inner and value is not None:
            fields[name] = fields[name]._replace(is_repeated=True)


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
