"""The distinct values of ids, and which of them each id is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stratarec.kernels.unique import cpu


def number_distinct(ids: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct ids in the order in which they come first, and the number among them of every id.

    Parameters
    ----------
    ids : Tensor
        ``[n]`` int32 or int64, at most 2**30.

    Returns
    -------
    tuple of ndarray
        ``[U]`` and ``[n]``, both int64.
    """
    places = np.empty(ids.numel(), dtype=np.int64)
    return cpu.number_distinct(ids.numpy(), places), places
