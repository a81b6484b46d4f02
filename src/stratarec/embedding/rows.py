"""float32 rows as flat arrays: weights, with the optimizer state beside them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stratarec.errors import ConfigError
from stratarec.kernels.memory import allocate

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class FloatRows:
    """S rows of one width in DRAM: weights and the optimizer state beside them."""

    weights: Floats
    """Flat ``[S * D]`` float32: slot s is ``weights[s * D:(s + 1) * D]``."""
    row_state: Floats
    """``[S]`` float32, one value a slot; of size 1 when the optimizer has none."""
    full_state: Floats
    """Flat ``[S * D]`` float32, one value a weight; of size 1 when the optimizer has none."""
    width: int
    """D, floats a row."""

    def __post_init__(self) -> None:
        for name in ("weights", "row_state", "full_state"):
            array = getattr(self, name)
            if array.dtype != np.float32 or array.ndim != 1 or not array.flags.c_contiguous:
                raise ConfigError(
                    f"rows: {name} is {array.dtype} of shape {array.shape}, expected flat contiguous float32"
                )
        if self.width < 1 or len(self.weights) % self.width:
            raise ConfigError(f"rows: {len(self.weights)} weights are not a whole number of rows of {self.width}")

    @classmethod
    def allocate(cls, slots: int, width: int, *, row_state: bool, full_state: bool) -> FloatRows:
        """Zeroed slots on huge pages; pages that are never touched cost nothing."""
        return cls(
            weights=allocate(slots * width),
            row_state=allocate(slots if row_state else 1),
            full_state=allocate(slots * width if full_state else 1),
            width=width,
        )

    @property
    def slots(self) -> int:
        """S."""
        return len(self.weights) // self.width

    @property
    def nbytes(self) -> int:
        """Bytes of weights and state."""
        return sum(array.nbytes for array in (self.weights, self.row_state, self.full_state) if len(array) > 1)

    def copy(self, mine: Indices, source: FloatRows, theirs: Indices) -> None:
        """Give the rows `mine` the values of the rows `theirs` of `source`."""
        self.weights.reshape(-1, self.width)[mine] = source.weights.reshape(-1, self.width)[theirs]
        if len(self.row_state) > 1 or len(source.row_state) > 1:
            self.row_state[mine] = source.row_state[theirs]
        if len(self.full_state) > 1:
            self.full_state.reshape(-1, self.width)[mine] = source.full_state.reshape(-1, self.width)[theirs]
