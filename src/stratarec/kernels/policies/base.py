"""An eviction policy: which row of a full set is evicted, and what the planner expects of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Policy:
    """An entry of `POLICIES`.

    Parameters
    ----------
    about : str
        The row that it evicts, for texts, such as ``the longest unused row``.
    score : callable or None
        ``score(row, stamp)`` returns an integer; of the rows of a full set that no batch in flight
        uses, the row with the largest integer is evicted. The kernels of the cache compile this
        function. `row` is the id, and `stamp` the number of the last batch that used the row. None
        evicts, by vector code, the row with the smallest stamp if the policy keeps ``recent`` rows,
        and the row with the largest id if it keeps the ``first`` ids.
    keeps : str
        Rows that stay in the cache when it has seen many batches, by which the planner predicts
        misses: ``recent`` rows or the ``first`` ids.
    """

    about: str
    score: Callable[[np.int64, np.int64], np.int64] | None
    keeps: Literal["recent", "first"]
