"""What a window holds, by looking at every click."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def window_counts(times: NDArray[np.int64], items: NDArray[np.int64], click: int, window: int) -> dict[int, int]:
    """Item -> clicks in ``[t - window, t)`` before click number `click`."""
    inside = (times >= times[click] - window) & (times < times[click])
    found, counts = np.unique(items[inside], return_counts=True)
    return {int(item): int(count) for item, count in zip(found, counts, strict=True)}
