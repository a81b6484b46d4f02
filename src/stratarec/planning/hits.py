"""How many of a batch's distinct rows a cache of a given size misses, in the steady state.

Time runs in batches: a batch of n lookups touches a row of popularity p with the chance q = 1 - (1 - p)^n.
"""

from __future__ import annotations

import numpy as np

from stratarec.errors import ConfigError
from stratarec.planning.config import Policy
from stratarec.planning.popularity import Floats, Popularity


def expected_misses(popularity: Popularity, *, lookups: float, slots: float, policy: Policy, lookahead: int) -> float:
    """Distinct rows of a batch that are not in the cache when it is staged.

    Parameters
    ----------
    lookups : float
        Ids of a batch.
    slots : float
        Rows that the cache holds, overflow aside.
    policy : {"lru", "lfu", "rank"}
        ``lru``: Che's approximation. ``rank``: the rows of the smallest ids stay, apart from room for the others of the
        batches in flight; exact but for the sets, which share the slots evenly in the mean alone. ``lfu``: the same
        with rows in falling order of popularity, which is where its counters end up.
    lookahead : int
        Batches staged ahead; rows of the last lookahead + 1 batches stay resident whatever their rank.

    Returns
    -------
    float
        Between 0 and the distinct rows of a batch.

    Raises
    ------
    ConfigError
        For ``rank`` where ids are not in an order that bins can follow.
    """
    if slots >= popularity.used_rows:
        return 0.0
    if policy == "lru":
        return _lru(popularity, lookups, slots)
    if policy == "rank" and not popularity.by_id:
        raise ConfigError("memory.cache.policy is rank, but the ids are not ranked by frequency; use lru or lfu")
    if policy == "lfu":
        popularity = _sorted(popularity)
    return _ranked(popularity, lookups, slots, lookahead)


def _lru(popularity: Popularity, lookups: float, slots: float) -> float:
    """Che, Tung and Wang, "Hierarchical Web caching systems", IEEE JSAC 20(7), 2002, equation (3).

    A row is resident when it was touched within the last T batches, and the characteristic time T is the one for which
    as many rows are resident as there are slots: distinct(n T) = slots.
    """
    time = _characteristic_batches(popularity, lookups, slots)
    return float(popularity.rows @ (popularity.touched(lookups) * (1 - popularity.touched(lookups * time))))


def _characteristic_batches(popularity: Popularity, lookups: float, slots: float) -> float:
    low, high = 0.0, 1.0
    while popularity.distinct(lookups * high) < slots:
        low, high = high, high * 4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if popularity.distinct(lookups * middle) < slots else (low, middle)
    return (low + high) / 2


def _ranked(popularity: Popularity, lookups: float, slots: float, lookahead: int) -> float:
    """The first R rows stay, where the others of lookahead + 1 batches fill what R leaves."""
    ends = np.cumsum(popularity.rows)
    transient = popularity.touched(lookups * (lookahead + 1))

    def kept(resident: float) -> Floats:
        share: Floats = np.clip((resident - (ends - popularity.rows)) / popularity.rows, 0, 1)
        return share

    low, high = 0.0, float(slots)
    for _ in range(60):
        resident = (low + high) / 2
        used = resident + float(popularity.rows @ ((1 - kept(resident)) * transient))
        low, high = (resident, high) if used < slots else (low, resident)
    # A row outside the first R is still there when one of the last lookahead + 1 batches has brought it.
    gone = (1 - kept(low)) * (1 - transient)
    return float(popularity.rows @ (popularity.touched(lookups) * gone))


def _sorted(popularity: Popularity) -> Popularity:
    order = np.argsort(-popularity.share, kind="stable")
    return Popularity(rows=popularity.rows[order], share=popularity.share[order], by_id=False)
