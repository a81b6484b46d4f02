"""Triton kernels of the row optimizers. Results have the bits of the CPU kernels, except for long
segments.

A *segment* consists of the lookups of one row, which are adjacent after a stable sort by row.
Gradients of a segment are summed in ascending order of lookup. In a long segment (more than L
lookups), blocks of L sorted lookups are summed first. This gives the same bits every time, but
other bits than on the CPU. No kernel reads what it stored in the same launch, and only one program
writes to an address, so atomics are not needed. Sums start from -0.0, which changes no number.

Constants: D columns of a row, DP the next power of two, K rows of a program, U lookups unrolled, BY
a common divisor of the positions of all gradients.
"""

import triton
import triton.language as tl

from stratarec.kernels.simd.gpu import halve, total
from stratarec.kernels.update import rules

SGD = tl.constexpr(rules.SGD)
ROWWISE_ADAGRAD = tl.constexpr(rules.ROWWISE_ADAGRAD)
ADAGRAD = tl.constexpr(rules.ADAGRAD)
ROWWISE_ADAM = tl.constexpr(rules.ROWWISE_ADAM)
ADAM = tl.constexpr(rules.ADAM)


@triton.jit(do_not_specialize=["lookups"])
def mark_segments(rows, begins, lookups, BLOCK: tl.constexpr):
    """Set begins[i] to 1 where a segment begins among the sorted rows, otherwise to 0."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i < lookups
    before = tl.load(rows + i - 1, valid & (i > 0), -1)
    tl.store(begins + i, (tl.load(rows + i, valid, 0) != before).to(tl.int32), valid)


@triton.jit
def list_segments(
    begins,
    segment,
    order,
    rows,
    bag_of,
    offsets,
    share,
    column,
    mean,
    first,
    segments,
    segment_row,
    segment_at,
    segment_scale,
    at,
    scale,
    sizes,
    batch,
    stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the source and scale of each sorted lookup's gradient, and of each segment its first
    lookup, row and source.

    segment[i] is the number of the segment of sorted lookup i, counted from 1. A source is a
    position in the pooled gradients, or the bitwise complement of a position in the gradients of
    sequences. `sizes` are the numbers of all lookups and of pooled lookups. Lists may be longer:
    rows behind the lookups are larger than all rows, so they are sorted last, and they belong to no
    segment.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lookups, pooled_lookups = tl.load(sizes), tl.load(sizes + 1)
    valid = i < lookups
    tl.store(segments + tl.zeros_like(i), 0, (i == 0) & (lookups == 0))
    number = tl.load(segment + i, valid, 0)
    begin = valid & (tl.load(begins + i, valid, 0) != 0)
    tl.store(first + number - 1, i, begin)
    tl.store(first + number, i + 1, i == lookups - 1)
    tl.store(segments + tl.zeros_like(i), number, i == lookups - 1)
    tl.store(segment_row + number - 1, tl.load(rows + i, valid, 0), begin)
    lookup = tl.load(order + i, valid, 0).to(tl.int32)
    pooled = valid & (lookup < pooled_lookups)
    bag = tl.load(bag_of + lookup, pooled, 0) if bag_of is not None else lookup
    feature = tl.where(pooled, bag // batch, 0)
    source = (bag % batch).to(tl.int64) * stride + tl.load(column + feature, pooled, 0)
    source = tl.where(pooled, source, ~((lookup - pooled_lookups).to(tl.int64) * D))
    tl.store(at + i, source, valid)
    tl.store(segment_at + number - 1, source, begin)
    if scale is not None:
        count = tl.load(offsets + bag + 1, pooled, 1) - tl.load(offsets + bag, pooled, 0)
        averaged = (tl.load(mean + feature, pooled, 0) != 0) & (count > 1)
        factor = tl.div_rn(
            1.0 + tl.zeros((BLOCK,), tl.float32), tl.where(averaged, count, 1).to(tl.float32)
        )
        if share is not None:
            factor = factor * tl.load(share + lookup, pooled, 1.0)
        tl.store(scale + i, factor, valid)
        tl.store(segment_scale + number - 1, factor, begin)


@triton.jit
def gradient_at(pooled, sequences, at, scale, i, valid, d, inside, BY: tl.constexpr):
    """Return the scaled gradients ``[K, DP]`` of the sorted lookups i; -0.0 where not `valid`."""
    source = tl.load(at + i, valid, 0)
    mask = valid[:, None] & inside[None, :]
    if sequences is not None:
        other = (source < 0)[:, None]
        # Equal to `source` or its complement. Triton 3.6 does not compile a select in place of this
        # for narrow rows.
        place = tl.multiple_of(source ^ (source >> 63), BY)[:, None] + d[None, :]
        gradient = tl.where(
            other,
            tl.load(sequences + place, mask & other, 0.0),
            tl.load(pooled + place, mask & ~other, 0.0),
        )
    else:
        source = tl.multiple_of(source, BY)
        gradient = tl.load(pooled + source[:, None] + d[None, :], mask, 0.0)
    if scale is not None:
        gradient = tl.load(scale + i, valid, 0.0)[:, None] * gradient
    return tl.where(mask, gradient, -0.0)


@triton.jit
def change_rows(
    weight,
    row_state,
    one,
    two,
    gradient,
    numbers,
    rule,
    K: tl.constexpr,
    DP: tl.constexpr,
    D: tl.constexpr,
    LANES: tl.constexpr,
    KIND: tl.constexpr,
):
    """Return weights and state of K rows after a step, as `rules.update_row` computes them."""
    rate, step_size, inv_sqrt_bias2 = numbers
    scale, eps, l2, weight_decay, beta1, rest1, beta2, rest2 = rule
    direction = scale * gradient
    if l2 != 0:
        direction = direction + l2 * weight
    factor = tl.zeros((K,), tl.float32) + rate
    if KIND == ROWWISE_ADAGRAD or KIND == ROWWISE_ADAM:
        square = tl.div_rn(total(direction * direction, K, DP, D, LANES), tl.full((K,), D, tl.float32))
    if KIND == ROWWISE_ADAGRAD:
        row_state = row_state + square
        factor = tl.div_rn(factor, tl.sqrt_rn(row_state) + eps)
    if KIND == ROWWISE_ADAM:
        row_state = beta2 * row_state + rest2 * square
        factor = tl.div_rn(
            tl.zeros((K,), tl.float32) + step_size, tl.sqrt_rn(row_state) * inv_sqrt_bias2 + eps
        )
        one = beta1 * one + rest1 * direction
        direction = one
    if KIND == ADAGRAD:
        one = one + direction * direction
        change = tl.div_rn(rate * direction, tl.sqrt_rn(one) + eps)
    elif KIND == ADAM:
        one = beta1 * one + rest1 * direction
        two = beta2 * two + rest2 * (direction * direction)
        change = tl.div_rn(step_size * one, tl.sqrt_rn(two) * inv_sqrt_bias2 + eps)
    else:
        change = factor[:, None] * direction
    if weight_decay != 0:
        weight = (1.0 - rate * weight_decay) * weight
    return weight - change, row_state, one, two


@triton.jit
def load_rows(slots, row, d, mask, valid, D: tl.constexpr, KIND: tl.constexpr):
    """Return weights and state of K rows."""
    weight = tl.load(slots[0] + (row * D)[:, None] + d[None, :], mask, 0.0)
    row_state, one, two = tl.zeros_like(row).to(tl.float32), weight, weight
    if KIND == ROWWISE_ADAGRAD or KIND == ROWWISE_ADAM:
        row_state = tl.load(slots[1] + row, valid, 0.0)
    if KIND == ADAGRAD or KIND == ROWWISE_ADAM:
        one = tl.load(slots[2] + (row * D)[:, None] + d[None, :], mask, 0.0)
    if KIND == ADAM:
        one = tl.load(slots[2] + (row * 2 * D)[:, None] + d[None, :], mask, 0.0)
        two = tl.load(slots[2] + (row * 2 * D + D)[:, None] + d[None, :], mask, 0.0)
    return weight, row_state, one, two


@triton.jit
def store_rows(
    slots, row, d, mask, valid, weight, row_state, one, two, D: tl.constexpr, KIND: tl.constexpr
):
    """Store weights and state of K rows."""
    tl.store(slots[0] + (row * D)[:, None] + d[None, :], weight, mask)
    if KIND == ROWWISE_ADAGRAD or KIND == ROWWISE_ADAM:
        tl.store(slots[1] + row, row_state, valid)
    if KIND == ADAGRAD or KIND == ROWWISE_ADAM:
        tl.store(slots[2] + (row * D)[:, None] + d[None, :], one, mask)
    if KIND == ADAM:
        tl.store(slots[2] + (row * 2 * D)[:, None] + d[None, :], one, mask)
        tl.store(slots[2] + (row * 2 * D + D)[:, None] + d[None, :], two, mask)


@triton.jit
def sum_parts(
    segment,
    first,
    at,
    scale,
    pooled,
    sequences,
    parts,
    sizes,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    BY: tl.constexpr,
):
    """Sum the gradients of long segments within block p, which is L sorted lookups.

    parts[0, p] is set to the sum for a long segment that begins before the block, parts[1, p] for a
    long segment that begins in the block. If there is no such segment, the part does not change.
    """
    p = tl.program_id(0)
    lookups = tl.load(sizes)
    begin, end = p * L, tl.minimum(p * L + L, lookups)
    if begin < end:
        d = tl.arange(0, DP)
        inside = d < D
        head, tail = tl.load(segment + begin), tl.load(segment + end - 1)
        for side in tl.static_range(2):
            number = tail if side else head
            start, stop = tl.load(first + number - 1), tl.load(first + number)
            is_long = (stop - start > L) & ((start >= begin) if side else (start < begin))
            if is_long:
                low, high = tl.maximum(start, begin), tl.minimum(stop, end)
                sums = tl.full((K, DP), -0.0, tl.float32)
                for i in range(low, high, K):
                    j = i + tl.arange(0, K)
                    sums = sums + gradient_at(pooled, sequences, at, scale, j, j < high, d, inside, BY)
                row_sum = halve(tl.trans(sums), DP, K)
                tl.store(parts + (side * tl.num_programs(0) + p).to(tl.int64) * D + d, row_sum, inside)


@triton.jit(do_not_specialize=["part_count"])
def update(
    slots,
    order,
    first,
    segments,
    segment_row,
    segment_at,
    segment_scale,
    at,
    scale,
    pooled,
    sequences,
    parts,
    part_count,
    numbers,
    rule,
    ok,
    squares,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    U: tl.constexpr,
    L: tl.constexpr,
    LANES: tl.constexpr,
    KIND: tl.constexpr,
    CLOCKED: tl.constexpr,
    BY: tl.constexpr,
):
    """Sum the gradients of K rows, and apply a step to each row, unless `ok` is 0.

    `numbers` are learning rate, step size and inverse square root of the second bias correction, in
    memory, so that a CUDA graph need not be captured again. With `squares`, rows do not change.
    Instead the sum of squares of each summed gradient is stored in `squares`, at the first lookup
    of the row.
    """
    u = tl.program_id(0) * K + tl.arange(0, K)
    count, go = tl.load(segments), tl.load(ok)
    valid = (u < count) & (go != 0)
    if (tl.program_id(0) * K < count) & (go != 0):
        start, stop = tl.load(first + u, valid, 0), tl.load(first + u + 1, valid, 0)
        row = tl.load(segment_row + u, valid, 0).to(tl.int64)
        d = tl.arange(0, DP)
        inside = d < D
        mask = valid[:, None] & inside[None, :]
        # Three loads depend on each other: the number of segments and their lists; rows, state and
        # first gradients; other gradients. So rows are loaded before the first addition waits for a
        # gradient.
        if squares is None:
            weight, row_state, one, two = load_rows(slots, row, d, mask, valid, D, KIND)
        long = stop - start > L
        length = tl.where(long, 0, stop - start)
        # It starts from -0.0 where a segment is long.
        gradient = gradient_at(pooled, sequences, segment_at, segment_scale, u, length > 0, d, inside, BY)
        for i in range(1, tl.max(length, axis=0), U):
            for v in tl.static_range(U):
                more = i + v < length
                gradient = gradient + gradient_at(
                    pooled, sequences, at, scale, start + i + v, more, d, inside, BY
                )
        length = tl.where(long, (stop - 1) // L - start // L + 1, 0)
        for i in range(0, tl.max(length, axis=0), U):
            for v in tl.static_range(U):
                more = i + v < length
                side = tl.where(i + v == 0, part_count, 0)
                place = (side + start // L + i + v).to(tl.int64) * D
                gradient = gradient + tl.load(
                    parts + place[:, None] + d[None, :], more[:, None] & inside[None, :], -0.0
                )
        gradient = tl.where(mask, gradient, 0.0)
        if squares is not None:
            place = tl.load(order + start, valid, 0)
            tl.store(squares + place, total(gradient * gradient, K, DP, D, LANES), valid)
        else:
            of_step = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
            weight, row_state, one, two = change_rows(
                weight, row_state, one, two, gradient, of_step, rule, K, DP, D, LANES, KIND
            )
            store_rows(slots, row, d, mask, valid, weight, row_state, one, two, D, KIND)
            if CLOCKED:
                tl.store(slots[3] + row, tl.load(slots[3] + row, valid, 0) + 1, valid)


@triton.jit(do_not_specialize=["steps"])
def apply_missed_steps(
    slots,
    rows,
    segments,
    steps,
    numbers,
    rule,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    KIND: tl.constexpr,
):
    """Apply the steps that the first `segments` of the distinct `rows` missed, one by one."""
    u = tl.program_id(0) * K + tl.arange(0, K)
    count = tl.load(segments)
    valid = u < count
    if tl.program_id(0) * K < count:
        row = tl.load(rows + u, valid, 0).to(tl.int64)
        d = tl.arange(0, DP)
        mask = valid[:, None] & (d < D)[None, :]
        # A clock comes from a record, which is untrusted: a negative clock would read before the
        # first number.
        clock = tl.maximum(tl.load(slots[3] + row, valid, 0), 0)
        weight, row_state, one, two = load_rows(slots, row, d, mask, valid, D, KIND)
        still = tl.full((K, DP), -0.0, tl.float32)
        for step in range(tl.min(tl.where(valid, clock, steps), axis=0), steps):
            of_step = (
                tl.load(numbers + 3 * step),
                tl.load(numbers + 3 * step + 1),
                tl.load(numbers + 3 * step + 2),
            )
            new = change_rows(weight, row_state, one, two, still, of_step, rule, K, DP, D, LANES, KIND)
            due = clock <= step
            weight, one = tl.where(due[:, None], new[0], weight), tl.where(due[:, None], new[2], one)
            row_state, two = tl.where(due, new[1], row_state), tl.where(due[:, None], new[3], two)
        store_rows(slots, row, d, mask, valid, weight, row_state, one, two, D, KIND)
        tl.store(slots[3] + row, tl.zeros_like(clock) + steps, valid)
