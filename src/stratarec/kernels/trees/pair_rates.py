"""Click rates of pairs of values, such as of a user and an item, which trees compare.

A tree needs a split for each user to learn which items the user clicks. The rate of the pair says
it in one number (Prokhorenkova et al. 2018, CatBoost, section 4). A pair of columns has a table of
the pairs of codes that training samples have; all other pairs of codes have the mean rate.

The code of a categorical column is the number in the column. The code of a dense feature is the
number of its edges that are at most the feature, so features with few values have a code for each
value.

Arrays contain only float32 numbers, because files of weights do.

Shapes: B samples, S categorical columns, C >= S columns, P pairs of columns, E pairs of codes, Q
edges.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.trees import CODES

PAIR_FIELDS, RATE_FIELDS, EDGE_FIELDS = 3, 4, 2
MOST_PAIRS = 1 << 14
"""Maximum of P, for which keys of pairs are int64 numbers."""

Floats = NDArray[np.float32]


class PairRates(NamedTuple):
    """Click rates of pairs of codes."""

    pairs: Floats
    """``[P, 3]`` two columns, and the rate of pairs of codes that are not in `rates`."""
    rates: Floats
    """``[E, 4]`` number of a pair of columns, two codes and their rate, in ascending order of the
    first three.
    """
    edges: Floats
    """``[Q, 2]`` dense column and edge, in ascending order."""

    def keys(self) -> NDArray[np.int64]:
        """Return for each row of `rates` one number that encodes its pair of codes, ascending."""
        return _key(*self.rates[:, :3].astype(np.int64).T)

    def is_valid(self, columns: int, categorical: int) -> bool:
        """Whether columns exist, codes are whole numbers in ascending order, and rates are from 0
        to 1.

        Parameters
        ----------
        columns, categorical : int
            C and S.
        """
        for numbers, end in (
            (self.pairs[:, :2], columns),
            (self.rates[:, :1], len(self.pairs)),
            (self.rates[:, 1:3], CODES),
            (self.edges[:, :1], columns),
        ):
            if not ((numbers >= 0) & (numbers < end) & (numbers == np.floor(numbers))).all():
                return False
        is_rate = all(((rate >= 0) & (rate <= 1)).all() for rate in (self.pairs[:, 2], self.rates[:, 3]))
        column, edge = self.edges.T
        ascends = (np.diff(column) > 0) | ((np.diff(column) == 0) & (np.diff(edge) > 0))
        is_sorted = bool((np.diff(self.keys()) > 0).all()) and bool(ascends.all())
        return (
            len(self.pairs) <= MOST_PAIRS and is_rate and is_sorted and bool((column >= categorical).all())
        )


def no_pairs() -> PairRates:
    """Return rates without pairs."""
    return PairRates(
        *(np.zeros((0, fields), np.float32) for fields in (PAIR_FIELDS, RATE_FIELDS, EDGE_FIELDS))
    )


def pair_codes(rows: Floats, rates: PairRates, categorical: int) -> NDArray[np.int64]:
    """Return the codes of both columns of each pair, ``[P, 2, B]``.

    Parameters
    ----------
    rows : ndarray
        ``[B, C]``; the first S columns are categorical.
    rates : PairRates
        Only `pairs` and `edges` are read.
    categorical : int
        S.
    """
    codes: dict[int, NDArray[np.int64]] = {}
    for column in rates.pairs[:, :2].ravel().astype(np.int64).tolist():
        if column not in codes:
            edges = rates.edges[rates.edges[:, 0] == column, 1]
            numbers = rows[:, column]
            codes[column] = (
                np.clip(numbers, 0, CODES - 1).astype(np.int64)
                if column < categorical
                else edges.searchsorted(numbers, side="right")
            )
    pair_codes = [[codes[int(first)], codes[int(second)]] for first, second, _ in rates.pairs]
    return np.reshape(pair_codes, (len(pair_codes), 2, len(rows))).astype(np.int64)


def look_up_pairs(rows: Floats, rates: PairRates, keys: NDArray[np.int64], categorical: int) -> Floats:
    """Return the click rates of pairs, ``[B, P]``.

    Parameters
    ----------
    rows : ndarray
        ``[B, C]``; the first S columns are categorical.
    rates : PairRates
        Pairs of columns, and the click rates of their codes.
    keys : ndarray
        ``[E]``, result of `PairRates.keys`.
    categorical : int
        S.
    """
    codes = pair_codes(rows, rates, categorical)
    seen_keys = _key(np.arange(len(codes))[:, None], codes[:, 0], codes[:, 1])
    place = keys.searchsorted(seen_keys)
    is_known = np.append(keys, -1)[place] == seen_keys
    result = np.where(is_known, np.append(rates.rates[:, 3], np.float32(0))[place], rates.pairs[:, 2:])
    return np.ascontiguousarray(result.T)


def _key(pair: NDArray[np.int64], first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    return (pair * CODES + first) * CODES + second
