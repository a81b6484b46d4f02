"""Rows that take the steps which they missed: see `rules.apply_missed_steps`."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
from numba import literally, njit

from stratarec.kernels.bags.cpu import span
from stratarec.kernels.runtime.team import BODY, run_team, take, team_of
from stratarec.kernels.runtime.threads import threads_for
from stratarec.kernels.simd.prefetch import U, prefetch
from stratarec.kernels.simd.vector import blocks
from stratarec.kernels.update.lists import batch_given, batch_of, part_of
from stratarec.kernels.update.rules import MissedSteps, Slots, apply_missed_steps, compiled, rule_of
from stratarec.kernels.update.workspace import NOTHING, UpdateTasks, kept_for

# Lookups ahead of the one in use whose clock is asked for.
AHEAD = 16
_CHUNK_ROWS = 256
_NO_PACES = np.empty((0, 3), dtype=np.float32)


def missed_arguments(missed, width):
    """`MissedSteps`, as kernels take it; of no steps where nothing is ever missed."""
    still = _still(width)
    return (0, _NO_PACES, still) if missed is None else (missed.steps, missed.paces, still)


@cache
def _still(width):
    """The gradient of a step that a row of so many floats missed; made once, as kernels only read it."""
    return np.full(width, NOTHING, dtype=np.float32)


@njit(**BODY)
def apply_to_feature(lanes, f, part, bags, features, slots, D, rule, missed):
    """Let the rows of a feature's lookups catch up that are of `part`, (number, parts), of their table."""
    literally(lanes)
    number, parts = part
    begin, end = span(bags, features.key[f])
    base, limit = features.base[f], features.rows[f]
    for i in range(U(begin), U(end)):
        prefetch(slots.clock, base + bags.values[min(i + U(AHEAD), U(end) - U(1))])
        row = bags.values[i]
        if 0 <= row < limit and (parts == 1 or part_of(row, parts) == U(number)):
            apply_missed_steps(lanes, rule, missed, slots, U(base + row), D)


@njit(**BODY)
def apply_to_tables(member, lanes, whole, tasks, width, slots, batch, rule, missed):
    """Take tasks until none is left: a table, or a part of its rows."""
    literally(lanes)
    D = U(lanes if whole else width)
    while True:
        task = take(tasks.counter)
        if task >= len(tasks.table):
            break
        table, part = tasks.table[task], (tasks.part[task], tasks.parts[task])
        for f in batch.table_features[batch.table_start[table] : batch.table_start[table + 1]]:
            apply_to_feature(lanes, f, part, batch.bags, batch.features, slots, D, rule, missed)


@njit(**BODY)
def apply_to_range(member, lanes, whole, counter, width, slots, first, last, rule, missed):
    """Take chunks of the rows ``first:last`` until none is left."""
    literally(lanes)
    D = U(lanes if whole else width)
    while True:
        begin = first + take(counter) * _CHUNK_ROWS
        if begin >= last:
            break
        for row in range(U(begin), U(min(begin + _CHUNK_ROWS, last))):
            apply_missed_steps(lanes, rule, missed, slots, row, D)


@cache
def kernels(lanes, whole):
    """For rows in blocks of `lanes`, compiled at their first call and kept on disk."""

    @njit(nogil=True, cache=True)
    def run_batch(team, width, slots, batch, tasks, rule, missed):
        tasks = UpdateTasks(np.zeros(1, np.int64), tasks[0], tasks[1], tasks[2])
        given = (lanes, whole, tasks, width, Slots(*slots), batch_of(batch), rule_of(rule), MissedSteps(*missed))
        run_team(team, apply_to_tables, given)

    @njit(nogil=True, cache=True)
    def run_range(team, width, slots, first, last, rule, missed):
        given = (
            lanes, whole, np.zeros(1, np.int64), width, Slots(*slots), first, last, rule_of(rule),
            MissedSteps(*missed),
        )  # fmt: skip
        run_team(team, apply_to_range, given)

    return SimpleNamespace(batch=run_batch, range=run_range)


def batch_missed_steps(slots, layout, bags, missed, workspace):
    """`update.apply_missed_steps` for arrays."""
    threads, most, tasks = kept_for(workspace).share(layout, bags)
    if not most:
        return
    kernels(*blocks(layout.width)).batch(
        team_of(threads), layout.width, tuple(slots), batch_given(layout, bags), tasks, compiled(missed.rule)[0],
        missed_arguments(missed, layout.width),
    )  # fmt: skip


def apply_missed_steps_to_range(slots, width, first, last, missed):
    """`update.apply_missed_steps_to_range` for arrays."""
    kernels(*blocks(width)).range(
        team_of(threads_for(last - first)), width, tuple(slots), first, last, compiled(missed.rule)[0],
        missed_arguments(missed, width),
    )  # fmt: skip
