"""float32 rows as flat arrays: weights, with the optimizer state beside them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stratarec.errors import ConfigError
from stratarec.kernels.runtime.memory import allocate

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class FloatRows:
    """S rows of one width in DRAM: weights and the optimizer state beside them."""

    weights: Floats
    """Flat ``[S * D]`` float32: slot s is ``weights[s * D:(s + 1) * D]``."""
    row_state: Floats
    """``[S]`` float32, one value a slot; empty when the optimizer has none."""
    full_state: Floats
    """Flat ``[S * k * D]`` float32, k values a weight: the first of each weight of a slot, then the second; empty when
    the optimizer has none."""
    clock: NDArray[np.int32]
    """``[S]`` int32, the steps that each row has taken; empty where rows have no clock."""
    width: int
    """D, floats a row."""

    def __post_init__(self) -> None:
        for name in ("weights", "row_state", "full_state"):
            array = getattr(self, name)
            if array.dtype != np.float32 or array.ndim != 1 or not array.flags.c_contiguous:
                raise ConfigError(
                    f"rows: {name} is {array.dtype} of shape {array.shape}, expected flat contiguous float32"
                )
        if self.clock.dtype != np.int32 or self.clock.ndim != 1:
            raise ConfigError(f"rows: clock is {self.clock.dtype} of shape {self.clock.shape}, expected flat int32")
        if self.width < 1 or len(self.weights) % self.width:
            raise ConfigError(f"rows: {len(self.weights)} weights are not a whole number of rows of {self.width}")

    @classmethod
    def allocate(cls, slots: int, width: int, *, row_state: int, full_state: int, clock: int) -> FloatRows:
        """Zeroed slots with so many floats a row and a weight, on huge pages; those never touched cost nothing."""
        return cls(
            weights=allocate(slots * width),
            row_state=allocate(slots * row_state),
            full_state=allocate(slots * width * full_state),
            clock=allocate(slots * clock).view(np.int32),
            width=width,
        )

    @classmethod
    def bare(cls, weights: Floats, width: int) -> FloatRows:
        """Weights alone."""
        nothing = np.empty(0, dtype=np.float32)
        return cls(weights=weights, row_state=nothing, full_state=nothing, clock=nothing.view(np.int32), width=width)

    @property
    def slots(self) -> int:
        """S."""
        return len(self.weights) // self.width

    @property
    def nbytes(self) -> int:
        """Bytes of weights, state and clocks."""
        return sum(part.nbytes for part in self.parts)

    @property
    def parts(self) -> tuple[Floats, Floats, Floats, NDArray[np.int32]]:
        """Weights, row state, full state and clocks, as kernels take them."""
        return self.weights, self.row_state, self.full_state, self.clock

    def copy(self, mine: Indices, source: FloatRows, theirs: Indices) -> None:
        """Give the rows `mine` the values of the rows `theirs` of `source`."""
        for here, there in zip(self.parts, source.parts, strict=True):
            if len(here) and len(theirs):  # a source without slots has no shape
                here.reshape(self.slots, -1)[mine] = there.reshape(source.slots, -1)[theirs]

    def to_records(self) -> NDArray[np.uint8]:
        """``[S, bytes]`` float32 records as an exact codec has them: the parts of a row one after another."""
        parts = [part.reshape(self.slots, -1).view(np.uint8) for part in self.parts if len(part)]
        return np.concatenate(parts, axis=1) if parts else np.empty((0, 0), dtype=np.uint8)

    def take_records(self, records: NDArray[np.uint8]) -> None:
        """Become what `to_records` gave."""
        at = 0
        for part in (part for part in self.parts if len(part)):
            end = at + part.nbytes // self.slots
            part.reshape(self.slots, -1)[:] = np.ascontiguousarray(records[:, at:end]).view(part.dtype)
            at = end
