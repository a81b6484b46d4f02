"""Negatives for logs of clicks alone: what other users clicked next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.negatives import cpu


def draw_negatives(
    times: NDArray[np.int64],
    users: NDArray[np.uint64],
    splits: NDArray[np.int8],
    *,
    clicks: tuple[int, int],
    window: int,
    wanted: int,
    key: int,
    number: int,
) -> NDArray[np.int64]:
    """For each click, `wanted` clicks of other users that follow it in the same split, drawn evenly with replacement.

    Parameters
    ----------
    times : ndarray
        ``[N]`` rising times; the window of every one of `clicks` must be inside.
    users : ndarray
        ``[N]`` hashes of users.
    splits : ndarray
        ``[N]`` number of the split that each click belongs to.
    clicks : pair of int
        First and last of the clicks to draw for; those behind are there to be drawn.
    window : int
        Length of the window ``[t, t + window]`` behind a click at t, in the unit of `times`.
    wanted : int
        K.
    key, number : int
        The noise of click c is a function of (key, number + c - first).

    Returns
    -------
    ndarray
        ``[last - first, K]`` places in `times`; a row of -1 for a click that no other user's click follows.
    """
    first, last = clicks
    order = np.argsort(splits, kind="stable")
    edges = np.searchsorted(splits[order], np.arange(int(splits.max(initial=0)) + 2))
    drawn = np.full((last - first, wanted), -1, dtype=np.int64)
    cpu.draw(times, users, splits, first, window, np.uint64(key), number, order, edges, drawn)
    return drawn
