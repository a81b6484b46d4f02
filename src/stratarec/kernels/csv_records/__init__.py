"""Records of delimited text: where each ends, how many fields it has, and what is wrong with its quotes.

A record ends at a line end that an even number of quotes precedes, and a field at such a delimiter (RFC 4180). So a
quote inside a field that does not begin with one joins records; it is found as a fault of the first of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.csv_records import cpu

WHOLE, STRAY, RETURN = 0, 1, 2
"""Nothing is wrong; a quote where none may be; a carriage return that ends no line and stands in no quotes."""


class Records(NamedTuple):
    """R records of a piece of text."""

    ends: NDArray[np.int64]
    """``[R]`` place behind the line end of each."""
    lines: NDArray[np.int64]
    """``[R]`` line ends before each."""
    fields: NDArray[np.int32]
    """``[R]`` fields of each; 0 of an empty line."""
    faults: NDArray[np.uint8]
    """``[R]`` `WHOLE`, `STRAY` or `RETURN`."""


def split(content: NDArray[np.uint8], delimiter: int, quote: int) -> Records:
    """The whole records of `content`, ``[N]`` uint8; `quote` is -1 where nothing is quoted. What follows the last one
    is left."""
    most = int(np.count_nonzero(content == ord("\n")))
    ends, lines = np.empty(most, np.int64), np.empty(most, np.int64)
    fields, faults = np.empty(most, np.int32), np.empty(most, np.uint8)
    count = cpu.split(content, delimiter, quote, ends, lines, fields, faults)
    return Records(ends[:count], lines[:count], fields[:count], faults[:count])
