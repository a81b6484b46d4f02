"""Compare the cache kernel with the plain cache: same slots and moves for any batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratarec.kernels import cache
from stratarec.kernels.bags import BagBatch, GroupLayout
from stratarec.kernels.cache.reference import TableCache
from stratarec.kernels.random import RowNoise, fill_uniform, table_key

pytestmark = pytest.mark.interpreted

ROWS = (500, 90)
RANKS = {"lru": lambda slot: (0, slot.stamp), "rank": lambda slot: (-slot.row, 0)}
"""Policy -> order in which the plain cache evicts slots."""


def layout(policy: str, sets: int, overflow_sets: int, ways: int) -> cache.CacheLayout:
    slots = (sets + overflow_sets) * ways
    return cache.CacheLayout(
        ways=ways,
        policy=policy,
        rows=np.array(ROWS, dtype=np.int64),
        first_row=np.array([0, ROWS[0]], dtype=np.int64),
        slot_start=np.array([0, slots, 2 * slots], dtype=np.int64),
        sets=np.full(2, sets, dtype=np.int64),
        overflow_sets=np.full(2, overflow_sets, dtype=np.int64),
        noise=RowNoise.of([table_key(3, "a"), table_key(3, "b")], [0, 0], [1, 1]),
        bound=np.array([0.5, 0.25], dtype=np.float32),
    )


def group(slots: int) -> GroupLayout:
    zeros = np.zeros(2, dtype=np.int64)
    return GroupLayout(
        width=4,
        base=np.array([0, slots], dtype=np.int64),
        rows=np.full(2, slots, dtype=np.int64),
        column=np.array([0, 4], dtype=np.int64),
        mean=zeros,
        sequence=zeros,
        table_start=np.arange(3, dtype=np.int64),
        table_features=np.arange(2, dtype=np.int64),
    )


def batch_of(ids: tuple[list[int], list[int]]) -> BagBatch:
    lengths = [len(ids[0]), len(ids[1])]
    return BagBatch(
        values=np.array(ids[0] + ids[1], dtype=np.int32),
        offsets=np.cumsum([0, *lengths]).astype(np.int64),
        weights=None,
        batch=1,
        key=np.arange(2, dtype=np.int64),
    )


batches = st.lists(
    st.tuples(
        st.lists(st.integers(0, ROWS[0] - 1), max_size=30),
        st.lists(st.integers(0, ROWS[1] - 1), max_size=30),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=30, deadline=None)
@given(
    batches=batches,
    policy=st.sampled_from([*RANKS]),
    shape=st.sampled_from([(1, 1, 4), (2, 1, 8), (1, 1, 40), (3, 2, 32), (7, 20, 2)]),
    lookahead=st.integers(0, 3),
)
def test_moves_match_the_plain_cache(batches, policy, shape, lookahead):
    place = layout(policy, *shape)
    state, workspace = cache.CacheState.empty(place), cache.StageWorkspace()
    plain = [TableCache(*shape, RANKS[policy]) for _ in range(2)]
    slots = (shape[0] + shape[1]) * shape[2]
    for number, ids in enumerate(batches):
        lookups = batch_of(ids)
        out = np.full(len(lookups.values), -7, dtype=np.int32)
        done = cache.stage(
            group(slots),
            place,
            state,
            lookups,
            out,
            stamp=number,
            horizon=number - lookahead,
            workspace=workspace,
        )
        outgoing, incoming = cache.moves(place, done, workspace)
        begin = 0
        for table, requested in enumerate(ids):
            actual, rows_in, rows_out = plain[table].stage(requested, number, number - lookahead)
            mine = out[begin : begin + len(requested)].tolist()
            begin += len(requested)
            assert mine == actual
            assert done.stuck[table] == sum(slot < 0 for slot in actual)
            first = place.first_row[table]
            assert (incoming.rows[incoming.tables == table] - first).tolist() == rows_in
            assert (outgoing.rows[outgoing.tables == table] - first).tolist() == rows_out
        if done.stuck.any():
            return


def test_a_slot_in_use_is_never_evicted():
    place = layout("lru", 1, 1, 4)
    state, workspace = cache.CacheState.empty(place), cache.StageWorkspace()

    def stage(ids: list[int], batch: int, horizon: int) -> cache.Moves:
        lookups = batch_of((ids, []))
        done = cache.stage(
            group(8),
            place,
            state,
            lookups,
            np.empty(len(ids), np.int32),
            stamp=batch,
            horizon=horizon,
            workspace=workspace,
        )
        assert not done.stuck.any()
        return cache.moves(place, done, workspace)[0]

    assert len(stage([1, 2, 3, 4], 0, -1)) == 0
    assert len(stage([5, 6], 1, 0)) == 0, "batch 0 is still in use, so batch 1 must go to the overflow area"
    assert sorted(stage([7], 2, 1).rows.tolist())[0] in (1, 2, 3, 4)


def test_a_stuck_batch_continues_with_a_later_horizon():
    place = layout("lru", 1, 1, 4)
    state, workspace = cache.CacheState.empty(place), cache.StageWorkspace()
    first = batch_of(([1, 2, 3, 4, 5, 6], []))
    cache.stage(
        group(8), place, state, first, np.empty(6, np.int32), stamp=0, horizon=-1, workspace=workspace
    )
    second, out = batch_of(([10, 11, 12, 13], [])), np.full(4, -7, np.int32)
    done = cache.stage(group(8), place, state, second, out, stamp=1, horizon=0, workspace=workspace)
    assert done.stuck[0] == 2
    moved = cache.moves(place, done, workspace)
    done = cache.stage(group(8), place, state, second, out, stamp=1, horizon=1, workspace=workspace)
    outgoing, incoming = (
        np.concatenate([first.rows, then.rows])
        for first, then in zip(moved, cache.moves(place, done, workspace), strict=True)
    )
    assert not done.stuck.any()
    assert sorted(incoming.tolist()) == [10, 11, 12, 13]
    assert len(set(out.tolist())) == 4
    assert set(outgoing.tolist()) <= {1, 2, 3, 4, 5, 6}


def test_a_bad_id_is_reported_and_nothing_moves():
    place = layout("lru", 1, 1, 4)
    state, workspace = cache.CacheState.empty(place), cache.StageWorkspace()
    lookups = batch_of(([1, ROWS[0]], [5]))
    done = cache.stage(
        group(8), place, state, lookups, np.empty(3, np.int32), stamp=0, horizon=0, workspace=workspace
    )
    assert done.bad == 1
    assert (state.tags[:8] == 0).all()


@pytest.mark.parametrize("full", [0, 1, 2])
def test_initial_values_match_a_table_in_memory(full):
    place = layout("lru", 4, 1, 4)
    expected = np.empty((ROWS[1], 4), dtype=np.float32)
    fill_uniform(expected, key=table_key(3, "b"), low=-0.25, high=0.25)
    ids = np.array([3, 89, 0], dtype=np.int64)
    tables = np.ones(3, dtype=np.int32)
    moves = cache.Moves(
        rows=ids + ROWS[0],
        slots=np.array([5, 2, 9]),
        tables=tables,
        keys=cache.row_keys(place, tables, ids),
    )
    weights = np.full(40 * 4, np.nan, dtype=np.float32)
    row_state = np.full(40, np.nan, dtype=np.float32)
    full_state = np.full(40 * 4 * full, np.nan, dtype=np.float32)
    clock = np.full(40, -1, dtype=np.int32)
    absent = np.array([True, True, False])
    cache.initialize(place, moves, absent, (weights, row_state, full_state, clock), 4)
    assert (weights.reshape(-1, 4)[[5, 2]] == expected[[3, 89]]).all()
    assert (row_state[[5, 2]] == 0).all()
    assert np.isnan(row_state[9])
    assert clock[[5, 2, 9]].tolist() == [0, 0, -1]
    assert (full_state.reshape(40, -1)[[5, 2]] == 0).all()
    assert np.isnan(full_state.reshape(40, -1)[9]).all()
    assert np.isnan(weights.reshape(-1, 4)[9]).all()
