"""Compare the swap kernel with its plain form: the same records, slots and bits for any codec and
width.
"""

from __future__ import annotations

import numpy as np
import pytest
from interpreted import sized

from stratarec.kernels import bit_rows, cache
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.codec import records as codec
from stratarec.kernels.codec.kinds import KINDS
from stratarec.kernels.codec.layout import RecordLayout
from stratarec.kernels.random import RowNoise, table_key
from stratarec.kernels.swap import swap

LOOKUPS, SETS = sized((300, 100), (30, 10))
ROWS = np.array([10 * LOOKUPS, 2 * LOOKUPS + SETS], dtype=np.int64)
WAYS = 8
SLOTS = (SETS + 2) * WAYS


def layout_of() -> cache.CacheLayout:
    return cache.CacheLayout(
        ways=WAYS,
        policy="lru",
        rows=ROWS,
        first_row=np.array([0, ROWS[0]], dtype=np.int64),
        slot_start=np.array([0, SLOTS, 2 * SLOTS], dtype=np.int64),
        sets=np.full(2, SETS, dtype=np.int64),
        overflow_sets=np.full(2, 2, dtype=np.int64),
        noise=RowNoise.of([table_key(3, "a"), table_key(3, "b")], [0, 0], [1, 1]),
        bound=np.array([0.5, 0.25], dtype=np.float32),
    )


def lookups_of(number: int) -> BagBatch:
    generator = np.random.default_rng(number)
    values = np.concatenate([generator.integers(0, rows, LOOKUPS) for rows in ROWS])
    return BagBatch(
        values=values, offsets=None, weights=None, batch=LOOKUPS, key=np.arange(2, dtype=np.int64)
    )


def group_of(width: int) -> GroupLayout:
    zeros = np.zeros(2, dtype=np.int64)
    return GroupLayout(
        width=width,
        base=np.array([0, SLOTS]),
        rows=np.full(2, SLOTS),
        column=zeros,
        mean=zeros,
        sequence=zeros,
        table_start=np.arange(3, dtype=np.int64),
        table_features=np.arange(2, dtype=np.int64),
    )


class Side:
    """Level 0 and the home of its rows."""

    def __init__(self, form: RecordLayout) -> None:
        sizes = (form.width, 1, form.width * form.full_state)
        floats = (np.zeros(2 * SLOTS * size, np.float32) for size in sizes)
        self.slots = (*floats, np.zeros(2 * SLOTS * form.clock, np.int32))
        rows = int(ROWS.sum())
        self.home = (
            np.zeros((rows, form.record_bytes), np.uint8),
            *(np.zeros(rows // 8 + 1, np.uint8) for _ in "wc"),
        )


def move_plainly(
    place: cache.CacheLayout,
    moves: tuple[cache.Moves, cache.Moves],
    form: RecordLayout,
    side: Side,
    batch_number: int,
):
    (outgoing, incoming), (home, written, changed) = moves, side.home
    assert (
        codec.encode(form, side.slots, outgoing.slots, home, outgoing.rows, outgoing.keys, batch_number) < 0
    )
    for bits in (written, changed):
        bit_rows.set_bits(bits, outgoing.rows)
    codec.decode(form, home, incoming.rows, side.slots, incoming.slots)
    absent = ~bit_rows.test_bits(written, incoming.rows)
    cache.initialize(place, incoming, absent, side.slots, form.width)


def nothing_of(moves: cache.Moves) -> cache.Moves:
    return cache.Moves(
        rows=moves.rows[:0], slots=moves.slots[:0], tables=moves.tables[:0], keys=moves.keys[:0]
    )


def form_of(kind: str, width: int, full_state: int) -> RecordLayout:
    return RecordLayout(
        kind=KINDS[kind],
        stochastic=True,
        wide_parameters=False,
        wide_state=False,
        width=width,
        row_state=True,
        full_state=full_state,
        clock=full_state == 2,
    )


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "full_state"), [(64, 0), (5, 2)])
def test_the_swap_moves_the_same_as_its_plain_form(kind: str, width: int, full_state: int) -> None:
    place, form = layout_of(), form_of(kind, width, full_state)
    state, workspace = cache.CacheState.empty(place), cache.StageWorkspace()
    plain, fused = Side(form), Side(form)
    evicted = 0
    for number in range(sized(12, 6)):
        lookups = lookups_of(number)
        out = np.empty(len(lookups.values), np.int32)
        done = cache.stage(
            group_of(width), place, state, lookups, out, stamp=number, horizon=number, workspace=workspace
        )
        released = cache.released(place, done, workspace)
        move_plainly(place, cache.moves(place, done, workspace), form, plain, number)
        move_plainly(place, (released, nothing_of(released)), form, fused, number)
        assert swap(place, done, workspace, form, fused.slots, fused.home, number) is None
        evicted += done.rows_out
        for left, right in zip((*plain.slots, *plain.home), (*fused.slots, *fused.home), strict=True):
            np.testing.assert_array_equal(left, right)
        for side in (plain, fused):
            for part in side.slots:
                part += np.random.default_rng(number).integers(0, 9, part.size).astype(part.dtype)
    assert evicted > LOOKUPS


@pytest.mark.interpreted
def test_an_evicted_row_that_the_codec_cannot_represent_is_named() -> None:
    place, form = layout_of(), form_of("int8", 8, 0)
    state, workspace, side = cache.CacheState.empty(place), cache.StageWorkspace(), Side(form)
    for number in range(20):
        lookups = lookups_of(number)
        done = cache.stage(
            group_of(8),
            place,
            state,
            lookups,
            np.empty(len(lookups.values), np.int32),
            stamp=number,
            horizon=number,
            workspace=workspace,
        )
        released = cache.released(place, done, workspace)
        victims = [row for row in cache.moves(place, done, workspace)[0].rows if row not in released.rows]
        if victims:
            side.slots[0][:] = np.nan
            table, row = swap(place, done, workspace, form, side.slots, side.home, number)
            assert place.first_row[table] + row == victims[0]
            return
        swap(place, done, workspace, form, side.slots, side.home, number)
    raise AssertionError("nothing was evicted: no test of a victim")
