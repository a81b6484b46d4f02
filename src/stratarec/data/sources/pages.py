"""What the pages of a Parquet column hold, by their own headers: a footer may say something else.

A header is a struct in Thrift's compact protocol (apache/thrift, doc/specs/thrift-compact-protocol.md), whose fields
parquet.thrift numbers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

# Fields of PageHeader, and in it the header of a page of values, of a dictionary, and of values in version 2.
_UNPACKED, _PACKED, _VALUES, _DICTIONARY, _VALUES_2 = 2, 3, 5, 7, 8
_COUNT = 1
_HEADER_BYTES, _LONGEST_HEADER, _DEEPEST = 1 << 12, 1 << 24, 8


@dataclass(frozen=True, kw_only=True)
class Content:
    """Of all pages of a column in a row group."""

    values: int
    unpacked_bytes: int
    dictionary: bool


def count_pages(descriptor: int, column: pq.ColumnChunkMetaData) -> Content:
    """Go through the headers of a column's pages.

    Raises
    ------
    ValueError
        Where they are none.
    OSError
        When the file cannot be read.
    """
    place = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < place:
        place = column.dictionary_page_offset
    end, values, unpacked, dictionary = place + column.total_compressed_size, 0, 0, False
    while place < end:
        header, size = _header(descriptor, place)
        for kind in (_VALUES, _VALUES_2):
            values += _number(header.get(kind, {}), _COUNT) if kind in header else 0
        dictionary |= _DICTIONARY in header
        unpacked += _number(header, _UNPACKED)
        place += size + _number(header, _PACKED)
    return Content(values=values, unpacked_bytes=unpacked, dictionary=dictionary)


def _number(fields: Any, name: int) -> int:
    found = fields.get(name) if isinstance(fields, dict) else None
    if not isinstance(found, int) or not 0 <= found < 1 << 31:
        raise ValueError("the header of a page lacks a size, or has a negative one")
    return found


def _header(descriptor: int, place: int) -> tuple[dict[int, Any], int]:
    """Fields of a page's header, and its bytes."""
    size = _HEADER_BYTES
    while size <= _LONGEST_HEADER:
        reader = _Reader(os.pread(descriptor, size, place))
        try:
            return reader.struct(), reader.place
        except IndexError:  # statistics may be long
            size *= 16
    raise ValueError("the header of a page has no end")


class _Reader:
    """Structs in the compact protocol; `IndexError` where the bytes end. Texts and lists are passed over."""

    def __init__(self, content: bytes) -> None:
        self._content, self.place = content, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        if depth > _DEEPEST:
            raise ValueError("the header of a page is nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            fields[number] = self._value(head & 15, depth)
        return fields

    def _byte(self) -> int:
        self.place += 1
        return self._content[self.place - 1]

    def _pass(self, size: int) -> None:
        self.place += size
        if self.place > len(self._content):
            raise IndexError

    def _unsigned(self) -> int:
        found = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
        raise ValueError("the header of a page has a number of more than 64 bits")

    def _signed(self) -> int:
        found = self._unsigned()
        return (found >> 1) ^ -(found & 1)

    def _value(self, kind: int, depth: int) -> Any:
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._signed()
            case 7:
                return self._pass(8)
            case 8:
                return self._pass(self._unsigned())
            case 9 | 10:
                return self._list(depth)
            case 12:
                return self.struct(depth + 1)
        raise ValueError("the header of a page is damaged")

    def _list(self, depth: int) -> None:
        head = self._byte()
        size = self._unsigned() if head >> 4 == 15 else head >> 4
        for _ in range(min(size, len(self._content))):
            # In lists a truth value takes a byte.
            self._value(3 if head & 15 in (1, 2) else head & 15, depth + 1)
