"""Evict the row with the largest id, which is the least frequent one if ids are ranked by frequency."""

from __future__ import annotations

import numpy as np

from stratarec.kernels.policies.base import Policy


def score(row: np.int64, stamp: np.int64) -> np.int64:
    """Return the id."""
    return row


RANK = Policy(
    about="the row with the largest id, the least frequent one if ids are ranked by frequency",
    score=score,
    keeps="first",
)
