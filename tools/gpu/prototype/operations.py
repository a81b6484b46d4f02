"""Prototype of the kernels of slots in GPU memory. Sums have the order of the CPU's kernels, so results are equal."""

import triton
import triton.language as tl

GOLDEN, STEP = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0x9E3779B9)
SGD, ROWWISE_ADAGRAD, ADAGRAD, ROWWISE_ADAM, ADAM = (tl.constexpr(kind) for kind in range(5))


# ---- pooling


@triton.jit
def pool(
    weights,
    rows,
    offsets,
    share,
    column,
    mean,
    out,
    bags,
    batch,
    stride,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    U: tl.constexpr,
    SINGLE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BY: tl.constexpr,
):
    """out[b * stride + column[f]:][:D] = the rows of bag f * batch + b, added in ascending order; K bags a program."""
    bag = tl.program_id(0) * K + tl.arange(0, K)
    here = bag < bags
    feature = bag // batch
    # By how many floats columns begin: stores are as wide as the compiler knows addresses to allow.
    place = tl.multiple_of((bag % batch).to(tl.int64) * stride + tl.load(column + feature, here, 0), BY)
    d = tl.arange(0, DP)
    inside = d < D
    if SINGLE:
        index = tl.load(rows + bag, here, 0).to(tl.int64)
        found = tl.load(weights + (index * D)[:, None] + d[None, :], here[:, None] & inside[None, :])
    else:
        begin = tl.load(offsets + bag, here, 0)
        count = tl.load(offsets + bag + 1, here, 0) - begin
        found = tl.zeros((K, DP), tl.float32)
        for i in range(0, tl.max(count, axis=0), U):
            for u in tl.static_range(U):
                more = here & (i + u < count)
                index = tl.load(rows + begin + i + u, more, 0).to(tl.int64)
                part = tl.load(weights + (index * D)[:, None] + d[None, :], more[:, None] & inside[None, :], 0.0)
                if WEIGHTED:
                    part = tl.load(share + begin + i + u, more, 0.0)[:, None] * part
                found = found + part
        averaged = (tl.load(mean + feature, here, 0) != 0) & (count > 1)
        factor = tl.div_rn(tl.full((K,), 1.0, tl.float32), tl.where(averaged, count, 1).to(tl.float32))
        found = found * factor[:, None]
    tl.store(out + place[:, None] + d[None, :], found, here[:, None] & inside[None, :])


# ---- the row optimizer


@triton.jit
def starts(sorted_rows, run, first, lookups, BLOCK: tl.constexpr):
    """first[r] = where run r of equal rows begins; `first` is filled with `lookups` before."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < lookups
    row, before = tl.load(sorted_rows + i, here, 0), tl.load(sorted_rows + i - 1, here & (i > 0), -1)
    tl.store(first + tl.load(run + i, here, 0), i, here & (row != before))


@triton.jit
def gradient_at(
    pooled, others, at, scale, i, more, d, inside, SCALED: tl.constexpr, SEQUENCES: tl.constexpr, BY: tl.constexpr
):
    """[K, DP] scaled gradients of the sorted lookups i; -0.0, which changes no sum, elsewhere."""
    source = tl.load(at + i, more, 0)
    mask = more[:, None] & inside[None, :]
    if SEQUENCES:
        own = source < 0
        rest = tl.multiple_of(tl.where(own, ~source, 0), BY)
        source = tl.multiple_of(tl.where(own, 0, source), BY)
        found = tl.where(
            own[:, None],
            tl.load(others + rest[:, None] + d[None, :], mask & own[:, None], 0.0),
            tl.load(pooled + source[:, None] + d[None, :], mask & ~own[:, None], 0.0),
        )
    else:
        source = tl.multiple_of(source, BY)
        found = tl.load(pooled + source[:, None] + d[None, :], mask, 0.0)
    if SCALED:
        found = tl.load(scale + i, more, 0.0)[:, None] * found
    return tl.where(mask, found, -0.0)


@triton.jit
def halves(x, K: tl.constexpr, W: tl.constexpr):
    """[K, W] -> [K]: of two numbers a sum has one order."""
    if W == 1:
        return tl.reshape(x, (K,))
    else:
        return halves(tl.sum(tl.reshape(x, (K, 2, W // 2)), 1), K, W // 2)


@triton.jit
def total(x, K: tl.constexpr, DP: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr):
    """Sum rows of non-negative numbers, [K], in the order of `simd.vector.total`: lanes over blocks, then halves."""
    blocks = tl.reshape(x, (K, DP // LANES, LANES))
    number = tl.arange(0, DP // LANES)[None, :, None]
    # Picking a block adds zeros to it, which is exact in any order.
    found = tl.sum(tl.where(number == 0, blocks, 0.0), 1)
    for block in tl.static_range(1, (D + LANES - 1) // LANES):
        found = found + tl.sum(tl.where(number == block, blocks, 0.0), 1)
    return halves(found, K, LANES)


@triton.jit
def step(
    weight,
    state,
    one,
    two,
    gradient,
    pace,
    rule,
    K: tl.constexpr,
    DP: tl.constexpr,
    D: tl.constexpr,
    LANES: tl.constexpr,
    KIND: tl.constexpr,
):
    """What `update.rules.update_row` does, for K rows."""
    rate, step_size, inv_sqrt_bias2 = pace
    scale, eps, l2, weight_decay, beta1, rest1, beta2, rest2 = rule
    found = scale * gradient
    if l2 != 0:
        found = found + l2 * weight
    factor = tl.full((K,), 1.0, tl.float32) * rate
    if KIND == ROWWISE_ADAGRAD:
        state = state + tl.div_rn(total(found * found, K, DP, D, LANES), tl.full((K,), D, tl.float32))
        factor = tl.div_rn(factor, tl.sqrt_rn(state) + eps)
    if KIND == ROWWISE_ADAM:
        square = tl.div_rn(total(found * found, K, DP, D, LANES), tl.full((K,), D, tl.float32))
        state = beta2 * state + rest2 * square
        factor = tl.div_rn(tl.full((K,), 1.0, tl.float32) * step_size, tl.sqrt_rn(state) * inv_sqrt_bias2 + eps)
        one = beta1 * one + rest1 * found
        found = one
    if KIND == ADAGRAD:
        one = one + found * found
        change = tl.div_rn(rate * found, tl.sqrt_rn(one) + eps)
    elif KIND == ADAM:
        one = beta1 * one + rest1 * found
        two = beta2 * two + rest2 * (found * found)
        change = tl.div_rn(step_size * one, tl.sqrt_rn(two) * inv_sqrt_bias2 + eps)
    else:
        change = factor[:, None] * found
    if weight_decay != 0:
        weight = (1.0 - rate * weight_decay) * weight
    return weight - change, state, one, two


@triton.jit
def fetch(slots, row, d, mask, here, D: tl.constexpr, KIND: tl.constexpr):
    """Weights and state of K rows."""
    weights, row_state, full_state, clock = slots
    weight = tl.load(weights + (row * D)[:, None] + d[None, :], mask, 0.0)
    state, one, two = tl.zeros_like(row).to(tl.float32), weight, weight
    if KIND == ROWWISE_ADAGRAD or KIND == ROWWISE_ADAM:
        state = tl.load(row_state + row, here, 0.0)
    if KIND == ADAGRAD or KIND == ROWWISE_ADAM:
        one = tl.load(full_state + (row * D)[:, None] + d[None, :], mask, 0.0)
    if KIND == ADAM:
        one = tl.load(full_state + (row * 2 * D)[:, None] + d[None, :], mask, 0.0)
        two = tl.load(full_state + (row * 2 * D + D)[:, None] + d[None, :], mask, 0.0)
    return weight, state, one, two


@triton.jit
def keep(slots, row, d, mask, here, weight, state, one, two, D: tl.constexpr, KIND: tl.constexpr):
    """`fetch` the other way round."""
    weights, row_state, full_state, clock = slots
    tl.store(weights + (row * D)[:, None] + d[None, :], weight, mask)
    if KIND == ROWWISE_ADAGRAD or KIND == ROWWISE_ADAM:
        tl.store(row_state + row, state, here)
    if KIND == ADAGRAD or KIND == ROWWISE_ADAM:
        tl.store(full_state + (row * D)[:, None] + d[None, :], one, mask)
    if KIND == ADAM:
        tl.store(full_state + (row * 2 * D)[:, None] + d[None, :], one, mask)
        tl.store(full_state + (row * 2 * D + D)[:, None] + d[None, :], two, mask)


@triton.jit
def part_sums(
    sorted_rows,
    run,
    first,
    at,
    scale,
    pooled,
    others,
    parts,
    lookups,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    SCALED: tl.constexpr,
    SEQUENCES: tl.constexpr,
    BY: tl.constexpr,
):
    """Of runs of more than L lookups, the sum within the p-th L lookups: parts[0, p] where the run goes on from before,
    parts[1, p] where it begins there."""
    p = tl.program_id(0)
    begin, end = p * L, tl.minimum(p * L + L, lookups)
    d = tl.arange(0, DP)
    inside = d < D
    head, tail = tl.load(run + begin), tl.load(run + end - 1)
    for side in tl.static_range(2):
        which = tail if side else head
        since, until = tl.load(first + which), tl.load(first + which + 1)
        wanted = (until - since > L) & ((since >= begin) if side else (since < begin))
        if wanted:
            low, high = tl.maximum(since, begin), tl.minimum(until, end)
            found = tl.full((K, DP), -0.0, tl.float32)
            for i in range(low, high, K):
                j = i + tl.arange(0, K)
                found = found + gradient_at(pooled, others, at, scale, j, j < high, d, inside, SCALED, SEQUENCES, BY)
            one = halves(tl.trans(found), DP, K)
            tl.store(parts + (side * tl.num_programs(0) + p).to(tl.int64) * D + d, one, inside)


@triton.jit
def train(
    slots,
    sorted_rows,
    first,
    last_run,
    at,
    scale,
    pooled,
    others,
    parts,
    part_count,
    pace,
    rule,
    squares,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    U: tl.constexpr,
    L: tl.constexpr,
    LANES: tl.constexpr,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
    SEQUENCES: tl.constexpr,
    CLOCKED: tl.constexpr,
    NORM: tl.constexpr,
    BY: tl.constexpr,
):
    """Sum the gradients of K rows in ascending order of lookup, and let each row take its step."""
    u = tl.program_id(0) * K + tl.arange(0, K)
    here = u <= tl.load(last_run)
    if tl.program_id(0) * K <= tl.load(last_run):
        since = tl.load(first + u, here, 0)
        until = tl.load(first + u + 1, here, 0)
        row = tl.load(sorted_rows + since, here, 0).to(tl.int64)
        count = until - since
        long = count > L
        d = tl.arange(0, DP)
        inside = d < D
        mask = here[:, None] & inside[None, :]
        found = tl.full((K, DP), -0.0, tl.float32)
        for i in range(0, tl.max(tl.where(long, 0, count), axis=0), U):
            for v in tl.static_range(U):
                more = here & ~long & (i + v < count)
                found = found + gradient_at(
                    pooled, others, at, scale, since + i + v, more, d, inside, SCALED, SEQUENCES, BY
                )
        pieces = tl.where(long, (until - 1) // L - since // L + 1, 0)
        for i in range(0, tl.max(pieces, axis=0), U):
            for v in tl.static_range(U):
                more = here & (i + v < pieces)
                side = tl.where(i + v == 0, part_count, 0)
                place = (side + since // L + i + v).to(tl.int64) * D
                part = tl.load(parts + place[:, None] + d[None, :], more[:, None] & inside[None, :], -0.0)
                found = found + part
        if NORM:
            whole = tl.where(mask, found, 0.0)
            tl.store(squares + u, total(whole * whole, K, DP, D, LANES), here)
        else:
            weight, state, one, two = fetch(slots, row, d, mask, here, D, KIND)
            found = tl.where(mask, found, 0.0)
            weight, state, one, two = step(weight, state, one, two, found, pace, rule, K, DP, D, LANES, KIND)
            keep(slots, row, d, mask, here, weight, state, one, two, D, KIND)
            if CLOCKED:
                clock = tl.load(slots[3] + row, here, 0)
                tl.store(slots[3] + row, clock + 1, here)


@triton.jit
def apply_missed_steps(
    slots,
    rows,
    count,
    steps,
    paces,
    rule,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    LANES: tl.constexpr,
    KIND: tl.constexpr,
):
    """Let distinct rows take the steps that they missed, one by one."""
    u = tl.program_id(0) * K + tl.arange(0, K)
    here = u < count
    row = tl.load(rows + u, here, 0).to(tl.int64)
    d = tl.arange(0, DP)
    mask = here[:, None] & (d < D)[None, :]
    clock = tl.maximum(tl.load(slots[3] + row, here, 0), 0)
    weight, state, one, two = fetch(slots, row, d, mask, here, D, KIND)
    still = tl.full((K, DP), -0.0, tl.float32)
    for missed in range(tl.min(tl.where(here, clock, steps), axis=0), steps):
        pace = tl.load(paces + 3 * missed), tl.load(paces + 3 * missed + 1), tl.load(paces + 3 * missed + 2)
        new = step(weight, state, one, two, still, pace, rule, K, DP, D, LANES, KIND)
        due = clock <= missed
        weight, one = tl.where(due[:, None], new[0], weight), tl.where(due[:, None], new[2], one)
        state, two = tl.where(due, new[1], state), tl.where(due[:, None], new[3], two)
    keep(slots, row, d, mask, here, weight, state, one, two, D, KIND)
    tl.store(slots[3] + row, tl.zeros_like(clock) + steps, here)


# ---- noise


@triton.jit
def mix(word):
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def initialize(
    slots,
    places,
    keys,
    bounds,
    count,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    ROW_STATE: tl.constexpr,
    FULL: tl.constexpr,
    CLOCKED: tl.constexpr,
):
    """Uniform weights in +-bound and nothing else, a function of key and column."""
    i = tl.program_id(0) * K + tl.arange(0, K)
    here = i < count
    slot, key = tl.load(places + i, here, 0), tl.load(keys + i, here, 0).to(tl.uint64, bitcast=True)
    bound = tl.load(bounds + i, here, 0.0)[:, None]
    d = tl.arange(0, DP)
    mask = here[:, None] & (d < D)[None, :]
    noise = mix(key[:, None] + d[None, :].to(tl.uint64) * GOLDEN) >> 40
    unit = noise.to(tl.float32) * (1.0 / (1 << 24))
    tl.store(slots[0] + (slot * D)[:, None] + d[None, :], -bound + (bound + bound) * unit, mask)
    if ROW_STATE:
        tl.store(slots[1] + slot, tl.zeros_like(slot).to(tl.float32), here)
    for full in tl.static_range(FULL):
        tl.store(slots[2] + ((slot * FULL + full) * D)[:, None] + d[None, :], tl.zeros((K, DP), tl.float32), mask)
    if CLOCKED:
        tl.store(slots[3] + slot, tl.zeros_like(slot).to(tl.int32), here)


# ---- codecs


@triton.jit
def words(base, column):
    """32 random bits of each column, `codec.kinds.base.words`."""
    word = (base.to(tl.uint32) + column.to(tl.uint32) * STEP) ^ (base >> 32).to(tl.uint32)
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def unit(base, column):
    return (words(base, column) >> 8).to(tl.int32).to(tl.float32) * (1.0 / (1 << 24))


@triton.jit
def put(records, at, word, mask, BYTES: tl.constexpr, WHOLE: tl.constexpr):
    """The lower bytes of a word: at once where parts of records begin at multiples of 4, else byte by byte."""
    if WHOLE and BYTES == 4:
        tl.store((records + at).to(tl.pointer_type(tl.uint32)), word, mask)
    elif WHOLE and BYTES == 2:
        tl.store((records + at).to(tl.pointer_type(tl.uint16)), word.to(tl.uint16), mask)
    else:
        for byte in tl.static_range(BYTES):
            tl.store(records + at + byte, (word >> (8 * byte)).to(tl.uint8), mask)


@triton.jit
def get(records, at, mask, BYTES: tl.constexpr, WHOLE: tl.constexpr):
    """`put` the other way round: over the bus each access counts."""
    if WHOLE and BYTES == 4:
        return tl.load((records + at).to(tl.pointer_type(tl.uint32)), mask, 0)
    elif WHOLE and BYTES == 2:
        return tl.load((records + at).to(tl.pointer_type(tl.uint16)), mask, 0).to(tl.uint32)
    else:
        word = tl.load(records + at, mask, 0).to(tl.uint32)
        for byte in tl.static_range(1, BYTES):
            word = word | (tl.load(records + at + byte, mask, 0).to(tl.uint32) << (8 * byte))
        return word


@triton.jit
def bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def to_half(x):
    return x.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def from_half(word):
    return word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def ordered(x, mask, OTHER: tl.constexpr):
    """Bits as integers in the order of floats."""
    word = x.to(tl.int32, bitcast=True)
    return tl.where(mask, word ^ ((word >> 31) & 0x7FFFFFFF), OTHER)


@triton.jit
def unordered(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def parameters(low, high, LEVELS: tl.constexpr, WIDE: tl.constexpr):
    """Scale, offset and whether they can be stored: `codec.kinds.integers.parameters`."""
    low, high = low + 0.0, high + 0.0
    levels = tl.zeros_like(low) + LEVELS
    if WIDE:
        spread = high - low
        scale = tl.where(spread > 0.0, tl.maximum(tl.div_rn(spread, levels), 1.1754943508222875e-38), 0.0)
        return scale, low, scale <= 3.4028234663852886e38
    else:
        held = tl.abs(low) <= 65504.0
        offset = to_half(low)
        down = tl.where(offset == 0, 0x8001, tl.where(offset < 0x8000, offset - 1, offset + 1))
        offset = tl.where(from_half(offset) > low, down, offset)
        wanted = tl.div_rn(high - from_half(offset), levels)
        scale = to_half(wanted)
        scale = tl.where(from_half(scale) < wanted, scale + 1, scale)
        held = held & (scale < 0x7C00)
        return tl.where(held, from_half(scale), 0.0), tl.where(held, from_half(offset), low), held


@triton.jit
def code(value, offset, inverse, threshold, LEVELS: tl.constexpr):
    steps = (value - offset) * inverse
    whole = steps.to(tl.int32)
    up = tl.where(steps - whole.to(tl.float32) > threshold, 1, 0)
    return tl.minimum(whole + up, LEVELS).to(tl.uint32)


@triton.jit
def put_floats(
    records, at, value, base, column, mask, KIND: tl.constexpr, STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr
):
    """fp32, fp16 or bf16 numbers; whether each can be held."""
    word = bits(value)
    most = word & 0x7FFFFFFF
    if KIND == 0:
        put(records, at, word, mask, 4, WHOLE)
        return most <= 0x7F7FFFFF
    elif KIND == 1:
        if STOCHASTIC:
            exponent = tl.maximum(word & 0x7F800000, 113 << 23)
            apart = (exponent - (10 << 23)).to(tl.float32, bitcast=True)
            steps = most.to(tl.float32, bitcast=True) * ((264 << 23) - exponent).to(tl.float32, bitcast=True)
            whole = steps.to(tl.int32).to(tl.float32)
            up = tl.where(steps - whole > unit(base, column), 1.0, 0.0)
            half = to_half((whole + up) * apart) | ((word >> 16) & 0x8000)
        else:
            half = to_half(value)
        put(records, at, half, mask, 2, WHOLE)
        return most <= 0x477FE000
    else:
        more = (words(base, column) >> 16) if STOCHASTIC else 0x7FFF + ((word >> 16) & 1)
        put(records, at, (word + more) >> 16, mask, 2, WHOLE)
        return most <= 0x7F7F0000


@triton.jit
def get_floats(records, at, mask, KIND: tl.constexpr, WHOLE: tl.constexpr):
    if KIND == 0:
        return get(records, at, mask, 4, WHOLE).to(tl.float32, bitcast=True)
    elif KIND == 1:
        return from_half(get(records, at, mask, 2, WHOLE))
    else:
        return (get(records, at, mask, 2, WHOLE) << 16).to(tl.float32, bitcast=True)


@triton.jit
def encode(
    slots,
    places,
    keys,
    write_key,
    records,
    which,
    held,
    count,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WIDE: tl.constexpr,
    STATE: tl.constexpr,
    ROW_STATE: tl.constexpr,
    FULL: tl.constexpr,
    CLOCKED: tl.constexpr,
    PARAMETERS_AT: tl.constexpr,
    ROW_STATE_AT: tl.constexpr,
    FULL_STATE_AT: tl.constexpr,
    CLOCK_AT: tl.constexpr,
    BYTES: tl.constexpr,
):
    """records[which[i]], or records[i] where that is None, = slot places[i]; held[i] is whether the codec can hold it.

    Records may lie in pinned memory of the host. KIND: fp32, fp16, bf16, int8, int4.
    """
    i = tl.program_id(0) * K + tl.arange(0, K)
    here = i < count
    slot = tl.load(places + i, here, 0)
    base = mix(tl.load(keys + i, here, 0).to(tl.uint64, bitcast=True) ^ tl.load(write_key).to(tl.uint64, bitcast=True))[
        :, None
    ]
    at = ((i if which is None else tl.load(which + i, here, 0)).to(tl.int64) * BYTES)[:, None]
    d = tl.arange(0, DP)[None, :]
    mask = here[:, None] & (d < D)
    WHOLE: tl.constexpr = (PARAMETERS_AT | ROW_STATE_AT | FULL_STATE_AT | CLOCK_AT | BYTES) % 4 == 0
    at = tl.multiple_of(at, [4, 4]) if WHOLE else at
    weight = tl.load(slots[0] + (slot * D)[:, None] + d, mask, 0.0)
    if KIND < 3:
        size = 4 if KIND == 0 else 2
        fits = put_floats(records, at + size * d, weight, base, d, mask, KIND, STOCHASTIC, WHOLE)
        good = tl.min(tl.where(mask, fits, True).to(tl.int32), 1) > 0
    else:
        LEVELS: tl.constexpr = 255 if KIND == 3 else 15
        least, most = tl.min(ordered(weight, mask, 0x7FFFFFFF), 1), tl.max(ordered(weight, mask, -0x80000000), 1)
        scale, offset, good = parameters(unordered(least), unordered(most), LEVELS, WIDE)
        good = good & (least >= -0x7F800000) & (most <= 0x7F7FFFFF)
        if WIDE:
            put(records, at + PARAMETERS_AT, bits(scale)[:, None], here[:, None], 4, WHOLE)
            put(records, at + PARAMETERS_AT + 4, bits(offset)[:, None], here[:, None], 4, WHOLE)
        else:
            put(records, at + PARAMETERS_AT, to_half(scale)[:, None], here[:, None], 2, WHOLE)
            put(records, at + PARAMETERS_AT + 2, to_half(offset)[:, None], here[:, None], 2, WHOLE)
        inverse = tl.where(scale > 0.0, tl.div_rn(tl.zeros_like(scale) + 1.0, tl.where(scale > 0.0, scale, 1.0)), 0.0)
        offset, inverse = offset[:, None], inverse[:, None]
        threshold = unit(base, d) if STOCHASTIC else 0.49999997
        if KIND == 3:
            put(records, at + d, code(weight, offset, inverse, threshold, LEVELS), mask, 1, WHOLE)
        else:
            HALF: tl.constexpr = (D + 1) // 2
            low = code(weight, offset, inverse, threshold, LEVELS)
            above = here[:, None] & (d < D - HALF)
            other = tl.load(slots[0] + (slot * D)[:, None] + HALF + d, above, 0.0)
            threshold = unit(base, HALF + d) if STOCHASTIC else 0.49999997
            high = tl.where(above, code(other, offset, inverse, threshold, LEVELS), 0)
            put(records, at + d, low | (high << 4), here[:, None] & (d < HALF), 1, WHOLE)
    SIZE: tl.constexpr = 4 if STATE == 0 else 2
    if ROW_STATE:
        state = tl.load(slots[1] + slot, here, 0.0)[:, None]
        column = tl.zeros((K, 1), tl.int32) + (D + (FULL * D if FULL > 1 else D))
        fits = put_floats(records, at + ROW_STATE_AT, state, base, column, here[:, None], STATE, True, WHOLE)
        good = good & (tl.min(fits.to(tl.int32), 1) > 0)
    for full in tl.static_range(FULL):
        value = tl.load(slots[2] + ((slot * FULL + full) * D)[:, None] + d, mask, 0.0)
        place = at + FULL_STATE_AT + SIZE * (full * D + d)
        fits = put_floats(records, place, value, base, D + full * D + d, mask, STATE, True, WHOLE)
        good = good & (tl.min(tl.where(mask, fits, True).to(tl.int32), 1) > 0)
    if CLOCKED:
        put(
            records,
            at + CLOCK_AT,
            tl.load(slots[3] + slot, here, 0).to(tl.uint32, bitcast=True)[:, None],
            here[:, None],
            4,
            WHOLE,
        )
    tl.store(held + i, good.to(tl.uint8), here)


@triton.jit
def decode(
    slots,
    places,
    records,
    which,
    count,
    D: tl.constexpr,
    DP: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
    STATE: tl.constexpr,
    ROW_STATE: tl.constexpr,
    FULL: tl.constexpr,
    CLOCKED: tl.constexpr,
    PARAMETERS_AT: tl.constexpr,
    ROW_STATE_AT: tl.constexpr,
    FULL_STATE_AT: tl.constexpr,
    CLOCK_AT: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Slot places[i] = records[which[i]], or records[i] where that is None."""
    i = tl.program_id(0) * K + tl.arange(0, K)
    here = i < count
    slot = tl.load(places + i, here, 0)
    at = ((i if which is None else tl.load(which + i, here, 0)).to(tl.int64) * BYTES)[:, None]
    d = tl.arange(0, DP)[None, :]
    mask = here[:, None] & (d < D)
    WHOLE: tl.constexpr = (PARAMETERS_AT | ROW_STATE_AT | FULL_STATE_AT | CLOCK_AT | BYTES) % 4 == 0
    at = tl.multiple_of(at, [4, 4]) if WHOLE else at
    if KIND < 3:
        size = 4 if KIND == 0 else 2
        weight = get_floats(records, at + size * d, mask, KIND, WHOLE)
    else:
        SIZE_OF: tl.constexpr = 0 if WIDE else 1
        scale = get_floats(records, at + PARAMETERS_AT, here[:, None], SIZE_OF, WHOLE)
        offset = get_floats(records, at + PARAMETERS_AT + (4 if WIDE else 2), here[:, None], SIZE_OF, WHOLE)
        if KIND == 3:
            codes = get(records, at + d, mask, 1, WHOLE)
        else:
            HALF: tl.constexpr = (D + 1) // 2
            codes = get(records, at + tl.where(d < HALF, d, d - HALF), mask, 1, WHOLE)
            codes = tl.where(d < HALF, codes & 15, codes >> 4)
        weight = offset + codes.to(tl.int32).to(tl.float32) * scale
    tl.store(slots[0] + (slot * D)[:, None] + d, weight, mask)
    SIZE: tl.constexpr = 4 if STATE == 0 else 2
    if ROW_STATE:
        state = get_floats(records, at + ROW_STATE_AT, here[:, None], STATE, WHOLE)
        tl.store(slots[1] + slot[:, None], state, here[:, None])
    for full in tl.static_range(FULL):
        value = get_floats(records, at + FULL_STATE_AT + SIZE * (full * D + d), mask, STATE, WHOLE)
        tl.store(slots[2] + ((slot * FULL + full) * D)[:, None] + d, value, mask)
    if CLOCKED:
        clock = get(records, at + CLOCK_AT, here[:, None], 4, WHOLE).to(tl.int32, bitcast=True)
        tl.store(slots[3] + slot[:, None], clock, here[:, None])
