"""Reading memory and files at full speed, for measuring them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stratarec.errors import ConfigError
from stratarec.kernels.bandwidth import cpu
from stratarec.kernels.runtime.threads import use_torch_threads

_PARTS_PER_THREAD = 4


def sum_parts(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sums of equal parts of flat float32 `values`, by all threads; a rest too short for a part is left out."""
    out = np.empty(use_torch_threads() * _PARTS_PER_THREAD, dtype=np.float32)
    cpu.sum_parts(values, out)
    return out


def sum_rows(values: NDArray[np.float32], rows: NDArray[np.uint64], *, width: int) -> NDArray[np.float32]:
    """Sums over equal parts of `rows`, uint64 numbers of rows of `width` values in flat `values`, by all threads."""
    if len(rows) and int(rows.max()) * width + width > len(values):
        raise ConfigError(f"row {rows.max()} of width {width} is outside {len(values)} values")
    out = np.empty(use_torch_threads() * _PARTS_PER_THREAD, dtype=np.float32)
    cpu.sum_rows(values, rows, width, out)
    return out


def read_blocks(descriptor: int, buffer: NDArray[np.uint8], offsets: NDArray[np.int64]) -> int:
    """Read ``len(buffer)`` bytes at each offset of a file, without the interpreter's lock.

    Direct descriptors need `buffer` and `offsets` aligned to the device's blocks.

    Returns
    -------
    int
        Reads that were whole before the first that was not.
    """
    return int(cpu.read_blocks(descriptor, buffer.ctypes.data, len(buffer), offsets))
