"""Encode and decode one record at a time in plain NumPy; bytes and floats equal the kernels'
results.

Where rounding is exact in real arithmetic, this module uses float64 and the kernels use bit
patterns. `Kind.plain_encode` encodes the weights.
"""

from __future__ import annotations

import numpy as np

from stratarec.kernels.codec.kinds.base import Floats, noise
from stratarec.kernels.codec.kinds.floats import from_bf16, from_fp32, plain_bf16, plain_fp32
from stratarec.kernels.codec.layout import RecordLayout


def encode(
    weights: Floats,
    row_state: np.float32,
    full_state: Floats,
    key: int,
    batch_number: int,
    layout: RecordLayout,
    clock: int = 0,
) -> bytes | None:
    """Return the record of one row, or None if the codec cannot represent one of its numbers."""
    width, full = layout.width, layout.full_state * layout.width
    words = noise(key, batch_number, range(width)) if layout.stochastic else None
    parts = [layout.kind.plain_encode(weights, words, layout.wide_parameters)]
    states = []
    if layout.row_state:
        states.append(
            (
                np.array([row_state], dtype=np.float32),
                range(width + max(width, full), width + max(width, full) + 1),
            )
        )
    if layout.full_state:
        states.append((full_state, range(width, width + full)))
    for values, columns in states:
        narrow = plain_bf16(values, noise(key, batch_number, columns))
        parts.append(plain_fp32(values, None, True) if layout.wide_state else narrow)
    parts.append(clock.to_bytes(4, "little") if layout.clock else b"")
    encoded = [part for part in parts if part is not None]
    return b"".join(encoded) if len(encoded) == len(parts) else None


def decode(record: bytes, layout: RecordLayout) -> tuple[Floats, Floats, Floats]:
    """Return ``(weights [D], row state [0 or 1], full state [0, D or 2 D])`` of one record, without
    its clock.
    """
    state = from_fp32 if layout.wide_state else from_bf16
    return (
        layout.kind.plain_decode(record[: layout.row_state_at], layout.width, layout.wide_parameters),
        state(record[layout.row_state_at : layout.full_state_at]),
        state(record[layout.full_state_at : layout.clock_at]),
    )
