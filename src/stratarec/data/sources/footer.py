"""What a Parquet footer says of columns, read here: of some damaged ones pyarrow ends the process when it is asked.

A footer is one struct of Thrift's compact protocol, whose numbers are those of parquet.thrift. Asking another process
takes 0.2 s of a processor; this, some 30 us a column of a row group.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from stratarec.errors import DataError

# Behind a footer: its length, and what ends every file.
_END = 8
# Encodings of values by their places in a dictionary; early writers left out where the dictionary is.
_DICTIONARIES = {2, 8}
# Types of the protocol; numbers of every width are written alike.
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12


def footer_columns(raw: IO[bytes], path: str, places: Sequence[int]) -> NDArray[np.int64]:
    """``[row groups, places, 3]``: values and bytes of each column without compression, and whether it has a
    dictionary.

    Raises
    ------
    DataError
        Where the footer makes no sense; `path` is the name of the file, which must be Parquet.
    """
    raw.seek(-_END, 2)
    size = struct.unpack("<i", raw.read(4))[0] + _END
    raw.seek(-size, 2)
    try:
        found = [_sizes(group[1][place][3]) for group in _row_groups(raw.read(size)) for place in places]
        return np.array(found, dtype=np.int64).reshape(-1, len(places), 3)
    except (ValueError, LookupError, TypeError, OverflowError, RuntimeError) as error:
        raise DataError(f"{path}: damaged (its footer makes no sense)") from error


def _sizes(column: dict[int, Any]) -> tuple[int, int, bool]:
    return column[5], column[6], 11 in column or not _DICTIONARIES.isdisjoint(column[2])


def _row_groups(footer: bytes) -> Iterator[dict[int, Any]]:
    reader = _Compact(footer)
    for field, kind in reader.fields():
        if field == 4 and kind == _LIST:
            yield from reader.items()
        else:
            reader.value(kind)


class _Compact:
    """Values one after another; a struct is a dictionary by the numbers of its fields."""

    def __init__(self, content: bytes) -> None:
        self._bytes = iter(content)
        self._next = self._bytes.__next__

    def fields(self) -> Iterator[tuple[int, int]]:
        """Number and type of each field of a struct, whose values are to be read in between."""
        field = 0
        while head := self._next():
            field = field + (head >> 4) if head >> 4 else self._signed()
            yield field, head & 15

    def items(self) -> Iterator[Any]:
        """The values of a list."""
        head = self._next()
        kind = head & 15
        for _ in range(head >> 4 if head >> 4 < 15 else self._number()):
            yield self._next() if kind in (_TRUE, _FALSE) else self.value(kind)

    def value(self, kind: int) -> Any:
        """What comes next, which is of a type."""
        if _BYTE < kind < _DOUBLE:
            return self._signed()
        if kind == _STRUCT:
            return {field: self.value(inner) for field, inner in self.fields()}
        if kind in (_LIST, _SET):
            return list(self.items())
        if kind == _BINARY:
            return self._take(self._number())
        if kind == _MAP:
            count = self._number()
            kinds = self._next() if count else 0
            return [(self.value(kinds >> 4), self.value(kinds & 15)) for _ in range(count)]
        if kind in (_BYTE, _DOUBLE):
            return self._take(1 if kind == _BYTE else 8)
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        raise ValueError("no such type")

    def _take(self, size: int) -> bytes:
        found = bytes(islice(self._bytes, size))
        if len(found) < size:
            raise ValueError("the footer ends early")
        return found

    def _number(self) -> int:
        byte = self._next()
        found, shift = byte & 127, 0
        while byte & 128:
            byte, shift = self._next(), shift + 7
            found |= (byte & 127) << shift
        return found

    def _signed(self) -> int:
        found = self._number()
        return found >> 1 ^ -(found & 1)
