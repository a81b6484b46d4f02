"""Numba bodies of the embedding engine: pool, look up, and update rows of one width group.

A group's tables lie one after another in one flat array: row r is ``weights[r * D:(r + 1) * D]``. Features are given as
parallel arrays: `key` (place in the batch's keys), `base` (first row of its table), `rows` (rows of its table), `column`
(first output column), `mean` (1 for mean pooling).
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from stratarec.kernels.prefetch import prefetch

SGD, ROWWISE_ADAGRAD, ADAGRAD, ROWWISE_ADAM = 0, 1, 2, 3

# Rows ahead of the one in use. 8, 16 and 32 were within noise of each other on rows of 64 floats; 4 was slower.
AHEAD = 16
LINE = 16  # float32 values in a cache line


@njit(nogil=True, cache=True, inline="always")
def prefetch_row(array, start, width):
    for element in range(0, width, LINE):
        prefetch(array, start + element)


@njit(nogil=True, cache=True)
def balanced_bags(offsets, first, last, part, parts):
    """The bags of [first, last) whose values are the `part`-th of `parts` equal shares of their values."""
    low, high = offsets[first], offsets[last]
    begin = first + np.searchsorted(offsets[first:last], low + (high - low) * part // parts)
    end = first + np.searchsorted(offsets[first:last], low + (high - low) * (part + 1) // parts)
    return (first if part == 0 else begin), (last if part == parts - 1 else end)


@njit(parallel=True, nogil=True, cache=True)
def pool_singles(weights, width, values, batch, key, base, rows, column, out, chunks):
    """out[b, column[f]:][:D] = row of the one id of bag (f, b). Returns the place of a bad id, or -1."""
    bad = np.full(chunks, -1, np.int64)
    total = len(key) * batch
    for chunk in prange(chunks):
        position, end = total * chunk // chunks, total * (chunk + 1) // chunks
        while position < end:
            f = position // batch
            first, last = position - f * batch, min(end - f * batch, batch)
            start, limit, origin = key[f] * batch, rows[f], base[f]
            for b in range(first, min(first + AHEAD, last)):
                prefetch_row(weights, (origin + values[start + b]) * width, width)
            for b in range(first, last):
                prefetch_row(weights, (origin + values[start + min(b + AHEAD, last - 1)]) * width, width)
                index = values[start + b]
                if index < 0 or index >= limit:
                    bad[chunk] = start + b
                    break
                source = (origin + index) * width
                target = out[b]
                for d in range(width):
                    target[column[f] + d] = weights[source + d]
            position = f * batch + last
    return bad.max()


@njit(nogil=True, cache=True, inline="always")
def _scale(lengths, mean):
    return np.float32(1.0) / np.float32(lengths) if mean and lengths > 0 else np.float32(1.0)


@njit(parallel=True, nogil=True, cache=True)
def pool_bags(
    weights, width, values, offsets, sample_weights, weighted, batch, key, base, rows, column, mean, out, chunks
):
    """As `pool_singles` for bags of any length: sum or mean of (weighted) rows; an empty bag gives zeros."""
    bad = np.full(chunks, -1, np.int64)
    for chunk in prange(chunks):
        for f in range(len(key)):
            shift = key[f] * batch
            first, last = balanced_bags(offsets, shift, shift + batch, chunk, chunks)
            limit, origin, left = rows[f], base[f], column[f]
            stop = offsets[shift + batch] - 1
            for bag in range(first, last):
                target = out[bag - shift]
                begin, end = offsets[bag], offsets[bag + 1]
                for d in range(width):
                    target[left + d] = np.float32(0.0)
                for i in range(begin, end):
                    prefetch_row(weights, (origin + values[min(i + AHEAD, stop)]) * width, width)
                    index = values[i]
                    if index < 0 or index >= limit:
                        bad[chunk] = i
                        continue
                    source = (origin + index) * width
                    if weighted:
                        factor = sample_weights[i]
                        for d in range(width):
                            target[left + d] += factor * weights[source + d]
                    else:
                        for d in range(width):
                            target[left + d] += weights[source + d]
                if mean[f] and end > begin + 1:
                    factor = _scale(end - begin, mean[f])
                    for d in range(width):
                        target[left + d] *= factor
    return bad.max()


@njit(parallel=True, nogil=True, cache=True)
def gather(weights, width, values, base, rows, out, chunks):
    """out[i] = row of values[i]: an unpooled lookup in one table. Returns the place of a bad id, or -1."""
    bad = np.full(chunks, -1, np.int64)
    count = len(values)
    for chunk in prange(chunks):
        first, last = count * chunk // chunks, count * (chunk + 1) // chunks
        for i in range(first, last):
            prefetch_row(weights, (base + values[min(i + AHEAD, last - 1)]) * width, width)
            index = values[i]
            if index < 0 or index >= rows:
                bad[chunk] = i
                break
            source = (base + index) * width
            target = out[i]
            for d in range(width):
                target[d] = weights[source + d]
    return bad.max()


@njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
def mean_square(gradient, start, width):
    """Mean of squares in the vector order that the compiler fixed: the same at every call and thread count."""
    total = np.float32(0.0)
    for d in range(width):
        total += gradient[start + d] * gradient[start + d]
    return total / np.float32(width)


@njit(nogil=True, cache=True)
def update_row(kind, weights, row, width, gradient, start, row_state, full_state, rate, eps, decay, beta1, beta2, step):
    """Apply one summed gradient ``gradient[start:start + D]`` to one row and its state."""
    first = row * width
    if decay != 0 and kind != ROWWISE_ADAM:
        for d in range(width):
            gradient[start + d] += decay * weights[first + d]
    if kind == SGD:
        for d in range(width):
            weights[first + d] -= rate * gradient[start + d]
    elif kind == ROWWISE_ADAGRAD:
        row_state[row] += mean_square(gradient, start, width)
        factor = rate / (math.sqrt(row_state[row]) + eps)
        for d in range(width):
            weights[first + d] -= factor * gradient[start + d]
    elif kind == ADAGRAD:
        for d in range(width):
            full_state[first + d] += gradient[start + d] * gradient[start + d]
            weights[first + d] -= rate * gradient[start + d] / (math.sqrt(full_state[first + d]) + eps)
    else:
        one = np.float32(1.0)
        row_state[row] = beta2 * row_state[row] + (one - beta2) * mean_square(gradient, start, width)
        moment = one - np.float32(beta1**step)
        scale = math.sqrt(row_state[row] / (one - np.float32(beta2**step))) + eps
        for d in range(width):
            full_state[first + d] = beta1 * full_state[first + d] + (one - beta1) * gradient[start + d]
            delta = full_state[first + d] / moment / scale + decay * weights[first + d]
            weights[first + d] -= rate * delta


@njit(nogil=True, cache=True)
def place(row, rows, index_of, keys, mask, direct):
    """The slot of `row` in the map: the row itself, or by linear probing from a multiplicative hash."""
    if direct:
        return row
    slot = ((row * np.int64(0x9E3779B97F4A7C15)) >> np.int64(20)) & mask
    while index_of[slot] >= 0 and keys[slot] != row:
        slot = (slot + 1) & mask
    return slot


@njit(nogil=True, cache=True)
def collect(
    features, part, parts, values, offsets, singles, batch, key, rows, column, mean, sequence, sequence_start,
    sample_weights, weighted, stride, index_of, keys, mask, direct, slot_of, source_of, scale_of, row_of, count_of,
):  # fmt: skip
    """List one table's lookups in ascending order of position: slot_of, source_of (gradient), scale_of.

    `row_of[u]` and `count_of[u]` describe the u-th distinct row. A source below zero lies in the sequence gradient, at
    its complement. With several parts only rows r with r % parts == part are listed. Returns (lookups, distinct rows).
    """
    lookups, distinct = 0, 0
    for f in features:
        shift = key[f] * batch
        for b in range(batch):
            begin, end = (shift + b, shift + b + 1) if singles else (offsets[shift + b], offsets[shift + b + 1])
            factor = _scale(end - begin, mean[f])
            for i in range(begin, end):
                row = np.int64(values[i])
                if parts > 1 and row % parts != part:
                    continue
                slot = place(row, rows[f], index_of, keys, mask, direct)
                u = index_of[slot]
                if u < 0:
                    u = distinct
                    index_of[slot] = u
                    if not direct:
                        keys[slot] = row
                    row_of[u] = row
                    count_of[u] = 0
                    distinct += 1
                count_of[u] += 1
                slot_of[lookups] = u
                if sequence[f]:
                    source_of[lookups] = ~(
                        sequence_start[f] + (i - (shift if singles else offsets[shift])) * (stride[1])
                    )
                    scale_of[lookups] = np.float32(1.0)
                else:
                    source_of[lookups] = b * stride[0] + column[f]
                    scale_of[lookups] = factor * sample_weights[i] if weighted else factor
                lookups += 1
    return lookups, distinct


@njit(nogil=True, cache=True)
def release(distinct, row_of, index_of, direct, mask):
    """Empty the map for the next table."""
    if direct:
        for u in range(distinct):
            index_of[row_of[u]] = -1
    else:
        index_of[: mask + 1] = -1


@njit(parallel=True, nogil=True, cache=True)
def update(
    weights, width, row_state, full_state, values, offsets, singles, sample_weights, weighted, batch,
    key, base, rows, column, mean, sequence, sequence_start, table_start, table_features,
    task_table, task_part, task_parts, thread_start, gradient, sequence_gradient, stride,
    index_of, keys, slot_of, source_of, scale_of, order, order_scale, row_of, count_of, row_sum,
    kind, rate, eps, decay, beta1, beta2, step,
):  # fmt: skip
    """Sum the gradients of every distinct row in ascending order of lookup position and apply the row optimizer.

    Thread t does tasks ``thread_start[t]:thread_start[t + 1]``; a task is a table, or the rows of a table with r % parts
    == part, so no row belongs to two threads and its sum does not depend on their number. Workspaces have one row a thread.
    """
    for t in prange(len(thread_start) - 1):
        total = row_sum[t]
        for task in range(thread_start[t], thread_start[t + 1]):
            table = task_table[task]
            features = table_features[table_start[table] : table_start[table + 1]]
            origin = base[features[0]]
            limit = rows[features[0]]
            lookups = 0
            for f in features:
                lookups += batch if singles else offsets[(key[f] + 1) * batch] - offsets[key[f] * batch]
            mask = np.int64(1)
            while mask < 2 * lookups:
                mask *= 2
            mask -= 1
            # A table of a few times its lookups is its own map: cheaper than probing, and still in cache.
            direct = limit <= 8 * lookups and limit <= index_of.shape[1]
            lookups, distinct = collect(
                features, task_part[task], task_parts[task], values, offsets, singles, batch, key, rows, column, mean,
                sequence, sequence_start, sample_weights, weighted, stride, index_of[t], keys[t], mask, direct,
                slot_of[t], source_of[t], scale_of[t], row_of[t], count_of[t],
            )  # fmt: skip
            release(distinct, row_of[t], index_of[t], direct, mask)
            # A stable counting sort by distinct row: each row's gradients lie together, still in ascending order.
            end_of = count_of[t]
            running = np.int32(0)
            for u in range(distinct):
                running += end_of[u]
                end_of[u] = running - end_of[u]
            for i in range(lookups):
                u = slot_of[t, i]
                order[t, end_of[u]] = source_of[t, i]
                order_scale[t, end_of[u]] = scale_of[t, i]
                end_of[u] += 1
            place_ = 0
            for u in range(distinct):
                ahead = origin + row_of[t, min(u + AHEAD // 2, distinct - 1)]
                prefetch_row(weights, ahead * width, width)
                if kind == ROWWISE_ADAGRAD or kind == ROWWISE_ADAM:
                    prefetch(row_state, ahead)
                if kind == ADAGRAD or kind == ROWWISE_ADAM:
                    prefetch_row(full_state, ahead * width, width)
                for d in range(width):
                    total[d] = np.float32(0.0)
                for i in range(place_, end_of[u]):
                    later = order[t, min(i + AHEAD, lookups - 1)]
                    if later >= 0:
                        prefetch_row(gradient, later, width)
                    source, factor = order[t, i], order_scale[t, i]
                    if source >= 0:
                        for d in range(width):
                            total[d] += factor * gradient[source + d]
                    else:
                        for d in range(width):
                            total[d] += sequence_gradient[~source + d]
                place_ = end_of[u]
                update_row(
                    kind, weights, origin + row_of[t, u], width, total, 0, row_state, full_state,
                    rate, eps, decay, beta1, beta2, step,
                )  # fmt: skip


@njit(parallel=True, nogil=True, cache=True)
def weight_gradient(weights, width, values, offsets, batch, key, base, column, mean, gradient, out, chunks):
    """out[i] = gradient of bag(i) . row(values[i]) (divided by the bag's length for mean pooling)."""
    for chunk in prange(chunks):
        for f in range(len(key)):
            shift = key[f] * batch
            first, last = balanced_bags(offsets, shift, shift + batch, chunk, chunks)
            for bag in range(first, last):
                factor = _scale(offsets[bag + 1] - offsets[bag], mean[f])
                for i in range(offsets[bag], offsets[bag + 1]):
                    source = (base[f] + values[i]) * width
                    total = np.float32(0.0)
                    for d in range(width):
                        total += gradient[bag - shift, column[f] + d] * weights[source + d]
                    out[i] += factor * total
