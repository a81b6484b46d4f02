"""The row optimizer's step on the CPU.

One thread sums a row's gradients in ascending order of lookup position, starting from the first
gradient. So the row's bits depend neither on the number of threads nor on which of two methods is
used for its table:

- If the table and an array of its sums fit the L2 cache, gradients are added to the sums directly,
  lookup after lookup.
- Otherwise lookups are first sorted by row (a stable radix sort), and each row's sum stays in
  registers. Rows in ascending order share pages and the memory's row buffers, which helps most with
  tables of gigabytes and long bags.

Arrays of tables are as in `pooling.cpu`. The gradient of a lookup starts at its `source`. In a
table with a single feature and one unweighted id per bag, this is ``b * stride + column``, and no
list is needed.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numba import literally, njit
from numpy.typing import NDArray

from stratarec.kernels.bags import BagBatch, GroupLayout, span
from stratarec.kernels.runtime.numba_private import has_cached_kernel
from stratarec.kernels.runtime.stack import stack_array
from stratarec.kernels.runtime.team import BODY, run_team, take, team_of
from stratarec.kernels.runtime.threads import threads_for
from stratarec.kernels.simd.prefetch import U, ahead_of, prefetch, prefetch_row
from stratarec.kernels.simd.vector import add, blocks, broadcast, load, multiply, store, total
from stratarec.kernels.update.lists import (
    GradientArrays,
    MemberScratch,
    batch_arrays,
    batch_of,
    is_simple,
    list_table,
    part_of,
    sort_by_row,
)
from stratarec.kernels.update.rules import (
    IS_CACHED,
    MissedSteps,
    Slots,
    Step,
    apply_missed_to_row,
    compiled,
    prefetch_state,
    rule_of,
    step_numbers_of,
    train_row,
)
from stratarec.kernels.update.workspace import DENSE_FLOATS, NOTHING, UpdateTasks, state_of


class Sources(NamedTuple):
    """Position of the gradient of each lookup.

    If `plain`, the position follows from the number of the lookup. Otherwise positions are listed
    in `of`, and if `scaled`, the factors of gradients in `scale`.
    """

    plain: bool
    scaled: bool
    column: np.uint64
    stride: np.uint64
    of: NDArray[np.int64]
    scale: NDArray[np.float32]
    pooled: NDArray[np.float32]
    rows: NDArray[np.float32]


@njit(**BODY)
def gradient_of(lanes, i, block, sources):
    """Return a block of the scaled gradient of lookup i."""
    literally(lanes)
    if sources.plain:
        return load(sources.pooled, i * sources.stride + sources.column + block, lanes)
    source = sources.of[i]
    if source < 0:
        return load(sources.rows, U(~source) + block, lanes)
    row = load(sources.pooled, U(source) + block, lanes)
    # Not scaled if all scales are 1: the backward pass of bags of 20 then takes 0.90 to 0.95 of the
    # time.
    return multiply(broadcast(sources.scale[i], lanes), row) if sources.scaled else row


@njit(**BODY)
def prefetch_gradient(i, first, floats, sources):
    """Prefetch `floats` floats of the gradient of lookup i, except for sequences, whose gradients
    are read in order.
    """
    if sources.plain:
        prefetch_row(sources.pooled, i * sources.stride + sources.column + first, floats)
    elif sources.of[i] >= 0:
        prefetch_row(sources.pooled, U(sources.of[i]) + first, floats)


@njit(**BODY)
def differs(i, sources):
    """Whether gradients of lookups i and i - 1 may differ; lookups of a bag share one."""
    if sources.plain or sources.of[i] != sources.of[i - U(1)]:
        return True
    return sources.scaled and sources.scale[i] != sources.scale[i - U(1)]


@njit(**BODY)
def sum_dense(lanes, ids, lookups, D, scratch, sources):
    """Add the gradient of every lookup of row r to ``dense[r * D:][:D]``, in order."""
    literally(lanes)
    # The outer loop is over blocks, the inner loop over lookups, so the sums of a block stay in the
    # L2 cache, and the gradient of a bag stays in registers.
    for block in range(U(0), D, U(lanes)):
        for i in range(min(ahead_of(D), lookups)):
            prefetch_gradient(i, block, U(lanes), sources)
        gradient = gradient_of(lanes, U(0), block, sources)
        for i in range(lookups):
            ahead = min(i + ahead_of(D), lookups - U(1))
            if differs(max(ahead, U(1)), sources):
                prefetch_gradient(ahead, block, U(lanes), sources)
            if i > U(0) and differs(i, sources):
                gradient = gradient_of(lanes, i, block, sources)
            row = U(ids[i])
            scratch.touched[row] = 1
            place = row * D + block
            store(scratch.dense, place, add(load(scratch.dense, place, lanes), gradient))


@njit(**BODY)
def apply_dense(lanes, limit, origin, D, slots, scratch, step):
    """Update the rows that `sum_dense` touched, and reset the arrays of sums and marks."""
    literally(lanes)
    for row in range(U(limit)):
        if scratch.touched[row]:
            scratch.touched[row] = 0
            train_row(lanes, step, slots, origin + row, D, scratch.dense, row * D)
            for block in range(U(0), D, U(lanes)):
                store(scratch.dense, row * D + block, broadcast(NOTHING, lanes))


@njit(**BODY)
def sum_row(lanes, span, D, scratch, sources):
    """Set `row_sum` to the sum of the gradients of lookups ``order[begin:end]``, in order; `span`
    is (begin, end).
    """
    literally(lanes)
    begin, end = span
    for block in range(U(0), D, U(lanes)):
        # Start from the first gradient, not from 0: 0.0 + -0.0 is 0.0, but the sum of a single
        # gradient must keep its bits.
        row_sum = gradient_of(lanes, U(scratch.order[begin]), block, sources)
        for i in range(begin + U(1), end):
            row_sum = add(row_sum, gradient_of(lanes, U(scratch.order[i]), block, sources))
        store(scratch.row_sum, block, row_sum)


@njit(**BODY)
def apply_sorted(lanes, lookups, distinct, origin, D, slots, scratch, sources, step):
    """Sum the gradients of each distinct row in order, and update the row."""
    literally(lanes)
    begin = U(0)
    for u in range(min(ahead_of(D) // U(2), distinct)):
        prefetch_state(step.rule.kind, slots, origin + U(scratch.row_of[u]), D)
    for i in range(min(ahead_of(D), lookups)):
        prefetch_gradient(U(scratch.order[i]), U(0), D, sources)
    for u in range(distinct):
        ahead = origin + U(scratch.row_of[min(u + ahead_of(D) // U(2), distinct - U(1))])
        prefetch_state(step.rule.kind, slots, ahead, D)
        end = U(scratch.end_of[u])
        for i in range(begin, end):
            prefetch_gradient(U(scratch.order[min(i + ahead_of(D), lookups - U(1))]), U(0), D, sources)
        sum_row(lanes, (begin, end), D, scratch, sources)
        begin = end
        train_row(lanes, step, slots, origin + U(scratch.row_of[u]), D, scratch.row_sum, U(0))


@njit(**BODY)
def member_scratch(work, m):
    """Return row `m` of every array of the scratch, which belongs to thread `m` of the team."""
    return MemberScratch(
        work.listed[m],
        work.source_of[m],
        work.scale_of[m],
        work.keys[m],
        work.counters[m],
        work.order[m],
        work.row_of[m],
        work.end_of[m],
        work.row_sum[m],
        work.dense[m],
        work.touched[m],
        work.squares[m],
    )


@njit(**BODY)
def update_tables(member, lanes, one_block, tasks, width, slots, batch, gradients, work, step):
    """Update one table (or part of its rows) after another until no task is left. No row belongs to
    two tasks.
    """
    literally(lanes)
    D, scratch = U(lanes if one_block else width), member_scratch(work, member)
    bags, features = batch.bags, batch.features
    while True:
        task = take(tasks.counter)
        if task >= len(tasks.table):
            break
        table, part = tasks.table[task], (tasks.part[task], tasks.parts[task])
        these = batch.table_features[batch.table_start[table] : batch.table_start[table + 1]]
        f = these[0]
        origin, limit, lookups = U(features.base[f]), features.rows[f], U(bags.batch)
        plain, first = is_simple(these, bags, features) and part[1] == 1, features.key[f] * bags.batch
        ids, scaled = bags.values[first : first + bags.batch] if plain else scratch.listed, False
        if not plain:
            lookups, scaled = list_table(these, part, bags, features, gradients, width, scratch)
        if lookups == 0:
            continue
        sources = Sources(
            plain,
            scaled,
            U(features.column[f]),
            U(gradients.stride),
            scratch.source_of,
            scratch.scale_of,
            gradients.pooled,
            gradients.rows,
        )
        # A table that fits the cache needs no sorting, which costs 4 to 7 ns per lookup.
        if limit * width <= len(scratch.dense) and limit * lanes <= DENSE_FLOATS and limit <= 4 * lookups:
            sum_dense(lanes, ids, lookups, D, scratch, sources)
            apply_dense(lanes, limit, origin, D, slots, scratch, step)
            continue
        distinct = sort_by_row(ids, lookups, limit, scratch)
        apply_sorted(lanes, lookups, distinct, origin, D, slots, scratch, sources, step)


@njit(**BODY)
def norm_sorted(lanes, lookups, distinct, D, scratch, sources):
    """Return the sum of squares of all rows' summed gradients; rows are added in the order of their
    first lookups.
    """
    literally(lanes)
    begin, free = U(0), U(len(scratch.squares)) // U(2)
    for i in range(lookups):
        scratch.squares[free + i] = 0.0
    for u in range(distinct):
        end = U(scratch.end_of[u])
        sum_row(lanes, (begin, end), D, scratch, sources)
        square = np.float64(0.0)
        for block in range(U(0), D, U(lanes)):
            part = load(scratch.row_sum, block, lanes)
            square += np.float64(total(multiply(part, part)))
        scratch.squares[free + U(scratch.order[begin])] = square
        begin = end
    square_sum = np.float64(0.0)
    for i in range(lookups):
        square_sum += scratch.squares[free + i]
    return square_sum


@njit(**BODY)
def norm_tables(member, lanes, one_block, counter, width, batch, gradients, work, out):
    """Compute the sum of squares of a table's gradients, for one table after another until none is
    left.

    The sum of a table is in the order of its lookups, so it does not depend on the thread.
    """
    literally(lanes)
    D, scratch = U(lanes if one_block else width), member_scratch(work, member)
    bags, features = batch.bags, batch.features
    while True:
        table = take(counter)
        if table >= len(out):
            break
        these = batch.table_features[batch.table_start[table] : batch.table_start[table + 1]]
        f = these[0]
        # Tables are not divided into parts: the float64 sum would depend on the number of parts.
        lookups, scaled = list_table(these, (0, 1), bags, features, gradients, width, scratch)
        if lookups == 0:
            continue
        sources = Sources(
            False,
            scaled,
            U(features.column[f]),
            U(gradients.stride),
            scratch.source_of,
            scratch.scale_of,
            gradients.pooled,
            gradients.rows,
        )
        distinct = sort_by_row(scratch.listed, lookups, features.rows[f], scratch)
        out[table] = norm_sorted(lanes, lookups, distinct, D, scratch, sources)


# Number of lookups ahead whose clocks are prefetched.
AHEAD = 16
# Number of rows of a task of `apply_missed_steps_to_range`.
_PIECE = 4096
_PIECE_IDS = np.arange(_PIECE, dtype=np.int32)
_NO_NUMBERS = np.empty((0, 3), dtype=np.float32)


@njit(**BODY)
def apply_missed_of_feature(lanes, f, part, bags, features, slots, D, rule, missed):
    """Apply missed steps to the rows that feature `f` looks up.

    `part` is (number of a part, number of parts); rows of other parts of the table are skipped.
    """
    literally(lanes)
    number, parts = part
    begin, end = span(bags, features.key[f])
    base, limit = features.base[f], features.rows[f]
    for i in range(U(begin), U(end)):
        prefetch(slots.clock, base + bags.values[min(i + U(AHEAD), U(end) - U(1))])
        row = bags.values[i]
        if 0 <= row < limit and (parts == 1 or part_of(row, parts) == U(number)):
            apply_missed_to_row(lanes, rule, missed, slots, U(base + row), D)


@njit(**BODY)
def apply_missed_of_tables(member, lanes, one_block, tasks, width, slots, batch, rule, missed):
    """Apply missed steps to tables, or parts of a table's rows, until no task is left."""
    literally(lanes)
    D = U(lanes if one_block else width)
    while True:
        task = take(tasks.counter)
        if task >= len(tasks.table):
            break
        table, part = tasks.table[task], (tasks.part[task], tasks.parts[task])
        for f in batch.table_features[batch.table_start[table] : batch.table_start[table + 1]]:
            apply_missed_of_feature(lanes, f, part, batch.bags, batch.features, slots, D, rule, missed)


@cache
def kernels(lanes: int, one_block: bool) -> SimpleNamespace:
    """Return the kernels for blocks of `lanes` floats, compiled when called, cached on disk."""

    @njit(nogil=True, cache=IS_CACHED)
    def run_update(team, width, slots, batch, tasks, gradients, work, step):
        # Named tuples are built here: passing one from Python costs 0.6 to 1.4 us, passing a plain
        # tuple 0.2 to 0.6.
        (rule, numbers), missed = step
        args = (
            lanes,
            one_block,
            UpdateTasks(stack_array(1, np.int64), tasks[0], tasks[1], tasks[2]),
            width,
            Slots(*slots),
            batch_of(batch),
            GradientArrays(*gradients),
            MemberScratch(*work),
            Step(rule_of(rule), step_numbers_of(numbers), MissedSteps(*missed)),
        )
        run_team(team, update_tables, args)

    @njit(nogil=True, cache=IS_CACHED)
    def run_norms(team, width, batch, gradients, work, out):
        counter = stack_array(1, np.int64)
        args = (
            lanes,
            one_block,
            counter,
            width,
            batch_of(batch),
            GradientArrays(*gradients),
            MemberScratch(*work),
            out,
        )
        run_team(team, norm_tables, args)

    @njit(nogil=True, cache=IS_CACHED)
    def run_apply_missed(team, width, slots, batch, tasks, rule, missed):
        tasks = UpdateTasks(stack_array(1, np.int64), tasks[0], tasks[1], tasks[2])
        args = (
            lanes,
            one_block,
            tasks,
            width,
            Slots(*slots),
            batch_of(batch),
            rule_of(rule),
            MissedSteps(*missed),
        )
        run_team(team, apply_missed_of_tables, args)

    return SimpleNamespace(update=run_update, norms=run_norms, apply_missed=run_apply_missed)


def is_compiled(width):
    """Return whether Numba's cache has `update` for rows of `width` (`has_cached_kernel`)."""
    return has_cached_kernel(kernels(*blocks(width)).update)


def update(slots, layout, bags, gradients, rule, missed, workspace):
    state = state_of(workspace)
    threads, most, tasks = state.share(layout, bags)
    if not most:
        return
    work = state.arrays.fit(threads, most, layout.width, bags.values.dtype)
    kernels(*blocks(layout.width)).update(
        team_of(threads),
        layout.width,
        tuple(slots),
        batch_arrays(layout, bags),
        tasks,
        _gradient_arrays(layout, gradients),
        tuple(work),
        (compiled(rule), missed_arrays(missed, layout.width)),
    )


_NO_ROWS = np.zeros(1, dtype=np.float32)


def square_norms(layout, bags, gradients, workspace):
    state, norms = state_of(workspace), np.zeros(len(layout.table_start) - 1)
    threads, most, _ = state.share(layout, bags)
    if most:
        work = state.arrays.fit(threads, most, layout.width, bags.values.dtype)
        kernels(*blocks(layout.width)).norms(
            team_of(threads),
            layout.width,
            batch_arrays(layout, bags),
            _gradient_arrays(layout, gradients),
            tuple(work),
            norms,
        )
    return norms


def _gradient_arrays(layout, gradients):
    """Return the fields of `GradientArrays`: the gradients of sequence features are concatenated,
    with their starts.
    """
    pooled, rows, start = gradients.pooled.numpy(), _NO_ROWS, layout.nowhere
    if gradients.rows:
        start = np.zeros(len(layout.sequence), dtype=np.int64)
        start[np.flatnonzero(layout.sequence)] = np.cumsum([0, *(part.numel() for part in gradients.rows)])[
            :-1
        ]
        rows = np.concatenate([part.numpy().reshape(-1) for part in gradients.rows])
    return pooled.reshape(-1), pooled.shape[1], rows, start


def apply_missed_steps(slots, layout, bags, missed, workspace):
    threads, most, tasks = state_of(workspace).share(layout, bags)
    if not most or not missed.steps:
        return
    kernels(*blocks(layout.width)).apply_missed(
        team_of(threads),
        layout.width,
        tuple(slots),
        batch_arrays(layout, bags),
        tasks,
        compiled(missed.rule)[0],
        missed_arrays(missed, layout.width),
    )


def apply_missed_steps_to_range(slots, width, first, last, missed):
    if not missed.steps:  # the first step of a run does not wait until the kernel is compiled
        return
    # Every piece of the range is a table that one feature looks up completely, so that no kernel of
    # its own must be compiled and loaded.
    base = np.arange(first, last, _PIECE)
    none, tables = np.zeros_like(base), np.arange(len(base) + 1)
    layout = GroupLayout(
        width=width,
        base=base,
        rows=np.minimum(last - base, _PIECE),
        column=none,
        mean=none,
        sequence=none,
        table_start=tables,
        table_features=tables[:-1],
    )
    bags = BagBatch(values=_PIECE_IDS, offsets=None, weights=None, batch=_PIECE, key=none)
    kernels(*blocks(width)).apply_missed(
        team_of(threads_for(last - first)),
        width,
        tuple(slots),
        batch_arrays(layout, bags),
        (tables[:-1], none, none + 1),
        compiled(missed.rule)[0],
        missed_arrays(missed, width),
    )


def missed_arrays(missed, width):
    """Return the fields of `MissedSteps`; if `missed` is None, there are no such steps."""
    still = _still(width)
    return (0, _NO_NUMBERS, still) if missed is None else (missed.steps, missed.numbers, still)


@cache
def _still(width):
    """Return the read-only gradient of a missed step for rows of `width`, which adds nothing."""
    return np.full(width, NOTHING, dtype=np.float32)
