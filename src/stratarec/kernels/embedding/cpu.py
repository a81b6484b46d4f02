"""Numba bodies of the embedding engine: pool, look up, and update rows of one width group.

A group's tables lie one after another in one flat array: row r is ``weights[r * D:(r + 1) * D]``. Features are given
as parallel arrays: `key` (place in the batch's keys), `base` (first row of its table), `rows` (rows of its table),
`column` (first output column), `mean` (1 for mean pooling).

Inner loops index flat arrays with unsigned integers. With signed ones Numba adds a test for negative indices that keeps
LLVM from vectorising: pooling rows of 64 floats took 8 times as long.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from stratarec.kernels.prefetch import prefetch

SGD, ROWWISE_ADAGRAD, ADAGRAD, ROWWISE_ADAM = 0, 1, 2, 3

# Rows ahead of the one in use.
AHEAD = 16
U = np.uint64
LINE = U(16)  # float32 values in a cache line


@njit(nogil=True, cache=True, inline="always")
def prefetch_row(array, start, width):
    for element in range(U(0), width, LINE):
        prefetch(array, start + element)


@njit(nogil=True, cache=True)
def balanced_bags(offsets, first, last, part, parts):
    """The bags of [first, last) whose values are the `part`-th of `parts` equal shares of their values."""
    low, high = offsets[first], offsets[last]
    begin = first + np.searchsorted(offsets[first:last], low + (high - low) * part // parts)
    end = first + np.searchsorted(offsets[first:last], low + (high - low) * (part + 1) // parts)
    return (first if part == 0 else begin), (last if part == parts - 1 else end)


@njit(parallel=True, nogil=True, cache=True)
def pool_singles(weights, width, values, batch, key, base, rows, column, out, stride, chunks):
    """out[b * stride + column[f]:][:D] = row of the one id of bag (f, b). Returns the place of a bad id, or -1."""
    bad = np.full(chunks, -1, np.int64)
    total = len(key) * batch
    D = U(width)
    for chunk in prange(chunks):
        position, end = total * chunk // chunks, total * (chunk + 1) // chunks
        while position < end:
            f = position // batch
            first, last = position - f * batch, min(end - f * batch, batch)
            start, limit, origin = key[f] * batch, rows[f], base[f]
            for b in range(first, min(first + AHEAD, last)):
                prefetch_row(weights, U(origin + values[start + b]) * D, D)
            for b in range(first, last):
                prefetch_row(weights, U(origin + values[start + min(b + AHEAD, last - 1)]) * D, D)
                index = values[start + b]
                if index < 0 or index >= limit:
                    bad[chunk] = start + b
                    break
                source = U(origin + index) * D
                target = U(b * stride + column[f])
                for d in range(D):
                    out[target + d] = weights[source + d]
            position = f * batch + last
    return bad.max()


@njit(nogil=True, cache=True, inline="always")
def share(length, mean):
    """What a lookup of a bag of `length` counts for."""
    return np.float32(1.0) / np.float32(length) if mean and length > 1 else np.float32(1.0)


@njit(parallel=True, nogil=True, cache=True)
def pool_bags(
    weights, width, values, offsets, sample_weights, weighted, batch, key, base, rows, column, mean, out, stride, chunks
):
    """As `pool_singles` for bags of any length: sum or mean of (weighted) rows; an empty bag gives zeros."""
    bad = np.full(chunks, -1, np.int64)
    D = U(width)
    for chunk in prange(chunks):
        for f in range(len(key)):
            shift = key[f] * batch
            first, last = balanced_bags(offsets, shift, shift + batch, chunk, chunks)
            limit, origin = rows[f], base[f]
            stop = offsets[shift + batch] - 1
            for bag in range(first, last):
                target = U((bag - shift) * stride + column[f])
                begin, end = offsets[bag], offsets[bag + 1]
                for d in range(D):
                    out[target + d] = np.float32(0.0)
                for i in range(begin, end):
                    prefetch_row(weights, U(origin + values[min(i + AHEAD, stop)]) * D, D)
                    index = values[i]
                    if index < 0 or index >= limit:
                        bad[chunk] = i
                        continue
                    source = U(origin + index) * D
                    if weighted:
                        factor = sample_weights[i]
                        for d in range(D):
                            out[target + d] += factor * weights[source + d]
                    else:
                        for d in range(D):
                            out[target + d] += weights[source + d]
                if mean[f] and end > begin + 1:
                    factor = share(end - begin, mean[f])
                    for d in range(D):
                        out[target + d] *= factor
    return bad.max()


@njit(parallel=True, nogil=True, cache=True)
def gather(weights, width, values, base, rows, out, chunks):
    """out[i * D:][:D] = row of values[i]: an unpooled lookup in one table. Returns the place of a bad id, or -1."""
    bad = np.full(chunks, -1, np.int64)
    count = len(values)
    D = U(width)
    for chunk in prange(chunks):
        first, last = count * chunk // chunks, count * (chunk + 1) // chunks
        for i in range(first, last):
            prefetch_row(weights, U(base + values[min(i + AHEAD, last - 1)]) * D, D)
            index = values[i]
            if index < 0 or index >= rows:
                bad[chunk] = i
                break
            source = U(base + index) * D
            target = U(i) * D
            for d in range(D):
                out[target + d] = weights[source + d]
    return bad.max()


@njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
def mean_square(gradient, start, D):
    """Mean of squares in the vector order that the compiler fixed: the same at every call and thread count."""
    total = np.float32(0.0)
    for d in range(D):
        total += gradient[start + d] * gradient[start + d]
    return total / np.float32(D)


@njit(nogil=True, cache=True)
def update_row(
    kind, weights, row, D, gradient, start, row_state, full_state, rate, eps, decay, beta1, beta2, moment, second
):
    """Apply one summed gradient ``gradient[start:start + D]`` to row `row` and its state.

    `moment` and `second` are Adam's bias corrections 1 - beta1^t and 1 - beta2^t.
    """
    first = row * D
    if kind == SGD:
        for d in range(D):
            weights[first + d] -= rate * (gradient[start + d] + decay * weights[first + d])
    elif kind == ROWWISE_ADAGRAD:
        if decay != 0:
            for d in range(D):
                gradient[start + d] += decay * weights[first + d]
        row_state[row] += mean_square(gradient, start, D)
        factor = rate / (np.sqrt(row_state[row]) + eps)
        for d in range(D):
            weights[first + d] -= factor * gradient[start + d]
    elif kind == ADAGRAD:
        for d in range(D):
            g = gradient[start + d] + decay * weights[first + d]
            full_state[first + d] += g * g
            weights[first + d] -= rate * g / (np.sqrt(full_state[first + d]) + eps)
    else:
        one = np.float32(1.0)
        row_state[row] = beta2 * row_state[row] + (one - beta2) * mean_square(gradient, start, D)
        scale = np.sqrt(row_state[row] / second) + eps
        for d in range(D):
            full_state[first + d] = beta1 * full_state[first + d] + (one - beta1) * gradient[start + d]
            delta = full_state[first + d] / moment / scale + decay * weights[first + d]
            weights[first + d] -= rate * delta


@njit(nogil=True, cache=True)
def place(row, index_of, keys, mask, direct):
    """The slot of `row` in the map: the row itself, or by linear probing from a multiplicative hash."""
    if direct:
        return row
    slot = ((row * U(0x9E3779B97F4A7C15)) >> U(20)) & mask
    while index_of[slot] >= 0 and keys[slot] != row:
        slot = (slot + U(1)) & mask
    return slot


@njit(nogil=True, cache=True)
def collect(
    features, part, parts, values, offsets, singles, batch, key, column, mean, sequence, sequence_start,
    sample_weights, weighted, stride, width, index_of, keys, mask, direct, slot_of, source_of, scale_of, row_of,
    count_of,
):  # fmt: skip
    """List one table's lookups in ascending order of position: slot_of, source_of (gradient), scale_of.

    `row_of[u]` and `count_of[u]` describe the u-th distinct row. A source below zero lies in the sequence gradient, at
    its complement. With several parts only rows r with r % parts == part are listed. Returns (lookups, distinct rows).
    """
    lookups, distinct = U(0), 0
    for f in features:
        shift = key[f] * batch
        origin = shift if singles else offsets[shift]
        for b in range(batch):
            begin, end = (shift + b, shift + b + 1) if singles else (offsets[shift + b], offsets[shift + b + 1])
            factor = share(end - begin, mean[f])
            for i in range(begin, end):
                row = U(values[U(i)])
                if parts > 1 and row % U(parts) != U(part):
                    continue
                slot = place(row, index_of, keys, mask, direct)
                u = index_of[slot]
                if u < 0:
                    u = distinct
                    index_of[slot] = u
                    if not direct:
                        keys[slot] = row
                    row_of[U(u)] = row
                    count_of[U(u)] = 0
                    distinct += 1
                count_of[U(u)] += 1
                slot_of[lookups] = u
                if sequence[f]:
                    source_of[lookups] = ~(sequence_start[f] + (i - origin) * width)
                    scale_of[lookups] = np.float32(1.0)
                else:
                    source_of[lookups] = b * stride + column[f]
                    scale_of[lookups] = factor * sample_weights[i] if weighted else factor
                lookups += U(1)
    return lookups, distinct


@njit(nogil=True, cache=True)
def release(distinct, row_of, index_of, direct, mask):
    """Empty the map for the next table."""
    if direct:
        for u in range(U(distinct)):
            index_of[row_of[u]] = -1
    else:
        index_of[: mask + U(1)] = -1


@njit(nogil=True, cache=True)
def sort_by_row(lookups, distinct, slot_of, source_of, scale_of, order, order_scale, end_of):
    """A stable counting sort: each row's gradients lie together, still in ascending order of position.

    `end_of` comes in as the count of each distinct row and goes out as the end of its share of `order`.
    """
    running = np.int32(0)
    for u in range(U(distinct)):
        count = end_of[u]
        end_of[u] = running
        running += count
    for i in range(lookups):
        u = U(slot_of[i])
        target = U(end_of[u])
        order[target] = source_of[i]
        order_scale[target] = scale_of[i]
        end_of[u] += 1


@njit(nogil=True, cache=True)
def apply_rows(
    lookups, distinct, origin, D, weights, row_state, full_state, gradient, sequence_gradient, order, order_scale,
    row_of, end_of, total, kind, rate, eps, decay, beta1, beta2, moment, second,
):  # fmt: skip
    """Sum each distinct row's gradients in order and update the row."""
    begin = U(0)
    for u in range(U(distinct)):
        ahead = origin + U(row_of[min(u + U(AHEAD // 2), U(distinct - 1))])
        prefetch_row(weights, ahead * D, D)
        if kind == ROWWISE_ADAGRAD or kind == ROWWISE_ADAM:
            prefetch(row_state, ahead)
        if kind == ADAGRAD or kind == ROWWISE_ADAM:
            prefetch_row(full_state, ahead * D, D)
        end = U(end_of[u])
        for i in range(begin, end):
            later = order[min(i + U(AHEAD), lookups - U(1))]
            if later >= 0:
                prefetch_row(gradient, U(later), D)
            source, factor = order[i], order_scale[i]
            if source >= 0:
                s = U(source)
                if i == begin:
                    for d in range(D):
                        total[d] = factor * gradient[s + d]
                else:
                    for d in range(D):
                        total[d] += factor * gradient[s + d]
            else:
                s = U(~source)
                if i == begin:
                    for d in range(D):
                        total[d] = sequence_gradient[s + d]
                else:
                    for d in range(D):
                        total[d] += sequence_gradient[s + d]
        begin = end
        update_row(
            kind, weights, origin + U(row_of[u]), D, total, U(0), row_state, full_state,
            rate, eps, decay, beta1, beta2, moment, second,
        )  # fmt: skip


@njit(parallel=True, nogil=True, cache=True)
def update(
    weights, width, row_state, full_state, values, offsets, singles, sample_weights, weighted, batch,
    key, base, rows, column, mean, sequence, sequence_start, table_start, table_features, table_lookups,
    task_table, task_part, task_parts, thread_start, gradient, sequence_gradient, stride,
    index_of, keys, slot_of, source_of, scale_of, order, order_scale, row_of, count_of, row_sum,
    kind, rate, eps, decay, beta1, beta2, moment, second,
):  # fmt: skip
    """Sum the gradients of every distinct row in ascending order of lookup position and apply the row optimizer.

    Thread t does tasks ``thread_start[t]:thread_start[t + 1]``; a task is a table, or the rows of a table with
    r % parts == part, so no row belongs to two threads and its sum does not depend on their number. Workspaces have one
    row a thread.
    """
    for t in prange(len(thread_start) - 1):
        for task in range(thread_start[t], thread_start[t + 1]):
            table = task_table[task]
            features = table_features[table_start[table] : table_start[table + 1]]
            origin, limit, most = base[features[0]], rows[features[0]], table_lookups[table]
            mask = U(1)
            while mask < U(2 * most):
                mask *= U(2)
            mask -= U(1)
            # A table of a few times its lookups is its own map: cheaper than probing, and still in cache.
            direct = limit <= 8 * most and limit <= index_of.shape[1]
            lookups, distinct = collect(
                features, task_part[task], task_parts[task], values, offsets, singles, batch, key, column, mean,
                sequence, sequence_start, sample_weights, weighted, stride, width, index_of[t], keys[t], mask, direct,
                slot_of[t], source_of[t], scale_of[t], row_of[t], count_of[t],
            )  # fmt: skip
            release(distinct, row_of[t], index_of[t], direct, mask)
            sort_by_row(lookups, distinct, slot_of[t], source_of[t], scale_of[t], order[t], order_scale[t], count_of[t])
            apply_rows(
                lookups, distinct, U(origin), U(width), weights, row_state, full_state, gradient, sequence_gradient,
                order[t], order_scale[t], row_of[t], count_of[t], row_sum[t],
                kind, rate, eps, decay, beta1, beta2, moment, second,
            )  # fmt: skip


@njit(parallel=True, nogil=True, cache=True)
def weight_gradient(weights, width, values, offsets, batch, key, base, column, mean, gradient, stride, out, chunks):
    """out[i] += gradient of bag(i) . row(values[i]) (divided by the bag's length for mean pooling)."""
    for chunk in prange(chunks):
        for f in range(len(key)):
            shift = key[f] * batch
            first, last = balanced_bags(offsets, shift, shift + batch, chunk, chunks)
            for bag in range(first, last):
                factor = share(offsets[bag + 1] - offsets[bag], mean[f])
                target = U((bag - shift) * stride + column[f])
                for i in range(offsets[bag], offsets[bag + 1]):
                    source = U((base[f] + values[i]) * width)
                    total = np.float32(0.0)
                    for d in range(U(width)):
                        total += gradient[target + d] * weights[source + d]
                    out[i] += factor * total


@njit(nogil=True, cache=True)
def mark_rows(values, offsets, singles, batch, key, base, bits):
    """Set the bit of every row that the batch looks up."""
    for f in range(len(key)):
        shift = key[f] * batch
        begin, end = (shift, shift + batch) if singles else (offsets[shift], offsets[shift + batch])
        for i in range(U(begin), U(end)):
            row = U(base[f] + values[i])
            bits[row >> U(3)] |= np.uint8(1) << np.uint8(row & U(7))
