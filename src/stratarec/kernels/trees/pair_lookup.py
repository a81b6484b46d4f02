"""Look up the click rates of pairs of codes, compiled; `pair_rates.look_up_pairs` is the reference.

Shapes: B samples, S categorical columns, C columns, P pairs of columns, E pairs of codes, Q edges.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.team import BODY
from stratarec.kernels.trees import CODES
from stratarec.kernels.trees.pair_rates import PairRates

Floats = NDArray[np.float32]


class PackedPairs(NamedTuple):
    """Valid rates of pairs in the form that `look_up` reads."""

    columns: NDArray[np.int64]
    """``[P, 2]``."""
    defaults: Floats
    """``[P]`` rates of pairs of codes that `keys` does not list."""
    ends: NDArray[np.int64]
    """``[P + 1]`` places of a pair's keys: from its own end to the next one."""
    keys: NDArray[np.int64]
    """``[E]`` both codes in one number, ascending for each pair."""
    rates: Floats
    """``[E]``."""
    edge_ends: NDArray[np.int64]
    """``[P, 2, 2]`` first edge and end of both columns; -1 for categorical columns."""
    edges: Floats
    """``[Q]``."""


def pack_pairs(rates: PairRates, categorical: int) -> PackedPairs:
    """Return valid rates of pairs in packed form.

    Parameters
    ----------
    rates : PairRates
        Rates of pairs, which may come from an untrusted file.
    categorical : int
        S.
    """
    columns, codes = rates.pairs[:, :2].astype(np.int64), rates.rates[:, 1:3].astype(np.int64)
    sides = [np.searchsorted(rates.edges[:, 0], columns, side) for side in ("left", "right")]
    edge_ends = np.where(columns[..., None] < categorical, -1, np.stack(sides, axis=2))
    return PackedPairs(
        columns=columns,
        defaults=rates.pairs[:, 2].copy(),
        ends=np.searchsorted(rates.rates[:, 0], np.arange(len(columns) + 1)),
        keys=codes[:, 0] * CODES + codes[:, 1],
        rates=rates.rates[:, 3].copy(),
        edge_ends=edge_ends,
        edges=rates.edges[:, 1].copy(),
    )


@njit(**BODY)
def look_up(rows, packed, result, column):
    """Set ``result[b, column + p]`` to the click rate of pair p in row b of `rows`, ``[B, C]``."""
    for p in range(len(packed.columns)):
        for b in range(len(rows)):
            key = np.int64(0)
            for side in range(2):
                number = rows[b, packed.columns[p, side]]
                first, end = packed.edge_ends[p, side]
                if first < 0:
                    code = np.int64(min(max(number, np.float32(0)), np.float32(CODES - 1)))
                else:
                    low, high = first, end
                    while low < high:
                        middle = (low + high) >> 1
                        # NaN is above all edges, as it is for NumPy.
                        if number < packed.edges[middle]:
                            high = middle
                        else:
                            low = middle + 1
                    code = low - first
                key = key * CODES + code
            low, high = packed.ends[p], packed.ends[p + 1]
            while low < high:
                middle = (low + high) >> 1
                if packed.keys[middle] < key:
                    low = middle + 1
                else:
                    high = middle
            is_known = low < packed.ends[p + 1] and packed.keys[low] == key
            result[b, column + p] = packed.rates[low] if is_known else packed.defaults[p]
