"""Rows of bytes in addressable memory, with one bit per row: gather, scatter, test and set.

Shapes: `array` is ``[R, W]`` uint8, `bits` is ``[ceil(R / 8)]`` uint8 (row r has bit ``r & 7`` of
byte ``r >> 3``), `rows` is ``[n]`` int64, distinct and within 0..R-1, `records` is ``[n, W]``
uint8. The functions do not check this.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.bit_rows import cpu
from stratarec.kernels.runtime.threads import has_idle_cores, use_torch_threads

_CHUNKS = 16
# Fewer bytes than this are copied by the calling thread. Waking other threads is cheap only if
# cores are idle: with both of two cores busy, copying 2 MB took 15 ms with all threads and 0.5 ms
# with one.
_SERIAL_BYTES, _SERIAL_BYTES_IDLE = 4 << 20, 256 << 10


def _is_serial(size: int) -> bool:
    """Return whether the calling thread alone copies `size` bytes."""
    return size < (_SERIAL_BYTES_IDLE if has_idle_cores() else _SERIAL_BYTES)


def test_bits(bits: NDArray[np.uint8], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the bit in `bits` of each of `rows`, ``[n]`` bool."""
    is_set = np.empty(len(rows), np.bool_)
    cpu.test_bits(bits, rows, is_set)
    return is_set


def set_bits(bits: NDArray[np.uint8], rows: NDArray[np.int64]) -> None:
    """Set the bit in `bits` of each of `rows`."""
    cpu.set_bits(bits, rows)


def gather(
    array: NDArray[np.uint8], rows: NDArray[np.int64], mask: NDArray[np.bool_], out: NDArray[np.uint8]
) -> None:
    """Set ``out[i] = array[rows[i]]`` where ``mask[i]`` is true; other rows are not touched."""
    arguments = array.reshape(-1), rows, mask, out.reshape(-1), array.shape[1]
    if _is_serial(out.nbytes):
        cpu.gather_part(*arguments, 0, len(rows))
    else:
        use_torch_threads()
        cpu.gather(*arguments, _CHUNKS)


def scatter(array: NDArray[np.uint8], rows: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
    """Set ``array[rows[i]] = records[i]``."""
    arguments = array.reshape(-1), rows, records.reshape(-1), array.shape[1]
    if _is_serial(records.nbytes):
        cpu.scatter_part(*arguments, 0, len(rows))
    else:
        use_torch_threads()
        cpu.scatter(*arguments, _CHUNKS)


def exchange(
    array: NDArray[np.uint8],
    bits: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    outgoing: NDArray[np.int64],
    out_records: NDArray[np.uint8],
    incoming: NDArray[np.int64],
    in_records: NDArray[np.uint8],
) -> NDArray[np.bool_]:
    """Set ``array[outgoing] = out_records`` and both bits of these rows; then set ``in_records =
    array[incoming]``.

    `bits` are two arrays of bits. Rows whose first bit is not set are not read. One call replaces
    `scatter`, two `set_bits`, `test_bits` and `gather`, because each call takes the interpreter's
    lock again.

    Returns
    -------
    ndarray
        ``[n]`` bool: the first bit of each row in `incoming`.
    """
    present = np.empty(len(incoming), np.bool_)
    arguments = (
        array.reshape(-1),
        array.shape[1],
        *bits,
        outgoing,
        out_records.reshape(-1),
        incoming,
        in_records.reshape(-1),
        present,
    )
    if _is_serial(out_records.nbytes + in_records.nbytes):
        cpu.exchange(*arguments)
    else:
        use_torch_threads()
        cpu.exchange_parallel(*arguments, _CHUNKS)
    return present
