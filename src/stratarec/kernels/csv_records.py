"""Split delimited text into records, and count the fields and find the faulty quotes of each
record.

A record ends at a line end that is preceded by an even number of quotes, and a field at such a
delimiter (RFC 4180). So a quote in the middle of an unquoted field joins this record with the next
ones; it is reported as a fault of the joined record.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

_LF, _CR = 10, 13
WHOLE, STRAY, RETURN = 0, 1, 2
"""Fault of a record: none; a misplaced quote; an unquoted carriage return inside the record."""


class Records(NamedTuple):
    """R records of a block of text."""

    ends: NDArray[np.int64]
    """``[R]`` position after the line end of each record."""
    lines: NDArray[np.int64]
    """``[R]`` number of line ends before each record."""
    fields: NDArray[np.int32]
    """``[R]`` number of fields; 0 for an empty line."""
    faults: NDArray[np.uint8]
    """``[R]`` fault of each record: `WHOLE`, `STRAY` or `RETURN`."""


def split(content: NDArray[np.uint8], delimiter: int, quote: int) -> Records:
    """Return the complete records of a block of text; text after the last line end is ignored.

    Parameters
    ----------
    content : ndarray
        ``[N]`` uint8 bytes of the text.
    delimiter : int
        Byte between fields.
    quote : int
        Byte that begins and ends a quoted field; -1 if nothing is quoted.
    """
    most = int(np.count_nonzero(content == ord("\n")))
    ends, lines = np.empty(most, np.int64), np.empty(most, np.int64)
    fields, faults = np.empty(most, np.int32), np.empty(most, np.uint8)
    count = _split(content, delimiter, quote, ends, lines, fields, faults)
    return Records(ends[:count], lines[:count], fields[:count], faults[:count])


@njit(nogil=True, cache=True)
def _split(content, delimiter, quote, ends, lines, fields, faults):
    count = seen = before = 0
    start = last = fault = 0
    size, quoted = 1, False
    for place in range(len(content)):
        byte = content[place]
        if byte == quote:
            after = content[place + 1] if place + 1 < len(content) else _LF
            if after == _CR and place + 2 < len(content):
                after = content[place + 2] if content[place + 2] == _LF else _CR
            # A quote is valid at the start of a field, as the second quote of a pair, or at the end
            # of a quoted field.
            if not quoted and place > last and content[place - 1] != quote:
                fault = 1
            if quoted and after != quote and after != delimiter and after != _LF:
                fault = 1
            quoted = not quoted
        elif byte == _LF:
            seen += 1
            if quoted:
                continue
            length = place - start - (place > start and content[place - 1] == _CR)
            ends[count] = place + 1
            lines[count] = before
            fields[count] = size if length else 0
            faults[count] = fault
            count += 1
            start = last = place + 1
            before, fault, size = seen, 0, 1
        elif quoted:
            continue
        elif byte == delimiter:
            size += 1
            last = place + 1
        elif byte == _CR and place + 1 < len(content) and content[place + 1] != _LF and not fault:
            fault = 2
    return count


def reference_split(content: bytes, delimiter: bytes, quote: bytes) -> list[tuple[int, int, int, int]]:
    """Return (end, line ends before, fields, fault) of each complete record."""
    records, start = [], 0
    for match in re.finditer(b"\n", content):
        end = match.end()
        record = content[start:end]
        if not quote or record.count(quote) % 2 == 0:
            records.append((end, content.count(b"\n", 0, start), *_look(record, delimiter, quote)))
            start = end
    return records


def _look(record: bytes, delimiter: bytes, quote: bytes) -> tuple[int, int]:
    text = record[:-1].removesuffix(b"\r")
    fields, open_field = [], b""
    for part in text.split(delimiter):
        open_field = open_field + delimiter + part if open_field else part
        if not quote or open_field.count(quote) % 2 == 0:
            fields.append(open_field)
            open_field = b""
    if not text:
        return 0, 0
    valid = [not quote or quote not in field or _is_quoted(field, quote) for field in fields]
    bare = b"".join(field for field in fields if not quote or quote not in field)
    return len(fields), 0 if all(valid) and b"\r" not in bare else (1 if not all(valid) else 2)


def _is_quoted(field: bytes, quote: bytes) -> bool:
    if not (field.startswith(quote) and field.endswith(quote) and len(field) > 1):
        return False
    return quote not in field[1:-1].replace(quote * 2, b"")
