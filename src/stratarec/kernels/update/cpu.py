"""The row optimizer's step on the processor.

A row's gradients are summed in ascending order of lookup position, starting from the first, by one thread: its bits
depend neither on the number of threads nor on which of the two ways below its table takes.

- A table that fits the second cache beside what it is summed in is summed there directly, lookup after lookup.
- For any other table the lookups are first sorted by row (a stable radix sort), and each row's sum stays in registers.
  Rows in ascending order share pages, and the memory's own rows: tables of gigabytes and long bags gain most by it.

Tables' arrays are those of `pooling.cpu`. A lookup's gradient starts at its `source`; in a table with one feature of
one unweighted id a bag it is ``b * stride + column``, and nothing needs to be listed.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from numba import literally, njit
from numpy.typing import NDArray

from stratarec.kernels.runtime.team import BODY, run_team, take, team_of
from stratarec.kernels.simd.prefetch import U, ahead_of, prefetch_row
from stratarec.kernels.simd.vector import add, blocks, broadcast, load, multiply, store, total
from stratarec.kernels.update.lists import (
    Given,
    MemberScratch,
    batch_given,
    batch_of,
    is_simple,
    list_table,
    sort_by_row,
)
from stratarec.kernels.update.missed import missed_arguments
from stratarec.kernels.update.rules import (
    MissedSteps,
    Slots,
    Step,
    compiled,
    pace_in,
    prefetch_state,
    rule_of,
    train_row,
)
from stratarec.kernels.update.workspace import DENSE_FLOATS, NOTHING, UpdateTasks, kept_for


class Sources(NamedTuple):
    """Where gradients are: `plain` ones follow from the lookup's number, others are listed and maybe `scaled`."""

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
    """A block of the i-th lookup's scaled gradient."""
    literally(lanes)
    if sources.plain:
        return load(sources.pooled, i * sources.stride + sources.column + block, lanes)
    source = sources.of[i]
    if source < 0:
        return load(sources.rows, U(~source) + block, lanes)
    found = load(sources.pooled, U(source) + block, lanes)
    # Gradients of unweighted sums were scaled by a list of ones: without it the backward of bags of 20 takes 0.90 to
    # 0.95 of the time.
    return multiply(broadcast(sources.scale[i], lanes), found) if sources.scaled else found


@njit(**BODY)
def prefetch_gradient(i, first, floats, sources):
    """Ask for so many floats of the i-th lookup's gradient; those of sequences follow one another, which the machine
    sees itself."""
    if sources.plain:
        prefetch_row(sources.pooled, i * sources.stride + sources.column + first, floats)
    elif sources.of[i] >= 0:
        prefetch_row(sources.pooled, U(sources.of[i]) + first, floats)


@njit(**BODY)
def differs(i, sources):
    """Whether the i-th lookup's gradient is another than that of the lookup before: a bag's lookups share one."""
    if sources.plain or sources.of[i] != sources.of[i - U(1)]:
        return True
    return sources.scaled and sources.scale[i] != sources.scale[i - U(1)]


@njit(**BODY)
def sum_dense(lanes, ids, lookups, D, own, sources):
    """``dense[r * D:][:D] += gradient`` for every lookup of row r, in order."""
    literally(lanes)
    # A block of all rows after the other: it stays in the second cache, a bag's gradient in registers.
    for block in range(U(0), D, U(lanes)):
        for i in range(min(ahead_of(D), lookups)):
            prefetch_gradient(i, block, U(lanes), sources)
        held = gradient_of(lanes, U(0), block, sources)
        for i in range(lookups):
            ahead = min(i + ahead_of(D), lookups - U(1))
            if differs(max(ahead, U(1)), sources):
                prefetch_gradient(ahead, block, U(lanes), sources)
            if i > U(0) and differs(i, sources):
                held = gradient_of(lanes, i, block, sources)
            row = U(ids[i])
            own.touched[row] = 1
            place = row * D + block
            store(own.dense, place, add(load(own.dense, place, lanes), held))


@njit(**BODY)
def apply_dense(lanes, limit, origin, D, slots, own, step):
    """Update the rows that `sum_dense` touched and leave its arrays as it found them."""
    literally(lanes)
    for row in range(U(limit)):
        if own.touched[row]:
            own.touched[row] = 0
            train_row(lanes, step, slots, origin + row, D, own.dense, row * D)
            for block in range(U(0), D, U(lanes)):
                store(own.dense, row * D + block, broadcast(NOTHING, lanes))


@njit(**BODY)
def sum_row(lanes, span, D, own, sources):
    """``row_sum`` = the gradients of the lookups that ``order[span]`` lists, in that order."""
    literally(lanes)
    begin, end = span
    for block in range(U(0), D, U(lanes)):
        # Begun with the first gradient, not with 0: 0.0 + -0.0 is 0.0, and a row with one lookup gets its very bits.
        found = gradient_of(lanes, U(own.order[begin]), block, sources)
        for i in range(begin + U(1), end):
            found = add(found, gradient_of(lanes, U(own.order[i]), block, sources))
        store(own.row_sum, block, found)


@njit(**BODY)
def apply_sorted(lanes, lookups, distinct, origin, D, slots, own, sources, step):
    """Sum each distinct row's gradients in order and update the row."""
    literally(lanes)
    begin = U(0)
    for u in range(min(ahead_of(D) // U(2), distinct)):
        prefetch_state(step.rule.kind, slots, origin + U(own.row_of[u]), D)
    for i in range(min(ahead_of(D), lookups)):
        prefetch_gradient(U(own.order[i]), U(0), D, sources)
    for u in range(distinct):
        ahead = origin + U(own.row_of[min(u + ahead_of(D) // U(2), distinct - U(1))])
        prefetch_state(step.rule.kind, slots, ahead, D)
        end = U(own.end_of[u])
        for i in range(begin, end):
            prefetch_gradient(U(own.order[min(i + ahead_of(D), lookups - U(1))]), U(0), D, sources)
        sum_row(lanes, (begin, end), D, own, sources)
        begin = end
        train_row(lanes, step, slots, origin + U(own.row_of[u]), D, own.row_sum, U(0))


@njit(**BODY)
def own_part(work, m):
    """A member's row of every array of the workspace."""
    return MemberScratch(
        work.listed[m], work.source_of[m], work.scale_of[m], work.keys[m], work.counters[m], work.order[m],
        work.row_of[m], work.end_of[m], work.row_sum[m], work.dense[m], work.touched[m], work.squares[m],
    )  # fmt: skip


@njit(**BODY)
def update_tables(member, lanes, whole, tasks, width, slots, batch, gradients, work, step):
    """Take tasks until none is left: a table, or a part of its rows. No row belongs to two tasks."""
    literally(lanes)
    D, own = U(lanes if whole else width), own_part(work, member)
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
        ids, scaled = bags.values[first : first + bags.batch] if plain else own.listed, False
        if not plain:
            lookups, scaled = list_table(these, part, bags, features, gradients, width, own)
        if lookups == 0:
            continue
        sources = Sources(
            plain, scaled, U(features.column[f]), U(gradients.stride), own.source_of, own.scale_of,
            gradients.pooled, gradients.rows,
        )  # fmt: skip
        # A table that fits the cache needs no sorting, which costs 4 to 7 ns a lookup.
        if limit * width <= len(own.dense) and limit * lanes <= DENSE_FLOATS and limit <= 4 * lookups:
            sum_dense(lanes, ids, lookups, D, own, sources)
            apply_dense(lanes, limit, origin, D, slots, own, step)
            continue
        distinct = sort_by_row(ids, lookups, limit, own)
        apply_sorted(lanes, lookups, distinct, origin, D, slots, own, sources, step)


@njit(**BODY)
def norm_sorted(lanes, lookups, distinct, D, own, sources):
    """Sum of squares of the summed gradients of all distinct rows, in the order of their first lookups."""
    literally(lanes)
    begin, free = U(0), U(len(own.squares)) // U(2)
    for i in range(lookups):
        own.squares[free + i] = 0.0
    for u in range(distinct):
        end = U(own.end_of[u])
        sum_row(lanes, (begin, end), D, own, sources)
        square = np.float64(0.0)
        for block in range(U(0), D, U(lanes)):
            part = load(own.row_sum, block, lanes)
            square += np.float64(total(multiply(part, part)))
        own.squares[free + U(own.order[begin])] = square
        begin = end
    found = np.float64(0.0)
    for i in range(lookups):
        found += own.squares[free + i]
    return found


@njit(**BODY)
def norm_tables(member, lanes, whole, counter, width, batch, gradients, work, out):
    """Take tables until none is left: the order of a table's sum is that of its lookups, whoever does it."""
    literally(lanes)
    D, own = U(lanes if whole else width), own_part(work, member)
    bags, features = batch.bags, batch.features
    while True:
        table = take(counter)
        if table >= len(out):
            break
        these = batch.table_features[batch.table_start[table] : batch.table_start[table + 1]]
        f = these[0]
        # Whole tables: float64 sums of parts would depend on how many parts there are.
        lookups, scaled = list_table(these, (0, 1), bags, features, gradients, width, own)
        if lookups == 0:
            continue
        sources = Sources(
            False, scaled, U(features.column[f]), U(gradients.stride), own.source_of, own.scale_of,
            gradients.pooled, gradients.rows,
        )  # fmt: skip
        distinct = sort_by_row(own.listed, lookups, features.rows[f], own)
        out[table] = norm_sorted(lanes, lookups, distinct, D, own, sources)


@cache
def kernels(lanes: int, whole: bool) -> SimpleNamespace:
    """The update for rows in blocks of `lanes`, compiled at its first call and kept on disk."""

    @njit(nogil=True, cache=True)
    def run_update(team, width, slots, batch, tasks, gradients, work, step):
        # Named here: on their way from Python named tuples cost 0.6 to 1.4 us each, plain ones 0.2 to 0.6.
        (rule, pace), missed = step
        given = (
            lanes, whole, UpdateTasks(np.zeros(1, np.int64), tasks[0], tasks[1], tasks[2]), width, Slots(*slots),
            batch_of(batch), Given(*gradients), MemberScratch(*work),
            Step(rule_of(rule), pace_in(pace), MissedSteps(*missed)),
        )  # fmt: skip
        run_team(team, update_tables, given)

    @njit(nogil=True, cache=True)
    def run_norms(team, width, batch, gradients, work, out):
        counter = np.zeros(1, np.int64)
        given = (lanes, whole, counter, width, batch_of(batch), Given(*gradients), MemberScratch(*work), out)
        run_team(team, norm_tables, given)

    return SimpleNamespace(update=run_update, norms=run_norms)


def update(slots, layout, bags, gradients, rule, missed, workspace):
    """`update.update` for arrays."""
    kept = kept_for(workspace)
    threads, most, tasks = kept.share(layout, bags)
    if not most:
        return
    work = kept.arrays.fit(threads, most, layout.width, bags.values.dtype)
    kernels(*blocks(layout.width)).update(
        team_of(threads), layout.width, tuple(slots), batch_given(layout, bags), tasks,
        _given(layout, gradients), tuple(work), (compiled(rule), missed_arguments(missed, layout.width)),
    )  # fmt: skip


_NO_ROWS = np.zeros(1, dtype=np.float32)


def square_norms(layout, bags, gradients, workspace):
    """`update.square_norms` for arrays."""
    kept, found = kept_for(workspace), np.zeros(len(layout.table_start) - 1)
    threads, most, _ = kept.share(layout, bags)
    if most:
        work = kept.arrays.fit(threads, most, layout.width, bags.values.dtype)
        kernels(*blocks(layout.width)).norms(
            team_of(threads), layout.width, batch_given(layout, bags), _given(layout, gradients), tuple(work), found,
        )  # fmt: skip
    return found


def _given(layout, gradients):
    """Gradients of the sequence features one after another, and where each feature's start."""
    pooled, rows, start = gradients.pooled.numpy(), _NO_ROWS, layout.nowhere
    if gradients.rows:
        start = np.zeros(len(layout.sequence), dtype=np.int64)
        start[np.flatnonzero(layout.sequence)] = np.cumsum([0, *(part.numel() for part in gradients.rows)])[:-1]
        rows = np.concatenate([part.numpy().reshape(-1) for part in gradients.rows])
    return pooled.reshape(-1), pooled.shape[1], rows, start
