"""Write back evicted rows and fetch the rows that replace them, in one pass, for records in
addressable memory.

The result is the same as with separate steps: `kernels.codec.records.encode` for the evicted rows
(victims), then `kernels.codec.records.decode` or `kernels.cache.initialize` for the rows that
replace them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stratarec.kernels.cache import CacheLayout, StageWorkspace, Staging
from stratarec.kernels.codec.layout import RecordLayout
from stratarec.kernels.runtime.team import team_of
from stratarec.kernels.runtime.threads import team_threads
from stratarec.kernels.swap import cpu

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def swap(
    layout: CacheLayout,
    staging: Staging,
    workspace: StageWorkspace,
    codec: RecordLayout,
    slots: tuple[Floats, Floats, Floats, NDArray[np.int32]],
    home: tuple[Bytes, ...],
    batch_number: int,
) -> tuple[int, int] | None:
    """Swap the rows that `kernels.cache.stage` listed: write back each victim and read the row that
    replaces it.

    Parameters
    ----------
    layout : CacheLayout
        Slots and rows of the tables.
    staging : Staging
        Result of `kernels.cache.stage`.
    workspace : StageWorkspace
        Lists of the moves, which `kernels.cache.stage` wrote.
    codec : RecordLayout
        Bytes of a record.
    slots : tuple of ndarray
        Weights, row state, full state and clocks of level 0.
    home : tuple of ndarray
        Records ``[R, record_bytes]``, bits of the rows that were ever written, and bits of changed
        rows.
    batch_number : int
        Number of the batch, for the noise of stochastic rounding (`kernels.codec.records.encode`).

    Returns
    -------
    tuple of int or None
        Table and row of a victim that the codec cannot represent; None if there is none.
    """
    records, written, changed = home
    arrays = workspace.arrays
    lists = workspace.room, staging.rows_in, arrays["in_row"], arrays["in_slot"], arrays["in_victim"]
    refused = cpu.swap(
        team_of(team_threads()),
        codec.form,
        tuple(slots),
        (records.reshape(-1), written, changed),
        lists,
        (layout.first_row, tuple(layout.noise), layout.bound),
        np.uint64(batch_number),
    )
    if refused < 0:
        return None
    table = int(np.searchsorted(workspace.room, refused, side="right") - 1)
    return table, int(arrays["in_victim"][refused])
