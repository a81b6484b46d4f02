"""Numba bodies of the backward pass: sum the gradients of every distinct row and apply the row optimizer in place.

A row's gradients are summed in ascending order of lookup position, starting from the first, by one thread: its bits
depend neither on the number of threads nor on which of the two ways below its table takes.

- A table that fits the second cache beside what it is summed in is summed there directly, lookup after lookup.
- For any other table the lookups are first grouped by row (an open-addressing map, then a stable counting sort), and
  each row's sum stays in registers.

Tables' arrays are those of `lookup`. A lookup's gradient starts at its `source`; in a table with one feature of one
unweighted id a bag it is ``b * stride + column``, and nothing needs to be listed.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
from numba import literally, njit

from stratarec.kernels.embedding.lookup import share
from stratarec.kernels.embedding.rows import U, ahead_of, prefetch_row, prefetch_state, update_row
from stratarec.kernels.team import BODY, run_team, take
from stratarec.kernels.vector import add, broadcast, load, multiply, store

# Floats of a member's dense sums; half of a second cache of 1 MiB, the rows themselves being the other half.
DENSE_FLOATS = 1 << 17
# Adding to it gives any number's own bits, as starting from that number would; +0.0 would change -0.0.
NOTHING = np.float32(-0.0)


@njit(**BODY)
def list_lookups(
    features, part, parts, values, offsets, singles, batch, key, column, mean, sequence, sequence_start,
    sample_weights, weighted, stride, width, listed, source_of, scale_of,
):  # fmt: skip
    """List one table's lookups in ascending order of position: row, source (of the gradient) and scale.

    A source below zero lies in the sequence gradient, at its complement. With several parts only rows r with
    r % parts == part are listed. Returns the number of lookups.
    """
    lookups = U(0)
    for f in features:
        shift = key[f] * batch
        origin = shift if singles else offsets[shift]
        for b in range(batch):
            begin, end = (shift + b, shift + b + 1) if singles else (offsets[shift + b], offsets[shift + b + 1])
            factor = share(end - begin, mean[f])
            for i in range(U(begin), U(end)):
                row = values[i]
                if parts > 1 and U(row) % U(parts) != U(part):
                    continue
                listed[lookups] = row
                if sequence[f]:
                    source_of[lookups] = ~(sequence_start[f] + (np.int64(i) - origin) * width)
                    scale_of[lookups] = np.float32(1.0)
                else:
                    source_of[lookups] = b * stride + column[f]
                    scale_of[lookups] = factor * sample_weights[i] if weighted else factor
                lookups += U(1)
    return lookups


@njit(**BODY)
def gradient_of(lanes, i, block, plain, column, stride, source_of, scale_of, gradient, sequence_gradient):
    """A block of the i-th lookup's scaled gradient."""
    literally(lanes)
    if plain:
        return load(gradient, i * stride + column + block, lanes)
    source, scale = source_of[i], broadcast(scale_of[i], lanes)
    if source >= 0:
        return multiply(scale, load(gradient, U(source) + block, lanes))
    return multiply(scale, load(sequence_gradient, U(~source) + block, lanes))


@njit(**BODY)
def prefetch_gradient(i, plain, column, stride, source_of, gradient, D):
    """Ask for the i-th lookup's gradient; those of sequences follow one another, which the machine sees itself."""
    if plain:
        prefetch_row(gradient, i * stride + column, D)
    elif source_of[i] >= 0:
        prefetch_row(gradient, U(source_of[i]), D)


@njit(**BODY)
def sum_dense(
    lanes, ids, lookups, D, dense, touched, plain, column, stride, source_of, scale_of, gradient, sequence_gradient
):
    """``dense[r * D:][:D] += gradient`` for every lookup of row r, in order."""
    literally(lanes)
    for i in range(lookups):
        later = min(i + ahead_of(D), lookups - U(1))
        prefetch_gradient(later, plain, column, stride, source_of, gradient, D)
        row = U(ids[i])
        touched[row] = 1
        for block in range(U(0), D, U(lanes)):
            part = gradient_of(lanes, i, block, plain, column, stride, source_of, scale_of, gradient, sequence_gradient)
            place = row * D + block
            store(dense, place, add(load(dense, place, lanes), part))


@njit(**BODY)
def apply_dense(
    lanes, limit, origin, D, weights, row_state, full_state, dense, touched,
    kind, rate, eps, decay, beta1, beta2, moment, second,
):  # fmt: skip
    """Update the rows that `sum_dense` touched and leave its arrays as it found them."""
    literally(lanes)
    for row in range(U(limit)):
        if touched[row]:
            touched[row] = 0
            update_row(
                lanes, kind, weights, origin + row, D, dense, row * D, row_state, full_state,
                rate, eps, decay, beta1, beta2, moment, second,
            )  # fmt: skip
            for block in range(U(0), D, U(lanes)):
                store(dense, row * D + block, broadcast(NOTHING, lanes))


@njit(**BODY)
def group(ids, lookups, limit, index_of, slot_of, row_of, count_of):
    """Number the distinct rows in order of first lookup: ``slot_of[i]``, ``row_of[u]``, ``count_of[u]``.

    The map from row to number is open-addressed, at most half full, and empty again afterwards.
    """
    bits = U(4)
    while (U(1) << bits) < U(2) * lookups:
        bits += U(1)
    mask = (U(1) << bits) - U(1)
    distinct = U(0)
    for i in range(lookups):
        row = U(ids[i])
        slot = row if U(limit) <= mask else (row * U(0x9E3779B97F4A7C15)) >> (U(64) - bits)
        u = index_of[slot]
        while u >= 0 and row_of[U(u)] != row:
            slot = (slot + U(1)) & mask
            u = index_of[slot]
        if u < 0:
            u = np.int32(distinct)
            index_of[slot] = u
            row_of[distinct] = row
            count_of[distinct] = 0
            distinct += U(1)
        count_of[U(u)] += 1
        slot_of[i] = u
    for slot in range(mask + U(1)):
        index_of[slot] = -1
    return distinct


@njit(**BODY)
def sort_by_row(lookups, distinct, slot_of, order, end_of):
    """A stable counting sort: each row's lookups lie together, still in ascending order of position.

    `end_of` comes in as the count of each distinct row and goes out as the end of its share of `order`.
    """
    running = np.int32(0)
    for u in range(distinct):
        count = end_of[u]
        end_of[u] = running
        running += count
    for i in range(lookups):
        u = U(slot_of[i])
        order[U(end_of[u])] = i
        end_of[u] += 1


@njit(**BODY)
def apply_sorted(
    lanes, lookups, distinct, origin, D, weights, row_state, full_state, order, row_of, end_of, row_sum,
    plain, column, stride, source_of, scale_of, gradient, sequence_gradient,
    kind, rate, eps, decay, beta1, beta2, moment, second,
):  # fmt: skip
    """Sum each distinct row's gradients in order and update the row."""
    literally(lanes)
    begin = U(0)
    for u in range(distinct):
        ahead = origin + U(row_of[min(u + ahead_of(D) // U(2), distinct - U(1))])
        prefetch_state(kind, weights, ahead, D, row_state, full_state)
        end = U(end_of[u])
        for i in range(begin, end):
            later = U(order[min(i + ahead_of(D), lookups - U(1))])
            prefetch_gradient(later, plain, column, stride, source_of, gradient, D)
        for block in range(U(0), D, U(lanes)):
            found = gradient_of(
                lanes, U(order[begin]), block, plain, column, stride, source_of, scale_of, gradient,
                sequence_gradient,
            )  # fmt: skip
            for i in range(begin + U(1), end):
                part = gradient_of(
                    lanes, U(order[i]), block, plain, column, stride, source_of, scale_of, gradient,
                    sequence_gradient,
                )  # fmt: skip
                found = add(found, part)
            store(row_sum, block, found)
        begin = end
        update_row(
            lanes, kind, weights, origin + U(row_of[u]), D, row_sum, U(0), row_state, full_state,
            rate, eps, decay, beta1, beta2, moment, second,
        )  # fmt: skip


@njit(**BODY)
def update_tables(
    member, lanes, whole, counter, weights, width, row_state, full_state, values, offsets, singles, sample_weights,
    weighted, batch, key, base, rows, column, mean, sequence, sequence_start, table_start, table_features,
    table_lookups, tasks, gradient, sequence_gradient, stride, work, rule,
):  # fmt: skip
    """Take tasks until none is left: a table, or those of its rows r with r % parts == part.

    No row belongs to two tasks. Workspaces have one row a member.
    """
    literally(lanes)
    task_table, task_part, task_parts = tasks
    index_of, slot_of, listed, source_of, scale_of, order, row_of, count_of, row_sum, dense, touched = work
    kind, rate, eps, decay, beta1, beta2, moment, second = rule
    D, stride_, m = U(lanes if whole else width), U(stride), member
    while True:
        task = take(counter)
        if task >= len(task_table):
            break
        table = task_table[task]
        features = table_features[table_start[table] : table_start[table + 1]]
        f = features[0]
        origin, limit, lookups = U(base[f]), rows[f], U(table_lookups[table])
        plain = singles and not weighted and len(features) == 1 and not sequence[f] and task_parts[task] == 1
        ids = values[key[f] * batch : (key[f] + 1) * batch] if plain else listed[m]
        if not plain:
            lookups = list_lookups(
                features, task_part[task], task_parts[task], values, offsets, singles, batch, key, column, mean,
                sequence, sequence_start, sample_weights, weighted, stride, width, listed[m], source_of[m], scale_of[m],
            )  # fmt: skip
        if lookups == 0:
            continue
        for i in range(min(ahead_of(D), lookups)):
            prefetch_gradient(i, plain, U(column[f]), stride_, source_of[m], gradient, D)
        if limit * width <= DENSE_FLOATS and limit <= 4 * lookups:
            sum_dense(
                lanes, ids, lookups, D, dense[m], touched[m], plain, U(column[f]), stride_, source_of[m], scale_of[m],
                gradient, sequence_gradient,
            )  # fmt: skip
            apply_dense(
                lanes, limit, origin, D, weights, row_state, full_state, dense[m], touched[m],
                kind, rate, eps, decay, beta1, beta2, moment, second,
            )  # fmt: skip
            continue
        distinct = group(ids, lookups, limit, index_of[m], slot_of[m], row_of[m], count_of[m])
        sort_by_row(lookups, distinct, slot_of[m], order[m], count_of[m])
        apply_sorted(
            lanes, lookups, distinct, origin, D, weights, row_state, full_state, order[m], row_of[m], count_of[m],
            row_sum[m], plain, U(column[f]), stride_, source_of[m], scale_of[m], gradient, sequence_gradient,
            kind, rate, eps, decay, beta1, beta2, moment, second,
        )  # fmt: skip


@cache
def kernels(lanes: int, whole: bool) -> SimpleNamespace:
    """The update for rows in blocks of `lanes`, compiled at its first call and kept on disk."""

    @njit(nogil=True, cache=True)
    def update(
        team, weights, width, row_state, full_state, values, offsets, singles, sample_weights, weighted,
        batch, key, base, rows, column, mean, sequence, sequence_start, table_start, table_features, table_lookups,
        task_table, task_part, task_parts, gradient, sequence_gradient, stride,
        index_of, slot_of, listed, source_of, scale_of, order, row_of, count_of, row_sum, dense, touched,
        kind, rate, eps, decay, beta1, beta2, moment, second,
    ):  # fmt: skip
        # Python builds a tuple of more than 30 by appending, in which Numba before 0.68 loses that `lanes` is known.
        tasks = task_table, task_part, task_parts
        work = index_of, slot_of, listed, source_of, scale_of, order, row_of, count_of, row_sum, dense, touched
        rule = kind, rate, eps, decay, beta1, beta2, moment, second
        given = (
            lanes, whole, np.zeros(1, np.int64), weights, width, row_state, full_state, values, offsets, singles,
            sample_weights, weighted, batch, key, base, rows, column, mean, sequence, sequence_start, table_start,
            table_features, table_lookups, tasks, gradient, sequence_gradient, stride, work, rule,
        )  # fmt: skip
        run_team(team, update_tables, given)

    return SimpleNamespace(update=update)
