"""Number the distinct ids in one pass with an open-addressing table, without sorting.

For a batch's 2,048 ids of one feature, the table fits the L1 cache. `np.unique` sorts the ids and
took ten times as long, a fifth of the compute time of a rank's step.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from stratarec.kernels.random.cpu import GOLDEN

U = np.uint64


def number_distinct(ids: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct ids in the order of first appearance, and for each id its index among
    them.

    Parameters
    ----------
    ids : Tensor
        ``[n]`` int32 or int64, with n at most 2**30.

    Returns
    -------
    tuple of ndarray
        ``[U]`` distinct ids and ``[n]`` indices, both int64.
    """
    places = np.empty(ids.numel(), dtype=np.int64)
    return _number_distinct(ids.numpy(), places), places


@njit(nogil=True, cache=True)
def _number_distinct(ids, places):
    """Set `places` so that ``distinct[places[i]] == ids[i]``; return `distinct`."""
    n = len(ids)
    bits = 4
    while (1 << bits) < 2 * n:
        bits += 1
    shift, mask = U(64 - bits), U((1 << bits) - 1)
    number_at = np.full(1 << bits, -1, dtype=np.int32)
    distinct = np.empty(n, dtype=np.int64)
    count = 0
    for i in range(n):
        row = np.int64(ids[i])
        at = (U(row) * GOLDEN) >> shift
        # The table is at most half full, so chains stay short.
        while number_at[at] >= 0 and distinct[number_at[at]] != row:
            at = (at + U(1)) & mask
        if number_at[at] < 0:
            number_at[at] = count
            distinct[count] = row
            count += 1
        places[i] = number_at[at]
    return distinct[:count].copy()


def reference_number_distinct(ids: Tensor) -> tuple[list[int], list[int]]:
    """Compute `number_distinct` with a dictionary."""
    number: dict[int, int] = {}
    places = [number.setdefault(row, len(number)) for row in ids.tolist()]
    return list(number), places
