"""Encode slots of level 0 into records and back.

Shapes: n entries, D width, S slots of level 0, M records.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.codec import reference
from stratarec.kernels.codec.layout import Layout

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]


def encode(
    layout: Layout, weights: Floats, row_state: Floats, full_state: Floats, slots: Indices,
    records: NDArray[np.uint8], places: Indices, keys: NDArray[np.uint64], write: int,
) -> int:  # fmt: skip
    D = layout.width
    for i, (slot, place) in enumerate(zip(slots, places, strict=True)):
        own = slice(slot * D, (slot + 1) * D)
        record = reference.encode(
            weights[own], row_state[slot % len(row_state)], full_state[own], int(keys[i]), write, layout
        )
        if record is None:
            return i
        records[place] = np.frombuffer(record, np.uint8)
    return -1


def decode(
    layout: Layout, records: NDArray[np.uint8], places: Indices, weights: Floats, row_state: Floats,
    full_state: Floats, slots: Indices,
) -> None:  # fmt: skip
    D = layout.width
    for slot, place in zip(slots, places, strict=True):
        own = slice(slot * D, (slot + 1) * D)
        weight, row, full = reference.decode(records[place].tobytes(), layout)
        weights[own] = weight
        row_state[slot : slot + len(row)] = row
        full_state[slot * len(full) : (slot + 1) * len(full)] = full
