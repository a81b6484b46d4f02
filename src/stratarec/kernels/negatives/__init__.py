"""Negatives for logs of clicks alone, drawn from what was popular just before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.negatives import cpu


def draw_negatives(
    times: NDArray[np.int64],
    items: NDArray[np.int64],
    *,
    first: int,
    window: int,
    recent: int,
    wanted: int,
    key: int,
    number: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct negatives of the clicks from `first` on, in proportion to popularity in the window before each.

    Parameters
    ----------
    times : ndarray
        ``[N]`` rising times; the window of every click from `first` on must be inside.
    items : ndarray
        ``[N]`` item codes 0, 1, ...
    first : int
        The clicks before it only fill windows.
    window : int
        Length of the window ``[t - window, t)``, in the unit of `times`.
    recent : int
        Length of the last stretch of the window that is counted on its own.
    wanted : int
        K.
    key, number : int
        The noise of click c is a function of (key, number + c).

    Returns
    -------
    negatives : ndarray
        ``[N - first, K]`` item codes, never the clicked item, -1 where 16 K draws found fewer.
    counts : ndarray
        ``[N - first, 1 + K, 2]`` clicks of the clicked item and each negative in the window, and in its last stretch.
    """
    clicks = len(times) - first
    negatives = np.full((clicks, wanted), -1, dtype=np.int64)
    counts = np.zeros((clicks, 1 + wanted, 2), dtype=np.int64)
    popularity = np.zeros((2, int(items.max(initial=-1)) + 1), dtype=np.int64)
    cpu.draw(
        times, items, first, window, recent, wanted, np.uint64(key), number, popularity[0], popularity[1], negatives,
        counts,
    )  # fmt: skip
    return negatives, counts
