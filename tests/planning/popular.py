"""Popularity of made-up tables."""

from __future__ import annotations

import numpy as np

from stratarec.planning.popularity import Popularity

_EXACT = 128
"""Number of first rows with a bin each; later rows share bins."""


def zipf(rows: int, exponent: float) -> Popularity:
    """Return the popularity of rows if row r has a share of lookups proportional to ``(r + 1) **
    -exponent``.
    """
    heads = np.arange(1.0, min(rows, _EXACT) + 1)
    edges = np.geomspace(len(heads) + 0.5, rows + 0.5, 2000) if rows > len(heads) else np.zeros(1)
    middle = (edges[1:] + edges[:-1]) / 2
    weight = np.concatenate([heads, middle]) ** -exponent
    count = np.concatenate([np.ones_like(heads), np.diff(edges)])
    return Popularity(rows=count, share=weight / (weight * count).sum(), by_id=True)
