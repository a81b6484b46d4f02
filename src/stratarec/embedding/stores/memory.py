"""Lazily backed memory and one bit a row.

Pages that were never touched cost nothing, which is what makes a store of mostly unwritten rows cheap; so memory is
reported by the pages that are there, not by the sizes of arrays.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.memory import allocate

# Rows scanned at once: the unpacked bits of a chunk fit the L2 cache.
_CHUNK_ROWS = 1 << 19
_CHUNK_PAGES = 1 << 20


def allocate_bytes(size: int) -> NDArray[np.uint8]:
    """`size` zeroed bytes, page-aligned, on huge pages where the system gives them."""
    return allocate(-(-size // 4)).view(np.uint8)[:size]


def allocate_bits(rows: int) -> NDArray[np.uint8]:
    """A cleared bit for each row."""
    return allocate_bytes(-(-rows // 8))


def row_chunks(rows: int) -> Iterator[NDArray[np.int64]]:
    """All rows, ascending, in chunks."""
    for first in range(0, rows, _CHUNK_ROWS):
        yield np.arange(first, min(first + _CHUNK_ROWS, rows), dtype=np.int64)


def set_rows(bits: NDArray[np.uint8]) -> Iterator[NDArray[np.int64]]:
    """The rows whose bit is set, ascending, in chunks.

    Only bytes that are not zero are unpacked: a few changed rows of 10^9 cost one pass over 125 MB.
    """
    step = _CHUNK_ROWS // 8
    for first in range(0, len(bits), step):
        chunk = bits[first : first + step]
        places = np.flatnonzero(chunk)
        if len(places):
            set_bits = np.unpackbits(chunk[places], bitorder="little").reshape(-1, 8)
            place, bit = np.nonzero(set_bits)
            yield (places[place] + first) * 8 + bit


def clear_bits(bits: NDArray[np.uint8]) -> None:
    """Clear every bit, leaving pages alone that were never touched."""
    for first in range(0, len(bits), mmap.PAGESIZE):
        page = bits[first : first + mmap.PAGESIZE]
        if page.any():
            page[:] = 0


def resident_bytes(*arrays: NDArray[np.generic]) -> int:
    """Bytes of the arrays' pages that are in memory.

    Each array begins on a page of its own. Where the system has no `mincore`, all of their bytes.
    """
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    if mincore is None:
        return sum(array.nbytes for array in arrays)
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return sum(_resident(mincore, array) for array in arrays)


def _resident(mincore: ctypes._NamedFuncPointer, array: NDArray[np.generic]) -> int:
    pages = -(-array.nbytes // mmap.PAGESIZE)
    total = 0
    for first in range(0, pages, _CHUNK_PAGES):
        flags = np.empty(min(_CHUNK_PAGES, pages - first), np.uint8)
        address = array.ctypes.data + first * mmap.PAGESIZE
        if mincore(address, len(flags) * mmap.PAGESIZE, flags.ctypes.data):
            return array.nbytes
        total += int((flags & 1).sum()) * mmap.PAGESIZE
    return min(total, array.nbytes)
