"""Encode slots of level 0 into records, and decode records into slots.

Shapes: n entries, D width, S slots of level 0, M records. Indices are not checked here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.codec import cpu
from stratarec.kernels.codec.layout import RecordLayout
from stratarec.kernels.runtime.team import team_of
from stratarec.kernels.runtime.threads import team_threads

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
Level = tuple[Floats, Floats, Floats, NDArray[np.int32]]

# More chunks than threads, because chunks take unequal time: rows that are already in a processor's
# cache are faster.
_CHUNKS_PER_THREAD = 4


def encode(
    layout: RecordLayout,
    level: Level,
    slots: Indices,
    records: NDArray[np.uint8],
    places: Indices,
    keys: NDArray[np.uint64],
    batch_number: int,
) -> int:
    """Encode ``slots[i]`` into ``records[places[i]]``; return -1, or the first entry that the
    layout cannot represent.

    Parameters
    ----------
    layout : RecordLayout
        Bytes of a record.
    level : tuple of ndarray
        Weights ``[S * D]``, row state ``[S]`` and full state ``[S * k * D]`` (k floats per weight),
        all flat float32, and clocks ``[S]`` int32. Arrays that the layout does not store may have
        any size.
    slots, places : ndarray
        ``[n]`` int64; places are distinct.
    records : ndarray
        ``[M, record_bytes]`` uint8, C-contiguous.
    keys : ndarray
        ``[n]`` uint64; the noise of stochastic rounding is a function of (key, batch_number,
        column).
    batch_number : int
        A number that is never used twice with the same key; tables pass the number of the batch.
    """
    threads = team_threads()
    bad = cpu.encode(
        team_of(threads),
        layout.form,
        level,
        slots,
        records.reshape(-1),
        places,
        keys,
        np.uint64(batch_number),
        threads * _CHUNKS_PER_THREAD,
    )
    return int(bad) if bad < len(slots) else -1


def decode(
    layout: RecordLayout, records: NDArray[np.uint8], places: Indices, level: Level, slots: Indices
) -> None:
    """Decode ``records[places[i]]`` into the distinct ``slots[i]``; shapes are as in `encode`."""
    threads = team_threads()
    chunks = threads * _CHUNKS_PER_THREAD
    cpu.decode(team_of(threads), layout.form, records.reshape(-1), places, level, slots, chunks)
