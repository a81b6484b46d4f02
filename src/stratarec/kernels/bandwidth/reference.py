"""What the kernels compute, plainly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def sum_parts(values: NDArray[np.float32], parts: int) -> NDArray[np.float32]:
    """Sums of `parts` equal parts."""
    sums: NDArray[np.float32] = values.reshape(parts, -1).sum(axis=1)
    return sums


def sum_rows(values: NDArray[np.float32], rows: NDArray[np.uint64], width: int, parts: int) -> NDArray[np.float32]:
    """Sums over the chosen rows, in `parts` equal parts."""
    sums: NDArray[np.float32] = values.reshape(-1, width)[rows.astype(np.int64)].reshape(parts, -1).sum(axis=1)
    return sums
