"""Rows of bytes in plain NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def test_bits(bits: NDArray[np.uint8], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.unpackbits(bits, bitorder="little")[rows].astype(np.bool_)


def set_bits(bits: NDArray[np.uint8], rows: NDArray[np.int64]) -> None:
    every = np.unpackbits(bits, bitorder="little")
    every[rows] = 1
    bits[:] = np.packbits(every, bitorder="little")


def gather(
    array: NDArray[np.uint8], rows: NDArray[np.int64], mask: NDArray[np.bool_], out: NDArray[np.uint8]
) -> None:
    out[mask] = array[rows[mask]]


def scatter(array: NDArray[np.uint8], rows: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
    array[rows] = records


def exchange(
    array: NDArray[np.uint8],
    bits: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    outgoing: NDArray[np.int64],
    out_records: NDArray[np.uint8],
    incoming: NDArray[np.int64],
    in_records: NDArray[np.uint8],
) -> NDArray[np.bool_]:
    scatter(array, outgoing, out_records)
    for row in bits:
        set_bits(row, outgoing)
    present = test_bits(bits[0], incoming)
    gather(array, incoming, present, in_records)
    return present
