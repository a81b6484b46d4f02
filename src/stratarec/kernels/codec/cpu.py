"""Numba bodies of the row codecs: one function a kind, so that its inner loop holds no choice of kind.

A row function reads or writes D floats from `start` of a flat array, and the record whose first byte is `at`. Encoders
return whether the codec can hold every number. 32-bit words are cast back after every operation: Numba widens them
to 64 bits, and LLVM narrows them again where it sees the cast. The mixing of the noise it does not narrow, so its
products and shifts are intrinsics of 32 bits; otherwise it would run on half as many lanes.

`form` is what `Layout.form` gives.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stratarec.kernels.bits import (
    add32,
    bits_float,
    float_bits,
    fold32,
    from_half,
    load_f32,
    load_u16,
    multiply32,
    select32,
    store_f32,
    store_u16,
    to_half,
)  # fmt: skip
from stratarec.kernels.codec.layout import (
    BF16,
    BF16_LIMIT,
    FP16,
    FP16_LIMIT,
    FP32,
    FP32_LIMIT,
    INT4,
    INT8,
    MIX_1,
    MIX_2,
    STEP,
)  # fmt: skip
from stratarec.kernels.prefetch import prefetch
from stratarec.kernels.random.cpu import GOLDEN, mix
from stratarec.kernels.team import BODY, run_team, take

U, W, F = np.uint64, np.uint32, np.float32
# Entries ahead of the one in use.
AHEAD = 12
MAGNITUDE = W(0x7FFFFFFF)
LEAST_NORMAL = F(2.0**-126)


@njit(**BODY)
def finish(weyl, base):
    """32 random bits: murmur3's finaliser of a member of the Weyl sequence of `base`."""
    word = W(weyl ^ W(base >> U(32)))
    word = multiply32(fold32(word, W(16)), W(MIX_1))
    word = multiply32(fold32(word, W(13)), W(MIX_2))
    return fold32(word, W(16))


@njit(**BODY)
def words(base, column):
    """32 random bits of a column."""
    return finish(add32(W(base), multiply32(W(column), W(STEP))), base)


@njit(**BODY)
def fraction(word):
    """24 of the bits as a float in [0, 1)."""
    return F(np.int32(word >> W(8))) * F(2.0**-24)


@njit(**BODY)
def unit(base, column):
    """24 random bits of a column as a float in [0, 1)."""
    return fraction(words(base, column))


@njit(**BODY)
def fits(values, start, D, limit):
    """Whether every magnitude, as float32 bits, is at most `limit`."""
    most = W(0)
    for d in range(D):
        most = max(most, W(float_bits(values[start + d]) & MAGNITUDE))
    return most <= W(limit)


@njit(**BODY)
def encode_fp32(values, start, D, records, at):
    for d in range(D):
        store_f32(records, at + U(4) * d, values[start + d])
    return fits(values, start, D, FP32_LIMIT)


@njit(**BODY)
def encode_fp16(values, start, D, records, at):
    for d in range(D):
        store_u16(records, at + U(2) * d, to_half(values[start + d]))
    return fits(values, start, D, FP16_LIMIT)


@njit(**BODY)
def encode_fp16_stochastic(values, start, D, records, at, base):
    """The neighbours of |w| lie 2^max(e - 10, -24) apart, a power of two: dividing by it is exact."""
    for d in range(D):
        bits = float_bits(values[start + d])
        exponent = max(W(bits & W(0x7F800000)), W(113 << 23))
        step = bits_float(W(exponent - W(10 << 23)))
        steps = bits_float(W(bits & MAGNITUDE)) * bits_float(W(W(264 << 23) - exponent))
        whole = np.int32(steps)
        up = F(1.0) if steps - F(whole) > unit(base, d) else F(0.0)
        rounded = to_half((F(whole) + up) * step)
        store_u16(records, at + U(2) * d, np.uint16(rounded | np.uint16(W(W(bits >> W(16)) & W(0x8000)))))
    return fits(values, start, D, FP16_LIMIT)


@njit(**BODY)
def encode_bf16(values, start, D, records, at):
    for d in range(D):
        bits = float_bits(values[start + d])
        even = W(W(0x7FFF) + W(W(bits >> W(16)) & W(1)))
        store_u16(records, at + U(2) * d, np.uint16(W(W(bits + even) >> W(16))))
    return fits(values, start, D, BF16_LIMIT)


@njit(**BODY)
def encode_bf16_stochastic(values, start, D, records, at, base, column):
    """Sixteen random bits below the kept ones carry into them as often as the dropped part is large."""
    for d in range(D):
        random = W(words(base, column + d) >> W(16))
        store_u16(records, at + U(2) * d, np.uint16(W(W(float_bits(values[start + d]) + random) >> W(16))))
    return fits(values, start, D, BF16_LIMIT)


@njit(**BODY)
def extremes(values, start, D):
    """Least and greatest float of a row, and whether all are finite.

    The order of floats is that of their bits as signed integers with the magnitude of negative ones flipped. Integer
    minima vectorise, and NaN and infinities are the integers outside the finite ones.
    """
    least, most = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for d in range(D):
        bits = np.int32(float_bits(values[start + d]))
        order = np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        least, most = min(least, order), max(most, order)
    finite = least >= np.int32(~FP32_LIMIT) and most <= np.int32(FP32_LIMIT)
    low = bits_float(W(np.int32(least ^ np.int32(W(np.int32(least >> np.int32(31))) >> W(1)))))
    high = bits_float(W(np.int32(most ^ np.int32(W(np.int32(most >> np.int32(31))) >> W(1)))))
    return low, high, finite


@njit(**BODY)
def parameters(low, high, levels, wide):
    """Scale and offset as `RecordCodec` defines them, and whether their storage holds them."""
    low, high = low + F(0.0), high + F(0.0)  # zeros of either sign give the same bytes
    if wide:
        spread = high - low
        scale = max(spread / levels, LEAST_NORMAL) if spread > F(0.0) else F(0.0)
        return scale, low, scale <= F(3.4028235e38)
    if not abs(low) <= F(65504.0):
        return F(0.0), low, False
    offset = to_half(low)
    # One step down: towards zero for a positive number, away from it otherwise; 0 becomes the least negative. Chosen
    # without a branch, here and for the scale: half of all rows would take it, at random.
    down = W(0x8001) if offset == 0 else W(offset + W(0xFFFF) if offset < 0x8000 else offset + W(1))
    offset = np.uint16(select32(from_half(offset) > low, down, W(offset)))
    step = (high - from_half(offset)) / levels
    scale = to_half(step)
    scale = np.uint16(scale + select32(from_half(scale) < step, W(1), W(0)))
    return from_half(scale), from_half(offset), scale < 0x7C00


@njit(**BODY)
def store_parameters(records, at, scale, offset, wide):
    if wide:
        store_f32(records, at, scale)
        store_f32(records, at + U(4), offset)
    else:
        store_u16(records, at, to_half(scale))
        store_u16(records, at + U(2), to_half(offset))


@njit(**BODY)
def measure(form, weights, slot):
    """Scale, offset and inverse of the scale of a slot's codes, and whether the codec can hold them.

    Kinds without codes need nothing.
    """
    kind, _, wide, _, width = form[:5]
    if kind != INT8 and kind != INT4:
        return F(0.0), F(0.0), F(0.0), True
    low, high, finite = extremes(weights, slot * U(width), U(width))
    scale, offset, held = parameters(low, high, F(255.0) if kind == INT8 else F(15.0), wide)
    return scale, offset, F(1.0) / scale if scale > F(0.0) else F(0.0), finite and held


@njit(**BODY)
def code(value, offset, inverse, levels, threshold):
    """Steps above the offset, rounded up when more than `threshold` of a step is left."""
    steps = (value - offset) * inverse
    whole = np.int32(steps)
    up = np.int32(1) if steps - F(whole) > threshold else np.int32(0)
    return W(min(np.int32(whole + up), levels))


@njit(**BODY)
def encode_int8(values, start, D, records, at, offset, inverse, base, stochastic):
    levels = np.int32(255)
    if stochastic:
        # The sequence is carried along: from `column` LLVM would compute it in 64 bits.
        weyl = W(base)
        for d in range(D):
            threshold = fraction(finish(weyl, base))
            records[at + d] = np.uint8(code(values[start + d], offset, inverse, levels, threshold))
            weyl = add32(weyl, W(STEP))
    else:
        for d in range(D):
            records[at + d] = np.uint8(code(values[start + d], offset, inverse, levels, F(0.49999997)))


@njit(**BODY)
def encode_int4(values, start, D, records, at, offset, inverse, base, stochastic):
    levels = np.int32(15)
    H = (D + U(1)) // U(2)
    if stochastic:
        for p in range(D - H):
            first = code(values[start + p], offset, inverse, levels, unit(base, p))
            second = code(values[start + H + p], offset, inverse, levels, unit(base, H + p))
            records[at + p] = np.uint8(W(first | W(second << W(4))))
    else:
        for p in range(D - H):
            first = code(values[start + p], offset, inverse, levels, F(0.49999997))
            second = code(values[start + H + p], offset, inverse, levels, F(0.49999997))
            records[at + p] = np.uint8(W(first | W(second << W(4))))
    if D - H < H:
        p = H - U(1)
        threshold = unit(base, p) if stochastic else F(0.49999997)
        records[at + p] = np.uint8(code(values[start + p], offset, inverse, levels, threshold))


@njit(**BODY)
def encode_state(values, start, count, records, at, base, column, wide):
    if wide:
        return encode_fp32(values, start, count, records, at)
    return encode_bf16_stochastic(values, start, count, records, at, base, column)


@njit(**BODY)
def prefetch_lines(array, first, count, line):
    """Every cache line of ``array[first:first + count]``, `line` elements each."""
    for element in range(first, first + count, line):
        prefetch(array, element)
    prefetch(array, first + count - U(1))


@njit(**BODY)
def prefetch_slot(form, weights, row_state, full_state, clock, slot):
    D = U(form[4])
    prefetch_lines(weights, slot * D, D, U(16))
    if form[5]:
        prefetch(row_state, slot)
    if form[6]:
        floats = U(form[6]) * D
        prefetch_lines(full_state, slot * floats, floats, U(16))
    if form[-2] < form[-1]:
        prefetch(clock, slot)


@njit(**BODY)
def encode_row(form, weights, row_state, full_state, clock, slot, records, at, key, write_key):
    """Encode a slot into the record whose first byte is `at`, returning whether the codec can hold it."""
    (kind, stochastic, wide_parameters, wide_state, width, has_row_state, full_floats, parameters_at, row_state_at,
     full_state_at, clock_at, size) = form  # fmt: skip
    D, full = U(width), U(full_floats) * U(width)
    start = slot * D
    base = mix(key ^ write_key)
    scale, offset, inverse, held = measure(form, weights, slot)
    if kind == FP32:
        held = encode_fp32(weights, start, D, records, at)
    elif kind == FP16:
        if stochastic:
            held = encode_fp16_stochastic(weights, start, D, records, at, base)
        else:
            held = encode_fp16(weights, start, D, records, at)
    elif kind == BF16:
        if stochastic:
            held = encode_bf16_stochastic(weights, start, D, records, at, base, U(0))
        else:
            held = encode_bf16(weights, start, D, records, at)
    elif kind == INT8:
        encode_int8(weights, start, D, records, at, offset, inverse, base, stochastic)
    else:
        encode_int4(weights, start, D, records, at, offset, inverse, base, stochastic)
    if kind == INT8 or kind == INT4:
        store_parameters(records, at + U(parameters_at), scale, offset, wide_parameters)
    if has_row_state:
        held &= encode_state(row_state, slot, U(1), records, at + U(row_state_at), base, D + max(D, full), wide_state)
    if full:
        held &= encode_state(full_state, slot * full, full, records, at + U(full_state_at), base, D, wide_state)
    if clock_at < size:
        store_f32(records, at + U(clock_at), bits_float(W(clock[slot])))
    return held


@njit(**BODY)
def write_key_of(write):
    """What the keys of a write's rows are mixed with."""
    return mix(write * GOLDEN + U(1))


@njit(**BODY)
def encode_chunks(
    member, counter, form, weights, row_state, full_state, clock, slots, records, places, keys, write, bad
):  # fmt: skip
    """Encode slots[i] into the record places[i] of flat `records`; ``bad[chunk]`` is the first entry refused."""
    count, chunks, size, write_key = len(slots), len(bad), U(form[-1]), write_key_of(write)
    while True:
        chunk = take(counter)
        if chunk >= chunks:
            return
        first, last = count * chunk // chunks, count * (chunk + 1) // chunks
        for i in range(first, last):
            j = min(i + AHEAD, last - 1)
            prefetch_slot(form, weights, row_state, full_state, clock, U(slots[j]))
            prefetch_lines(records, U(places[j]) * size, size, U(64))
            slot, at = U(slots[i]), U(places[i]) * size
            if not encode_row(form, weights, row_state, full_state, clock, slot, records, at, keys[i], write_key):
                bad[chunk] = i
                break


@njit(nogil=True, cache=True)
def encode(team, form, weights, row_state, full_state, clock, slots, records, places, keys, write, chunks):
    """Encode every entry; returns the first one that is refused, or their number."""
    counter, bad = np.zeros(1, np.int64), np.full(chunks, len(slots), np.int64)
    given = (counter, form, weights, row_state, full_state, clock, slots, records, places, keys, write, bad)
    run_team(team, encode_chunks, given)
    return bad.min()


@njit(**BODY)
def decode_fp32(records, at, values, start, D):
    for d in range(D):
        values[start + d] = load_f32(records, at + U(4) * d)


@njit(**BODY)
def decode_fp16(records, at, values, start, D):
    for d in range(D):
        values[start + d] = from_half(load_u16(records, at + U(2) * d))


@njit(**BODY)
def decode_bf16(records, at, values, start, D):
    for d in range(D):
        values[start + d] = bits_float(W(W(load_u16(records, at + U(2) * d)) << W(16)))


@njit(**BODY)
def load_parameters(records, at, wide):
    if wide:
        return load_f32(records, at), load_f32(records, at + U(4))
    return from_half(load_u16(records, at)), from_half(load_u16(records, at + U(2)))


@njit(**BODY)
def decode_int8(records, at, parameters, values, start, D, wide):
    scale, offset = load_parameters(records, at + parameters, wide)
    for d in range(D):
        values[start + d] = offset + F(np.int32(records[at + d])) * scale


@njit(**BODY)
def decode_int4(records, at, parameters, values, start, D, wide):
    scale, offset = load_parameters(records, at + parameters, wide)
    H = (D + U(1)) // U(2)
    for p in range(H):
        values[start + p] = offset + F(np.int32(records[at + p] & np.uint8(15))) * scale
    for p in range(D - H):
        values[start + H + p] = offset + F(np.int32(records[at + p] >> np.uint8(4))) * scale


@njit(**BODY)
def decode_row(form, records, at, weights, row_state, full_state, clock, slot):
    """Decode the record whose first byte is `at` into a slot."""
    (kind, _, wide_parameters, wide_state, width, has_row_state, full_floats, parameters_at, row_state_at,
     full_state_at, clock_at, size) = form  # fmt: skip
    D, full = U(width), U(full_floats) * U(width)
    start = slot * D
    if kind == FP32:
        decode_fp32(records, at, weights, start, D)
    elif kind == FP16:
        decode_fp16(records, at, weights, start, D)
    elif kind == BF16:
        decode_bf16(records, at, weights, start, D)
    elif kind == INT8:
        decode_int8(records, at, U(parameters_at), weights, start, D, wide_parameters)
    else:
        decode_int4(records, at, U(parameters_at), weights, start, D, wide_parameters)
    if wide_state:
        if has_row_state:
            row_state[slot] = load_f32(records, at + U(row_state_at))
        if full:
            decode_fp32(records, at + U(full_state_at), full_state, slot * full, full)
    else:
        if has_row_state:
            decode_bf16(records, at + U(row_state_at), row_state, slot, U(1))
        if full:
            decode_bf16(records, at + U(full_state_at), full_state, slot * full, full)
    if clock_at < size:
        clock[slot] = np.int32(float_bits(load_f32(records, at + U(clock_at))))


@njit(**BODY)
def decode_chunks(member, counter, form, records, places, weights, row_state, full_state, clock, slots, chunks):
    """Decode the record places[i] of flat `records` into slots[i]."""
    count, size = len(slots), U(form[-1])
    while True:
        chunk = take(counter)
        if chunk >= chunks:
            return
        first, last = count * chunk // chunks, count * (chunk + 1) // chunks
        for i in range(first, last):
            j = min(i + AHEAD, last - 1)
            prefetch_slot(form, weights, row_state, full_state, clock, U(slots[j]))
            prefetch_lines(records, U(places[j]) * size, size, U(64))
            decode_row(form, records, U(places[i]) * size, weights, row_state, full_state, clock, U(slots[i]))


@njit(nogil=True, cache=True)
def decode(team, form, records, places, weights, row_state, full_state, clock, slots, chunks):
    """Decode every entry."""
    given = (np.zeros(1, np.int64), form, records, places, weights, row_state, full_state, clock, slots, chunks)
    run_team(team, decode_chunks, given)
