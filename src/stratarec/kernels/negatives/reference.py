"""Which clicks may be drawn as negatives, by looking at every click."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def candidates(
    times: NDArray[np.int64], users: NDArray[np.uint64], splits: NDArray[np.int8], click: int, window: int
) -> list[int]:
    """Places of the clicks of ``[t, t + window]`` by other users in the split of click number `click`."""
    inside = (times >= times[click]) & (times <= times[click] + window)
    return np.flatnonzero(inside & (users != users[click]) & (splits == splits[click])).tolist()
