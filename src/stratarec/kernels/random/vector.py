"""Counter-based hashing of whole NumPy arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser of every element: a bijection of 64 bits."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
