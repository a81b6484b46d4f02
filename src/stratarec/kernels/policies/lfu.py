"""Evict the row that was used by the fewest batches since it was fetched; of several, the longest unused one."""

from __future__ import annotations

import numpy as np

from stratarec.kernels.policies.base import Policy


def score(row: np.int64, stamp: np.int64, count: np.int64) -> np.int64:
    """Return the negative of the count, then of the stamp."""
    return -((count << 32) + stamp)


LFU = Policy(about="the least used row", score=score, keeps="popular", counts=True)
